//! Kernels: one row of weights against one or a few vectors.
//!
//! Two operations, each for every weight type it makes sense for: [`dot`] (`row · x`) and [`axpy`]
//! (`acc += a · row`). A folder an instruction set, with the same files; this module chooses by
//! [`CpuLevel`]. Kernels know no threads.
//!
//! The bits of a result depend on the level, the row and the vector, and on nothing else: the form for
//! several vectors does for each what the form for one does, in the same order.

use powerinfer_sparse_ops::WeightType;

use crate::input::Input;
use crate::level::CpuLevel;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod gate_copy;
mod scalar;

pub(crate) use gate_copy::{GATE_TILE, GateToken, gate_word};

/// Vectors that a row is multiplied with at once. Four sums with two parts each, the weights and the scale fill
/// the 16 registers of AVX2.
pub(crate) const TILE: usize = 4;

/// Rows that are added at once, so that `acc` is read and written once for all of them.
pub(crate) const AXPY_ROWS: usize = 4;

/// Dot products of one row of weights with the vectors `rows` of `x`.
///
/// # Shapes
/// `row` holds `x.n_cols()` weights; `out [rows.len()]`.
pub(crate) fn dot_rows(
    level: CpuLevel,
    ty: WeightType,
    row: &[u8],
    x: &Input<'_>,
    rows: &[usize],
    out: &mut [f32],
) {
    debug_assert_eq!(ty.row_bytes(x.n_cols()), Some(row.len()));
    let (tiles, rest) = rows.as_chunks::<TILE>();
    let (out_tiles, out_rest) = out.as_chunks_mut::<TILE>();
    for (tile, out) in tiles.iter().zip(out_tiles) {
        *out = dot(level, ty, row, x, *tile);
    }
    for (&one, out) in rest.iter().zip(out_rest) {
        [*out] = dot(level, ty, row, x, [one]);
    }
}

/// Dot products of one row of weights with `T` vectors.
pub(crate) fn dot<const T: usize>(
    level: CpuLevel,
    ty: WeightType,
    row: &[u8],
    x: &Input<'_>,
    rows: [usize; T],
) -> [f32; T] {
    match level {
        CpuLevel::Scalar => scalar::dot::dot(ty, row, x, rows),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::dot::dot(level, ty, row, x, rows),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => avx2::dot::dot(level.avx2(), ty, row, x, rows),
    }
}

/// Dot product of a row of plain floats with a vector.
///
/// # Shapes
/// `row` holds `x.len()` values.
///
/// # Panics
/// If `ty` is quantised.
pub(crate) fn dot_f32(level: CpuLevel, ty: WeightType, row: &[u8], x: &[f32]) -> f32 {
    let Some(floats) = Floats::of_row(ty, row) else { unreachable!("{ty} is no plain float type") };
    let [sum] = match level {
        CpuLevel::Scalar => scalar::dot::dot_floats(floats, [x]),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::dot::dot_floats(level, floats, [x]),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => avx2::dot::dot_floats(level.avx2(), floats, [x]),
    };
    sum
}

/// `acc += a[0] · rows[0] + a[1] · rows[1] + …`, added one after the other: the bits are those of that many
/// calls with one row.
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
) {
    match level {
        CpuLevel::Scalar => scalar::axpy::axpy(ty, a, rows, acc),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::axpy::axpy(level, ty, a, rows, acc),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => avx2::axpy::axpy(level.avx2(), ty, a, rows, acc),
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
        CpuLevel::Avx512(level) => avx2::axpy::axpy_scaled(level.avx2(), terms, scales, values, acc),
    }
}

/// The types that [`axpy`] takes.
pub(crate) const AXPY_TYPES: [WeightType; 5] =
    [WeightType::F32, WeightType::F16, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0];

/// A vector in one of the plain float types.
#[derive(Clone, Copy, Debug)]
enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
    BF16(&'a [u16]),
}

impl<'a> Floats<'a> {
    /// The weights of a row, if they are plain floats.
    fn of_row(ty: WeightType, row: &'a [u8]) -> Option<Self> {
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
