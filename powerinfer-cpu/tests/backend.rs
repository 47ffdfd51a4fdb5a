//! What the CPU backend takes, refuses and says of itself.

use std::sync::Arc;

use powerinfer_cpu::{CpuBackend, CpuLevel, CpuOptions, KvType};
use powerinfer_sparse_ops::{
    ActiveMode, BackendError, DownWeights, HybridBackend, LayerId, NeuronSet, SeqId, WeightBytes,
    WeightMatrix, WeightType,
};
use powerinfer_testing::drive::Drive;
use powerinfer_testing::tiny::{TinyModel, TinyOptions};

const TOKENS: [u32; 10] = [1, 17, 40, 3, 95, 60, 2, 33, 8, 9];

fn backend(model: &TinyModel, threads: usize, level: CpuLevel, kv_type: KvType) -> CpuBackend {
    CpuBackend::new(Arc::clone(&model.spec), CpuOptions { threads, level: Some(level), kv_type })
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
fn a_cache_beyond_memory_is_an_error_and_a_longer_one_keeps_its_content() {
    let model = TinyModel::new(TinyOptions::default());
    let mut cpu = backend(&model, 1, CpuLevel::detect(), KvType::F16);
    model.load_all(&mut cpu);
    for kv_len in [usize::MAX, usize::MAX / 256] {
        let error = cpu.reserve(SeqId(0), kv_len, 1).unwrap_err();
        assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
    }
    let mut drive = Drive::new(&model.spec, vec![&mut cpu], 8);
    drive.step(0, &TOKENS[..8], ActiveMode::Dense);
    let want = drive.step(8, &TOKENS[8..10], ActiveMode::Dense).to_vec();
    drive.backends()[0].reserve(SeqId(0), 200, 2).unwrap();
    assert_eq!(drive.step(8, &TOKENS[8..10], ActiveMode::Dense), want);
}

#[test]
fn a_backend_says_what_it_is() {
    let model = TinyModel::new(TinyOptions::default());
    let info = backend(&model, 3, CpuLevel::Scalar, KvType::F32).info();
    assert_eq!((info.name.as_str(), info.description.as_str()), ("cpu", "scalar, 3 threads, F32 cache"));
    let default = CpuBackend::new(Arc::clone(&model.spec), CpuOptions::default()).unwrap();
    assert_eq!(default.level(), CpuLevel::detect());
}
