//! Which rows of a gate cannot be positive for a vector: told from an 8-bit copy of the gate, and never wrongly.
//!
//! A ReLU gate of F16 or BF16 gets a copy `c` of its rows, a little over 8 bits a weight, in the form of
//! [`planar`](crate::planar). Most rows are far enough below zero for the copy to show it, and then the row itself need
//! not be read: its gate is zero whatever the last bits are.
//!
//! ```text
//! row      w = c + r         W ≥ ‖w‖, R ≥ ‖r‖                   kept for each row, rounded up
//! vector   x = a + b + e     a: x in 8 bits; b: what is missing, in 8 bits again; e: what is still missing
//!                            X ≥ ‖x‖, A ≥ ‖a‖ + ‖b‖, E ≥ ‖e‖     once for each vector
//! score    s = fl(c·a) + fl(c·b)
//! ```
//!
//! Most rows are decided by `a` alone, for which `b = 0` and `e = x − a` below; `b` is for those that this leaves open.
//!
//! Claim: `fl(w·x) ≤ s + R·(X + E + γA) + W·(E + γ(X + A)) + n·2^-148`, with `γ = m / (2^24 − m)`, `m = n + 8`,
//! where `fl` is the f32 result of a kernel. A row for which the right side is negative is silent.
//!
//! 1. `w·x = c·a + c·b + c·e + r·x`. By Cauchy and Schwarz `|r·x| ≤ R·X` and `|c·e| ≤ ‖c‖·E`; `‖c‖ ≤ W + R`.
//! 2. A kernel adds up `n` products in some order. Each passes at most `n` roundings of half a unit `2^-24`, so that
//!    `|fl(w·x) − w·x| ≤ γ Σ|w·x| ≤ γ·W·X`, again by Cauchy and Schwarz, plus half the smallest number, `2^-150`, for
//!    each product that underflows.
//! 3. Integers of a block add up exactly; what they are multiplied with is a product of two f16 numbers. Nothing
//!    underflows, each term passes at most `m` roundings, and `|fl(c·a) − c·a| ≤ γ·‖c‖·‖a‖`; the same for `b`.
//! 4. Nothing overflows, since products are not tested unless `(W + R)·(X + A) < 10^38`, which bounds every sum
//!    on the way. NaN and infinities in a row or a vector are in its norms, and make the comparisons false.
//!
//! Norms are computed in f64 and enlarged by a millionth, far more than they and the test itself lose.

use std::sync::Arc;

use powerinfer_sparse_ops::{WeightMatrix, WeightType};

use crate::input::{Forms, Input, InputBuffers};
use crate::kernel::{Row, dot, prefetch};
use crate::level::CpuLevel;
use crate::memory::Memory;
use crate::planar::{BLOCK, GROUP, Planar};
use crate::pool::Pool;
use crate::rows::{Rows, Source};

/// `b` is computed on values this much larger, so that its scales, about those of `a`, are no subnormal f16 numbers.
const ENLARGED: f32 = 256.0;

/// More than the norms, and the test, lose in f64.
const UP: f64 = 1.0 + 1.0 / (1 << 20) as f64;

/// What products stay below for certain; a third of the largest f32.
const LARGEST: f64 = 1e38;

/// What is kept of a row besides its copy: `R` and `W` of the module text.
pub(crate) type Norms = [f32; 2];

/// The copy of a gate and the norms of its rows.
#[derive(Clone, Debug)]
pub(crate) struct Certificate {
    /// Q8_0, `[n_ff, n_embd]`.
    copy: Rows,
    memory: Arc<Memory>,
    /// Offset of the norms.
    norms_at: usize,
}

impl Certificate {
    /// The copy, and the norms that lie at `norms_at` in `memory`.
    pub(crate) fn new(copy: Rows, memory: Arc<Memory>, norms_at: usize) -> Self {
        Self { copy, memory, norms_at }
    }

    /// Whether there can be one for this gate.
    pub(crate) fn exists_for(gate: &WeightMatrix) -> bool {
        matches!(gate.ty(), WeightType::F32 | WeightType::F16 | WeightType::BF16)
            && gate.n_cols().is_multiple_of(BLOCK)
    }

