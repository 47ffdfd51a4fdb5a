//! Attention over a tile of positions; the formulas are in [`kernel::attention`](super::super::attention).
//!
//! Half a block of queries at a time: with the two registers of a line they make eight sums.

use std::arch::x86_64::*;

use powerinfer_sparse_ops::block::BlockQ8_0;

use super::super::attention::{
    BlockKeys, ByPosition, Kept, Line, POSITIONS, QUERIES, Running, Shares, exp_constants as constants, lines,
};
use super::load::{f16_to_f32, load_f16, load_f32, load_i8, sum_f32};
use crate::level::Avx2;

pub(in crate::kernel) fn widen(_: Avx2, kept: Kept<'_>, row_len: usize, to: &mut [Line]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { widen_inner(kept, row_len, to) }
}

pub(in crate::kernel) fn scores(_: Avx2, q: &[[f32; QUERIES]], k: &[ByPosition], out: &mut [ByPosition]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { scores_inner(q, k, out) }
}

pub(in crate::kernel) fn softmax(_: Avx2, scores: &mut ByPosition, n: usize, running: &mut Running) -> f32 {
    // SAFETY: LEVEL-DETECTED.
    unsafe { softmax_inner(scores, n, running) }
}

pub(in crate::kernel) fn mix(_: Avx2, s: &Shares<'_>, v: &[Line], n_lines: usize, acc: &mut [Line]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { mix_inner(s, v, n_lines, acc) }
}

#[target_feature(enable = "avx2,fma,f16c")]
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

