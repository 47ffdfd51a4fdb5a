//! Matrix products: rows of weights are shared out, each is multiplied with the whole batch.

use crate::input::Input;
use crate::kernel::gemm::{self, Buffers, Local};
use crate::kernel::{TILE, dot_rows, dot_run};
use crate::level::CpuLevel;
use crate::pool::{Columns, Pool};
use crate::rows::Rows;

/// Weight rows of a piece of work: 64 rows of 4096 F16 weights are 512 KiB, so that a piece stays in the second
/// level cache while the batch passes by, and handing it out costs little beside it. Fewer where there would be too few
/// pieces to share out evenly.
fn piece_rows(n_out: usize) -> usize {
    if n_out < 1024 { 32 } else { 64 }
}

/// Vectors that pass by together: 16 of 4096 f32 are 256 KiB, which stay in the cache while the rows of a piece
/// pass by.
const BATCH: usize = 16;

/// What a step runs on.
#[derive(Debug)]
pub(crate) struct Cpu {
    pub(crate) pool: Pool,
    pub(crate) level: CpuLevel,
    /// For matrix-matrix products, one a thread.
    pub(crate) locals: Vec<Local>,
    pub(crate) buffers: Buffers,
}

impl Cpu {
    pub(crate) fn new(pool: Pool, level: CpuLevel) -> Self {
        let locals = (0..pool.n_threads()).map(|_| Local::default()).collect();
        Self { pool, level, locals, buffers: Buffers::default() }
    }

    /// Makes room for batches of `n_rows` vectors of up to `n_cols` values.
    pub(crate) fn reserve(&mut self, n_rows: usize, n_cols: usize) {
        self.locals.iter_mut().for_each(|local| local.reserve(n_rows, n_cols));
        self.buffers.reserve(n_rows, n_cols);
    }
}

/// `out = x · Wᵀ (+ bias)`.
///
/// # Shapes
/// `w [n_out, n_in]`, `x [n_rows, n_in]`, `bias [n_out]`, `out [n_rows, n_out]`.
///
/// # Panics
/// If a shape differs.
pub(crate) fn matmul(cpu: &mut Cpu, w: &Rows, x: &Input<'_>, bias: Option<&[f32]>, out: &mut [f32]) {
    let n_out = w.n_rows();
    assert_eq!(w.n_cols(), x.n_cols(), "input length of [{}, {n_out}] weights", w.n_cols());
    assert_eq!(out.len(), x.n_rows() * n_out, "output of {} rows of {n_out}", x.n_rows());
    let level = cpu.level;
    if x.n_rows() >= gemm::MIN_ROWS && gemm::has_gemm(level, w.ty()) {
        let x = cpu.buffers.prepare(&mut cpu.pool, w.ty(), *x);
        cpu.pool.run_columns_with(out, n_out, gemm::BAND_ROWS, &mut cpu.locals, |_, out, local| {
            gemm::gemm(level, w, out.range(), &x, local, &mut |row, at, products| {
                out.row(row)[at..at + products.len()].copy_from_slice(products);
            });
            add_bias(bias, out);
        });
        return;
    }
    cpu.pool.run_columns(out, n_out, piece_rows(n_out), |_, out| {
        if x.n_rows() == 1 {
            dot_run(level, w, out.range(), x, out.row(0));
        } else {
            products(level, w, x, out);
        }
        add_bias(bias, out);
    });
}

/// `out = [x · W₀ᵀ (+ b₀), x · W₁ᵀ (+ b₁), …]` for one vector, in one go.
///
/// # Shapes
/// `w [n_out, n_in]` each, `x [1, n_in]`, `out` as many as all outputs together.
///
/// # Panics
/// If a shape differs.
pub(crate) fn matvecs<const N: usize>(
    cpu: &mut Cpu,
    weights: [(&Rows, Option<&[f32]>); N],
    x: &Input<'_>,
    out: &mut [f32],
) {
    let level = cpu.level;
    let n_out: usize = weights.iter().map(|(w, _)| w.n_rows()).sum();
    assert_eq!((x.n_rows(), out.len()), (1, n_out), "one vector, and its outputs");
    assert!(weights.iter().all(|(w, _)| w.n_cols() == x.n_cols()), "input length");
    let piece_rows = piece_rows(n_out);
    cpu.pool.run_pieces(out, piece_rows, |piece, mut out| {
        // A piece may begin in one matrix and end in the next.
        let (mut at, mut first) = (piece * piece_rows, 0);
        for (w, bias) in weights {
            let end = first + w.n_rows();
            if at < end && !out.is_empty() {
                let rows = at - first..(end.min(at + out.len()) - first);
                let (these, rest) = out.split_at_mut(rows.len());
                dot_run(level, w, rows.clone(), x, these);
                if let Some(bias) = bias {
                    crate::ops::add(these, &bias[rows.clone()]);
                }
                at += rows.len();
                out = rest;
            }
            first = end;
        }
    });
}

fn add_bias(bias: Option<&[f32]>, out: &mut Columns<'_, f32>) {
    let Some(bias) = bias else { return };
    let columns = out.range();
    for row in 0..out.n_rows() {
        crate::ops::add(out.row(row), &bias[columns.clone()]);
    }
}

/// The products with the weight rows that `out` has columns for.
fn products(level: CpuLevel, w: &Rows, x: &Input<'_>, out: &mut Columns<'_, f32>) {
    let first = out.range().start;
    for start in (0..x.n_rows()).step_by(BATCH) {
        let batch = start..x.n_rows().min(start + BATCH);
        for j in out.range() {
            let row = w.row(j);
            for start in batch.clone().step_by(TILE) {
                let rows: [usize; TILE] = std::array::from_fn(|t| start + t);
                let n = TILE.min(batch.end - start);
                let mut y = [0.0; TILE];
                dot_rows(level, row, x, &rows[..n], &mut y[..n]);
                for t in 0..n {
                    out.row(start + t)[j - first] = y[t];
                }
            }
        }
    }
}
