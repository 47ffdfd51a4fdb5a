//! How well the predictor of a loaded model does on a text.

use powerinfer_gguf::GgufModel;
use powerinfer_predictor::{Quality, QualityCounter};
use powerinfer_sparse_ops::{ActiveMode, LayerId, TokenId};

use super::products::Inputs;
use super::record::Recorded;
use super::signs::{SignScores, Signs};
use super::truth::Truth;
use super::{BLOCK, CalibrateError, CancelToken, Model, Progress, RecordOptions, cut, record};

/// How the predictor of a layer did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerEvaluation {
    /// The layer.
    pub layer: LayerId,
    /// Whether the layer has a predictor; without one it is computed exactly, and nothing is missed.
    pub predicted: bool,
    /// Recall, precision, and the shares of active and predicted neurons.
    pub quality: Quality,
    /// Share of `Σ act(gate) · |up| · ‖down‖` that the predicted neurons hold.
    pub mass_recall: f64,
    /// Share of the neurons that sign bits alone, with the best threshold for this layer and text, have to name for the same
    /// recall: the baseline of the literature (SparseInfer, arXiv 2411.12692).
    pub sign_bits_share: f64,
}

/// Runs a loaded model in mode `predictor` over texts and compares what its predictors named with what was active, by
/// the file's own weights in f32, for the inputs that the FFNs really got. The first token of each sequence does not
/// count.
///
/// `file` is what `model` was loaded from.
///
/// # Errors
/// [`CalibrateError`]; [`crate::SessionError::NoPredictors`] in it if the model has none.
pub fn evaluate(
    file: &GgufModel,
    model: &Model,
    texts: &[Vec<TokenId>],
    options: &RecordOptions,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<LayerEvaluation>, CalibrateError> {
    let spec = model.spec();
    if !spec.activation.has_exact_zeros() {
        return Err(CalibrateError::NoZeros { activation: spec.activation.name() });
    }
    let sequences = cut::sequences(texts, spec, options)?;
    let mut layers = Vec::with_capacity(spec.n_layer);
    record::by_groups(
        model,
        ActiveMode::Predictor,
        &sequences,
        options,
        cancel,
        progress,
        |layer, recorded| {
            let truth = Truth::read(file, spec, layer)?;
            let predicted = model.layer_has_predictor(layer);
            layers.push(evaluate_layer(&truth, recorded, predicted, options.threads));
            Ok(())
        },
    )?;
    Ok(layers)
}

fn evaluate_layer(truth: &Truth, recorded: &Recorded, predicted: bool, threads: usize) -> LayerEvaluation {
    let gate = truth.gate();
    let (n_ff, n_words) = (gate.n_rows(), gate.n_rows().div_ceil(64));
    let x = Inputs::new(&recorded.x, gate.n_cols());
    let n_rows = x.n_rows();
    let mut counter = QualityCounter::default();
    let (signs, mut scores) = (Signs::of(&x), SignScores::new(gate.n_cols()));
    let (mut mass, mut mass_hit) = (0.0, 0.0);
    for first in (0..n_ff).step_by(BLOCK) {
        let neurons = first..n_ff.min(first + BLOCK);
        let gates = truth.gates(neurons.clone(), &x, threads);
        let gains = truth.gains(neurons.clone(), &gates, &x, threads);
        scores.add(gate, neurons, &gates, &signs);
        for (ix, (&gate, &gain)) in gates.iter().zip(&gains).enumerate() {
            let (neuron, row) = (first + ix / n_rows, ix % n_rows);
            let selected = recorded.sets[row * n_words + neuron / 64] >> (neuron % 64) & 1 == 1;
            counter.add_neuron(selected, gate > 0.0);
            mass += f64::from(gain);
            mass_hit += if selected { f64::from(gain) } else { 0.0 };
        }
    }
    let quality = counter.quality().expect("sequences have more than one token");
    LayerEvaluation {
        layer: truth.layer(),
        predicted,
        quality,
        sign_bits_share: scores.selected_for(quality.recall),
        mass_recall: if mass > 0.0 { mass_hit / mass } else { 1.0 },
    }
}
