//! What a plan is about: the parts of a model and their bytes.

use powerinfer_sparse_ops::{
    DensePart, DownWeights, FfnWeights, Gating, ModelSpec, NormWeights, PredictorWeights, WeightMatrix,
};

use super::device::allocated;

/// Bytes of the parts of a model, as they lie on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// For people.
    pub name: String,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Width of the queries.
    pub q_dim: usize,
    /// Width of keys, and of values.
    pub kv_dim: usize,
    /// Vocabulary size.
    pub n_vocab: usize,
    /// Bytes of the output matrix and the last norm.
    pub head_bytes: u64,
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
                predictor_bytes: predictor.as_ref().map_or(0, |p| allocated(p.n_bytes() as u64)),
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
            q_dim: spec.q_dim(),
            kv_dim: spec.kv_dim(),
            n_vocab: spec.n_vocab,
            head_bytes,
            layers: layers.collect(),
        }
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
            q_dim: n_embd,
            kv_dim,
            n_vocab,
            head_bytes: allocated(bytes(n_embd * n_vocab)),
            layers: vec![layer; n_layer],
        }
    }

    /// Bytes of keys and values of one layer, 16 bits a value, for `n_seq` sequences of `n_ctx` positions.
    pub(crate) fn kv_bytes(&self, n_ctx: usize, n_seq: usize) -> u64 {
        let one = (n_ctx as u64).saturating_mul(2 * self.kv_dim as u64);
        allocated(one).saturating_mul(2).saturating_mul(n_seq as u64)
    }

    /// Bytes that steps of `n_batch` tokens work in, on a device that may be home and may have the head: residual
    /// stream, its normed copy, active bits, partial sum, hidden values, queries with keys and values, mixed values,
    /// logits.
    pub(crate) fn step_bytes(&self, n_batch: usize) -> u64 {
        let n_ff = self.layers.iter().map(|layer| layer.n_ff).max().unwrap_or(0);
        let floats = |n: usize| allocated((n_batch as u64).saturating_mul(4 * n as u64));
        let widths = [
            self.n_embd,
            self.n_embd,
            self.n_embd,
            n_ff,
            self.q_dim + 2 * self.kv_dim,
            self.q_dim,
            self.n_vocab,
        ];
        let bits = allocated((n_batch as u64).saturating_mul(8 * n_ff.div_ceil(64) as u64));
        widths.into_iter().map(floats).fold(bits, u64::saturating_add)
    }
}
