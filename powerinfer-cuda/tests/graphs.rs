//! Whole layers that are launched as graphs give the bits of single launches, and graphs live as long as what they were
//! made of.

mod support;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use powerinfer_cuda::{CudaBackend, CudaKvType, CudaOptions};
use powerinfer_sparse_ops::{
    ActiveMode, HybridBackend, LayerId, NeuronId, NeuronSet, SeqId, Step, StepCost, StepRow, TokenId,
};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure};
use powerinfer_testing::tiny::{Family, TinyModel, TinyOptions};

use support::{EmulatedGpu, is_emulated};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const MODES: [ActiveMode; 3] = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];

fn loaded(model: &TinyModel, gpu: EmulatedGpu, options: CudaOptions) -> CudaBackend {
    let mut backend =
        CudaBackend::with_gpu(Arc::clone(&model.spec), Box::new(gpu), options).expect("there is memory");
    model.load_all(&mut backend);
    backend.reserve(SeqId(0), 600, 60).expect("there is memory");
    backend
}

fn row(seq: u32, pos: u32) -> StepRow {
    StepRow { seq: SeqId(seq), pos, token: TokenId((pos * 31 + seq * 7) % 96) }
}

/// A step through whole layers; its logits go to `logits`.
fn whole_step(
    backend: &mut dyn HybridBackend,
    model: &TinyModel,
    rows: &[StepRow],
    mode: ActiveMode,
    logits: &mut [f32],
) {
    let step = Step { rows, mode };
    backend.embed(&step);
    for layer in model.spec.layers() {
        assert!(backend.whole_layer(layer, &step), "layer {layer} is whole");
    }
    backend.head(0..rows.len(), logits);
}

fn step(backend: &mut CudaBackend, model: &TinyModel, rows: &[StepRow], mode: ActiveMode) -> Vec<f32> {
    let mut logits = vec![0.0; rows.len() * model.spec.n_vocab];
    whole_step(backend, model, rows, mode, &mut logits);
    logits
}

fn counted(n: &[AtomicU64; 3]) -> [u64; 3] {
    [0, 1, 2].map(|i| n[i].load(Ordering::SeqCst))
}

#[test]
fn replayed_steps_have_the_bits_and_the_cost_of_launched_ones() {
    if !is_emulated() {
        return;
    }
    for (ix, family) in Family::ALL.into_iter().enumerate() {
        let down_by_neuron = ix % 2 == 0;
        let options = TinyOptions { family, down_by_neuron, ..TinyOptions::default() };
        let models = [TinyModel::new(options), TinyModel::new(options).with_gate_copies()];
        for (model, mode) in models.iter().flat_map(|model| MODES.map(|mode| (model, mode))) {
            let gpu = EmulatedGpu::new(3, true, Arc::default());
            let n_graphs = Arc::clone(&gpu.n_graphs);
            let mut replayed = loaded(model, gpu, CudaOptions::default());
            let refusing = EmulatedGpu::new(4, false, Arc::default()).without_graphs();
            let mut refused = loaded(model, refusing, CudaOptions::default());
            let gpu = EmulatedGpu::new(5, false, Arc::default());
            let n_none = Arc::clone(&gpu.n_graphs);
            let mut told = loaded(model, gpu, CudaOptions { without_graphs: true, ..CudaOptions::default() });
            // Single tokens, two and three at a time; once a prompt beyond a span of 256 positions follows.
            let is_long = ix == 0 && mode == ActiveMode::Predictor;
            let step_of = |positions: Range<u32>| positions.map(|pos| row(0, pos)).collect::<Vec<_>>();
            let mut steps: Vec<Vec<StepRow>> =
                [0..1, 1..2, 2..3, 3..4, 4..6, 6..9, 9..15, 15..16].map(step_of).into();
            if is_long {
                steps.extend([16..60, 60..120, 120..180, 180..240, 240..254].map(step_of));
                steps.extend([254..255, 255..256, 256..257, 257..258].map(step_of));
            }
            let what = format!("{family:?}, {mode:?}");
            for rows in &steps {
                let want = step(&mut refused, model, rows, mode);
                assert_eq!(step(&mut replayed, model, rows, mode), want, "{what}: step at {}", rows[0].pos);
                assert_eq!(step(&mut told, model, rows, mode), want, "{what}: step at {}", rows[0].pos);
                assert_eq!(replayed.take_cost(), refused.take_cost(), "{what}: cost at {}", rows[0].pos);
            }
            // One, two and three tokens over one span, one token over two.
            assert_eq!(counted(&n_graphs), if is_long { [4, 11, 0] } else { [3, 7, 0] }, "{what}");
            assert_eq!(counted(&n_none), [0; 3]);
            assert!(!replayed.info().description.contains("graph"));
            assert!(refused.info().description.contains("without graphs"), "{}", refused.info().description);
            let mut h = [vec![0.0; model.spec.n_embd], vec![0.0; model.spec.n_embd]];
            replayed.hidden(&mut h[0]);
            refused.hidden(&mut h[1]);
            assert_eq!(h[0], h[1]);
        }
    }
}

