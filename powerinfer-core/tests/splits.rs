//! The first promise: wherever neurons and dense parts lie, and in whatever order the file has them, the logits are
//! those of plain loops over the whole model and the greedy text is the same.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::sync::Arc;

use powerinfer_core::placement::{Assignment, AssignmentError, LayerAssignment};
use powerinfer_core::{
    ActiveMode, CpuOptions, Device, KvType, LoadError, LoadOptions, MakeBackend, Rounding, SessionOptions,
    TokenId,
};
use powerinfer_sparse_ops::{NeuronId, NeuronSet};
use powerinfer_testing::mock::{Account, MockDevice, MockOptions};
use powerinfer_testing::tiny::Random;
use powerinfer_testing::tolerance::{NMSE_F32, assert_close};

use support::split::{random_assignment, run};
use support::{N_EMBD, N_FF, N_LAYER, N_VOCAB, TinyFile};

const N_PROMPT: usize = 9;
const N_TEXT: usize = 12;

fn mock(late: bool) -> Device {
    Device::Other(MakeBackend::new(move |spec| {
        let options = MockOptions { late, memory_bytes: None };
        Ok(Box::new(MockDevice::new(spec, options, Arc::new(Account::default()))))
    }))
}

fn cpu(threads: usize) -> Device {
    Device::Cpu(CpuOptions { threads, kv_type: KvType::F32, ..CpuOptions::default() })
}

/// Numbers `0..n` in any order.
fn shuffled(random: &mut Random, n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, random.below(i + 1));
    }
    order
}

/// The same model with the neurons of every layer in another order.
fn reordered(mut file: TinyFile, random: &mut Random) -> TinyFile {
    for layer in 0..N_LAYER {
        let order = shuffled(random, N_FF);
        for (part, n_cols) in [("ffn_gate", N_EMBD), ("ffn_up", N_EMBD), ("ffn_down_t", N_EMBD), ("fc2", 8)] {
            let name = format!("blk.{layer}.{part}.weight");
            if file.has(&name) {
                let old = file.values(&name);
                let rows = order.iter().flat_map(|&j| old[j * n_cols..(j + 1) * n_cols].iter().copied());
                file.tensor(&name, &[n_cols, N_FF], rows.collect());
            }
        }
        let name = format!("blk.{layer}.ffn_down.weight");
        if file.has(&name) {
            let old = file.values(&name);
            let columns = (0..N_EMBD).flat_map(|e| order.iter().map(move |&j| (e, j)));
            file.tensor(&name, &[N_FF, N_EMBD], columns.map(|(e, j)| old[e * N_FF + j]).collect());
        }
    }
    file
}

#[test]
fn fifty_splits_and_neuron_orders_give_the_logits_of_plain_loops_and_the_same_text() {
    for seed in 0..50 {
        let mut random = Random::new(1000 + seed);
        let is_sparse = seed % 2 == 0;
        let file = || if is_sparse { TinyFile::sparse() } else { TinyFile::dense() };
        let mode = match (is_sparse, random.below(3)) {
            (_, 0) => ActiveMode::Dense,
            (_, 1) | (false, _) => ActiveMode::Exact,
            (true, _) => ActiveMode::Predictor,
        };
        let prompt: Vec<TokenId> = (0..N_PROMPT).map(|_| TokenId(random.below(N_VOCAB) as u32)).collect();
        let whole = file()
            .load_with(&LoadOptions { device: Device::Reference(Rounding::None), ..LoadOptions::default() })
            .unwrap();
        let want = run(&whole, mode, &prompt, N_TEXT);

        let n_mocks = 1 + random.below(2);
        let accelerators: Vec<Device> = (0..n_mocks).map(|_| mock(random.below(2) == 0)).collect();
        let assignment = random_assignment(&mut random, 1 + n_mocks);
        let options = LoadOptions {
            device: cpu(1 + random.below(3)),
            accelerators,
            assignment: Some(assignment),
            n_batch: [1, 4, 256][random.below(3)],
            ..LoadOptions::default()
        };
        let split = reordered(file(), &mut random).load_with(&options).unwrap();
        let got = run(&split, mode, &prompt, N_TEXT);
        let what = format!("seed {seed}, sparse {is_sparse}, {mode:?}, {n_mocks} mocks");
        assert_close(&what, &got.logits, &want.logits, NMSE_F32);
        assert_eq!(got.text, want.text, "{what}: text");
    }
}

