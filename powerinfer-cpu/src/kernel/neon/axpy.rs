//! `acc += a · row`, several rows at once: `acc` is loaded and stored once for all of them, and each row is
//! added by one fused multiply-add, in order.

use std::arch::aarch64::*;

use powerinfer_sparse_ops::WeightType;
use powerinfer_sparse_ops::block::{BlockQ4_0, BlockQ8_0};

use super::load::{
    Eight, chunks, f16_to_f32, first, load_32_i8, load_bf16, load_f16, load_f32, nibbles, store_f32,
};
use crate::level::Neon;

pub(in crate::kernel) fn axpy<const N: usize>(
    _: Neon,
    ty: WeightType,
    a: [f32; N],
    rows: [&[u8]; N],
    acc: &mut [f32],
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { axpy_inner(ty, a, rows, acc) }
}

/// Rows of integers with a scale for each column.
pub(in crate::kernel) fn axpy_scaled(
    _: Neon,
    terms: &[(usize, f32)],
    scales: &[u16],
    values: &[i8],
    acc: &mut [f32],
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { axpy_scaled_inner(terms, scales, values, acc) }
}

#[target_feature(enable = "neon")]
fn axpy_scaled_inner(terms: &[(usize, f32)], scales: &[u16], values: &[i8], acc: &mut [f32]) {
    let n = acc.len();
    let (acc32, acc_rest) = acc.as_chunks_mut::<32>();
    let tail = n - acc_rest.len();
    for (i, (acc, scales)) in acc32.iter_mut().zip(scales.as_chunks::<32>().0).enumerate() {
        let mut sums = [[vdupq_n_f32(0.0); 2]; 4];
        for &(row, a) in terms {
            let Some(q) = values[row * n + i * 32..].first_chunk::<32>() else { continue };
            let q = load_32_i8(q);
            for k in 0..4 {
                sums[k] = add_scaled(sums[k], a, q[k]);
            }
        }
        let (acc8, scales8) = (acc.as_chunks_mut::<8>().0, scales.as_chunks::<8>().0);
        for k in 0..4 {
            let (mut sum, scale) = (load_f32(&acc8[k]), load_f16(&scales8[k]));
            for half in 0..2 {
                sum[half] = vfmaq_f32(sum[half], scale[half], sums[k][half]);
            }
            store_f32(sum, &mut acc8[k]);
        }
    }
    for (i, (acc, &scale)) in acc_rest.iter_mut().zip(&scales[tail..]).enumerate() {
        let sum =
            terms.iter().fold(0f32, |sum, &(row, a)| a.mul_add(f32::from(values[row * n + tail + i]), sum));
        *acc = f16_to_f32(half::f16::from_bits(scale)).mul_add(sum, *acc);
    }
}

/// `sum + factor · w` for eight values.
#[target_feature(enable = "neon")]
#[inline]
fn add_scaled(sum: Eight, factor: f32, w: Eight) -> Eight {
    [vfmaq_n_f32(sum[0], w[0], factor), vfmaq_n_f32(sum[1], w[1], factor)]
}

#[target_feature(enable = "neon")]
fn axpy_inner<const N: usize>(ty: WeightType, a: [f32; N], rows: [&[u8]; N], acc: &mut [f32]) {
    match ty {
        WeightType::F32 => axpy_f32(a, rows.map(bytemuck::cast_slice), acc),
        WeightType::F16 => axpy_f16(a, rows.map(bytemuck::cast_slice), acc),
        WeightType::BF16 => axpy_bf16(a, rows.map(bytemuck::cast_slice), acc),
        WeightType::Q8_0 => axpy_q8_0(a, rows.map(bytemuck::cast_slice), acc),
        WeightType::Q4_0 => axpy_q4_0(a, rows.map(bytemuck::cast_slice), acc),
        _ => unreachable!("axpy with {ty}"),
    }
}

macro_rules! axpy_floats {
    ($name:ident, $ty:ty, $load:ident, $one:expr) => {
        #[target_feature(enable = "neon")]
        fn $name<const N: usize>(a: [f32; N], rows: [&[$ty]; N], acc: &mut [f32]) {
            let rows = first(rows, acc.len());
            let rows8 = chunks::<8, _, N>(rows);
            let n = acc.len();
            let (acc8, acc_rest) = acc.as_chunks_mut::<8>();
            for (i, acc) in acc8.iter_mut().enumerate() {
                let mut sum = load_f32(acc);
                for j in 0..N {
                    sum = add_scaled(sum, a[j], $load(&rows8[j][i]));
                }
                store_f32(sum, acc);
            }
            let tail = n - acc_rest.len();
            for (i, acc) in acc_rest.iter_mut().enumerate() {
                for j in 0..N {
                    *acc = a[j].mul_add($one(rows[j][tail + i]), *acc);
                }
            }
        }
    };
}

axpy_floats!(axpy_f32, f32, load_f32, |w| w);
axpy_floats!(axpy_f16, u16, load_f16, |w| f16_to_f32(half::f16::from_bits(w)));
axpy_floats!(axpy_bf16, u16, load_bf16, |w| half::bf16::from_bits(w).to_f32());

macro_rules! axpy_blocks {
    ($name:ident, $block:ty, $unpack:ident) => {
        #[target_feature(enable = "neon")]
        fn $name<const N: usize>(a: [f32; N], rows: [&[$block]; N], acc: &mut [f32]) {
            let acc = acc.as_chunks_mut::<32>().0;
            let rows = first(rows, acc.len());
            for (i, acc) in acc.iter_mut().enumerate() {
                let mut sums: [Eight; 4] = bytemuck::cast(*acc);
                for j in 0..N {
                    let block = &rows[j][i];
                    let (d, q) = (f16_to_f32(block.d), $unpack(block));
                    for k in 0..4 {
                        // Exact: 11 and 8 significant bits.
                        let w = [vmulq_n_f32(q[k][0], d), vmulq_n_f32(q[k][1], d)];
                        sums[k] = add_scaled(sums[k], a[j], w);
                    }
                }
                *acc = bytemuck::cast(sums);
            }
        }
    };
}

#[target_feature(enable = "neon")]
#[inline]
fn unpack_q8_0(b: &BlockQ8_0) -> [Eight; 4] {
    load_32_i8(&b.qs)
}

#[target_feature(enable = "neon")]
#[inline]
fn unpack_q4_0(b: &BlockQ4_0) -> [Eight; 4] {
    let (q, offset) = (nibbles(&b.qs), vdupq_n_s8(8));
    load_32_i8(&bytemuck::cast([vsubq_s8(q[0], offset), vsubq_s8(q[1], offset)]))
}

axpy_blocks!(axpy_q8_0, BlockQ8_0, unpack_q8_0);
axpy_blocks!(axpy_q4_0, BlockQ4_0, unpack_q4_0);
