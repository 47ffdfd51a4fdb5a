//! LLM inference for models whose FFN neurons fire sparsely: the facade over [`powerinfer_core`], which it
//! re-exports whole. The programs in `examples/` belong to it.
#![forbid(unsafe_code)]

#[doc(inline)]
pub use powerinfer_core::*;

/// The README's examples are compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
