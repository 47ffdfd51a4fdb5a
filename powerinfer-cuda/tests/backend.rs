//! The backend on the emulated device, beside the reference backend: types, splits, swaps, memory, traffic.

mod support;

use std::sync::Arc;

use powerinfer_cpu::{CpuBackend, CpuOptions, KvType};
use powerinfer_cuda::{CudaBackend, CudaKvType, CudaOptions};
use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{
    Activation, ActiveMode, BackendError, BlockKind, DensePart, DownWeights, FfnInput, HybridBackend,
    LayerId, ModelSpec, NeuronId, NeuronSet, SeqId, Step, StepCost, StepRow, TokenId, WeightBytes,
    WeightMatrix, WeightType,
};
use powerinfer_testing::alloc_guard::CountingAllocator;
use powerinfer_testing::drive::Drive;
use powerinfer_testing::tiny::{Family, Random, TinyModel, TinyOptions};
use powerinfer_testing::tolerance::{NMSE_F16_KV, NMSE_F32, assert_close};

use support::{EmulatedGpu, backend, backend_with, is_emulated};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const TOKENS: [u32; 21] = [1, 17, 40, 3, 95, 60, 2, 33, 8, 9, 10, 11, 12, 13, 90, 91, 92, 5, 5, 6, 7];
const MODES: [ActiveMode; 3] = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];

fn reference(model: &TinyModel, tokens: &[u32], mode: ActiveMode) -> Vec<f32> {
    let mut reference = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
    model.load_all(&mut reference);
    Drive::new(&model.spec, vec![&mut reference], tokens.len()).step(0, tokens, mode).to_vec()
}

fn loaded(model: &TinyModel, kv_type: CudaKvType) -> CudaBackend {
    let mut backend = backend(&model.spec, kv_type);
    model.load_all(&mut backend);
    backend
}

/// Random blocks with small scales, for types without an encoder.
fn random_blocks(like: &WeightMatrix, ty: WeightType, random: &mut Random) -> WeightMatrix {
    let scales: &[usize] = match ty {
        WeightType::Q4_K => &[0, 2],
        WeightType::Q6_K => &[208],
        other => panic!("{other} has an encoder"),
    };
    let (n_rows, n_cols) = (like.n_rows(), like.n_cols());
    let n_bytes = ty.row_bytes(n_cols).expect("whole blocks") * n_rows;
    let mut bytes: Vec<u8> = (0..n_bytes).map(|_| random.next_u64() as u8).collect();
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        for &at in scales {
            // About 2^-9, either sign.
            block[at + 1] = block[at + 1] & 0x83 | 0x18;
        }
    }
    WeightMatrix::try_new(like.name(), ty, n_rows, n_cols, WeightBytes::from_vec(bytes))
        .expect("the shape fits")
}

/// A model whose matrices have K types where the width allows it, each type in another role.
fn with_k_types(ffn: [WeightType; 3], dense: WeightType) -> TinyModel {
    let mut model = TinyModel::new(TinyOptions { n_embd: 256, n_ff: 192, ..TinyOptions::default() });
    let mut random = Random::new(5);
    for w in &mut model.ffn {
        let gate = w.gate.as_mut().expect("llama has gates");
        *gate = random_blocks(gate, ffn[0], &mut random);
        w.up = random_blocks(&w.up, ffn[1], &mut random);
        let DownWeights::ByNeuron(down) = &mut w.down else { panic!("rows by neuron") };
        *down = random_blocks(down, ffn[2], &mut random);
    }
    for part in &mut model.dense {
        match part {
            DensePart::Embedding(w) => w.token = random_blocks(&w.token, dense, &mut random),
            DensePart::Layer(_, w) => {
                for linear in [&mut w.q, &mut w.k, &mut w.v, &mut w.output] {
                    linear.weight = random_blocks(&linear.weight, dense, &mut random);
                }
            }
            DensePart::Head(w) => w.output = random_blocks(&w.output, dense, &mut random),
        }
    }
    model
}

