//! Kernels: one row of weights against one or a few vectors.
//!
//! Two operations, each for every weight type it makes sense for: [`dot`] (`row · x`) and [`axpy`]
//! (`acc += a · row`). A folder an instruction set, with the same files; this module chooses by
//! [`CpuLevel`]. Kernels know no threads.
//!
//! The bits of a result depend on the level, the row and the vector, and on nothing else: the form for
//! several vectors does for each what the form for one does, in the same order.

use std::ops::Range;

use powerinfer_sparse_ops::WeightType;

use crate::input::Input;
use crate::level::CpuLevel;
use crate::planar::{Planar, PlanarRow};
use crate::rows::Rows;

mod asks;
pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod gate_copy;
pub(crate) mod gemm;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

pub(crate) use asks::Asks;
pub(crate) use gate_copy::{GATE_TILE, GateToken, gate_word};

/// Vectors that a row is multiplied with at once. Four sums with two parts each, the weights and the scale fill
/// the 16 registers of AVX2.
pub(crate) const TILE: usize = 4;

/// Rows that are added at once, so that `acc` is read and written once for all of them.
pub(crate) const AXPY_ROWS: usize = 4;

/// A row of weights, in one of the forms that there are kernels for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Row<'a> {
    /// F32, F16 and BF16.
    Floats(Floats<'a>),
    /// Q8_0, Q4_0 and Q4_1, see [`planar`](crate::planar).
    Planar(Planar, PlanarRow<'a>),
    /// Every other type, in the blocks of the file.
    Blocks(WeightType, &'a [u8]),
}

/// Dot products of one row of weights with the vectors `rows` of `x`.
///
/// # Shapes
/// `row` holds `x.n_cols()` weights; `out [rows.len()]`.
pub(crate) fn dot_rows(level: CpuLevel, row: Row<'_>, x: &Input<'_>, rows: &[usize], out: &mut [f32]) {
    let (tiles, rest) = rows.as_chunks::<TILE>();
    let (out_tiles, out_rest) = out.as_chunks_mut::<TILE>();
    for (tile, out) in tiles.iter().zip(out_tiles) {
        *out = dot(level, row, x, *tile);
    }
    for (&one, out) in rest.iter().zip(out_rest) {
        [*out] = dot(level, row, x, [one]);
    }
}

/// Rows whose products with one vector are computed at once, so that one need not wait for the other.
const DOT_ROWS: usize = 4;

/// Bytes of the rows of a band, at most: what is asked for while a band is computed should stay in the second-level cache,
/// and a quarter of it should span several pages. On one core of a 2.1 GHz Emerald Rapids, Q4_0 rows of 512, 2048 and 8192
/// weights came within 5 % of plain reading with bands from 36 to 74 KiB.
const BAND_BYTES: usize = 80 << 10;

/// Dot products of the rows `list` of `w` with the first vector of `x`; asks the memory for the next rows meanwhile.
///
/// # Shapes
/// `list` ascending; `out [≥ list.len()]`.
pub(crate) fn dot_list(level: CpuLevel, w: &Rows, list: &[u32], x: &Input<'_>, out: &mut [f32]) {
    let out = &mut out[..list.len()];
    if let [first, .., last] = list
        && (last - first) as usize + 1 == list.len()
    {
        return dot_run(level, w, *first as usize..*last as usize + 1, x, out);
    }
    for (at, out) in out.chunks_mut(LIST_BAND).enumerate() {
        let at = at * LIST_BAND;
        let row = |i: usize| list[at + i] as usize;
        dot_band(level, w, row, |i| list.get(at + i + LIST_BAND).map(|&row| row as usize), x, out);
    }
}

/// As [`dot_list`]; asks the memory for a row of `asks` with each row that is computed.
pub(crate) fn dot_list_asking<const N: usize>(
    level: CpuLevel,
    w: &Rows,
    list: &[u32],
    x: &Input<'_>,
    out: &mut [f32],
    asks: &mut Asks<'_, N>,
) {
    let out = &mut out[..list.len()];
    #[cfg(target_arch = "x86_64")]
    if let (CpuLevel::Avx512(level), Some(kind)) = (level, Planar::of(w.ty())) {
        let [x] = x.x8s([0]);
        return avx512::int8::dot_list(level, w.planar(kind), list, x, out, asks);
    }
    let (groups, rest) = list.as_chunks::<DOT_ROWS>();
    let (out, out_rest) = out.as_chunks_mut::<DOT_ROWS>();
    for (group, out) in groups.iter().zip(out) {
        asks.take::<DOT_ROWS>().into_iter().for_each(prefetch_bytes);
        *out = dot_group(level, w, group.map(|row| row as usize), [None; DOT_ROWS], x);
    }
    for (&row, out) in rest.iter().zip(out_rest) {
        asks.take::<1>().into_iter().for_each(prefetch_bytes);
        [*out] = dot_group(level, w, [row as usize], [None], x);
    }
}

/// Dot products of the rows `rows` of `w` with the first vector of `x`; asks the memory for those behind them meanwhile.
///
/// # Shapes
/// `out [rows.len()]`.
pub(crate) fn dot_run(level: CpuLevel, w: &Rows, rows: Range<usize>, x: &Input<'_>, out: &mut [f32]) {
    let at_most = (BAND_BYTES / w.row_bytes().max(1)).max(DOT_ROWS);
    let band = rows.len().div_ceil(rows.len().div_ceil(at_most).max(1)).next_multiple_of(DOT_ROWS).max(1);
    for (at, out) in out.chunks_mut(band).enumerate() {
        let at = rows.start + at * band;
        let ahead = |i: usize| Some(at + i + band).filter(|&row| row < w.n_rows());
        dot_band(level, w, |i| at + i, ahead, x, out);
    }
}

/// Dot products of the rows `row(0), row(1), …` of `w` with the first vector of `x`. When row `i` is computed, the memory
/// is asked for row `ahead(i)`.
///
/// The rows of a quarter of the band go together with those of the others, so that the processor, which looks ahead
/// within pages of 4 KiB, sees four streams.
#[inline]
fn dot_band(
    level: CpuLevel,
    w: &Rows,
    row: impl Fn(usize) -> usize,
    ahead: impl Fn(usize) -> Option<usize>,
    x: &Input<'_>,
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if let (CpuLevel::Avx512(level), Some(kind)) = (level, Planar::of(w.ty())) {
        let [x] = x.x8s([0]);
        return avx512::int8::dot_band(level, w.planar(kind), row, ahead, x, out);
    }
    let quarter = out.len() / DOT_ROWS;
    for i in 0..quarter {
        let places: [usize; DOT_ROWS] = std::array::from_fn(|k| i + k * quarter);
        let sums = dot_group(level, w, places.map(&row), places.map(&ahead), x);
        for (place, sum) in places.into_iter().zip(sums) {
            out[place] = sum;
        }
    }
    for i in quarter * DOT_ROWS..out.len() {
        [out[i]] = dot_group(level, w, [row(i)], [ahead(i)], x);
    }
}

/// Dot products of `R` rows with the first vector of `x`; meanwhile the rows `ahead` are asked for.
fn dot_group<const R: usize>(
    level: CpuLevel,
    w: &Rows,
    rows: [usize; R],
    ahead: [Option<usize>; R],
    x: &Input<'_>,
) -> [f32; R] {
    #[cfg(target_arch = "x86_64")]
    if let (CpuLevel::Avx512(level), Row::Floats(first)) = (level, w.row(rows[0])) {
        let mut floats = [first; R];
        for (floats, row) in floats.iter_mut().zip(rows) {
            let Row::Floats(row) = w.row(row) else { unreachable!("rows of one matrix have one type") };
            *floats = row;
        }
        return avx512::float::dot_tile(level, floats, x.f32s([0])).map(|[sum]| sum);
    }
    ahead.into_iter().flatten().for_each(|row| prefetch(w, row));
    rows.map(|row| dot(level, w.row(row), x, [0])[0])
}

/// Rows of a band of a list.
const LIST_BAND: usize = 16;

/// Whether the memory is asked for rows before they are computed. Integers take so much computing that the processor
/// does not look ahead far enough by itself: on one core of a 2.1 GHz Emerald Rapids, decoding 1.1 billion weights of
/// Q4_0 became faster by a quarter. Plain floats became slower, gates of F16 read one after the other by as much.
#[inline]
fn is_asked_for(w: &Rows) -> bool {
    !w.ty().is_float()
}

/// Asks the memory for a row that is read soon, where that gains something.
#[inline]
pub(crate) fn prefetch(w: &Rows, row: usize) {
    prefetch_bytes(worth_asking(w, row));
}

/// The bytes of a row that is read soon, if asking the memory for them gains something.
#[inline]
pub(crate) fn worth_asking(w: &Rows, row: usize) -> &[u8] {
    if is_asked_for(w) { w.bytes(row) } else { &[] }
}

/// Asks the memory for some bytes.
#[inline]
fn prefetch_bytes(bytes: &[u8]) {
    bytes.chunks(64).for_each(|line| prefetch_line(line.as_ptr()));
}

/// Asks the memory for a cache line.
#[inline(always)]
fn prefetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: PREFETCH-ANYWHERE: a prefetch of any address has no effect but on the caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Dot products of one row of weights with `T` vectors.
pub(crate) fn dot<const T: usize>(
    level: CpuLevel,
    row: Row<'_>,
    x: &Input<'_>,
    rows: [usize; T],
) -> [f32; T] {
    match row {
        Row::Floats(w) => dot_floats(level, w, x.f32s(rows)),
        Row::Planar(kind, w) => match level {
            CpuLevel::Scalar => scalar::dot::dot_planar(kind, w, x.x8s(rows)),
            #[cfg(target_arch = "x86_64")]
            CpuLevel::Avx2(level) => avx2::dot::dot_planar(level, kind, w, x.x8s(rows)),
            #[cfg(target_arch = "x86_64")]
            CpuLevel::Avx512(level) => avx512::int8::dot(level, kind, w, x.x8s(rows)),
            #[cfg(target_arch = "aarch64")]
            CpuLevel::Neon(level) => neon::dot::dot_planar(level, kind, w, x.x8s(rows)),
        },
        Row::Blocks(ty, w) => match level {
            CpuLevel::Scalar => scalar::dot::dot(ty, w, x, rows),
            #[cfg(target_arch = "x86_64")]
            CpuLevel::Avx2(level) => avx2::dot::dot(level, ty, w, x, rows),
            #[cfg(target_arch = "x86_64")]
            CpuLevel::Avx512(level) => match ty {
                WeightType::Q4_K | WeightType::Q5_K | WeightType::Q6_K => {
                    avx512::kquant::dot(level, ty, w, x.x8ks(rows))
                }
                _ => avx2::dot::dot(level.avx2(), ty, w, x, rows),
            },
            #[cfg(target_arch = "aarch64")]
            CpuLevel::Neon(level) => neon::dot::dot(level, ty, w, x, rows),
        },
    }
}

fn dot_floats<const T: usize>(level: CpuLevel, w: Floats<'_>, x: [&[f32]; T]) -> [f32; T] {
    match level {
        CpuLevel::Scalar => scalar::dot::dot_floats(w, x),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::dot::dot_floats(level, w, x),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => {
            let [sums] = avx512::float::dot_tile(level, [w], x);
            sums
        }
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon(level) => neon::dot::dot_floats(level, w, x),
    }
}

/// Dot product of a row of plain floats with a vector.
///
/// # Shapes
/// `row` holds `x.len()` values.
///
/// # Panics
/// If `ty` is quantised.
#[cfg(test)]
pub(crate) fn dot_f32(level: CpuLevel, ty: WeightType, row: &[u8], x: &[f32]) -> f32 {
    let Some(floats) = Floats::of_row(ty, row) else { unreachable!("{ty} is no plain float type") };
    let [sum] = dot_floats(level, floats, [x]);
    sum
}

/// `acc += a[0] · rows[0] + a[1] · rows[1] + …`, added one after the other: the bits are those of that many
/// calls with one row. Meanwhile the memory is asked for the bytes `ahead`.
///
/// # Shapes
/// Each row holds `acc.len()` weights.
///
/// # Panics
/// If `ty` is not one of [`AXPY_TYPES`].
pub(crate) fn axpy<const N: usize>(
    level: CpuLevel,
    ty: WeightType,
    a: [f32; N],
    rows: [&[u8]; N],
    acc: &mut [f32],
    ahead: [&[u8]; N],
) {
    #[cfg(target_arch = "x86_64")]
    if let CpuLevel::Avx512(level) = level {
        return avx512::axpy::axpy(level, ty, a, rows, acc, ahead);
    }
    ahead.into_iter().for_each(prefetch_bytes);
    match level {
        CpuLevel::Scalar => scalar::axpy::axpy(ty, a, rows, acc),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::axpy::axpy(level, ty, a, rows, acc),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(_) => unreachable!("done above"),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon(level) => neon::axpy::axpy(level, ty, a, rows, acc),
    }
}

/// `acc += scales ⊙ (a[0] · row(0) + a[1] · row(1) + …)` with rows of plain 8-bit integers and a scale for each
/// column; `terms` are row numbers and factors, and added in order. A factor of 0 changes nothing.
///
/// # Shapes
/// `scales [n]` (f16 bits), `values [n_rows, n]`, `acc [n]`.
pub(crate) fn axpy_scaled(
    level: CpuLevel,
    terms: &[(usize, f32)],
    scales: &[u16],
    values: &[i8],
    acc: &mut [f32],
) {
    match level {
        CpuLevel::Scalar => scalar::axpy::axpy_scaled(terms, scales, values, acc),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::axpy::axpy_scaled(level, terms, scales, values, acc),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => avx512::axpy::axpy_scaled(level, terms, scales, values, acc),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon(level) => neon::axpy::axpy_scaled(level, terms, scales, values, acc),
    }
}

/// The types that [`axpy`] takes.
pub(crate) const AXPY_TYPES: [WeightType; 5] =
    [WeightType::F32, WeightType::F16, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0];

/// A vector in one of the plain float types.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
    BF16(&'a [u16]),
}

impl<'a> Floats<'a> {
    /// The weights of a row, if they are plain floats.
    pub(crate) fn of_row(ty: WeightType, row: &'a [u8]) -> Option<Self> {
        match ty {
            WeightType::F32 => Some(Self::F32(bytemuck::cast_slice(row))),
            WeightType::F16 => Some(Self::F16(bytemuck::cast_slice(row))),
            WeightType::BF16 => Some(Self::BF16(bytemuck::cast_slice(row))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
