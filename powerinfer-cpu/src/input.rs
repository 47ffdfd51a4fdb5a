//! The vectors that weights are multiplied with: f32, and their 8-bit forms.
//!
//! Which form a matrix reads depends on its type alone ([`Forms::of`]). A form is made once per layer and step
//! and shared by every row of weights.

use bytemuck::Zeroable;
use powerinfer_sparse_ops::WeightType;
use powerinfer_sparse_ops::block::BlockQ8K;

use crate::pool::Pool;

/// 32 values as 8-bit integers: `x ≈ d · q`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct BlockX8 {
    /// Scale: `max |x| / 127`, rounded to f16 as the file format of such blocks has it.
    pub(crate) d: f32,
    /// `d · Σ q`, for weight types with an offset.
    pub(crate) sum: f32,
    /// `x / scale`, ties to even.
    pub(crate) q: [i8; 32],
}

impl BlockX8 {
    const ZERO: Self = Self { d: 0.0, sum: 0.0, q: [0; 32] };

    fn quantize(x: &[f32; 32]) -> Self {
        let (max, fault) = max_abs(x);
        let inverse = if max == 0.0 { 0.0 } else { 127.0 / max };
        let q = x.map(|x| round(x * inverse));
        let d = half::f16::from_f32(max / 127.0).to_f32() + fault;
        let sum = q.iter().map(|&q| i32::from(q)).sum::<i32>();
        Self { d, sum: d * sum as f32, q }
    }
}

/// As [`block::quantize_q8_k`](powerinfer_sparse_ops::block::quantize_q8_k), in loops that vectorise.
fn quantize_k(x: &[f32; 256]) -> BlockQ8K {
    let (max, fault) = max_abs(x);
    let Some(&peak) = x.iter().find(|x| x.abs() == max).filter(|_| max != 0.0) else {
        return BlockQ8K { d: fault, ..BlockQ8K::zeroed() };
    };
    let inverse = -128.0 / peak;
    let qs = x.map(|x| round(x * inverse));
    let mut bsums = [0; 16];
    for (sum, q) in bsums.iter_mut().zip(qs.as_chunks::<16>().0) {
        *sum = q.iter().map(|&q| i16::from(q)).sum();
    }
    BlockQ8K { d: 1.0 / inverse + fault, qs, bsums }
}

/// Largest magnitude, and a number that is 0 unless some `x` is infinite or NaN. Integers cannot carry a fault
/// on, so the scale has to.
fn max_abs(x: &[f32]) -> (f32, f32) {
    let mut max = [0f32; 8];
    let mut fault = [0f32; 8];
    for x in x.as_chunks::<8>().0 {
        for lane in 0..8 {
            let a = x[lane].abs();
            max[lane] = if a > max[lane] { a } else { max[lane] };
            fault[lane] += x[lane] * 0.0;
        }
    }
    (max.into_iter().fold(0.0, f32::max), fault.into_iter().sum())
}

/// Nearest integer, ties to even, at most 127, for `|x| ≤ 128`. The sum leaves no bits for a fraction, which is several times
/// faster than `round_ties_even` without SSE4.1.
#[inline]
fn round(x: f32) -> i8 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2^23
    ((x + SHIFT) - SHIFT) as i8
}

/// Which 8-bit forms are wanted besides f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Forms {
    pub(crate) x8: bool,
    pub(crate) x8k: bool,
}

impl Forms {
    /// What a dot product with weights of type `ty` reads.
    pub(crate) fn of(ty: WeightType) -> Self {
        match ty {
            WeightType::Q8_0
            | WeightType::Q4_0
            | WeightType::Q4_1
            | WeightType::Q5_0
            | WeightType::Q5_1
            | WeightType::IQ4_NL
            | WeightType::MXFP4 => Self { x8: true, x8k: false },
            WeightType::Q2_K | WeightType::Q3_K | WeightType::Q4_K | WeightType::Q5_K | WeightType::Q6_K => {
                Self { x8: false, x8k: true }
            }
            _ => Self::default(),
        }
    }

    /// Both together.
    pub(crate) fn and(self, o: Self) -> Self {
        Self { x8: self.x8 | o.x8, x8k: self.x8k | o.x8k }
    }
}

/// Room for the 8-bit forms of a batch.
#[derive(Debug, Default)]
pub(crate) struct InputBuffers {
    x8: Vec<BlockX8>,
    x8k: Vec<BlockQ8K>,
}

impl InputBuffers {
    /// Makes room for `n` values, whatever their rows.
    pub(crate) fn reserve(&mut self, n: usize) {
        self.x8.resize(self.x8.len().max(n / 32), BlockX8::ZERO);
        self.x8k.resize(self.x8k.len().max(n / 256), BlockQ8K::zeroed());
    }