#[test]
fn layers_that_wait_are_launched_before_anything_looks() {
    if !is_emulated() {
        return;
    }
    let model = TinyModel::new(TinyOptions::default());
    let mode = ActiveMode::Exact;
    let make = || loaded(&model, EmulatedGpu::new(3, false, Arc::default()), CudaOptions::default());
    let (mut one, mut other) = (make(), make());
    let rows = [row(0, 0)];
    let single = Step { rows: &rows, mode };
    // What each layer leaves, looked at after each, against all layers at once.
    other.embed(&single);
    let mut h = vec![0.0; model.spec.n_embd];
    for layer in model.spec.layers() {
        assert!(other.whole_layer(layer, &single));
        other.hidden(&mut h);
    }
    let want = step(&mut one, &model, &rows, mode);
    let mut logits = vec![0.0; want.len()];
    other.head(0..1, &mut logits);
    assert_eq!(logits, want);
    let cost = other.take_cost();
    let looked_at = (model.spec.n_layer * 4 * h.len()) as u64;
    assert_eq!(one.take_cost(), StepCost { bytes_out: cost.bytes_out - looked_at, ..cost });
    // A cost that is taken in the middle has the counters of the layers so far.
    one.embed(&single);
    assert!(one.whole_layer(LayerId(0), &single));
    assert_eq!(one.take_cost().active_neurons, 96);
    // The cache that is copied is that of a step whose layers waited.
    for pos in 0..4 {
        let rows = [row(0, pos)];
        let single = Step { rows: &rows, mode };
        for backend in [&mut one, &mut other] {
            backend.embed(&single);
            model.spec.layers().for_each(|layer| assert!(backend.whole_layer(layer, &single)));
        }
        if pos == 3 {
            other.head(0..1, &mut logits);
        }
    }
    for backend in [&mut one, &mut other] {
        backend.reserve(SeqId(1), 8, 4).expect("there is memory");
        backend.kv_copy(SeqId(0), SeqId(1), 0..4);
    }
    let next = [StepRow { seq: SeqId(1), ..row(0, 4) }];
    assert_eq!(step(&mut one, &model, &next, mode), step(&mut other, &model, &next, mode));
}

