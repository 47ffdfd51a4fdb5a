//! `acc += a · row`, element by element: no sum runs across lanes, and each row is added by one fused multiply-add
//! with the exact weight, so the bits are the same at every level. (`d · q` of a block is exact in f32.)

use powerinfer_sparse_ops::WeightType;

use super::super::Floats;
use super::dot::{unpack_q4_0, unpack_q8_0};

pub(in crate::kernel) fn axpy<const N: usize>(
    ty: WeightType,
    a: [f32; N],
    rows: [&[u8]; N],
    acc: &mut [f32],
) {
    for (a, row) in a.into_iter().zip(rows) {
        match ty {
            WeightType::Q8_0 => axpy_blocks(a, bytemuck::cast_slice(row), acc, unpack_q8_0),
            WeightType::Q4_0 => axpy_blocks(a, bytemuck::cast_slice(row), acc, unpack_q4_0),
            _ => {
                let Some(floats) = Floats::of_row(ty, row) else { unreachable!("axpy with {ty}") };
                axpy_floats(a, floats, acc);
            }
        }
    }
}

fn axpy_floats(a: f32, row: Floats<'_>, acc: &mut [f32]) {
    match row {
        Floats::F32(w) => axpy_converted(a, w, acc, |w| w),
        Floats::F16(w) => axpy_converted(a, w, acc, |w| half::f16::from_bits(w).to_f32()),
        Floats::BF16(w) => axpy_converted(a, w, acc, |w| half::bf16::from_bits(w).to_f32()),
    }
}

fn axpy_converted<W: Copy>(a: f32, w: &[W], acc: &mut [f32], to_f32: impl Fn(W) -> f32) {
    for (acc, &w) in acc.iter_mut().zip(w) {
        *acc = a.mul_add(to_f32(w), *acc);
    }
}

fn axpy_blocks<B>(a: f32, row: &[B], acc: &mut [f32], unpack: impl Fn(&B) -> (f32, [i8; 32])) {
    for (acc, w) in acc.as_chunks_mut::<32>().0.iter_mut().zip(row) {
        let (d, q) = unpack(w);
        for i in 0..32 {
            acc[i] = a.mul_add(d * f32::from(q[i]), acc[i]);
        }
    }
}

/// Rows of integers with a scale for each column.
pub(in crate::kernel) fn axpy_scaled(terms: &[(usize, f32)], scales: &[u16], values: &[i8], acc: &mut [f32]) {
    let n = acc.len();
    for start in (0..n).step_by(32) {
        let end = n.min(start + 32);
        let mut sums = [0f32; 32];
        for &(row, a) in terms {
            for (sum, &q) in sums.iter_mut().zip(&values[row * n..][start..end]) {
                *sum += a * f32::from(q);
            }
        }
        for (acc, (sum, &scale)) in acc[start..end].iter_mut().zip(sums.iter().zip(&scales[start..end])) {
            *acc += half::f16::from_bits(scale).to_f32() * sum;
        }
    }
}
