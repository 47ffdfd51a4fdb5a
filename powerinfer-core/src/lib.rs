//! LLM inference for models whose FFN neurons fire sparsely.
//!
//! A [`Model`] is opened from a GGUF or PWRI file; a [`Session`] is one text over its weights;
//! [`Session::generate`] streams what follows a prompt:
//!
//! ```no_run
//! use powerinfer_core::tokenizer::Encode;
//! use powerinfer_core::{GenerateOptions, LoadOptions, Model, SessionOptions};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let model = Model::open("model.gguf", &LoadOptions::default())?;
//!     let mut session = model.session(&SessionOptions::default())?;
//!     let how = Encode { add_special: true, parse_special: false };
//!     let prompt = model.tokenizer().encode("Once upon a time", how)?;
//!     for piece in session.generate(&prompt, GenerateOptions::default())? {
//!         print!("{}", piece?.text);
//!     }
//!     Ok(())
//! }
//! ```
//!
//! What a model does with its neurons is a mode ([`ActiveMode`]): `dense` reads every row; `exact` computes the
//! gate first and skips the rest of a neuron that is exactly zero, with the same bits as `dense`; `predictor`
//! reads only the neurons that the predictors of a PWRI file, or a [`calibration`], name. [`Session::stats`] says what was read.
//!
//! # What it does not do
//!
//! It prints nothing, reads no environment variable and keeps no global state. It has no server, and it knows
//! backends only as [`HybridBackend`]s, all of them named in one module.
//!
//! # Where to read next
//!
//! [`Model`] for loading and the rule for activations, [`Session`] for steps, [`GenerateOptions`] and
//! [`sampling`] for choosing tokens, [`tokenizer`] and [`chat`] for text, and `forward.rs` in the source for the
//! forward pass of every family.
//!
//! # Features
//!
//! `cpu` (default): the CPU backend. Without it only the slow reference backend is there.
#![forbid(unsafe_code)]

pub mod calibration;
pub mod chat;
mod devices;
mod forward;
mod generate;
mod load;
mod model;
pub mod placement;
pub mod profile;
pub mod sampling;
mod session;
mod spec;
mod stats;
pub mod text;
pub mod tokenizer;
mod vocab;

// Loading and running.
#[cfg(feature = "cpu")]
pub use devices::{Certified, CpuLevel, CpuOptions, KvType, WeightHome, default_threads};
#[cfg(feature = "cuda")]
pub use devices::{CudaDeviceInfo, CudaKvType, CudaOptions, cuda_devices};
pub use devices::{Device, MakeBackend};
pub use load::{CalibrationChoice, LoadError, LoadOptions, LoadProgress, NoteLevel, Notes, calibration_path};
pub use model::Model;
pub use session::{CancelToken, Session, SessionError, SessionOptions};
pub use spec::SUPPORTED_ARCHS;

// Text.
pub use generate::{FinishReason, GenerateError, GenerateOptions, Generation, Piece};

pub use vocab::read_tokenizer;

// Measuring and watching.
pub use forward::Probe;
pub use stats::{PhaseStats, SessionStats};

// What the parts of this crate's interface are made of.
pub use powerinfer_gguf::{GgufError, GgufFile, GgufModel};
pub use powerinfer_predictor::CalibrationFile;
pub use powerinfer_sparse_ops::reference::Rounding;
pub use powerinfer_sparse_ops::{
    Activation, ActiveMode, BackendError, BackendInfo, HybridBackend, LayerId, ModelSpec, StepCost, TokenId,
};
