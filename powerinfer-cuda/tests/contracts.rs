//! The backend on the emulated device keeps the contracts of the trait.

#[path = "support/no_traffic.rs"]
mod no_traffic;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use powerinfer_cuda::CudaKvType;
use powerinfer_sparse_ops::{HybridBackend, ModelSpec};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure};
use powerinfer_testing::conformance::{self, Subject};
use powerinfer_testing::tolerance::NMSE_F32;

use no_traffic::NoTraffic;
use support::{EmulatedGpu, backend_with, is_emulated};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn contracts_hold_on_the_emulated_device() {
    if !is_emulated() {
        return;
    }
    for kv_type in [CudaKvType::F32, CudaKvType::F16] {
        let own_allocs = Arc::new(AtomicU64::new(0));
        let make = |seed: u64, is_late: bool| {
            let own_allocs = Arc::clone(&own_allocs);
            move |spec: Arc<ModelSpec>| -> Box<dyn HybridBackend> {
                let gpu = EmulatedGpu::new(seed, is_late, Arc::clone(&own_allocs));
                Box::new(NoTraffic(Box::new(
                    backend_with(&spec, kv_type, gpu, None).expect("there is memory"),
                )))
            }
        };
        let subject = Subject {
            make: &make(1, true),
            same_bits: &[&make(2, false)],
            count_allocations: Some(&|work| {
                let before = own_allocs.load(Ordering::SeqCst);
                let ((), stats) = measure(work);
                stats.n_allocs - (own_allocs.load(Ordering::SeqCst) - before)
            }),
            nmse_limit: NMSE_F32,
            kv_value_bytes: if kv_type == CudaKvType::F16 { 2 } else { 4 },
        };
        match kv_type {
            CudaKvType::F32 => conformance::run(&subject),
            // Rounded keys may move a score over the predictor's threshold, so what is compared with the reference is
            // left to the F32 cache and to `caches_of_f16_stay_close_to_the_reference`.
            CudaKvType::F16 => conformance::c7_the_caller_owns_lengths(&subject),
        }
    }
}
