//! Calibration: from a model file and some text to gate copies whose thresholds reach a wanted recall; and how well the
//! predictor of a loaded model does on a text.
//!
//! # Memory
//!
//! The inputs of all FFNs are recorded before anything is fitted, at most [`RecordOptions::memory_bytes`] of them at
//! once: where that is less than all layers need, layers are taken in groups, and the model runs over the text once for
//! each group. Fitting holds one layer besides: its recorded inputs once more in 8 bits, widened to f32, two numbers for
//! each of its neurons and held-out tokens, a block of 256 rows of each matrix in f32, and for float files its down
//! projection, transposed.

mod cut;
mod evaluate;
mod fingerprint;
mod fit;
mod products;
mod record;
mod signs;
mod timing;
mod truth;

use powerinfer_gguf::GgufModel;
use powerinfer_predictor::{CalibrationFile, CalibrationLayer, LayerFigures, PredictorError, UseReason};
use powerinfer_sparse_ops::{
    ActiveMode, GateCopy, GateCopyError, LayerId, ModelSpec, TokenId, find_outlier_columns,
};

use crate::load::{CalibrationChoice, LoadError, LoadOptions};
use crate::model::Model;
use crate::session::{CancelToken, SessionError};
use fit::{Fold, Held};
use products::Inputs;
use record::Recorded;
use truth::Truth;

pub use evaluate::{LayerEvaluation, evaluate};
pub use fingerprint::fingerprint;

/// Recalls that every calibration has thresholds for.
pub const RECALLS: [f32; 4] = [0.95, 0.98, 0.99, 0.995];

/// Neurons that are looked at together.
const BLOCK: usize = 256;

/// What of a text is recorded, and with how much of the machine.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// Tokens that go through the model, at most.
    pub n_tokens: usize,
    /// Tokens of a sequence, each of which begins anew; less if the model or the text is shorter.
    pub sequence_len: usize,
    /// Takes the place of the first token of each sequence.
    pub bos: Option<TokenId>,
    /// Threads of the products outside the model.
    pub threads: usize,
    /// Bytes of recorded inputs that are held at once.
    pub memory_bytes: usize,
}

impl Default for RecordOptions {
    fn default() -> Self {
        Self { n_tokens: 4096, sequence_len: 256, bos: None, threads: 1, memory_bytes: 2 << 30 }
    }
}

/// How a calibration is made.
#[derive(Clone, Debug)]
pub struct CalibrateOptions {
    /// What of the text is used.
    pub record: RecordOptions,
    /// The recall that is used unless another is asked for at load; there are thresholds for [`RECALLS`] as well.
    pub recall: f32,
    /// Use every layer's copy without measuring what it saves.
    pub all_layers: bool,
}

impl Default for CalibrateOptions {
    fn default() -> Self {
        Self { record: RecordOptions::default(), recall: 0.99, all_layers: false }
    }
}

/// What a calibration or an evaluation is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Tokens go through the model.
    Record,
    /// Layers are fitted, or looked at.
    Fit,
    /// Steps are timed with and without the copies.
    Time,
}

/// How far a calibration or an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// How much of it is done.
    pub done: usize,
    /// How much there is: tokens, layers or steps.
    pub total: usize,
}

/// Why a calibration or an evaluation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// The model cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A session cannot go on.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Nothing is exactly zero, so nothing can be left out.
    #[error(
        "activation {activation} has no exact zeros: there are no neurons to leave out, and nothing to calibrate"
    )]
    NoZeros {
        /// The activation.
        activation: &'static str,
    },
    /// Too little text to fit on one part and to judge on another.
    #[error("the text has {n_tokens} tokens, at least {needed} are needed")]
    TextTooShort {
        /// Tokens of the text.
        n_tokens: usize,
        /// Tokens needed.
        needed: usize,
    },
    /// The model computes values that are no numbers.
    #[error("the input of the FFN of layer {layer} is not finite; the weights are broken")]
    NotFinite {
        /// First such layer.
        layer: LayerId,
    },
    /// A gate that cannot be copied.
    #[error("the gate of layer {layer} cannot be copied")]
    GateCopy {
        /// The layer.
        layer: LayerId,
        /// What is wrong.
        source: GateCopyError,
    },
    /// A recall that is none, or a layer that cannot be stored.
    #[error(transparent)]
    Predictor(#[from] PredictorError),
    /// The cancel token was set.
    #[error("cancelled")]
    Cancelled,
}

