//! The 2-bit copy of a gate: 256 codes in 64 bytes, four rows at once, products summed in 32 bits.

use std::arch::x86_64::*;
use std::ops::Range;

use powerinfer_sparse_ops::GateCopy;

use crate::kernel::gate_copy::{CodeRows, GateToken, active_bits, ahead};
use crate::level::Avx512;

/// Rows at once: their sums are brought together in one register.
const ROWS: usize = 4;

pub(in crate::kernel) fn word<const T: usize>(
    _: Avx512,
    p: &GateCopy,
    rows: CodeRows<'_>,
    neurons: Range<usize>,
    tokens: [GateToken<'_>; T],
) -> [u64; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { word_inner(p, rows, neurons, tokens) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
fn word_inner<const T: usize>(
    p: &GateCopy,
    rows: CodeRows<'_>,
    neurons: Range<usize>,
    tokens: [GateToken<'_>; T],
) -> [u64; T] {
    let mut inputs: [&[[i8; 256]]; T] = [&[]; T];
    for t in 0..T {
        inputs[t] = &tokens[t].q[..rows.n_groups];
    }
    let mut dots = [[0; 64]; T];
    for first in (0..neurons.len()).step_by(ROWS) {
        // Behind the last row it is read again; what comes of it is not used.
        let mut block: [&[[u8; 64]]; ROWS] = [&[]; ROWS];
        for r in 0..ROWS {
            block[r] = &rows.row((neurons.start + first + r).min(neurons.end - 1))[..rows.n_groups];
        }
        let sums = block_dots(rows.n_groups, block, inputs);
        for t in 0..T {
            dots[t][first..first + ROWS].copy_from_slice(&sums[t]);
        }
    }
    active_bits(p, neurons, &dots, tokens)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
#[inline]
fn block_dots<const T: usize>(
    n_groups: usize,
    rows: [&[[u8; 64]]; ROWS],
    inputs: [&[[i8; 256]]; T],
) -> [[i32; ROWS]; T] {
    let three = _mm512_set1_epi8(3);
    let mut acc = [[_mm512_setzero_si512(); ROWS]; T];
    for g in 0..n_groups {
        for r in 0..ROWS {
            _mm_prefetch::<_MM_HINT_T0>(ahead(&rows[r][g]));
            let codes = load(&rows[r][g]);
            let u = [
                _mm512_and_si512(codes, three),
                _mm512_and_si512(_mm512_srli_epi16::<2>(codes), three),
                _mm512_and_si512(_mm512_srli_epi16::<4>(codes), three),
                _mm512_and_si512(_mm512_srli_epi16::<6>(codes), three),
            ];
            for t in 0..T {
                let q = inputs[t][g].as_chunks::<64>().0;
                for k in 0..4 {
                    acc[t][r] = _mm512_dpbusd_epi32(acc[t][r], u[k], load(&q[k]));
                }
            }
        }
    }
    let mut dots = [[0; ROWS]; T];
    for t in 0..T {
        dots[t] = sums(acc[t]);
    }
    dots
}

/// The sum of the lanes of each of four registers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
#[inline]
fn sums(x: [__m512i; ROWS]) -> [i32; ROWS] {
    // Lanes 0 and 1 of each quarter: half sums of the first two registers, and so on.
    let low = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    let high = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    // One sum a register in each quarter.
    let quarters = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    let halves = _mm256_add_epi32(_mm512_castsi512_si256(quarters), _mm512_extracti64x4_epi64::<1>(quarters));
    bytemuck::cast(_mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves)))
}

/// 64 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
#[inline]
fn load<T: bytemuck::Pod>(bytes: &[T; 64]) -> __m512i {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(bytes))
}