#[test]
fn every_type_and_family_stays_close_to_the_reference() {
    if !is_emulated() {
        return;
    }
    let types = [WeightType::F16, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0];
    let mut models: Vec<(String, TinyModel)> = Vec::new();
    for (ix, ty) in types.into_iter().enumerate() {
        for (family, down_by_neuron) in [
            (Family::ALL[ix % 5], true),
            (Family::ALL[(ix + 1) % 5], false),
            (Family::Llama, true),
            (Family::Opt, false),
        ] {
            let options = TinyOptions {
                family,
                ffn_type: ty,
                dense_type: types[(ix + 1) % types.len()],
                down_by_neuron,
                n_ff: 352,
                ..TinyOptions::default()
            };
            models.push((format!("{ty}, {family:?}, by neuron {down_by_neuron}"), TinyModel::new(options)));
        }
    }
    use WeightType::{Q4_K, Q6_K};
    models.push(("Q4_K".into(), with_k_types([Q4_K; 3], Q6_K)));
    models.push(("Q6_K, gate and up differ".into(), with_k_types([Q6_K, Q4_K, Q6_K], Q4_K)));
    for (what, model) in &models {
        let mut device = loaded(model, CudaKvType::F32);
        let mut drive = Drive::new(&model.spec, vec![&mut device], TOKENS.len());
        for mode in [ActiveMode::Dense, ActiveMode::Exact] {
            let want = reference(model, &TOKENS, mode);
            let got = drive.step(0, &TOKENS, mode).to_vec();
            assert_close(&format!("{what}, {mode:?}"), &got, &want, NMSE_F32);
            let last = drive.step(20, &TOKENS[20..], mode);
            assert_close(&format!("{what}, {mode:?}, one"), last, &want[20 * 96..], NMSE_F32);
        }
    }
}

#[test]
fn caches_of_f16_stay_close_to_the_reference() {
    if !is_emulated() {
        return;
    }
    for family in Family::ALL {
        let model = TinyModel::new(TinyOptions { family, ..TinyOptions::default() });
        let want = reference(&model, &TOKENS, ActiveMode::Exact);
        let mut device = loaded(&model, CudaKvType::F16);
        let mut drive = Drive::new(&model.spec, vec![&mut device], TOKENS.len());
        let got = drive.step(0, &TOKENS, ActiveMode::Exact);
        assert_close(&format!("{family:?}"), got, &want, NMSE_F16_KV);
        let positions = (TOKENS.len() * (TOKENS.len() + 1) / 2 * model.spec.n_layer) as u64;
        let row_bytes = 2 * 2 * model.spec.kv_dim() as u64;
        assert_eq!(drive.backends()[0].take_cost().kv_bytes, positions * row_bytes);
    }
}

#[test]
fn a_long_prompt_goes_through_the_kernels_for_many_tokens() {
    if !is_emulated() {
        return;
    }
    let tokens: Vec<u32> = (0..50).map(|i| i * 37 % 96).collect();
    let types = [WeightType::Q4_0, WeightType::F16, WeightType::Q8_0, WeightType::F32, WeightType::BF16];
    for (ix, (family, ffn_type)) in Family::ALL.into_iter().zip(types).enumerate().step_by(2) {
        let down_by_neuron = ix != 2;
        let options = TinyOptions { family, ffn_type, down_by_neuron, n_ff: 160, ..TinyOptions::default() };
        let models = [TinyModel::new(options), TinyModel::new(options).with_gate_copies()];
        for (model, modes) in models.iter().zip([&MODES[..], &MODES[2..]]) {
            let mut device = loaded(model, CudaKvType::F32);
            let mut drive = Drive::new(&model.spec, vec![&mut device], tokens.len());
            let mut all = Vec::new();
            for &mode in modes {
                let what = format!("{family:?}, {ffn_type}, {mode:?}");
                let mut slow = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
                model.load_all(&mut slow);
                let mut slow = Drive::new(&model.spec, vec![&mut slow], tokens.len());
                let want = slow.step(0, &tokens, mode).to_vec();
                let got = drive.step(0, &tokens, mode).to_vec();
                assert_close(&what, &got, &want, NMSE_F32);
                // What is read is what a token asked for, though a tile computes more.
                let (cost, least) = (drive.backends()[0].take_cost(), slow.backends()[0].take_cost());
                if down_by_neuron {
                    let moved = StepCost { bytes_in: cost.bytes_in, bytes_out: cost.bytes_out, ..least };
                    assert_eq!(cost, moved, "{what}");
                }
                all.push(got);
            }
            if let [dense, exact, ..] = &all[..] {
                assert_eq!(dense, exact, "{family:?}: zeros that are skipped change nothing");
            }
        }
    }
}

