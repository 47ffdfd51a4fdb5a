//! Planar 8-bit and 4-bit weights against 8-bit vectors: [`dot`] for one row and a few vectors, and a matrix
//! product ([`pack_panel`], [`pack_x`], [`gemm`]) for many. Both give the same bits.
//!
//! ```text
//! isum(b) = Σ u · q − offset · sums(b)                      exact, for each block b of 32 weights
//! acc(l)  = fma(isum(b), d_w(b) · d_x(b), acc(l))           for b = l, l + 16, l + 32, …
//!           and for Q4_1 then fma(m(b), d_x(b) · sums(b), acc(l))
//! result  = lanes l and l + 8 added, then l and l + 4, l and l + 2, l and l + 1
//! ```
//!
//! `dot` has the 16 sums in the lanes of one register and takes 16 blocks a step. The matrix product has 16 rows of
//! weights in the lanes instead, interleaved by four bytes, and takes the blocks in the order of [`Walk`]: all of
//! lane 0, then all of lane 8, 4, 12, …, so that whatever is added next is there.
//!
//! ```text
//! panel, a block:  8 lines of 16 rows × 4 bytes | line of 16 scales | Q4_1: line of 16 minima
//! tile, a block:   for each vector 8 × 4 bytes, its scale, its offset
//! ```

use std::arch::x86_64::*;

use bytemuck::{Pod, Zeroable};

use crate::level::Avx512;
use crate::planar::{Planar, PlanarRow, PlanarX};

/// Rows of a panel.
pub(in crate::kernel) const PANEL_ROWS: usize = 16;

/// Vectors of a tile: their sums, whole ones and those of a block, take two registers each.
pub(in crate::kernel) const TILE_ROWS: usize = 8;

/// A cache line of a panel.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(in crate::kernel) struct Line([u8; 64]);

/// A block of a vector in a tile.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel) struct Cell {
    q: [i32; 8],
    d: f32,
    /// Where an integer sum starts, `−offset · sums`; for Q4_1 the bits of `d · sums`.
    offset: i32,
}

/// Dot products of a row with `T` vectors.
///
/// # Shapes
/// Any number of blocks; the arrays of each vector hold that of `row` or more, in whole groups of 16 blocks.
///
/// # Panics
/// If an array is too short.
pub(in crate::kernel) fn dot<const T: usize>(
    _: Avx512,
    kind: Planar,
    row: PlanarRow<'_>,
    x: [PlanarX<'_>; T],
) -> [f32; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_inner(kind, row, x) }
}

/// Lines of a panel with rows of `n_blocks` blocks.
pub(in crate::kernel) fn panel_lines(kind: Planar, n_blocks: usize) -> usize {
    n_blocks * if kind == Planar::Q4_1 { Q4_1_LINES } else { LINES }
}

