//! Predictors: which neurons of a layer are worth computing.

use std::ops::Range;
use std::sync::Arc;

use powerinfer_sparse_ops::{ActiveBatch, FfnInput, GateCopy, GateInput, Step};

use crate::input::{Forms, Input, InputBuffers};
use crate::kernel::gemm;
use crate::kernel::{GATE_TILE, GateToken, TILE, dot_rows, dot_run, gate_word};
use crate::matmul::{Cpu, matmul};
use crate::pool::Columns;
use crate::rows::Rows;

/// Room for predictions.
#[derive(Debug, Default)]
pub(crate) struct PredictScratch {
    /// Inner values of a low-rank predictor, `[n_rows, rank]`.
    inner: Vec<f32>,
    /// Rows of the step that a gate copy scores.
    rows: Vec<usize>,
    /// Their inputs.
    inputs: Vec<GateBuffer>,
}

impl PredictScratch {
    /// Makes room for `n_rows` rows of any of these predictors.
    pub(crate) fn reserve<'a>(&mut self, predictors: impl Iterator<Item = &'a Predictor>, n_rows: usize) {
        for predictor in predictors {
            match predictor {
                Predictor::LowRank { fc1, .. } => {
                    let n = n_rows * fc1.n_rows();
                    self.inner.resize(self.inner.len().max(n), 0.0);
                }
                Predictor::GateCopy(p) => {
                    self.rows.reserve(n_rows);
                    self.inputs.resize_with(self.inputs.len().max(n_rows), GateBuffer::default);
                    self.inputs.iter_mut().for_each(|input| input.reserve(p));
                }
            }
        }
    }
}

/// A predictor whose weights have been brought in.
#[derive(Debug)]
pub(crate) enum Predictor {
    /// See [`LowRank`](powerinfer_sparse_ops::LowRank).
    LowRank { fc1: Rows, fc2: Rows, threshold: f32 },
    /// See [`GateCopy`].
    GateCopy(Arc<GateCopy>),
}

impl Predictor {
    /// Width of a low-rank predictor's inner vector, which goes through a product as the others do; 0 for other
    /// predictors.
    pub(crate) fn rank(&self) -> usize {
        match self {
            Self::LowRank { fc1, .. } => fc1.n_rows(),
            Self::GateCopy(_) => 0,
        }
    }
}

/// Puts the neurons that are worth computing into the empty sets `out.active`, given the residual stream `h` and
/// its normed copy `out.x`. Returns how many bytes of the predictor were read.
///
/// # Shapes
/// `h [n_rows, n_embd]`.
pub(crate) fn predict(
    cpu: &mut Cpu,
    predictor: &Predictor,
    step: &Step<'_>,
    h: &[f32],
    inputs: &mut InputBuffers,
    scratch: &mut PredictScratch,
    out: &mut FfnInput,
) -> u64 {
    match predictor {
        Predictor::LowRank { fc1, fc2, threshold } => {
            low_rank(cpu, (fc1, fc2, *threshold), h, inputs, scratch, out)
        }
        Predictor::GateCopy(p) => gate_copy(cpu, p, step, scratch, out),
    }
}

fn low_rank(
    cpu: &mut Cpu,
    (fc1, fc2, threshold): (&Rows, &Rows, f32),
    h: &[f32],
    inputs: &mut InputBuffers,
    scratch: &mut PredictScratch,
    out: &mut FfnInput,
) -> u64 {
    let (n_embd, rank) = (fc1.n_cols(), fc1.n_rows());
    // Both kinds of predictor input are the residual stream at the time of this call.
    let inner = &mut scratch.inner[..h.len() / n_embd * rank];
    let input = inputs.prepare(&mut cpu.pool, h, n_embd, Forms::of(fc1.ty()));
    matmul(cpu, fc1, &input, None, inner);
    inner.iter_mut().for_each(|v| *v = v.max(0.0));
    let input = inputs.prepare(&mut cpu.pool, inner, rank, Forms::of(fc2.ty()));
    low_rank_score(cpu, fc2, threshold, &input, out);
    (fc1.n_bytes() + fc2.n_bytes()) as u64
}

