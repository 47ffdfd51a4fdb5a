//! The KV cache, and attention over it.
//!
//! A head's keys and values lie in tiles of [`POSITIONS`] positions: keys by dimension, values by position.
//!
//! ```text
//! keys    [n_layer, n_head_kv, n_tiles, head_dim, POSITIONS]
//! values  [n_layer, n_head_kv, n_tiles, POSITIONS, head_dim]
//! ```
//!
//! Rows of one sequence at consecutive positions and the query heads that share a KV head meet each tile together. A row
//! goes over its positions in spans of [`SPAN`], tile by tile, with the running maximum and sum of the softmax; then
//! over the results of the spans. So its bits depend on its own queries, keys and values alone, whether a thread
//! computes one span or all of them.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, TryLockError};

use bytemuck::Zeroable;
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use powerinfer_sparse_ops::block::{BlockQ8_0, quantize_q8_0};
use powerinfer_sparse_ops::{ModelSpec, SeqId, StepRow};

use crate::kernel::attention::{
    BlockKeys, ByPosition, Kept, Line, POSITIONS, QUERIES, Running, Shares, exp, lines, mix, scores, softmax,
    widen,
};
use crate::level::CpuLevel;
use crate::matmul::Cpu;
use crate::pool::Pool;

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvType {
    /// Half the bytes, rounded to 11 bits.
    #[default]
    F16,
    /// As computed.
    F32,
    /// 8 bits and an f16 scale for each 32 values, which must divide the head.
    Q8_0,
}

impl KvType {
    /// Values that are kept together; a head is whole blocks.
    pub fn block_len(self) -> usize {
        match self {
            Self::F16 | Self::F32 => 1,
            Self::Q8_0 => 32,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
            Self::Q8_0 => size_of::<BlockQ8_0>(),
        }
    }

    /// Bytes of `n` values in whole blocks.
    pub fn n_bytes(self, n: usize) -> usize {
        n / self.block_len() * self.block_bytes()
    }

    /// The name as files and flags have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "F16",
            Self::F32 => "F32",
            Self::Q8_0 => "Q8_0",
        }
    }
}

/// Positions whose result is made by itself: where one head has more of them, threads may share it. Of a head of 64
/// dimensions they are 64 KiB in F16, some microseconds of work.
const SPAN: usize = 8 * POSITIONS;

/// Queries that meet a tile of keys together, if there are so many: 32 of 128 dimensions and their sums are another
/// 32 KiB beside the tile.
const RUN_QUERIES: usize = 4 * QUERIES;

/// Pieces for each thread from which on threads need not share a head.
const PIECES_PER_THREAD: usize = 4;

/// Rows from which on writing is shared out; a few are written faster than a thread wakes.
const ROWS_WORTH_SHARING: usize = 8;

/// Shape of one head's part of a cache.
#[derive(Clone, Copy, Debug)]
struct Head {
    ty: KvType,
    head_dim: usize,
}

impl Head {
    /// Length of a tile in words; its bytes are a multiple of 64 for every type.
    fn tile_words(self) -> usize {
        self.ty.n_bytes(self.head_dim) * POSITIONS / size_of::<u32>()
    }