#[target_feature(enable = "avx2")]
#[inline]
fn prefetch<T>(at: &T) {
    let ahead = std::ptr::from_ref(at).cast::<i8>().wrapping_add(AHEAD);
    _mm_prefetch::<_MM_HINT_T0>(ahead);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn widen_f16(x: &[u16], row_len: usize, to: &mut [Line]) {
    for (x, to) in x.chunks_exact(row_len).zip(to.chunks_exact_mut(lines(row_len))) {
        let (x16, rest) = x.as_chunks::<16>();
        for (x, to) in x16.iter().zip(to.iter_mut()) {
            prefetch(x);
            widen_16(x, to);
        }
        if !rest.is_empty() {
            let mut last = [0; 16];
            last[..rest.len()].copy_from_slice(rest);
            widen_16(&last, &mut to[x16.len()]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen_16(x: &[u16; 16], to: &mut Line) {
    let x = x.as_chunks::<8>().0;
    *to = line([load_f16(&x[0]), load_f16(&x[1])]);
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen_keys(x: &BlockKeys, to: &mut [Line]) {
    let mut d = [Line::ZERO; 2];
    widen_f16(&x.d, POSITIONS, &mut d);
    for (q, to) in x.q.iter().zip(to.as_chunks_mut::<2>().0) {
        prefetch(q);
        let q = q.as_chunks::<8>().0;
        for j in 0..2 {
            let d = load(&d[j]);
            to[j] =
                line([_mm256_mul_ps(d[0], load_i8(&q[2 * j])), _mm256_mul_ps(d[1], load_i8(&q[2 * j + 1]))]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen_values(x: &BlockQ8_0, to: &mut [Line; 2]) {
    prefetch(x);
    let d = _mm256_set1_ps(f16_to_f32(x.d));
    let q = x.qs.as_chunks::<8>().0;
    for j in 0..2 {
        to[j] = line([_mm256_mul_ps(d, load_i8(&q[2 * j])), _mm256_mul_ps(d, load_i8(&q[2 * j + 1]))]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
fn scores_n<const N: usize>(q: &[[f32; QUERIES]], first: usize, k: &[ByPosition], out: &mut [ByPosition]) {
    for part in 0..2 {
        let mut sums = [[_mm256_setzero_ps(); 2]; N];
        for (q, k) in q.iter().zip(k) {
            let k = load(&k[part]);
            let Some(q) = q[first..].first_chunk::<N>() else { unreachable!("a block of queries") };
            for i in 0..N {
                let q = _mm256_set1_ps(q[i]);
                sums[i][0] = _mm256_fmadd_ps(q, k[0], sums[i][0]);
                sums[i][1] = _mm256_fmadd_ps(q, k[1], sums[i][1]);
            }
        }
        for i in 0..N {
            out[i][part] = line(sums[i]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn softmax_inner(scores: &mut ByPosition, n: usize, running: &mut Running) -> f32 {
    let flat: &mut [f32; POSITIONS] = bytemuck::cast_mut(scores);
    flat[n..].fill(f32::NEG_INFINITY);
    let x = [load(&scores[0]), load(&scores[1])];
    let most = _mm256_max_ps(_mm256_max_ps(x[0][0], x[0][1]), _mm256_max_ps(x[1][0], x[1][1]));
    let max = running.max.max(max_f32(most));
    let base = Running::base(max);
    let mut e = x;
    let mut sums = [_mm256_setzero_ps(); 2];
    for j in 0..2 {
        for k in 0..2 {
            e[j][k] = exp(_mm256_sub_ps(x[j][k], _mm256_set1_ps(base)));
        }
        scores[j] = line(e[j]);
        sums[j] = _mm256_add_ps(e[j][0], e[j][1]);
    }
    let shrink =
        if running.max == max { 1.0 } else { _mm256_cvtss_f32(exp(_mm256_set1_ps(running.max - base))) };
    let sum = sum_f32(_mm256_add_ps(sums[0], sums[1]));
    *running = Running { max, sum: running.sum.mul_add(shrink, sum) };
    shrink
}

/// Largest of the lanes.
#[target_feature(enable = "avx2")]
#[inline]
fn max_f32(x: __m256) -> f32 {
    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
}

/// See the constants. Both limits are written so that NaN passes them.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn exp(x: __m256) -> __m256 {
    use constants::{LN_2, MAX, MIN, P, PER_LN_2};
    let x = _mm256_max_ps(_mm256_set1_ps(MIN), x);
    let x = _mm256_min_ps(_mm256_set1_ps(MAX), x);
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(PER_LN_2),
    ));
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN_2[0]), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN_2[1]), r);
    let mut p = _mm256_set1_ps(P[4]);
    for i in (0..4).rev() {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(P[i]));
    }
    let p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r), _mm256_set1_ps(1.0));
    // In two steps, since 2^n may be too small or too large for a float.
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    _mm256_mul_ps(_mm256_mul_ps(p, power_of_2(half)), power_of_2(_mm256_sub_epi32(n, half)))
}

#[target_feature(enable = "avx2")]
#[inline]
fn power_of_2(n: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
}

#[target_feature(enable = "avx2,fma,f16c")]
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

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn mix_line<const N: usize>(s: &Shares<'_>, v: &[Line], n_lines: usize, first: usize, acc: &mut [Line]) {
    let mut shares: [&[f32; POSITIONS]; N] = [&[0.0; POSITIONS]; N];
    let mut sums = [[_mm256_setzero_ps(); 2]; N];
    for i in 0..N {
        shares[i] = bytemuck::cast_ref(&s.shares[i]);
        let shrink = _mm256_set1_ps(s.shrink[i]);
        let a = load(&acc[i * n_lines + first]);
        sums[i] = [_mm256_mul_ps(a[0], shrink), _mm256_mul_ps(a[1], shrink)];
    }
    for (p, v) in v.chunks_exact(n_lines).enumerate().take(s.to.min(POSITIONS)).skip(s.from) {
        let v = load(&v[first]);
        for i in 0..N {
            let share = _mm256_set1_ps(shares[i][p]);
            sums[i][0] = _mm256_fmadd_ps(share, v[0], sums[i][0]);
            sums[i][1] = _mm256_fmadd_ps(share, v[1], sums[i][1]);
        }
    }
    for i in 0..N {
        acc[i * n_lines + first] = line(sums[i]);
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn load(x: &Line) -> [__m256; 2] {
    let x = x.0.as_chunks::<8>().0;
    [load_f32(&x[0]), load_f32(&x[1])]
}

#[target_feature(enable = "avx2")]
#[inline]
fn line(x: [__m256; 2]) -> Line {
    bytemuck::cast(x)
}
