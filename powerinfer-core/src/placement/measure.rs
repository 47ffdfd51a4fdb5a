//! How fast a device computes with a model's own weights, found by decoding with its first layers.

use std::sync::Arc;
use std::time::Instant;

use powerinfer_sparse_ops::{
    ActiveMode, BackendError, BlockKind, DensePart, FfnInput, HybridBackend, LayerId, ModelSpec, SeqId, Step,
    StepCost, StepRow, TokenId, WeightMatrix,
};

use super::device::Bandwidth;
use crate::load::ModelWeights;

/// Seconds that decoding goes on for, at least; tokens at least and at most.
const SECONDS: f64 = 1.0;
const MIN_TOKENS: usize = 8;
const MAX_TOKENS: usize = 256;

/// Tokens whose residual streams are moved at once, to tell the speed of the link from the cost of starting.
const LINK_ROWS: usize = 32;

/// What was measured of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Measured {
    pub(crate) bandwidth: Bandwidth,
    /// Seconds of a transfer, see [`super::Accelerator`].
    pub(crate) latency: f64,
    /// Bytes a second beyond that; `None` if it is too fast to tell.
    pub(crate) link: Option<f64>,
}

/// Layers from the first on that together have at most `n_bytes` bytes.
fn layers_within(weights: &ModelWeights, n_bytes: u64) -> usize {
    let layer_bytes = |layer: usize| {
        let of_layer = |part: &&DensePart| matches!(part, DensePart::Layer(l, _) if l.index() == layer);
        let dense = weights.dense.iter().find(of_layer).into_iter().flat_map(DensePart::matrices);
        let n: usize = dense.chain(weights.ffn[layer].matrices()).map(WeightMatrix::n_bytes).sum();
        n as u64
    };
    let mut left = n_bytes;
    (0..weights.ffn.len())
        .take_while(|&layer| {
            let fits = layer_bytes(layer) <= left;
            left = left.saturating_sub(layer_bytes(layer));
            fits
        })
        .count()
}

/// Decodes with as many of the first layers as `n_bytes` hold, not counting tables and predictors, and times their dense
/// parts and their FFNs. `None` if not even one layer fits, or the model knows no second position. `make` makes an empty
/// backend.
///
/// # Errors
/// Those of loading.
pub(crate) fn measure(
    make: impl Fn(&Arc<ModelSpec>) -> Result<Box<dyn HybridBackend>, BackendError>,
    spec: &ModelSpec,
    weights: &ModelWeights,
    mode: ActiveMode,
    n_bytes: u64,
) -> Result<Option<Measured>, BackendError> {
    let n_layer = layers_within(weights, n_bytes);
    if n_layer == 0 {
        return Ok(None);
    }
    let spec = Arc::new(ModelSpec { n_layer, n_ff: spec.n_ff[..n_layer].to_vec(), ..spec.clone() });
    let mut backend = make(&spec)?;
    load(backend.as_mut(), weights, n_layer)?;
    let n_tokens = MAX_TOKENS.min(spec.n_ctx_train);
    backend.reserve(SeqId(0), n_tokens.max(LINK_ROWS), LINK_ROWS)?;
    let mut decoding = Decoding::new(&spec, mode, backend.as_mut());
    let (mut dense, mut neurons) = (Vec::new(), Vec::new());
    let (mut dense_bytes, mut neuron_bytes) = (0, 0);
    let start = Instant::now();
    for pos in 0..n_tokens {
        let [of_dense, of_neurons] = decoding.token(pos as u32);
        // At position 0 nothing is predicted, and memory may be touched for the first time.
        if pos > 0 {
            dense.push(of_dense.seconds);
            neurons.push(of_neurons.seconds);
            dense_bytes += of_dense.n_bytes;
            neuron_bytes += of_neurons.n_bytes;
        }
        if pos >= MIN_TOKENS && start.elapsed().as_secs_f64() > SECONDS {
            break;
        }
    }
    if dense.is_empty() {
        return Ok(None);
    }
    let n = dense.len() as f64;
    let (latency, link) = decoding.link();
    let per_layer = |seconds: f64| (seconds - 2.0 * latency * n_layer as f64).max(0.1 * seconds);
    let dense_seconds = median(&mut dense);
    let neuron_seconds = per_layer(median(&mut neurons));
    Ok(Some(Measured {
        bandwidth: Bandwidth {
            dense: (dense_bytes as f64 / n / dense_seconds).max(1.0),
            gather: (neuron_bytes as f64 / n / neuron_seconds).max(1.0),
        },
        link,
        latency,
    }))
}