/// A deal of the neurons of each layer to two owners.
fn deal(random: &mut Random, model: &TinyModel) -> Vec<NeuronSet> {
    let deal_one = |&n: &usize| match random.below(4) {
        0 => NeuronSet::all(n),
        1 => NeuronSet::none(n),
        _ => NeuronSet::from_ids(n, (0..n as u32).filter(|_| random.below(2) == 0).map(NeuronId)),
    };
    model.spec.n_ff.iter().map(deal_one).collect()
}

#[test]
fn fifty_splits_between_the_cpu_and_the_device_give_the_logits_of_plain_loops() {
    if !is_emulated() {
        return;
    }
    for seed in 0..50 {
        let mut random = Random::new(seed);
        let family = Family::ALL[random.below(5)];
        let mode = MODES[random.below(3)];
        let down_by_neuron = random.below(3) > 0;
        let model = TinyModel::new(TinyOptions { family, down_by_neuron, seed, ..TinyOptions::default() });
        let tokens: Vec<u32> = (0..9).map(|_| random.below(96) as u32).collect();
        let want = reference(&model, &tokens, mode);
        let on_device = deal(&mut random, &model);
        let options = CpuOptions { threads: 2, kv_type: KvType::F32, ..CpuOptions::default() };
        let mut cpu = CpuBackend::new(Arc::clone(&model.spec), options).expect("threads start");
        let gpu = EmulatedGpu::new(seed, random.below(2) == 0, Arc::default());
        let mut cuda = backend_with(&model.spec, CudaKvType::F32, gpu, None).expect("there is memory");
        model.load_ffn(&mut cpu, |layer| on_device[layer.index()].complement());
        model.load_ffn(&mut cuda, |layer| on_device[layer.index()].clone());
        let device_is_home = random.below(2) == 0;
        let backends: Vec<&mut dyn HybridBackend> = if device_is_home {
            model.load_home(&mut cuda);
            vec![&mut cuda, &mut cpu]
        } else {
            model.load_home(&mut cpu);
            vec![&mut cpu, &mut cuda]
        };
        let mut drive = Drive::new(&model.spec, backends, tokens.len());
        let what = format!("seed {seed}, {family:?}, {mode:?}, device is home {device_is_home}");
        let n = [1, 3, 9][random.below(3)];
        let mut got = Vec::new();
        for (first, tokens) in (0..).step_by(n).zip(tokens.chunks(n)) {
            got.extend_from_slice(drive.step(first, tokens, mode));
        }
        assert_close(&what, &got, &want, NMSE_F32);
    }
}

fn row(pos: u32, token: u32) -> StepRow {
    StepRow { seq: SeqId(0), pos, token: TokenId(token) }
}

