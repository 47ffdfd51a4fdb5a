//! The CPU backend at every level keeps the contracts, and gives the same bits however a step is cut.

use std::sync::Arc;

use powerinfer_cpu::{Certified, CpuBackend, CpuLevel, CpuOptions, KvType};
use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{
    Activation, ActiveMode, HybridBackend, ModelSpec, SeqId, WeightBytes, WeightMatrix, WeightType,
};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure_all_threads};
use powerinfer_testing::conformance::{self, Subject};
use powerinfer_testing::drive::Drive;
use powerinfer_testing::tiny::{Family, Random, TinyModel, TinyOptions};
use powerinfer_testing::tolerance::{NMSE_8_BIT_TINY_MODEL, NMSE_F16_KV, NMSE_F32, assert_close};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const TOKENS: [u32; 21] = [1, 17, 40, 3, 95, 60, 2, 33, 8, 9, 10, 11, 12, 13, 90, 91, 92, 5, 5, 6, 7];
const MODES: [ActiveMode; 3] = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];

fn backend(spec: &Arc<ModelSpec>, threads: usize, level: CpuLevel, kv_type: KvType) -> CpuBackend {
    CpuBackend::new(
        Arc::clone(spec),
        CpuOptions { threads, level: Some(level), kv_type, ..CpuOptions::default() },
    )
    .expect("threads start")
}

fn loaded(model: &TinyModel, threads: usize, level: CpuLevel) -> CpuBackend {
    let mut backend = backend(&model.spec, threads, level, KvType::F16);
    model.load_all(&mut backend);
    backend
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

// One test and alone in its file, since it counts the allocations of all threads.
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
                kv_value_bytes: kv_type.n_bytes(1) as u64,
            };
            match kv_type {
                KvType::F32 => conformance::run(&subject),
                // Rounded keys may move a score over the predictor's threshold, so what is compared with the
                // reference is left to the F32 cache and to `rounded_caches_stay_close_to_the_reference`.
                KvType::F16 | KvType::Q8_0 => {
                    conformance::c5_steps_do_not_allocate(&subject);
                    conformance::c6_bits_do_not_depend_on_threads(&subject);
                    conformance::c7_the_caller_owns_lengths(&subject);
                }
            }
        }
        certificates_change_no_bit_and_allocate_nothing(level);
    }
    rounded_caches_stay_close_to_the_reference();
    steps_behind_the_first_span_do_not_allocate();
    prompts_give_the_same_bits_whole_in_pieces_and_singly();
    dense_and_exact_give_the_same_bits();
    quantised_models_stay_close_to_the_reference();
}

fn certificates_change_no_bit_and_allocate_nothing(level: CpuLevel) {
    let make = |threads: usize, certified: Certified| {
        move |spec: Arc<ModelSpec>| -> Box<dyn HybridBackend> {
            let options = CpuOptions {
                threads,
                level: Some(level),
                certified,
                kv_type: KvType::F32,
                ..CpuOptions::default()
            };
            Box::new(CpuBackend::new(spec, options).expect("threads start"))
        }
    };
    let subject = Subject {
        make: &make(2, Certified::On),
        same_bits: &[&make(3, Certified::On), &make(1, Certified::Off)],
        count_allocations: Some(&|work| measure_all_threads(work).1.n_allocs),
        nmse_limit: NMSE_F32,
        kv_value_bytes: 4,
    };
    conformance::c5_steps_do_not_allocate(&subject);
    conformance::c6_bits_do_not_depend_on_threads(&subject);
}

fn rounded_caches_stay_close_to_the_reference() {
    for family in Family::ALL {
        // Heads of 64, since Q8_0 has blocks of 32.
        let model = TinyModel::new(TinyOptions { family, n_embd: 256, ..TinyOptions::default() });
        let want = reference(&model);
        for (kv_type, limit) in [(KvType::F16, NMSE_F16_KV), (KvType::Q8_0, NMSE_8_BIT_TINY_MODEL)] {
            for level in CpuLevel::available() {
                let mut backend = backend(&model.spec, 2, level, kv_type);
                model.load_all(&mut backend);
                let mut drive = Drive::new(&model.spec, vec![&mut backend], TOKENS.len());
                let got = drive.step(0, &TOKENS, ActiveMode::Exact);
                assert_close(&format!("{family:?}, {kv_type:?}, {}", level.name()), got, &want, limit);
                let row_bytes = match kv_type {
                    KvType::Q8_0 => 2 * 34 * (model.spec.kv_dim() / 32) as u64,
                    _ => 2 * 2 * model.spec.kv_dim() as u64,
                };
                let positions = (TOKENS.len() * (TOKENS.len() + 1) / 2 * model.spec.n_layer) as u64;
                assert_eq!(drive.backends()[0].take_cost().kv_bytes, positions * row_bytes);
            }
        }
    }
}