/// Interleaves up to 16 rows of weights. With fewer, the last is there several times.
///
/// # Shapes
/// `rows [1..=16]`, of the same length; `panel [panel_lines(kind, n_blocks)]`.
///
/// # Panics
/// If a shape differs.
pub(in crate::kernel) fn pack_panel(_: Avx512, kind: Planar, rows: &[PlanarRow<'_>], panel: &mut [Line]) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { pack_panel_inner(kind, rows, panel) }
}

/// Interleaves the vectors of a tile.
///
/// # Shapes
/// `x [n]` with blocks as in [`dot`]; `tile [n, n_blocks]`, in an order of its own. `n` is at most [`TILE_ROWS`].
///
/// # Panics
/// If a shape differs.
pub(in crate::kernel) fn pack_x(kind: Planar, x: &[PlanarX<'_>], tile: &mut [Cell]) {
    let n_blocks = tile.len() / x.len();
    assert_eq!(tile.len(), n_blocks * x.len(), "blocks of {} vectors", x.len());
    let scale = offset(kind);
    for (at, b) in Walk::new(n_blocks).blocks().enumerate() {
        for (cell, x) in tile[at * x.len()..][..x.len()].iter_mut().zip(x) {
            let first = b / 4 * 128 + b % 4 * 16;
            let (low, high) = (&x.q[first..first + 16], &x.q[first + 64..first + 80]);
            cell.q[..4].copy_from_slice(&bytemuck::pod_read_unaligned::<[i32; 4]>(bytemuck::cast_slice(low)));
            cell.q[4..]
                .copy_from_slice(&bytemuck::pod_read_unaligned::<[i32; 4]>(bytemuck::cast_slice(high)));
            cell.d = x.d[b];
            cell.offset = match kind {
                Planar::Q4_1 => (x.d[b] * x.sums[b] as f32).to_bits().cast_signed(),
                _ => -(x.sums[b] * scale),
            };
        }
    }
}

/// Products of a panel with a tile of `n` vectors; `out` gets the number of a vector and its products with each
/// row.
///
/// # Shapes
/// `panel` from [`pack_panel`]; `tile` from [`pack_x`] with `n` vectors of as many blocks.
///
/// # Panics
/// If a shape differs, or `n` is 0 or more than [`TILE_ROWS`].
pub(in crate::kernel) fn gemm(
    _: Avx512,
    kind: Planar,
    panel: &[Line],
    tile: &[Cell],
    n: usize,
    out: &mut dyn FnMut(usize, &[f32; PANEL_ROWS]),
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { gemm_inner(kind, panel, tile, n, out) }
}

/// Lines of a block in a panel.
const LINES: usize = 9;
const Q4_1_LINES: usize = 10;

/// Offset of the integers.
fn offset(kind: Planar) -> i32 {
    match kind {
        Planar::Q8_0 => 128,
        Planar::Q4_0 => 8,
        Planar::Q4_1 => 0,
    }
}

/// The order of blocks in panels and tiles.
#[derive(Clone, Copy)]
struct Walk {
    n_blocks: usize,
}

impl Walk {
    /// The lanes, such that a sum and the one it is added to follow each other.
    const LANES: [usize; 16] = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15];

    fn new(n_blocks: usize) -> Self {
        Self { n_blocks }
    }

    /// Number of blocks of a lane.
    fn n_of(self, lane: usize) -> usize {
        (self.n_blocks + 15 - lane) / 16
    }

    /// Where the first block of each lane is.
    fn starts(self) -> [usize; 16] {
        let mut starts = [0; 16];
        let mut at = 0;
        for lane in Self::LANES {
            starts[lane] = at;
            at += self.n_of(lane);
        }
        starts
    }

    fn blocks(self) -> impl Iterator<Item = usize> {
        Self::LANES.into_iter().flat_map(move |lane| (lane..self.n_blocks).step_by(16))
    }
}

macro_rules! by_kind {
    ($kind:expr, $function:ident($($arg:expr),*)) => {
        match $kind {
            Planar::Q8_0 => $function::<T, Q8_0>($($arg),*),
            Planar::Q4_0 => $function::<T, Q4_0>($($arg),*),
            Planar::Q4_1 => $function::<T, Q4_1>($($arg),*),
        }
    };
}

const Q8_0: u8 = 0;
const Q4_0: u8 = 1;
const Q4_1: u8 = 2;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_inner<const T: usize>(kind: Planar, row: PlanarRow<'_>, x: [PlanarX<'_>; T]) -> [f32; T] {
    by_kind!(kind, dot_kind(row, x))
}