#[test]
fn whole_layers_and_closed_sums_give_the_logits_of_single_calls_and_move_logits_only() {
    if !is_emulated() {
        return;
    }
    for family in Family::ALL {
        for (mode, down_by_neuron) in MODES.into_iter().flat_map(|mode| [(mode, true), (mode, false)]) {
            let model = TinyModel::new(TinyOptions { family, down_by_neuron, ..TinyOptions::default() });
            let mut single = loaded(&model, CudaKvType::F32);
            let mut drive = Drive::new(&model.spec, vec![&mut single], 9);
            let want = drive.step(0, &TOKENS[..9], mode).to_vec();
            let want_cost = drive.backends()[0].take_cost();
            let mut whole = loaded(&model, CudaKvType::F32);
            whole.reserve(SeqId(0), 64, 9).expect("there is memory");
            let rows: Vec<StepRow> = (0..9).map(|i| row(i, TOKENS[i as usize])).collect();
            let step = Step { rows: &rows, mode };
            let (n_embd, n_ff) = (model.spec.n_embd, model.spec.n_ff[0]);
            let mut logits = vec![0.0; want.len()];
            for closes in [false, true] {
                whole.embed(&step);
                for layer in model.spec.layers() {
                    if !closes {
                        assert!(whole.whole_layer(layer, &step));
                        continue;
                    }
                    let mut input = FfnInput::default();
                    if model.spec.block == BlockKind::Parallel {
                        whole.ffn_input(layer, &step, &mut input);
                        whole.attend(layer, &step);
                    } else {
                        whole.attend(layer, &step);
                        whole.ffn_input(layer, &step, &mut input);
                    }
                    let ticket = whole.ffn_start(layer, &input);
                    whole.ffn_close(ticket, &mut vec![0.0; 9 * n_embd]);
                }
                whole.head(0..9, &mut logits);
                let what = format!("{family:?}, {mode:?}, by neuron {down_by_neuron}, closes {closes}");
                assert_close(&what, &logits, &want, NMSE_F32);
                let cost = whole.take_cost();
                let vectors = (4 * 9 * n_embd * model.spec.n_layer) as u64;
                let bits = (9 * 8 * n_ff.div_ceil(64) * model.spec.n_layer) as u64;
                let bits = if mode == ActiveMode::Predictor { bits } else { 0 };
                let moved = (4 * logits.len() as u64, 0);
                let moved = if closes { (moved.0 + vectors + bits, vectors) } else { moved };
                assert_eq!((cost.bytes_out, cost.bytes_in), moved, "{what}");
                assert_eq!(
                    StepCost { bytes_in: want_cost.bytes_in, bytes_out: want_cost.bytes_out, ..cost },
                    want_cost
                );
            }
            let mut h = vec![0.0; 9 * n_embd];
            whole.hidden(&mut h);
            assert_eq!(whole.take_cost().bytes_out, 4 * h.len() as u64);
            // The same residual stream on another home gives the same logits.
            let mut other = loaded(&model, CudaKvType::F32);
            other.reserve(SeqId(0), 64, 9).expect("there is memory");
            other.set_hidden(&step, &h);
            let mut again = vec![0.0; want.len()];
            other.head(0..9, &mut again);
            assert_eq!(again, logits);
            other.head(4..6, &mut again[..2 * 96]);
            assert_eq!(again[..2 * 96], logits[4 * 96..6 * 96]);
        }
    }
}

#[test]
fn an_owner_that_is_not_home_moves_one_exchange() {
    if !is_emulated() {
        return;
    }
    let model = TinyModel::new(TinyOptions::default());
    let (n_embd, n_ff) = (model.spec.n_embd, model.spec.n_ff[0]);
    let half = NeuronSet::from_ids(n_ff, (0..50).map(NeuronId));
    let mut device = backend(&model.spec, CudaKvType::F16);
    model.load_ffn(&mut device, |layer| if layer.0 == 2 { NeuronSet::none(n_ff) } else { half.clone() });
    device.reserve(SeqId(0), 64, 4).expect("there is memory");
    let mut input = FfnInput { x: vec![0.5; 2 * n_embd], ..FfnInput::default() };
    input.active.reset(2, n_ff);
    input.active.fill();
    let vectors = 4 * 2 * n_embd as u64;
    for (layer, mode, bytes_in, bytes_out) in [
        (0, ActiveMode::Exact, vectors, vectors),
        (1, ActiveMode::Predictor, vectors + 2 * 8 * n_ff.div_ceil(64) as u64, vectors),
        (2, ActiveMode::Predictor, 0, 0),
    ] {
        input.mode = mode;
        let ticket = device.ffn_start(LayerId(layer), &input);
        device.ffn_finish(ticket, &mut vec![0.0; 2 * n_embd]);
        let cost = device.take_cost();
        assert_eq!((cost.bytes_in, cost.bytes_out), (bytes_in, bytes_out), "layer {layer}");
    }
}

