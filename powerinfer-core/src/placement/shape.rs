//! What a plan is about: the parts of a model and their bytes.

use powerinfer_sparse_ops::{
    DensePart, DownWeights, FfnWeights, Gating, ModelSpec, NormWeights, PredictorWeights, WeightMatrix,
};

use super::device::{ALLOCATION_BYTES, allocated};

/// Bytes of the parts of a model, as they lie on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// For people.
    pub name: String,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Query heads.
    pub n_head: usize,
    /// Width of the queries.
    pub q_dim: usize,
    /// Width of keys, and of values.
    pub kv_dim: usize,
    /// Vocabulary size.
    pub n_vocab: usize,
    /// Bytes of the output matrix and the last norm.
    pub head_bytes: u64,
    /// Bytes that the predictor of a layer works in for a token, at most.
    pub predictor_step_bytes: u64,
    /// Bytes of counters of what fires, on each device; 0 unless neurons move while the model runs.
    pub counter_bytes: u64,
    /// The layers.
    pub layers: Vec<LayerShape>,
}

/// Bytes of the parts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerShape {
    /// Number of neurons.
    pub n_ff: usize,
    /// Attention and norms.
    pub dense_bytes: u64,
    /// The predictor; 0 if there is none.
    pub predictor_bytes: u64,
    /// One row of the gate; 0 without one.
    pub gate_row_bytes: u64,
    /// One row of up.
    pub up_row_bytes: u64,
    /// One row of down.
    pub down_row_bytes: u64,
    /// Whether neurons have a bias.
    pub has_bias: bool,
    /// Why no neuron of it can go to a device, if so.
    pub stays: Option<String>,
}

impl LayerShape {
    /// Bytes that `n` neurons take on a device.
    pub fn neuron_bytes(&self, n: usize) -> u64 {
        if n == 0 {
            return 0;
        }
        let n = n as u64;
        let rows = [self.gate_row_bytes, self.up_row_bytes, self.down_row_bytes];
        let ids_and_bias = [4, if self.has_bias { 4 } else { 0 }];
        rows.into_iter()
            .chain(ids_and_bias)
            .map(|row| allocated(n.saturating_mul(row)))
            .fold(0, u64::saturating_add)
    }
}

impl ModelShape {
    /// That of loaded weights.
    pub(crate) fn new(
        name: String,
        spec: &ModelSpec,
        dense: &[DensePart],
        ffn: &[FfnWeights],
        predictors: &[Option<PredictorWeights>],
    ) -> Self {
        let matrices = |part: &DensePart| part.matrices().map(|m| allocated(m.n_bytes() as u64)).sum::<u64>();
        let norm = |norm: &NormWeights| {
            let vectors = [Some(norm.weight.len()), norm.bias.as_ref().map(Vec::len)];
            vectors.into_iter().flatten().map(|n| allocated(4 * n as u64)).sum::<u64>()
        };
        let mut head_bytes = 0;
        let mut dense_bytes = vec![0; spec.n_layer];
        for part in dense {
            match part {
                DensePart::Embedding(_) => {}
                DensePart::Layer(layer, w) => {
                    let norms = [Some(&w.attn_norm), w.attn_norm_2.as_ref(), w.ffn_norm.as_ref()];
                    let biases = [&w.q, &w.k, &w.v, &w.output].map(|linear| linear.bias.as_ref());
                    let vectors = biases.into_iter().chain([w.ffn_down_bias.as_ref()]).flatten();
                    dense_bytes[layer.index()] = matrices(part)
                        + norms.into_iter().flatten().map(norm).sum::<u64>()
                        + vectors.map(|v| allocated(4 * v.len() as u64)).sum::<u64>();
                }
                DensePart::Head(w) => head_bytes = matrices(part) + norm(&w.norm),
            }
        }
        let layers = ffn.iter().zip(predictors).zip(dense_bytes).map(|((ffn, predictor), dense_bytes)| {
            let by_output = matches!(ffn.down, DownWeights::ByOutput(_));
            let down = ffn.down.matrix();
            LayerShape {
                n_ff: ffn.n_ff(),
                dense_bytes,
                predictor_bytes: predictor.as_ref().map_or(0, predictor_bytes),
                gate_row_bytes: ffn.gate.as_ref().map_or(0, |gate| gate.row_bytes() as u64),
                up_row_bytes: ffn.up.row_bytes() as u64,
                down_row_bytes: if by_output {
                    (down.n_bytes() / ffn.n_ff()) as u64
                } else {
                    down.row_bytes() as u64
                },
                has_bias: ffn.up_bias.is_some(),
                stays: by_output.then(|| {
                    format!(
                        "`{}` is {} with blocks along the neurons, so that none can be taken out",
                        WeightMatrix::name(down),
                        down.ty()
                    )
                }),
            }
        });
        Self {
            name,
            n_embd: spec.n_embd,
            n_head: spec.n_head,
            q_dim: spec.q_dim(),
            kv_dim: spec.kv_dim(),
            n_vocab: spec.n_vocab,
            head_bytes,
            predictor_step_bytes: predictors.iter().flatten().map(predictor_step_bytes).max().unwrap_or(0),
            counter_bytes: 0,
            layers: layers.collect(),
        }
    }

