//! The engine over the CPU and emulated devices: wherever dense parts and neurons lie, the logits are those of plain loops
//! and the greedy text is the same.

#[path = "support/budgets.rs"]
mod budgets;
#[path = "support/goldens.rs"]
mod goldens;
#[expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]
#[path = "../../powerinfer-core/tests/support/mod.rs"]
mod model_file;
mod support;

use std::sync::Arc;
use std::time::Duration;

use powerinfer_core::placement::AdaptiveOptions;
use powerinfer_core::{ActiveMode, CpuOptions, Device, KvType, LoadOptions, MakeBackend, Rounding, TokenId};
use powerinfer_cuda::CudaKvType;
use powerinfer_sparse_ops::HybridBackend;
use powerinfer_testing::alloc_guard::CountingAllocator;
use powerinfer_testing::tiny::Random;
use powerinfer_testing::tolerance::{NMSE_F32, assert_close};

use model_file::split::{random_assignment, run};
use model_file::{N_VOCAB, TinyFile};
use support::{EmulatedGpu, backend_with, is_emulated};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const N_PROMPT: usize = 9;
const N_TEXT: usize = 8;

fn emulated(seed: u64, is_late: bool) -> Device {
    Device::Other(MakeBackend::new(move |spec| {
        let gpu = EmulatedGpu::new(seed, is_late, Arc::default());
        Ok(Box::new(backend_with(&spec, CudaKvType::F32, gpu, None)?) as Box<dyn HybridBackend>)
    }))
}

#[test]
fn fifty_placements_on_the_cpu_and_devices_give_the_logits_of_plain_loops_and_the_same_text() {
    if !is_emulated() {
        return;
    }
    let mut swapped_bytes = 0;
    for seed in 0..50 {
        let mut random = Random::new(500 + seed);
        let is_sparse = seed % 2 == 0;
        let file = || if is_sparse { TinyFile::sparse() } else { TinyFile::dense() };
        let mode = match (is_sparse, random.below(3)) {
            (_, 0) => ActiveMode::Dense,
            (_, 1) | (false, _) => ActiveMode::Exact,
            (true, _) => ActiveMode::Predictor,
        };
        let prompt: Vec<TokenId> = (0..N_PROMPT).map(|_| TokenId(random.below(N_VOCAB) as u32)).collect();
        let reference = LoadOptions { device: Device::Reference(Rounding::None), ..LoadOptions::default() };
        let want = run(&file().load_with(&reference).expect("the file loads"), mode, &prompt, N_TEXT);

        let n_devices = 1 + random.below(2);
        let accelerators = (0..n_devices).map(|_| emulated(seed, random.below(2) == 0)).collect();
        let eager = AdaptiveOptions { half_life: 8.0, hysteresis: 0.1, bytes_per_token: 4 * 768 };
        let options = LoadOptions {
            device: Device::Cpu(CpuOptions { threads: 2, kv_type: KvType::F32, ..CpuOptions::default() }),
            accelerators,
            assignment: Some(random_assignment(&mut random, 1 + n_devices)),
            adaptive: (n_devices == 1 && random.below(2) == 0).then_some(eager),
            n_batch: [1, 4, 256][random.below(3)],
            ..LoadOptions::default()
        };
        let split = file().load_with(&options).expect("the file loads");
        let got = run(&split, mode, &prompt, N_TEXT);
        let what = format!("seed {seed}, sparse {is_sparse}, {mode:?}, {n_devices} devices");
        assert_close(&what, &got.logits, &want.logits, NMSE_F32);
        assert_eq!(got.text, want.text, "{what}: text");
        swapped_bytes += got.swapped_bytes;
    }
    assert!(swapped_bytes > 0, "no run moved neurons");
}

#[test]
fn logits_and_text_are_those_of_the_original_engine() {
    if !is_emulated() {
        return;
    }
    let mut lines = Vec::new();
    let refused = goldens::check(&emulated(5, true), &mut |line| lines.push(line)).expect("all goldens load");
    assert_eq!(lines.len(), 8, "{lines:?}");
    // Its predictors are Q5_0.
    assert_eq!(refused, ["llama-mixed-attn-q8_0"], "{lines:?}");
}

#[test]
fn a_budget_decides_how_much_is_on_the_device() {
    if !is_emulated() {
        return;
    }
    let shape = budgets::Shape {
        name: "toy",
        n_layer: 3,
        n_embd: 64,
        n_ff: 352,
        n_head: 4,
        n_vocab: 300,
        latency: 0.0,
    };
    let mut lines = Vec::new();
    let placed = budgets::decode(shape, &emulated(6, false), 1 << 30, Duration::from_secs(60), &mut |line| {
        lines.push(line)
    })
    .expect("every budget loads");
    assert_eq!(placed.first(), Some(&0), "{lines:?}");
    assert!(placed.is_sorted() && placed.last() > Some(&0), "{lines:?}");
}
