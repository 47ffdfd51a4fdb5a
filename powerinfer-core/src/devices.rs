//! The one module that names backend crates.

use std::sync::Arc;

use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{BackendError, HybridBackend, ModelSpec};

#[cfg(feature = "cpu")]
pub use powerinfer_cpu::{Certified, CpuLevel, CpuOptions, KvType, WeightHome, default_threads};
#[cfg(feature = "cuda")]
pub use powerinfer_cuda::{CudaKvType, CudaOptions, DeviceInfo as CudaDeviceInfo, devices as cuda_devices};

/// What computes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// The CPU, with threads and the best instruction set that is there.
    #[cfg(feature = "cpu")]
    Cpu(CpuOptions),
    /// An NVIDIA GPU; an error where the machine has no driver or no device that fits.
    #[cfg(feature = "cuda")]
    Cuda(CudaOptions),
    /// The slow backend that the others are compared with.
    Reference(Rounding),
    /// A backend that another crate brings.
    Other(MakeBackend),
}

/// Makes an empty backend for a model.
#[derive(Clone)]
pub struct MakeBackend(Arc<MakeFn>);

type MakeFn = dyn Fn(Arc<ModelSpec>) -> Result<Box<dyn HybridBackend>, BackendError> + Send + Sync;

impl MakeBackend {
    /// Calls `make`.
    pub fn new(
        make: impl Fn(Arc<ModelSpec>) -> Result<Box<dyn HybridBackend>, BackendError> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(make))
    }
}

impl std::fmt::Debug for MakeBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MakeBackend(..)")
    }
}

impl Default for Device {
    #[cfg(feature = "cpu")]
    fn default() -> Self {
        Self::Cpu(CpuOptions::default())
    }

    #[cfg(not(feature = "cpu"))]
    fn default() -> Self {
        Self::Reference(Rounding::None)
    }
}

impl Device {
    /// The same device for weights that are loaded for a moment: nothing of it is kept in files.
    pub(crate) fn to_measure(&self) -> Self {
        match self {
            #[cfg(feature = "cpu")]
            Self::Cpu(options) => Self::Cpu(CpuOptions { home: WeightHome::HugePages, ..options.clone() }),
            other => other.clone(),
        }
    }

    pub(crate) fn backend(&self, spec: &Arc<ModelSpec>) -> Result<Box<dyn HybridBackend>, BackendError> {
        Ok(match self {
            #[cfg(feature = "cpu")]
            Self::Cpu(options) => {
                Box::new(powerinfer_cpu::CpuBackend::new(Arc::clone(spec), options.clone())?)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(options) => {
                Box::new(powerinfer_cuda::CudaBackend::new(Arc::clone(spec), options.clone())?)
            }
            Self::Other(make) => make.0(Arc::clone(spec))?,
            Self::Reference(rounding) => Box::new(ReferenceBackend::new(Arc::clone(spec), *rounding)),
        })
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use powerinfer_testing::tiny::{TinyModel, TinyOptions};

    #[test]
    fn a_cuda_device_that_is_not_there_is_an_error_with_the_reason() {
        let model = TinyModel::new(TinyOptions::default());
        let device = Device::Cuda(CudaOptions { device: 1 << 20, ..CudaOptions::default() });
        let error = device.backend(&model.spec).err().expect("nobody has so many devices");
        assert!(matches!(error, BackendError::Unavailable { .. }), "{error}");
    }
}
