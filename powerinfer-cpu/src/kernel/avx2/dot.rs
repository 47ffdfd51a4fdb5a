//! `row · x`; the formulas are those of the scalar file of the same name.
//!
//! Each vector of a tile has two registers of partial sums, fed in turn, so that an addition need not wait for
//! the one before. Integers: `maddubs` multiplies unsigned by signed bytes and adds neighbours in 16 bits. Signed
//! weights pass their sign to the input: `q · p = |q| · (sign(q) · p)`. The largest such sum, `2 · 128 · 127`, fits.

use std::arch::x86_64::*;

use powerinfer_sparse_ops::WeightType;
use powerinfer_sparse_ops::block::{
    self, BlockIq4Nl, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
    BlockQ8K, IQ4_NL_VALUES,
};

use super::super::{Floats, PIECE};
use super::load::{f16_to_f32, five_bits, load_bf16, load_f16, load_f32, load16, load32, nibbles, sum_f32};
use crate::input::{BlockX8, Input};
use crate::level::Avx2;

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

/// Plain floats.
pub(in crate::kernel) fn dot_floats<const T: usize>(_: Avx2, w: Floats<'_>, x: [&[f32]; T]) -> [f32; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_floats_inner(w, x) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_inner<const T: usize>(ty: WeightType, row: &[u8], x: &Input<'_>, rows: [usize; T]) -> [f32; T] {
    if let Some(floats) = Floats::of_row(ty, row) {
        return dot_floats_inner(floats, rows.map(|r| x.f32(r)));
    }
    let x8 = |r: usize| x.x8(r);
    let x8k = |r: usize| x.x8k(r);
    match ty {
        WeightType::Q8_0 => dot_q8_0(bytemuck::cast_slice(row), rows.map(x8)),
        WeightType::Q4_0 => dot_q4_0(bytemuck::cast_slice(row), rows.map(x8)),
        WeightType::Q5_0 => dot_q5_0(bytemuck::cast_slice(row), rows.map(x8)),
        WeightType::IQ4_NL => dot_iq4_nl(bytemuck::cast_slice(row), rows.map(x8)),
        WeightType::Q4_1 => dot_q4_1(bytemuck::cast_slice(row), rows.map(x8)),
        WeightType::Q5_1 => dot_q5_1(bytemuck::cast_slice(row), rows.map(x8)),
        WeightType::Q4_K => dot_q4_k(bytemuck::cast_slice(row), rows.map(x8k)),
        WeightType::Q5_K => dot_q5_k(bytemuck::cast_slice(row), rows.map(x8k)),
        WeightType::Q6_K => dot_q6_k(bytemuck::cast_slice(row), rows.map(x8k)),
        _ => dot_decoded(ty, row, rows.map(|r| x.f32(r))),
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

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_decoded<const T: usize>(ty: WeightType, row: &[u8], x: [&[f32]; T]) -> [f32; T] {
    let piece_bytes = PIECE / ty.block_len() * ty.block_bytes();
    let mut sums = [0.0; T];
    let mut buffer = [0f32; PIECE];
    for (piece, bytes) in row.chunks(piece_bytes).enumerate() {
        let w = &mut buffer[..bytes.len() / ty.block_bytes() * ty.block_len()];
        block::decode_row(ty, bytes, w);
        let n = w.len();
        let parts = dot_f32(w, x.map(|x| &x[piece * PIECE..][..n]));
        for t in 0..T {
            sums[t] += parts[t];
        }
    }
    sums
}

macro_rules! dot_floats {
    ($name:ident, $ty:ty, $load:ident, $one:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>(w: &[$ty], x: [&[f32]; T]) -> [f32; T] {
            let x = x.map(|x| &x[..w.len()]);
            let (w16, w_rest) = w.as_chunks::<16>();
            let x16 = x.map(|x| x.as_chunks::<16>().0);
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

macro_rules! dot_signed {
    ($name:ident, $block:ty, $unpack:ident) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>(row: &[$block], x: [&[BlockX8]; T]) -> [f32; T] {
            let x = x.map(|x| &x[..row.len()]);
            let mut sums = [[_mm256_setzero_ps(); 2]; T];
            let (pairs, last) = row.as_chunks::<2>();
            for (i, pair) in pairs.iter().enumerate() {
                for j in 0..2 {
                    let q = $unpack(&pair[j]);
                    let (d, size) = (f16_to_f32(pair[j].d), _mm256_abs_epi8(q));
                    for t in 0..T {
                        let x = &x[t][2 * i + j];
                        let dots = products(size, _mm256_sign_epi8(load32(&x.q), q));
                        sums[t][j] = _mm256_fmadd_ps(_mm256_set1_ps(d * x.d), dots, sums[t][j]);
                    }
                }
            }
            for block in last {
                let q = $unpack(block);
                let (d, size) = (f16_to_f32(block.d), _mm256_abs_epi8(q));
                for t in 0..T {
                    let x = &x[t][row.len() - 1];
                    let dots = products(size, _mm256_sign_epi8(load32(&x.q), q));
                    sums[t][0] = _mm256_fmadd_ps(_mm256_set1_ps(d * x.d), dots, sums[t][0]);
                }
            }
            sums.map(|[a, b]| sum_f32(_mm256_add_ps(a, b)))
        }
    };
}

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q8_0(b: &BlockQ8_0) -> __m256i {
    load32(&b.qs)
}

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q4_0(b: &BlockQ4_0) -> __m256i {
    _mm256_sub_epi8(nibbles(&b.qs), _mm256_set1_epi8(8))
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

dot_signed!(dot_q8_0, BlockQ8_0, unpack_q8_0);
dot_signed!(dot_q4_0, BlockQ4_0, unpack_q4_0);
dot_signed!(dot_q5_0, BlockQ5_0, unpack_q5_0);
dot_signed!(dot_iq4_nl, BlockIq4Nl, unpack_iq4_nl);

macro_rules! dot_offset {
    ($name:ident, $block:ty, $unpack:ident) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>(row: &[$block], x: [&[BlockX8]; T]) -> [f32; T] {
            let x = x.map(|x| &x[..row.len()]);
            let mut sums = [_mm256_setzero_ps(); T];
            let mut offsets = [0f32; T];
            for (i, block) in row.iter().enumerate() {
                let q = $unpack(block);
                let (d, m) = (f16_to_f32(block.d), f16_to_f32(block.m));
                for t in 0..T {
                    let x = &x[t][i];
                    let dots = products(q, load32(&x.q));
                    sums[t] = _mm256_fmadd_ps(_mm256_set1_ps(d * x.d), dots, sums[t]);
                    offsets[t] = m.mul_add(x.sum, offsets[t]);
                }
            }
            std::array::from_fn(|t| sum_f32(sums[t]) + offsets[t])
        }
    };
}

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q4_1(b: &BlockQ4_1) -> __m256i {
    nibbles(&b.qs)
}

#[target_feature(enable = "avx2")]
#[inline]
fn unpack_q5_1(b: &BlockQ5_1) -> __m256i {
    five_bits(&b.qs, b.qh)
}

dot_offset!(dot_q4_1, BlockQ4_1, unpack_q4_1);
dot_offset!(dot_q5_1, BlockQ5_1, unpack_q5_1);

/// The `part`-th 32 bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn part32<T: bytemuck::Pod>(bytes: &[T], part: usize) -> __m256i {
    load32(&bytes.as_chunks::<32>().0[part])
}

macro_rules! dot_k_offset {
    ($name:ident, $block:ty, $unpack:ident) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const T: usize>(row: &[$block], x: [&[BlockQ8K]; T]) -> [f32; T] {
            let x = x.map(|x| &x[..row.len()]);
            let mut sums = [_mm256_setzero_ps(); T];
            let mut offset_sums = [_mm256_setzero_ps(); T];
            for (i, block) in row.iter().enumerate() {
                let (scales, offsets) = block.scales_mins();
                // An offset stands for two sums of 16 inputs.
                let twice: [u8; 16] = std::array::from_fn(|i| offsets[i / 2]);
                let offsets = _mm256_cvtepu8_epi16(load16(&twice));
                let mut totals = [_mm256_setzero_si256(); T];
                for sub in 0..8 {
                    let q = $unpack(block, sub);
                    let scale = _mm256_set1_epi16(i16::from(scales[sub]));
                    for t in 0..T {
                        let pairs = _mm256_maddubs_epi16(q, part32(&x[t][i].qs, sub));
                        totals[t] = _mm256_add_epi32(totals[t], _mm256_madd_epi16(pairs, scale));
                    }
                }
                let (d, d_min) = (f16_to_f32(block.d), f16_to_f32(block.dmin));
                for t in 0..T {
                    let x = &x[t][i];
                    let d = _mm256_set1_ps(d * x.d);
                    sums[t] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(totals[t]), sums[t]);
                    let x_sums = bytemuck::cast::<[i16; 16], __m256i>(x.bsums);
                    let offset = _mm256_cvtepi32_ps(_mm256_madd_epi16(offsets, x_sums));
                    offset_sums[t] = _mm256_fmadd_ps(_mm256_set1_ps(d_min * x.d), offset, offset_sums[t]);
                }
            }
            std::array::from_fn(|t| sum_f32(_mm256_sub_ps(sums[t], offset_sums[t])))
        }
    };
}

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
    let bit = _mm256_set1_epi8((1u8 << sub).cast_signed());
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(load32(&b.qh), bit), bit);
    _mm256_or_si256(_mm256_and_si256(q, _mm256_set1_epi8(15)), _mm256_and_si256(set, _mm256_set1_epi8(16)))
}