    /// Makes the wanted forms of `x [n_rows, n_cols]`. Forms whose block does not divide `n_cols` are left out:
    /// no weight row of such a type can have this length.
    pub(crate) fn prepare<'a>(
        &'a mut self,
        pool: &mut Pool,
        x: &'a [f32],
        n_cols: usize,
        forms: Forms,
    ) -> Input<'a> {
        // Blocks of a piece: enough that handing it out costs little beside it.
        const PIECE: usize = 64;
        let (mut n8, mut n8k) = (0, 0);
        if forms.x8 && n_cols.is_multiple_of(32) {
            n8 = x.len() / 32;
            pool.run_pieces(&mut self.x8[..n8], PIECE, |piece, out| {
                let x = &x.as_chunks::<32>().0[piece * PIECE..];
                out.iter_mut().zip(x).for_each(|(out, x)| *out = BlockX8::quantize(x));
            });
        }
        if forms.x8k && n_cols.is_multiple_of(256) {
            n8k = x.len() / 256;
            pool.run_pieces(&mut self.x8k[..n8k], PIECE / 8, |piece, out| {
                let x = &x.as_chunks::<256>().0[piece * (PIECE / 8)..];
                out.iter_mut().zip(x).for_each(|(out, x)| *out = quantize_k(x));
            });
        }
        Input { n_cols, x, x8: &self.x8[..n8], x8k: &self.x8k[..n8k] }
    }
}

/// A batch of vectors `[n_rows, n_cols]` in the forms that were asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a> {
    n_cols: usize,
    x: &'a [f32],
    x8: &'a [BlockX8],
    x8k: &'a [BlockQ8K],
}

impl<'a> Input<'a> {
    /// Number of vectors.
    pub(crate) fn n_rows(&self) -> usize {
        self.x.len() / self.n_cols
    }

    /// Length of a vector.
    pub(crate) fn n_cols(&self) -> usize {
        self.n_cols
    }

    /// Some vectors as they are.
    #[inline]
    pub(crate) fn f32s<const T: usize>(&self, rows: [usize; T]) -> [&'a [f32]; T] {
        rows_of(self.x, self.n_cols, rows)
    }

    /// Some vectors in blocks of 32.
    #[inline]
    pub(crate) fn x8s<const T: usize>(&self, rows: [usize; T]) -> [&'a [BlockX8]; T] {
        rows_of(self.x8, self.n_cols / 32, rows)
    }

    /// Some vectors in blocks of 256.
    #[inline]
    pub(crate) fn x8ks<const T: usize>(&self, rows: [usize; T]) -> [&'a [BlockQ8K]; T] {
        rows_of(self.x8k, self.n_cols / 256, rows)
    }
}

/// Some rows of `n` elements. A loop, since `map` on arrays is not always inlined, and this runs for each row of
/// weights.
#[inline(always)]
fn rows_of<B, const T: usize>(x: &[B], n: usize, rows: [usize; T]) -> [&[B]; T] {
    let mut out: [&[B]; T] = [&[]; T];
    for t in 0..T {
        out[t] = &x[rows[t] * n..][..n];
    }
    out
}

#[cfg(test)]
mod tests {
    use powerinfer_sparse_ops::block::{BlockQ8_0, quantize_q8_0, quantize_q8_k};

    use super::*;

    #[test]
    fn rounding_is_to_nearest_with_ties_to_even() {
        for i in -1270..=1270 {
            let x = i as f32 / 10.0;
            assert_eq!(f32::from(round(x)), x.round_ties_even(), "{x}");
        }
        assert_eq!([0.5, 1.5, 2.5, -0.5, -1.5].map(round), [0, 2, 2, 0, -2]);
    }

    #[test]
    fn values_come_back_within_half_a_step() {
        let x: Vec<f32> = (0..512).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.3).collect();
        let mut pool = Pool::try_new(2).unwrap();
        let mut buffers = InputBuffers::default();
        buffers.reserve(512);
        let input = buffers.prepare(&mut pool, &x, 256, Forms { x8: true, x8k: true });
        assert_eq!((input.n_rows(), input.n_cols()), (2, 256));
        for row in 0..2 {
            for (i, x) in input.f32s([row])[0].iter().enumerate() {
                let b = &input.x8s([row])[0][i / 32];
                // Half a step, and the rounding of the scale to f16 (2^-11) over 127 steps.
                assert!((x - b.d * f32::from(b.q[i % 32])).abs() <= b.d * 0.57);
            }
            let b = &input.x8s([row])[0][3];
            assert_eq!(b.sum, b.d * b.q.iter().map(|&q| f32::from(q)).sum::<f32>());
            let mut expected = [BlockQ8K::zeroed()];
            quantize_q8_k(input.f32s([row])[0], &mut expected);
            assert_eq!(input.x8ks([row])[0], expected);
            let mut expected = [BlockQ8_0::zeroed(); 8];
            quantize_q8_0(input.f32s([row])[0], &mut expected);
            for (b, e) in input.x8s([row])[0].iter().zip(&expected) {
                assert_eq!((b.d, b.q), (e.d.to_f32(), e.qs));
            }
        }
    }

    #[test]
    fn zeros_stay_zero_and_faults_are_not_hidden() {
        assert_eq!(BlockX8::quantize(&[0.0; 32]).d, 0.0);
        let mut x = [1.0; 32];
        x[5] = f32::NAN;
        assert!(BlockX8::quantize(&x).d.is_nan());
        let mut x = [1.0; 256];
        x[200] = f32::INFINITY;
        assert!(!quantize_k(&x).d.is_finite());
    }
}
