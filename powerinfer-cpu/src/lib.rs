//! The CPU backend of powerinfer.
mod input;
mod kernel;
mod level;
mod pool;

#[cfg(target_arch = "x86_64")]
pub use level::Avx2;
pub use level::CpuLevel;
pub use pool::{Pool, default_threads};