#[test]
fn graphs_are_made_once_and_forgotten_when_memory_changes_hands() {
    if !is_emulated() {
        return;
    }
    let model = TinyModel::new(TinyOptions::default());
    let mode = ActiveMode::Predictor;
    let gpu = EmulatedGpu::new(3, false, Arc::default());
    let n = Arc::clone(&gpu.n_graphs);
    let mut device = loaded(&model, gpu, CudaOptions { kv_type: CudaKvType::F32, ..CudaOptions::default() });
    let first = step(&mut device, &model, &[row(0, 0)], mode);
    assert_eq!(counted(&n), [1, 1, 0]);
    // Sequences come, grow and go; their caches are in tables.
    device.reserve(SeqId(7), 20, 4).expect("there is memory");
    device.reserve(SeqId(8), 20, 4).expect("there is memory");
    let in_other = StepRow { seq: SeqId(8), ..row(0, 0) };
    assert_eq!(step(&mut device, &model, &[in_other], mode), first);
    device.release(SeqId(7));
    device.reserve(SeqId(8), 300, 4).expect("there is memory");
    let next = step(&mut device, &model, &[StepRow { seq: SeqId(8), ..row(0, 1) }], mode);
    assert_eq!(step(&mut device, &model, &[row(0, 1)], mode), next);
    assert_eq!(counted(&n), [1, 4, 0]);
    // Counting is another launch, memory for it and its end forget the graphs.
    device.record_fired(true);
    assert_eq!(counted(&n), [1, 4, 1]);
    assert_eq!(step(&mut device, &model, &[row(0, 0)], mode), first);
    let mut counts = vec![0; 96];
    assert!(device.take_fired(LayerId(1), &mut counts));
    assert!(counts.iter().sum::<u64>() > 0);
    device.record_fired(false);
    assert_eq!(counted(&n), [2, 5, 2]);
    // Neurons that are swapped lie in the same memory.
    step(&mut device, &model, &[row(0, 0)], mode);
    let none: &[NeuronId] = &[];
    assert!(device.swap_neurons(LayerId(1), &model.ffn[1], none, none));
    step(&mut device, &model, &[row(0, 0)], mode);
    assert_eq!(counted(&n), [3, 7, 2]);
    // Other weights, other graphs.
    let changed = TinyModel::new(TinyOptions { seed: 99, ..TinyOptions::default() });
    device.load_ffn(LayerId(0), changed.ffn[0].clone(), &NeuronSet::all(96)).expect("there is memory");
    assert_eq!(counted(&n), [3, 7, 3]);
    assert_ne!(step(&mut device, &model, &[row(0, 0)], mode), first);
    device.load_ffn(LayerId(0), model.ffn[0].clone(), &NeuronSet::all(96)).expect("there is memory");
    assert_eq!(step(&mut device, &model, &[row(0, 0)], mode), first);
    // A larger scratch too.
    device.reserve(SeqId(0), 600, 61).expect("there is memory");
    assert_eq!(counted(&n), [5, 9, 5]);
    assert_eq!(step(&mut device, &model, &[row(0, 0)], mode), first);
}

#[test]
fn making_and_running_graphs_allocates_nothing_on_the_heap() {
    if !is_emulated() {
        return;
    }
    let model = TinyModel::new(TinyOptions::default());
    let own_allocs = Arc::new(AtomicU64::new(0));
    let gpu = EmulatedGpu::new(3, true, Arc::clone(&own_allocs));
    let n = Arc::clone(&gpu.n_graphs);
    let mut device = loaded(&model, gpu, CudaOptions::default());
    let mut logits = vec![0.0; 4 * model.spec.n_vocab];
    let mut rows = [row(0, 0); 4];
    let before = own_allocs.load(Ordering::SeqCst);
    let ((), stats) = measure(|| {
        let mut pos = 0;
        // More shapes of steps than graphs are kept.
        for mode in MODES {
            for n in (1..=4).cycle().take(28) {
                if n == 1 {
                    pos = (pos + 90) % 590;
                }
                (0..n).for_each(|i| rows[i as usize] = row(0, pos + i));
                whole_step(&mut device, &model, &rows[..n as usize], mode, &mut logits[..n as usize * 96]);
            }
        }
    });
    assert_eq!(stats.n_allocs - (own_allocs.load(Ordering::SeqCst) - before), 0);
    let [made, run, forgotten] = counted(&n);
    assert_eq!(run, 3 * 28);
    assert!(made > 32 && forgotten == made - 32, "{made} made, {forgotten} forgotten");
}
