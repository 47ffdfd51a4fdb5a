//! What the CPU backend takes, refuses and says of itself.

use std::sync::Arc;

use powerinfer_cpu::{Certified, CpuBackend, CpuLevel, CpuOptions, KvType, WeightHome};
use powerinfer_sparse_ops::{
    ActiveMode, BackendError, DownWeights, FfnInput, HybridBackend, LayerId, NeuronId, NeuronSet, SeqId,
    StepCost, WeightBytes, WeightMatrix, WeightType,
};
use powerinfer_testing::drive::Drive;
use powerinfer_testing::tiny::{Family, Random, TinyModel, TinyOptions};
use powerinfer_testing::tolerance::{NMSE_F32, assert_close};

const TOKENS: [u32; 10] = [1, 17, 40, 3, 95, 60, 2, 33, 8, 9];

fn backend(model: &TinyModel, threads: usize, level: CpuLevel, kv_type: KvType) -> CpuBackend {
    CpuBackend::new(
        Arc::clone(&model.spec),
        CpuOptions { threads, level: Some(level), kv_type, ..CpuOptions::default() },
    )
    .expect("threads start")
}

#[test]
fn a_type_without_a_kernel_is_refused_by_name() {
    let model = TinyModel::new(TinyOptions::default());
    let mut backend = backend(&model, 1, CpuLevel::Scalar, KvType::F16);
    let mut weights = model.ffn[0].clone();
    let bytes = WeightBytes::from_vec(vec![0; 96 * 2 * 20]);
    weights.down = DownWeights::ByNeuron(
        WeightMatrix::try_new("blk.0.ffn_down_t", WeightType::Q4_1, 96, 64, bytes).unwrap(),
    );
    let error = backend.load_ffn(LayerId(0), weights, &NeuronSet::all(96)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`blk.0.ffn_down_t` is Q4_1, for which cpu has no kernel as FFN down by neuron; \
         supported: F32, F16, BF16, Q8_0, Q4_0"
    );
}

#[test]
fn what_is_beyond_memory_is_an_error_and_a_longer_cache_keeps_its_content() {
    let model = TinyModel::new(TinyOptions::default());
    let mut cpu = backend(&model, 1, CpuLevel::detect(), KvType::F16);
    model.load_all(&mut cpu);
    for kv_len in [usize::MAX, usize::MAX / 256] {
        let error = cpu.reserve(SeqId(0), kv_len, 1).unwrap_err();
        assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
    }
    for max_rows in [usize::MAX, usize::MAX / 65536] {
        let error = cpu.reserve(SeqId(0), 1, max_rows).unwrap_err();
        assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
    }
    let mut drive = Drive::new(&model.spec, vec![&mut cpu], 8);
    drive.step(0, &TOKENS[..8], ActiveMode::Dense);
    let want = drive.step(8, &TOKENS[8..10], ActiveMode::Dense).to_vec();
    drive.backends()[0].reserve(SeqId(0), 200, 2).unwrap();
    assert_eq!(drive.step(8, &TOKENS[8..10], ActiveMode::Dense), want);
}

#[test]
fn heads_that_are_not_whole_blocks_of_the_cache_are_refused() {
    let model = TinyModel::new(TinyOptions::default());
    let options = CpuOptions { kv_type: KvType::Q8_0, ..CpuOptions::default() };
    let error = CpuBackend::new(Arc::clone(&model.spec), options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cpu keeps Q8_0 keys and values in blocks of 32, and the model's heads have 16 values"
    );
}

#[test]
fn the_memory_of_a_cache_is_counted_by_its_type() {
    let model = TinyModel::new(TinyOptions { n_embd: 128, ..TinyOptions::default() });
    // A multiple of the tile, and more than any machine has.
    let kv_len = 1 << 46;
    for kv_type in [KvType::F16, KvType::F32, KvType::Q8_0] {
        let mut cpu = backend(&model, 1, CpuLevel::detect(), kv_type);
        cpu.reserve(SeqId(0), kv_len, 1).expect("without a layer at home there is nothing to keep");
        model.load_all(&mut cpu);
        let BackendError::OutOfMemory { need_bytes, .. } = cpu.reserve(SeqId(0), kv_len, 1).unwrap_err()
        else {
            panic!("{kv_type:?}: another error")
        };
        let n_values = 2 * model.spec.n_layer * model.spec.kv_dim();
        let row_bytes = match kv_type {
            KvType::F16 => n_values * 2,
            KvType::F32 => n_values * 4,
            KvType::Q8_0 => n_values / 32 * 34,
        };
        assert_eq!(need_bytes, (kv_len * row_bytes) as u64, "{kv_type:?}");
    }
}

#[test]
fn a_backend_says_what_it_is() {
    let model = TinyModel::new(TinyOptions::default());
    let info = backend(&model, 3, CpuLevel::Scalar, KvType::F32).info();
    assert_eq!((info.name.as_str(), info.description.as_str()), ("cpu", "scalar, 3 threads, F32 cache"));
    let default = CpuBackend::new(Arc::clone(&model.spec), CpuOptions::default()).unwrap();
    assert_eq!(default.level(), CpuLevel::detect());
}

