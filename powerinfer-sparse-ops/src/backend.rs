//! [`HybridBackend`]: a place that holds some neurons of each layer and perhaps the dense parts, and computes
//! with what it holds.

use std::ops::Range;

use crate::{
    ActiveBatch, DensePart, FfnWeights, LayerId, NeuronId, NeuronSet, PredictorWeights, SeqId, ShapeError,
    TokenId, WeightMatrix, WeightType,
};

/// Which neurons of the FFN are computed. The text of `Dense` and `Exact` is the same, bit for bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ActiveMode {
    /// Every row is read.
    #[default]
    Dense,
    /// The gate (or, without one, the up projection) is computed first; a neuron whose activation is exactly
    /// zero reads nothing more. Same result as `Dense`. With an activation that has no exact zeros this is
    /// `Dense`.
    Exact,
    /// Only the neurons that the predictor names, and of those only the ones that really fire.
    Predictor,
}

impl ActiveMode {
    /// The name used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Exact => "exact",
            Self::Predictor => "predictor",
        }
    }
}

/// One token of a step: its sequence, its position and its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRow {
    /// KV cache that the token is written to and attends over.
    pub seq: SeqId,
    /// Absolute position; it attends over positions `0..=pos` of its sequence.
    pub pos: u32,
    /// Vocabulary id.
    pub token: TokenId,
}

/// A batch of tokens that pass through the layers together. Rows of one sequence are in ascending,
/// contiguous positions.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The tokens.
    pub rows: &'a [StepRow],
    /// Which neurons are computed.
    pub mode: ActiveMode,
}

/// What the owners of neurons get for one layer: the FFN's normed input and the active sets.
///
/// The engine makes one and reuses it, so that a step does not allocate.
#[derive(Clone, Debug, Default)]
pub struct FfnInput {
    /// `[n_rows, n_embd]`.
    pub x: Vec<f32>,
    /// One set a row. In mode `Dense` and `Exact` all neurons are in it.
    pub active: ActiveBatch,
    /// How the sets came about; owners skip zero activations unless it is `Dense`.
    pub mode: ActiveMode,
}

impl FfnInput {
    /// Makes room for `max_rows` tokens.
    pub fn with_capacity(max_rows: usize, n_embd: usize, max_n_ff: usize) -> Self {
        Self {
            x: Vec::with_capacity(max_rows * n_embd),
            active: ActiveBatch::with_capacity(max_rows, max_n_ff),
            mode: ActiveMode::Dense,
        }
    }
}

/// Proof that a backend has started on a layer's FFN. Not `Clone`: it is finished once (C4).
#[must_use = "the partial sum is lost unless `ffn_finish` takes the ticket"]
#[derive(Debug)]
pub struct Ticket {
    /// The layer that was started.
    pub layer: LayerId,
    /// Rows of the step.
    pub n_rows: usize,
    /// For the backend's own use, to find the work again.
    pub slot: u32,
}

/// What a backend read, moved and computed since the last [`HybridBackend::take_cost`].
///
/// A weight row counts once for a step however many tokens of the step used it, since that is how often it
/// comes from memory; embedding rows count once a token. Row counts are (row, token) pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCost {
    /// Bytes of weights read, predictor included.
    pub weight_bytes: u64,
    /// Of these, bytes of predictors.
    pub predictor_bytes: u64,
    /// Bytes of the KV cache read by attention.
    pub kv_bytes: u64,
    /// Bytes moved to the backend.
    pub bytes_in: u64,
    /// Bytes moved from the backend.
    pub bytes_out: u64,
    /// Bytes of weights moved to the backend between steps, not in `bytes_in`.
    pub swapped_bytes: u64,
    /// (gate row, token) products computed; 0 without gating.
    pub gate_rows: u64,
    /// (up row, token) products computed.
    pub up_rows: u64,
    /// (down row, token) products computed.
    pub down_rows: u64,
    /// (neuron, token) pairs that were held and in the active sets.
    pub active_neurons: u64,
    /// (neuron, token) pairs whose hidden value was computed and is not zero: those that really fired.
    pub fired_neurons: u64,
    /// (neuron, token) pairs that were held.
    pub owned_neurons: u64,
}

impl std::ops::AddAssign for StepCost {
    fn add_assign(&mut self, o: Self) {
        self.weight_bytes += o.weight_bytes;
        self.predictor_bytes += o.predictor_bytes;
        self.kv_bytes += o.kv_bytes;
        self.bytes_in += o.bytes_in;
        self.bytes_out += o.bytes_out;
        self.swapped_bytes += o.swapped_bytes;
        self.gate_rows += o.gate_rows;
        self.up_rows += o.up_rows;
        self.down_rows += o.down_rows;
        self.active_neurons += o.active_neurons;
        self.fired_neurons += o.fired_neurons;
        self.owned_neurons += o.owned_neurons;
    }
}