/// 16 blocks of a vector.
#[derive(Clone, Copy)]
struct X16<'a> {
    q: &'a [i8; 512],
    d: &'a [f32; 16],
    sums: &'a [i32; 16],
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_kind<const T: usize, const KIND: u8>(row: PlanarRow<'_>, x: [PlanarX<'_>; T]) -> [f32; T] {
    let n_blocks = row.scales.len();
    let n16 = n_blocks.div_ceil(16);
    let q = x.map(|x| &x.q.as_chunks::<512>().0[..n16]);
    let d = x.map(|x| &x.d.as_chunks::<16>().0[..n16]);
    let sums = x.map(|x| &x.sums.as_chunks::<16>().0[..n16]);
    let (scales, scales_rest) = row.scales.as_chunks::<16>();
    let (mins, mins_rest) = row.mins.as_chunks::<16>();
    let whole = scales.len();
    let mut acc = [_mm512_setzero_ps(); T];
    let rest = if KIND == Q8_0 {
        let quants = &row.quants.as_chunks::<512>().0[..whole];
        for i in 0..whole {
            let lines = quants[i].as_chunks::<64>().0;
            let x = std::array::from_fn(|t| X16 { q: &q[t][i], d: &d[t][i], sums: &sums[t][i] });
            prefetch_behind(&lines[0]);
            prefetch_behind(&lines[1]);
            prefetch_behind(&lines[2]);
            prefetch_behind(&lines[3]);
            prefetch_behind(&lines[4]);
            prefetch_behind(&lines[5]);
            prefetch_behind(&lines[6]);
            prefetch_behind(&lines[7]);
            let group = |g: usize| [load(&lines[2 * g]), load(&lines[2 * g + 1])];
            step::<T, KIND>(group, load_f16(&scales[i]), _mm512_setzero_ps(), x, &mut acc);
        }
        &row.quants[whole * 512..]
    } else {
        let quants = &row.quants.as_chunks::<256>().0[..whole];
        for i in 0..whole {
            let lines = quants[i].as_chunks::<64>().0;
            let x = std::array::from_fn(|t| X16 { q: &q[t][i], d: &d[t][i], sums: &sums[t][i] });
            prefetch_behind(&lines[0]);
            prefetch_behind(&lines[1]);
            prefetch_behind(&lines[2]);
            prefetch_behind(&lines[3]);
            let group = |g: usize| nibbles(load(&lines[g]));
            let m = if KIND == Q4_1 { load_f16(&mins[i]) } else { _mm512_setzero_ps() };
            step::<T, KIND>(group, load_f16(&scales[i]), m, x, &mut acc);
        }
        &row.quants[whole * 256..]
    };
    if whole < n16 {
        let x = std::array::from_fn(|t| X16 { q: &q[t][whole], d: &d[t][whole], sums: &sums[t][whole] });
        let group = |g: usize| {
            let n = scales_rest.len().saturating_sub(4 * g).min(4) * 16;
            if KIND == Q8_0 {
                let bytes = &rest[(128 * g).min(rest.len())..];
                [load_part(&bytes[..n]), load_part(&bytes[n..2 * n])]
            } else {
                let bytes = &rest[(64 * g).min(rest.len())..];
                nibbles(load_part(&bytes[..n]))
            }
        };
        let m = if KIND == Q4_1 { load_f16_part(mins_rest) } else { _mm512_setzero_ps() };
        step::<T, KIND>(group, load_f16_part(scales_rest), m, x, &mut acc);
    }
    let mut out = [0.0; T];
    for t in 0..T {
        out[t] = sum(acc[t]);
    }
    out
}

