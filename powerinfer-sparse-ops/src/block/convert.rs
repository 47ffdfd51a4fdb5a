//! Rows of bytes to f32, and f32 to rows of bytes.

use bytemuck::Pod;
use half::{bf16, f16};

use super::{
    BlockIq4Nl, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1,
    BlockQ5K, BlockQ6K, BlockQ8_0, QK,
};
use crate::WeightType;

/// Decodes one row of weights to f32.
///
/// The result has the bits of ggml's scalar decoder: the same f32 operations in the same order. None is fused here;
/// a C compiler that contracts `d · q + m` to one operation makes a last bit differ. `bytes` needs no alignment.
///
/// # Shapes
/// `bytes` holds `out.len()` weights: `ty.row_bytes(out.len())` bytes.
///
/// # Panics
/// If the lengths disagree or `out.len()` is not a whole number of blocks.
pub fn decode_row(ty: WeightType, bytes: &[u8], out: &mut [f32]) {
    check_row(ty, out.len(), bytes.len());
    match ty {
        WeightType::F32 => decode_blocks(bytes, out, |w: &f32, o: &mut [f32; 1]| o[0] = *w),
        WeightType::F16 => decode_blocks(bytes, out, |w: &f16, o: &mut [f32; 1]| o[0] = w.to_f32()),
        WeightType::BF16 => decode_blocks(bytes, out, |w: &bf16, o: &mut [f32; 1]| o[0] = w.to_f32()),
        WeightType::Q4_0 => decode_blocks(bytes, out, BlockQ4_0::decode),
        WeightType::Q4_1 => decode_blocks(bytes, out, BlockQ4_1::decode),
        WeightType::Q5_0 => decode_blocks(bytes, out, BlockQ5_0::decode),
        WeightType::Q5_1 => decode_blocks(bytes, out, BlockQ5_1::decode),
        WeightType::Q8_0 => decode_blocks(bytes, out, BlockQ8_0::decode),
        WeightType::Q2_K => decode_blocks(bytes, out, BlockQ2K::decode),
        WeightType::Q3_K => decode_blocks(bytes, out, BlockQ3K::decode),
        WeightType::Q4_K => decode_blocks(bytes, out, BlockQ4K::decode),
        WeightType::Q5_K => decode_blocks(bytes, out, BlockQ5K::decode),
        WeightType::Q6_K => decode_blocks(bytes, out, BlockQ6K::decode),
        WeightType::IQ4_NL => decode_blocks(bytes, out, BlockIq4Nl::decode),
        WeightType::MXFP4 => decode_blocks(bytes, out, BlockMxfp4::decode),
    }
}

/// A row that cannot be encoded.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// There is a decoder for this type, but no encoder.
    #[error("cannot encode weights as {ty}; can as F32, F16, BF16, Q8_0 and Q4_0")]
    Unsupported {
        /// The type asked for.
        ty: WeightType,
    },
    /// A weight is infinite or not a number.
    #[error("weight {index} of the row is {value}, which {ty} cannot hold")]
    NotFinite {
        /// The type asked for.
        ty: WeightType,
        /// Position in the row.
        index: usize,
        /// The weight.
        value: f32,
    },
    /// A weight would be, or would make the scale of its block, infinite.
    #[error("weight {index} of the row is {value}, beyond the range of {ty}")]
    TooLarge {
        /// The type asked for.
        ty: WeightType,
        /// Position in the row.
        index: usize,
        /// The weight.
        value: f32,
    },
}

