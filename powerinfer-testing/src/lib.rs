//! Test support, not published: tiny models, the conformance suite of [`HybridBackend`], a null backend that
//! only counts traffic, and the limits that results are compared under.
//!
//! [`HybridBackend`]: powerinfer_sparse_ops::HybridBackend
#![deny(unsafe_code)]

pub mod alloc_guard;
pub mod conformance;
pub mod drive;
pub mod mock;
pub mod null;
pub mod tiny;
pub mod tolerance;
