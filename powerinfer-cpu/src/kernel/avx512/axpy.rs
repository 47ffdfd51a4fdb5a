//! `acc += a · row`, several rows at once, and the same for many vectors at once.
//!
//! Each element of `acc` goes through the rows in order, one fused multiply-add with the exact weight each, so every
//! grouping of rows and vectors gives the same bits. (`d · q` of a block is exact in f32: 11 and 8 significant bits.)
//!
//! Many vectors: 64 columns of some rows are decoded once, and tiles of vectors pass by.

use std::arch::x86_64::*;
use std::ops::Range;

use bytemuck::Pod;
use powerinfer_sparse_ops::WeightType;
use powerinfer_sparse_ops::block::{BlockQ4_0, BlockQ8_0};

use super::super::{Floats, prefetch_bytes};
use super::load::{lanes, load_bf16, load_bytes, load_f16, load_f32, load_i8, padded, splat_f16, store_f32};
use crate::level::Avx512;

pub(in crate::kernel) fn axpy<const N: usize>(
    _: Avx512,
    ty: WeightType,
    a: [f32; N],
    rows: [&[u8]; N],
    acc: &mut [f32],
    ahead: [&[u8]; N],
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { axpy_inner(ty, a, rows, acc, ahead) }
}

/// Rows of integers with a scale for each column.
pub(in crate::kernel) fn axpy_scaled(
    _: Avx512,
    terms: &[(usize, f32)],
    scales: &[u16],
    values: &[i8],
    acc: &mut [f32],
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { axpy_scaled_inner(terms, scales, values, acc) }
}

/// Columns of a band of [`decode_bands`].
pub(in crate::kernel) const BAND: usize = 64;

/// Vectors that [`down_tile`] takes best: with 64 columns 6 · 4 sums.
pub(in crate::kernel) const DOWN_TILE: usize = 6;

/// Some columns of some rows as f32, band after band, the last one padded with zeros.
///
/// # Shapes
/// `out [columns.len() / BAND, rows.len(), BAND]`, the number of bands rounded up.
///
/// # Panics
/// If `ty` is not one that axpy takes, or is one of blocks and `columns` are not whole blocks; if a row or `out` is
/// shorter.
pub(in crate::kernel) fn decode_bands(
    _: Avx512,
    ty: WeightType,
    rows: &[&[u8]],
    columns: Range<usize>,
    out: &mut [f32],
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { decode_bands_inner(ty, rows, columns, out) }
}

/// `acc[t][c] = fma(h[t][i], w[i][c], acc[t][c])` for one row `i` after the other: the bits of [`axpy`] row by row,
/// with factors of zero not left out.
///
/// # Shapes
/// `w [n_rows, BAND]` is one band of [`decode_bands`]; `h [T][n_rows]`, `acc [T][up to BAND]`.
///
/// # Panics
/// If an `h` has another length than the first, or `w` is shorter.
pub(in crate::kernel) fn down_tile<const T: usize>(
    _: Avx512,
    w: &[f32],
    h: [&[f32]; T],
    acc: [&mut [f32]; T],
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { down_tile_inner(w, h, acc) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn axpy_inner<const N: usize>(
    ty: WeightType,
    a: [f32; N],
    rows: [&[u8]; N],
    acc: &mut [f32],
    ahead: [&[u8]; N],
) {
    match ty {
        WeightType::F32 => axpy_f32(a, rows.map(bytemuck::cast_slice), acc),
        WeightType::F16 => axpy_f16(a, rows.map(bytemuck::cast_slice), acc),
        WeightType::BF16 => axpy_bf16(a, rows.map(bytemuck::cast_slice), acc),
        WeightType::Q8_0 => axpy_q8_0(a, rows.map(bytemuck::cast_slice), acc, ahead),
        WeightType::Q4_0 => axpy_q4_0(a, rows.map(bytemuck::cast_slice), acc, ahead),
        _ => unreachable!("axpy with {ty}"),
    }
}

/// Each factor in all lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn splat<const N: usize>(a: [f32; N]) -> [__m512; N] {
    let mut factors = [_mm512_setzero_ps(); N];
    for j in 0..N {
        factors[j] = _mm512_set1_ps(a[j]);
    }
    factors
}

macro_rules! axpy_floats {
    ($name:ident, $ty:ty, $load:ident) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn $name<const N: usize>(a: [f32; N], rows: [&[$ty]; N], acc: &mut [f32]) {
            let (rows, rest) = lanes(rows, acc.len());
            let factors = splat(a);
            let (acc16, acc_rest) = acc.as_chunks_mut::<16>();
            for (i, acc) in acc16.iter_mut().enumerate() {
                let mut sum = load_f32(acc);
                for j in 0..N {
                    sum = _mm512_fmadd_ps(factors[j], $load(&rows[j][i]), sum);
                }
                store_f32(sum, acc);
            }
            if !acc_rest.is_empty() {
                let mut sum = load_f32(&padded(acc_rest));
                for j in 0..N {
                    sum = _mm512_fmadd_ps(factors[j], $load(&rest[j]), sum);
                }
                store_part(sum, acc_rest);
            }
        }
    };
}