#[test]
fn neurons_that_are_swapped_give_the_sums_of_those_that_were_loaded() {
    if !is_emulated() {
        return;
    }
    for (family, down_by_neuron) in [(Family::Llama, true), (Family::Opt, true), (Family::Bamboo, false)] {
        let model = TinyModel::new(TinyOptions { family, down_by_neuron, ..TinyOptions::default() });
        let n_ff = model.spec.n_ff[0];
        let before = NeuronSet::from_ids(n_ff, (0..40).map(NeuronId));
        let leave = [3, 17, 39].map(NeuronId);
        let enter = [95, 40, 77].map(NeuronId);
        let ids = before.ids().iter().copied().filter(|id| !leave.contains(id)).chain(enter);
        let after = NeuronSet::from_ids(n_ff, ids);
        let mut input = FfnInput { mode: ActiveMode::Predictor, ..FfnInput::default() };
        input.x = Random::new(3).normals(3 * model.spec.n_embd, 1.0);
        input.active.reset(3, n_ff);
        (0..n_ff as u32)
            .filter(|i| i % 5 != 0)
            .for_each(|i| input.active.insert((i % 3) as usize, NeuronId(i)));
        let sums = |backend: &mut dyn HybridBackend| {
            backend.reserve(SeqId(0), 8, 3).expect("there is memory");
            let ticket = backend.ffn_start(LayerId(1), &input);
            let mut acc = vec![0.0; input.x.len()];
            backend.ffn_finish(ticket, &mut acc);
            acc
        };
        let mut reference = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
        model.load_ffn(&mut reference, |_| after.clone());
        let mut device = backend(&model.spec, CudaKvType::F16);
        model.load_ffn(&mut device, |_| before.clone());
        sums(&mut device);
        device.take_cost();
        assert!(device.swap_neurons(LayerId(1), &model.ffn[1], &leave, &enter));
        let row_bytes = model.ffn[1].matrices().count() * 4 * model.spec.n_embd;
        let cost = device.take_cost();
        assert_eq!(cost, StepCost { swapped_bytes: 3 * row_bytes as u64, ..StepCost::default() });
        assert_close(&format!("{family:?}"), &sums(&mut device), &sums(&mut reference), NMSE_F32);
    }
}

