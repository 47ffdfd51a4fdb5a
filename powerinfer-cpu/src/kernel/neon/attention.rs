//! Attention over a tile of positions; the formulas are in [`kernel::attention`](super::super::attention).
//!
//! Half a block of queries at a time: with the four registers of a line they make 16 sums.

use std::arch::aarch64::*;

use powerinfer_sparse_ops::block::BlockQ8_0;

use super::super::attention::{
    BlockKeys, ByPosition, Kept, Line, POSITIONS, QUERIES, Running, Shares, exp_constants as constants, lines,
};
use super::load::{f16_to_f32, load_f16, load_i8, padded, sum_16};
use crate::level::Neon;

/// The registers of a [`Line`].
type Sixteen = [float32x4_t; 4];

pub(in crate::kernel) fn widen(_: Neon, kept: Kept<'_>, row_len: usize, to: &mut [Line]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { widen_inner(kept, row_len, to) }
}

pub(in crate::kernel) fn scores(_: Neon, q: &[[f32; QUERIES]], k: &[ByPosition], out: &mut [ByPosition]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { scores_inner(q, k, out) }
}

pub(in crate::kernel) fn softmax(_: Neon, scores: &mut ByPosition, n: usize, running: &mut Running) -> f32 {
    // SAFETY: LEVEL-DETECTED.
    unsafe { softmax_inner(scores, n, running) }
}

pub(in crate::kernel) fn mix(_: Neon, s: &Shares<'_>, v: &[Line], n_lines: usize, acc: &mut [Line]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { mix_inner(s, v, n_lines, acc) }
}

#[target_feature(enable = "neon")]
fn widen_inner(kept: Kept<'_>, row_len: usize, to: &mut [Line]) {
    match kept {
        Kept::F32(x) => super::super::scalar::attention::widen(Kept::F32(x), row_len, to),
        Kept::F16(x) => widen_f16(x, row_len, to),
        Kept::Keys(x) => {
            for (x, to) in x.iter().zip(to.chunks_mut(64)) {
                widen_keys(x, to);
            }
        }
        Kept::Values(x) => {
            let (pairs, _) = to.as_chunks_mut::<2>();
            for (x, to) in x[..pairs.len()].iter().zip(pairs) {
                widen_values(x, to);
            }
        }
    }
}

#[target_feature(enable = "neon")]
fn widen_f16(x: &[u16], row_len: usize, to: &mut [Line]) {
    for (x, to) in x.chunks_exact(row_len).zip(to.chunks_exact_mut(lines(row_len))) {
        let (x16, rest) = x.as_chunks::<16>();
        for (x, to) in x16.iter().zip(to.iter_mut()) {
            widen_16(x, to);
        }
        if !rest.is_empty() {
            widen_16(&padded(rest), &mut to[x16.len()]);
        }
    }
}

#[target_feature(enable = "neon")]
#[inline]
fn widen_16(x: &[u16; 16], to: &mut Line) {
    let x = x.as_chunks::<8>().0;
    *to = bytemuck::cast([load_f16(&x[0]), load_f16(&x[1])]);
}

/// 16 integers as f32.
#[target_feature(enable = "neon")]
#[inline]
fn load_q(q: &[i8; 16]) -> Sixteen {
    let q = q.as_chunks::<8>().0;
    bytemuck::cast([load_i8(&q[0]), load_i8(&q[1])])
}

#[target_feature(enable = "neon")]
#[inline]
fn widen_keys(x: &BlockKeys, to: &mut [Line]) {
    let mut d = [Line::ZERO; 2];
    widen_f16(&x.d, POSITIONS, &mut d);
    for (q, to) in x.q.iter().zip(to.as_chunks_mut::<2>().0) {
        let q = q.as_chunks::<16>().0;
        for j in 0..2 {
            let (d, mut x) = (load(&d[j]), load_q(&q[j]));
            for k in 0..4 {
                x[k] = vmulq_f32(d[k], x[k]);
            }
            to[j] = line(x);
        }
    }
}

#[target_feature(enable = "neon")]
#[inline]
fn widen_values(x: &BlockQ8_0, to: &mut [Line; 2]) {
    let d = f16_to_f32(x.d);
    let q = x.qs.as_chunks::<16>().0;
    for j in 0..2 {
        let mut x = load_q(&q[j]);
        for k in 0..4 {
            x[k] = vmulq_n_f32(x[k], d);
        }
        to[j] = line(x);
    }
}

#[target_feature(enable = "neon")]
fn scores_inner(q: &[[f32; QUERIES]], k: &[ByPosition], out: &mut [ByPosition]) {
    for (half, out) in out.chunks_mut(4).enumerate() {
        match out.len() {
            1 => scores_n::<1>(q, 4 * half, k, out),
            2 => scores_n::<2>(q, 4 * half, k, out),
            3 => scores_n::<3>(q, 4 * half, k, out),
            _ => scores_n::<4>(q, 4 * half, k, out),
        }
    }
}

/// Of the queries from `first` on.
#[target_feature(enable = "neon")]
fn scores_n<const N: usize>(q: &[[f32; QUERIES]], first: usize, k: &[ByPosition], out: &mut [ByPosition]) {
    for part in 0..2 {
        let mut sums = [[vdupq_n_f32(0.0); 4]; N];
        for (q, k) in q.iter().zip(k) {
            let k = load(&k[part]);
            let Some(q) = q[first..].first_chunk::<N>() else { unreachable!("a block of queries") };
            for i in 0..N {
                sums[i] = add_scaled(sums[i], q[i], k);
            }
        }
        for i in 0..N {
            out[i][part] = line(sums[i]);
        }
    }
}