/// What a backend is, for summaries and placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// Short name: `cpu`, `reference`, …
    pub name: String,
    /// What it runs on, for people: instruction set, threads, device name.
    pub description: String,
    /// Memory for weights and caches, in bytes; `None` where the host's memory is the limit.
    pub memory_bytes: Option<u64>,
    /// Whether `ffn_start` returns while the work goes on, so that others can work meanwhile.
    pub asynchronous: bool,
}

/// Why a backend cannot take a weight or a sequence. Step-time calls do not fail: their shapes were proven at
/// load (C9).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// No kernel for this type in this role.
    #[error(
        "`{tensor}` is {ty}, for which {backend} has no kernel as {role}; supported: {}",
        type_names(.supported)
    )]
    UnsupportedType {
        /// Backend name.
        backend: String,
        /// Tensor name.
        tensor: String,
        /// Its type.
        ty: WeightType,
        /// What the tensor is for.
        role: &'static str,
        /// What would be taken.
        supported: Vec<WeightType>,
    },
    /// A weight has another shape than the model asks for.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Keys and values are to be kept in blocks that do not divide a head.
    #[error(
        "{backend} keeps {kv_type} keys and values in blocks of {block_len}, and the model's heads have {head_dim} values"
    )]
    KvBlocks {
        /// Backend name.
        backend: String,
        /// The type asked for.
        kv_type: &'static str,
        /// Values of a block.
        block_len: usize,
        /// Values of a head.
        head_dim: usize,
    },
    /// Not enough memory.
    #[error("{backend} needs {need_bytes} bytes for {what}, {have_bytes} are left")]
    OutOfMemory {
        /// Backend name.
        backend: String,
        /// What the memory is for.
        what: String,
        /// Bytes asked for.
        need_bytes: u64,
        /// Bytes left.
        have_bytes: u64,
    },
    /// The machine lacks what the backend runs on.
    #[error("{backend} is not available: {reason}")]
    Unavailable {
        /// Backend name.
        backend: String,
        /// What is missing.
        reason: String,
    },
}

impl BackendError {
    /// Refuses a weight of a type that is not among those `supported`.
    ///
    /// # Errors
    /// [`BackendError::UnsupportedType`].
    pub fn check_type(
        backend: &str,
        matrix: &WeightMatrix,
        role: &'static str,
        supported: &[WeightType],
    ) -> Result<(), Self> {
        if supported.contains(&matrix.ty()) {
            return Ok(());
        }
        Err(Self::UnsupportedType {
            backend: backend.to_owned(),
            tensor: matrix.name().to_owned(),
            ty: matrix.ty(),
            role,
            supported: supported.to_vec(),
        })
    }
}

fn type_names(types: &[WeightType]) -> String {
    types.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ")
}

/// A place that holds some neurons of each layer and, where it is **home**, dense parts and the residual stream
/// `h [n_rows, n_embd]`.
///
/// The token tables, each layer and the head have a home; most often it is the same backend. One engine loop owns
/// the backends and calls them in this order; only a home gets the calls marked (home):
///
/// ```text
/// embed (home of the tables)
/// each layer:  if its home is another than before: hidden of that one, set_hidden (home)
///              where home owns all its neurons, whole_layer (home), and if that is not for it:
///              parallel block:    ffn_input (home), attend (home)
///              sequential block:  attend (home), ffn_input (home)
///              ffn_start on every owner, asynchronous ones first
///              ffn_finish on each but home, in fixed order; ffn_close (home), or ffn_add if it owns none
/// head (home)
/// ```
///
/// Contracts, each a test of the conformance suite:
///
/// - **C1** `ffn_finish` adds the sum over owned ∩ active neurons to `acc`; it never overwrites.
/// - **C2** Active neurons that are not owned are ignored. Owning none is legal and adds zero.
/// - **C3** Inputs may be reused by the caller as soon as `ffn_start` returns.
/// - **C4** A ticket is consumed once, by the backend that made it.
/// - **C5** After load and `reserve`, no step allocates on the host heap.
/// - **C6** Same inputs and same placement give the same bits for any number of worker threads and any timing.
/// - **C7** The caller owns sequence lengths: rewinding and cancelling need no call, forking is `kv_copy`.
/// - **C8** `take_cost` is exact.
/// - **C9** Shapes are proven at load; a wrong shape at step time is a bug and panics with both shapes.
pub trait HybridBackend: Send {
    /// What this backend is.
    fn info(&self) -> BackendInfo;

    /// Takes one piece of the dense parts; called on its home only. A backend keeps keys and values for the layers
    /// whose dense part it has.
    ///
    /// # Errors
    /// An unsupported type, a wrong shape, or too little memory.
    fn load_dense(&mut self, part: DensePart) -> Result<(), BackendError>;

    /// Takes the neurons `owned` of a layer; called once a layer.
    ///
    /// # Errors
    /// An unsupported type, a wrong shape, or too little memory.
    fn load_ffn(
        &mut self,
        layer: LayerId,
        weights: FfnWeights,
        owned: &NeuronSet,
    ) -> Result<(), BackendError>;