    /// Whether one is worth its memory, by what mode `exact` gains in tokens/s for whole F16 models, one thread on a Xeon
    /// of CPU model 207 that others used as well. With AVX-512: 20 % with rows of 2048 weights and 5 % with 768 (synthetic
    /// models, 10 % of the neurons fire), nothing with 576 (a trained one, 18 %). With AVX2, which is busy computing:
    /// 3 %, nothing, and a loss. BF16 and more threads than two were not measured.
    pub(crate) fn pays_for(gate: &WeightMatrix, level: CpuLevel) -> bool {
        #[cfg(target_arch = "x86_64")]
        let is_fast = matches!(level, CpuLevel::Avx512(_));
        #[cfg(not(target_arch = "x86_64"))]
        let is_fast = {
            let _ = level;
            false
        };
        is_fast && gate.ty() != WeightType::F32 && gate.n_cols() >= 1024
    }

    /// Bytes of the one for this gate, but for what lies between its parts.
    pub(crate) fn n_bytes_for(gate: &Source) -> usize {
        gate.n_rows() * (copy_bytes(gate.matrix().n_cols()) + size_of::<Norms>())
    }

    /// Bytes that are read of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.copy.row_bytes() + size_of::<Norms>()
    }

    fn norms(&self) -> &[Norms] {
        let n_bytes = self.copy.n_rows() * size_of::<Norms>();
        bytemuck::cast_slice(&self.memory.bytes()[self.norms_at..][..n_bytes])
    }

    /// Moves the neurons that may fire to the front, in order, and returns how many they are.
    pub(crate) fn keep(&self, level: CpuLevel, x: &CertifiedInput<'_>, neurons: &mut [u32]) -> usize {
        let norms = self.norms();
        let mut kept = 0;
        for i in 0..neurons.len() {
            if let Some(&next) = neurons.get(i + 2) {
                prefetch(&self.copy, next as usize);
            }
            let neuron = neurons[i];
            neurons[kept] = neuron;
            kept +=
                usize::from(!x.proves_silent(level, self.copy.row(neuron as usize), norms[neuron as usize]));
        }
        kept
    }
}

/// Writes the copy of a row, and returns its norms.
///
/// # Shapes
/// `row [n_cols]`, `quants [n_cols]`, `scales [n_cols / 32]`; see [`planar`](crate::planar).
pub(crate) fn copy_row(row: &[f32], quants: &mut [u8], scales: &mut [u16]) -> Norms {
    let (mut residual, mut whole) = ([0f64; 8], [0f64; 8]);
    let blocks = row.as_chunks::<BLOCK>().0;
    for ((group, out), scales) in
        blocks.chunks(GROUP).zip(quants.chunks_mut(GROUP * BLOCK)).zip(scales.chunks_mut(GROUP))
    {
        let (first, second) = out.split_at_mut(group.len() * BLOCK / 2);
        for (i, block) in group.iter().enumerate() {
            let d = half::f16::from_f32(max_abs(block) / 127.0).min(half::f16::MAX);
            scales[i] = d.to_bits();
            let d = d.to_f32();
            let inverse = if d == 0.0 { 0.0 } else { d.recip() };
            let shifted = block.map(|w| shifted(w * inverse));
            let mut r = [0.0; BLOCK];
            for j in 0..BLOCK {
                // Of 11 and 7 bits, so the product is exact, and the difference is rounded once.
                r[j] = block[j] - d * (shifted[j] - SHIFT);
            }
            add_squares(&mut residual, &r);
            add_squares(&mut whole, block);
            let unsigned = shifted.map(|q| q.to_bits() as u8 ^ 0x80);
            first[i * BLOCK / 2..][..BLOCK / 2].copy_from_slice(&unsigned[..BLOCK / 2]);
            second[i * BLOCK / 2..][..BLOCK / 2].copy_from_slice(&unsigned[BLOCK / 2..]);
        }
    }
    [residual, whole].map(|squares| ((norm(squares) * UP) as f32).next_up())
}