#[test]
fn neurons_that_fire_are_counted_as_the_reference_does() {
    if !is_emulated() {
        return;
    }
    let counts = |backend: &mut dyn HybridBackend, model: &TinyModel| -> Vec<Vec<u64>> {
        let layers = model.spec.layers().zip(&model.spec.n_ff);
        let take = |(layer, &n_ff)| {
            // What is there is added to.
            let mut counts = vec![5; n_ff];
            assert!(backend.take_fired(layer, &mut counts), "layer {layer}");
            counts.iter().map(|n| n - 5).collect()
        };
        layers.map(take).collect()
    };
    for (ix, family) in Family::ALL.into_iter().enumerate() {
        for (at, mode) in MODES.into_iter().enumerate() {
            let (down_by_neuron, part) = (ix % 2 == 0, (ix + at) % 2 == 0);
            let model = TinyModel::new(TinyOptions { family, down_by_neuron, ..TinyOptions::default() });
            let owned = |layer: LayerId| {
                let n_ff = model.spec.n_ff[layer.index()];
                let ids = (0..n_ff as u32).filter(|i| !part || (i + layer.0).is_multiple_of(3));
                NeuronSet::from_ids(n_ff, ids.map(NeuronId))
            };
            let run = |backend: &mut dyn HybridBackend| {
                backend.record_fired(true);
                let mut other = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
                model.load_home(backend);
                model.load_ffn(backend, owned);
                model.load_ffn(&mut other, |layer| owned(layer).complement());
                let mut drive = Drive::new(&model.spec, vec![backend, &mut other], 40);
                // One by one, a few, a tile and more than a tile.
                let tokens: Vec<u32> = (0..55).map(|i| i * 29 % 96).collect();
                let mut at = 0;
                for n in [1, 4, 9, 40] {
                    drive.step(at, &tokens[at as usize..][..n], mode);
                    at += n as u32;
                }
                let counted = counts(drive.backends()[0], &model);
                drive.backends()[0].take_cost();
                drive.step(2, &tokens[..1], mode);
                let again = counts(drive.backends()[0], &model);
                let cost = drive.backends()[0].take_cost();
                let n: u64 = again.iter().flatten().sum();
                assert_eq!(n, cost.fired_neurons, "{family:?}, {mode:?}: one token");
                [counted, again]
            };
            let mut reference = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
            let want = run(&mut reference);
            assert!(want[0].iter().flatten().any(|&n| n > 1));
            let mut device = backend(&model.spec, CudaKvType::F32);
            assert_eq!(
                run(&mut device),
                want,
                "{family:?}, {mode:?}, by neuron {down_by_neuron}, part {part}"
            );

            let mut none = vec![0; model.spec.n_ff[0]];
            device.record_fired(true);
            assert!(device.take_fired(LayerId(0), &mut none));
            assert!(none.iter().all(|&n| n == 0), "counting begins anew");
            let used = device.memory_used();
            device.record_fired(false);
            let n_bytes: usize = model.spec.n_ff.iter().map(|n| (8 * n).next_multiple_of(256)).sum();
            assert_eq!(used - device.memory_used(), n_bytes as u64);
            assert!(!device.take_fired(LayerId(0), &mut none), "nobody counts");
        }
    }

    // Where there is no memory for the counters, nothing is counted, and that is said.
    let model = TinyModel::new(TinyOptions::default());
    let constants = backend(&model.spec, CudaKvType::F16).memory_used();
    let gpu = EmulatedGpu::new(1, false, Arc::default());
    let neurons = 3 * 96 * 64 * 4 + 512;
    let mut full =
        backend_with(&model.spec, CudaKvType::F16, gpu, Some(constants + neurons)).expect("there is memory");
    full.load_ffn(LayerId(0), model.ffn[0].clone(), &NeuronSet::all(96)).expect("there is memory");
    full.record_fired(true);
    assert!(!full.take_fired(LayerId(0), &mut [0; 96]));
}