axpy_floats!(axpy_f32, f32, load_f32);
axpy_floats!(axpy_f16, u16, load_f16);
axpy_floats!(axpy_bf16, u16, load_bf16);

macro_rules! axpy_blocks {
    ($name:ident, $block:ty, $unpack:ident) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn $name<const N: usize>(a: [f32; N], rows: [&[$block]; N], acc: &mut [f32], ahead: [&[u8]; N]) {
            let acc = acc.as_chunks_mut::<32>().0;
            let mut blocks: [&[$block]; N] = [&[]; N];
            for j in 0..N {
                blocks[j] = &rows[j][..acc.len()];
            }
            let factors = splat(a);
            for (i, acc) in acc.iter_mut().enumerate() {
                let [acc0, acc1] = acc.as_chunks_mut::<16>().0 else { unreachable!("32 = 2 · 16") };
                let mut sums = [load_f32(acc0), load_f32(acc1)];
                // A line a time; what is left, at the end.
                let line = 64 * (i / N)..64 * (i / N) + 1;
                prefetch_bytes(ahead[i % N].get(line).unwrap_or_default());
                for j in 0..N {
                    let w = $unpack(&blocks[j][i]);
                    sums[0] = _mm512_fmadd_ps(factors[j], w[0], sums[0]);
                    sums[1] = _mm512_fmadd_ps(factors[j], w[1], sums[1]);
                }
                store_f32(sums[0], acc0);
                store_f32(sums[1], acc1);
            }
            for j in 0..N {
                prefetch_bytes(&ahead[j][ahead[j].len().min(64 * (acc.len() / N))..]);
            }
        }
    };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn unpack_q8_0(b: &BlockQ8_0) -> [__m512; 2] {
    let ([q0, q1], d) = (bytemuck::cast_ref::<_, [[i8; 16]; 2]>(&b.qs), splat_f16(b.d));
    [_mm512_mul_ps(d, load_i8(q0)), _mm512_mul_ps(d, load_i8(q1))]
}

/// Looks the weights up: a permutation heeds the low four bits of each place alone.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn unpack_q4_0(b: &BlockQ4_0) -> [__m512; 2] {
    let values = _mm512_setr_ps(-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.);
    let table = _mm512_mul_ps(splat_f16(b.d), values);
    let places = _mm512_cvtepu8_epi32(load_bytes(&b.qs));
    [_mm512_permutexvar_ps(places, table), _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(places), table)]
}

axpy_blocks!(axpy_q8_0, BlockQ8_0, unpack_q8_0);
axpy_blocks!(axpy_q4_0, BlockQ4_0, unpack_q4_0);