/// Makes a calibration for a model file: for each layer a 2-bit copy of its gate (of its up projection where there is
/// no gate), and for each of some recalls a threshold for each neuron.
///
/// For each neuron, the true value `g` before the activation is fitted by least squares to the copy's score `s` on one
/// half of the sequences: `g ≈ a · s + b`, with the residual's deviation σ. A neuron is selected where `(a · s + b) / σ ≥ t`;
/// the one `t` of the layer is set on the other half, so that the wanted share of all active (neuron, token) pairs is
/// selected. Stored is the same rule as a threshold of the score, `(t · σ − b) / a`. A neuron with `a ≤ 0` or without any residual is always selected.
/// The first token of a sequence counts nowhere: the engine computes position 0 in full.
///
/// The figures of the layers are those of the half that sets `t`, in two parts of which each is judged by the `t` of
/// the other.
///
/// Whether a layer uses its copy is measured by decoding tokens in mode `exact` and in mode `predictor`, and
/// stored, so that a text never depends on the speed of a machine at the time.
///
/// `texts` are used alike, whatever their lengths, and each from its beginning to its end.
///
/// # Errors
/// [`CalibrateError`].
pub fn calibrate(
    file: &GgufModel,
    load: &LoadOptions,
    texts: &[Vec<TokenId>],
    options: &CalibrateOptions,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(Progress),
) -> Result<CalibrationFile, CalibrateError> {
    let recalls = recalls(options.recall)?;
    let plain = LoadOptions {
        calibration: CalibrationChoice::Never,
        recall: None,
        mode: Some(ActiveMode::Dense),
        allow_missing_predictors: true,
        ..load.clone()
    };
    let model = Model::load(file, &plain)?;
    let spec = model.spec().clone();
    if !spec.activation.has_exact_zeros() {
        return Err(CalibrateError::NoZeros { activation: spec.activation.name() });
    }
    let sequences = cut::sequences(texts, &spec, &options.record)?;
    let folds = cut::folds(&sequences);
    let mut layers = Vec::with_capacity(spec.n_layer);
    record::by_groups(
        &model,
        ActiveMode::Dense,
        &sequences,
        &options.record,
        cancel,
        progress,
        |layer, recorded| {
            let truth = Truth::read(file, &spec, layer)?;
            layers.push(calibrate_layer(&truth, recorded, &folds, &recalls, options.record.threads)?);
            Ok(())
        },
    )?;
    // Two copies of the weights at once would be one too many.
    drop(model);
    let n_tokens = sequences.iter().map(|s| s.tokens.len() as u64).sum();
    let mut calibration = CalibrationFile::new(fingerprint(file), n_tokens, recalls, options.recall, layers)?;
    if !options.all_layers {
        let model = Model::load_calibrated(file, &calibration, &plain)?;
        timing::decide(&model, &sequences, &mut calibration, cancel, progress)?;
    }
    Ok(calibration)
}

/// [`RECALLS`] and the one that was asked for, ascending.
fn recalls(asked: f32) -> Result<Vec<f32>, PredictorError> {
    if !(asked > 0.0 && asked < 1.0) {
        return Err(PredictorError::Recall { asked, stored: RECALLS.to_vec() });
    }
    let mut recalls = RECALLS.to_vec();
    recalls.push(asked);
    recalls.sort_by(f32::total_cmp);
    recalls.dedup();
    Ok(recalls)
}

fn calibrate_layer(
    truth: &Truth,
    recorded: &Recorded,
    folds: &[Fold],
    recalls: &[f32],
    threads: usize,
) -> Result<CalibrationLayer, CalibrateError> {
    let layer = truth.layer();
    let failed = |source| CalibrateError::GateCopy { layer, source };
    let gate = truth.gate();
    let copy = GateCopy::from_gate(gate, recorded.mean(), find_outlier_columns(gate)).map_err(failed)?;
    let x = Inputs::new(&recorded.x, gate.n_cols());
    let scorer = products::Scorer::new(&copy, &recorded.x);
    let mut held = Held::new(folds);
    for first in (0..copy.n_ff()).step_by(BLOCK) {
        let neurons = first..copy.n_ff().min(first + BLOCK);
        let gates = truth.gates(neurons.clone(), &x, threads);
        let gains = truth.gains(neurons.clone(), &gates, &x, threads);
        let scores = scorer.scores(neurons, threads);
        held.add_block(&scores, &gates, &gains);
    }
    let mut thresholds = Vec::with_capacity(recalls.len() * copy.n_ff());
    let mut at = Vec::with_capacity(recalls.len());
    for &recall in recalls {
        thresholds.extend(held.thresholds(held.bound(recall, None)));
        at.push(held.figures(recall));
    }
    let figures = LayerFigures {
        used: true,
        reason: UseReason::AsAsked,
        exact_us: 0.0,
        predictor_us: 0.0,
        active: held.active_share(),
        at,
    };
    Ok(CalibrationLayer::new(copy, thresholds, figures)?)
}
