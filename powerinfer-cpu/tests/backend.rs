//! The CPU backend at every level keeps the contracts, and gives the same bits however a step is cut.

use std::sync::Arc;

use powerinfer_cpu::{CpuBackend, CpuLevel, CpuOptions, KvType};
use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{
    Activation, ActiveMode, BackendError, DownWeights, HybridBackend, LayerId, ModelSpec, NeuronSet, SeqId,
    WeightBytes, WeightMatrix, WeightType,
};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure_all_threads};
use powerinfer_testing::conformance::{self, Subject};
use powerinfer_testing::drive::Drive;
use powerinfer_testing::tiny::{Family, TinyModel, TinyOptions};
use powerinfer_testing::tolerance::{NMSE_8_BIT, NMSE_F16_KV, NMSE_F32, assert_close};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const TOKENS: [u32; 21] = [1, 17, 40, 3, 95, 60, 2, 33, 8, 9, 10, 11, 12, 13, 90, 91, 92, 5, 5, 6, 7];
const MODES: [ActiveMode; 3] = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];

fn backend(spec: &Arc<ModelSpec>, threads: usize, level: CpuLevel, kv_type: KvType) -> CpuBackend {
    CpuBackend::new(Arc::clone(spec), CpuOptions { threads, level: Some(level), kv_type }).unwrap()
}