    fn keys(self, tile: &[u32]) -> Kept<'_> {
        match self.ty {
            KvType::F16 => Kept::F16(bytemuck::cast_slice(tile)),
            KvType::F32 => Kept::F32(bytemuck::cast_slice(tile)),
            KvType::Q8_0 => Kept::Keys(bytemuck::cast_slice(tile)),
        }
    }

    fn values(self, tile: &[u32]) -> Kept<'_> {
        match self.ty {
            KvType::F16 => Kept::F16(bytemuck::cast_slice(tile)),
            KvType::F32 => Kept::F32(bytemuck::cast_slice(tile)),
            KvType::Q8_0 => Kept::Values(bytemuck::cast_slice(tile)),
        }
    }

    /// Writes the key of position `p` of a tile.
    fn write_key(self, tile: &mut [u32], p: usize, x: &[f32]) {
        match self.ty {
            KvType::F16 => {
                let dims = bytemuck::cast_slice_mut::<u32, [u16; POSITIONS]>(tile);
                let mut rounded = [f16::ZERO; 32];
                for (dims, x) in dims.chunks_mut(32).zip(x.chunks(32)) {
                    rounded[..x.len()].convert_from_f32_slice(x);
                    for (dim, x) in dims.iter_mut().zip(rounded) {
                        dim[p] = x.to_bits();
                    }
                }
            }
            KvType::F32 => {
                let dims = bytemuck::cast_slice_mut::<u32, [f32; POSITIONS]>(tile);
                dims.iter_mut().zip(x).for_each(|(dim, x)| dim[p] = *x);
            }
            KvType::Q8_0 => {
                for (to, x) in bytemuck::cast_slice_mut::<u32, BlockKeys>(tile).iter_mut().zip(x.chunks(32)) {
                    let mut rounded = [BlockQ8_0::zeroed()];
                    quantize_q8_0(x, &mut rounded);
                    to.d[p] = rounded[0].d.to_bits();
                    to.q.iter_mut().zip(rounded[0].qs).for_each(|(to, q)| to[p] = q);
                }
            }
        }
    }

    /// Writes the value of position `p` of a tile.
    fn write_value(self, tile: &mut [u32], p: usize, x: &[f32]) {
        let n = self.head_dim;
        match self.ty {
            KvType::F16 => {
                let to = &mut bytemuck::cast_slice_mut::<u32, u16>(tile)[p * n..][..n];
                let to: &mut [f16] = to.reinterpret_cast_mut();
                to.convert_from_f32_slice(x);
            }
            KvType::F32 => bytemuck::cast_slice_mut::<u32, f32>(tile)[p * n..][..n].copy_from_slice(x),
            KvType::Q8_0 => {
                let n = n / 32;
                quantize_q8_0(x, &mut bytemuck::cast_slice_mut::<u32, BlockQ8_0>(tile)[p * n..][..n]);
            }
        }
    }

    /// Copies some positions of a tile of keys.
    fn copy_keys(self, to: &mut [u32], from: &[u32], positions: Range<usize>) {
        match self.ty {
            KvType::F16 => copy_columns::<u16>(to, from, positions),
            KvType::F32 => copy_columns::<u32>(to, from, positions),
            KvType::Q8_0 => {
                let (to, from) = (bytemuck::cast_slice_mut(to), bytemuck::cast_slice::<u32, BlockKeys>(from));
                for (to, from) in to.iter_mut().zip(from) {
                    let to: &mut BlockKeys = to;
                    to.d[positions.clone()].copy_from_slice(&from.d[positions.clone()]);
                    for (to, from) in to.q.iter_mut().zip(&from.q) {
                        to[positions.clone()].copy_from_slice(&from[positions.clone()]);
                    }
                }
            }
        }
    }

    /// Copies some positions of a tile of values.
    fn copy_values(self, to: &mut [u32], from: &[u32], positions: Range<usize>) {
        let n_bytes = self.ty.n_bytes(self.head_dim);
        let bytes = positions.start * n_bytes..positions.end * n_bytes;
        bytemuck::cast_slice_mut::<u32, u8>(to)[bytes.clone()]
            .copy_from_slice(&bytemuck::cast_slice::<u32, u8>(from)[bytes]);
    }
}

/// Copies some columns of rows of [`POSITIONS`].
fn copy_columns<T: bytemuck::Pod>(to: &mut [u32], from: &[u32], columns: Range<usize>) {
    let to = bytemuck::cast_slice_mut::<u32, T>(to).as_chunks_mut::<POSITIONS>().0;
    let from = bytemuck::cast_slice::<u32, T>(from).as_chunks::<POSITIONS>().0;
    for (to, from) in to.iter_mut().zip(from) {
        to[columns.clone()].copy_from_slice(&from[columns.clone()]);
    }
}

/// Keys and values of one sequence; the layout is in the module text.
#[derive(Clone, Debug)]
pub(crate) struct KvCache {
    n_layer: usize,
    kv_len: usize,
    n_head_kv: usize,
    head: Head,
    k: Vec<u32>,
    v: Vec<u32>,
}

impl KvCache {
    /// Bytes that a cache of `n_layer` layers takes, if they can be counted.
    pub(crate) fn n_bytes(spec: &ModelSpec, ty: KvType, n_layer: usize, kv_len: usize) -> Option<usize> {
        let n_positions = kv_len.checked_next_multiple_of(POSITIONS)?;
        n_layer.checked_mul(2 * ty.n_bytes(spec.kv_dim()))?.checked_mul(n_positions)
    }

