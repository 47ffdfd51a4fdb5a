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
use crate::kernel::{dot, prefetch};
use crate::level::CpuLevel;
use crate::memory::Memory;
use crate::planar::{BLOCK, GROUP, Planar};
use crate::pool::Pool;
use crate::rows::Rows;

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

    /// Bytes of the one for this gate, but for what lies between its parts.
    pub(crate) fn n_bytes_for(gate: &WeightMatrix) -> usize {
        gate.n_rows() * (copy_bytes(gate.n_cols()) + size_of::<Norms>())
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
                prefetch(self.copy.bytes(next as usize));
            }
            let neuron = neurons[i];
            let scores = dot(level, self.copy.row(neuron as usize), &x.planes, [0, 1]);
            neurons[kept] = neuron;
            kept += usize::from(!x.slack.proves_silent(scores, norms[neuron as usize]));
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
            let q = block.map(|w| round(w * inverse));
            for (lane, (&w, q)) in block.iter().zip(q).enumerate() {
                let w = f64::from(w);
                let r = w - f64::from(d) * f64::from(q);
                residual[lane % 8] += r * r;
                whole[lane % 8] += w * w;
            }
            let unsigned = q.map(|q| q.cast_unsigned() ^ 0x80);
            first[i * BLOCK / 2..][..BLOCK / 2].copy_from_slice(&unsigned[..BLOCK / 2]);
            second[i * BLOCK / 2..][..BLOCK / 2].copy_from_slice(&unsigned[BLOCK / 2..]);
        }
    }
    [residual, whole].map(|squares| ((norm(squares) * UP) as f32).next_up())
}

/// The largest magnitude, NaN aside. In lanes, so that the loop vectorises.
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

/// The nearest integer from −127 to 127; anything for NaN.
#[inline]
fn round(x: f32) -> i8 {
    // 1.5 · 2^23: the sum has no bits for a fraction, and the integer in its lowest ones.
    const SHIFT: f32 = 12_582_912.0;
    let x = if x < -127.0 { -127.0 } else { x };
    let x = if x > 127.0 { 127.0 } else { x };
    (x + SHIFT).to_bits() as i8
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
    slack: Slack,
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
        let slack = Slack::new(x, &planes);
        CertifiedInput { planes, slack }
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
    /// `planes` holds the forms of `x`.
    fn new(x: &[f32], planes: &Input<'_>) -> Self {
        // ‖x‖, ‖a‖, ‖b‖, ‖e‖.
        let mut squares = [[0f64; 8]; 4];
        let [b] = planes.x8s([1]);
        for_blocks(planes, 0, x, |block, d_a, a, x| {
            let d_b = f64::from(b.d[block]) / f64::from(ENLARGED);
            let [b_first, b_second] = b.block(block);
            for j in 0..BLOCK {
                let b = if j < BLOCK / 2 { b_first[j] } else { b_second[j - BLOCK / 2] };
                let (x, a, b) = (f64::from(x[j]), f64::from(d_a) * f64::from(a[j]), d_b * f64::from(b));
                for (squares, value) in squares.iter_mut().zip([x, a, b, x - a - b]) {
                    squares[j % 8] += value * value;
                }
            }
        });
        let [x_norm, a, b, e] = squares.map(|squares| norm(squares) * UP);
        let n = x.len() as f64;
        let m = n + 8.0;
        let gamma = m / (f64::from(1 << 24) - m);
        // A difference may lose a bit of what it is a difference of.
        let e = e + (x_norm + a + b) * 2f64.powi(-50);
        Self {
            of_residual: (x_norm + e + gamma * (a + b)) * UP,
            of_row: (e + gamma * (x_norm + a + b)) * UP,
            norm: x_norm + a + b,
            least: n * 2f64.powi(-148),
        }
    }

    /// Whether a row with these scores and norms has a gate below zero for certain.
    #[inline]
    fn proves_silent(&self, scores: [f32; 2], norms: Norms) -> bool {
        let [residual, row] = norms.map(f64::from);
        let score = f64::from(scores[0]) + f64::from(scores[1]) / f64::from(ENLARGED);
        let bound = residual * self.of_residual + row * self.of_row + self.least;
        score + bound < 0.0 && (row + residual) * self.norm < LARGEST
    }
}

/// Bytes of the copy of a row.
pub(crate) fn copy_bytes(n_cols: usize) -> usize {
    Planar::Q8_0.quant_bytes(n_cols) + n_cols / BLOCK * size_of::<u16>()
}
