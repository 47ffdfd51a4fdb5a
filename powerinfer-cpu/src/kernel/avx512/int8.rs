//! Planar 8-bit and 4-bit weights against 8-bit vectors: [`dot`] for one row and a few vectors, [`dot_band`] and
//! [`dot_list`] for many rows and one vector, and a matrix product ([`pack_panel`], [`pack_x`], [`gemm`]) for many of both.
//! All give the same bits.
//!
//! ```text
//! isum(b) = Σ u · q − offset · sums(b)                      exact, for each block b of 32 weights
//! acc(l)  = fma(isum(b), d_w(b) · d_x(b), acc(l))           for b = l, l + 16, l + 32, …
//!           and for Q4_1 then fma(m(b), d_x(b) · sums(b), acc(l))
//! result  = lanes l and l + 8 added, then l and l + 4, l and l + 2, l and l + 1
//! ```
//!
//! The first two have the 16 sums in the lanes of one register and take 16 blocks a step. The matrix product has 16 rows of
//! weights in the lanes instead, interleaved by four bytes, and takes the blocks in the order of [`Walk`]: all of
//! lane 0, then all of lane 8, 4, 12, …, so that whatever is added next is there.
//!
//! ```text
//! panel, a block:  8 lines of 16 rows × 4 bytes | line of 16 scales | Q4_1: line of 16 minima
//! tile, a block:   for each vector 8 × 4 bytes, its scale, its offset
//! ```

use std::arch::x86_64::*;

use bytemuck::{Pod, Zeroable};

use super::super::{Asks, prefetch_bytes, prefetch_line};
use super::load::sums;
use crate::level::Avx512;
use crate::planar::{Planar, PlanarRow, PlanarRows, PlanarX};

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

/// Dot products of the rows `row(0), row(1), …` of `w` with a vector, four at a time, one of each quarter. Meanwhile the
/// memory is asked for the rows `ahead(0), ahead(1), …`, a few lines at a time: asked for all at once, they would keep the
/// processor waiting.
///
/// # Shapes
/// As for [`dot`].
///
/// # Panics
/// As for [`dot`], or if there is no such row.
pub(in crate::kernel) fn dot_band(
    _: Avx512,
    w: PlanarRows<'_>,
    row: impl Fn(usize) -> usize,
    ahead: impl Fn(usize) -> Option<usize>,
    x: PlanarX<'_>,
    out: &mut [f32],
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_band_inner(w, row, ahead, x, out) }
}

