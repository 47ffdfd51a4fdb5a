//! Rows of plain floats times f32 vectors.
//!
//! The product of one row and one vector is one register of 16 sums, fed along the row, and the tree of
//! [`sum_lanes`](super::load::sum_lanes) over it:
//!
//! ```text
//! acc_l = fma(w_k, x_k, acc_l)    for k = l, l + 16, l + 32, …
//! ```
//!
//! One such chain waits for itself, so several rows or several vectors go at once; the bits of a product depend on
//! neither number. The vectors stay f32: `vdpbf16ps` would round them to the 8 significant bits of bf16.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::Floats;
use super::load::{lanes, load_bf16, load_f16, load_f32, padded, store_f32, sums};
use crate::level::Avx512;

/// Products of `R` rows, wherever they lie, with `T` vectors.
///
/// # Shapes
/// All rows and vectors have the length of the first row, or are longer and cut to it.
///
/// # Panics
/// If the rows differ in type, or one of the others is shorter than the first row.
pub(in crate::kernel) fn dot_tile<const R: usize, const T: usize>(
    _: Avx512,
    rows: [Floats<'_>; R],
    x: [&[f32]; T],
) -> [[f32; T]; R] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_tile_inner(rows, x) }
}

macro_rules! rows_of {
    ($ty:ident, $rows:ident) => {{
        let mut all: [&[_]; R] = [&[]; R];
        for r in 0..R {
            let Floats::$ty(w) = $rows[r] else { unreachable!("rows of one matrix have one type") };
            all[r] = w;
        }
        all
    }};
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dot_tile_inner<const R: usize, const T: usize>(rows: [Floats<'_>; R], x: [&[f32]; T]) -> [[f32; T]; R] {
    match rows[0] {
        Floats::F32(_) => dot_f32(rows_of!(F32, rows), x),
        Floats::F16(_) => dot_f16(rows_of!(F16, rows), x),
        Floats::BF16(_) => dot_bf16(rows_of!(BF16, rows), x),
    }
}

macro_rules! dot_rows {
    ($name:ident, $ty:ty, $load:ident) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn $name<const R: usize, const T: usize>(rows: [&[$ty]; R], x: [&[f32]; T]) -> [[f32; T]; R] {
            let n = rows[0].len();
            let ((rows, rows_rest), (x, x_rest)) = (lanes(rows, n), lanes(x, n));
            let mut acc = [[_mm512_setzero_ps(); T]; R];
            for i in 0..n / 16 {
                for r in 0..R {
                    let w = $load(&rows[r][i]);
                    for t in 0..T {
                        acc[r][t] = _mm512_fmadd_ps(w, load_f32(&x[t][i]), acc[r][t]);
                    }
                }
            }
            if !n.is_multiple_of(16) {
                for r in 0..R {
                    let w = $load(&rows_rest[r]);
                    for t in 0..T {
                        acc[r][t] = _mm512_fmadd_ps(w, load_f32(&x_rest[t]), acc[r][t]);
                    }
                }
            }
            sums(acc)
        }
    };
}

dot_rows!(dot_f32, f32, load_f32);
dot_rows!(dot_f16, u16, load_f16);
dot_rows!(dot_bf16, u16, load_bf16);

/// Rows that are converted and multiplied together by [`gemm`]; with the vectors of a tile 6 · 4 sums, which leave
/// eight registers for what they are fed with.
pub(in crate::kernel) const GEMM_ROWS: usize = 6;

/// Vectors of a tile.
const TILE: usize = 4;

/// Steps of 16 weights that are converted at once: 6 · 4 KiB of weights stay in the first-level cache (48 KiB),
/// beside 4 · 4 KiB of the vectors that pass by.
const STEPS: usize = 64;

/// The largest number of vectors between which the weights are not converted again.
const MAX_BATCH: usize = 128;

/// Bytes of the vectors that pass by together, which should stay in a second-level cache of 2 MiB.
const BATCH_BYTES: usize = 1 << 20;

/// What [`gemm`] needs as scratch: converted weights, the sums of a batch between two parts of the rows, and room to
/// begin at a cache line.
pub(in crate::kernel) const GEMM_SCRATCH: usize = (STEPS + MAX_BATCH) * GEMM_ROWS * 16 + 15;

/// One step of the rows of a group, and the sums of one vector with them.
type Group = [[f32; 16]; GEMM_ROWS];

/// Products of any number of rows with the vectors `tokens` of `x`: `out(token, row, product)` once for each, with the
/// bits of [`dot_tile`]. A multiple of [`GEMM_ROWS`] rows is best, and many of them, since their vectors are read
/// from the second-level cache after the first group.
///
/// # Shapes
/// `rows` of `n_cols` weights each, `x [n_tokens, n_cols]`, `scratch [GEMM_SCRATCH]`.
///
/// # Panics
/// If a row or `x` is shorter.
pub(in crate::kernel) fn gemm(
    _: Avx512,
    rows: &[Floats<'_>],
    x: &[f32],
    n_cols: usize,
    tokens: Range<usize>,
    scratch: &mut [f32],
    out: impl FnMut(usize, usize, f32),
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { gemm_inner(rows, x, n_cols, tokens, scratch, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn gemm_inner(
    rows: &[Floats<'_>],
    x: &[f32],
    n_cols: usize,
    tokens: Range<usize>,
    scratch: &mut [f32],
    mut out: impl FnMut(usize, usize, f32),
) {
    // A register that crosses cache lines takes two loads.
    let start = scratch.as_ptr().align_offset(64);
    let (scratch, _) = scratch[start..].as_chunks_mut::<16>().0.as_chunks_mut::<GEMM_ROWS>();
    let (weights, kept) = scratch[..STEPS + MAX_BATCH].split_at_mut(STEPS);
    let batch = (BATCH_BYTES / 4 / n_cols.max(1)).next_multiple_of(TILE).clamp(TILE, MAX_BATCH);
    for start in tokens.clone().step_by(batch) {
        let batch = start..tokens.end.min(start + batch);
        for (group, rows) in rows.chunks(GEMM_ROWS).enumerate() {
            // A row of no weights still has a product.
            for first in (0..n_cols.max(1)).step_by(16 * STEPS) {
                let columns = first..n_cols.min(first + 16 * STEPS);
                let weights = &mut weights[..columns.len().div_ceil(16)];
                convert(rows, columns.clone(), weights);
                let part = Part { weights, x, n_cols, columns };
                let mut done = |token: usize, values: [f32; GEMM_ROWS]| {
                    for (r, value) in values.into_iter().take(rows.len()).enumerate() {
                        out(token, group * GEMM_ROWS + r, value);
                    }
                };
                let mut token = start;
                while token < batch.end {
                    let kept = &mut kept[token - start..];
                    if token + TILE <= batch.end {
                        part.tile::<TILE>(token, kept, &mut done);
                        token += TILE;
                    } else {
                        part.tile::<1>(token, kept, &mut done);
                        token += 1;
                    }
                }
            }
        }
    }
}

/// Columns of some rows as f32, side by side and padded with zeros in both directions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn convert(rows: &[Floats<'_>], columns: Range<usize>, to: &mut [Group]) {
    for r in 0..GEMM_ROWS {
        match rows.get(r) {
            None => to.iter_mut().for_each(|to| to[r] = [0.0; 16]),
            Some(Floats::F32(w)) => convert_f32(&w[columns.clone()], r, to),
            Some(Floats::F16(w)) => convert_f16(&w[columns.clone()], r, to),
            Some(Floats::BF16(w)) => convert_bf16(&w[columns.clone()], r, to),
        }
    }
}

macro_rules! convert {
    ($name:ident, $ty:ty, $load:ident) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn $name(w: &[$ty], r: usize, to: &mut [Group]) {
            let (w, rest) = w.as_chunks::<16>();
            for (w, to) in w.iter().zip(&mut *to) {
                store_f32($load(w), &mut to[r]);
            }
            if let Some(to) = to.get_mut(w.len()) {
                store_f32($load(&padded(rest)), &mut to[r]);
            }
        }
    };
}

convert!(convert_f32, f32, load_f32);
convert!(convert_f16, u16, load_f16);
convert!(convert_bf16, u16, load_bf16);

/// Some columns of a group of rows, and the vectors they are multiplied with.
struct Part<'a> {
    weights: &'a [Group],
    x: &'a [f32],
    n_cols: usize,
    columns: Range<usize>,
}

impl Part<'_> {
    /// Goes on with the sums of `T` vectors in `kept`, from zero at the first columns; after the last ones gives the
    /// products of each vector to `done`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    #[inline]
    fn tile<const T: usize>(
        &self,
        token: usize,
        kept: &mut [Group],
        done: &mut impl FnMut(usize, [f32; GEMM_ROWS]),
    ) {
        let mut x: [&[f32]; T] = [&[]; T];
        for t in 0..T {
            x[t] = &self.x[(token + t) * self.n_cols..][..self.n_cols][self.columns.clone()];
        }
        let n = self.columns.len();
        let (x, x_rest) = lanes(x, n);
        let kept = &mut kept[..T];
        let mut acc = [[_mm512_setzero_ps(); T]; GEMM_ROWS];
        if self.columns.start > 0 {
            for t in 0..T {
                for r in 0..GEMM_ROWS {
                    acc[r][t] = load_f32(&kept[t][r]);
                }
            }
        }
        let (weights, weights_rest) = self.weights.split_at(n / 16);
        for (i, w) in weights.iter().enumerate() {
            step(&mut acc, w, x.map(|x| load_f32(&x[i])));
        }
        for w in weights_rest {
            step(&mut acc, w, x_rest.each_ref().map(|x| load_f32(x)));
        }
        if self.columns.end < self.n_cols {
            for t in 0..T {
                for r in 0..GEMM_ROWS {
                    store_f32(acc[r][t], &mut kept[t][r]);
                }
            }
            return;
        }
        let sums = sums(acc);
        for t in 0..T {
            done(token + t, sums.map(|row| row[t]));
        }
    }
}

/// `acc += w · x`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn step<const T: usize>(acc: &mut [[__m512; T]; GEMM_ROWS], w: &Group, x: [__m512; T]) {
    for r in 0..GEMM_ROWS {
        let w = load_f32(&w[r]);
        for t in 0..T {
            acc[r][t] = _mm512_fmadd_ps(w, x[t], acc[r][t]);
        }
    }
}