    /// Zeros; memory that the system hands out only when it is written.
    pub(crate) fn new(spec: &ModelSpec, ty: KvType, n_layer: usize, kv_len: usize) -> Self {
        let head = Head { ty, head_dim: spec.head_dim };
        let n = n_layer * spec.n_head_kv * kv_len.div_ceil(POSITIONS) * head.tile_words();
        Self { n_layer, kv_len, n_head_kv: spec.n_head_kv, head, k: vec![0; n], v: vec![0; n] }
    }

    pub(crate) fn n_layer(&self) -> usize {
        self.n_layer
    }

    pub(crate) fn kv_len(&self) -> usize {
        self.kv_len
    }

    /// Words of one head of one layer.
    fn head_words(&self) -> usize {
        self.kv_len.div_ceil(POSITIONS) * self.head.tile_words()
    }

    /// Where a tile lies in the keys and in the values.
    fn tile(&self, layer: usize, head_kv: usize, tile: usize) -> Range<usize> {
        let n = self.head.tile_words();
        let start = (layer * self.n_head_kv + head_kv) * self.head_words() + tile * n;
        start..start + n
    }

    /// Copies positions `positions` of every layer to the same positions here.
    pub(crate) fn copy_from(&mut self, from: &Self, positions: Range<usize>) {
        let n_head_kv = self.n_head_kv;
        for (layer, head_kv) in (0..from.n_layer).flat_map(|l| (0..n_head_kv).map(move |h| (l, h))) {
            for tile in positions.start / POSITIONS..positions.end.div_ceil(POSITIONS) {
                let first = tile * POSITIONS;
                let part = positions.start.saturating_sub(first)..POSITIONS.min(positions.end - first);
                let (to, at) = (self.tile(layer, head_kv, tile), from.tile(layer, head_kv, tile));
                self.head.copy_keys(&mut self.k[to.clone()], &from.k[at.clone()], part.clone());
                self.head.copy_values(&mut self.v[to], &from.v[at], part);
            }
        }
    }

    /// Writes keys and values of one layer from position `first` on.
    ///
    /// # Shapes
    /// `k, v [n_rows, n_head_kv, head_dim]`.
    fn write(&mut self, pool: &mut Pool, layer: usize, first: usize, k: &[f32], v: &[f32]) {
        let (head, n_head_kv, head_words) = (self.head, self.n_head_kv, self.head_words());
        let kv_dim = n_head_kv * head.head_dim;
        let n_rows = k.len() / kv_dim;
        let layer = layer * n_head_kv * head_words..(layer + 1) * n_head_kv * head_words;
        let mut share = |to: &mut [u32], x: &[f32], write: fn(Head, &mut [u32], usize, &[f32])| {
            let write_head = |head_kv: usize, to: &mut [u32]| {
                for row in 0..n_rows {
                    let (tile, p) = ((first + row) / POSITIONS, (first + row) % POSITIONS);
                    let tile = &mut to[tile * head.tile_words()..][..head.tile_words()];
                    write(head, tile, p, &x[row * kv_dim + head_kv * head.head_dim..][..head.head_dim]);
                }
            };
            if n_rows < ROWS_WORTH_SHARING {
                to.chunks_exact_mut(head_words).enumerate().for_each(|(i, to)| write_head(i, to));
            } else {
                pool.run_pieces(to, head_words, write_head);
            }
        };
        share(&mut self.k[layer.clone()], k, Head::write_key);
        share(&mut self.v[layer], v, Head::write_value);
    }
}

/// The caches of all sequences.
#[derive(Debug, Default)]
pub(crate) struct KvCaches {
    // A handful at most, so a search is cheaper than a hash.
    caches: Vec<(SeqId, KvCache)>,
}

impl KvCaches {
    pub(crate) fn get(&self, seq: SeqId) -> Option<&KvCache> {
        self.caches.iter().find(|(id, _)| *id == seq).map(|(_, cache)| cache)
    }

    /// Positions of the longest cache that has any layer.
    pub(crate) fn max_len(&self) -> usize {
        let caches = self.caches.iter().map(|(_, cache)| cache);
        caches.filter(|cache| cache.n_layer > 0).map(|cache| cache.kv_len).max().unwrap_or(0)
    }