dot_k_offset!(dot_q4_k, BlockQ4K, unpack_q4_k);
dot_k_offset!(dot_q5_k, BlockQ5K, unpack_q5_k);

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

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_q6_k<const T: usize>(row: &[BlockQ6K], x: [&[BlockQ8K]; T]) -> [f32; T] {
    let x = x.map(|x| &x[..row.len()]);
    let mut sums = [_mm256_setzero_ps(); T];
    for (i, block) in row.iter().enumerate() {
        let scales = _mm256_cvtepi8_epi16(load16(&block.scales));
        let mut totals = [_mm256_setzero_si256(); T];
        for part in 0..8 {
            let q = unpack_q6_k(block, part);
            // Eight products in 16 bits have the first scale, eight the second.
            let scale = _mm256_set_m128i(
                _mm_set1_epi16(i16::from(block.scales[2 * part + 1])),
                _mm_set1_epi16(i16::from(block.scales[2 * part])),
            );
            for t in 0..T {
                let pairs = _mm256_maddubs_epi16(q, part32(&x[t][i].qs, part));
                totals[t] = _mm256_add_epi32(totals[t], _mm256_madd_epi16(pairs, scale));
            }
        }
        let d = f16_to_f32(block.d);
        for t in 0..T {
            let x = &x[t][i];
            // The weights are 32 less than `q`.
            let x_sums = bytemuck::cast::<[i16; 16], __m256i>(x.bsums);
            let shift = _mm256_slli_epi32::<5>(_mm256_madd_epi16(scales, x_sums));
            let total = _mm256_cvtepi32_ps(_mm256_sub_epi32(totals[t], shift));
            sums[t] = _mm256_fmadd_ps(_mm256_set1_ps(d * x.d), total, sums[t]);
        }
    }
    sums.map(|sum| sum_f32(sum))
}
