//! The engine over the CPU and emulated devices: wherever dense parts and neurons lie, the logits are those of plain loops
//! and the greedy text is the same.

#[expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]
#[path = "../../powerinfer-core/tests/support/mod.rs"]
mod model_file;
mod support;

use std::sync::Arc;

use powerinfer_core::placement::{AdaptiveOptions, Assignment, LayerAssignment};
use powerinfer_core::{
    ActiveMode, CpuOptions, Device, KvType, LoadOptions, MakeBackend, Model, Rounding, SessionOptions,
    TokenId,
};
use powerinfer_cuda::CudaKvType;
use powerinfer_sparse_ops::{HybridBackend, NeuronId, NeuronSet};
use powerinfer_testing::alloc_guard::CountingAllocator;
use powerinfer_testing::tiny::Random;
use powerinfer_testing::tolerance::{NMSE_F32, assert_close};

use model_file::{N_FF, N_LAYER, N_VOCAB, TinyFile};
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

/// Dense parts and neurons anywhere: each layer all on one backend, or dealt out one by one.
fn random_assignment(random: &mut Random, n_backends: usize) -> Assignment {
    let layers = (0..N_LAYER).map(|_| {
        let is_whole = random.below(3) == 0;
        let one = random.below(n_backends);
        let owner: Vec<usize> =
            (0..N_FF).map(|_| if is_whole { one } else { random.below(n_backends) }).collect();
        let set = |b: usize| {
            let ids = (0..N_FF as u32).filter(|&i| owner[i as usize] == b).map(NeuronId);
            NeuronSet::from_ids(N_FF, ids)
        };
        LayerAssignment { home: random.below(n_backends), owned: (0..n_backends).map(set).collect() }
    });
    let layers = layers.collect();
    Assignment { embed: random.below(n_backends), head: random.below(n_backends), layers }
}

fn greedy(logits: &[f32]) -> TokenId {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)));
    TokenId(best.expect("a vocabulary is not empty") as u32)
}

/// Logits of the prompt's last token and of each token that follows it greedily, and bytes of swapped neurons.
fn run(model: &Model, mode: ActiveMode, prompt: &[TokenId]) -> (Vec<f32>, Vec<TokenId>, u64) {
    let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
    let mut session = model.session(&options).expect("there is memory");
    let mut all = session.prefill(prompt).expect("the prompt fits").to_vec();
    let mut text = vec![greedy(&all)];
    for _ in 1..N_TEXT {
        let logits = session.decode(text[text.len() - 1]).expect("the text fits");
        all.extend_from_slice(logits);
        text.push(greedy(logits));
    }
    (all, text, session.stats().decode.cost.swapped_bytes)
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
        let want = run(&file().load_with(&reference).expect("the file loads"), mode, &prompt);

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
        let got = run(&split, mode, &prompt);
        let what = format!("seed {seed}, sparse {is_sparse}, {mode:?}, {n_devices} devices");
        assert_close(&what, &got.0, &want.0, NMSE_F32);
        assert_eq!(got.1, want.1, "{what}: text");
        swapped_bytes += got.2;
    }
    assert!(swapped_bytes > 0, "no run moved neurons");
}