    fn index(&self, seq: SeqId) -> usize {
        let found = self.caches.iter().position(|(id, _)| *id == seq);
        found.unwrap_or_else(|| panic!("sequence {seq} is not reserved"))
    }

    pub(crate) fn insert(&mut self, seq: SeqId, cache: KvCache) {
        self.remove(seq);
        self.caches.push((seq, cache));
    }

    pub(crate) fn remove(&mut self, seq: SeqId) {
        self.caches.retain(|(id, _)| *id != seq);
    }

    /// See [`HybridBackend::kv_copy`](powerinfer_sparse_ops::HybridBackend::kv_copy).
    pub(crate) fn copy(&mut self, from: SeqId, to: SeqId, positions: Range<usize>) {
        let (from, to) = (self.index(from), self.index(to));
        if let Ok([(_, from), (_, to)]) = self.caches.get_disjoint_mut([from, to]) {
            to.copy_from(from, positions);
        }
    }

    /// Writes the keys and values of a step.
    ///
    /// # Shapes
    /// `k, v [n_rows, kv_dim]`.
    pub(crate) fn write(
        &mut self,
        pool: &mut Pool,
        spec: &ModelSpec,
        layer: usize,
        rows: &[StepRow],
        k: &[f32],
        v: &[f32],
    ) {
        let kv_dim = spec.kv_dim();
        for run in runs(rows, usize::MAX) {
            let (seq, pos) = (rows[run.start].seq, rows[run.end - 1].pos as usize);
            let at = self.index(seq);
            let cache = &mut self.caches[at].1;
            let kv_len = cache.kv_len;
            assert!(pos < kv_len, "position {pos} of sequence {seq} with room for {kv_len}");
            let values = run.start * kv_dim..run.end * kv_dim;
            cache.write(pool, layer, rows[run.start].pos as usize, &k[values.clone()], &v[values]);
        }
    }
}

/// Cuts rows where the sequence changes, a position is left out, or a run has `max_len`.
fn runs(rows: &[StepRow], max_len: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let first = rows.get(start)?;
        let follows =
            |(i, row): (u32, &StepRow)| row.seq == first.seq && row.pos == first.pos.wrapping_add(i);
        let len = (0..).zip(&rows[start..]).take(max_len).take_while(|row| follows(*row)).count();
        start += len;
        Some(start - len..start)
    })
}

/// Buffers of [`attention`].
#[derive(Debug, Default)]
pub(crate) struct AttentionScratch {
    /// One for each thread.
    workers: Vec<Mutex<Worker>>,
    /// Results of the spans of one run, `[n_head_kv, n_spans]` parts.
    parts: Vec<Line>,
}

/// Buffers of a thread; a part is what [`Part`] says.
#[derive(Debug, Default)]
struct Worker {
    /// Queries in blocks, `[n_blocks, head_dim]`.
    q: Vec<[f32; QUERIES]>,
    /// Keys of a tile, `[head_dim]`.
    k: Vec<ByPosition>,
    /// Values of a tile, `[POSITIONS, lines(head_dim)]`.
    v: Vec<Line>,
    /// Result of a span.
    span: Vec<Line>,
    /// Result of all spans so far.
    total: Vec<Line>,
}

/// Query heads that share a KV head.
fn per_kv(spec: &ModelSpec) -> usize {
    spec.n_head / spec.n_head_kv
}

/// Rows that meet a tile together, where a thread has all their spans, and where it has one.
fn run_lens(spec: &ModelSpec) -> (usize, usize) {
    let n = per_kv(spec);
    ((RUN_QUERIES / n).clamp(1, 16), (QUERIES / n).max(1))
}

impl AttentionScratch {
    /// Makes room for `n_threads` and for caches of `kv_len` positions.
    pub(crate) fn reserve(&mut self, spec: &ModelSpec, n_threads: usize, kv_len: usize) {
        let (whole, split) = run_lens(spec);
        let n_queries = whole.max(split) * per_kv(spec);
        let n_lines = lines(spec.head_dim);
        self.workers.resize_with(self.workers.len().max(n_threads), Mutex::default);
        for worker in &mut self.workers {
            let w = worker.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
            w.q.resize(n_queries.div_ceil(QUERIES) * spec.head_dim, [0.0; QUERIES]);
            w.k.resize(spec.head_dim, ByPosition::zeroed());
            w.v.resize(POSITIONS * n_lines, Line::ZERO);
            w.span.resize(Part::n_lines(n_queries, n_lines), Line::ZERO);
            w.total.resize(Part::n_lines(n_queries, n_lines), Line::ZERO);
        }
        let n_parts = spec.n_head_kv * kv_len.div_ceil(SPAN);
        let n = n_parts * Part::n_lines(split * per_kv(spec), n_lines);
        self.parts.resize(self.parts.len().max(n), Line::ZERO);
    }
}