fn load(backend: &mut dyn HybridBackend, weights: &ModelWeights, n_layer: usize) -> Result<(), BackendError> {
    for part in &weights.dense {
        match part {
            DensePart::Embedding(_) => backend.load_dense(part.clone())?,
            DensePart::Layer(layer, _) if layer.index() < n_layer => backend.load_dense(part.clone())?,
            DensePart::Layer(..) | DensePart::Head(_) => {}
        }
    }
    for ((layer, ffn), predictor) in
        (0..).map(LayerId).zip(&weights.ffn).zip(&weights.predictors).take(n_layer)
    {
        let all = powerinfer_sparse_ops::NeuronSet::all(ffn.n_ff());
        backend.load_ffn(layer, ffn.clone(), &all)?;
        if let Some(predictor) = predictor {
            backend.load_predictor(layer, predictor.clone())?;
        }
    }
    backend.load_done(&mut |_, _| ())
}

/// What a part of a token took and read.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    seconds: f64,
    n_bytes: u64,
}

impl Part {
    fn add(&mut self, start: Instant, cost: StepCost) {
        self.seconds += start.elapsed().as_secs_f64();
        self.n_bytes += cost.weight_bytes + cost.kv_bytes;
    }
}

struct Decoding<'a> {
    backend: &'a mut dyn HybridBackend,
    mode: ActiveMode,
    is_parallel: bool,
    n_layer: u32,
    n_embd: usize,
    n_vocab: usize,
    input: FfnInput,
    sum: Vec<f32>,
}

impl<'a> Decoding<'a> {
    fn new(spec: &ModelSpec, mode: ActiveMode, backend: &'a mut dyn HybridBackend) -> Self {
        Self {
            backend,
            mode,
            is_parallel: spec.block == BlockKind::Parallel,
            n_layer: spec.n_layer as u32,
            n_embd: spec.n_embd,
            n_vocab: spec.n_vocab,
            input: FfnInput::with_capacity(LINK_ROWS, spec.n_embd, spec.max_n_ff()),
            sum: vec![0.0; LINK_ROWS * spec.n_embd],
        }
    }

    /// Attention with what else is dense, and the FFNs, of one token; which one is of no matter.
    fn token(&mut self, pos: u32) -> [Part; 2] {
        let token = (pos as usize).wrapping_mul(7919) % self.n_vocab;
        let rows = [StepRow { seq: SeqId(0), pos, token: TokenId(token as u32) }];
        let step = Step { rows: &rows, mode: self.mode };
        let sum = &mut self.sum[..self.n_embd];
        let backend = &mut *self.backend;
        backend.embed(&step);
        let (mut dense, mut neurons) = (Part::default(), Part::default());
        backend.take_cost();
        for layer in (0..self.n_layer).map(LayerId) {
            let start = Instant::now();
            if self.is_parallel {
                backend.ffn_input(layer, &step, &mut self.input);
                backend.attend(layer, &step);
            } else {
                backend.attend(layer, &step);
                backend.ffn_input(layer, &step, &mut self.input);
            }
            dense.add(start, backend.take_cost());
            let start = Instant::now();
            sum.fill(0.0);
            let ticket = backend.ffn_start(layer, &self.input);
            backend.ffn_finish(ticket, sum);
            neurons.add(start, backend.take_cost());
            backend.ffn_add(layer, sum);
        }
        [dense, neurons]
    }

    /// Seconds of a transfer of any size, and bytes a second beyond that: from residual streams of one token and of many.
    fn link(&mut self) -> (f64, Option<f64>) {
        const N_TIMES: usize = 15;
        let many = LINK_ROWS as u32;
        let rows: Vec<StepRow> =
            (0..many).map(|pos| StepRow { seq: SeqId(0), pos, token: TokenId(0) }).collect();
        let mut seconds = [0.0; 2];
        for (n_rows, seconds) in [1, LINK_ROWS].into_iter().zip(&mut seconds) {
            let h = vec![0.0; n_rows * self.n_embd];
            let step = Step { rows: &rows[..n_rows], mode: self.mode };
            let out = &mut self.sum[..n_rows * self.n_embd];
            let mut times: Vec<f64> = (0..N_TIMES)
                .map(|_| {
                    let start = Instant::now();
                    self.backend.set_hidden(&step, &h);
                    self.backend.hidden(out);
                    start.elapsed().as_secs_f64() / 2.0
                })
                .collect();
            *seconds = median(&mut times);
        }
        let [one, all] = seconds;
        let more = 4 * (LINK_ROWS - 1) * self.n_embd;
        (one, (all > 1.2 * one).then(|| more as f64 / (all - one)))
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