    /// Between two steps: no longer holds the neurons `leave` of a layer and holds as many others, `enter`, in their
    /// place. `weights` are those of [`HybridBackend::load_ffn`]. Says whether it did; backends whose neurons stay where
    /// they are leave it out.
    fn swap_neurons(
        &mut self,
        layer: LayerId,
        weights: &FfnWeights,
        leave: &[NeuronId],
        enter: &[NeuronId],
    ) -> bool {
        let _ = (layer, weights, leave, enter);
        false
    }

    /// Takes the predictor of a layer; called on home only. Without one, mode `Predictor` computes the layer
    /// as `Exact`.
    ///
    /// # Errors
    /// An unsupported type, a wrong shape, or too little memory.
    fn load_predictor(&mut self, layer: LayerId, weights: PredictorWeights) -> Result<(), BackendError>;

    /// Called after the last weight has been taken: the backend brings them where it computes from, and calls
    /// `progress(bytes done, bytes in all)` meanwhile. Backends that compute on weights where they lie do nothing.
    ///
    /// # Errors
    /// Too little memory.
    fn load_done(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), BackendError> {
        let _ = progress;
        Ok(())
    }

    /// Makes a sequence of up to `kv_len` positions, and room for steps of up to `max_rows` tokens. May be
    /// called again for a known sequence with a larger length; what it held stays.
    ///
    /// # Errors
    /// Too little memory.
    fn reserve(&mut self, seq: SeqId, kv_len: usize, max_rows: usize) -> Result<(), BackendError>;

    /// Copies positions `range` of one sequence to the same positions of another; both are reserved.
    fn kv_copy(&mut self, from: SeqId, to: SeqId, range: Range<u32>);

    /// Forgets a sequence.
    fn release(&mut self, seq: SeqId);

    /// (home) Starts a step: `h = token rows (+ position rows)`.
    fn embed(&mut self, step: &Step<'_>);

    /// (home) Goes on with a step that another home has begun, whose residual stream this is.
    ///
    /// # Shapes
    /// `h [n_rows, n_embd]`.
    fn set_hidden(&mut self, step: &Step<'_>, h: &[f32]);

    /// (home) Runs a layer of which it owns all neurons, `h = layer(h)`, with nothing leaving the backend, and says
    /// whether it did; if not, the engine makes the single calls. Backends that gain nothing by it leave it out.
    fn whole_layer(&mut self, layer: LayerId, step: &Step<'_>) -> bool {
        let _ = (layer, step);
        false
    }

    /// (home) `h += attention(norm(h))`; writes the keys and values of the step's rows. In a parallel block
    /// the FFN's input has been taken before.
    fn attend(&mut self, layer: LayerId, step: &Step<'_>);

    /// (home) Writes the FFN's normed input and the active sets into `out`, which it resizes.
    fn ffn_input(&mut self, layer: LayerId, step: &Step<'_>, out: &mut FfnInput);

    /// Starts on the owned ∩ active neurons.
    fn ffn_start(&mut self, layer: LayerId, input: &FfnInput) -> Ticket;

    /// Adds the partial sum to `acc [n_rows, n_embd]`.
    fn ffn_finish(&mut self, ticket: Ticket, acc: &mut [f32]);

    /// (home) `h += acc (+ down bias)`.
    fn ffn_add(&mut self, layer: LayerId, acc: &[f32]);

    /// (home) `h += acc + its own partial sum (+ down bias)`; what is in `acc` afterwards is of no meaning. For
    /// backends whose partial sum need not come to the host.
    fn ffn_close(&mut self, ticket: Ticket, acc: &mut [f32]) {
        let layer = ticket.layer;
        self.ffn_finish(ticket, acc);
        self.ffn_add(layer, acc);
    }

    /// (home) Logits of the rows `rows` of the step.
    ///
    /// # Shapes
    /// `logits [rows.len(), n_vocab]`.
    fn head(&mut self, rows: Range<usize>, logits: &mut [f32]);

    /// (home) Copies the residual stream out, for traces.
    ///
    /// # Shapes
    /// `out [n_rows, n_embd]`.
    fn hidden(&self, out: &mut [f32]);

    /// Begins or ends counting which neurons fire; backends that cannot count do nothing.
    fn record_fired(&mut self, on: bool) {
        let _ = on;
    }

    /// Adds to `counts` for how many tokens each held neuron of a layer had a hidden value other than zero, since
    /// counting began or the last call, and says whether it counts.
    ///
    /// # Shapes
    /// `counts [n_ff]`.
    fn take_fired(&mut self, layer: LayerId, counts: &mut [u64]) -> bool {
        let _ = (layer, counts);
        false
    }

    /// Adds to `counts` how many of the held neurons of a layer had a hidden value other than zero, for each row of the
    /// last step since counting began, and says whether it counts them. Backends that only know sums over rows leave it
    /// out.
    ///
    /// # Shapes
    /// `counts [n_rows]`.
    fn take_fired_by_row(&mut self, layer: LayerId, counts: &mut [u32]) -> bool {
        let _ = (layer, counts);
        false
    }

    /// What was read, moved and computed since the last call.
    fn take_cost(&mut self) -> StepCost;
}
