//! `row · x`; the formulas are those of the scalar file of the same name.
//!
//! Floats have 16 sums, element `i` in sum `i % 16`, and rows whose integers lie apart from their scales have 16 as
//! well, block `b` in sum `b % 16`; sums are added halves onto each other. That is the rule of the AVX-512 kernels, so
//! both have the same bits.
//!
//! Integers: one instruction multiplies signed bytes and adds products by fours in 32 bits. What it leaves of four
//! blocks is added in pairs until each block has one lane, and the four scales are applied at once. All of it is
//! exact up to there.

use std::arch::aarch64::*;

use powerinfer_sparse_ops::WeightType;
use powerinfer_sparse_ops::block::{
    BlockIq4Nl, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8K,
    IQ4_NL_VALUES, MXFP4_VALUES,
};

use super::super::Floats;
use super::load::{
    chunks, dot_4, dot_32, f16_to_f32, first, load_4_f16, load_bf16, load_f16, load_f32, load_i8x16,
    load_u8x16, nibbles, padded, sum_16, sum_f32,
};
use crate::input::Input;
use crate::level::Neon;
use crate::planar::{BLOCK, GROUP, Planar, PlanarRow, PlanarX};

/// Blocks of a file.
pub(in crate::kernel) fn dot<const T: usize>(
    _: Neon,
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
    _: Neon,
    kind: Planar,
    row: PlanarRow<'_>,
    x: [PlanarX<'_>; T],
) -> [f32; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_planar_inner(kind, row, x) }
}

/// Plain floats.
pub(in crate::kernel) fn dot_floats<const T: usize>(_: Neon, w: Floats<'_>, x: [&[f32]; T]) -> [f32; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_floats_inner(w, x) }
}

#[target_feature(enable = "neon,dotprod")]
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

#[target_feature(enable = "neon,dotprod")]
fn dot_planar_inner<const T: usize>(kind: Planar, row: PlanarRow<'_>, x: [PlanarX<'_>; T]) -> [f32; T] {
    match kind {
        Planar::Q8_0 => dot_groups::<T, false, false>(kind, row, x),
        Planar::Q4_0 => dot_groups::<T, true, false>(kind, row, x),
        Planar::Q4_1 => dot_groups::<T, true, true>(kind, row, x),
    }
}

#[target_feature(enable = "neon")]
fn dot_floats_inner<const T: usize>(w: Floats<'_>, x: [&[f32]; T]) -> [f32; T] {
    match w {
        Floats::F32(w) => dot_f32(w, x),
        Floats::F16(w) => dot_f16(w, x),
        Floats::BF16(w) => dot_bf16(w, x),
    }
}

macro_rules! dot_floats {
    ($name:ident, $ty:ty, $load:ident) => {
        #[target_feature(enable = "neon")]
        fn $name<const T: usize>(w: &[$ty], x: [&[f32]; T]) -> [f32; T] {
            let x = first(x, w.len());
            let x16 = chunks::<16, _, T>(x);
            let (w16, w_rest) = w.as_chunks::<16>();
            let mut sums = [[vdupq_n_f32(0.0); 4]; T];
            for (i, w) in w16.iter().enumerate() {
                let w8 = w.as_chunks::<8>().0;
                let w = [$load(&w8[0]), $load(&w8[1])];
                for t in 0..T {
                    add_products(&mut sums[t], w, &x16[t][i]);
                }
            }
            if !w_rest.is_empty() {
                let last: [$ty; 16] = padded(w_rest);
                let w8 = last.as_chunks::<8>().0;
                let w8 = [$load(&w8[0]), $load(&w8[1])];
                for t in 0..T {
                    add_products(&mut sums[t], w8, &padded(&x[t][w.len() - w_rest.len()..]));
                }
            }
            let mut out = [0.0; T];
            for t in 0..T {
                out[t] = sum_16(sums[t]);
            }
            out
        }
    };
}