/// Adds 16 blocks. `group` gives the integers of four: their first halves, their second halves.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn step<const T: usize, const KIND: u8>(
    group: impl Fn(usize) -> [__m512i; 2],
    d: __m512,
    m: __m512,
    x: [X16<'_>; T],
    acc: &mut [__m512; T],
) {
    // Lanes 4i to 4i + 3 of `sums[t][g]` belong to block 4g + i.
    let mut sums = [[_mm512_setzero_si512(); 4]; T];
    for g in 0..4 {
        let [low, high] = group(g);
        for t in 0..T {
            let q = x[t].q.as_chunks::<64>().0;
            let first = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, load(&q[2 * g]));
            sums[t][g] = _mm512_dpbusd_epi32(first, high, load(&q[2 * g + 1]));
        }
    }
    for t in 0..T {
        let [a, b, c, e] = sums[t];
        let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let ce = _mm512_add_epi32(_mm512_unpacklo_epi32(c, e), _mm512_unpackhi_epi32(c, e));
        let all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, ce), _mm512_unpackhi_epi64(ab, ce));
        // Lane 4i + g holds block 4g + i.
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let all = _mm512_permutexvar_epi32(order, all);
        let x_sums: __m512i = bytemuck::cast(*x[t].sums);
        let all = match KIND {
            Q8_0 => _mm512_sub_epi32(all, _mm512_slli_epi32::<7>(x_sums)),
            Q4_0 => _mm512_sub_epi32(all, _mm512_slli_epi32::<3>(x_sums)),
            _ => all,
        };
        let x_d: __m512 = bytemuck::cast(*x[t].d);
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), _mm512_mul_ps(d, x_d), acc[t]);
        if KIND == Q4_1 {
            let x_sum = _mm512_mul_ps(x_d, _mm512_cvtepi32_ps(x_sums));
            acc[t] = _mm512_fmadd_ps(m, x_sum, acc[t]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn pack_panel_inner(kind: Planar, rows: &[PlanarRow<'_>], panel: &mut [Line]) {
    let n_blocks = rows[0].scales.len();
    assert!(rows.len() <= PANEL_ROWS, "{} rows in a panel", rows.len());
    assert_eq!(panel.len(), panel_lines(kind, n_blocks), "lines of a panel");
    let rows: [PlanarRow<'_>; PANEL_ROWS] = std::array::from_fn(|i| rows[i.min(rows.len() - 1)]);
    let mut next = Walk::new(n_blocks).starts();
    let n_lines = panel_lines(kind, 1);
    for first in (0..n_blocks).step_by(8) {
        let d = scales(rows.map(|row| &row.scales[first..]));
        let m = if kind == Planar::Q4_1 {
            scales(rows.map(|row| &row.mins[first..]))
        } else {
            [_mm512_setzero_ps(); 8]
        };
        for b in first..n_blocks.min(first + 8) {
            let at = &mut next[b % 16];
            let block = &mut panel[*at * n_lines..][..n_lines];
            *at += 1;
            let (low, high) = if kind == Planar::Q8_0 {
                let in_group = (n_blocks - b / 4 * 4).min(4) * 16;
                let at = b / 4 * 128 + b % 4 * 16;
                let (low, high) = (at, at + in_group);
                (columns(rows.map(|row| &row.quants[low..])), columns(rows.map(|row| &row.quants[high..])))
            } else {
                let both = columns(rows.map(|row| &row.quants[b * 16..]));
                let mut out = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
                for k in 0..4 {
                    [out.0[k], out.1[k]] = nibbles(both[k]);
                }
                out
            };
            for k in 0..4 {
                block[k] = bytemuck::cast(low[k]);
                block[4 + k] = bytemuck::cast(high[k]);
            }
            block[8] = bytemuck::cast(d[b % 8]);
            if kind == Planar::Q4_1 {
                block[9] = bytemuck::cast(m[b % 8]);
            }
        }
    }
}

/// Scales of up to eight blocks of each row, as a register for each block.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn scales(rows: [&[u16]; PANEL_ROWS]) -> [__m512; 8] {
    let mut eight = [[0u16; 8]; PANEL_ROWS];
    for i in 0..PANEL_ROWS {
        match rows[i].first_chunk() {
            Some(chunk) => eight[i] = *chunk,
            None => eight[i][..rows[i].len()].copy_from_slice(rows[i]),
        }
    }
    let pairs = columns(eight.each_ref().map(|row| bytemuck::cast_slice(row)));
    let mut out = [_mm512_setzero_ps(); 8];
    for k in 0..4 {
        out[2 * k] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs[k]));
        out[2 * k + 1] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(pairs[k])));
    }
    out
}