    /// Makes room for counters of what fires.
    pub(crate) fn count(&mut self) {
        self.counter_bytes = self.layers.iter().map(|layer| allocated(8 * layer.n_ff as u64)).sum();
    }

    /// Leaves all neurons on the host.
    pub(crate) fn keep_neurons(&mut self, why: &str) {
        self.layers.iter_mut().for_each(|layer| layer.stays = Some(why.to_owned()));
    }

    /// A llama-like model of equal layers, for simulations: `weight_bytes` and `predictor_weight_bytes` are bytes of a
    /// weight.
    #[expect(clippy::too_many_arguments, reason = "the numbers of a model card, in their usual order")]
    pub fn uniform(
        name: &str,
        n_layer: usize,
        n_embd: usize,
        kv_dim: usize,
        n_ff: usize,
        n_vocab: usize,
        gating: Gating,
        weight_bytes: f64,
        predictor_bytes: u64,
    ) -> Self {
        let bytes = |n: usize| (n as f64 * weight_bytes) as u64;
        let row = bytes(n_embd);
        // Rank of a predictor of that size.
        let rank = predictor_bytes as f64 / (weight_bytes * (n_embd + n_ff) as f64);
        let layer = LayerShape {
            n_ff,
            dense_bytes: allocated(bytes(2 * n_embd * n_embd + 2 * n_embd * kv_dim)),
            predictor_bytes: allocated(predictor_bytes),
            gate_row_bytes: if gating == Gating::None { 0 } else { row },
            up_row_bytes: row,
            down_row_bytes: row,
            has_bias: false,
            stays: None,
        };
        Self {
            name: name.to_owned(),
            n_embd,
            n_head: n_embd.div_ceil(128),
            q_dim: n_embd,
            kv_dim,
            n_vocab,
            head_bytes: allocated(bytes(n_embd * n_vocab)),
            predictor_step_bytes: 4 * rank.ceil() as u64,
            counter_bytes: 0,
            layers: vec![layer; n_layer],
        }
    }

    /// Bytes of keys and values of one layer, `value_bytes` a value, for `n_seq` sequences of `n_ctx` positions.
    pub(crate) fn kv_bytes(&self, n_ctx: usize, n_seq: usize, value_bytes: u64) -> u64 {
        let one = (n_ctx as u64).saturating_mul(value_bytes.saturating_mul(self.kv_dim as u64));
        allocated(one).saturating_mul(2).saturating_mul(n_seq as u64)
    }

    /// Bytes that a device takes as soon as it is there: frequencies of positions, counters of each layer.
    pub(crate) fn constant_bytes(&self) -> u64 {
        [2 * self.q_dim, 128 * self.layers.len()].map(|n| allocated(n as u64)).into_iter().sum()
    }