/// A worker's buffers that nobody uses; there is one for each thread.
fn free(workers: &[Mutex<Worker>]) -> MutexGuard<'_, Worker> {
    let found = workers.iter().find_map(|worker| match worker.try_lock() {
        Ok(worker) => Some(worker),
        // Buffers are written before they are read, so what a panic left does not matter.
        Err(TryLockError::Poisoned(worker)) => Some(worker.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    });
    found.expect("a thread holds one at most, and there are as many as threads")
}

/// Result for some queries over some positions: sums of values, then a line for each query with its maximum and sum.
struct Part<'a> {
    /// `[n_queries, lines(head_dim)]`.
    acc: &'a mut [Line],
    /// `[n_queries]`.
    running: &'a mut [Line],
}

impl<'a> Part<'a> {
    fn n_lines(n_queries: usize, n_lines: usize) -> usize {
        n_queries * (n_lines + 1)
    }

    fn new(part: &'a mut [Line], n_queries: usize) -> Self {
        let (acc, running) = part.split_at_mut(part.len() - n_queries);
        Self { acc, running }
    }

    fn clear(&mut self) {
        self.acc.fill(Line::ZERO);
        (0..self.running.len()).for_each(|i| self.set_running(i, Running::NONE));
    }

    fn running(&self, i: usize) -> Running {
        let [max, sum, ..] = self.running[i].0;
        Running { max, sum }
    }

    fn set_running(&mut self, i: usize, Running { max, sum }: Running) {
        (self.running[i].0[0], self.running[i].0[1]) = (max, sum);
    }

    /// Adds the result of later positions. What has none of them, or no share in them, changes nothing.
    fn merge(&mut self, later: &Part<'_>) {
        let n_lines = self.acc.len() / self.running.len();
        for i in 0..self.running.len() {
            let (a, b) = (self.running(i), later.running(i));
            if b.max == f32::NEG_INFINITY && b.sum == 0.0 {
                continue;
            }
            let base = Running::base(a.max.max(b.max));
            let (shrink_a, shrink_b) = (exp(a.max - base), exp(b.max - base));
            let sum = a.sum * shrink_a + b.sum * shrink_b;
            self.set_running(i, Running { max: a.max.max(b.max), sum });
            let acc = i * n_lines..(i + 1) * n_lines;
            for (a, b) in self.acc[acc.clone()].iter_mut().zip(&later.acc[acc]) {
                for lane in 0..Line::LEN {
                    a.0[lane] = a.0[lane] * shrink_a + b.0[lane] * shrink_b;
                }
            }
        }
    }

    /// Mixed values of the queries from `first` on.
    ///
    /// # Shapes
    /// `out [any, head_dim]`.
    fn finish(&self, first: usize, head_dim: usize, out: &mut [f32]) {
        let n_lines = lines(head_dim);
        for (i, out) in out.chunks_exact_mut(head_dim).enumerate().map(|(i, out)| (first + i, out)) {
            let acc: &[f32] = bytemuck::cast_slice(&self.acc[i * n_lines..][..n_lines]);
            let sum = self.running(i).sum;
            out.iter_mut().zip(acc).for_each(|(out, acc)| *out = acc / sum);
        }
    }
}

/// What attention reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queries<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) caches: &'a KvCaches,
    pub(crate) layer: usize,
    pub(crate) rows: &'a [StepRow],
    /// `[n_rows, n_head, head_dim]`.
    pub(crate) q: &'a [f32],
}

impl<'a> Queries<'a> {
    /// One KV head of some rows, which are a run.
    fn run(&self, first_row: usize, n_rows: usize, head_kv: usize) -> Run<'a> {
        let StepRow { seq, pos, .. } = self.rows[first_row];
        let cache = &self.caches.caches[self.caches.index(seq)].1;
        Run { queries: *self, cache, first_row, n_rows, first_pos: pos as usize, head_kv }
    }
}