#[test]
fn a_relaid_down_projection_reads_what_fires_and_never_rounds_the_hidden_vector() {
    let options = TinyOptions { ffn_type: WeightType::Q8_0, down_by_neuron: false, ..TinyOptions::default() };
    let model = TinyModel::new(options);
    let ffn = &model.ffn[0];
    let (n_embd, n_ff) = (model.spec.n_embd, ffn.n_ff());
    let mut cpu = backend(&model, 2, CpuLevel::detect(), KvType::F16);
    model.load_all(&mut cpu);
    let mut input = FfnInput::with_capacity(1, n_embd, n_ff);
    input.x = Random::new(5).normals(n_embd, 1.0);
    input.active.reset(1, n_ff);
    input.active.fill();
    let mut sums = Vec::new();
    for mode in [ActiveMode::Dense, ActiveMode::Exact] {
        input.mode = mode;
        let ticket = cpu.ffn_start(LayerId(0), &input);
        let mut sum = vec![0.0; n_embd];
        cpu.ffn_finish(ticket, &mut sum);
        sums.push(sum);
        let cost = cpu.take_cost();
        let row_bytes = ffn.up.row_bytes() as u64;
        let scale_bytes =
            cost.weight_bytes - (cost.gate_rows + cost.up_rows) * row_bytes - cost.down_rows * n_embd as u64;
        let n_blocks = scale_bytes / (2 * n_embd as u64);
        assert_eq!(scale_bytes % (2 * n_embd as u64), 0);
        if mode == ActiveMode::Dense {
            assert_eq!((cost.down_rows, n_blocks), (n_ff as u64, n_ff as u64 / 32));
        } else {
            assert_eq!(cost.down_rows, cost.fired_neurons);
            assert!(cost.down_rows > 0 && cost.down_rows < n_ff as u64);
            assert!(n_blocks >= cost.down_rows.div_ceil(32) && n_blocks <= n_ff as u64 / 32);
        }
    }
    assert_eq!(sums[0], sums[1]);

    // Values rounded in blocks would depend on who holds the other neurons of the block.
    let mut parts = vec![0.0; n_embd];
    let some = NeuronSet::from_ids(n_ff, (0..n_ff as u32).filter(|j| j % 3 == 0).map(NeuronId));
    for owned in [some.complement(), some] {
        let mut cpu = backend(&model, 1, CpuLevel::detect(), KvType::F16);
        model.load_ffn(&mut cpu, |_| owned.clone());
        let ticket = cpu.ffn_start(LayerId(0), &input);
        cpu.ffn_finish(ticket, &mut parts);
    }
    assert_close("two parts and the whole", &parts, &sums[0], NMSE_F32);
}

fn with_certificates(model: &TinyModel, level: CpuLevel, certified: Certified) -> CpuBackend {
    let options = CpuOptions { threads: 2, level: Some(level), certified, ..CpuOptions::default() };
    CpuBackend::new(Arc::clone(&model.spec), options).expect("threads start")
}

#[test]
fn certificates_save_gate_rows_and_change_no_bit() {
    for (family, ffn_type, down_by_neuron, n_embd) in [
        (Family::Llama, WeightType::F16, true, 64),
        (Family::Llama, WeightType::F16, false, 416),
        (Family::Bamboo, WeightType::BF16, true, 256),
        (Family::Llama, WeightType::F32, true, 64),
    ] {
        let model = TinyModel::new(TinyOptions {
            family,
            ffn_type,
            down_by_neuron,
            n_embd,
            n_ff: 320,
            ..TinyOptions::default()
        });
        let n_ff = 320;
        let gate_bytes = model.ffn[0].up.row_bytes() as u64;
        let third = NeuronSet::from_ids(n_ff, (0..n_ff as u32).filter(|j| j % 3 == 0).map(NeuronId));
        for (level, owned) in
            CpuLevel::available().into_iter().flat_map(|l| [(l, NeuronSet::all(n_ff)), (l, third.clone())])
        {
            let mut backends = [Certified::Off, Certified::On].map(|certified| {
                let mut cpu = with_certificates(&model, level, certified);
                model.load_ffn(&mut cpu, |_| owned.clone());
                cpu
            });
            let mut run = |input: &FfnInput| {
                let runs = backends.each_mut().map(|cpu| {
                    let mut sum = vec![0.0; input.x.len()];
                    let ticket = cpu.ffn_start(LayerId(0), input);
                    cpu.ffn_finish(ticket, &mut sum);
                    (sum.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), cpu.take_cost())
                });
                assert_eq!(runs[0].0, runs[1].0, "{family:?}, {ffn_type}, {}", level.name());
                runs.map(|(_, cost)| cost)
            };
            let mut input = FfnInput::with_capacity(1, n_embd, n_ff);
            input.x = Random::new(7).normals(n_embd, 1.0);
            input.active.reset(1, n_ff);
            input.active.fill();
            input.mode = ActiveMode::Exact;
            let [off, on] = run(&input);
            let n = owned.len() as u64;
            let saved = off.gate_rows - on.gate_rows;
            assert!(on.gate_rows >= on.fired_neurons && saved > n / 4, "{on:?}");
            let copy_bytes = (n_embd / 32 * 34 + 8) as u64;
            let weight_bytes = off.weight_bytes - saved * gate_bytes + n * copy_bytes;
            assert_eq!(on, StepCost { weight_bytes, gate_rows: on.gate_rows, ..off });

            // Not where they would be read for little: for chosen neurons, in mode dense, in batches.
            input.mode = ActiveMode::Dense;
            let [off, on] = run(&input);
            assert_eq!(on, off);
            input.mode = ActiveMode::Predictor;
            input.active.row_mut(0)[0] &= !1;
            let [off, on] = run(&input);
            assert_eq!(on, off);
            input.mode = ActiveMode::Exact;
            input.x = Random::new(8).normals(3 * n_embd, 1.0);
            input.active.reset(3, n_ff);
            input.active.fill();
            let [off, on] = run(&input);
            assert_eq!(on, off);
        }
    }
}