dot_floats!(dot_f32, f32, load_f32);
dot_floats!(dot_f16, u16, load_f16);
dot_floats!(dot_bf16, u16, load_bf16);

/// `sums += w · x` for 16 values.
#[target_feature(enable = "neon")]
#[inline]
fn add_products(sums: &mut [float32x4_t; 4], w: [[float32x4_t; 2]; 2], x: &[f32; 16]) {
    let x8 = x.as_chunks::<8>().0;
    for half in 0..2 {
        let x = load_f32(&x8[half]);
        sums[2 * half] = vfmaq_f32(sums[2 * half], w[half][0], x[0]);
        sums[2 * half + 1] = vfmaq_f32(sums[2 * half + 1], w[half][1], x[1]);
    }
}

/// Groups that have sums of their own: with four blocks each they make 16.
const SUMS: usize = 4;

/// Integers of 4 or 8 bits apart from scales, with or without minima.
#[target_feature(enable = "neon,dotprod")]
fn dot_groups<const T: usize, const NIBBLES: bool, const MINS: bool>(
    kind: Planar,
    row: PlanarRow<'_>,
    x: [PlanarX<'_>; T],
) -> [f32; T] {
    // 128 becomes −128, and what is subtracted from a byte modulo 256 is the same.
    let offset = vdupq_n_s8(kind.offset() as i8);
    let n_blocks = row.scales.len();
    let mut sums = [[vdupq_n_f32(0.0); SUMS]; T];
    for start in (0..n_blocks).step_by(SUMS * GROUP) {
        for k in 0..SUMS {
            let at = start + k * GROUP;
            if at >= n_blocks {
                break;
            }
            let q = if NIBBLES { nibble_group(row, at, offset) } else { byte_group(row, at, offset) };
            let d = four_scales(&row.scales[at..]);
            for t in 0..T {
                let x = &x[t];
                let x_d: float32x4_t = bytemuck::cast(x.d.as_chunks::<GROUP>().0[at / GROUP]);
                let dots = vcvtq_f32_s32(group_dots(q, &x.q.as_chunks().0[at / GROUP]));
                sums[t][k] = vfmaq_f32(sums[t][k], dots, vmulq_f32(d, x_d));
                if MINS {
                    let x_sums: int32x4_t = bytemuck::cast(x.sums.as_chunks::<GROUP>().0[at / GROUP]);
                    let x_sums = vmulq_f32(x_d, vcvtq_f32_s32(x_sums));
                    sums[t][k] = vfmaq_f32(sums[t][k], four_scales(&row.mins[at..]), x_sums);
                }
            }
        }
    }
    let mut out = [0.0; T];
    for t in 0..T {
        out[t] = sum_16(sums[t]);
    }
    out
}

/// The first and second halves of the blocks of a group.
type Halves = [[int8x16_t; GROUP]; 2];

/// The group from block `at` on, 8 bits each; zeros for blocks that the last group lacks.
#[target_feature(enable = "neon")]
#[inline]
fn byte_group(row: PlanarRow<'_>, at: usize, offset: int8x16_t) -> Halves {
    let n = GROUP.min(row.scales.len() - at);
    let parts = &row.quants.as_chunks::<{ BLOCK / 2 }>().0[2 * at..][..2 * n];
    let mut out = [[vdupq_n_s8(0); GROUP]; 2];
    for i in 0..n {
        for half in 0..2 {
            let q = vreinterpretq_s8_u8(load_u8x16(&parts[half * n + i]));
            out[half][i] = vsubq_s8(q, offset);
        }
    }
    out
}

/// The same with 4 bits each.
#[target_feature(enable = "neon")]
#[inline]
fn nibble_group(row: PlanarRow<'_>, at: usize, offset: int8x16_t) -> Halves {
    let n = GROUP.min(row.scales.len() - at);
    let parts = &row.quants.as_chunks::<{ BLOCK / 2 }>().0[at..][..n];
    let mut out = [[vdupq_n_s8(0); GROUP]; 2];
    for i in 0..n {
        let q = nibbles(&parts[i]);
        for half in 0..2 {
            out[half][i] = vsubq_s8(q[half], offset);
        }
    }
    out
}

/// The scales of a group, zeros where it has fewer blocks.
#[target_feature(enable = "neon")]
#[inline]
fn four_scales(scales: &[u16]) -> float32x4_t {
    match scales.first_chunk() {
        Some(scales) => load_4_f16(scales),
        None => load_4_f16(&padded(scales)),
    }
}

/// `Σ q · x` of each block of a group.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn group_dots(q: Halves, x: &[i8; GROUP * BLOCK]) -> int32x4_t {
    let x = x.as_chunks::<{ BLOCK / 2 }>().0;
    let mut dots = [vdupq_n_s32(0); GROUP];
    for i in 0..GROUP {
        dots[i] = dot_32([q[0][i], q[1][i]], [load_i8x16(&x[i]), load_i8x16(&x[GROUP + i])]);
    }
    vpaddq_s32(vpaddq_s32(dots[0], dots[1]), vpaddq_s32(dots[2], dots[3]))
}

