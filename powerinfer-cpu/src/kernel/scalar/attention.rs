//! Attention over a tile of positions; the formulas are in [`kernel::attention`](super::super::attention).

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use powerinfer_sparse_ops::block::BlockQ8_0;

use super::super::attention::{
    BlockKeys, ByPosition, Kept, Line, POSITIONS, QUERIES, Running, Shares, exp_constants as constants, lines,
};

pub(in crate::kernel) fn widen(kept: Kept<'_>, row_len: usize, to: &mut [Line]) {
    let rows = to.chunks_exact_mut(lines(row_len)).map(bytemuck::cast_slice_mut::<Line, f32>);
    match kept {
        Kept::F32(x) => rows.enumerate().for_each(|(i, to)| {
            to[..row_len].copy_from_slice(&x[i * row_len..][..row_len]);
        }),
        Kept::F16(x) => rows.enumerate().for_each(|(i, to)| {
            let x: &[half::f16] = x[i * row_len..][..row_len].reinterpret_cast();
            x.convert_to_f32_slice(&mut to[..row_len]);
        }),
        Kept::Keys(x) => rows.enumerate().for_each(|(i, to)| keys(&x[i / 32], i % 32, to)),
        Kept::Values(x) => rows.enumerate().for_each(|(i, to)| {
            let n = row_len / 32;
            to.as_chunks_mut().0.iter_mut().zip(&x[i * n..][..n]).for_each(|(to, x)| values(x, to));
        }),
    }
}

fn keys(x: &BlockKeys, dim: usize, to: &mut [f32]) {
    for p in 0..POSITIONS {
        to[p] = half::f16::from_bits(x.d[p]).to_f32() * f32::from(x.q[dim][p]);
    }
}

fn values(x: &BlockQ8_0, to: &mut [f32; 32]) {
    let d = x.d.to_f32();
    *to = x.qs.map(|q| d * f32::from(q));
}

pub(in crate::kernel) fn scores(q: &[[f32; QUERIES]], k: &[ByPosition], out: &mut [ByPosition]) {
    for (i, out) in out.iter_mut().enumerate() {
        let mut sums = [0f32; POSITIONS];
        for (q, k) in q.iter().zip(k) {
            let k: &[f32; POSITIONS] = bytemuck::cast_ref(k);
            for p in 0..POSITIONS {
                sums[p] += q[i] * k[p];
            }
        }
        *out = bytemuck::cast(sums);
    }
}

pub(in crate::kernel) fn softmax(scores: &mut ByPosition, n: usize, running: &mut Running) -> f32 {
    let scores: &mut [f32; POSITIONS] = bytemuck::cast_mut(scores);
    scores[n..].fill(f32::NEG_INFINITY);
    let max = scores.iter().copied().fold(running.max, f32::max);
    let base = Running::base(max);
    let shrink = exp(running.max - base);
    for score in scores.iter_mut() {
        *score = exp(*score - base);
    }
    *running = Running { max, sum: running.sum * shrink + scores.iter().sum::<f32>() };
    shrink
}

pub(in crate::kernel) fn mix(s: &Shares<'_>, v: &[Line], n_lines: usize, acc: &mut [Line]) {
    let queries = s.shares.iter().zip(s.shrink);
    for ((shares, shrink), acc) in queries.zip(acc.chunks_exact_mut(n_lines)) {
        let shares: &[f32; POSITIONS] = bytemuck::cast_ref(shares);
        acc.iter_mut().flat_map(|a| &mut a.0).for_each(|a| *a *= shrink);
        for p in s.from..s.to {
            for (acc, v) in acc.iter_mut().zip(&v[p * n_lines..][..n_lines]) {
                for lane in 0..Line::LEN {
                    acc.0[lane] += shares[p] * v.0[lane];
                }
            }
        }
    }
}

/// See the constants.
pub(in crate::kernel) fn exp(x: f32) -> f32 {
    use constants::{LN_2, MAX, MIN, P, PER_LN_2};
    // Not `clamp`, which would be right as well, but NaN has to be thought of at each level.
    let x = if x < MIN { MIN } else { x };
    let x = if x > MAX { MAX } else { x };
    let n = (x * PER_LN_2).round_ties_even();
    let r = (x - n * LN_2[0]) - n * LN_2[1];
    let p = P.into_iter().rev().fold(0.0, |p, c| p * r + c);
    let p = (p * r) * r + r + 1.0;
    // In two steps, since 2^n may be too small or too large for a float. NaN becomes 0 here.
    let (n, half) = (n as i32, n as i32 >> 1);
    p * power_of_2(half) * power_of_2(n - half)
}

fn power_of_2(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}
