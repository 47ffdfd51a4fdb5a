//! Dot products of quantised weights with rounded vectors, written to be read.
//!
//! Inside a block everything is exact integer arithmetic; one multiplication by the product of the two scales per
//! block (and per minimum) follows, and blocks are added up in f32 from first to last. A fast kernel differs from
//! these only in the order and the fusing of the f32 additions.

use super::{
    BlockIq4Nl, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1,
    BlockQ5K, BlockQ6K, BlockQ8_0, BlockQ8_1, BlockQ8K, QK, QK_K,
};

macro_rules! dot {
    ($name:ident, $Weight:ident, $Vector:ident, $block_dot:expr) => {
        #[doc = concat!("Dot product of a row of [`", stringify!($Weight), "`] with a vector of [`", stringify!($Vector), "`].")]
        ///
        /// # Shapes
        /// `row [n_blocks]`, `x [n_blocks]`
        ///
        /// # Panics
        /// If the lengths differ.
        pub fn $name(row: &[$Weight], x: &[$Vector]) -> f32 {
            sum_blocks(row, x, $block_dot)
        }
    };
}

dot!(dot_q4_0_q8_0, BlockQ4_0, BlockQ8_0, |w, x| scaled(w.d.to_f32(), &w.quants(), x));
dot!(dot_q5_0_q8_0, BlockQ5_0, BlockQ8_0, |w, x| scaled(w.d.to_f32(), &w.quants(), x));
dot!(dot_q8_0_q8_0, BlockQ8_0, BlockQ8_0, |w, x| scaled(w.d.to_f32(), &w.quants(), x));
dot!(dot_iq4_nl_q8_0, BlockIq4Nl, BlockQ8_0, |w, x| scaled(w.d.to_f32(), &w.quants(), x));
dot!(dot_mxfp4_q8_0, BlockMxfp4, BlockQ8_0, |w, x| scaled(w.scale(), &w.quants(), x));

dot!(dot_q4_1_q8_1, BlockQ4_1, BlockQ8_1, |w, x| {
    w.d.to_f32() * x.d * int_dot(&w.quants(), &x.qs) as f32 + w.m.to_f32() * x.s
});
dot!(dot_q5_1_q8_1, BlockQ5_1, BlockQ8_1, |w, x| {
    w.d.to_f32() * x.d * int_dot(&w.quants(), &x.qs) as f32 + w.m.to_f32() * x.s
});

dot!(dot_q2_k_q8_k, BlockQ2K, BlockQ8K, |w, x| {
    let (scales, mins) = w.scales_mins();
    let mins: i32 = mins.iter().zip(&x.bsums).map(|(&min, &sum)| i32::from(min) * i32::from(sum)).sum();
    let sum = group_dot::<16>(&scales.map(i32::from), &w.quants(), &x.qs);
    w.d.to_f32() * x.d * sum as f32 - w.dmin.to_f32() * x.d * mins as f32
});
dot!(dot_q3_k_q8_k, BlockQ3K, BlockQ8K, |w, x| {
    w.d.to_f32() * x.d * group_dot::<16>(&w.group_scales().map(i32::from), &w.quants(), &x.qs) as f32
});
dot!(dot_q4_k_q8_k, BlockQ4K, BlockQ8K, |w, x| {
    let (scales, mins) = w.scales_mins();
    let sum = group_dot::<32>(&scales.map(i32::from), &w.quants(), &x.qs);
    w.d.to_f32() * x.d * sum as f32 - w.dmin.to_f32() * x.d * min_dot(&mins, x) as f32
});
dot!(dot_q5_k_q8_k, BlockQ5K, BlockQ8K, |w, x| {
    let (scales, mins) = w.scales_mins();
    let sum = group_dot::<32>(&scales.map(i32::from), &w.quants(), &x.qs);
    w.d.to_f32() * x.d * sum as f32 - w.dmin.to_f32() * x.d * min_dot(&mins, x) as f32
});
dot!(dot_q6_k_q8_k, BlockQ6K, BlockQ8K, |w, x| {
    w.d.to_f32() * x.d * group_dot::<16>(&w.scales.map(i32::from), &w.quants(), &x.qs) as f32
});

#[inline]
fn sum_blocks<W, X>(row: &[W], x: &[X], block_dot: impl Fn(&W, &X) -> f32) -> f32 {
    assert!(row.len() == x.len(), "a row of {} blocks and a vector of {}", row.len(), x.len());
    row.iter().zip(x).fold(0.0, |sum, (w, x)| sum + block_dot(w, x))
}

#[inline]
fn scaled(scale: f32, w: &[i8; QK], x: &BlockQ8_0) -> f32 {
    scale * x.d.to_f32() * int_dot(w, &x.qs) as f32
}

/// `Σ w · x`, exact.
#[inline]
fn int_dot(w: &[i8], x: &[i8]) -> i32 {
    w.iter().zip(x).map(|(&w, &x)| i32::from(w) * i32::from(x)).sum()
}

/// `Σ scale · w · x` with one scale per `GROUP` weights, exact.
///
/// The largest magnitude is that of Q6_K, 256 · 128 · 32 · 128 = 2^27.
#[inline]
fn group_dot<const GROUP: usize>(scales: &[i32], w: &[i8; QK_K], x: &[i8; QK_K]) -> i32 {
    let (w, x) = (w.chunks_exact(GROUP), x.chunks_exact(GROUP));
    scales.iter().zip(w.zip(x)).map(|(scale, (w, x))| scale * int_dot(w, x)).sum()
}

/// `Σ min · x` with one minimum per 32 weights, exact.
#[inline]
fn min_dot(mins: &[u8; 8], x: &BlockQ8K) -> i32 {
    let (pairs, _) = x.bsums.as_chunks::<2>();
    mins.iter().zip(pairs).map(|(&min, [a, b])| i32::from(min) * (i32::from(*a) + i32::from(*b))).sum()
}
