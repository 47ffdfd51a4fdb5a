//! Slices into registers of 16 f32 and back, and the sum of their lanes.

use std::arch::x86_64::*;

use bytemuck::{Pod, Zeroable};
use half::f16;

/// The first `n` elements of each slice as whole registers of 16, and what is left as one more, padded with zeros.
/// A loop, since `map` on arrays is not always inlined.
#[inline(always)]
pub(super) fn lanes<T: Pod, const N: usize>(x: [&[T]; N], n: usize) -> ([&[[T; 16]]; N], [[T; 16]; N]) {
    let (mut whole, mut rest): ([&[[T; 16]]; N], _) = ([&[]; N], [[T::zeroed(); 16]; N]);
    for j in 0..N {
        let (x, x_rest) = x[j][..n].as_chunks::<16>();
        whole[j] = &x[..n / 16];
        if !n.is_multiple_of(16) {
            rest[j] = padded(x_rest);
        }
    }
    (whole, rest)
}

/// Up to 16 elements, followed by zeros.
#[inline]
pub(super) fn padded<T: Copy + Zeroable>(x: &[T]) -> [T; 16] {
    let mut out = [T::zeroed(); 16];
    out[..x.len()].copy_from_slice(x);
    out
}

/// 16 f32.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn load_f32(x: &[f32; 16]) -> __m512 {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(x))
}

/// 16 f32 to memory.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn store_f32(x: __m512, to: &mut [f32; 16]) {
    *to = bytemuck::cast(x);
}

/// 16 f16 as f32.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn load_f16(x: &[u16; 16]) -> __m512 {
    _mm512_cvtph_ps(bytemuck::pod_read_unaligned(bytemuck::cast_slice(x)))
}

/// 16 bf16 as f32.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn load_bf16(x: &[u16; 16]) -> __m512 {
    let bits = _mm512_cvtepu16_epi32(bytemuck::pod_read_unaligned(bytemuck::cast_slice(x)));
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
}

/// 16 integers as f32.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn load_i8(x: &[i8; 16]) -> __m512 {
    let bytes = bytemuck::pod_read_unaligned(bytemuck::cast_slice(x));
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
}

/// 16 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn load_bytes(x: &[u8; 16]) -> __m128i {
    bytemuck::pod_read_unaligned(x)
}

/// One f16 as f32 in every lane.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn splat_f16(x: f16) -> __m512 {
    _mm512_cvtph_ps(_mm256_set1_epi16(x.to_bits().cast_signed()))
}

/// Sums of the lanes of four registers: halves onto each other, four times, so that the sum of one register does not
/// depend on the other three.
///
/// ```text
/// r_i = x_i + x_(i+8)    s_i = r_i + r_(i+4)    t_i = s_i + s_(i+2)    t_0 + t_1
/// ```
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn sum_lanes(x: [__m512; 4]) -> [f32; 4] {
    let halves = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let (a, b) = (halves(x[0], x[1]), halves(x[2], x[3]));
    let s = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    let t = _mm512_add_ps(s, _mm512_permute_ps::<0b11_10>(s));
    let sums = _mm512_add_ps(t, _mm512_permute_ps::<0b01>(t));
    let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    bytemuck::cast(_mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, sums)))
}

/// The sum of the lanes of each register.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn sums<const R: usize, const T: usize>(acc: [[__m512; T]; R]) -> [[f32; T]; R] {
    let mut out = [[0.0; T]; R];
    let (fours, rest) = acc.as_flattened().as_chunks::<4>();
    let (out_fours, out_rest) = out.as_flattened_mut().as_chunks_mut::<4>();
    for (out, four) in out_fours.iter_mut().zip(fours) {
        *out = sum_lanes(*four);
    }
    let mut four = [_mm512_setzero_ps(); 4];
    four[..rest.len()].copy_from_slice(rest);
    out_rest.copy_from_slice(&sum_lanes(four)[..rest.len()]);
    out
}
