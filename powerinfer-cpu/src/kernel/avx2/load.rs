//! Bytes into registers and back, and the unpacking of 32 quantised weights.

use std::arch::x86_64::*;

use half::f16;

/// The first `n` elements of each slice, so that the compiler sees the lengths: that saves a check for each block of
/// each vector. A loop, since `map` on arrays is not always inlined.
#[inline(always)]
pub(super) fn first<T, const N: usize>(mut x: [&[T]; N], n: usize) -> [&[T]; N] {
    for x in &mut x {
        *x = &x[..n];
    }
    x
}

/// Each slice as whole chunks, without what is left.
#[inline(always)]
pub(super) fn chunks<const C: usize, T, const N: usize>(x: [&[T]; N]) -> [&[[T; C]]; N] {
    let mut out: [&[[T; C]]; N] = [&[]; N];
    for t in 0..N {
        out[t] = x[t].as_chunks::<C>().0;
    }
    out
}

/// Bytes that weights are asked for ahead of their use.
const AHEAD: usize = 1024;

/// Asks for the weights some way behind `at`, which as a rule belong to the next row. The processor's own prefetch
/// does not look far enough ahead to hide the memory behind the integer kernels: on one core of a 2.1 GHz Sapphire
/// Rapids this made Q8_0 rows of 4096 a third faster, Q4_0 a tenth, and floats no faster.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn prefetch_behind<T>(at: &T) {
    let ahead = std::ptr::from_ref(at).cast::<i8>().wrapping_add(AHEAD);
    _mm_prefetch::<_MM_HINT_T0>(ahead);
}

/// 32 bytes.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load32<T: bytemuck::Pod>(bytes: &[T; 32]) -> __m256i {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(bytes))
}

/// 16 bytes.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load16<T: bytemuck::Pod>(bytes: &[T; 16]) -> __m128i {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(bytes))
}

/// Eight f32.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load_f32(x: &[f32; 8]) -> __m256 {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(x))
}

/// 32 f32.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load_4_f32(x: &[f32; 32]) -> [__m256; 4] {
    bytemuck::cast(*x)
}

/// Eight f32 to memory.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn store_f32(x: __m256, to: &mut [f32; 8]) {
    *to = bytemuck::cast(x);
}

/// Eight integers as f32; extended as they are loaded.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load_i8(x: &[i8; 8]) -> __m256 {
    let bytes = _mm_cvtsi64_si128(bytemuck::pod_read_unaligned(bytemuck::cast_slice(x)));
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
}

/// 32 integers as f32.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load_32_i8(x: &[i8; 32]) -> [__m256; 4] {
    let x8 = x.as_chunks::<8>().0;
    [load_i8(&x8[0]), load_i8(&x8[1]), load_i8(&x8[2]), load_i8(&x8[3])]
}

/// The 32 integers of a register as f32.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn i8_to_f32(q: __m256i) -> [__m256; 4] {
    let (low, high) = (_mm256_castsi256_si128(q), _mm256_extracti128_si256::<1>(q));
    let parts = [low, _mm_srli_si128::<8>(low), high, _mm_srli_si128::<8>(high)];
    let mut out = [_mm256_setzero_ps(); 4];
    for k in 0..4 {
        out[k] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(parts[k]));
    }
    out
}

/// Eight f16 as f32.
#[target_feature(enable = "avx2,f16c")]
#[inline]
pub(super) fn load_f16(x: &[u16; 8]) -> __m256 {
    _mm256_cvtph_ps(bytemuck::pod_read_unaligned(bytemuck::cast_slice(x)))
}

/// Eight bf16 as f32.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load_bf16(x: &[u16; 8]) -> __m256 {
    let bits = _mm256_cvtepu16_epi32(bytemuck::pod_read_unaligned(bytemuck::cast_slice(x)));
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
}

/// One f16 as f32; the conversion in `half` asks for the CPU's features each time.
#[target_feature(enable = "avx2,f16c")]
#[inline]
pub(super) fn f16_to_f32(x: f16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(x.to_bits()))))
}

/// Sum of the lanes: halves onto each other, three times.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn sum_f32(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

/// The nibbles of 16 bytes: low ones in the first half, high ones in the second.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn nibbles(qs: &[u8; 16]) -> __m256i {
    let low = load16(qs);
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(low), low);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// Nibbles with a fifth bit, bit `i` of `qh` for value `i`.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn five_bits(qs: &[u8; 16], qh: [u8; 4]) -> __m256i {
    // Byte i / 8 of `qh` into byte i, then a byte is all ones where its bit i % 8 is set.
    let spread = _mm256_shuffle_epi8(
        _mm256_set1_epi32(i32::from_le_bytes(qh)),
        _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303),
    );
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
    _mm256_or_si256(nibbles(qs), _mm256_and_si256(set, _mm256_set1_epi8(16)))
}