/// 1.5 · 2^23: a number that it is added to has no bits for a fraction, and its integer in the lowest ones.
const SHIFT: f32 = 12_582_912.0;

/// [`SHIFT`] and the nearest integer from −127 to 127; NaN for NaN.
#[inline]
fn shifted(x: f32) -> f32 {
    let x = if x < -127.0 { -127.0 } else { x };
    let x = if x > 127.0 { 127.0 } else { x };
    x + SHIFT
}

/// In lanes, so that the loop vectorises.
#[inline]
fn add_squares(sums: &mut [f64; 8], values: &[f32; BLOCK]) {
    for eight in values.as_chunks::<8>().0 {
        for lane in 0..8 {
            let value = f64::from(eight[lane]);
            sums[lane] += value * value;
        }
    }
}

/// The largest magnitude, NaN aside.
fn max_abs(block: &[f32; BLOCK]) -> f32 {
    let mut max = [0f32; 8];
    for eight in block.as_chunks::<8>().0 {
        for lane in 0..8 {
            let size = eight[lane].abs();
            max[lane] = if size > max[lane] { size } else { max[lane] };
        }
    }
    max.into_iter().fold(0.0, f32::max)
}

fn norm<const N: usize>(squares: [f64; N]) -> f64 {
    squares.into_iter().sum::<f64>().sqrt()
}

/// Room for the forms of a vector.
#[derive(Debug, Default)]
pub(crate) struct CertifiedBuffers {
    buffers: InputBuffers,
    /// `x`, and the enlarged difference to its 8-bit form, `[2, n]`.
    planes: Vec<f32>,
}

/// A vector in the forms that the test needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CertifiedInput<'a> {
    /// `a` and the enlarged `b`.
    planes: Input<'a>,
    /// With `a` alone.
    coarse: Slack,
    /// With both.
    fine: Slack,
}

impl CertifiedInput<'_> {
    /// Whether a row with this copy has a gate below zero for certain.
    #[inline]
    fn proves_silent(&self, level: CpuLevel, copy: Row<'_>, norms: Norms) -> bool {
        let norms = norms.map(f64::from);
        let [a] = dot(level, copy, &self.planes, [0]).map(f64::from);
        if self.coarse.proves_silent(a, norms) {
            return true;
        }
        // The last bits of `x` hardly ever bring down what is not below zero.
        a < 0.0 && {
            let [b] = dot(level, copy, &self.planes, [1]).map(f64::from);
            self.fine.proves_silent(a + b / f64::from(ENLARGED), norms)
        }
    }
}

impl CertifiedBuffers {
    /// Makes room for vectors of up to `n` values.
    pub(crate) fn reserve(&mut self, n: usize) {
        self.buffers.reserve(2, n);
        self.planes.resize(self.planes.len().max(2 * n), 0.0);
    }

    /// Makes the forms of a vector of whole blocks.
    pub(crate) fn prepare(&mut self, pool: &mut Pool, x: &[f32]) -> CertifiedInput<'_> {
        let n = x.len();
        let forms = Forms { x8: true, x8k: false };
        let planes = &mut self.planes[..2 * n];
        let (first, second) = planes.split_at_mut(n);
        first.copy_from_slice(x);
        let a = self.buffers.prepare(pool, first, n, forms);
        for_blocks(&a, 0, x, |block, d, a, x| {
            for j in 0..BLOCK {
                second[block * BLOCK + j] = (x[j] - d * f32::from(a[j])) * ENLARGED;
            }
        });
        let planes = self.buffers.prepare(pool, planes, n, forms);
        let [coarse, fine] = slacks(x, &planes);
        CertifiedInput { planes, coarse, fine }
    }
}