/// Dot products of the rows `list` of `w` with a vector; each takes a row of `asks` along, which the memory is asked for.
///
/// # Shapes
/// As for [`dot`]; `out [list.len()]`.
///
/// # Panics
/// As for [`dot`], or if there is no such row.
pub(in crate::kernel) fn dot_list<const N: usize>(
    _: Avx512,
    w: PlanarRows<'_>,
    list: &[u32],
    x: PlanarX<'_>,
    out: &mut [f32],
    asks: &mut Asks<'_, N>,
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { dot_list_inner(w, list, x, out, asks) }
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
    let offset = kind.offset();
    for (at, b) in Walk::new(n_blocks).blocks().enumerate() {
        for (cell, x) in tile[at * x.len()..][..x.len()].iter_mut().zip(x) {
            let [low, high] = x.block(b);
            cell.q[..4].copy_from_slice(&bytemuck::cast::<_, [i32; 4]>(*low));
            cell.q[4..].copy_from_slice(&bytemuck::cast::<_, [i32; 4]>(*high));
            cell.d = x.d[b];
            cell.offset = match kind {
                Planar::Q4_1 => (x.d[b] * x.sums[b] as f32).to_bits().cast_signed(),
                _ => -(offset * x.sums[b]),
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

// The kinds as constants.
const Q8_0: u8 = 0;
const Q4_0: u8 = 1;
const Q4_1: u8 = 2;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_inner<const T: usize>(kind: Planar, row: PlanarRow<'_>, x: [PlanarX<'_>; T]) -> [f32; T] {
    let [sums] = match kind {
        Planar::Q8_0 => dot_kind::<1, T, Q8_0, 512>([row], x, |_, _| {}),
        Planar::Q4_0 => dot_kind::<1, T, Q4_0, 256>([row], x, |_, _| {}),
        Planar::Q4_1 => dot_kind::<1, T, Q4_1, 256>([row], x, |_, _| {}),
    };
    sums
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_band_inner(
    w: PlanarRows<'_>,
    row: impl Fn(usize) -> usize,
    ahead: impl Fn(usize) -> Option<usize>,
    x: PlanarX<'_>,
    out: &mut [f32],
) {
    match w.kind {
        Planar::Q8_0 => dot_band_kind::<Q8_0, 512>(w, row, ahead, x, out),
        Planar::Q4_0 => dot_band_kind::<Q4_0, 256>(w, row, ahead, x, out),
        Planar::Q4_1 => dot_band_kind::<Q4_1, 256>(w, row, ahead, x, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_band_kind<const KIND: u8, const BYTES: usize>(
    w: PlanarRows<'_>,
    row: impl Fn(usize) -> usize,
    ahead: impl Fn(usize) -> Option<usize>,
    x: PlanarX<'_>,
    out: &mut [f32],
) {
    let quarter = out.len() / 4;
    for i in 0..quarter {
        let (mut rows, mut rows_ahead): (_, [&[u8]; 4]) = ([0; 4], [&[]; 4]);
        for k in 0..4 {
            let place = i + k * quarter;
            rows[k] = row(place);
            if let Some(row) = ahead(place) {
                rows_ahead[k] = w.bytes(row);
            }
        }
        let sums = dot_and_ask::<4, KIND, BYTES>(&w, rows, rows_ahead, x);
        for k in 0..4 {
            out[i + k * quarter] = sums[k];
        }
    }
    for i in 4 * quarter..out.len() {
        let ahead = ahead(i).map_or(&[][..], |row| w.bytes(row));
        [out[i]] = dot_and_ask::<1, KIND, BYTES>(&w, [row(i)], [ahead], x);
    }
}

/// Products of `rows`; the memory is asked for the bytes `ahead`, which are rows of the same form, but for those that have
/// another length: they are asked for at once.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_and_ask<const R: usize, const KIND: u8, const BYTES: usize>(
    w: &PlanarRows<'_>,
    rows: [usize; R],
    ahead: [&[u8]; R],
    x: PlanarX<'_>,
) -> [f32; R] {
    let mut planar = [w.row(rows[0]); R];
    for r in 1..R {
        planar[r] = w.row(rows[r]);
    }
    let mut planar_ahead = planar;
    for r in 0..R {
        if ahead[r].len() == w.row_bytes() {
            planar_ahead[r] = w.split(ahead[r]);
        } else {
            prefetch_bytes(ahead[r]);
        }
    }
    let sums = dot_kind::<R, 1, KIND, BYTES>(planar, [x], |r, step| {
        ask_for_step::<KIND, BYTES>(&planar_ahead[r], step);
    });
    let mut out = [0.0; R];
    for r in 0..R {
        out[r] = sums[r][0];
    }
    out
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_list_inner<const N: usize>(
    w: PlanarRows<'_>,
    list: &[u32],
    x: PlanarX<'_>,
    out: &mut [f32],
    asks: &mut Asks<'_, N>,
) {
    match w.kind {
        Planar::Q8_0 => dot_list_kind::<Q8_0, 512, N>(&w, list, x, out, asks),
        Planar::Q4_0 => dot_list_kind::<Q4_0, 256, N>(&w, list, x, out, asks),
        Planar::Q4_1 => dot_list_kind::<Q4_1, 256, N>(&w, list, x, out, asks),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_list_kind<const KIND: u8, const BYTES: usize, const N: usize>(
    w: &PlanarRows<'_>,
    list: &[u32],
    x: PlanarX<'_>,
    out: &mut [f32],
    asks: &mut Asks<'_, N>,
) {
    let (groups, rest) = list.as_chunks::<4>();
    let (out, out_rest) = out.as_chunks_mut::<4>();
    for (group, out) in groups.iter().zip(out) {
        let mut rows = [0; 4];
        for r in 0..4 {
            rows[r] = group[r] as usize;
        }
        *out = dot_and_ask::<4, KIND, BYTES>(w, rows, asks.take(), x);
    }
    for (&row, out) in rest.iter().zip(out_rest) {
        [*out] = dot_and_ask::<1, KIND, BYTES>(w, [row as usize], asks.take(), x);
    }
}

/// `T` vectors in steps of 16 blocks.
struct Steps<'a, const T: usize> {
    q: [&'a [[i8; 512]]; T],
    d: [&'a [[f32; 16]]; T],
    sums: [&'a [[i32; 16]]; T],
}

impl<'a, const T: usize> Steps<'a, T> {
    /// The first `n` of each. Loops here and below, since closures with target features are not inlined into `map`.
    #[inline(always)]
    fn new(x: [PlanarX<'a>; T], n: usize) -> Self {
        let mut steps = Self { q: [&[]; T], d: [&[]; T], sums: [&[]; T] };
        for t in 0..T {
            steps.q[t] = &x[t].q.as_chunks().0[..n];
            steps.d[t] = &x[t].d.as_chunks().0[..n];
            steps.sums[t] = &x[t].sums.as_chunks().0[..n];
        }
        steps
    }
}

/// `BYTES`: those of the integers of 16 blocks. `at_step(r, step)` is called before each.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn dot_kind<const R: usize, const T: usize, const KIND: u8, const BYTES: usize>(
    rows: [PlanarRow<'_>; R],
    x: [PlanarX<'_>; T],
    mut at_step: impl FnMut(usize, usize),
) -> [[f32; T]; R] {
    let n_blocks = rows[0].scales.len();
    let whole = n_blocks / 16;
    let x = Steps::new(x, n_blocks.div_ceil(16));
    let mut quants: [&[[u8; BYTES]]; R] = [&[]; R];
    let mut scales: [&[[u16; 16]]; R] = [&[]; R];
    let mut mins = scales;
    for r in 0..R {
        assert_eq!(rows[r].scales.len(), n_blocks, "blocks of rows");
        quants[r] = &rows[r].quants.as_chunks().0[..whole];
        scales[r] = &rows[r].scales.as_chunks().0[..whole];
        if KIND == Q4_1 {
            mins[r] = &rows[r].mins.as_chunks().0[..whole];
        }
    }
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    for i in 0..whole {
        for r in 0..R {
            at_step(r, i);
            let lines = quants[r][i].as_chunks::<64>().0;
            let group = |g: usize| {
                if KIND == Q8_0 {
                    [load(&lines[2 * g]), load(&lines[2 * g + 1])]
                } else {
                    nibbles(load(&lines[g]))
                }
            };
            let m = if KIND == Q4_1 { load_f16(&mins[r][i]) } else { _mm512_setzero_ps() };
            step::<T, KIND>(group, load_f16(&scales[r][i]), m, &x, i, &mut acc[r]);
        }
    }
    if !n_blocks.is_multiple_of(16) {
        for r in 0..R {
            at_step(r, whole);
            let rest = &rows[r].quants[whole * BYTES..];
            let scales = rows[r].scales.as_chunks::<16>().1;
            let group = |g: usize| {
                let n = scales.len().saturating_sub(4 * g).min(4) * 16;
                if KIND == Q8_0 {
                    let bytes = &rest[(128 * g).min(rest.len())..];
                    [load_part(&bytes[..n]), load_part(&bytes[n..2 * n])]
                } else {
                    let bytes = &rest[(64 * g).min(rest.len())..];
                    nibbles(load_part(&bytes[..n]))
                }
            };
            let mins = rows[r].mins.as_chunks::<16>().1;
            let m = if KIND == Q4_1 { load_f16_part(mins) } else { _mm512_setzero_ps() };
            step::<T, KIND>(group, load_f16_part(scales), m, &x, whole, &mut acc[r]);
        }
    }
    sums(acc)
}

/// Asks for the lines of a step; the scales of two steps are one line.
#[inline(always)]
fn ask_for_step<const KIND: u8, const BYTES: usize>(row: &PlanarRow<'_>, at: usize) {
    let quants = row.quants.as_ptr().wrapping_add(at * BYTES);
    for line in 0..BYTES / 64 {
        prefetch_line(quants.wrapping_add(64 * line));
    }
    if at.is_multiple_of(2) {
        prefetch_line(row.scales.as_ptr().wrapping_add(at * 16).cast());
        if KIND == Q4_1 {
            prefetch_line(row.mins.as_ptr().wrapping_add(at * 16).cast());
        }
    }
}

/// Adds the 16 blocks of step `at`. `group` gives the integers of four: their first halves, their second halves.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn step<const T: usize, const KIND: u8>(
    group: impl Fn(usize) -> [__m512i; 2],
    d: __m512,
    m: __m512,
    x: &Steps<'_, T>,
    at: usize,
    acc: &mut [__m512; T],
) {
    // Lanes 4i to 4i + 3 of `sums[t][g]` belong to block 4g + i.
    let mut sums = [[_mm512_setzero_si512(); 4]; T];
    for g in 0..4 {
        let [low, high] = group(g);
        for t in 0..T {
            let q = x.q[t][at].as_chunks::<64>().0;
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
        let x_sums: __m512i = bytemuck::cast(x.sums[t][at]);
        let all = match KIND {
            Q8_0 => _mm512_sub_epi32(all, _mm512_slli_epi32::<7>(x_sums)),
            Q4_0 => _mm512_sub_epi32(all, _mm512_slli_epi32::<3>(x_sums)),
            _ => all,
        };
        let x_d: __m512 = bytemuck::cast(x.d[t][at]);
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), _mm512_mul_ps(d, x_d), acc[t]);
        if KIND == Q4_1 {
            let x_sum = _mm512_mul_ps(x_d, _mm512_cvtepi32_ps(x_sums));
            acc[t] = _mm512_fmadd_ps(m, x_sum, acc[t]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn pack_panel_inner(kind: Planar, rows: &[PlanarRow<'_>], panel: &mut [Line]) {
    assert!((1..=PANEL_ROWS).contains(&rows.len()), "{} rows in a panel", rows.len());
    let rows: [PlanarRow<'_>; PANEL_ROWS] = std::array::from_fn(|i| rows[i.min(rows.len() - 1)]);
    match kind {
        Planar::Q8_0 => pack_rows::<32, LINES>(&rows, panel),
        Planar::Q4_0 => pack_rows::<16, LINES>(&rows, panel),
        Planar::Q4_1 => pack_rows::<16, Q4_1_LINES>(&rows, panel),
    }
}

/// 16 blocks of a row: integers in `N` pieces, scales and minima in two.
#[derive(Clone, Copy)]
struct Step<const N: usize> {
    quants: [[u8; 16]; N],
    scales: [[u16; 8]; 2],
    mins: [[u16; 8]; 2],
}

/// The parts of a [`Step`] where they are.
#[derive(Clone, Copy)]
struct StepRef<'a, const N: usize> {
    quants: &'a [[u8; 16]; N],
    scales: &'a [[u16; 8]; 2],
    mins: &'a [[u16; 8]; 2],
}

impl<const N: usize> Step<N> {
    const ZERO: Self = Self { quants: [[0; 16]; N], scales: [[0; 8]; 2], mins: [[0; 8]; 2] };

    /// The last blocks of a row and zeros for those that are not there.
    fn last(row: &PlanarRow<'_>) -> Self {
        let mut step = Self::ZERO;
        let scales = row.scales.as_chunks::<16>().1;
        let pieces = row.quants.as_chunks::<16>().0;
        let pieces = &pieces[pieces.len() - scales.len() * N / 16..];
        // One group after the other; Q8_0 has two pieces for each block in it.
        for (group, pieces) in step.quants.chunks_mut(N / 4).zip(pieces.chunks(N / 4)) {
            let n = pieces.len() * 16 / N;
            for (to, pieces) in group.chunks_mut(4).zip(pieces.chunks(n)) {
                to[..n].copy_from_slice(pieces);
            }
        }
        step.scales.as_flattened_mut()[..scales.len()].copy_from_slice(scales);
        let mins = row.mins.as_chunks::<16>().1;
        step.mins.as_flattened_mut()[..mins.len()].copy_from_slice(mins);
        step
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn pack_rows<const N: usize, const N_LINES: usize>(rows: &[PlanarRow<'_>; PANEL_ROWS], panel: &mut [Line]) {
    let n_blocks = rows[0].scales.len();
    let (panel, panel_rest) = panel.as_chunks_mut::<N_LINES>();
    assert!(panel.len() == n_blocks && panel_rest.is_empty(), "blocks of a panel");
    let starts = Walk::new(n_blocks).starts();
    let zero = Step::<N>::ZERO;
    let mut steps = [StepRef { quants: &zero.quants, scales: &zero.scales, mins: &zero.mins }; PANEL_ROWS];
    let whole = n_blocks / 16;
    for at in 0..whole {
        for r in 0..PANEL_ROWS {
            steps[r].quants = &rows[r].quants.as_chunks().0.as_chunks().0[at];
            steps[r].scales = &rows[r].scales.as_chunks().0.as_chunks().0[at];
            if N_LINES == Q4_1_LINES {
                steps[r].mins = &rows[r].mins.as_chunks().0.as_chunks().0[at];
            }
        }
        pack_step(&steps, panel, &starts, at, 16);
    }
    if !n_blocks.is_multiple_of(16) {
        let mut last = [zero; PANEL_ROWS];
        for r in 0..PANEL_ROWS {
            last[r] = Step::last(&rows[r]);
        }
        for r in 0..PANEL_ROWS {
            let Step { quants, scales, mins } = &last[r];
            steps[r] = StepRef { quants, scales, mins };
        }
        pack_step(&steps, panel, &starts, whole, n_blocks % 16);
    }
}

/// Adds the first `n` blocks of step `at` to a panel.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn pack_step<const N: usize, const N_LINES: usize>(
    steps: &[StepRef<'_, N>; PANEL_ROWS],
    panel: &mut [[Line; N_LINES]],
    starts: &[usize; 16],
    at: usize,
    n: usize,
) {
    for i in 0..n {
        let block = &mut panel[starts[i] + at];
        let mut pieces = [&[0; 16]; PANEL_ROWS];
        if N == 32 {
            for half in 0..2 {
                for r in 0..PANEL_ROWS {
                    pieces[r] = &steps[r].quants[i / 4 * 8 + i % 4 + 4 * half];
                }
                let columns = columns(&pieces);
                for k in 0..4 {
                    block[4 * half + k] = bytemuck::cast(columns[k]);
                }
            }
        } else {
            for r in 0..PANEL_ROWS {
                pieces[r] = &steps[r].quants[i];
            }
            let columns = columns(&pieces);
            for k in 0..4 {
                let [low, high] = nibbles(columns[k]);
                block[k] = bytemuck::cast(low);
                block[4 + k] = bytemuck::cast(high);
            }
        }
    }
    for half in 0..2 {
        let mut pieces = [&[0; 8]; PANEL_ROWS];
        for r in 0..PANEL_ROWS {
            pieces[r] = &steps[r].scales[half];
        }
        let d = f16_columns(&pieces);
        for i in 8 * half..n.min(8 * half + 8) {
            panel[starts[i] + at][8] = bytemuck::cast(d[i % 8]);
        }
        if N_LINES == Q4_1_LINES {
            for r in 0..PANEL_ROWS {
                pieces[r] = &steps[r].mins[half];
            }
            let m = f16_columns(&pieces);
            for i in 8 * half..n.min(8 * half + 8) {
                panel[starts[i] + at][9] = bytemuck::cast(m[i % 8]);
            }
        }
    }
}

/// Eight f16 of each row: a register holds one of each.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn f16_columns(rows: &[&[u16; 8]; PANEL_ROWS]) -> [__m512; 8] {
    let mut bytes = [&[0; 16]; PANEL_ROWS];
    for r in 0..PANEL_ROWS {
        bytes[r] = bytemuck::cast_ref(rows[r]);
    }
    let pairs = columns(&bytes);
    let mut out = [_mm512_setzero_ps(); 8];
    for k in 0..4 {
        out[2 * k] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs[k]));
        out[2 * k + 1] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(pairs[k])));
    }
    out
}

/// 16 bytes of each row: a register holds four of each.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn columns(rows: &[&[u8; 16]; PANEL_ROWS]) -> [__m512i; 4] {
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

/// 16 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load16(bytes: &[u8; 16]) -> __m128i {
    bytemuck::pod_read_unaligned(bytes)
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

#[cfg(test)]
mod tests;
