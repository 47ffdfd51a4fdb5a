//! The backend on the emulated device keeps the contracts of the trait.

mod support;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use powerinfer_cuda::CudaKvType;
use powerinfer_sparse_ops::{
    BackendError, BackendInfo, DensePart, FfnInput, FfnWeights, HybridBackend, LayerId, ModelSpec, NeuronId,
    NeuronSet, PredictorWeights, SeqId, Step, StepCost, Ticket,
};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure};
use powerinfer_testing::conformance::{self, Subject};
use powerinfer_testing::tolerance::NMSE_F32;

use support::{EmulatedGpu, backend_with, is_emulated};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The suite compares costs with those of a backend that moves nothing; what is moved has tests of its own.
struct NoTraffic(Box<dyn HybridBackend>);

impl HybridBackend for NoTraffic {
    fn info(&self) -> BackendInfo {
        self.0.info()
    }

    fn load_dense(&mut self, part: DensePart) -> Result<(), BackendError> {
        self.0.load_dense(part)
    }

    fn load_ffn(&mut self, layer: LayerId, w: FfnWeights, owned: &NeuronSet) -> Result<(), BackendError> {
        self.0.load_ffn(layer, w, owned)
    }

    fn swap_neurons(
        &mut self,
        layer: LayerId,
        weights: &FfnWeights,
        leave: &[NeuronId],
        enter: &[NeuronId],
    ) -> bool {
        self.0.swap_neurons(layer, weights, leave, enter)
    }

    fn load_predictor(&mut self, layer: LayerId, weights: PredictorWeights) -> Result<(), BackendError> {
        self.0.load_predictor(layer, weights)
    }

    fn reserve(&mut self, seq: SeqId, kv_len: usize, max_rows: usize) -> Result<(), BackendError> {
        self.0.reserve(seq, kv_len, max_rows)
    }

    fn kv_copy(&mut self, from: SeqId, to: SeqId, range: Range<u32>) {
        self.0.kv_copy(from, to, range);
    }

    fn release(&mut self, seq: SeqId) {
        self.0.release(seq);
    }

    fn embed(&mut self, step: &Step<'_>) {
        self.0.embed(step);
    }

    fn set_hidden(&mut self, step: &Step<'_>, h: &[f32]) {
        self.0.set_hidden(step, h);
    }

    fn whole_layer(&mut self, layer: LayerId, step: &Step<'_>) -> bool {
        self.0.whole_layer(layer, step)
    }

    fn attend(&mut self, layer: LayerId, step: &Step<'_>) {
        self.0.attend(layer, step);
    }

    fn ffn_input(&mut self, layer: LayerId, step: &Step<'_>, out: &mut FfnInput) {
        self.0.ffn_input(layer, step, out);
    }

    fn ffn_start(&mut self, layer: LayerId, input: &FfnInput) -> Ticket {
        self.0.ffn_start(layer, input)
    }

    fn ffn_finish(&mut self, ticket: Ticket, acc: &mut [f32]) {
        self.0.ffn_finish(ticket, acc);
    }

    fn ffn_add(&mut self, layer: LayerId, acc: &[f32]) {
        self.0.ffn_add(layer, acc);
    }

    fn ffn_close(&mut self, ticket: Ticket, acc: &mut [f32]) {
        self.0.ffn_close(ticket, acc);
    }

    fn head(&mut self, rows: Range<usize>, logits: &mut [f32]) {
        self.0.head(rows, logits);
    }

    fn hidden(&self, out: &mut [f32]) {
        self.0.hidden(out);
    }

    fn take_cost(&mut self) -> StepCost {
        StepCost { bytes_in: 0, bytes_out: 0, ..self.0.take_cost() }
    }
}

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
