//! Matrix-matrix products: from [`MIN_ROWS`] vectors on, weights are made ready once for all of them.
//!
//! A product of one row with one vector has the same bits here as in [`kernel::dot`](crate::kernel::dot), so a prompt
//! gives the same result in one piece and token by token. Only AVX-512 has kernels; the other levels take batches tile
//! by tile.

use std::ops::Range;

use powerinfer_sparse_ops::WeightType;

#[cfg(target_arch = "x86_64")]
use super::Row;
#[cfg(target_arch = "x86_64")]
use super::avx512::{axpy, float, int8, scaled};
use crate::aligned::Aligned;
use crate::input::Input;
use crate::level::CpuLevel;
#[cfg(target_arch = "x86_64")]
use crate::planar::BLOCK;
use crate::planar::Planar;
use crate::pool::{Columns, Pool};
use crate::rows::Rows;

/// Fewer vectors than this are multiplied with each row as it is.
pub(crate) const MIN_ROWS: usize = 8;

/// Rows of weights of a piece of work: whole panels of every kernel, and three half words of an active set.
pub(crate) const BAND_ROWS: usize = 96;

/// Columns of a piece of a down projection by neuron.
pub(crate) const BAND_COLUMNS: usize = 64;

/// Whether there are kernels for weights of type `ty`.
pub(crate) fn has_gemm(level: CpuLevel, ty: WeightType) -> bool {
    has_kernels(level) && (ty.is_float() || Planar::of(ty).is_some())
}

/// Whether there are kernels for down projections by neuron of type `ty`.
pub(crate) fn has_down(level: CpuLevel, ty: WeightType) -> bool {
    has_kernels(level) && super::AXPY_TYPES.contains(&ty)
}

fn has_kernels(level: CpuLevel) -> bool {
    match level {
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(_) => true,
        _ => false,
    }
}

/// Buffers of one thread.
#[derive(Debug, Default)]
pub(crate) struct Local {
    /// Interleaved rows of weights.
    #[cfg(target_arch = "x86_64")]
    panel: Vec<int8::Line>,
    /// Weights as f32.
    #[cfg(target_arch = "x86_64")]
    floats: Aligned<f32>,
    /// Products of a band, `[n_rows, BAND_ROWS]`, or sums of one, `[n_rows, BAND_COLUMNS]` twice.
    pub(crate) band: Aligned<f32>,
}

/// Buffers of a batch.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// Interleaved vectors.
    #[cfg(target_arch = "x86_64")]
    cells: Vec<int8::Cell>,
    /// Vectors as they are.
    #[cfg(target_arch = "x86_64")]
    floats: Aligned<f32>,
}