#[test]
fn a_split_has_the_same_bits_for_any_number_of_threads_and_however_late_the_device_is() {
    let mut random = Random::new(7);
    let assignment = random_assignment(&mut random, 2);
    let prompt: Vec<TokenId> = (0..N_PROMPT).map(|i| TokenId(7 * i as u32 % 300)).collect();
    let bits = |threads, late| {
        let options = LoadOptions {
            device: cpu(threads),
            accelerators: vec![mock(late)],
            assignment: Some(assignment.clone()),
            ..LoadOptions::default()
        };
        let model = TinyFile::sparse().load_with(&options).unwrap();
        let logits = run(&model, ActiveMode::Predictor, &prompt, N_TEXT).logits;
        logits.iter().map(|l| l.to_bits()).collect::<Vec<_>>()
    };
    let want = bits(1, false);
    assert_eq!(bits(1, true), want);
    assert_eq!(bits(3, true), want);
}

#[test]
fn what_lies_on_one_side_moves_nothing_and_a_split_layer_moves_one_exchange() {
    let on = |backend| {
        let whole = |b| if b == backend { NeuronSet::all(N_FF) } else { NeuronSet::none(N_FF) };
        LayerAssignment { home: backend, owned: vec![whole(0), whole(1)] }
    };
    let bytes = |layers: Vec<LayerAssignment>, embed, head| {
        let options = LoadOptions {
            device: cpu(1),
            accelerators: vec![mock(true)],
            assignment: Some(Assignment { embed, head, layers }),
            ..LoadOptions::default()
        };
        let model = TinyFile::sparse().load_with(&options).unwrap();
        let mut session = model.session(&SessionOptions::default()).unwrap();
        session.decode(TokenId(1)).unwrap();
        let cost = session.stats().decode.cost;
        (cost.bytes_in, cost.bytes_out)
    };
    let row = 4 * N_EMBD as u64;
    let active = 8 * N_FF.div_ceil(64) as u64;
    assert_eq!(bytes(vec![on(0); N_LAYER], 0, 0), (0, 0), "all on the host");
    let logits = 4 * N_VOCAB as u64;
    assert_eq!(bytes(vec![on(1); N_LAYER], 1, 1), (0, logits), "all on the device");
    let mut layers = vec![on(0); N_LAYER];
    let half = NeuronSet::from_ids(N_FF, (0..48).map(NeuronId));
    layers[3].owned = vec![half.complement(), half];
    assert_eq!(bytes(layers, 0, 0), (row + active, row), "one split layer");
}

#[test]
fn an_assignment_that_does_not_fit_is_refused_with_the_part_it_is_about() {
    let load = |change: &dyn Fn(&mut Assignment)| {
        let model = TinyFile::dense().load().unwrap();
        let mut assignment = Assignment::all_on(model.spec(), 0, 2);
        change(&mut assignment);
        let options = LoadOptions {
            accelerators: vec![mock(false)],
            assignment: Some(assignment),
            ..LoadOptions::default()
        };
        match TinyFile::dense().load_with(&options) {
            Err(LoadError::Assignment(error)) => error,
            other => panic!("{other:?}"),
        }
    };
    let error = load(&|a| a.layers.truncate(3));
    assert_eq!(error, AssignmentError::Layers { expected: N_LAYER, got: 3 });
    let error = load(&|a| a.layers[2].home = 2);
    assert_eq!(error.to_string(), "layer 2 is assigned to backend 2, there are 2");
    let error = load(&|a| a.layers[1].owned[1] = NeuronSet::from_ids(N_FF, [NeuronId(5)]));
    assert_eq!(error.to_string(), "layer 1: 2 backends hold neuron 5, one must");
    let error = load(&|a| a.layers[1].owned[0] = NeuronSet::none(N_FF));
    assert_eq!(error.to_string(), "layer 1: 0 backends hold neuron 0, one must");
    let error = load(&|a| a.layers[0].owned[1] = NeuronSet::none(7));
    assert!(matches!(error, AssignmentError::Width { expected: N_FF, got: 7, .. }), "{error}");
    let error = load(&|a| a.layers[0].owned.truncate(1));
    assert!(matches!(error, AssignmentError::Sets { got: 1, .. }), "{error}");
}