fn steps_behind_the_first_span_do_not_allocate() {
    let model = TinyModel::new(TinyOptions { n_embd: 128, ..TinyOptions::default() });
    for kv_type in [KvType::F32, KvType::F16, KvType::Q8_0] {
        let mut backend = backend(&model.spec, 3, CpuLevel::detect(), kv_type);
        model.load_all(&mut backend);
        let mut drive = Drive::new(&model.spec, vec![&mut backend], TOKENS.len());
        drive.backends()[0].reserve(SeqId(0), 700, TOKENS.len()).expect("700 positions fit");
        let allocs = measure_all_threads(|| {
            for first in [0, 250, 679, 690] {
                drive.step(first, &TOKENS[..10], ActiveMode::Exact);
                drive.step(first, &TOKENS[..1], ActiveMode::Exact);
            }
            drive.step(600, &TOKENS, ActiveMode::Exact);
        });
        assert_eq!(allocs.1.n_allocs, 0, "{kv_type:?}");
    }
}

fn reference(model: &TinyModel) -> Vec<f32> {
    let mut reference = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
    model.load_all(&mut reference);
    Drive::new(&model.spec, vec![&mut reference], TOKENS.len()).step(0, &TOKENS, ActiveMode::Exact).to_vec()
}

/// Types with an encoder.
const TYPES: [WeightType; 5] =
    [WeightType::F32, WeightType::F16, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0];

fn models() -> impl Iterator<Item = (TinyModel, String)> {
    let encoded = TYPES.into_iter().flat_map(|ty| {
        [(true, Activation::Relu), (false, Activation::Relu), (false, Activation::Silu)].into_iter().map(
            move |(down_by_neuron, activation)| {
                let options = TinyOptions {
                    ffn_type: ty,
                    dense_type: ty,
                    down_by_neuron,
                    activation,
                    // More blocks of 32 neurons than there are chunks; once, since it takes time.
                    n_ff: if ty == WeightType::Q8_0 { 1376 } else { 352 },
                    ..TinyOptions::default()
                };
                (TinyModel::new(options), format!("{ty}, by neuron {down_by_neuron}, {activation:?}"))
            },
        )
    });
    let copies = TinyOptions { ffn_type: WeightType::Q8_0, n_embd: 288, n_ff: 352, ..TinyOptions::default() };
    let copies = (TinyModel::new(copies).with_gate_copies(), "gate copies".to_owned());
    encoded.chain([copies]).chain(
        OTHERS.into_iter().map(|(ty, scales)| (with_random_blocks(ty, scales), format!("{ty} gate and up"))),
    )
}

/// Types without an encoder, and where a block has its f16 scales.
const OTHERS: [(WeightType, &[usize]); 5] = [
    (WeightType::Q4_1, &[0, 2]),
    (WeightType::Q5_0, &[0]),
    (WeightType::Q2_K, &[80, 82]),
    (WeightType::Q4_K, &[0, 2]),
    (WeightType::Q6_K, &[208]),
];

/// A model whose gate and up rows are random blocks with small scales.
fn with_random_blocks(ty: WeightType, scales: &[usize]) -> TinyModel {
    let mut model = TinyModel::new(TinyOptions { n_embd: 256, n_ff: 200, ..TinyOptions::default() });
    let mut random = Random::new(u64::from(ty as u8));
    for ffn in &mut model.ffn {
        for matrix in [ffn.gate.as_mut().expect("the model has a gate"), &mut ffn.up] {
            let n_bytes = ty.row_bytes(256).expect("whole blocks") * 200;
            let mut bytes: Vec<u8> = (0..n_bytes).map(|_| random.next_u64() as u8).collect();
            for block in bytes.chunks_exact_mut(ty.block_bytes()) {
                for &at in scales {
                    // About 2^-9, either sign.
                    block[at + 1] = block[at + 1] & 0x83 | 0x18;
                }
            }
            *matrix = WeightMatrix::try_new(matrix.name(), ty, 200, 256, WeightBytes::from_vec(bytes))
                .expect("the shape fits");
        }
    }
    model
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
            let mut run = |mode| {
                let whole = bits(drive.step(0, &TOKENS, mode));
                // Large steps may compute what nobody wants.
                drive.backends()[0].take_cost();
                drive.step(0, &TOKENS[..4], mode);
                (whole, drive.backends()[0].take_cost())
            };
            let (dense, dense_cost) = run(ActiveMode::Dense);
            let (exact, exact_cost) = run(ActiveMode::Exact);
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
            assert_close(&format!("{what}, {}", level.name()), got, &want, NMSE_8_BIT_TINY_MODEL);
        }
    }
}
