//! The parts of attention over one tile of positions, for a few queries at once.
//!
//! ```text
//! widen    keys or values of the tile as f32, once for every query that meets them
//! scores   score[i][p]  = Σ_d  q[d][i] · k[d][p]                       d ascending
//! softmax  share[i][p]  = exp(score[i][p] − max),  and the running sum
//! mix      acc[i][d]    = acc[i][d] · shrink[i] + Σ_p share[i][p] · v[p][d]      p ascending
//! ```
//!
//! Keys lie by dimension, so that the lanes of a register are positions and no sum runs across lanes; values lie by
//! position, so that lanes are dimensions. What a query gets depends neither on the queries beside it nor on how many
//! these are.

use bytemuck::{Pod, Zeroable};
use powerinfer_sparse_ops::block::BlockQ8_0;

use crate::level::CpuLevel;

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::scalar;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Positions of a tile: two registers of AVX-512, and the keys of 128 dimensions in f32 are 16 KiB, half of the
/// smallest first level cache.
pub(crate) const POSITIONS: usize = 32;

/// Queries of a block: with both registers of positions they make 16 sums of AVX-512, twice what it takes to keep its
/// units busy, and half of its registers.
pub(crate) const QUERIES: usize = 8;

/// One register of AVX-512.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [f32; 16]);

impl Line {
    pub(crate) const LEN: usize = size_of::<Self>() / size_of::<f32>();
    pub(crate) const ZERO: Self = Self([0.0; Self::LEN]);
}

/// A value for each position of a tile.
pub(crate) type ByPosition = [Line; POSITIONS / Line::LEN];

/// 32 dimensions of the keys of a tile in 8 bits: the values of [`BlockQ8_0`], those of a dimension together.
///
/// ```text
/// byte  0             64                      96             1088
///       | d[0..32]     | q[0][0] … q[0][31]    | q[1] … q[31] |      q[dimension][position]
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockKeys {
    /// Scale of each position, f16 bits.
    pub(crate) d: [u16; POSITIONS],
    /// Dimension by dimension.
    pub(crate) q: [[i8; POSITIONS]; 32],
}

/// Keys or values as they are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kept<'a> {
    /// Rows of plain floats.
    F32(&'a [f32]),
    /// Rows of f16 bits.
    F16(&'a [u16]),
    /// Keys; a row is a dimension.
    Keys(&'a [BlockKeys]),
    /// Values; a row is a position.
    Values(&'a [BlockQ8_0]),
}

/// Lines of a row of `n` values; the last one may have more room than values.
pub(crate) fn lines(n: usize) -> usize {
    n.div_ceil(Line::LEN)
}

/// Rows of `row_len` values as f32, exactly. What is behind the last value of a row keeps its content.
///
/// # Shapes
/// `to [n_rows, lines(row_len)]`; `kept` has as many rows or more, of 32 values for [`Kept::Keys`].
///
/// # Panics
/// If `kept` is too short.
pub(crate) fn widen(level: CpuLevel, kept: Kept<'_>, row_len: usize, to: &mut [Line]) {
    match level {
        CpuLevel::Scalar => scalar::attention::widen(kept, row_len, to),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::attention::widen(level, kept, row_len, to),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => avx512::attention::widen(level, kept, row_len, to),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon(level) => neon::attention::widen(level, kept, row_len, to),
    }
}

/// Products of queries with the keys of a tile.
///
/// # Shapes
/// `q, k [head_dim]`; `out [n_queries]`, at most [`QUERIES`].
pub(crate) fn scores(level: CpuLevel, q: &[[f32; QUERIES]], k: &[ByPosition], out: &mut [ByPosition]) {
    debug_assert_eq!(q.len(), k.len(), "dimensions of queries and keys");
    match level {
        CpuLevel::Scalar => scalar::attention::scores(q, k, out),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::attention::scores(level, q, k, out),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => avx512::attention::scores(level, q, k, out),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon(level) => neon::attention::scores(level, q, k, out),
    }
}

/// Maximum of the scores so far, and the sum of `exp(score − max)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running {
    pub(crate) max: f32,
    pub(crate) sum: f32,
}

impl Running {
    /// Of no scores.
    pub(crate) const NONE: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// What is taken from scores before their exponential: 0 where every one was −∞, whose share is then 0.
    pub(crate) fn base(max: f32) -> f32 {
        if max == f32::NEG_INFINITY { 0.0 } else { max }
    }
}

/// Makes shares of scores: those of the first `n` positions, 0 for the others. Returns what earlier sums are to be
/// multiplied with.
///
/// The exponential is within 2 ulp, exact at 0 and −∞, and keeps NaN.
pub(crate) fn softmax(level: CpuLevel, scores: &mut ByPosition, n: usize, running: &mut Running) -> f32 {
    match level {
        CpuLevel::Scalar => scalar::attention::softmax(scores, n, running),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::attention::softmax(level, scores, n, running),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => avx512::attention::softmax(level, scores, n, running),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon(level) => neon::attention::softmax(level, scores, n, running),
    }
}

/// Shares of a range of positions for some queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares<'a> {
    /// `[n_queries]`, at most [`QUERIES`].
    pub(crate) shares: &'a [ByPosition],
    /// `[n_queries]`: what sums are multiplied with first.
    pub(crate) shrink: &'a [f32],
    /// First position.
    pub(crate) from: usize,
    /// Behind the last one.
    pub(crate) to: usize,
}

/// Adds the shares of values to the sums of queries.
///
/// # Shapes
/// `v [to or more, n_lines]`, `acc [n_queries, n_lines]`.
pub(crate) fn mix(level: CpuLevel, s: &Shares<'_>, v: &[Line], n_lines: usize, acc: &mut [Line]) {
    debug_assert_eq!(acc.len(), s.shares.len() * n_lines, "sums of {} queries", s.shares.len());
    match level {
        CpuLevel::Scalar => scalar::attention::mix(s, v, n_lines, acc),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::attention::mix(level, s, v, n_lines, acc),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => avx512::attention::mix(level, s, v, n_lines, acc),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon(level) => neon::attention::mix(level, s, v, n_lines, acc),
    }
}

/// `exp(x)` for single numbers, the same at every level.
pub(crate) fn exp(x: f32) -> f32 {
    scalar::attention::exp(x)
}

/// Constants of `exp(x) = 2^n · exp(r)` with `n = round(x / ln 2)`, `r = x − n · ln 2`, and
/// `exp(r) = 1 + r + r² · (P[0] + P[1] · r + … + P[4] · r⁴)`, a polynomial through Chebyshev points of
/// `|r| ≤ ln 2 / 2`, off by less than 0.2 · 2^-24.
pub(super) mod exp_constants {
    pub(in crate::kernel) const PER_LN_2: f32 = std::f32::consts::LOG2_E;
    /// `ln 2` in two parts; the first has few bits, so that its product with `n` is exact.
    pub(in crate::kernel) const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    pub(in crate::kernel) const P: [f32; 5] =
        [0.5, 0.166_665_76, 0.041_666_556, 0.008_363_203, 0.001_392_621_3];
    /// Below it the result is 0, for it is less than half of the smallest number.
    pub(in crate::kernel) const MIN: f32 = -104.0;
    /// Above it the result is infinite.
    pub(in crate::kernel) const MAX: f32 = 89.0;
}

#[cfg(test)]
mod tests;
