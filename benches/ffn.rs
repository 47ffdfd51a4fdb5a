//! One FFN layer on the CPU backend at several shares of firing neurons, against computing all of it.
//!
//! Every case first compares its result with the reference backend and fails if it is wrong. Throughput counts
//! the bytes of weight rows that were really read.
#![expect(clippy::expect_used, reason = "a bench that cannot be set up should stop")]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use powerinfer_cpu::{CpuBackend, CpuOptions};
use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{
    ActiveMode, FfnInput, FfnWeights, HybridBackend, LayerId, ModelSpec, NeuronId, NeuronSet, SeqId, WeightType,
};
use powerinfer_testing::tiny::{Random, TinyModel, TinyOptions};
use powerinfer_testing::tolerance::{NMSE_8_BIT, NMSE_F32, assert_close};

const N_EMBD: usize = 1024;
const N_FF: usize = 4096;
const LAYER: LayerId = LayerId(0);

/// A layer whose gate fires for the first neurons of a random order and for no other.
struct Case {
    spec: Arc<ModelSpec>,
    ffn: FfnWeights,
    input: FfnInput,
}

impl Case {
    fn new(ty: WeightType, fired_percent: usize) -> Self {
        let options = TinyOptions { n_embd: N_EMBD, n_ff: N_FF, ffn_type: ty, ..TinyOptions::default() };
        let model = TinyModel::new(options);
        let mut random = Random::new(17);
        let mut input = FfnInput::with_capacity(1, N_EMBD, N_FF);
        input.x = random.normals(N_EMBD, 1.0);
        input.active.reset(1, N_FF);
        input.mode = ActiveMode::Predictor;
        for j in 0..N_FF as u32 {
            if random.below(100) < fired_percent {
                input.active.insert(0, NeuronId(j));
            }
        }
        Self { spec: model.spec, ffn: model.ffn[0].clone(), input }
    }

    fn load(&self, backend: &mut dyn HybridBackend) {
        backend.load_ffn(LAYER, self.ffn.clone(), &NeuronSet::all(N_FF)).expect("supported types");
        backend.reserve(SeqId(0), 1, 1).expect("one position fits");
    }

    fn run(&self, backend: &mut dyn HybridBackend, sum: &mut [f32]) {
        let ticket = backend.ffn_start(LAYER, &self.input);
        backend.ffn_finish(ticket, sum);
    }
}

fn ffn(criterion: &mut Criterion) {
    for ty in [WeightType::F16, WeightType::Q8_0, WeightType::Q4_0] {
        let mut group = criterion.benchmark_group(format!("ffn {ty} {N_EMBD}x{N_FF}"));
        for percent in [100, 50, 20, 10, 5, 1] {
            let case = Case::new(ty, percent);
            let mut reference = ReferenceBackend::new(Arc::clone(&case.spec), Rounding::None);
            case.load(&mut reference);
            let mut want = vec![0.0; N_EMBD];
            case.run(&mut reference, &mut want);

            let mut cpu = CpuBackend::new(Arc::clone(&case.spec), CpuOptions::default())
                .expect("threads can be started");
            case.load(&mut cpu);
            let mut got = vec![0.0; N_EMBD];
            case.run(&mut cpu, &mut got);
            let limit = if ty == WeightType::F16 { NMSE_F32 } else { NMSE_8_BIT };
            assert_close(&format!("{ty} at {percent} %"), &got, &want, limit);

            group.throughput(Throughput::Bytes(cpu.take_cost().weight_bytes));
            group.bench_function(format!("{percent} % active"), |bencher| {
                bencher.iter(|| {
                    got.fill(0.0);
                    case.run(&mut cpu, &mut got);
                    black_box(&got);
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, ffn);
criterion_main!(benches);
