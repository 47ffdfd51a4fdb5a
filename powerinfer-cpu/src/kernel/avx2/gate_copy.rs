//! The 2-bit copy of a gate: 128 codes in 32 bytes, products in 16 bits, sums in 32.

use std::arch::x86_64::*;
use std::ops::Range;

use powerinfer_sparse_ops::GateCopy;

use super::load::{first, load32};
use crate::kernel::gate_copy::{CodeRows, GateToken, active_bits, ahead};
use crate::level::Avx2;

pub(in crate::kernel) fn word<const T: usize>(
    _: Avx2,
    p: &GateCopy,
    rows: CodeRows<'_>,
    neurons: Range<usize>,
    tokens: [GateToken<'_>; T],
) -> [u64; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { word_inner(p, rows, neurons, tokens) }
}

#[target_feature(enable = "avx2,fma")]
fn word_inner<const T: usize>(
    p: &GateCopy,
    rows: CodeRows<'_>,
    neurons: Range<usize>,
    tokens: [GateToken<'_>; T],
) -> [u64; T] {
    let mut inputs: [&[[i8; 256]]; T] = [&[]; T];
    for t in 0..T {
        inputs[t] = tokens[t].q;
    }
    let mut dots = [[0; 64]; T];
    for (i, neuron) in neurons.clone().enumerate() {
        let sums = row_dots(rows.row(neuron), inputs);
        for t in 0..T {
            dots[t][i] = sums[t];
        }
    }
    active_bits(p, neurons, &dots, tokens)
}

#[target_feature(enable = "avx2")]
#[inline]
fn row_dots<const T: usize>(row: &[[u8; 64]], inputs: [&[[i8; 256]]; T]) -> [i32; T] {
    let inputs = first(inputs, row.len());
    let three = _mm256_set1_epi8(3);
    let mut acc = [_mm256_setzero_si256(); T];
    for (g, group) in row.iter().enumerate() {
        _mm_prefetch::<_MM_HINT_T0>(ahead(group));
        for (half, codes) in group.as_chunks::<32>().0.iter().enumerate() {
            let codes = load32(codes);
            let u = [
                _mm256_and_si256(codes, three),
                _mm256_and_si256(_mm256_srli_epi16::<2>(codes), three),
                _mm256_and_si256(_mm256_srli_epi16::<4>(codes), three),
                _mm256_and_si256(_mm256_srli_epi16::<6>(codes), three),
            ];
            for t in 0..T {
                let q = inputs[t][g].as_chunks::<32>().0;
                // At most 8 · 3 · 127 = 3048 in magnitude, far from the limit of 16 bits.
                let mut sum = _mm256_setzero_si256();
                for k in 0..4 {
                    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(u[k], load32(&q[2 * k + half])));
                }
                acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
            }
        }
    }
    let mut dots = [0; T];
    for t in 0..T {
        dots[t] = sum_i32(acc[t]);
    }
    dots
}

#[target_feature(enable = "avx2")]
#[inline]
fn sum_i32(x: __m256i) -> i32 {
    let x = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
    let x = _mm_add_epi32(x, _mm_shuffle_epi32::<0b10_11>(x));
    _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32::<1>(x)))
}