#[test]
fn gates_get_certificates_where_nothing_else_says_which_neurons_fire() {
    let says = |ffn_type, n_embd, activation, certified, predictors: bool, level| {
        let model = TinyModel::new(TinyOptions { ffn_type, n_embd, activation, ..TinyOptions::default() });
        let mut cpu = with_certificates(&model, level, certified);
        if predictors {
            model.load_all(&mut cpu);
        } else {
            model.load_ffn(&mut cpu, |_| NeuronSet::all(96));
        }
        cpu.info().description.contains("8-bit copies of gates")
    };
    use powerinfer_sparse_ops::Activation::{Relu, Silu};
    for level in CpuLevel::available() {
        let pays = level.name() == "avx512";
        for (ty, n_embd, activation, certified, predictors, expected) in [
            (WeightType::F16, 1024, Relu, Certified::Auto, false, pays),
            (WeightType::BF16, 1024, Relu, Certified::Auto, false, pays),
            (WeightType::F32, 1024, Relu, Certified::Auto, false, false),
            (WeightType::F16, 1024, Relu, Certified::Auto, true, false),
            (WeightType::F16, 64, Relu, Certified::Auto, false, false),
            (WeightType::F16, 64, Relu, Certified::On, true, true),
            (WeightType::F32, 64, Relu, Certified::On, true, true),
            (WeightType::Q8_0, 64, Relu, Certified::On, false, false),
            (WeightType::F16, 64, Silu, Certified::On, false, false),
            (WeightType::F16, 1024, Relu, Certified::Off, false, false),
        ] {
            assert_eq!(
                says(ty, n_embd, activation, certified, predictors, level),
                expected,
                "{ty}, {n_embd}, {activation:?}, {certified:?}, predictors {predictors}, {}",
                level.name()
            );
        }
    }
}

#[test]
fn a_second_start_maps_the_cache_file_of_the_first_and_another_model_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.weights-cache");
    let start = |model: &TinyModel| {
        let options =
            CpuOptions { threads: 2, home: WeightHome::CacheFile(path.clone()), ..CpuOptions::default() };
        let mut cpu = CpuBackend::new(Arc::clone(&model.spec), options).unwrap();
        for part in &model.dense {
            cpu.load_dense(part.clone()).unwrap();
        }
        for (layer, (ffn, predictor)) in (0..).map(LayerId).zip(model.ffn.iter().zip(&model.predictors)) {
            cpu.load_ffn(layer, ffn.clone(), &NeuronSet::all(ffn.n_ff())).unwrap();
            cpu.load_predictor(layer, predictor.clone()).unwrap();
        }
        cpu.load_done(&mut |_, _| {}).unwrap();
        let said = cpu.info().description;
        let logits =
            Drive::new(&model.spec, vec![&mut cpu], 8).step(0, &TOKENS[..8], ActiveMode::Predictor).to_vec();
        (said, logits)
    };
    let model = TinyModel::new(TinyOptions { ffn_type: WeightType::Q8_0, ..TinyOptions::default() });
    let other = TinyModel::new(TinyOptions { ffn_type: WeightType::F16, ..TinyOptions::default() });
    let (said, first) = start(&model);
    assert!(said.contains("huge pages, written to"), "{said}");
    for _ in 0..2 {
        let (said, again) = start(&model);
        assert!(said.contains("in the cache file"), "{said}");
        assert_eq!(again, first);
    }
    let (said, _) = start(&other);
    assert!(said.contains("written to"), "{said}");
    std::fs::write(&path, b"no cache file").unwrap();
    let (said, again) = start(&model);
    assert!(said.contains("written to") && again == first, "{said}");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let (said, again) = start(&model);
    assert!(said.contains("could not be written") && again == first, "{said}");
}