// Blocks of 32 with signed weights.
macro_rules! dot_signed {
    ($name:ident, $block:ty, $unpack:ident, $scale:expr) => {
        #[target_feature(enable = "neon,dotprod")]
        fn $name<const T: usize>(row: &[$block], x: [PlanarX<'_>; T]) -> [f32; T] {
            let mut sums = [vdupq_n_f32(0.0); T];
            for (i, block) in row.iter().enumerate() {
                let (q, d) = ($unpack(block), $scale(block));
                for t in 0..T {
                    let dots = vcvtq_f32_s32(dot_32(q, x_block(&x[t], i)));
                    sums[t] = vfmaq_n_f32(sums[t], dots, d * x[t].d[i]);
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

dot_signed!(dot_q5_0, BlockQ5_0, unpack_q5_0, |b: &BlockQ5_0| f16_to_f32(b.d));
dot_signed!(dot_iq4_nl, BlockIq4Nl, unpack_iq4_nl, |b: &BlockIq4Nl| f16_to_f32(b.d));
dot_signed!(dot_mxfp4, BlockMxfp4, unpack_mxfp4, BlockMxfp4::scale);

/// The integers of a block of a vector.
#[target_feature(enable = "neon")]
#[inline]
fn x_block(x: &PlanarX<'_>, block: usize) -> [int8x16_t; 2] {
    let [first, second] = x.block(block);
    [load_i8x16(first), load_i8x16(second)]
}

#[target_feature(enable = "neon")]
#[inline]
fn unpack_q5_0(b: &BlockQ5_0) -> [int8x16_t; 2] {
    let q = five_bits(&b.qs, b.qh);
    [vsubq_s8(q[0], vdupq_n_s8(16)), vsubq_s8(q[1], vdupq_n_s8(16))]
}

#[target_feature(enable = "neon")]
#[inline]
fn unpack_iq4_nl(b: &BlockIq4Nl) -> [int8x16_t; 2] {
    looked_up(&b.qs, &IQ4_NL_VALUES)
}

#[target_feature(enable = "neon")]
#[inline]
fn unpack_mxfp4(b: &BlockMxfp4) -> [int8x16_t; 2] {
    looked_up(&b.qs, &MXFP4_VALUES)
}

/// What nibbles stand for.
#[target_feature(enable = "neon")]
#[inline]
fn looked_up(qs: &[u8; 16], values: &[i8; 16]) -> [int8x16_t; 2] {
    let (q, values) = (nibbles(qs), load_i8x16(values));
    [vqtbl1q_s8(values, vreinterpretq_u8_s8(q[0])), vqtbl1q_s8(values, vreinterpretq_u8_s8(q[1]))]
}

/// Nibbles with a fifth bit, bit `i` of `qh` for value `i`.
#[target_feature(enable = "neon")]
#[inline]
fn five_bits(qs: &[u8; 16], qh: [u8; 4]) -> [int8x16_t; 2] {
    const BITS: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
    let mut q = nibbles(qs);
    for half in 0..2 {
        let bytes = vcombine_u8(vdup_n_u8(qh[2 * half]), vdup_n_u8(qh[2 * half + 1]));
        let fifth = vandq_u8(vtstq_u8(bytes, load_u8x16(&BITS)), vdupq_n_u8(16));
        q[half] = vorrq_s8(q[half], vreinterpretq_s8_u8(fifth));
    }
    q
}

/// Unsigned weights and a minimum.
#[target_feature(enable = "neon,dotprod")]
fn dot_q5_1<const T: usize>(row: &[BlockQ5_1], x: [PlanarX<'_>; T]) -> [f32; T] {
    let mut sums = [vdupq_n_f32(0.0); T];
    let mut offsets = [0f32; T];
    for (i, block) in row.iter().enumerate() {
        let q = five_bits(&block.qs, block.qh);
        let (d, m) = (f16_to_f32(block.d), f16_to_f32(block.m));
        for t in 0..T {
            let x = &x[t];
            let dots = vcvtq_f32_s32(dot_32(q, x_block(x, i)));
            sums[t] = vfmaq_n_f32(sums[t], dots, d * x.d[i]);
            offsets[t] = m.mul_add(x.d[i] * x.sums[i] as f32, offsets[t]);
        }
    }
    let mut out = [0.0; T];
    for t in 0..T {
        out[t] = sum_f32(sums[t]) + offsets[t];
    }
    out
}

/// The `part`-th 32 integers of a vector.
#[target_feature(enable = "neon")]
#[inline]
fn x_32(x: &BlockQ8K, part: usize) -> [int8x16_t; 2] {
    bytemuck::cast(x.qs.as_chunks::<32>().0[part])
}

/// The `part`-th 32 bytes.
#[target_feature(enable = "neon")]
#[inline]
fn part_32(bytes: &[u8], part: usize) -> [uint8x16_t; 2] {
    bytemuck::cast(bytes.as_chunks::<32>().0[part])
}

// `scale · q − min`, all of them unsigned, with a scale and a min for 32 weights.
macro_rules! dot_k_min {
    ($name:ident, $block:ty, $unpack:ident) => {
        #[target_feature(enable = "neon,dotprod")]
        fn $name<const T: usize>(row: &[$block], x: [&[BlockQ8K]; T]) -> [f32; T] {
            let x = first(x, row.len());
            let mut sums = [vdupq_n_f32(0.0); T];
            let mut min_sums = [vdupq_n_f32(0.0); T];
            for (i, block) in row.iter().enumerate() {
                let (scales, mins) = block.scales_mins();
                let mins: [int32x4_t; 2] = bytemuck::cast(mins.map(i32::from));
                let mut totals = [vdupq_n_s32(0); T];
                for part in 0..8 {
                    let q = $unpack(block, part);
                    for t in 0..T {
                        let dots = dot_32(q, x_32(&x[t][i], part));
                        totals[t] = vmlaq_n_s32(totals[t], dots, i32::from(scales[part]));
                    }
                }
                let (d, d_min) = (f16_to_f32(block.d), f16_to_f32(block.dmin));
                for t in 0..T {
                    let x = &x[t][i];
                    sums[t] = vfmaq_n_f32(sums[t], vcvtq_f32_s32(totals[t]), d * x.d);
                    // Sums of 16 values each, in pairs as there is a min for 32.
                    let x_sums: [int16x8_t; 2] = bytemuck::cast(x.bsums);
                    let total = vmulq_s32(mins[0], vpaddlq_s16(x_sums[0]));
                    let total = vmlaq_s32(total, mins[1], vpaddlq_s16(x_sums[1]));
                    min_sums[t] = vfmaq_n_f32(min_sums[t], vcvtq_f32_s32(total), d_min * x.d);
                }
            }
            let mut out = [0.0; T];
            for t in 0..T {
                out[t] = sum_f32(vsubq_f32(sums[t], min_sums[t]));
            }
            out
        }
    };
}

dot_k_min!(dot_q4_k, BlockQ4K, unpack_q4_k);
dot_k_min!(dot_q5_k, BlockQ5K, unpack_q5_k);

/// The low (`part` even) or high nibbles of 32 bytes.
#[target_feature(enable = "neon")]
#[inline]
fn nibbles_32(both: [uint8x16_t; 2], high: bool) -> [uint8x16_t; 2] {
    let low = vdupq_n_u8(15);
    if high {
        [vshrq_n_u8::<4>(both[0]), vshrq_n_u8::<4>(both[1])]
    } else {
        [vandq_u8(both[0], low), vandq_u8(both[1], low)]
    }
}

/// The 32 weights `part` of a block, 0 to 15.
#[target_feature(enable = "neon")]
#[inline]
fn unpack_q4_k(b: &BlockQ4K, part: usize) -> [int8x16_t; 2] {
    let q = nibbles_32(part_32(&b.qs, part / 2), part % 2 == 1);
    [vreinterpretq_s8_u8(q[0]), vreinterpretq_s8_u8(q[1])]
}

/// The 32 weights `part` of a block, 0 to 31: bit `part` of a byte of `qh` is the fifth.
#[target_feature(enable = "neon")]
#[inline]
fn unpack_q5_k(b: &BlockQ5K, part: usize) -> [int8x16_t; 2] {
    let q = nibbles_32(part_32(&b.qs, part / 2), part % 2 == 1);
    signed(q, where_set(&b.qh, part, 16), 0)
}

/// `Σ scale · q · x` of a block of each vector, with a scale for 16 weights.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn add_scaled<const T: usize>(
    totals: &mut [int32x4_t; T],
    q: [int8x16_t; 2],
    scales: [i32; 2],
    x: &[&[BlockQ8K]; T],
    (block, part): (usize, usize),
) {
    for t in 0..T {
        let x = x_32(&x[t][block], part);
        for half in 0..2 {
            let dots = dot_4(vdupq_n_s32(0), q[half], x[half]);
            totals[t] = vmlaq_n_s32(totals[t], dots, scales[half]);
        }
    }
}

// `scale · q` with a signed scale for 16 weights.
macro_rules! dot_k_signed {
    ($name:ident, $block:ty, $unpack:ident, $scales:expr) => {
        #[target_feature(enable = "neon,dotprod")]
        fn $name<const T: usize>(row: &[$block], x: [&[BlockQ8K]; T]) -> [f32; T] {
            let x = first(x, row.len());
            let mut sums = [vdupq_n_f32(0.0); T];
            for (i, block) in row.iter().enumerate() {
                let scales: [i8; 16] = $scales(block);
                let mut totals = [vdupq_n_s32(0); T];
                for part in 0..8 {
                    let scales = [i32::from(scales[2 * part]), i32::from(scales[2 * part + 1])];
                    add_scaled(&mut totals, $unpack(block, part), scales, &x, (i, part));
                }
                let d = f16_to_f32(block.d);
                for t in 0..T {
                    sums[t] = vfmaq_n_f32(sums[t], vcvtq_f32_s32(totals[t]), d * x[t][i].d);
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

dot_k_signed!(dot_q3_k, BlockQ3K, unpack_q3_k, BlockQ3K::group_scales);
dot_k_signed!(dot_q6_k, BlockQ6K, unpack_q6_k, |b: &BlockQ6K| b.scales);

/// `scale · q − min`, all of them unsigned, with a scale and a min for 16 weights.
#[target_feature(enable = "neon,dotprod")]
fn dot_q2_k<const T: usize>(row: &[BlockQ2K], x: [&[BlockQ8K]; T]) -> [f32; T] {
    let x = first(x, row.len());
    let mut sums = [vdupq_n_f32(0.0); T];
    let mut min_sums = [vdupq_n_f32(0.0); T];
    for (i, block) in row.iter().enumerate() {
        let (scales, mins) = block.scales_mins();
        let mins: [int16x4_t; 4] = bytemuck::cast(mins.map(i16::from));
        let mut totals = [vdupq_n_s32(0); T];
        for part in 0..8 {
            let q = two_bits(&block.qs, part);
            let q = [vreinterpretq_s8_u8(q[0]), vreinterpretq_s8_u8(q[1])];
            let scales = [i32::from(scales[2 * part]), i32::from(scales[2 * part + 1])];
            add_scaled(&mut totals, q, scales, &x, (i, part));
        }
        let (d, d_min) = (f16_to_f32(block.d), f16_to_f32(block.dmin));
        for t in 0..T {
            let x = &x[t][i];
            sums[t] = vfmaq_n_f32(sums[t], vcvtq_f32_s32(totals[t]), d * x.d);
            let x_sums: [int16x4_t; 4] = bytemuck::cast(x.bsums);
            let mut total = vdupq_n_s32(0);
            for k in 0..4 {
                total = vmlal_s16(total, mins[k], x_sums[k]);
            }
            min_sums[t] = vfmaq_n_f32(min_sums[t], vcvtq_f32_s32(total), d_min * x.d);
        }
    }
    let mut out = [0.0; T];
    for t in 0..T {
        out[t] = sum_f32(vsubq_f32(sums[t], min_sums[t]));
    }
    out
}

/// The 32 weights `part` of a block that keeps four of them in a byte, 0 to 3.
#[target_feature(enable = "neon")]
#[inline]
fn two_bits(qs: &[u8; 64], part: usize) -> [uint8x16_t; 2] {
    let q = part_32(qs, part / 4);
    // A negative shift is one to the right.
    let (shift, three) = (vdupq_n_s8(-2 * (part % 4) as i8), vdupq_n_u8(3));
    [vandq_u8(vshlq_u8(q[0], shift), three), vandq_u8(vshlq_u8(q[1], shift), three)]
}

/// `value` in each byte where bit `bit` of `bytes` is set.
#[target_feature(enable = "neon")]
#[inline]
fn where_set(bytes: &[u8; 32], bit: usize, value: u8) -> [uint8x16_t; 2] {
    let bytes = part_32(bytes, 0);
    let (bit, value) = (vdupq_n_u8(1 << bit), vdupq_n_u8(value));
    [vandq_u8(vtstq_u8(bytes[0], bit), value), vandq_u8(vtstq_u8(bytes[1], bit), value)]
}

/// The 32 weights `part` of a block, −4 to 3.
#[target_feature(enable = "neon")]
#[inline]
fn unpack_q3_k(b: &BlockQ3K, part: usize) -> [int8x16_t; 2] {
    let (q, third) = (two_bits(&b.qs, part), where_set(&b.hmask, part, 4));
    signed(q, third, 4)
}

/// `(low | high) − offset`.
#[target_feature(enable = "neon")]
#[inline]
fn signed(low: [uint8x16_t; 2], high: [uint8x16_t; 2], offset: i8) -> [int8x16_t; 2] {
    let offset = vdupq_n_s8(offset);
    [
        vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(low[0], high[0])), offset),
        vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(low[1], high[1])), offset),
    ]
}

/// The 32 weights `part` of a block, −32 to 31.
#[target_feature(enable = "neon")]
#[inline]
fn unpack_q6_k(b: &BlockQ6K, part: usize) -> [int8x16_t; 2] {
    let (half, quarter) = (part / 4, part % 4);
    let low = nibbles_32(part_32(&b.ql, half * 2 + quarter % 2), quarter >= 2);
    let high = two_bits(&b.qh, part);
    signed(low, [vshlq_n_u8::<4>(high[0]), vshlq_n_u8::<4>(high[1])], 32)
}
