//! LLM inference with hot and cold neurons.
#![forbid(unsafe_code)]

pub mod chat;
mod devices;
mod forward;
mod generate;
mod load;
mod model;
pub mod sampling;
mod session;
mod spec;
mod stats;
pub mod text;
pub mod tokenizer;
mod vocab;

pub use devices::Device;
#[cfg(feature = "cpu")]
pub use devices::{CpuLevel, CpuOptions, KvType, default_threads};
pub use forward::Probe;
pub use generate::{FinishReason, GenerateError, GenerateOptions, Generation, Piece};
pub use load::{LoadError, LoadOptions, NoteLevel, Notes};
pub use model::Model;
pub use powerinfer_sparse_ops::reference::Rounding;
pub use powerinfer_sparse_ops::{Activation, ActiveMode, BackendInfo, ModelSpec, StepCost, TokenId};
pub use session::{CancelToken, Session, SessionError, SessionOptions};
pub use spec::SUPPORTED_ARCHS;
pub use stats::{PhaseStats, SessionStats};
pub use vocab::read_tokenizer;
