//! What the operators of powerinfer mean.
//!
//! This is the one leaf of the workspace: every other crate uses it and it uses none of them. It holds
//!
//! - [`LayerId`], [`NeuronId`], … and the sets [`NeuronSet`] and [`ActiveBatch`],
//! - the block formats of quantised weights ([`block`]) and the list of those we compute ([`WeightType`]),
//! - views of weights ([`WeightMatrix`], [`FfnWeights`], …) and the description of a model ([`ModelSpec`]),
//! - [`HybridBackend`], the trait that every place of computation implements, with its contracts C1 to C9,
//! - [`mod@reference`], a slow backend that is meant to be read, and that every fast one is compared with.
//!
//! It does not know files, tokenizers, threads or instruction sets.
#![forbid(unsafe_code)]

mod backend;
pub mod block;
mod gate_copy;
mod ids;
mod model;
pub mod reference;
mod sets;
mod weight_type;
mod weights;

pub use backend::{
    ActiveMode, BackendError, BackendInfo, FfnInput, HybridBackend, Step, StepCost, StepRow, Ticket,
};
pub use block::ActivationType;
pub use gate_copy::{
    GateCopy, GateCopyError, GateCopyParts, GateInput, find_outlier_columns, sample_outlier_columns,
};
pub use ids::{LayerId, NeuronId, RowId, SeqId, TokenId};
pub use model::{Activation, BlockKind, Gating, ModelSpec, Norm, NormKind, Rope, RopeKind, RopeScaling};
pub use sets::{ActiveBatch, NeuronSet};
pub use weight_type::WeightType;
pub use weights::{
    DensePart, DownWeights, EmbeddingWeights, FfnWeights, HeadWeights, LayerWeights, Linear, LowRank,
    NormWeights, PredictorWeights, ShapeError, WeightBytes, WeightMatrix, WeightOwner,
};
