//! What vectors become before they meet quantised weights.
//!
//! Integer dots need both sides as integers, so the vector is rounded to 8 bits first. The rules below are those
//! of the original engine's SIMD code; logits agree with it only if they are followed to the last bit. Halves
//! round to even, as the vector instructions do.
//!
//! Vectors are expected to be finite. What a block with other values becomes is unspecified, but nothing panics.

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{BlockQ8_0, QK, QK_K};
use crate::WeightType;

/// What a vector is rounded to before its product with weights of some type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationType {
    /// Not rounded.
    F32,
    /// [`round_f16`].
    F16,
    /// [`quantize_q8_0`].
    Q8_0,
    /// [`quantize_q8_1`].
    Q8_1,
    /// [`quantize_q8_k`].
    Q8K,
}

impl WeightType {
    /// What the original engine rounds a vector to before its product with weights of this type.
    ///
    /// It does not know BF16, IQ4_NL and MXFP4: the first is given the unrounded vector, the others, as in
    /// later ggml, Q8_0.
    pub const fn activation_type(self) -> ActivationType {
        match self {
            Self::F32 | Self::BF16 => ActivationType::F32,
            Self::F16 => ActivationType::F16,
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::IQ4_NL | Self::MXFP4 => ActivationType::Q8_0,
            Self::Q4_1 | Self::Q5_1 => ActivationType::Q8_1,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K => ActivationType::Q8K,
        }
    }
}

/// 32 values of 8 bits and their sum, for weights that have a minimum. Never in a file.
///
/// ```text
/// byte  0        4        8                        40
///       | d      | s      | qs[0] … qs[31]          |
/// ```
/// `x = d · q`, `s = d · Σ q`. With weights `w = dw · q' + m` the dot of a block is `dw · d · Σ q' q + m · s`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ8_1 {
    /// Scale.
    pub d: f32,
    /// Sum of the rounded values.
    pub s: f32,
    /// One value a byte.
    pub qs: [i8; QK],
}

/// 256 values of 8 bits and the sums of 16 each, for the K types. Never in a file.
///
/// ```text
/// byte  0        4                        260                      292
///       | d      | qs[0] … qs[255]         | bsums[0] … bsums[15]   |
/// ```
/// `x = d · q`; `bsums[g]` is the sum of `qs[16g]` to `qs[16g + 15]`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ8K {
    /// Scale; negative where the value of largest magnitude is positive.
    pub d: f32,
    /// One value a byte.
    pub qs: [i8; QK_K],
    /// Sums of 16 values.
    pub bsums: [i16; 16],
}

/// Rounds a vector to Q8_0: `q = round(x · (127 / amax))` and `d = amax / 127` as f16.
///
/// Not the rounding of weights in [`encode_row`](super::encode_row), which multiplies by `1 / (amax / 127)` and
/// rounds halves away from zero.
///
/// # Shapes
/// `x [32 · out.len()]`
///
/// # Panics
/// If `x` is not 32 values per block.
pub fn quantize_q8_0(x: &[f32], out: &mut [BlockQ8_0]) {
    for (x, out) in blocks::<QK>(x, out.len()).iter().zip(out) {
        let (scale, qs) = round_32(x);
        *out = BlockQ8_0 { d: f16::from_f32(scale), qs };
    }
}

/// Rounds a vector to Q8_1: as [`quantize_q8_0`], with the scale kept in f32 and the sum `d · Σ q` beside it.
///
/// # Shapes
/// `x [32 · out.len()]`
///
/// # Panics
/// If `x` is not 32 values per block.
pub fn quantize_q8_1(x: &[f32], out: &mut [BlockQ8_1]) {
    for (x, out) in blocks::<QK>(x, out.len()).iter().zip(out) {
        let (d, qs) = round_32(x);
        let sum: i32 = qs.iter().map(|&q| i32::from(q)).sum();
        *out = BlockQ8_1 { d, s: d * sum as f32, qs };
    }
}

/// Rounds a vector to Q8_K: `q = min(127, round(x · (−128 / m)))` and `d = 1 / (−128 / m)`, m the first of the
/// values of largest magnitude, with its sign.
///
/// # Shapes
/// `x [256 · out.len()]`
///
/// # Panics
/// If `x` is not 256 values per block.
pub fn quantize_q8_k(x: &[f32], out: &mut [BlockQ8K]) {
    for (x, out) in blocks::<QK_K>(x, out.len()).iter().zip(out) {
        let peak = x.iter().fold(0.0_f32, |peak, x| if x.abs() > peak.abs() { *x } else { peak });
        if peak == 0.0 {
            *out = BlockQ8K::zeroed();
            continue;
        }
        let inverse = -128.0 / peak;
        let qs = x.map(|x| round_to_i8(x * inverse));
        let bsums = std::array::from_fn(|g| qs[16 * g..16 * g + 16].iter().map(|&q| i16::from(q)).sum());
        *out = BlockQ8K { d: 1.0 / inverse, qs, bsums };
    }
}

/// Rounds each value to the nearest f16, halves to even.
pub fn round_f16(x: &mut [f32]) {
    for x in x {
        *x = f16::from_f32(*x).to_f32();
    }
}

/// `amax / 127`, and the integers `round(x · (127 / amax))`.
#[inline]
fn round_32(x: &[f32; QK]) -> (f32, [i8; QK]) {
    let amax = x.iter().fold(0.0, |amax: f32, x| amax.max(x.abs()));
    let inverse = if amax == 0.0 { 0.0 } else { 127.0 / amax };
    (amax / 127.0, x.map(|x| round_to_i8(x * inverse)))
}

/// The nearest integer, halves to even, at most 127 and at least −128.
///
/// Adding 1.5 · 2^23 leaves no bits for a fraction, so the addition itself rounds; exact below 2^22. Unlike
/// `round_ties_even` this needs no instruction newer than SSE2 to be vectorised.
#[inline]
fn round_to_i8(x: f32) -> i8 {
    const SHIFT: f32 = 12_582_912.0;
    ((x + SHIFT) - SHIFT) as i8
}

fn blocks<const N: usize>(x: &[f32], n_blocks: usize) -> &[[f32; N]] {
    let (blocks, rest) = x.as_chunks::<N>();
    assert!(
        rest.is_empty() && blocks.len() == n_blocks,
        "{n_blocks} blocks of {N} cannot hold {} values",
        x.len()
    );
    blocks
}
