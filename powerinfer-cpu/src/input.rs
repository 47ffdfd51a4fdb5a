//! The vectors that weights are multiplied with: f32, and their 8-bit forms.
//!
//! Which form a matrix reads depends on its type alone ([`Forms::of`]). A form is made once per layer and step
//! and shared by every row of weights.

use bytemuck::Zeroable;
use powerinfer_sparse_ops::WeightType;
use powerinfer_sparse_ops::block::BlockQ8K;

use crate::aligned::Aligned;
use crate::planar::{BLOCK, GROUP, PADDED_TO, PlanarX};
use crate::pool::Pool;

/// A block of 32 values `x ≈ d · q`: the scale `max |x| / 127`, rounded to f16 as the file format of such blocks has
/// it, and the integers, ties to even.
fn quantize_32(x: &[f32; 32]) -> (f32, [i8; 32]) {
    let (max, fault) = max_abs(x);
    let inverse = if max == 0.0 { 0.0 } else { 127.0 / max };
    let q = x.map(|x| round(x * inverse));
    (half::f16::from_f32(max / 127.0).to_f32() + fault, q)
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
    /// `[n_rows, n_pad]`, in the order of [`planar`](crate::planar).
    q: Aligned<i8>,
    /// `[n_rows, n_pad / 32]`.
    d: Aligned<f32>,
    /// `[n_rows, n_pad / 32]`.
    sums: Aligned<i32>,
    /// `[n_rows, n_cols / 256]`.
    x8k: Vec<BlockQ8K>,
}

impl InputBuffers {
    /// Makes room for `n_rows` vectors of up to `n_cols` values.
    pub(crate) fn reserve(&mut self, n_rows: usize, n_cols: usize) {
        let n = n_rows * n_cols.next_multiple_of(PADDED_TO);
        self.q.grow(n);
        self.d.grow(n / BLOCK);
        self.sums.grow(n / BLOCK);
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
        let n_rows = x.len() / n_cols;
        let n_pad = n_cols.next_multiple_of(PADDED_TO);
        let (mut n8, mut n8k) = (0, 0);
        if forms.x8 && n_cols.is_multiple_of(BLOCK) {
            n8 = n_rows * n_pad;
            let parts = (&mut self.q[..n8], &mut self.d[..n8 / BLOCK], &mut self.sums[..n8 / BLOCK]);
            planar(pool, x, n_cols, n_pad, parts);
        }
        if forms.x8k && n_cols.is_multiple_of(256) {
            // Blocks of a piece: enough that handing it out costs little beside it.
            const PIECE: usize = 8;
            n8k = x.len() / 256;
            pool.run_pieces(&mut self.x8k[..n8k], PIECE, |piece, out| {
                let x = &x.as_chunks::<256>().0[piece * PIECE..];
                out.iter_mut().zip(x).for_each(|(out, x)| *out = quantize_k(x));
            });
        }
        Input {
            n_cols,
            n_pad,
            x,
            q: &self.q[..n8],
            d: &self.d[..n8 / BLOCK],
            sums: &self.sums[..n8 / BLOCK],
            x8k: &self.x8k[..n8k],
        }
    }
}

/// Fills integers, scales and sums of [`PlanarX`] for every row of `x`, zeros in the padding.
fn planar(
    pool: &mut Pool,
    x: &[f32],
    n_cols: usize,
    n_pad: usize,
    (q, d, sums): (&mut [i8], &mut [f32], &mut [i32]),
) {
    let n_blocks = n_pad / BLOCK;
    pool.run_zipped((q, n_pad), (d, n_blocks), (sums, n_blocks), |row, q, d, sums| {
        let x = x[row * n_cols..][..n_cols].as_chunks::<BLOCK>().0;
        let halves = q.as_chunks_mut::<{ BLOCK / 2 }>().0;
        for b in 0..n_blocks {
            let (scale, values) = x.get(b).map_or((0.0, [0; BLOCK]), quantize_32);
            let at = b / GROUP * (2 * GROUP) + b % GROUP;
            halves[at].copy_from_slice(&values[..BLOCK / 2]);
            halves[at + GROUP].copy_from_slice(&values[BLOCK / 2..]);
            d[b] = scale;
            sums[b] = values.iter().map(|&q| i32::from(q)).sum();
        }
    });
}

/// A batch of vectors `[n_rows, n_cols]` in the forms that were asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a> {
    n_cols: usize,
    n_pad: usize,
    x: &'a [f32],
    q: &'a [i8],
    d: &'a [f32],
    sums: &'a [i32],
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

    /// All vectors as they are, `[n_rows, n_cols]`.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn all_f32(&self) -> &'a [f32] {
        self.x
    }

    /// Some vectors in blocks of 32.
    #[inline]
    pub(crate) fn x8s<const T: usize>(&self, rows: [usize; T]) -> [PlanarX<'a>; T] {
        let n = self.n_pad;
        let mut out = [PlanarX { q: &[], d: &[], sums: &[] }; T];
        for t in 0..T {
            let (at, block) = (rows[t] * n, rows[t] * n / BLOCK);
            out[t] = PlanarX {
                q: &self.q[at..at + n],
                d: &self.d[block..block + n / BLOCK],
                sums: &self.sums[block..block + n / BLOCK],
            };
        }
        out
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
        let x: Vec<f32> = (0..1536).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.3).collect();
        let mut pool = Pool::try_new(2).unwrap();
        let mut buffers = InputBuffers::default();
        buffers.reserve(2, 768);
        buffers.q.fill(1);
        let input = buffers.prepare(&mut pool, &x, 768, Forms { x8: true, x8k: true });
        assert_eq!((input.n_rows(), input.n_cols()), (2, 768));
        for row in 0..2 {
            let [x8] = input.x8s([row]);
            let mut expected = [BlockQ8_0::zeroed(); 24];
            quantize_q8_0(input.f32s([row])[0], &mut expected);
            for (i, e) in expected.iter().enumerate() {
                let q = x8.values(i);
                assert_eq!((x8.d[i], &q[..]), (e.d.to_f32(), &e.qs[..]));
                assert_eq!(x8.sums[i], q.iter().map(|&q| i32::from(q)).sum::<i32>());
                for (j, q) in q.into_iter().enumerate() {
                    // Half a step, and the rounding of the scale to f16 (2^-11) over 127 steps.
                    let x = input.f32s([row])[0][i * 32 + j];
                    assert!((x - x8.d[i] * f32::from(q)).abs() <= x8.d[i] * 0.57);
                }
            }
            assert!((24..32).all(|i| x8.d[i] == 0.0 && x8.sums[i] == 0 && x8.values(i) == [0; 32]));
            let mut expected = [BlockQ8K::zeroed(); 3];
            quantize_q8_k(input.f32s([row])[0], &mut expected);
            assert_eq!(input.x8ks([row])[0], expected);
        }
    }

    #[test]
    fn zeros_stay_zero_and_faults_are_not_hidden() {
        assert_eq!(quantize_32(&[0.0; 32]).0, 0.0);
        let mut x = [1.0; 32];
        x[5] = f32::NAN;
        assert!(quantize_32(&x).0.is_nan());
        let mut x = [1.0; 256];
        x[200] = f32::INFINITY;
        assert!(!quantize_k(&x).d.is_finite());
    }
}
