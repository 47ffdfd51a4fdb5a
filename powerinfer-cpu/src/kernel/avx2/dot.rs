//! `row · x`; the formulas are those of the scalar file of the same name.
//!
//! Each vector of a tile has two registers of partial sums, fed in turn, so that an addition need not wait for
//! the one before. Integers: `maddubs` multiplies unsigned by signed bytes and adds neighbours in 16 bits. Signed
//! weights pass their sign to the input: `q · p = |q| · (sign(q) · p)`. The largest such sum, `2 · 128 · 127`, fits.

use std::arch::x86_64::*;

use powerinfer_sparse_ops::WeightType;
use powerinfer_sparse_ops::block::{
    BlockIq4Nl, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8K,
    IQ4_NL_VALUES, MXFP4_VALUES,
};

use super::super::Floats;
use super::load::{
    chunks, f16_to_f32, first, five_bits, load_bf16, load_f16, load_f32, load16, load32, nibbles,
    prefetch_behind, sum_f32,
};
use crate::input::Input;
use crate::level::Avx2;
use crate::planar::{GROUP, Planar, PlanarRow, PlanarX};

pub(in crate::kernel) fn dot<const T: usize>(
    _: Avx2,
    ty: WeightType,
    row: &[u8],
    x: &Input<'_>,
    rows: [usize; T],
) -> [f32; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_inner(ty, row, x, rows) }
}

/// Integers apart from scales.
pub(in crate::kernel) fn dot_planar<const T: usize>(
    _: Avx2,
    kind: Planar,
    row: PlanarRow<'_>,
    x: [PlanarX<'_>; T],
) -> [f32; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_planar_inner(kind, row, x) }
}

