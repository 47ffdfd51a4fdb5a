//! What is planned for a device is what the backend allocates there, or more: with the plan's sum as its limit, everything
//! is loaded and runs.

#[expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]
#[path = "../../powerinfer-core/tests/support/mod.rs"]
mod model_file;
mod support;

use std::sync::Arc;

use powerinfer_core::placement::{
    Accelerator, AdaptiveOptions, Bandwidth, Budget, Host, PlanOptions, Statistics,
};
use powerinfer_core::{Device, LoadOptions, MakeBackend, Model, SessionOptions, TokenId};
use powerinfer_cuda::CudaKvType;
use powerinfer_sparse_ops::HybridBackend;
use powerinfer_testing::alloc_guard::CountingAllocator;

use model_file::TinyFile;
use support::{EmulatedGpu, backend_with, is_emulated};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A plan for a fast device with so many bytes.
fn plan_for(budget: u64, n_ctx: usize, granule: u64, kv_value_bytes: u64, n_seq: usize) -> PlanOptions {
    let host = Host { name: "host".to_owned(), bandwidth: Bandwidth { dense: 50e9, gather: 30e9 } };
    let device = Accelerator {
        name: "device".to_owned(),
        free_bytes: 24 << 30,
        budget: Budget::Bytes(budget),
        bandwidth: Bandwidth { dense: 800e9, gather: 600e9 },
        link: 1e15,
        latency: 0.0,
        granule,
        kv_value_bytes,
    };
    let statistics = Statistics::Unknown { rate: 0.2 };
    PlanOptions { n_ctx: Some(n_ctx), n_seq, ..PlanOptions::new(host, vec![device], statistics) }
}

/// A device that refuses more than `limit` bytes.
fn limited(limit: u64, granule: u64, kv_type: CudaKvType) -> Device {
    Device::Other(MakeBackend::new(move |spec| {
        let gpu = EmulatedGpu::new(1, false, Arc::default()).with_granule(granule);
        Ok(Box::new(backend_with(&spec, kv_type, gpu, Some(limit))?) as Box<dyn HybridBackend>)
    }))
}

#[test]
fn a_plan_holds_all_that_the_backend_allocates() {
    if !is_emulated() {
        return;
    }
    let (mut n_split, mut n_home) = (0, 0);
    for is_sparse in [true, false] {
        let file = || if is_sparse { TinyFile::sparse() } else { TinyFile::dense() };
        for (n_batch, n_ctx, n_seq, kv) in [
            (1, 7, 1, CudaKvType::F16),
            (8, 64, 2, CudaKvType::F32),
            (33, 600, 1, CudaKvType::F16),
            (256, 64, 3, CudaKvType::F32),
        ] {
            let value_bytes = if kv == CudaKvType::F32 { 4 } else { 2 };
            let plan = |budget, granule| plan_for(budget, n_ctx, granule, value_bytes, n_seq);
            // Neurons that move are counted, in memory of the device.
            let adaptive = (n_batch > 8).then(AdaptiveOptions::default);
            let options =
                |plan| LoadOptions { plan: Some(plan), n_batch, adaptive, ..LoadOptions::default() };
            let step =
                Model::plan(&file().model(), None, &options(plan(u64::MAX, 256))).expect("it is planned");
            let step = step.expect("it is asked for").0.devices[0].bytes.steps;
            // To the byte, and in the pages of a driver.
            for granule in [256, 1 << 21] {
                for more in [30_000, 100_000, 400_000, 1_000_000, 1 << 30] {
                    let options = options(plan((step + more).next_multiple_of(granule), granule));
                    let planned = Model::plan(&file().model(), None, &options).expect("it is planned");
                    let on = planned.expect("it is asked for").0.devices.remove(0);
                    let what =
                        format!("sparse {is_sparse}, batch {n_batch}, context {n_ctx}, {more}: {on:?}");
                    if on.bytes.total() == 0 {
                        continue;
                    }
                    n_split += usize::from(on.n_neurons > 0 && on.n_neurons < on.of_neurons);
                    n_home += usize::from(on.n_homes > 0 && on.has_head);
                    let device = limited(on.bytes.total(), granule, kv);
                    let options = LoadOptions { accelerators: vec![device], ..options };
                    let model = file().load_with(&options).unwrap_or_else(|e| panic!("{what}: {e}"));
                    let is_counted = !model.notes().iter().any(|(_, line)| line.contains("no neurons move"));
                    assert!(is_counted, "{what}: {:?}", model.notes());
                    let how = SessionOptions { n_ctx: Some(n_ctx), ..SessionOptions::default() };
                    let prompt = vec![TokenId(5); n_batch.min(n_ctx - 1)];
                    let mut sessions: Vec<_> = (0..n_seq)
                        .map(|_| model.session(&how).unwrap_or_else(|e| panic!("{what}: {e}")))
                        .collect();
                    sessions[0].prefill(&prompt).unwrap_or_else(|e| panic!("{what}: {e}"));
                    sessions[0].decode(TokenId(6)).unwrap_or_else(|e| panic!("{what}: {e}"));
                }
            }
        }
    }
    assert!(
        n_split > 3 && n_home > 3,
        "{n_split} plans with a part of the neurons, {n_home} with homes and head"
    );
}
