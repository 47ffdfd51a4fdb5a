//! Tiny random models in memory, one for each family.

use std::sync::Arc;

use powerinfer_sparse_ops::{
    Activation, BlockKind, DensePart, DownWeights, EmbeddingWeights, FfnWeights, GateCopy, Gating,
    HeadWeights, HybridBackend, LayerId, LayerWeights, Linear, LowRank, ModelSpec, NeuronSet, Norm, NormKind,
    NormWeights, PredictorWeights, Rope, RopeKind, RopeScaling, WeightBytes, WeightMatrix, WeightType, block,
};

/// Seeded random numbers that are the same on every machine (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// An integer in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// Uniform in `-1..1`.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Roughly normal with variance 1 (sum of uniforms).
    pub fn normal(&mut self) -> f32 {
        (0..3).map(|_| self.uniform()).sum()
    }

    /// `n` normal values times `scale`.
    pub fn normals(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.normal() * scale).collect()
    }
}

/// The four families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// RMS norm, gate, interleaved rotation.
    Llama,
    /// As llama with the activation on up as well.
    Bamboo,
    /// Layer norm, parallel block, no gate, rotation of halves; `true` for two norms.
    Falcon(bool),
    /// Layer norm, biases, learned positions.
    Opt,
}

impl Family {
    /// All families and variants.
    pub const ALL: [Self; 5] =
        [Self::Llama, Self::Bamboo, Self::Falcon(false), Self::Falcon(true), Self::Opt];
}

/// What a tiny model looks like.
#[derive(Clone, Copy, Debug)]
pub struct TinyOptions {
    /// Family.
    pub family: Family,
    /// Width, a multiple of 32 (256 for K-quants).
    pub n_embd: usize,
    /// Neurons of every layer, a multiple of the block length where down lies by output.
    pub n_ff: usize,
    /// Type of the FFN's matrices.
    pub ffn_type: WeightType,
    /// Type of every other matrix.
    pub dense_type: WeightType,
    /// Down rows by neuron, as in sparse files.
    pub down_by_neuron: bool,
    /// ReLU or SiLU.
    pub activation: Activation,
    /// Seed of the weights.
    pub seed: u64,
}

impl Default for TinyOptions {
    fn default() -> Self {
        Self {
            family: Family::Llama,
            n_embd: 64,
            n_ff: 96,
            ffn_type: WeightType::F32,
            dense_type: WeightType::F32,
            down_by_neuron: true,
            activation: Activation::Relu,
            seed: 1,
        }
    }
}

/// A model whose weights are in memory.
#[derive(Clone, Debug)]
pub struct TinyModel {
    /// Its shape.
    pub spec: Arc<ModelSpec>,
    /// What home holds.
    pub dense: Vec<DensePart>,
    /// FFN of each layer.
    pub ffn: Vec<FfnWeights>,
    /// Predictor of each layer; about a quarter of the neurons pass.
    pub predictors: Vec<PredictorWeights>,
}

const N_LAYER: usize = 3;
const N_VOCAB: usize = 96;
const N_CTX: usize = 64;

impl TinyModel {
    /// Draws the weights.
    pub fn new(options: TinyOptions) -> Self {
        let mut draw = Draw { random: Random::new(options.seed), options };
        let spec = Arc::new(spec(options));
        let layers = || (0..N_LAYER as u32).map(LayerId);
        let mut dense = vec![draw.embedding(&spec)];
        dense.extend(layers().map(|layer| DensePart::Layer(layer, Box::new(draw.layer(&spec)))));
        dense.push(DensePart::Head(HeadWeights {
            norm: draw.norm(&spec),
            output: draw.matrix("output", options.dense_type, N_VOCAB, spec.n_embd),
        }));
        let ffn = layers().map(|_| draw.ffn(&spec)).collect();
        let predictors = layers().map(|_| draw.predictor(&spec)).collect();
        Self { spec, dense, ffn, predictors }
    }