fn loaded(model: &TinyModel, threads: usize, level: CpuLevel) -> CpuBackend {
    let mut backend = backend(&model.spec, threads, level, KvType::F16);
    model.load_all(&mut backend);
    backend
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

// One test, since it counts the allocations of all threads.
#[test]
fn contracts_hold_at_every_level() {
    for level in CpuLevel::available() {
        for kv_type in [KvType::F32, KvType::F16] {
            let make = |threads: usize| {
                move |spec: Arc<ModelSpec>| -> Box<dyn HybridBackend> {
                    Box::new(backend(&spec, threads, level, kv_type))
                }
            };
            let subject = Subject {
                make: &make(2),
                same_bits: &[&make(1), &make(3), &make(8)],
                count_allocations: Some(&|work| measure_all_threads(work).1.n_allocs),
                nmse_limit: NMSE_F32,
                kv_value_bytes: kv_type.n_bytes() as u64,
            };
            match kv_type {
                KvType::F32 => conformance::run(&subject),
                // Rounded keys may move a score over the predictor's threshold, so what is compared with the
                // reference is left to the F32 cache and to `f16_caches_stay_close_to_the_reference`.
                KvType::F16 => {
                    conformance::c5_steps_do_not_allocate(&subject);
                    conformance::c6_bits_do_not_depend_on_threads(&subject);
                    conformance::c7_the_caller_owns_lengths(&subject);
                }
            }
        }
    }
    f16_caches_stay_close_to_the_reference();
    prompts_give_the_same_bits_whole_in_pieces_and_singly();
    dense_and_exact_give_the_same_bits();
    quantised_models_stay_close_to_the_reference();
}

fn f16_caches_stay_close_to_the_reference() {
    for family in Family::ALL {
        let model = TinyModel::new(TinyOptions { family, ..TinyOptions::default() });
        let want = reference(&model);
        for level in CpuLevel::available() {
            let mut backend = loaded(&model, 2, level);
            let mut drive = Drive::new(&model.spec, vec![&mut backend], TOKENS.len());
            let got = drive.step(0, &TOKENS, ActiveMode::Exact);
            assert_close(&format!("{family:?}, {}", level.name()), got, &want, NMSE_F16_KV);
            let row_bytes = 2 * 2 * model.spec.kv_dim() as u64;
            let positions = (TOKENS.len() * (TOKENS.len() + 1) / 2 * model.spec.n_layer) as u64;
            assert_eq!(drive.backends()[0].take_cost().kv_bytes, positions * row_bytes);
        }
    }
}

fn reference(model: &TinyModel) -> Vec<f32> {
    let mut reference = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
    model.load_all(&mut reference);
    Drive::new(&model.spec, vec![&mut reference], TOKENS.len()).step(0, &TOKENS, ActiveMode::Exact).to_vec()
}

/// Types with an encoder.
const TYPES: [WeightType; 7] = [
    WeightType::F32,
    WeightType::F16,
    WeightType::BF16,
    WeightType::Q8_0,
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
];

fn models() -> impl Iterator<Item = (TinyModel, String)> {
    TYPES.into_iter().flat_map(|ty| {
        [(true, Activation::Relu), (false, Activation::Relu), (false, Activation::Silu)]
            .into_iter()
            .filter(move |(by_neuron, _)| !by_neuron || !matches!(ty, WeightType::Q4_1 | WeightType::Q5_0))
            .map(move |(down_by_neuron, activation)| {
                let options = TinyOptions {
                    ffn_type: ty,
                    dense_type: ty,
                    down_by_neuron,
                    activation,
                    n_ff: 1376,
                    ..TinyOptions::default()
                };
                (TinyModel::new(options), format!("{ty}, by neuron {down_by_neuron}, {activation:?}"))
            })
    })
}

fn prompts_give_the_same_bits_whole_in_pieces_and_singly() {
    for (model, what) in models() {
        for level in CpuLevel::available() {
            for mode in MODES {
                let mut backend = loaded(&model, 2, level);
                let mut drive = Drive::new(&model.spec, vec![&mut backend], TOKENS.len());
                let want = bits(drive.step(0, &TOKENS, mode));
                for piece in [1, 2, 17] {
                    let mut got = Vec::new();
                    for (at, tokens) in TOKENS.chunks(piece).enumerate() {
                        got.extend(bits(drive.step((at * piece) as u32, tokens, mode)));
                    }
                    assert!(got == want, "{what}, {}, {mode:?}: pieces of {piece}", level.name());
                }
            }
        }
    }
}

fn dense_and_exact_give_the_same_bits() {
    for (model, what) in models() {
        for level in CpuLevel::available() {
            let mut backend = loaded(&model, 3, level);
            let mut drive = Drive::new(&model.spec, vec![&mut backend], TOKENS.len());
            let dense = bits(drive.step(0, &TOKENS, ActiveMode::Dense));
            let dense_cost = drive.backends()[0].take_cost();
            let exact = bits(drive.step(0, &TOKENS, ActiveMode::Exact));
            let exact_cost = drive.backends()[0].take_cost();
            assert!(dense == exact, "{what}, {}", level.name());
            if model.spec.activation == Activation::Relu {
                assert!(exact_cost.up_rows < dense_cost.up_rows, "{what}: nothing was skipped");
            }
        }
    }
}

fn quantised_models_stay_close_to_the_reference() {
    for (model, what) in models() {
        // Not by prediction, which is a cut at a threshold, where a small difference has a large effect.
        let want = reference(&model);
        for level in CpuLevel::available() {
            let mut backend = loaded(&model, 2, level);
            let mut drive = Drive::new(&model.spec, vec![&mut backend], TOKENS.len());
            let got = drive.step(0, &TOKENS, ActiveMode::Exact);
            assert_close(&format!("{what}, {}", level.name()), got, &want, NMSE_8_BIT);
        }
    }
}

#[test]
fn a_type_without_a_kernel_is_refused_by_name() {
    let model = TinyModel::new(TinyOptions::default());
    let mut backend = backend(&model.spec, 1, CpuLevel::Scalar, KvType::F16);
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
    let mut cpu = loaded(&model, 1, CpuLevel::detect());
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
    let info = backend(&model.spec, 3, CpuLevel::Scalar, KvType::F32).info();
    assert_eq!((info.name.as_str(), info.description.as_str()), ("cpu", "scalar, 3 threads, F32 cache"));
    let default = CpuBackend::new(Arc::clone(&model.spec), CpuOptions::default()).unwrap();
    assert_eq!(default.level(), CpuLevel::detect());
}
