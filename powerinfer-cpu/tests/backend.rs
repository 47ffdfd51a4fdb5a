//! What the CPU backend takes, refuses and says of itself.

use std::sync::Arc;

use powerinfer_cpu::{CpuBackend, CpuLevel, CpuOptions, KvType};
use powerinfer_sparse_ops::{
    ActiveMode, BackendError, DownWeights, FfnInput, HybridBackend, LayerId, NeuronId, NeuronSet, SeqId,
    WeightBytes, WeightMatrix, WeightType,
};
use powerinfer_testing::drive::Drive;
use powerinfer_testing::tiny::{Random, TinyModel, TinyOptions};
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