impl Local {
    /// Makes room for batches of `n_rows` vectors of up to `n_cols` values.
    pub(crate) fn reserve(&mut self, n_rows: usize, n_cols: usize) {
        if n_rows < MIN_ROWS {
            return;
        }
        #[cfg(target_arch = "x86_64")]
        {
            let lines = int8::panel_lines(Planar::Q4_1, n_cols.div_ceil(BLOCK));
            self.panel.resize(self.panel.len().max(lines), bytemuck::Zeroable::zeroed());
            let floats = float::GEMM_SCRATCH.max(BLOCK * BAND_COLUMNS);
            self.floats.grow(floats);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = n_cols;
        let band = n_rows * BAND_ROWS.max(2 * BAND_COLUMNS);
        self.band.grow(band);
    }
}

impl Buffers {
    /// Makes room for batches of `n_rows` vectors of up to `n_cols` values.
    pub(crate) fn reserve(&mut self, n_rows: usize, n_cols: usize) {
        #[cfg(target_arch = "x86_64")]
        if n_rows >= MIN_ROWS {
            let cells = n_rows * n_cols.div_ceil(BLOCK);
            self.cells.resize(self.cells.len().max(cells), bytemuck::Zeroable::zeroed());
            self.floats.grow(n_rows * n_cols);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (n_rows, n_cols);
    }

    /// Makes `x` ready for products with weights of type `ty`, for which [`has_gemm`] is true.
    pub(crate) fn prepare<'a>(&'a mut self, pool: &mut Pool, ty: WeightType, x: Input<'a>) -> Batch<'a> {
        #[cfg(target_arch = "x86_64")]
        if let Some(kind) = Planar::of(ty) {
            let n_blocks = x.n_cols() / BLOCK;
            let cells = &mut self.cells[..x.n_rows() * n_blocks];
            let tile = int8::TILE_ROWS;
            pool.run_pieces(cells, tile * n_blocks, |piece, cells| {
                let rows: [usize; int8::TILE_ROWS] =
                    std::array::from_fn(|i| (piece * tile + i).min(x.n_rows() - 1));
                int8::pack_x(kind, &x.x8s(rows)[..cells.len() / n_blocks], cells);
            });
            return Batch { x, cells, floats: &[] };
        }
        let _ = ty;
        #[cfg(target_arch = "x86_64")]
        {
            // Where they are they start anywhere, which costs a tenth of the speed and more.
            let floats = &mut self.floats[..x.all_f32().len()];
            pool.run_pieces(floats, x.n_cols(), |row, to| to.copy_from_slice(x.f32s([row])[0]));
            Batch { x, cells: &[], floats }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = pool;
            Batch { x }
        }
    }
}

/// Vectors that are ready for [`gemm`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'a> {
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only AVX-512 has matrix products"))]
    x: Input<'a>,
    #[cfg(target_arch = "x86_64")]
    cells: &'a [int8::Cell],
    #[cfg(target_arch = "x86_64")]
    floats: &'a [f32],
}

/// Products of the rows `rows` of `w` with every vector; `out(vector, first, products)` gets some of them, of rows
/// that follow each other, `first` counted from the start of `rows`.
///
/// # Panics
/// If there is no kernel ([`has_gemm`]), or `x` was not made ready for this type.
#[cfg(target_arch = "x86_64")]
pub(crate) fn gemm(
    level: CpuLevel,
    w: &Rows,
    rows: Range<usize>,
    x: &Batch<'_>,
    local: &mut Local,
    out: &mut dyn FnMut(usize, usize, &[f32]),
) {
    let CpuLevel::Avx512(level) = level else { unreachable!("only AVX-512 has matrix products") };
    let n = x.x.n_rows();
    if let Some(kind) = Planar::of(w.ty()) {
        let n_blocks = w.n_cols() / BLOCK;
        let panel = &mut local.panel[..int8::panel_lines(kind, n_blocks)];
        for first in rows.clone().step_by(int8::PANEL_ROWS) {
            let n_panel = int8::PANEL_ROWS.min(rows.end - first);
            let planar = std::array::from_fn::<_, { int8::PANEL_ROWS }, _>(|i| {
                match w.row(first + i.min(n_panel - 1)) {
                    Row::Planar(_, row) => row,
                    Row::Floats(_) | Row::Blocks(..) => unreachable!("the type has a planar form"),
                }
            });
            int8::pack_panel(level, kind, &planar[..n_panel], panel);
            for (tile, cells) in x.cells.chunks(int8::TILE_ROWS * n_blocks).enumerate() {
                let start = tile * int8::TILE_ROWS;
                int8::gemm(level, kind, panel, cells, cells.len() / n_blocks, &mut |row, products| {
                    out(start + row, first - rows.start, &products[..n_panel]);
                });
            }
        }
        return;
    }
    for first in rows.clone().step_by(float::GEMM_ROWS * 4) {
        let n_group = (float::GEMM_ROWS * 4).min(rows.end - first);
        let floats = std::array::from_fn::<_, { float::GEMM_ROWS * 4 }, _>(|i| {
            match w.row(first + i.min(n_group - 1)) {
                Row::Floats(row) => row,
                Row::Planar(..) | Row::Blocks(..) => unreachable!("the type is a plain float"),
            }
        });
        float::gemm(
            level,
            &floats[..n_group],
            x.floats,
            w.n_cols(),
            0..n,
            &mut local.floats,
            |token, row, value| {
                out(token, first - rows.start + row, &[value]);
            },
        );
    }
}

/// There are none for other processors.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn gemm(
    _: CpuLevel,
    _: &Rows,
    _: Range<usize>,
    _: &Batch<'_>,
    _: &mut Local,
    _: &mut dyn FnMut(usize, usize, &[f32]),
) {
    unreachable!("only AVX-512 has matrix products");
}

/// Hidden values of a batch, and how its neurons are dealt out: block `b` of 32 to chunk `b mod n_chunks`.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only AVX-512 has matrix products"))]
pub(crate) struct Hidden<'a> {
    /// `[n_rows, n_ff]`.
    pub(crate) values: &'a [f32],
    pub(crate) n_ff: usize,
    pub(crate) n_chunks: usize,
}

/// `out[t][columns] = Σ_i h[t][i] · down row i` for a band of up to [`BAND_COLUMNS`] columns of a down projection by
/// neuron: the neurons of each chunk in ascending order, then the chunks in order.
///
/// # Shapes
/// `row(i)` is the down row of neuron `i`; `out [n_rows]` rows of the band.
///
/// # Panics
/// If there is no kernel ([`has_down`]).
#[cfg(target_arch = "x86_64")]
pub(crate) fn down<'a>(
    level: CpuLevel,
    ty: WeightType,
    row: impl Fn(usize) -> &'a [u8],
    hidden: Hidden<'_>,
    local: &mut Local,
    out: &mut Columns<'_, f32>,
) {
    let CpuLevel::Avx512(level) = level else { unreachable!("only AVX-512 has matrix products") };
    let Hidden { values: h, n_ff, n_chunks } = hidden;
    let columns = out.range();
    let n_rows = out.n_rows();
    let sums = &mut local.band[..n_rows * BAND_COLUMNS];
    for chunk in 0..n_chunks {
        sums.fill(0.0);
        for first in (chunk * BLOCK..n_ff).step_by(n_chunks * BLOCK) {
            let n = BLOCK.min(n_ff - first);
            let rows: [&[u8]; BLOCK] = std::array::from_fn(|i| row(first + i.min(n - 1)));
            axpy::decode_bands(level, ty, &rows[..n], columns.clone(), &mut local.floats);
            add_block(level, &local.floats, h, n_ff, first..first + n, sums);
        }
        add_chunk(chunk, sums, out);
    }
}