/// Puts the neurons whose score is not below the threshold into the active sets.
fn low_rank_score(cpu: &mut Cpu, fc2: &Rows, threshold: f32, inner: &Input<'_>, out: &mut FfnInput) {
    // Two bands of a matrix product.
    const WORDS: usize = 3;
    let (n_ff, n_words) = (out.active.n_ff(), out.active.words_per_row());
    let level = cpu.level;
    let neurons = |words: Range<usize>| words.start * 64..n_ff.min(words.end * 64);
    // NaN counts as active.
    let set = |columns: &mut Columns<'_, u64>, row: usize, at: usize, scores: &[f32]| {
        let words = columns.row(row);
        for (i, score) in (at..).zip(scores) {
            let inactive = *score < threshold;
            words[i / 64] |= u64::from(!inactive) << (i % 64);
        }
    };
    let words = out.active.words_mut();
    if inner.n_rows() >= gemm::MIN_ROWS && gemm::has_gemm(level, fc2.ty()) {
        let inner = cpu.buffers.prepare(&mut cpu.pool, fc2.ty(), *inner);
        cpu.pool.run_columns_with(words, n_words, WORDS, &mut cpu.locals, |_, columns, local| {
            let neurons = neurons(columns.range());
            gemm::gemm(level, fc2, neurons, &inner, local, &mut |row, at, scores| {
                set(columns, row, at, scores)
            });
        });
        return;
    }
    cpu.pool.run_columns(words, n_words, WORDS, |_, columns| {
        let neurons = neurons(columns.range());
        if inner.n_rows() == 1 {
            let mut scores = [0.0; 64 * WORDS];
            let scores = &mut scores[..neurons.len()];
            dot_run(level, fc2, neurons, inner, scores);
            set(columns, 0, 0, scores);
            return;
        }
        let n_rows = columns.n_rows();
        for (at, neuron) in neurons.enumerate() {
            for start in (0..n_rows).step_by(TILE) {
                let rows: [usize; TILE] = std::array::from_fn(|t| start + t);
                let n = TILE.min(n_rows - start);
                let mut scores = [0.0; TILE];
                dot_rows(level, fc2.row(neuron), inner, &rows[..n], &mut scores[..n]);
                rows[..n].iter().zip(scores).for_each(|(row, score)| set(columns, *row, at, &[score]));
            }
        }
    });
}

/// Row 0 of a sequence is not predicted: there the few neurons that matter most are the least usual ones.
fn gate_copy(
    cpu: &mut Cpu,
    p: &GateCopy,
    step: &Step<'_>,
    scratch: &mut PredictScratch,
    out: &mut FfnInput,
) -> u64 {
    scratch.rows.clear();
    for (row, step_row) in step.rows.iter().enumerate() {
        if step_row.pos == 0 {
            out.active.fill_row(row);
        } else {
            scratch.rows.push(row);
        }
    }
    if scratch.rows.is_empty() {
        return 0;
    }
    let (rows, inputs) = (&scratch.rows[..], &mut scratch.inputs[..scratch.rows.len()]);
    let (x, n_embd) = (&out.x[..], p.n_embd());
    cpu.pool.run_pieces(inputs, 1, |i, input| input[0].set(p, &x[rows[i] * n_embd..][..n_embd]));
    gate_scores(cpu, p, rows, inputs, &mut out.active);
    p.n_bytes() as u64
}

/// Scores the rows `rows` of the step and sets their bits.
fn gate_scores(cpu: &mut Cpu, p: &GateCopy, rows: &[usize], inputs: &[GateBuffer], active: &mut ActiveBatch) {
    let (level, n_words) = (cpu.level, active.words_per_row());
    // Codes of a piece: enough that handing it out costs little, and within the second level cache, since all tokens
    // pass by.
    const PIECE_BYTES: usize = 64 << 10;
    let at_most = n_words.div_ceil(4 * cpu.pool.n_threads());
    let band = (PIECE_BYTES / (64 * p.row_bytes().max(1))).clamp(1, at_most.max(1));
    cpu.pool.run_columns(active.words_mut(), n_words, band, |_, columns| {
        let words = columns.range();
        let (tiles, rest) = inputs.as_chunks::<GATE_TILE>();
        for (tile, rows) in tiles.iter().zip(rows.as_chunks::<GATE_TILE>().0) {
            let tokens = std::array::from_fn::<_, GATE_TILE, _>(|t| tile[t].token(p));
            for word in words.clone() {
                let bits = gate_word(level, p, word, tokens);
                for (row, bits) in rows.iter().zip(bits) {
                    columns.row(*row)[word - words.start] = bits;
                }
            }
        }
        for (input, row) in rest.iter().zip(&rows[tiles.len() * GATE_TILE..]) {
            let token = input.token(p);
            for word in words.clone() {
                [columns.row(*row)[word - words.start]] = gate_word(level, p, word, [token]);
            }
        }
    });
}

/// The 8-bit input of one token, with room for the widest copy.
#[derive(Debug, Default)]
struct GateBuffer {
    q: Vec<Group>,
    apart: Vec<f32>,
    input: GateInput,
}

/// 256 values on a multiple of 64 bytes, so that no load of 64 touches two cache lines.
#[derive(Clone, Copy, Debug, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Group([i8; 256]);

impl GateBuffer {
    fn reserve(&mut self, p: &GateCopy) {
        self.q.resize(self.q.len().max(p.n_padded() / 256), Group([0; 256]));
        self.apart.resize(self.apart.len().max(p.n_outliers()), 0.0);
    }

    fn set(&mut self, p: &GateCopy, x: &[f32]) {
        let q = bytemuck::cast_slice_mut(&mut self.q[..p.n_padded() / 256]);
        self.input = p.quantize(x, q, &mut self.apart[..p.n_outliers()]);
    }

    fn token(&self, p: &GateCopy) -> GateToken<'_> {
        let q = bytemuck::cast_slice(&self.q[..p.n_padded() / 256]);
        GateToken { q, apart: &self.apart[..p.n_outliers()], input: self.input }
    }
}
