//! Runs a model over sequences and keeps what its FFNs get.

use std::ops::Range;

use powerinfer_sparse_ops::{ActiveMode, FfnInput, LayerId};

use super::cut::Sequence;
use super::{CalibrateError, CancelToken, Model, Phase, Progress, RecordOptions};
use crate::forward::Watch;
use crate::session::SessionOptions;

/// What the FFN of one layer got, for all sequences but their first tokens.
pub(super) struct Recorded {
    /// Normed inputs, `[n_rows, n_embd]`.
    pub(super) x: Vec<f32>,
    /// Active sets, `[n_rows, ceil(n_ff / 64)]`; empty in mode `Dense`.
    pub(super) sets: Vec<u64>,
    n_embd: usize,
}

impl Recorded {
    /// Mean input, `[n_embd]`.
    pub(super) fn mean(&self) -> Vec<f32> {
        let mut sum = vec![0f64; self.n_embd];
        for x in self.x.chunks_exact(self.n_embd) {
            sum.iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        let n_rows = (self.x.len() / self.n_embd).max(1) as f64;
        sum.iter().map(|sum| (sum / n_rows) as f32).collect()
    }
}

/// Keeps the inputs of some layers.
struct Recorder {
    layers: Range<usize>,
    recorded: Vec<Recorded>,
    with_sets: bool,
    /// Rows of the step that are at position 0.
    n_skipped: usize,
}

impl Watch for Recorder {
    fn ffn_input(&mut self, layer: LayerId, input: &FfnInput) {
        if !self.layers.contains(&layer.index()) {
            return;
        }
        let recorded = &mut self.recorded[layer.index() - self.layers.start];
        recorded.x.extend_from_slice(&input.x[self.n_skipped * recorded.n_embd..]);
        if self.with_sets {
            let skipped = self.n_skipped * input.active.words_per_row();
            recorded.sets.extend_from_slice(&input.active.words()[skipped..]);
        }
    }

    fn after_layer(&mut self, _: LayerId, _: &[f32]) {}
}

/// Runs the sequences through the model, as often as the memory for what is recorded asks for, and gives each layer in
/// order to `each`.
pub(super) fn by_groups(
    model: &Model,
    mode: ActiveMode,
    sequences: &[Sequence],
    options: &RecordOptions,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(Progress),
    mut each: impl FnMut(LayerId, &Recorded) -> Result<(), CalibrateError>,
) -> Result<(), CalibrateError> {
    let spec = model.spec();
    let with_sets = mode != ActiveMode::Dense;
    let n_rows: usize = sequences.iter().map(|s| s.tokens.len() - 1).sum();
    let set_bytes = if with_sets { spec.max_n_ff().div_ceil(64) * 8 } else { 0 };
    let layer_bytes = n_rows * (spec.n_embd * 4 + set_bytes);
    let group = (options.memory_bytes / layer_bytes.max(1)).clamp(1, spec.n_layer);
    let n_tokens: usize = sequences.iter().map(|s| s.tokens.len()).sum();
    let mut tokens =
        Progress { phase: Phase::Record, done: 0, total: n_tokens * spec.n_layer.div_ceil(group) };
    for first in (0..spec.n_layer).step_by(group) {
        let layers = first..spec.n_layer.min(first + group);
        let empty = || Recorded {
            x: Vec::with_capacity(n_rows * spec.n_embd),
            sets: Vec::with_capacity(n_rows * set_bytes / 8),
            n_embd: spec.n_embd,
        };
        let recorded = layers.clone().map(|_| empty()).collect();
        let mut recorder = Recorder { layers: layers.clone(), recorded, with_sets, n_skipped: 0 };
        for sequence in sequences {
            record(model, mode, sequence, &mut recorder, cancel, |n| {
                tokens.done += n;
                progress(tokens);
            })?;
        }
        for (layer, recorded) in layers.zip(recorder.recorded) {
            if cancel.is_cancelled() {
                return Err(CalibrateError::Cancelled);
            }
            let id = LayerId(layer as u32);
            if !recorded.x.iter().all(|x| x.is_finite()) {
                return Err(CalibrateError::NotFinite { layer: id });
            }
            each(id, &recorded)?;
            progress(Progress { phase: Phase::Fit, done: layer + 1, total: spec.n_layer });
        }
    }
    Ok(())
}

fn record(
    model: &Model,
    mode: ActiveMode,
    sequence: &Sequence,
    recorder: &mut Recorder,
    cancel: &CancelToken,
    mut done: impl FnMut(usize),
) -> Result<(), CalibrateError> {
    let options = SessionOptions { n_ctx: Some(sequence.tokens.len()), mode: Some(mode) };
    let mut session = model.session(&options)?;
    for (ix, chunk) in sequence.tokens.chunks(model.n_batch()).enumerate() {
        if cancel.is_cancelled() {
            return Err(CalibrateError::Cancelled);
        }
        recorder.n_skipped = usize::from(ix == 0);
        session.watched(chunk, recorder)?;
        done(chunk.len());
    }
    Ok(())
}