/// Plain floats.
pub(in crate::kernel) fn dot_floats<const T: usize>(_: Avx2, w: Floats<'_>, x: [&[f32]; T]) -> [f32; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_floats_inner(w, x) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_inner<const T: usize>(ty: WeightType, row: &[u8], x: &Input<'_>, rows: [usize; T]) -> [f32; T] {
    match ty {
        WeightType::Q5_0 => dot_q5_0(bytemuck::cast_slice(row), x.x8s(rows)),
        WeightType::IQ4_NL => dot_iq4_nl(bytemuck::cast_slice(row), x.x8s(rows)),
        WeightType::Q5_1 => dot_q5_1(bytemuck::cast_slice(row), x.x8s(rows)),
        WeightType::Q4_K => dot_q4_k(bytemuck::cast_slice(row), x.x8ks(rows)),
        WeightType::Q5_K => dot_q5_k(bytemuck::cast_slice(row), x.x8ks(rows)),
        WeightType::Q6_K => dot_q6_k(bytemuck::cast_slice(row), x.x8ks(rows)),
        WeightType::Q2_K => dot_q2_k(bytemuck::cast_slice(row), x.x8ks(rows)),
        WeightType::Q3_K => dot_q3_k(bytemuck::cast_slice(row), x.x8ks(rows)),
        WeightType::MXFP4 => dot_mxfp4(bytemuck::cast_slice(row), x.x8s(rows)),
        _ => unreachable!("dot with {ty}: every type has a kernel"),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_planar_inner<const T: usize>(kind: Planar, row: PlanarRow<'_>, x: [PlanarX<'_>; T]) -> [f32; T] {
    match kind {
        Planar::Q8_0 => dot_planar_q8_0(row, x),
        Planar::Q4_0 => dot_planar_q4_0(row, x),
        Planar::Q4_1 => dot_planar_q4_1(row, x),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_floats_inner<const T: usize>(w: Floats<'_>, x: [&[f32]; T]) -> [f32; T] {
    match w {
        Floats::F32(w) => dot_f32(w, x),
        Floats::F16(w) => dot_f16(w, x),
        Floats::BF16(w) => dot_bf16(w, x),
    }
}

macro_rules! dot_floats {
    ($name:ident, $ty:ty, $load:ident, $one:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>(w: &[$ty], x: [&[f32]; T]) -> [f32; T] {
            let x = first(x, w.len());
            let (w16, w_rest) = w.as_chunks::<16>();
            let x16 = chunks::<16, _, T>(x);
            let mut sums = [[_mm256_setzero_ps(); 2]; T];
            for (i, w) in w16.iter().enumerate() {
                let [w0, w1] = w.as_chunks::<8>().0 else { unreachable!("16 = 2 · 8") };
                let (w0, w1) = ($load(w0), $load(w1));
                for t in 0..T {
                    let [x0, x1] = x16[t][i].as_chunks::<8>().0 else { unreachable!("16 = 2 · 8") };
                    sums[t][0] = _mm256_fmadd_ps(w0, load_f32(x0), sums[t][0]);
                    sums[t][1] = _mm256_fmadd_ps(w1, load_f32(x1), sums[t][1]);
                }
            }
            let mut out = [0.0; T];
            for t in 0..T {
                let x_rest = &x[t][w.len() - w_rest.len()..];
                let mut sum = sum_f32(_mm256_add_ps(sums[t][0], sums[t][1]));
                for (w, x) in w_rest.iter().zip(x_rest) {
                    sum = $one(*w).mul_add(*x, sum);
                }
                out[t] = sum;
            }
            out
        }
    };
}

dot_floats!(dot_f32, f32, load_f32, |w: f32| w);
dot_floats!(dot_f16, u16, load_f16, |w| f16_to_f32(half::f16::from_bits(w)));
dot_floats!(dot_bf16, u16, load_bf16, |w| half::bf16::from_bits(w).to_f32());

/// `Σ |q| · p` by groups of four, `p` with the sign of `q` already.
#[target_feature(enable = "avx2")]
#[inline]
fn products(q: __m256i, p: __m256i) -> __m256 {
    let pairs = _mm256_maddubs_epi16(q, p);
    _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// The 32 integers of a block of a vector.
#[target_feature(enable = "avx2")]
#[inline]
fn load_x8(x: &PlanarX<'_>, block: usize) -> __m256i {
    let [first, second] = x.block(block);
    _mm256_set_m128i(load16(second), load16(first))
}

// Two blocks of a row after the other, each with a sum of its own in the lanes of a register.
macro_rules! dot_planar {
    ($name:ident, |$row:ident, $at:ident, $group:ident| $unpack:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>($row: PlanarRow<'_>, x: [PlanarX<'_>; T]) -> [f32; T] {
            let n_blocks = $row.scales.len();
            let mut sums = [[_mm256_setzero_ps(); 2]; T];
            let mut offsets = [0f32; T];
            for $at in 0..n_blocks {
                // Blocks of this one's group.
                let $group = GROUP.min(n_blocks - $at / GROUP * GROUP);
                let q: __m256i = $unpack;
                let d = f16_to_f32(half::f16::from_bits($row.scales[$at]));
                let size = _mm256_abs_epi8(q);
                for t in 0..T {
                    let x = &x[t];
                    let dots = products(size, _mm256_sign_epi8(load_x8(x, $at), q));
                    let sum = &mut sums[t][$at % 2];
                    *sum = _mm256_fmadd_ps(_mm256_set1_ps(d * x.d[$at]), dots, *sum);
                }
                if let Some(m) = $row.mins.get($at) {
                    let m = f16_to_f32(half::f16::from_bits(*m));
                    for t in 0..T {
                        offsets[t] = m.mul_add(x[t].d[$at] * x[t].sums[$at] as f32, offsets[t]);
                    }
                }
            }
            let mut out = [0.0; T];
            for t in 0..T {
                out[t] = sum_f32(_mm256_add_ps(sums[t][0], sums[t][1])) + offsets[t];
            }
            out
        }
    };
}

dot_planar!(dot_planar_q8_0, |row, at, n| {
    let halves = row.quants.as_chunks::<16>().0;
    let first = at / GROUP * (2 * GROUP) + at % GROUP;
    let (first, second) = (&halves[first], &halves[first + n]);
    prefetch_behind(first);
    _mm256_xor_si256(_mm256_set_m128i(load16(second), load16(first)), _mm256_set1_epi8(-128))
});
dot_planar!(dot_planar_q4_0, |row, at, _n| {
    let qs = &row.quants.as_chunks::<16>().0[at];
    prefetch_behind(qs);
    _mm256_sub_epi8(nibbles(qs), _mm256_set1_epi8(8))
});
dot_planar!(dot_planar_q4_1, |row, at, _n| {
    let qs = &row.quants.as_chunks::<16>().0[at];
    prefetch_behind(qs);
    nibbles(qs)
});

macro_rules! dot_signed {
    ($name:ident, $block:ty, $unpack:ident, $scale:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>(row: &[$block], x: [PlanarX<'_>; T]) -> [f32; T] {
            let mut sums = [[_mm256_setzero_ps(); 2]; T];
            let (pairs, last) = row.as_chunks::<2>();
            for (i, pair) in pairs.iter().enumerate() {
                prefetch_behind(pair);
                for j in 0..2 {
                    let q = $unpack(&pair[j]);
                    let (d, size) = ($scale(&pair[j]), _mm256_abs_epi8(q));
                    for t in 0..T {
                        let b = 2 * i + j;
                        let dots = products(size, _mm256_sign_epi8(load_x8(&x[t], b), q));
                        sums[t][j] = _mm256_fmadd_ps(_mm256_set1_ps(d * x[t].d[b]), dots, sums[t][j]);
                    }
                }
            }
            for block in last {
                let q = $unpack(block);
                let (d, size) = ($scale(block), _mm256_abs_epi8(q));
                for t in 0..T {
                    let b = row.len() - 1;
                    let dots = products(size, _mm256_sign_epi8(load_x8(&x[t], b), q));
                    sums[t][0] = _mm256_fmadd_ps(_mm256_set1_ps(d * x[t].d[b]), dots, sums[t][0]);
                }
            }
            let mut out = [0.0; T];
            for t in 0..T {
                out[t] = sum_f32(_mm256_add_ps(sums[t][0], sums[t][1]));
            }
            out
        }
    };
}

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q5_0(b: &BlockQ5_0) -> __m256i {
    _mm256_sub_epi8(five_bits(&b.qs, b.qh), _mm256_set1_epi8(16))
}

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_iq4_nl(b: &BlockIq4Nl) -> __m256i {
    let values = _mm256_broadcastsi128_si256(load16(&IQ4_NL_VALUES));
    _mm256_shuffle_epi8(values, nibbles(&b.qs))
}

dot_signed!(dot_q5_0, BlockQ5_0, unpack_q5_0, |b: &BlockQ5_0| f16_to_f32(b.d));
#[target_feature(enable = "avx2")]
#[inline]
fn unpack_mxfp4(b: &BlockMxfp4) -> __m256i {
    let values = _mm256_broadcastsi128_si256(load16(&MXFP4_VALUES));
    _mm256_shuffle_epi8(values, nibbles(&b.qs))
}

dot_signed!(dot_mxfp4, BlockMxfp4, unpack_mxfp4, BlockMxfp4::scale);
dot_signed!(dot_iq4_nl, BlockIq4Nl, unpack_iq4_nl, |b: &BlockIq4Nl| f16_to_f32(b.d));

macro_rules! dot_offset {
    ($name:ident, $block:ty, $unpack:ident) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>(row: &[$block], x: [PlanarX<'_>; T]) -> [f32; T] {
            let mut sums = [_mm256_setzero_ps(); T];
            let mut offsets = [0f32; T];
            for (i, block) in row.iter().enumerate() {
                prefetch_behind(block);
                let q = $unpack(block);
                let (d, m) = (f16_to_f32(block.d), f16_to_f32(block.m));
                for t in 0..T {
                    let x = &x[t];
                    let dots = products(q, load_x8(x, i));
                    sums[t] = _mm256_fmadd_ps(_mm256_set1_ps(d * x.d[i]), dots, sums[t]);
                    offsets[t] = m.mul_add(x.d[i] * x.sums[i] as f32, offsets[t]);
                }
            }
            let mut out = [0.0; T];
            for t in 0..T {
                out[t] = sum_f32(sums[t]) + offsets[t];
            }
            out
        }
    };
}

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q5_1(b: &BlockQ5_1) -> __m256i {
    five_bits(&b.qs, b.qh)
}

dot_offset!(dot_q5_1, BlockQ5_1, unpack_q5_1);

/// The `part`-th 32 bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn part32<T: bytemuck::Pod>(bytes: &[T], part: usize) -> __m256i {
    load32(&bytes.as_chunks::<32>().0[part])
}

/// The scale of 32 weights, for each of 16 sums of two products.
#[target_feature(enable = "avx2")]
#[inline]
fn one_scale(scales: &[u8; 8], part: usize) -> __m256i {
    _mm256_set1_epi16(i16::from(scales[part]))
}

/// The same with a scale for each 16 weights.
#[target_feature(enable = "avx2")]
#[inline]
fn two_scales<S: Copy + Into<i16>>(scales: &[S; 16], part: usize) -> __m256i {
    let (low, high) = (scales[2 * part].into(), scales[2 * part + 1].into());
    _mm256_set_m128i(_mm_set1_epi16(high), _mm_set1_epi16(low))
}

/// Sums of 16 inputs.
#[target_feature(enable = "avx2")]
#[inline]
fn x_sums(x: &BlockQ8K) -> __m256i {
    bytemuck::cast(x.bsums)
}

// `scale · q − min`, all of them unsigned.
macro_rules! dot_k_min {
    ($name:ident, $block:ty, $unpack:ident, $scale:ident, $mins:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>(row: &[$block], x: [&[BlockQ8K]; T]) -> [f32; T] {
            let x = first(x, row.len());
            let mut sums = [_mm256_setzero_ps(); T];
            let mut min_sums = [_mm256_setzero_ps(); T];
            for (i, block) in row.iter().enumerate() {
                let (scales, mins) = block.scales_mins();
                let mins: [u8; 16] = $mins(mins);
                let mins = _mm256_cvtepu8_epi16(load16(&mins));
                let mut totals = [_mm256_setzero_si256(); T];
                for part in 0..8 {
                    let q = $unpack(block, part);
                    let scale = $scale(&scales, part);
                    for t in 0..T {
                        let pairs = _mm256_maddubs_epi16(q, part32(&x[t][i].qs, part));
                        totals[t] = _mm256_add_epi32(totals[t], _mm256_madd_epi16(pairs, scale));
                    }
                }
                let (d, d_min) = (f16_to_f32(block.d), f16_to_f32(block.dmin));
                for t in 0..T {
                    let x = &x[t][i];
                    let total = _mm256_cvtepi32_ps(totals[t]);
                    sums[t] = _mm256_fmadd_ps(_mm256_set1_ps(d * x.d), total, sums[t]);
                    let total = _mm256_cvtepi32_ps(_mm256_madd_epi16(mins, x_sums(x)));
                    min_sums[t] = _mm256_fmadd_ps(_mm256_set1_ps(d_min * x.d), total, min_sums[t]);
                }
            }
            let mut out = [0.0; T];
            for t in 0..T {
                out[t] = sum_f32(_mm256_sub_ps(sums[t], min_sums[t]));
            }
            out
        }
    };
}

/// The 2-bit weights `part` of a block that keeps four of them in a byte, with garbage above.
#[target_feature(enable = "avx2")]
#[inline]
fn two_bits(qs: &[u8; 64], part: usize) -> __m256i {
    let q = _mm256_srl_epi16(part32(qs, part / 4), _mm_cvtsi32_si128(part as i32 % 4 * 2));
    _mm256_and_si256(q, _mm256_set1_epi8(3))
}

/// `value` in each byte where bit `bit` of `bytes` is set.
#[target_feature(enable = "avx2")]
#[inline]
fn where_set(bytes: &[u8; 32], bit: usize, value: i8) -> __m256i {
    let mask = _mm256_set1_epi8((1u8 << bit).cast_signed());
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(load32(bytes), mask), mask);
    _mm256_and_si256(set, _mm256_set1_epi8(value))
}

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q2_k(b: &BlockQ2K, part: usize) -> __m256i {
    two_bits(&b.qs, part)
}

/// A min for each 32 weights, as one for each 16.
fn twice(mins: [u8; 8]) -> [u8; 16] {
    std::array::from_fn(|i| mins[i / 2])
}

dot_k_min!(dot_q2_k, BlockQ2K, unpack_q2_k, two_scales, |mins| mins);
dot_k_min!(dot_q4_k, BlockQ4K, unpack_q4_k, one_scale, twice);
dot_k_min!(dot_q5_k, BlockQ5K, unpack_q5_k, one_scale, twice);

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q4_k(b: &BlockQ4K, sub: usize) -> __m256i {
    let both = part32(&b.qs, sub / 2);
    let q = if sub.is_multiple_of(2) { both } else { _mm256_srli_epi16::<4>(both) };
    _mm256_and_si256(q, _mm256_set1_epi8(15))
}

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q5_k(b: &BlockQ5K, sub: usize) -> __m256i {
    let both = part32(&b.qs, sub / 2);
    let q = if sub.is_multiple_of(2) { both } else { _mm256_srli_epi16::<4>(both) };
    _mm256_or_si256(_mm256_and_si256(q, _mm256_set1_epi8(15)), where_set(&b.qh, sub, 16))
}

/// The 32 weights `part` of a Q6_K block, 0 to 63.
#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q6_k(b: &BlockQ6K, part: usize) -> __m256i {
    let (half, quarter) = (part / 4, part % 4);
    let low = part32(&b.ql, half * 2 + quarter % 2);
    let low = if quarter < 2 { low } else { _mm256_srli_epi16::<4>(low) };
    let high = _mm256_srl_epi16(part32(&b.qh, half), _mm_cvtsi32_si128(quarter as i32 * 2));
    let high = _mm256_and_si256(high, _mm256_set1_epi8(3));
    _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), _mm256_slli_epi16::<4>(high))
}