#[target_feature(enable = "neon")]
fn softmax_inner(scores: &mut ByPosition, n: usize, running: &mut Running) -> f32 {
    let flat: &mut [f32; POSITIONS] = bytemuck::cast_mut(scores);
    flat[n..].fill(f32::NEG_INFINITY);
    let x = [load(&scores[0]), load(&scores[1])];
    let mut most = vdupq_n_f32(running.max);
    for x in x.as_flattened() {
        // The form that passes over NaN.
        most = vmaxnmq_f32(most, *x);
    }
    let max = vmaxnmvq_f32(most);
    let base = Running::base(max);
    let mut sums = [vdupq_n_f32(0.0); 4];
    for (scores, x) in scores.iter_mut().zip(x) {
        let mut e = x;
        for k in 0..4 {
            e[k] = exp(vsubq_f32(x[k], vdupq_n_f32(base)));
            sums[k] = vaddq_f32(sums[k], e[k]);
        }
        *scores = line(e);
    }
    let shrink =
        if running.max == max { 1.0 } else { vgetq_lane_f32::<0>(exp(vdupq_n_f32(running.max - base))) };
    *running = Running { max, sum: running.sum.mul_add(shrink, sum_16(sums)) };
    shrink
}

/// See the constants. Both limits let NaN pass.
#[target_feature(enable = "neon")]
#[inline]
fn exp(x: float32x4_t) -> float32x4_t {
    use constants::{LN_2, MAX, MIN, P, PER_LN_2};
    let x = vminq_f32(vmaxq_f32(x, vdupq_n_f32(MIN)), vdupq_n_f32(MAX));
    let n = vrndnq_f32(vmulq_n_f32(x, PER_LN_2));
    let r = vfmsq_n_f32(x, n, LN_2[0]);
    let r = vfmsq_n_f32(r, n, LN_2[1]);
    let mut p = vdupq_n_f32(P[4]);
    for i in (0..4).rev() {
        p = vfmaq_f32(vdupq_n_f32(P[i]), p, r);
    }
    let p = vaddq_f32(vfmaq_f32(r, vmulq_f32(p, r), r), vdupq_n_f32(1.0));
    // In two steps, since 2^n may be too small or too large for a float. NaN becomes 0 here.
    let n = vcvtq_s32_f32(n);
    let half = vshrq_n_s32::<1>(n);
    vmulq_f32(vmulq_f32(p, power_of_2(half)), power_of_2(vsubq_s32(n, half)))
}

#[target_feature(enable = "neon")]
#[inline]
fn power_of_2(n: int32x4_t) -> float32x4_t {
    vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))))
}

#[target_feature(enable = "neon")]
fn mix_inner(s: &Shares<'_>, v: &[Line], n_lines: usize, acc: &mut [Line]) {
    for (half, acc) in acc.chunks_mut(4 * n_lines).enumerate() {
        let n = acc.len() / n_lines;
        let (shares, shrink) = (&s.shares[4 * half..][..n], &s.shrink[4 * half..][..n]);
        let s = Shares { shares, shrink, ..*s };
        for first in 0..n_lines {
            match n {
                1 => mix_line::<1>(&s, v, n_lines, first, acc),
                2 => mix_line::<2>(&s, v, n_lines, first, acc),
                3 => mix_line::<3>(&s, v, n_lines, first, acc),
                _ => mix_line::<4>(&s, v, n_lines, first, acc),
            }
        }
    }
}

#[target_feature(enable = "neon")]
#[inline]
fn mix_line<const N: usize>(s: &Shares<'_>, v: &[Line], n_lines: usize, first: usize, acc: &mut [Line]) {
    let mut shares: [&[f32; POSITIONS]; N] = [&[0.0; POSITIONS]; N];
    let mut sums = [[vdupq_n_f32(0.0); 4]; N];
    for i in 0..N {
        shares[i] = bytemuck::cast_ref(&s.shares[i]);
        let a = load(&acc[i * n_lines + first]);
        for k in 0..4 {
            sums[i][k] = vmulq_n_f32(a[k], s.shrink[i]);
        }
    }
    for (p, v) in v.chunks_exact(n_lines).enumerate().take(s.to.min(POSITIONS)).skip(s.from) {
        let v = load(&v[first]);
        for i in 0..N {
            sums[i] = add_scaled(sums[i], shares[i][p], v);
        }
    }
    for i in 0..N {
        acc[i * n_lines + first] = line(sums[i]);
    }
}

/// `sums + factor · x`.
#[target_feature(enable = "neon")]
#[inline]
fn add_scaled(mut sums: Sixteen, factor: f32, x: Sixteen) -> Sixteen {
    for k in 0..4 {
        sums[k] = vfmaq_n_f32(sums[k], x[k], factor);
    }
    sums
}

#[target_feature(enable = "neon")]
#[inline]
fn load(x: &Line) -> Sixteen {
    bytemuck::cast(*x)
}

#[target_feature(enable = "neon")]
#[inline]
fn line(x: Sixteen) -> Line {
    bytemuck::cast(x)
}
