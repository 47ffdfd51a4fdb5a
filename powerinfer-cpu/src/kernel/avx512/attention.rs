//! Attention over a tile of positions; the formulas are in [`kernel::attention`](super::super::attention).
//!
//! A block of queries has a register of sums for each query and line, so a line of keys or values is loaded once for
//! the whole block.

use std::arch::x86_64::*;

use powerinfer_sparse_ops::block::BlockQ8_0;

use super::super::attention::{
    BlockKeys, ByPosition, Kept, Line, POSITIONS, QUERIES, Running, Shares, exp_constants as constants, lines,
};
use crate::level::Avx512;

pub(in crate::kernel) fn widen(_: Avx512, kept: Kept<'_>, row_len: usize, to: &mut [Line]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { widen_inner(kept, row_len, to) }
}

pub(in crate::kernel) fn scores(_: Avx512, q: &[[f32; QUERIES]], k: &[ByPosition], out: &mut [ByPosition]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { scores_inner(q, k, out) }
}

pub(in crate::kernel) fn softmax(_: Avx512, scores: &mut ByPosition, n: usize, running: &mut Running) -> f32 {
    // SAFETY: LEVEL-DETECTED.
    unsafe { softmax_inner(scores, n, running) }
}

pub(in crate::kernel) fn mix(_: Avx512, s: &Shares<'_>, v: &[Line], n_lines: usize, acc: &mut [Line]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { mix_inner(s, v, n_lines, acc) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
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

/// Bytes that keys and values are asked for ahead of their use, since the processor's own prefetch stops at pages,
/// and a tile is about one.
const AHEAD: usize = 2048;

#[target_feature(enable = "avx512f")]
#[inline]
fn prefetch<T>(at: &T) {
    let ahead = std::ptr::from_ref(at).cast::<i8>().wrapping_add(AHEAD);
    _mm_prefetch::<_MM_HINT_T0>(ahead);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn widen_f16(x: &[u16], row_len: usize, to: &mut [Line]) {
    let n = to.len() / lines(row_len) * row_len;
    let x = &x[..n];
    if row_len.is_multiple_of(Line::LEN) {
        for (x, to) in x.as_chunks::<16>().0.iter().zip(to) {
            prefetch(x);
            *to = line(load_f16(x));
        }
        return;
    }
    for (x, to) in x.chunks_exact(row_len).zip(to.chunks_exact_mut(lines(row_len))) {
        let (x16, rest) = x.as_chunks::<16>();
        for (x, to) in x16.iter().zip(to.iter_mut()) {
            *to = line(load_f16(x));
        }
        let mut last = [0; 16];
        last[..rest.len()].copy_from_slice(rest);
        to[x16.len()] = line(load_f16(&last));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn widen_keys(x: &BlockKeys, to: &mut [Line]) {
    let [d0, d1] = x.d.as_chunks::<16>().0 else { unreachable!("32 = 2 · 16") };
    let d = [load_f16(d0), load_f16(d1)];
    for (q, to) in x.q.iter().zip(to.as_chunks_mut::<2>().0) {
        prefetch(q);
        let q = q.as_chunks::<16>().0;
        *to = [line(_mm512_mul_ps(d[0], load_i8(&q[0]))), line(_mm512_mul_ps(d[1], load_i8(&q[1])))];
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn widen_values(x: &BlockQ8_0, to: &mut [Line; 2]) {
    prefetch(x);
    let d = _mm512_cvtph_ps(_mm256_set1_epi16(x.d.to_bits().cast_signed()));
    let q = x.qs.as_chunks::<16>().0;
    *to = [line(_mm512_mul_ps(d, load_i8(&q[0]))), line(_mm512_mul_ps(d, load_i8(&q[1])))];
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scores_inner(q: &[[f32; QUERIES]], k: &[ByPosition], out: &mut [ByPosition]) {
    let n_queries = out.len();
    match n_queries {
        1 => scores_n::<1>(q, k, out),
        2 => scores_n::<2>(q, k, out),
        3 => scores_n::<3>(q, k, out),
        4 => scores_n::<4>(q, k, out),
        5 => scores_n::<5>(q, k, out),
        6 => scores_n::<6>(q, k, out),
        7 => scores_n::<7>(q, k, out),
        _ => scores_n::<8>(q, k, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scores_n<const N: usize>(q: &[[f32; QUERIES]], k: &[ByPosition], out: &mut [ByPosition]) {
    let mut sums = [[_mm512_setzero_ps(); 2]; N];
    for (q, k) in q.iter().zip(k) {
        let k = [load(&k[0]), load(&k[1])];
        for i in 0..N {
            let q = _mm512_set1_ps(q[i]);
            sums[i][0] = _mm512_fmadd_ps(q, k[0], sums[i][0]);
            sums[i][1] = _mm512_fmadd_ps(q, k[1], sums[i][1]);
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        *out = [line(sums[0]), line(sums[1])];
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn softmax_inner(scores: &mut ByPosition, n: usize, running: &mut Running) -> f32 {
    let none = _mm512_set1_ps(f32::NEG_INFINITY);
    let here: u32 = if n < POSITIONS { (1 << n) - 1 } else { u32::MAX };
    let x = [
        _mm512_mask_mov_ps(none, here as u16, load(&scores[0])),
        _mm512_mask_mov_ps(none, (here >> 16) as u16, load(&scores[1])),
    ];
    let max = running.max.max(_mm512_reduce_max_ps(_mm512_max_ps(x[0], x[1])));
    let base = Running::base(max);
    let e = [exp(_mm512_sub_ps(x[0], _mm512_set1_ps(base))), exp(_mm512_sub_ps(x[1], _mm512_set1_ps(base)))];
    *scores = [line(e[0]), line(e[1])];
    let shrink =
        if running.max == max { 1.0 } else { _mm512_cvtss_f32(exp(_mm512_set1_ps(running.max - base))) };
    let sum = _mm512_reduce_add_ps(_mm512_add_ps(e[0], e[1]));
    *running = Running { max, sum: running.sum.mul_add(shrink, sum) };
    shrink
}

/// See the constants. Both limits are written so that NaN passes them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn exp(x: __m512) -> __m512 {
    use constants::{LN_2, MAX, MIN, P, PER_LN_2};
    let x = _mm512_max_ps(_mm512_set1_ps(MIN), x);
    let x = _mm512_min_ps(_mm512_set1_ps(MAX), x);
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(
        x,
        _mm512_set1_ps(PER_LN_2),
    ));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN_2[0]), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN_2[1]), r);
    let mut p = _mm512_set1_ps(P[4]);
    for i in (0..4).rev() {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(P[i]));
    }
    let p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0));
    _mm512_scalef_ps(p, n)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn mix_inner(s: &Shares<'_>, v: &[Line], n_lines: usize, acc: &mut [Line]) {
    match s.shares.len() {
        1 => mix_n::<1, 4>(s, v, n_lines, acc),
        2 => mix_n::<2, 4>(s, v, n_lines, acc),
        3 => mix_n::<3, 4>(s, v, n_lines, acc),
        4 => mix_n::<4, 4>(s, v, n_lines, acc),
        5 => mix_n::<5, 2>(s, v, n_lines, acc),
        6 => mix_n::<6, 2>(s, v, n_lines, acc),
        7 => mix_n::<7, 2>(s, v, n_lines, acc),
        _ => mix_n::<8, 2>(s, v, n_lines, acc),
    }
}

/// `L` lines at a time, and what is left by ones.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn mix_n<const N: usize, const L: usize>(s: &Shares<'_>, v: &[Line], n_lines: usize, acc: &mut [Line]) {
    let whole = n_lines / L * L;
    for first in (0..whole).step_by(L) {
        mix_lines::<N, L>(s, v, n_lines, first, acc);
    }
    for first in whole..n_lines {
        mix_lines::<N, 1>(s, v, n_lines, first, acc);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn mix_lines<const N: usize, const L: usize>(
    s: &Shares<'_>,
    v: &[Line],
    n_lines: usize,
    first: usize,
    acc: &mut [Line],
) {
    let mut shares: [&[f32; POSITIONS]; N] = [&[0.0; POSITIONS]; N];
    let mut sums = [[_mm512_setzero_ps(); L]; N];
    for i in 0..N {
        shares[i] = bytemuck::cast_ref(&s.shares[i]);
        let shrink = _mm512_set1_ps(s.shrink[i]);
        for l in 0..L {
            sums[i][l] = _mm512_mul_ps(load(&acc[i * n_lines + first + l]), shrink);
        }
    }
    for (p, v) in v.chunks_exact(n_lines).enumerate().take(s.to.min(POSITIONS)).skip(s.from) {
        let Some(v) = v[first..].first_chunk::<L>() else { unreachable!("the lines are there") };
        for i in 0..N {
            let share = _mm512_set1_ps(shares[i][p]);
            for l in 0..L {
                sums[i][l] = _mm512_fmadd_ps(share, load(&v[l]), sums[i][l]);
            }
        }
    }
    for i in 0..N {
        for l in 0..L {
            acc[i * n_lines + first + l] = line(sums[i][l]);
        }
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load(x: &Line) -> __m512 {
    bytemuck::cast(*x)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn line(x: __m512) -> Line {
    bytemuck::cast(x)
}

/// Sixteen f16 as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_f16(x: &[u16; 16]) -> __m512 {
    _mm512_cvtph_ps(bytemuck::pod_read_unaligned(bytemuck::cast_slice(x)))
}

/// Sixteen integers as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_i8(x: &[i8; 16]) -> __m512 {
    let bytes: __m128i = bytemuck::pod_read_unaligned(bytemuck::cast_slice(x));
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
}