/// As [`down`] for a projection whose blocks of 32 neurons share scales: `block(b)` gives the scales `[n_embd]` (f16
/// bits) and values `[32, n_embd]` of one.
///
/// # Panics
/// If there is no kernel ([`has_down`] of Q8_0).
#[cfg(target_arch = "x86_64")]
pub(crate) fn down_scaled<'a>(
    level: CpuLevel,
    block: impl Fn(usize) -> (&'a [u16], &'a [i8]),
    n_embd: usize,
    hidden: Hidden<'_>,
    local: &mut Local,
    out: &mut Columns<'_, f32>,
) {
    let CpuLevel::Avx512(level) = level else { unreachable!("only AVX-512 has matrix products") };
    let Hidden { values: h, n_ff, n_chunks } = hidden;
    let columns = out.range();
    let n_rows = out.n_rows();
    let (sums, parts) = local.band[..2 * n_rows * BAND_COLUMNS].split_at_mut(n_rows * BAND_COLUMNS);
    let w = &mut local.floats[..BLOCK * BAND_COLUMNS];
    for chunk in 0..n_chunks {
        sums.fill(0.0);
        for b in (chunk..n_ff / BLOCK).step_by(n_chunks) {
            let (scales, values) = block(b);
            for (w, q) in w.chunks_exact_mut(BAND_COLUMNS).zip(values.chunks_exact(n_embd)) {
                w.iter_mut().zip(&q[columns.clone()]).for_each(|(w, q)| *w = f32::from(*q));
            }
            parts.fill(0.0);
            add_block(level, w, h, n_ff, b * BLOCK..(b + 1) * BLOCK, parts);
            let mut scale = [0.0; BAND_COLUMNS];
            for (scale, bits) in scale.iter_mut().zip(&scales[columns.clone()]) {
                *scale = half::f16::from_bits(*bits).to_f32();
            }
            for (sum, part) in sums.as_chunks_mut::<BAND_COLUMNS>().0.iter_mut().zip(parts.as_chunks().0) {
                scaled::add_scaled(level, &scale, part, sum);
            }
        }
        add_chunk(chunk, sums, out);
    }
}

/// Adds the sums of a chunk to the result, which the first one begins.
#[cfg(target_arch = "x86_64")]
fn add_chunk(chunk: usize, sums: &[f32], out: &mut Columns<'_, f32>) {
    let n_columns = out.range().len();
    for (t, sum) in sums.chunks_exact(BAND_COLUMNS).enumerate() {
        let (out, sum) = (out.row(t), &sum[..n_columns]);
        if chunk == 0 {
            out.copy_from_slice(sum);
        } else {
            crate::ops::add(out, sum);
        }
    }
}

/// Adds the part of some neurons, whose rows are decoded in `w`, to the sums of every vector.
#[cfg(target_arch = "x86_64")]
fn add_block(
    level: crate::Avx512,
    w: &[f32],
    h: &[f32],
    n_ff: usize,
    neurons: Range<usize>,
    sums: &mut [f32],
) {
    const T: usize = axpy::DOWN_TILE;
    let of = |t: usize| &h[t * n_ff..][neurons.clone()];
    let (tiles, rest) = sums.as_chunks_mut::<BAND_COLUMNS>().0.as_chunks_mut::<T>();
    let n_tiles = tiles.len();
    for (tile, sums) in tiles.iter_mut().enumerate() {
        let h = std::array::from_fn::<_, T, _>(|t| of(tile * T + t));
        axpy::down_tile(level, w, h, sums.each_mut().map(|sum| &mut sum[..]));
    }
    for (t, sum) in rest.iter_mut().enumerate() {
        axpy::down_tile(level, w, [of(n_tiles * T + t)], [&mut sum[..]]);
    }
}

/// There are none for other processors.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn down<'a>(
    _: CpuLevel,
    _: WeightType,
    _: impl Fn(usize) -> &'a [u8],
    _: Hidden<'_>,
    _: &mut Local,
    _: &mut Columns<'_, f32>,
) {
    unreachable!("only AVX-512 has matrix products");
}

/// There are none for other processors.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn down_scaled<'a>(
    _: CpuLevel,
    _: impl Fn(usize) -> (&'a [u16], &'a [i8]),
    _: usize,
    _: Hidden<'_>,
    _: &mut Local,
    _: &mut Columns<'_, f32>,
) {
    unreachable!("only AVX-512 has matrix products");
}