/// Calls `f(block, scale, integers, x)` for each block of the 8-bit form of a row of `input`.
fn for_blocks(
    input: &Input<'_>,
    row: usize,
    x: &[f32],
    mut f: impl FnMut(usize, f32, &[i8; BLOCK], &[f32; BLOCK]),
) {
    let [x8] = input.x8s([row]);
    for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        let mut q = [0; BLOCK];
        let [first, second] = x8.block(block);
        q[..BLOCK / 2].copy_from_slice(first);
        q[BLOCK / 2..].copy_from_slice(second);
        f(block, x8.d[block], &q, x);
    }
}

/// What the test of a row takes from the vector.
#[derive(Clone, Copy, Debug)]
struct Slack {
    /// `X + E + γA`.
    of_residual: f64,
    /// `E + γ(X + A)`.
    of_row: f64,
    /// `X + A`.
    norm: f64,
    /// `n·2^-148`.
    least: f64,
}

impl Slack {
    /// From `n`, `X`, `A` and `E`.
    fn new(n: usize, x: f64, parts: f64, rest: f64) -> Self {
        let n = n as f64;
        let m = n + 8.0;
        let gamma = m / (f64::from(1 << 24) - m);
        // A difference may lose a bit of what it is a difference of.
        let rest = rest + (x + parts) * 2f64.powi(-50);
        Self {
            of_residual: (x + rest + gamma * parts) * UP,
            of_row: (rest + gamma * (x + parts)) * UP,
            norm: x + parts,
            least: n * 2f64.powi(-148),
        }
    }

    /// Whether a row with this score and these norms has a gate below zero for certain.
    #[inline]
    fn proves_silent(&self, score: f64, [residual, row]: [f64; 2]) -> bool {
        let bound = residual * self.of_residual + row * self.of_row + self.least;
        score + bound < 0.0 && (row + residual) * self.norm < LARGEST
    }
}

/// What tests with the first plane and with both take from `x`, of which `planes` holds the forms.
fn slacks(x: &[f32], planes: &Input<'_>) -> [Slack; 2] {
    // x, a, x − a, b, x − a − b.
    let mut squares = [[0f64; 8]; 5];
    let [b] = planes.x8s([1]);
    for_blocks(planes, 0, x, |block, d_a, a, x| {
        let d_b = f64::from(b.d[block]) / f64::from(ENLARGED);
        let [b_first, b_second] = b.block(block);
        for j in 0..BLOCK {
            let b = if j < BLOCK / 2 { b_first[j] } else { b_second[j - BLOCK / 2] };
            let (x, a, b) = (f64::from(x[j]), f64::from(d_a) * f64::from(a[j]), d_b * f64::from(b));
            for (squares, value) in squares.iter_mut().zip([x, a, x - a, b, x - a - b]) {
                squares[j % 8] += value * value;
            }
        }
    });
    let [x_norm, a, rest_of_a, b, rest] = squares.map(|squares| norm(squares) * UP);
    [Slack::new(x.len(), x_norm, a, rest_of_a), Slack::new(x.len(), x_norm, a + b, rest)]
}

/// Bytes of the copy of a row.
pub(crate) fn copy_bytes(n_cols: usize) -> usize {
    Planar::Q8_0.quant_bytes(n_cols) + n_cols / BLOCK * size_of::<u16>()
}

#[cfg(test)]
mod tests {
    use powerinfer_sparse_ops::WeightBytes;
    use powerinfer_testing::tiny::{Random, encoded};

    use super::*;
    use crate::kernel::dot_f32;
    use crate::memory::anonymous;
    use crate::rows::Planner;

