//! `row · x`.
//!
//! Floats: eight partial sums, element `i` in sum `i % 8`, so that a compiler can use vector registers; the
//! elements past the last eight are added at the end.
//!
//! Blocks of 32: with the integers `q` of the weights and `p` of the input,
//!
//! ```text
//! Σ_blocks  d_w · d_x · Σ q·p        Q8_0, Q4_0, Q5_0, IQ4_NL, MXFP4 (q signed)
//! Σ_blocks  d_w · d_x · Σ q·p + m_w · (d_x · Σ p)    Q4_1, Q5_1  (q unsigned)
//! ```
//!
//! Blocks of 256 are those of [`block`](powerinfer_sparse_ops::block).

use powerinfer_sparse_ops::WeightType;
use powerinfer_sparse_ops::block::{
    BlockIq4Nl, BlockMxfp4, BlockQ4_0, BlockQ5_0, BlockQ5_1, BlockQ8_0, dot_q2_k_q8_k, dot_q3_k_q8_k,
    dot_q4_k_q8_k, dot_q5_k_q8_k, dot_q6_k_q8_k,
};

use super::super::Floats;
use crate::input::Input;
use crate::planar::{Planar, PlanarRow, PlanarX};

pub(in crate::kernel) fn dot<const T: usize>(
    ty: WeightType,
    row: &[u8],
    x: &Input<'_>,
    rows: [usize; T],
) -> [f32; T] {
    match ty {
        WeightType::Q5_0 => x.x8s(rows).map(|x| dot_signed(bytemuck::cast_slice(row), x, unpack_q5_0)),
        WeightType::IQ4_NL => x.x8s(rows).map(|x| dot_signed(bytemuck::cast_slice(row), x, unpack_iq4_nl)),
        WeightType::Q5_1 => x.x8s(rows).map(|x| dot_offset(bytemuck::cast_slice(row), x, unpack_q5_1)),
        WeightType::Q4_K => x.x8ks(rows).map(|x| dot_q4_k_q8_k(bytemuck::cast_slice(row), x)),
        WeightType::Q5_K => x.x8ks(rows).map(|x| dot_q5_k_q8_k(bytemuck::cast_slice(row), x)),
        WeightType::Q6_K => x.x8ks(rows).map(|x| dot_q6_k_q8_k(bytemuck::cast_slice(row), x)),
        WeightType::Q2_K => x.x8ks(rows).map(|x| dot_q2_k_q8_k(bytemuck::cast_slice(row), x)),
        WeightType::Q3_K => x.x8ks(rows).map(|x| dot_q3_k_q8_k(bytemuck::cast_slice(row), x)),
        WeightType::MXFP4 => x.x8s(rows).map(|x| dot_signed(bytemuck::cast_slice(row), x, unpack_mxfp4)),
        _ => unreachable!("dot with {ty}: every type has a kernel"),
    }
}

/// Integers apart from scales.
pub(in crate::kernel) fn dot_planar<const T: usize>(
    kind: Planar,
    row: PlanarRow<'_>,
    x: [PlanarX<'_>; T],
) -> [f32; T] {
    x.map(|x| {
        let (mut sum, mut offset) = (0.0, 0.0);
        for (b, scale) in row.scales.iter().enumerate() {
            let q = row.block(kind, b).map(i32::from);
            let dot: i32 =
                q.iter().zip(x.block(b).into_iter().flatten()).map(|(q, x)| q * i32::from(*x)).sum();
            let d = half::f16::from_bits(*scale).to_f32();
            sum += d * x.d[b] * (dot - kind.offset() * x.sums[b]) as f32;
            if let Some(m) = row.mins.get(b) {
                offset += half::f16::from_bits(*m).to_f32() * (x.d[b] * x.sums[b] as f32);
            }
        }
        sum + offset
    })
}

/// Plain floats.
pub(in crate::kernel) fn dot_floats<const T: usize>(w: Floats<'_>, x: [&[f32]; T]) -> [f32; T] {
    match w {
        Floats::F32(w) => x.map(|x| dot_converted(w, x, |w| w)),
        Floats::F16(w) => x.map(|x| dot_converted(w, x, |w| half::f16::from_bits(w).to_f32())),
        Floats::BF16(w) => x.map(|x| dot_converted(w, x, |w| half::bf16::from_bits(w).to_f32())),
    }
}

fn dot_converted<W: Copy>(w: &[W], x: &[f32], to_f32: impl Fn(W) -> f32) -> f32 {
    let (w8, w_rest) = w.as_chunks::<8>();
    let (x8, x_rest) = x.as_chunks::<8>();
    let mut sums = [0f32; 8];
    for (w, x) in w8.iter().zip(x8) {
        for lane in 0..8 {
            sums[lane] += to_f32(w[lane]) * x[lane];
        }
    }
    let rest: f32 = w_rest.iter().zip(x_rest).map(|(&w, x)| to_f32(w) * x).sum();
    sum8(sums) + rest
}

/// Sum of eight lanes, halves onto each other.
fn sum8(s: [f32; 8]) -> f32 {
    let [a, b, c, d] = [s[0] + s[4], s[1] + s[5], s[2] + s[6], s[3] + s[7]];
    (a + c) + (b + d)
}

/// Scale and signed values of a block.
type Signed = (f32, [i8; 32]);

fn dot_signed<B>(row: &[B], x: PlanarX<'_>, unpack: impl Fn(&B) -> Signed) -> f32 {
    let mut sum = 0.0;
    for (b, w) in row.iter().enumerate() {
        let (d, q) = unpack(w);
        sum += d * x.d[b] * dot_i8(&q, x.block(b)) as f32;
    }
    sum
}

/// Scale, offset and unsigned values of a block.
type Offset = (f32, f32, [i8; 32]);

fn dot_offset<B>(row: &[B], x: PlanarX<'_>, unpack: impl Fn(&B) -> Offset) -> f32 {
    let (mut sum, mut offset) = (0.0, 0.0);
    for (b, w) in row.iter().enumerate() {
        let (d, m, q) = unpack(w);
        sum += d * x.d[b] * dot_i8(&q, x.block(b)) as f32;
        offset += m * (x.d[b] * x.sums[b] as f32);
    }
    sum + offset
}

fn dot_i8(a: &[i8; 32], b: [&[i8; 16]; 2]) -> i32 {
    a.iter().zip(b.into_iter().flatten()).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum()
}

pub(super) fn unpack_q8_0(b: &BlockQ8_0) -> Signed {
    (b.d.to_f32(), b.qs)
}

pub(super) fn unpack_q4_0(b: &BlockQ4_0) -> Signed {
    (b.d.to_f32(), b.quants())
}

fn unpack_q5_0(b: &BlockQ5_0) -> Signed {
    (b.d.to_f32(), b.quants())
}

fn unpack_iq4_nl(b: &BlockIq4Nl) -> Signed {
    (b.d.to_f32(), b.quants())
}

fn unpack_mxfp4(b: &BlockMxfp4) -> Signed {
    (b.scale(), b.quants())
}

fn unpack_q5_1(b: &BlockQ5_1) -> Offset {
    (b.d.to_f32(), b.m.to_f32(), b.quants())
}
