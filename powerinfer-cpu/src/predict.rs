//! Predictors: which neurons of a layer are worth computing.

use powerinfer_sparse_ops::{FfnInput, GateCopy, LowRank, PredictorWeights, Step};

use crate::input::{Forms, Input, InputBuffers};
use crate::kernel::{TILE, dot_rows};
use crate::matmul::{Cpu, matmul};

/// Room for predictions.
#[derive(Debug, Default)]
pub(crate) struct PredictScratch {
    /// Inner values of a low-rank predictor, `[n_rows, rank]`.
    inner: Vec<f32>,
}

impl PredictScratch {
    /// Makes room for `n_rows` rows of any of these predictors.
    pub(crate) fn reserve<'a>(
        &mut self,
        predictors: impl Iterator<Item = &'a PredictorWeights>,
        n_rows: usize,
    ) {
        for predictor in predictors {
            match predictor {
                PredictorWeights::LowRank(p) => {
                    let n = n_rows * p.fc1.n_rows();
                    self.inner.resize(self.inner.len().max(n), 0.0);
                }
                PredictorWeights::GateCopy(_) => {}
            }
        }
    }
}

/// Width of a low-rank predictor's inner vector, which goes through a product as the others do; 0 for other predictors.
pub(crate) fn rank(predictor: &PredictorWeights) -> usize {
    match predictor {
        PredictorWeights::LowRank(p) => p.fc1.n_rows(),
        PredictorWeights::GateCopy(_) => 0,
    }
}

/// Puts the neurons that are worth computing into the empty sets `out.active`, given the residual stream `h` and
/// its normed copy `out.x`. Returns how many bytes of the predictor were read.
///
/// # Shapes
/// `h [n_rows, n_embd]`.
pub(crate) fn predict(
    cpu: &mut Cpu,
    predictor: &PredictorWeights,
    step: &Step<'_>,
    h: &[f32],
    inputs: &mut InputBuffers,
    scratch: &mut PredictScratch,
    out: &mut FfnInput,
) -> u64 {
    match predictor {
        PredictorWeights::LowRank(p) => low_rank(cpu, p, h, inputs, scratch, out),
        PredictorWeights::GateCopy(p) => gate_copy(cpu, p, step, scratch, out),
    }
}

fn low_rank(
    cpu: &mut Cpu,
    p: &LowRank,
    h: &[f32],
    inputs: &mut InputBuffers,
    scratch: &mut PredictScratch,
    out: &mut FfnInput,
) -> u64 {
    let (n_embd, rank) = (p.fc1.n_cols(), p.fc1.n_rows());
    // Both kinds of predictor input are the residual stream at the time of this call.
    let inner = &mut scratch.inner[..h.len() / n_embd * rank];
    let input = inputs.prepare(&mut cpu.pool, h, n_embd, Forms::of(p.fc1.ty()));
    matmul(cpu, &p.fc1, &input, None, inner);
    inner.iter_mut().for_each(|v| *v = v.max(0.0));
    let input = inputs.prepare(&mut cpu.pool, inner, rank, Forms::of(p.fc2.ty()));
    low_rank_score(cpu, p, &input, out);
    (p.fc1.n_bytes() + p.fc2.n_bytes()) as u64
}

/// Puts the neurons whose score is not below the threshold into the active sets.
fn low_rank_score(cpu: &mut Cpu, p: &LowRank, inner: &Input<'_>, out: &mut FfnInput) {
    let (n_ff, n_words) = (out.active.n_ff(), out.active.words_per_row());
    let level = cpu.level;
    cpu.pool.run_columns(out.active.words_mut(), n_words, 1, |word, column| {
        for neuron in word * 64..n_ff.min((word + 1) * 64) {
            for start in (0..column.n_rows()).step_by(TILE) {
                let rows: [usize; TILE] = std::array::from_fn(|t| start + t);
                let n = TILE.min(column.n_rows() - start);
                let mut scores = [0.0; TILE];
                dot_rows(level, p.fc2.ty(), p.fc2.row(neuron), inner, &rows[..n], &mut scores[..n]);
                for (row, score) in rows[..n].iter().zip(scores) {
                    // NaN counts as active.
                    let inactive = score < p.threshold;
                    column.row(*row)[0] |= u64::from(!inactive) << (neuron % 64);
                }
            }
        }
    });
}

fn gate_copy(
    _cpu: &mut Cpu,
    p: &GateCopy,
    step: &Step<'_>,
    _scratch: &mut PredictScratch,
    out: &mut FfnInput,
) -> u64 {
    let mut bytes = 0;
    for (row, step_row) in step.rows.iter().enumerate() {
        let words = out.active.row_mut(row);
        if step_row.pos == 0 {
            (0..p.n_ff()).for_each(|neuron| words[neuron / 64] |= 1 << (neuron % 64));
            continue;
        }
        bytes = p.n_bytes() as u64;
        for (neuron, score) in p.score(&out.x[row * p.n_embd()..][..p.n_embd()]).into_iter().enumerate() {
            words[neuron / 64] |= u64::from(p.is_active(neuron, score)) << (neuron % 64);
        }
    }
    bytes
}