/// The 32 weights `part` of a Q3_K block, 0 to 7.
#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q3_k(b: &BlockQ3K, part: usize) -> __m256i {
    _mm256_or_si256(two_bits(&b.qs, part), where_set(&b.hmask, part, 4))
}

// `scale · (q − 2^shift)` with signed scales.
macro_rules! dot_k_shift {
    ($name:ident, $block:ty, $unpack:ident, $scales:expr, $shift:literal) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>(row: &[$block], x: [&[BlockQ8K]; T]) -> [f32; T] {
            let x = first(x, row.len());
            let mut sums = [_mm256_setzero_ps(); T];
            for (i, block) in row.iter().enumerate() {
                let scales: [i8; 16] = $scales(block);
                let mut totals = [_mm256_setzero_si256(); T];
                for part in 0..8 {
                    let q = $unpack(block, part);
                    let scale = two_scales(&scales, part);
                    for t in 0..T {
                        let pairs = _mm256_maddubs_epi16(q, part32(&x[t][i].qs, part));
                        totals[t] = _mm256_add_epi32(totals[t], _mm256_madd_epi16(pairs, scale));
                    }
                }
                let scales = _mm256_cvtepi8_epi16(load16(&scales));
                let d = f16_to_f32(block.d);
                for t in 0..T {
                    let x = &x[t][i];
                    let shift = _mm256_slli_epi32::<$shift>(_mm256_madd_epi16(scales, x_sums(x)));
                    let total = _mm256_cvtepi32_ps(_mm256_sub_epi32(totals[t], shift));
                    sums[t] = _mm256_fmadd_ps(_mm256_set1_ps(d * x.d), total, sums[t]);
                }
            }
            let mut out = [0.0; T];
            for t in 0..T {
                out[t] = sum_f32(sums[t]);
            }
            out
        }
    };
}

dot_k_shift!(dot_q3_k, BlockQ3K, unpack_q3_k, BlockQ3K::group_scales, 2);
dot_k_shift!(dot_q6_k, BlockQ6K, unpack_q6_k, |b: &BlockQ6K| b.scales, 5);