    /// Bytes that a device works in for steps of `n_batch` tokens with contexts of `n_ctx` positions, if it is home, has the
    /// head and holds neurons. No backend may take more: it is what `powerinfer-cuda` allocates, piece by piece, and the
    /// tests of the backends compare with it.
    pub(crate) fn step_bytes(&self, n_batch: usize, n_ctx: usize) -> u64 {
        let n_ff = self.layers.iter().map(|layer| layer.n_ff).max().unwrap_or(0) as u64;
        let n_layer = self.layers.len() as u64;
        let [rows, n_embd, n_head] = [n_batch, self.n_embd, self.n_head].map(|n| n as u64);
        let [q_dim, kv_dim, n_vocab] = [self.q_dim, self.kv_dim, self.n_vocab].map(|n| n as u64);
        let times = u64::saturating_mul;
        let floats = |n: u64| times(rows, times(4, n));
        // Positions, tokens, and for each layer where the keys and the values of each token's sequence lie.
        let table = |width: u64| times(rows, width).saturating_add(15);
        let tables = times(2, table(4)).saturating_add(times(2 * n_layer, table(8)));
        // Each span of 256 positions gives a sum, its weight and its largest score for every head.
        let spans = (n_ctx as u64).div_ceil(256).max(1);
        let of_token = times(4 * spans, q_dim + 2 * n_head);
        let attention = of_token.max(times(rows, of_token).min(16 << 20));
        // Sums of 32 neurons or more, for eight tokens at a time, of at most 32 MiB.
        let chunks = n_ff.div_ceil(32).min((1_048_576 / n_embd.max(1)).max(1));
        let pieces = [
            tables,
            // Residual stream, its normed copy, the FFN's input, the sum of its neurons.
            floats(n_embd),
            floats(n_embd),
            floats(n_embd),
            floats(n_embd),
            // Queries, keys, values, what attention mixes.
            floats(q_dim),
            floats(kv_dim),
            floats(kv_dim),
            floats(q_dim),
            attention,
            // At most four pieces.
            times(rows, self.predictor_step_bytes).saturating_add(3 * ALLOCATION_BYTES),
            // Logits of at most 16 tokens at a time.
            times(rows.min(16), times(4, n_vocab)),
            // Active bits, hidden values, lists of active neurons of at most 32 tokens at a time, marks.
            times(rows, 8 * n_ff.div_ceil(64)),
            floats(n_ff),
            times(rows.min(32), 4 * n_ff),
            times(rows.min(32), 4),
            4 * n_ff,
            times(rows.min(8), times(chunks, 4 * n_embd)),
        ];
        pieces.into_iter().map(allocated).fold(0, u64::saturating_add)
    }
}

/// Bytes of a predictor on a device.
fn predictor_bytes(predictor: &PredictorWeights) -> u64 {
    let bytes = |n: usize| allocated(n as u64);
    match predictor {
        PredictorWeights::LowRank(p) => bytes(p.fc1.n_bytes()) + bytes(p.fc2.n_bytes()),
        PredictorWeights::GateCopy(p) => {
            let numbers = [p.scales().len(), p.thresholds().len(), p.outliers().len(), p.mean().len()];
            let numbers: u64 = numbers.into_iter().map(|n| bytes(4 * n)).sum();
            bytes(p.codes().len()) + numbers + bytes(2 * p.outlier_weights().len())
        }
    }
}

/// Bytes that predicting works in for a token: inner values, or the rounded input with what is kept apart and its scale.
fn predictor_step_bytes(predictor: &PredictorWeights) -> u64 {
    let n = match predictor {
        PredictorWeights::LowRank(p) => 4 * p.fc1.n_rows(),
        PredictorWeights::GateCopy(p) => p.n_padded() + 4 * p.n_outliers() + 8,
    };
    n as u64
}
