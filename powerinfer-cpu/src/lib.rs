//! The CPU backend of powerinfer: kernels, worker pool, and [`CpuBackend`] on top of them.
//!
//! - [`CpuLevel`] is the instruction set, detected once; kernels for each are mirror files that one safe
//!   module chooses from.
//! - [`Pool`] hands out the chunks of one job after another to threads that persist.
//! - [`CpuBackend`] implements [`HybridBackend`](powerinfer_sparse_ops::HybridBackend).
//!
//! It does not know files, placements or other backends. Unsafe code is limited to the pool and to the calls
//! into functions with target features; see `docs/unsafe.md`.
//!
//! ```
//! use powerinfer_cpu::{CpuLevel, default_threads};
//!
//! let level = CpuLevel::detect();
//! assert!(CpuLevel::available().contains(&level));
//! assert!(default_threads() >= 1);
//! ```
//!
//! To see how a step is computed, read `backend.rs`, then `ffn.rs` and `attention.rs`; to add a kernel, start at
//! `kernel/mod.rs`.

mod aligned;
mod attention;
mod backend;
mod certificate;
mod cores;
mod ffn;
mod input;
mod kernel;
mod level;
mod matmul;
mod memory;
mod ops;
mod planar;
mod pool;
mod predict;
mod relaid;
mod rows;

pub use attention::KvType;
pub use backend::{Certified, CpuBackend, CpuOptions, WeightHome};
pub use cores::default_threads;
pub use level::CpuLevel;
#[cfg(target_arch = "aarch64")]
pub use level::Neon;
#[cfg(target_arch = "x86_64")]
pub use level::{Avx2, Avx512};
pub use pool::{Columns, Pool};