/// Encodes one row of f32 as weights of type `ty`.
///
/// Rounds as ggml's reference quantisers do. F16 and BF16 to nearest even. Q8_0: `d = amax / 127`,
/// `q = round(x · (1 / d))`, halves away from zero. Q4_0: `d = m / −8` with m the first of the weights of largest
/// magnitude, `q = min(15, trunc(x · (1 / d) + 8.5))`. The integers are found with the f32 scale, which is
/// rounded to f16 only when it is stored.
///
/// # Shapes
/// `out` has room for `weights.len()` weights: `ty.row_bytes(weights.len())` bytes.
///
/// # Errors
/// [`EncodeError`] if there is no encoder for `ty`, a weight is not finite, or it is too large for the type. What
/// `out` holds then is unspecified.
///
/// # Panics
/// If the lengths disagree or `weights.len()` is not a whole number of blocks.
pub fn encode_row(ty: WeightType, weights: &[f32], out: &mut [u8]) -> Result<(), EncodeError> {
    check_row(ty, weights.len(), out.len());
    match ty {
        WeightType::F32 => encode_blocks(ty, weights, out, |[w]: &[f32; 1]| Some(*w)),
        WeightType::F16 => encode_blocks(ty, weights, out, |[w]: &[f32; 1]| {
            Some(f16::from_f32(*w)).filter(|h| h.is_finite())
        }),
        WeightType::BF16 => encode_blocks(ty, weights, out, |[w]: &[f32; 1]| {
            Some(bf16::from_f32(*w)).filter(|h| h.is_finite())
        }),
        WeightType::Q8_0 => encode_blocks(ty, weights, out, encode_q8_0),
        WeightType::Q4_0 => encode_blocks(ty, weights, out, encode_q4_0),
        _ => Err(EncodeError::Unsupported { ty }),
    }
}

/// `None` if the scale leaves the range of f16.
fn encode_q8_0(w: &[f32; QK]) -> Option<BlockQ8_0> {
    let amax = w.iter().fold(0.0, |amax: f32, w| amax.max(w.abs()));
    let scale = amax / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let d = f16::from_f32(scale);
    // The casts of this file saturate: a scale so small that its inverse is infinite is stored as 0 anyway.
    d.is_finite().then(|| BlockQ8_0 { d, qs: w.map(|w| (w * inverse).round() as i8) })
}

/// `None` if the scale leaves the range of f16.
fn encode_q4_0(w: &[f32; QK]) -> Option<BlockQ4_0> {
    let peak = w.iter().fold(0.0_f32, |peak, w| if w.abs() > peak.abs() { *w } else { peak });
    let scale = peak / -8.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let q = w.map(|w| ((w * inverse + 8.5) as u8).min(15));
    let d = f16::from_f32(scale);
    d.is_finite().then(|| BlockQ4_0 { d, qs: std::array::from_fn(|j| q[j] | q[j + 16] << 4) })
}

#[inline]
fn decode_blocks<B: Pod, const N: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn(&B, &mut [f32; N])) {
    let (out, _) = out.as_chunks_mut::<N>();
    for (block, out) in bytes.chunks_exact(size_of::<B>()).zip(out) {
        decode(&bytemuck::pod_read_unaligned(block), out);
    }
}

fn encode_blocks<B: Pod, const N: usize>(
    ty: WeightType,
    weights: &[f32],
    out: &mut [u8],
    encode: impl Fn(&[f32; N]) -> Option<B>,
) -> Result<(), EncodeError> {
    if let Some(index) = weights.iter().position(|w| !w.is_finite()) {
        return Err(EncodeError::NotFinite { ty, index, value: weights[index] });
    }
    let (blocks, _) = weights.as_chunks::<N>();
    for (i, (block, out)) in blocks.iter().zip(out.chunks_exact_mut(size_of::<B>())).enumerate() {
        let encoded = encode(block).ok_or_else(|| {
            let largest = (0..N).max_by(|&a, &b| block[a].abs().total_cmp(&block[b].abs())).unwrap_or(0);
            EncodeError::TooLarge { ty, index: N * i + largest, value: block[largest] }
        })?;
        out.copy_from_slice(bytemuck::bytes_of(&encoded));
    }
    Ok(())
}

fn check_row(ty: WeightType, n_weights: usize, n_bytes: usize) {
    let expected = ty.row_bytes(n_weights);
    assert!(
        expected == Some(n_bytes),
        "a row of {n_weights} weights in {ty} blocks of {} needs {expected:?} bytes, got {n_bytes}",
        ty.block_len()
    );
}