/// The query heads of one KV head in consecutive rows of a sequence; query `i` is head `i % n` of row `i / n`.
struct Run<'a> {
    queries: Queries<'a>,
    cache: &'a KvCache,
    first_row: usize,
    n_rows: usize,
    first_pos: usize,
    head_kv: usize,
}

impl Run<'_> {
    fn n_queries(&self) -> usize {
        self.n_rows * per_kv(self.queries.spec)
    }

    /// Positions of the last row.
    fn n_positions(&self) -> usize {
        self.first_pos + self.n_rows
    }

    fn part<'p>(&self, buffer: &'p mut [Line]) -> Part<'p> {
        let n = Part::n_lines(self.n_queries(), lines(self.queries.spec.head_dim));
        Part::new(&mut buffer[..n], self.n_queries())
    }

    /// Brings the queries into blocks, scaled.
    fn pack(&self, blocks: &mut [[f32; QUERIES]]) {
        let Queries { spec, q, .. } = self.queries;
        let (head_dim, n) = (spec.head_dim, per_kv(spec));
        let scale = spec.attn_scale();
        for i in 0..self.n_queries() {
            let at = ((self.first_row + i / n) * spec.n_head + self.head_kv * n + i % n) * head_dim;
            let block = &mut blocks[i / QUERIES * head_dim..][..head_dim];
            block.iter_mut().zip(&q[at..][..head_dim]).for_each(|(to, q)| to[i % QUERIES] = q * scale);
        }
    }

    /// The result of the positions of one span, of packed queries.
    fn attend_span(&self, level: CpuLevel, buffers: Buffers<'_>, span: usize, part: &mut Part<'_>) {
        let Queries { spec, layer, .. } = self.queries;
        let Buffers { q, k, v } = buffers;
        let (head, n_lines) = (self.cache.head, lines(spec.head_dim));
        part.clear();
        let positions = span * SPAN..self.n_positions().min((span + 1) * SPAN);
        for first in positions.step_by(POSITIONS) {
            let tile = self.cache.tile(layer, self.head_kv, first / POSITIONS);
            let n = POSITIONS.min(self.n_positions() - first);
            widen(level, head.keys(&self.cache.k[tile.clone()]), POSITIONS, bytemuck::cast_slice_mut(k));
            widen(level, head.values(&self.cache.v[tile]), spec.head_dim, &mut v[..n * n_lines]);
            for block in 0..self.n_queries().div_ceil(QUERIES) {
                let q = &q[block * spec.head_dim..][..spec.head_dim];
                self.attend_block(level, &Tile { first, k, v }, q, block * QUERIES, part);
            }
        }
    }

    /// A block of queries, from `query` on, over a tile.
    fn attend_block(
        &self,
        level: CpuLevel,
        tile: &Tile<'_>,
        q: &[[f32; QUERIES]],
        query: usize,
        part: &mut Part<'_>,
    ) {
        let Tile { first, k, v } = *tile;
        let n = QUERIES.min(self.n_queries() - query);
        let n_lines = v.len() / POSITIONS;
        // How much of the tile each query sees. Counted, since a division for each would cost as much as its softmax.
        let per_kv = per_kv(self.queries.spec);
        let (mut row, mut head) = (query / per_kv, query % per_kv);
        let seen: [usize; QUERIES] = std::array::from_fn(|_| {
            let seen = (self.first_pos + row + 1).saturating_sub(first).min(POSITIONS);
            head += 1;
            if head == per_kv {
                (row, head) = (row + 1, 0);
            }
            seen
        });
        let mut shares = [ByPosition::zeroed(); QUERIES];
        let mut shrink = [1.0; QUERIES];
        scores(level, q, k, &mut shares[..n]);
        for i in (0..n).filter(|&i| seen[i] > 0) {
            let mut running = part.running(query + i);
            shrink[i] = softmax(level, &mut shares[i], seen[i], &mut running);
            part.set_running(query + i, running);
        }
        // What all of them see, and then what only later rows do.
        let common = seen[0];
        let together = Shares { shares: &shares[..n], shrink: &shrink[..n], from: 0, to: common };
        mix(level, &together, v, n_lines, &mut part.acc[query * n_lines..][..n * n_lines]);
        for i in (0..n).filter(|&i| seen[i] > common) {
            let alone = Shares { shares: &shares[i..=i], shrink: &[1.0], from: common, to: seen[i] };
            mix(level, &alone, v, n_lines, &mut part.acc[(query + i) * n_lines..][..n_lines]);
        }
    }
}