/// As many lanes as `to` has elements, or all.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn store_part(x: __m512, to: &mut [f32]) {
    let mut all = [0.0; 16];
    store_f32(x, &mut all);
    to.copy_from_slice(&all[..to.len()]);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn axpy_scaled_inner(terms: &[(usize, f32)], scales: &[u16], values: &[i8], acc: &mut [f32]) {
    let n = acc.len();
    let whole = n / 64 * 64;
    let (acc64, acc_rest) = acc.as_chunks_mut::<64>();
    for (i, (acc, scales)) in acc64.iter_mut().zip(scales.as_chunks::<64>().0).enumerate() {
        let acc: &mut [[f32; 16]; 4] = bytemuck::cast_mut(acc);
        let scales: &[[u16; 16]; 4] = bytemuck::cast_ref(scales);
        let mut sums = [_mm512_setzero_ps(); 4];
        for &(row, a) in terms {
            let Some(q) = values[row * n + i * 64..].first_chunk::<64>() else { continue };
            let (q, a): (&[[i8; 16]; 4], _) = (bytemuck::cast_ref(q), _mm512_set1_ps(a));
            for k in 0..4 {
                sums[k] = _mm512_fmadd_ps(a, load_i8(&q[k]), sums[k]);
            }
        }
        for k in 0..4 {
            store_f32(_mm512_fmadd_ps(load_f16(&scales[k]), sums[k], load_f32(&acc[k])), &mut acc[k]);
        }
    }
    for (i, acc) in acc_rest.chunks_mut(16).enumerate() {
        let columns = whole + 16 * i..whole + 16 * i + acc.len();
        let mut sum = _mm512_setzero_ps();
        for &(row, a) in terms {
            let q = padded(&values[row * n..][columns.clone()]);
            sum = _mm512_fmadd_ps(_mm512_set1_ps(a), load_i8(&q), sum);
        }
        let scales = load_f16(&padded(&scales[columns]));
        store_part(_mm512_fmadd_ps(scales, sum, load_f32(&padded(acc))), acc);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_bands_inner(ty: WeightType, rows: &[&[u8]], columns: Range<usize>, out: &mut [f32]) {
    let n = rows.len();
    let (out, _) = out.as_chunks_mut::<16>().0.as_chunks_mut::<4>();
    let out = &mut out[..columns.len().div_ceil(BAND) * n];
    let blocks = columns.start / 32..columns.end / 32;
    let whole_blocks = columns.start.is_multiple_of(32) && columns.end.is_multiple_of(32);
    assert!(ty.block_len() == 1 || whole_blocks, "columns {columns:?} of {ty}");
    for (i, row) in rows.iter().enumerate() {
        let out = out[i..].iter_mut().step_by(n);
        match (Floats::of_row(ty, row), ty) {
            (Some(Floats::F32(w)), _) => decode_floats(&w[columns.clone()], out, |w| load_f32(w)),
            (Some(Floats::F16(w)), _) => decode_floats(&w[columns.clone()], out, |w| load_f16(w)),
            (Some(Floats::BF16(w)), _) => decode_floats(&w[columns.clone()], out, |w| load_bf16(w)),
            (_, WeightType::Q8_0) => {
                decode_blocks(&bytemuck::cast_slice(row)[blocks.clone()], out, |b| unpack_q8_0(b));
            }
            (_, WeightType::Q4_0) => {
                decode_blocks(&bytemuck::cast_slice(row)[blocks.clone()], out, |b| unpack_q4_0(b));
            }
            _ => unreachable!("axpy with {ty}"),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn decode_floats<'a, W: Pod>(
    w: &[W],
    out: impl Iterator<Item = &'a mut [[f32; 16]; 4]>,
    load: impl Fn(&[W; 16]) -> __m512,
) {
    for (w, out) in w.chunks(BAND).zip(out) {
        let (w, rest) = w.as_chunks::<16>();
        for k in 0..4 {
            match w.get(k) {
                Some(w) => store_f32(load(w), &mut out[k]),
                None if k == w.len() => store_f32(load(&padded(rest)), &mut out[k]),
                None => out[k] = [0.0; 16],
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn decode_blocks<'a, B>(
    blocks: &[B],
    out: impl Iterator<Item = &'a mut [[f32; 16]; 4]>,
    unpack: impl Fn(&B) -> [__m512; 2],
) {
    for (pair, out) in blocks.chunks(2).zip(out) {
        for k in 0..2 {
            let w = pair.get(k).map_or([_mm512_setzero_ps(); 2], &unpack);
            store_f32(w[0], &mut out[2 * k]);
            store_f32(w[1], &mut out[2 * k + 1]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn down_tile_inner<const T: usize>(w: &[f32], h: [&[f32]; T], acc: [&mut [f32]; T]) {
    if acc.iter().all(|acc| acc.len() == BAND) {
        return down_band(w, h, acc.map(whole_band));
    }
    let mut buffers = [[0.0; BAND]; T];
    for t in 0..T {
        buffers[t][..acc[t].len()].copy_from_slice(acc[t]);
    }
    down_band(w, h, buffers.each_mut().map(|buffer| whole_band(buffer)));
    for t in 0..T {
        acc[t].copy_from_slice(&buffers[t][..acc[t].len()]);
    }
}

/// A band as registers.
fn whole_band(band: &mut [f32]) -> &mut [[f32; 16]; 4] {
    &mut band.as_chunks_mut::<16>().0.as_chunks_mut::<4>().0[0]
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn down_band<const T: usize>(w: &[f32], mut h: [&[f32]; T], acc: [&mut [[f32; 16]; 4]; T]) {
    let n = h.first().map_or(0, |h| h.len());
    let w = &w.as_chunks::<16>().0.as_chunks::<4>().0[..n];
    let mut sums = [[_mm512_setzero_ps(); 4]; T];
    for t in 0..T {
        h[t] = &h[t][..n];
        for k in 0..4 {
            sums[t][k] = load_f32(&acc[t][k]);
        }
    }
    for i in 0..n {
        for t in 0..T {
            let h = _mm512_set1_ps(h[t][i]);
            for k in 0..4 {
                sums[t][k] = _mm512_fmadd_ps(h, load_f32(&w[i][k]), sums[t][k]);
            }
        }
    }
    for t in 0..T {
        for k in 0..4 {
            store_f32(sums[t][k], &mut acc[t][k]);
        }
    }
}
