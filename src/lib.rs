//! Hot/cold LLM inference for ReLU-sparse models.
pub use powerinfer_core::*;