    const TYPES: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::BF16];

    fn certificate(gate: &WeightMatrix) -> Certificate {
        let mut planner = Planner::default();
        let planned = planner.certificate(&gate.into());
        assert!(planner.n_bytes() >= Certificate::n_bytes_for(&gate.into()));
        let mut memory = anonymous(planner.n_bytes(), false).unwrap();
        planner.fill(&mut Pool::try_new(2).unwrap(), &mut memory, &mut |_| {});
        planner.filled(Memory::Anonymous(memory.make_read_only().unwrap())).certificate(planned)
    }

    /// As [`encoded`], for values that are not finite or will not be.
    fn hostile(name: &str, ty: WeightType, n_cols: usize, values: &[f32]) -> WeightMatrix {
        let n_rows = values.len() / n_cols;
        let of = |to_bits: &dyn Fn(f32) -> u16| {
            let bytes = values.iter().flat_map(|&v| to_bits(v).to_ne_bytes()).collect();
            WeightMatrix::try_new(name, ty, n_rows, n_cols, WeightBytes::from_vec(bytes)).unwrap()
        };
        match ty {
            WeightType::F16 => of(&|v| half::f16::from_f32(v).to_bits()),
            WeightType::BF16 => of(&|v| half::bf16::from_f32(v).to_bits()),
            _ => WeightMatrix::from_f32(name, n_rows, n_cols, values.to_vec()).unwrap(),
        }
    }

    /// Tests every row with every vector; none may be dropped whose gate, as computed from the row itself, is not
    /// below zero. Returns the shares of those that are and of those that are dropped.
    fn check(gate: &WeightMatrix, vectors: &[Vec<f32>], what: &str) -> [f64; 2] {
        let certificate = certificate(gate);
        let mut buffers = CertifiedBuffers::default();
        buffers.reserve(gate.n_cols());
        let mut pool = Pool::try_new(1).unwrap();
        let (mut n, mut n_silent, mut n_dropped) = (0, 0, 0);
        for level in CpuLevel::available() {
            for x in vectors {
                let input = buffers.prepare(&mut pool, x);
                let mut neurons: Vec<u32> = (0..gate.n_rows() as u32).collect();
                let n_kept = certificate.keep(level, &input, &mut neurons);
                let kept = &neurons[..n_kept];
                assert!(kept.is_sorted());
                for row in 0..gate.n_rows() {
                    let value = dot_f32(level, gate.ty(), gate.row(row), x);
                    let is_kept = kept.contains(&(row as u32));
                    assert!(is_kept || value < 0.0, "{what}, {}, row {row}: {value}", level.name());
                    n += 1;
                    n_silent += usize::from(value < 0.0);
                    n_dropped += usize::from(!is_kept);
                }
            }
        }
        [n_silent, n_dropped].map(|count| count as f64 / n as f64)
    }

    #[test]
    fn most_silent_rows_are_dropped_and_no_others() {
        let mut random = Random::new(1);
        for n in [32, 96, 416, 576, 1024] {
            for ty in TYPES {
                let gate = encoded("gate", ty, 150, n, &random.normals(150 * n, 0.05));
                let vectors: Vec<_> = (0..6).map(|_| random.normals(n, 1.0)).collect();
                let [silent, dropped] = check(&gate, &vectors, &format!("{ty}, {n}"));
                assert!(
                    (0.4..0.6).contains(&silent) && dropped > 0.85 * silent,
                    "{n}: {dropped} of {silent}"
                );
            }
        }
    }

    #[test]
    fn rows_are_kept_though_the_copy_is_as_wrong_as_it_can_be() {
        let mut random = Random::new(2);
        for n in [32, 160, 1024] {
            for ty in TYPES {
                let gate = encoded("gate", ty, 40, n, &random.normals(40 * n, 0.05));
                // Vectors along the error of a row, so that no bound on it could be tighter, and against the copy, so
                // that the row itself comes out on either side of zero, or on it.
                let mut vectors = Vec::new();
                for row in 0..gate.n_rows() {
                    let mut w = vec![0.0; n];
                    gate.decode_row(row, &mut w);
                    let (mut quants, mut scales) = (vec![0; n], vec![0; n / BLOCK]);
                    copy_row(&w, &mut quants, &mut scales);
                    let copy = crate::planar::PlanarRow { quants: &quants, scales: &scales, mins: &[] };
                    let c: Vec<f64> = (0..n)
                        .map(|j| {
                            let d = half::f16::from_bits(scales[j / BLOCK]).to_f64();
                            d * (f64::from(copy.block(Planar::Q8_0, j / BLOCK)[j % BLOCK]) - 128.0)
                        })
                        .collect();
                    let r: Vec<f64> = w.iter().zip(&c).map(|(&w, c)| f64::from(w) - c).collect();
                    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                    let w: Vec<f64> = w.into_iter().map(f64::from).collect();
                    let at_zero = dot(&w, &r) / dot(&w, &c);
                    for change in [-0.1, -1e-3, -1e-5, -1e-6, 0.0, 1e-6, 1e-5, 1e-3, 0.1] {
                        let t = at_zero * (1.0 + change);
                        let size = (random.normal() * 3.0).exp();
                        vectors.push((0..n).map(|j| ((r[j] - t * c[j]) as f32) * size * 100.0).collect());
                    }
                }
                check(&gate, &vectors, &format!("{ty}, {n}"));
            }
        }
    }

    #[test]
    fn hostile_numbers_are_never_a_reason_to_drop() {
        let mut random = Random::new(3);
        let n = 96;
        for ty in TYPES {
            let mut rows = Vec::new();
            for size in [1e-45, 1e-40, 6e-8, 1e-5, 1.0, 3e4, 1e30, 2e38] {
                for _ in 0..3 {
                    rows.push(random.normals(n, size));
                }
                // Sums of nothing but large terms that cancel.
                let half = random.normals(n / 2, size);
                rows.push(half.iter().copied().chain(half.iter().map(|w| -w)).collect());
                rows.push(half.iter().flat_map(|&w| [w, -w * 1.0001]).collect());
                // A sum that would overflow on the way.
                rows.push((0..n).map(|j| if j < n / 2 { -size } else { size }).collect());
            }
            rows.push(vec![0.0; n]);
            rows.push(vec![-0.0; n]);
            rows.push(vec![-1e-30; n]);
            for fault in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut row = vec![-1.0; n];
                row[random.below(n)] = fault;
                rows.push(row);
            }
            let gate = hostile("gate", ty, n, &rows.concat());
            let mut vectors = vec![vec![0.0; n], vec![-0.0; n], vec![1.0; n], vec![-1.0; n]];
            for size in [1e-45, 1e-40, 1e-20, 6e-8, 1.0, 1e5, 1e7, 1e25, 1e38] {
                vectors.push(random.normals(n, size));
                vectors.push(vec![size; n]);
                let mut one = random.normals(n, 1e-3);
                one[random.below(n)] = size;
                vectors.push(one);
            }
            for fault in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = vec![1.0; n];
                x[random.below(n)] = fault;
                vectors.push(x);
            }
            check(&gate, &vectors, ty.name());
        }
    }

    #[test]
    fn gates_close_to_zero_are_on_the_right_side() {
        let mut random = Random::new(4);
        for n in [32, 320, 576] {
            for ty in TYPES {
                let x = random.normals(n, 1.0);
                let mut rows = Vec::new();
                for _ in 0..60 {
                    let mut row = random.normals(n, 0.05);
                    let sum: f64 = row.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                    // Takes the sum away, but for a little.
                    let at = random.below(n);
                    let little = f64::from(random.normal()) * 10f64.powi(-(random.below(8) as i32));
                    row[at] -= ((sum + little) / f64::from(x[at])) as f32;
                    rows.push(row);
                }
                let gate = encoded("gate", ty, rows.len(), n, &rows.concat());
                check(&gate, &[x], &format!("{ty}, {n}"));
            }
        }
    }

    #[test]
    fn the_norms_of_a_row_are_bounds() {
        let mut random = Random::new(5);
        for size in [0.0, 1e-42, 1e-10, 1e-3, 1.0, 1e10, 1e36] {
            let row = random.normals(160, size);
            let (mut quants, mut scales) = (vec![0; 160], vec![0; 5]);
            let [residual, whole] = copy_row(&row, &mut quants, &mut scales).map(f64::from);
            let exact = row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>().sqrt();
            assert!(exact <= whole && whole <= exact * 1.00001 + 1e-44, "{size}");
            assert!(residual <= whole * 1.00001 + 1e-44, "{size}");
            assert!(!(1e-3..2.0).contains(&size) || residual < 0.01 * whole, "{size}");
        }
    }
}