#[test]
fn quantised_down_rows_by_output_are_taken_whole_or_refused_with_the_reason() {
    if !is_emulated() {
        return;
    }
    let model = TinyModel::new(TinyOptions {
        ffn_type: WeightType::Q8_0,
        down_by_neuron: false,
        ..TinyOptions::default()
    });
    let n_ff = model.spec.n_ff[0];
    let mut device = backend(&model.spec, CudaKvType::F16);
    let part = NeuronSet::from_ids(n_ff, [NeuronId(4)]);
    let error = device.load_ffn(LayerId(0), model.ffn[0].clone(), &part).expect_err("a part of blocks");
    let BackendError::UnsupportedType { ty: WeightType::Q8_0, supported, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(supported, &[WeightType::F32, WeightType::F16, WeightType::BF16]);
    assert!(error.to_string().contains("blocks run over neurons"), "{error}");
    for owned in [NeuronSet::all(n_ff), NeuronSet::none(n_ff)] {
        device.load_ffn(LayerId(0), model.ffn[0].clone(), &owned).expect("whole or nothing");
    }
    let odd = WeightMatrix::try_new("odd", WeightType::Q5_0, 96, 64, WeightBytes::from_vec(vec![0; 96 * 44]));
    let mut ffn = model.ffn[0].clone();
    ffn.up = odd.expect("the shape fits");
    let error = device.load_ffn(LayerId(0), ffn, &NeuronSet::all(n_ff)).expect_err("no kernel");
    assert!(matches!(&error, BackendError::UnsupportedType { ty: WeightType::Q5_0, .. }), "{error}");
}

#[test]
fn memory_is_accounted_for_and_limited() {
    if !is_emulated() {
        return;
    }
    let model = TinyModel::new(TinyOptions::default());
    let spec: &Arc<ModelSpec> = &model.spec;
    let make = |limit| {
        let gpu = EmulatedGpu::new(1, false, Arc::default());
        backend_with(spec, CudaKvType::F16, gpu, limit).expect("the constants fit")
    };
    let mut device = make(None);
    let constants = device.memory_used();
    let rounded = |n: usize| n.next_multiple_of(256) as u64;
    assert_eq!(constants, rounded(4 * spec.head_dim / 2) + rounded(spec.n_layer * 128));
    let owned = NeuronSet::from_ids(96, (0..7).map(NeuronId));
    device.load_ffn(LayerId(0), model.ffn[0].clone(), &owned).expect("there is memory");
    let neurons = 3 * rounded(7 * 64 * 4) + rounded(7 * 4);
    assert_eq!(device.memory_used() - constants, neurons);
    for part in model.dense.clone() {
        device.load_dense(part).expect("there is memory");
    }
    let before = device.memory_used();
    device.reserve(SeqId(0), 300, 4).expect("there is memory");
    let with_scratch = device.memory_used();
    device.reserve(SeqId(1), 300, 4).expect("there is memory");
    let caches = 2 * 3 * rounded(300 * spec.kv_dim() * 2);
    assert_eq!(device.memory_used() - with_scratch, caches);
    let everything = device.memory_used();
    device.release(SeqId(1));
    assert_eq!(device.memory_used(), with_scratch);
    device.reserve(SeqId(0), 300, 2).expect("nothing to do");
    assert_eq!(device.memory_used(), with_scratch);
    // Tables, h, x, q, k, v, mixed, attention over two spans, logits; x, bits, hidden, list, counts, three chunks, marks, sum.
    let home = [2 * 16 + 3 * 2 * 32, 1024, 1024, 1024, 512, 512, 1024, 4 * (4 * 4 * 2 * 18), 4 * 4 * 96];
    let ffn = [1024, 4 * 2 * 8, 4 * 4 * 96, 4 * 4 * 96, 16, 4 * 4 * 3 * 64, 4 * 96, 1024];
    let scratch: u64 = home.into_iter().chain(ffn).map(rounded).sum();
    assert_eq!(with_scratch - before, caches + scratch);
    assert_eq!(device.memory_peak(), everything);

    // The same again, with just enough memory and with a byte too little at each stage.
    let run = |limit| -> Result<CudaBackend, BackendError> {
        let mut device = make(Some(limit));
        device.load_ffn(LayerId(0), model.ffn[0].clone(), &owned)?;
        for part in model.dense.clone() {
            device.load_dense(part)?;
        }
        device.reserve(SeqId(0), 300, 4)?;
        device.reserve(SeqId(1), 300, 4)?;
        Ok(device)
    };
    assert_eq!(run(everything).expect("just enough").memory_used(), everything);
    let mut left = Vec::new();
    for (limit, needs) in [(constants + neurons - 1, neurons), (everything - 1, caches)] {
        match run(limit) {
            Err(BackendError::OutOfMemory { need_bytes, have_bytes, .. }) => {
                assert_eq!((need_bytes, have_bytes), (needs, needs - 1));
                left.push(have_bytes);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(left.len(), 2);
    let error = run(constants).expect_err("nothing is left").to_string();
    assert!(error.contains("for neurons") && error.contains("0 are left"), "{error}");
    let mut device = run(everything).expect("just enough");
    let error = device.reserve(SeqId(0), usize::MAX, 4).expect_err("more than can be addressed");
    assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
    assert_eq!(device.memory_used(), everything);

    // A reservation that fails leaves what was there as it was.
    let mut device = run(everything).expect("just enough");
    device.release(SeqId(1));
    for (kv_len, max_rows) in [(301, 4), (8, 100_000)] {
        device.reserve(SeqId(2), kv_len, max_rows).expect_err("too much");
        assert_eq!(device.memory_used(), with_scratch);
    }
    device.embed(&Step { rows: &[row(0, 5)], mode: ActiveMode::Exact });
}

#[test]
fn the_limit_sees_what_the_device_rounds_up() {
    if !is_emulated() {
        return;
    }
    const GRANULE: u64 = 2 << 20;
    let model = TinyModel::new(TinyOptions::default());
    let run = |limit| -> Result<CudaBackend, BackendError> {
        let gpu = EmulatedGpu::new(1, false, Arc::default()).with_granule(GRANULE);
        let mut device = backend_with(&model.spec, CudaKvType::F16, gpu, limit)?;
        device.load_ffn(LayerId(0), model.ffn[0].clone(), &NeuronSet::all(96))?;
        device.reserve(SeqId(0), 8, 4)?;
        Ok(device)
    };
    let mut all = run(None).expect("there is memory");
    // Constants, neurons and the scratch; the cache has no layer.
    let buffers = 3;
    assert_eq!(all.memory_taken(), buffers * GRANULE);
    assert!(all.memory_used() < GRANULE && all.memory_used() == all.memory_peak());
    all.record_fired(true);
    assert_eq!(all.memory_taken(), (buffers + 1) * GRANULE);
    all.record_fired(false);
    assert_eq!(all.memory_taken(), buffers * GRANULE);
    run(Some(buffers * GRANULE)).expect("just enough");
    match run(Some(buffers * GRANULE - 1)) {
        Err(BackendError::OutOfMemory { need_bytes, have_bytes, .. }) => {
            assert_eq!((need_bytes, have_bytes), (GRANULE, GRANULE - 1));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_machine_without_a_driver_is_told_so() {
    match powerinfer_cuda::devices() {
        Ok(devices) => assert!(!devices.is_empty()),
        Err(error) => {
            let BackendError::Unavailable { backend, reason } = &error else { panic!("{error}") };
            assert_eq!(backend, "cuda");
            assert!(!reason.is_empty());
            let model = TinyModel::new(TinyOptions::default());
            let made = CudaBackend::new(Arc::clone(&model.spec), CudaOptions::default());
            assert_eq!(made.expect_err("there is no device"), error);
        }
    }
    let model = TinyModel::new(TinyOptions { activation: Activation::Silu, ..TinyOptions::default() });
    let none = CudaOptions { device: 1 << 20, ..CudaOptions::default() };
    let error = CudaBackend::new(Arc::clone(&model.spec), none).expect_err("nobody has so many");
    assert!(matches!(error, BackendError::Unavailable { .. }), "{error}");
}

#[test]
fn a_longer_cache_keeps_what_it_held() {
    if !is_emulated() {
        return;
    }
    let model = TinyModel::new(TinyOptions::default());
    let mut device = loaded(&model, CudaKvType::F16);
    let mut drive = Drive::new(&model.spec, vec![&mut device], 9);
    drive.step(0, &TOKENS[..9], ActiveMode::Exact);
    let want = drive.step(9, &TOKENS[9..12], ActiveMode::Exact).to_vec();
    drive.backends()[0].reserve(SeqId(0), 700, 9).expect("there is memory");
    assert_eq!(drive.step(9, &TOKENS[9..12], ActiveMode::Exact), want);
}

#[test]
fn attention_over_several_spans_matches_the_reference() {
    if !is_emulated() {
        return;
    }
    let model = TinyModel::new(TinyOptions { family: Family::Falcon(true), ..TinyOptions::default() });
    let mut slow = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
    model.load_all(&mut slow);
    let mut device = loaded(&model, CudaKvType::F32);
    let run = |backend: &mut dyn HybridBackend| {
        let mut drive = Drive::new(&model.spec, vec![backend], 60);
        drive.backends()[0].reserve(SeqId(0), 600, 60).expect("there is memory");
        let mut last = Vec::new();
        for first in (0..540).step_by(60) {
            let tokens: Vec<u32> = (first..first + 60).map(|i| i * 31 % 96).collect();
            last = drive.step(first, &tokens, ActiveMode::Exact).to_vec();
        }
        last.extend_from_slice(drive.step(540, &[7], ActiveMode::Exact));
        last
    };
    let want = run(&mut slow);
    assert_close("540 positions", &run(&mut device), &want, NMSE_F32);
}