/// Positions from `first` on, widened.
struct Tile<'a> {
    first: usize,
    k: &'a [ByPosition],
    v: &'a [Line],
}

/// Buffers of a span: packed queries, keys and values of a tile.
struct Buffers<'a> {
    q: &'a [[f32; QUERIES]],
    k: &'a mut [ByPosition],
    v: &'a mut [Line],
}

/// All spans of a run, one after the other.
fn attend_whole<'w>(level: CpuLevel, worker: &'w mut Worker, run: &Run<'_>) -> Part<'w> {
    let Worker { q, k, v, span, total } = worker;
    let mut total = run.part(total);
    let mut part = run.part(span);
    run.pack(q);
    total.clear();
    for i in 0..run.n_positions().div_ceil(SPAN) {
        run.attend_span(level, Buffers { q, k, v }, i, &mut part);
        total.merge(&part);
    }
    total
}

/// One run, its heads and spans shared out.
fn attend_split(
    cpu: &mut Cpu,
    scratch: &mut AttentionScratch,
    queries: &Queries<'_>,
    rows: Range<usize>,
    out: &mut [f32],
) {
    let spec = queries.spec;
    let level = cpu.level;
    let n_spans = (queries.rows[rows.end - 1].pos as usize + 1).div_ceil(SPAN);
    let AttentionScratch { workers, parts } = scratch;
    let workers = &*workers;
    let run = |head_kv: usize| queries.run(rows.start, rows.len(), head_kv);
    let n_lines = Part::n_lines(rows.len() * per_kv(spec), lines(spec.head_dim));
    let parts = &mut parts[..spec.n_head_kv * n_spans * n_lines];
    cpu.pool.run_pieces(parts, n_lines, |piece, part| {
        let run = run(piece / n_spans);
        let Worker { q, k, v, .. } = &mut *free(workers);
        run.pack(q);
        run.attend_span(level, Buffers { q, k, v }, piece % n_spans, &mut run.part(part));
    });
    let parts = &*parts;
    let band = per_kv(spec) * spec.head_dim;
    cpu.pool.run_columns(out, spec.q_dim(), band, |head_kv, out| {
        let run = run(head_kv);
        let mut worker = free(workers);
        let Worker { span, total, .. } = &mut *worker;
        let mut total = run.part(total);
        total.clear();
        for part in parts[head_kv * n_spans * n_lines..][..n_spans * n_lines].chunks_exact(n_lines) {
            span[..n_lines].copy_from_slice(part);
            total.merge(&run.part(span));
        }
        for row in 0..rows.len() {
            total.finish(row * per_kv(spec), spec.head_dim, out.row(row));
        }
    });
}

/// Attention of each row over its sequence up to its position.
///
/// # Shapes
/// `out [n_rows, n_head, head_dim]`.
pub(crate) fn attention(
    cpu: &mut Cpu,
    scratch: &mut AttentionScratch,
    queries: Queries<'_>,
    out: &mut [f32],
) {
    let Queries { spec, rows, .. } = queries;
    let (whole, split) = run_lens(spec);
    let (q_dim, band) = (spec.q_dim(), per_kv(spec) * spec.head_dim);
    let level = cpu.level;
    let n_pieces = rows.len().div_ceil(whole) * spec.n_head_kv;
    let is_short = rows.iter().all(|row| (row.pos as usize) < SPAN);
    if is_short || n_pieces >= PIECES_PER_THREAD * cpu.pool.n_threads() {
        let workers = &scratch.workers;
        cpu.pool.run_tiles(out, q_dim, whole, band, |tile, head_kv, out| {
            let first = tile * whole;
            for run in runs(&rows[first..first + out.n_rows()], usize::MAX) {
                let mut worker = free(workers);
                let total =
                    attend_whole(level, &mut worker, &queries.run(first + run.start, run.len(), head_kv));
                for (i, row) in run.enumerate() {
                    total.finish(i * per_kv(spec), spec.head_dim, out.row(row));
                }
            }
        });
        return;
    }
    for run in runs(rows, split) {
        let out = &mut out[run.start * q_dim..run.end * q_dim];
        attend_split(cpu, scratch, &queries, run, out);
    }
}

#[cfg(test)]
mod tests;
