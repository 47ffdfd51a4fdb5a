//! A [`HybridBackend`](powerinfer_sparse_ops::HybridBackend) on NVIDIA GPUs: some neurons of each layer, or whole
//! layers with attention and caches.
//!
//! Nothing of CUDA is needed to build this crate or to start a program that has it. The driver is looked for when a backend
//! is made; without one, or without a device, that is [`BackendError::Unavailable`](powerinfer_sparse_ops::BackendError) with
//! the reason. The kernels (`kernels/README.md`) come as PTX inside the crate and need a driver for CUDA 12.0
//! (R525) or newer and a device of compute capability 6.1 or newer.
//!
//! ```
//! match powerinfer_cuda::devices() {
//!     Ok(devices) => devices.iter().for_each(|d| println!("{}: {} bytes free", d.name, d.free_bytes)),
//!     Err(reason) => println!("{reason}"),
//! }
//! ```
#![deny(unsafe_code)]

mod backend;
mod driver;
#[doc(hidden)]
pub mod gpu;
mod kernels;
mod load;
mod scratch;

pub use backend::{CudaBackend, CudaKvType, CudaOptions};
pub use driver::{DeviceInfo, devices, probe_devices};