    /// The same model with 2-bit copies of its gates (of up in models without gates) for predictors, with two columns kept
    /// apart. About a third of the neurons pass; one of 16 always does and one never.
    pub fn with_gate_copies(mut self) -> Self {
        const N_DRAWS: usize = 16;
        let mut random = Random::new(23);
        self.predictors = self
            .ffn
            .iter()
            .map(|ffn| {
                let gate = ffn.gate.as_ref().unwrap_or(&ffn.up);
                let (n_ff, n_embd) = (gate.n_rows(), gate.n_cols());
                let copy = GateCopy::from_gate(gate, random.normals(n_embd, 0.1), vec![3, 17]);
                let copy = copy.expect("finite weights and ascending columns");
                let draws: Vec<Vec<f32>> =
                    (0..N_DRAWS).map(|_| copy.score(&random.normals(n_embd, 1.0))).collect();
                let threshold = |neuron| {
                    let mut scores: Vec<f32> = draws.iter().map(|scores| scores[neuron]).collect();
                    scores.sort_by(f32::total_cmp);
                    match neuron % 16 {
                        0 => f32::NEG_INFINITY,
                        1 => f32::INFINITY,
                        _ => scores[N_DRAWS * 2 / 3],
                    }
                };
                let thresholds = (0..n_ff).map(threshold).collect();
                PredictorWeights::GateCopy(Arc::new(copy.with_thresholds(thresholds).expect("one a neuron")))
            })
            .collect();
        self
    }

    /// Loads the dense parts and predictors into a home backend.
    pub fn load_home(&self, backend: &mut dyn HybridBackend) {
        for part in &self.dense {
            backend.load_dense(part.clone()).expect("tiny models have types that every backend takes");
        }
        for (layer, predictor) in (0..).map(LayerId).zip(&self.predictors) {
            backend.load_predictor(layer, predictor.clone()).expect("predictors are F32");
        }
        backend.load_done(&mut |_, _| {}).expect("tiny models fit into memory");
    }

    /// Loads the neurons that `owned` gives for each layer.
    pub fn load_ffn(&self, backend: &mut dyn HybridBackend, owned: impl Fn(LayerId) -> NeuronSet) {
        for (layer, ffn) in (0..).map(LayerId).zip(&self.ffn) {
            backend.load_ffn(layer, ffn.clone(), &owned(layer)).expect("tiny models have supported types");
        }
        backend.load_done(&mut |_, _| {}).expect("tiny models fit into memory");
    }

    /// Loads everything into one backend.
    pub fn load_all(&self, backend: &mut dyn HybridBackend) {
        self.load_home(backend);
        self.load_ffn(backend, |layer| NeuronSet::all(self.spec.n_ff[layer.index()]));
    }
}

fn spec(options: TinyOptions) -> ModelSpec {
    let family = options.family;
    let (n_head, n_head_kv, head_dim) = match family {
        Family::Opt => (4, 4, options.n_embd / 4),
        Family::Falcon(false) => (4, 1, options.n_embd / 4),
        _ => (4, 2, options.n_embd / 4),
    };
    let norm_kind =
        if matches!(family, Family::Llama | Family::Bamboo) { NormKind::Rms } else { NormKind::Layer };
    let falcon = matches!(family, Family::Falcon(_));
    let rope_kind = if falcon { RopeKind::Halves } else { RopeKind::Interleaved };
    ModelSpec {
        arch: format!("{family:?}").to_lowercase(),
        n_layer: N_LAYER,
        n_embd: options.n_embd,
        n_ff: vec![options.n_ff; N_LAYER],
        n_head,
        n_head_kv,
        head_dim,
        n_vocab: N_VOCAB,
        n_ctx_train: N_CTX,
        norm: Norm { kind: norm_kind, eps: 1e-5 },
        block: if falcon { BlockKind::Parallel } else { BlockKind::Sequential },
        rope: (family != Family::Opt)
            .then(|| Rope::new(rope_kind, head_dim, 10000.0, &RopeScaling::None, None)),
        activation: options.activation,
        gating: match family {
            Family::Llama => Gating::Gate,
            Family::Bamboo => Gating::GateAndUp,
            Family::Falcon(_) | Family::Opt => Gating::None,
        },
        sparse_file: options.down_by_neuron,
    }
}

struct Draw {
    random: Random,
    options: TinyOptions,
}