/// The first 16 bytes of each row: a register holds four bytes of each.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn columns(rows: [&[u8]; PANEL_ROWS]) -> [__m512i; 4] {
    // Rows i, 4 + i, 8 + i and 12 + i in the quarters of register i.
    let mut by_row = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        let r = _mm512_castsi128_si512(load16(rows[i]));
        let r = _mm512_inserti32x4::<1>(r, load16(rows[4 + i]));
        let r = _mm512_inserti32x4::<2>(r, load16(rows[8 + i]));
        by_row[i] = _mm512_inserti32x4::<3>(r, load16(rows[12 + i]));
    }
    let [a, b, c, d] = by_row;
    let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab_low, cd_low),
        _mm512_unpackhi_epi64(ab_low, cd_low),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ]
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn gemm_inner(
    kind: Planar,
    panel: &[Line],
    tile: &[Cell],
    n: usize,
    out: &mut dyn FnMut(usize, &[f32; PANEL_ROWS]),
) {
    macro_rules! by_width {
        ($($n:literal)*) => {
            match n {
                $($n => match kind {
                    Planar::Q4_1 => gemm_tile::<$n, Q4_1_LINES>(panel, tile, out),
                    _ => gemm_tile::<$n, LINES>(panel, tile, out),
                },)*
                _ => panic!("a tile of {n} vectors"),
            }
        };
    }
    by_width!(1 2 3 4 5 6 7 8)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn gemm_tile<const T: usize, const N_LINES: usize>(
    panel: &[Line],
    tile: &[Cell],
    out: &mut dyn FnMut(usize, &[f32; PANEL_ROWS]),
) {
    let (mut panel, panel_rest) = panel.as_chunks::<N_LINES>();
    let (mut tile, tile_rest) = tile.as_chunks::<T>();
    let n_blocks = panel.len();
    assert!(panel_rest.is_empty() && tile_rest.is_empty() && tile.len() == n_blocks, "blocks of a product");
    // Sums of 1, 2, 4 and 8 lanes that wait for as many others.
    let mut waiting = [[_mm512_setzero_ps(); T]; 4];
    for (k, lane) in Walk::LANES.into_iter().enumerate() {
        let (blocks, panel_rest) = panel.split_at(Walk::new(n_blocks).n_of(lane));
        let (cells, tile_rest) = tile.split_at(blocks.len());
        (panel, tile) = (panel_rest, tile_rest);
        let mut acc = [_mm512_setzero_ps(); T];
        for (block, x) in blocks.iter().zip(cells) {
            add_block(block, x, &mut acc);
        }
        for bit in 0..4 {
            if k >> bit & 1 == 0 {
                waiting[bit] = acc;
                break;
            }
            for t in 0..T {
                acc[t] = _mm512_add_ps(waiting[bit][t], acc[t]);
            }
        }
        if k == 15 {
            for t in 0..T {
                out(t, &bytemuck::cast(acc[t]));
            }
        }
    }
}

/// Adds the products of a block of 16 rows with `T` vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn add_block<const T: usize, const N_LINES: usize>(
    block: &[Line; N_LINES],
    x: &[Cell; T],
    acc: &mut [__m512; T],
) {
    let mut sums = [_mm512_setzero_si512(); T];
    if N_LINES == LINES {
        for t in 0..T {
            sums[t] = _mm512_set1_epi32(x[t].offset);
        }
    }
    for k in 0..8 {
        let w: __m512i = bytemuck::cast(block[k]);
        for t in 0..T {
            sums[t] = _mm512_dpbusd_epi32(sums[t], w, _mm512_set1_epi32(x[t].q[k]));
        }
    }
    let d: __m512 = bytemuck::cast(block[8]);
    for t in 0..T {
        let scale = _mm512_mul_ps(d, _mm512_set1_ps(x[t].d));
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), scale, acc[t]);
    }
    if N_LINES == Q4_1_LINES {
        let m: __m512 = bytemuck::cast(block[9]);
        for t in 0..T {
            let x_sum = _mm512_set1_ps(f32::from_bits(x[t].offset.cast_unsigned()));
            acc[t] = _mm512_fmadd_ps(m, x_sum, acc[t]);
        }
    }
}

/// Sum of the lanes: halves onto each other, four times.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn sum(x: __m512) -> f32 {
    let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

/// The low and the high nibbles of 64 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn nibbles(both: __m512i) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    [_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask)]
}

/// 64 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load<T: Pod>(bytes: &[T; 64]) -> __m512i {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(bytes))
}

/// The first 16 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load16(bytes: &[u8]) -> __m128i {
    bytemuck::pod_read_unaligned(&bytes[..16])
}

/// Up to 64 bytes, followed by zeros.
///
/// Invariant MASK-IN-SLICE: the mask has a bit for each byte of the slice and no other.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_part(bytes: &[u8]) -> __m512i {
    let mask = u64::MAX.unbounded_shr(64 - bytes.len().min(64) as u32);
    // SAFETY: MASK-IN-SLICE, and bytes without a bit are not read.
    unsafe { _mm512_maskz_loadu_epi8(mask, bytes.as_ptr().cast()) }
}

/// 16 f16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_f16(x: &[u16; 16]) -> __m512 {
    _mm512_cvtph_ps(bytemuck::pod_read_unaligned(bytemuck::cast_slice(x)))
}

/// Up to 16 f16, followed by zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_f16_part(x: &[u16]) -> __m512 {
    _mm512_cvtph_ps(_mm512_castsi512_si256(load_part(bytemuck::cast_slice(x))))
}

/// Bytes that weights are asked for ahead of their use.
const AHEAD: usize = 2048;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn prefetch_behind<T>(at: &T) {
    let ahead = std::ptr::from_ref(at).cast::<i8>().wrapping_add(AHEAD);
    _mm_prefetch::<_MM_HINT_T0>(ahead);
}

#[cfg(test)]
mod tests;
