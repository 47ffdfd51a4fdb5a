//! Hot/cold LLM inference.
#[doc(inline)]
pub use powerinfer_core::*;