impl Draw {
    fn matrix(&mut self, name: &str, ty: WeightType, n_rows: usize, n_cols: usize) -> WeightMatrix {
        let scale = 1.5 / (n_cols as f32).sqrt();
        let values = self.random.normals(n_rows * n_cols, scale);
        encoded(name, ty, n_rows, n_cols, &values)
    }

    fn linear(&mut self, name: &str, n_out: usize, n_in: usize) -> Linear {
        let weight = self.matrix(name, self.options.dense_type, n_out, n_in);
        let bias = (self.options.family == Family::Opt).then(|| self.random.normals(n_out, 0.2));
        Linear { weight, bias }
    }

    fn norm(&mut self, spec: &ModelSpec) -> NormWeights {
        let weight = self.random.normals(spec.n_embd, 0.2).iter().map(|v| 1.0 + v).collect();
        let bias = (spec.norm.kind == NormKind::Layer).then(|| self.random.normals(spec.n_embd, 0.2));
        NormWeights { weight, bias }
    }

    fn embedding(&mut self, spec: &ModelSpec) -> DensePart {
        let ty = self.options.dense_type;
        let token = self.matrix("token_embd", ty, N_VOCAB, spec.n_embd);
        let position = (self.options.family == Family::Opt)
            .then(|| (self.matrix("position_embd", WeightType::F32, N_CTX + 2, spec.n_embd), 2));
        DensePart::Embedding(EmbeddingWeights { token, position })
    }

    fn layer(&mut self, spec: &ModelSpec) -> LayerWeights {
        let family = self.options.family;
        LayerWeights {
            attn_norm: self.norm(spec),
            attn_norm_2: (family == Family::Falcon(true)).then(|| self.norm(spec)),
            q: self.linear("attn_q", spec.q_dim(), spec.n_embd),
            k: self.linear("attn_k", spec.kv_dim(), spec.n_embd),
            v: self.linear("attn_v", spec.kv_dim(), spec.n_embd),
            output: self.linear("attn_output", spec.n_embd, spec.q_dim()),
            ffn_norm: (spec.block == BlockKind::Sequential).then(|| self.norm(spec)),
            ffn_down_bias: (family == Family::Opt).then(|| self.random.normals(spec.n_embd, 0.2)),
        }
    }

    fn ffn(&mut self, spec: &ModelSpec) -> FfnWeights {
        let (n_ff, n_embd, ty) = (self.options.n_ff, spec.n_embd, self.options.ffn_type);
        FfnWeights {
            gate: (spec.gating != Gating::None).then(|| self.matrix("ffn_gate", ty, n_ff, n_embd)),
            up: self.matrix("ffn_up", ty, n_ff, n_embd),
            up_bias: (self.options.family == Family::Opt).then(|| self.random.normals(n_ff, 0.2)),
            down: if self.options.down_by_neuron {
                DownWeights::ByNeuron(self.matrix("ffn_down_t", ty, n_ff, n_embd))
            } else {
                DownWeights::ByOutput(self.matrix("ffn_down", ty, n_embd, n_ff))
            },
        }
    }

    fn predictor(&mut self, spec: &ModelSpec) -> PredictorWeights {
        const RANK: usize = 8;
        PredictorWeights::LowRank(LowRank {
            fc1: self.matrix("fc1", WeightType::F32, RANK, spec.n_embd),
            fc2: self.matrix("fc2", WeightType::F32, self.options.n_ff, RANK),
            threshold: 0.9,
        })
    }
}

/// A matrix of the given type from f32 values; types without an encoder are refused.
///
/// # Panics
/// If the type has no encoder or the shape does not fit it.
pub fn encoded(name: &str, ty: WeightType, n_rows: usize, n_cols: usize, values: &[f32]) -> WeightMatrix {
    let row_bytes = ty.row_bytes(n_cols).expect("rows are whole blocks");
    let mut bytes = vec![0; row_bytes * n_rows];
    for (row, out) in values.chunks_exact(n_cols).zip(bytes.chunks_exact_mut(row_bytes)) {
        block::encode_row(ty, row, out).expect("finite values of a type with an encoder");
    }
    WeightMatrix::try_new(name, ty, n_rows, n_cols, WeightBytes::from_vec(bytes)).expect("the shape fits")
}
