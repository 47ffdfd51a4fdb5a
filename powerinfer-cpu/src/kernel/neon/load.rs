//! Bytes into registers and back, and what several kernels do with them.

use std::arch::aarch64::*;
use std::arch::asm;

use half::f16;

/// Eight f32.
pub(super) type Eight = [float32x4_t; 2];

/// The first `n` elements of each slice, so that the compiler sees the lengths: that saves a check for each block of
/// each vector.
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

/// Up to `C` values, filled up with zeros.
#[inline(always)]
pub(super) fn padded<const C: usize, T: Copy + Default>(x: &[T]) -> [T; C] {
    let mut out = [T::default(); C];
    out[..x.len()].copy_from_slice(x);
    out
}

/// `sum += a · b` by groups of four: lane `l` gets the products of the bytes `4·l .. 4·l + 4`, exactly.
#[target_feature(enable = "neon,dotprod")]
#[inline]
pub(super) fn dot_4(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: LEVEL-DETECTED: the CPU has the instruction, which touches these three registers and nothing else.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// The sums of products of 32 bytes, by groups of four and halves onto each other.
#[target_feature(enable = "neon,dotprod")]
#[inline]
pub(super) fn dot_32(a: [int8x16_t; 2], b: [int8x16_t; 2]) -> int32x4_t {
    dot_4(dot_4(vdupq_n_s32(0), a[0], b[0]), a[1], b[1])
}

/// 16 signed bytes.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn load_i8x16(x: &[i8; 16]) -> int8x16_t {
    bytemuck::cast(*x)
}

/// 16 unsigned bytes.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn load_u8x16(x: &[u8; 16]) -> uint8x16_t {
    bytemuck::cast(*x)
}

/// Eight f32.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn load_f32(x: &[f32; 8]) -> Eight {
    bytemuck::cast(*x)
}

/// Eight f32 to memory.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn store_f32(x: Eight, to: &mut [f32; 8]) {
    *to = bytemuck::cast(x);
}

/// Four f16 as f32.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn load_4_f16(x: &[u16; 4]) -> float32x4_t {
    vcvt_f32_f16(vreinterpret_f16_u16(bytemuck::cast(*x)))
}

/// Eight f16 as f32.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn load_f16(x: &[u16; 8]) -> Eight {
    let x = x.as_chunks::<4>().0;
    [load_4_f16(&x[0]), load_4_f16(&x[1])]
}

/// Eight bf16 as f32.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn load_bf16(x: &[u16; 8]) -> Eight {
    let bits: uint16x8_t = bytemuck::cast(*x);
    [
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(bits))),
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(bits))),
    ]
}

/// One f16 as f32; the conversion in `half` asks for the CPU's features each time.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn f16_to_f32(x: f16) -> f32 {
    vgetq_lane_f32::<0>(load_4_f16(&[x.to_bits(), 0, 0, 0]))
}

/// Eight integers as f32.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn load_i8(x: &[i8; 8]) -> Eight {
    let words = vmovl_s8(bytemuck::cast(*x));
    [vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(words)))]
}

/// 32 integers as f32.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn load_32_i8(x: &[i8; 32]) -> [Eight; 4] {
    let x8 = x.as_chunks::<8>().0;
    [load_i8(&x8[0]), load_i8(&x8[1]), load_i8(&x8[2]), load_i8(&x8[3])]
}

/// The nibbles of 16 bytes: low ones, then high ones.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn nibbles(qs: &[u8; 16]) -> [int8x16_t; 2] {
    let both = load_u8x16(qs);
    [vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8::<4>(both))]
}

/// Sum of the lanes: halves onto each other, twice.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn sum_f32(x: float32x4_t) -> f32 {
    vpadds_f32(vadd_f32(vget_low_f32(x), vget_high_f32(x)))
}

/// Sum of 16 lanes: halves onto each other, four times.
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn sum_16(x: [float32x4_t; 4]) -> f32 {
    sum_f32(vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3])))
}
