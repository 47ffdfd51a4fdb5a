//! Which neurons fire, predicted for one layer: speed, with recall and precision beside it.
//!
//! The layer's gate is a matrix of low rank plus noise, and the predictor knows the first part alone. The CPU's sets must
//! be those of the reference but for scores on the edge. Throughput counts the bytes of the predictor.
#![expect(clippy::expect_used, reason = "a bench that cannot be set up should stop")]
#![expect(clippy::print_stderr, reason = "speed says little without recall and precision")]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use powerinfer_cpu::{CpuBackend, CpuOptions};
use powerinfer_predictor::{Quality, QualityCounter};
use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{
    ActiveMode, DensePart, EmbeddingWeights, FfnInput, HybridBackend, LayerId, LowRank, ModelSpec, NeuronId,
    PredictorWeights, SeqId, Step, StepRow, TokenId, WeightMatrix, WeightType,
};
use powerinfer_testing::tiny::{Random, TinyModel, TinyOptions, encoded};

const LAYER: LayerId = LayerId(0);
/// A predictor's rank; half of it, since a linear part needs a hidden unit for each sign.
const RANK: usize = 128;
const N_LINEAR: usize = RANK / 2 - 1;
const N_TOKENS: usize = 16;
/// Below 0, where a neuron fires, by as much as the unknown part of a row varies: few that fire are missed.
const THRESHOLD: f32 = -0.3;
/// The first element of every input, so that the rest of a neuron's row decides about a fixed threshold.
const BIAS: f32 = 4.0;

/// `n_embd` and `n_ff`; a small layer is enough where nothing is timed.
fn shape() -> (usize, usize) {
    if std::env::args().any(|arg| arg == "--bench") { (2048, 8192) } else { (128, 512) }
}

struct Case {
    model: TinyModel,
    /// `[N_TOKENS, n_embd]`.
    inputs: Vec<f32>,
    /// `[n_ff, n_embd]`.
    gate: Vec<f32>,
}

impl Case {
    /// `noise` is the part of a gate row that the predictor does not know, 0 to 1.
    fn new(noise: f32, n_embd: usize, n_ff: usize, ty: WeightType) -> Self {
        let mut model = TinyModel::new(TinyOptions { n_embd, n_ff: 32, ..TinyOptions::default() });
        model.spec = Arc::new(ModelSpec { n_ff: vec![n_ff; model.spec.n_layer], ..(*model.spec).clone() });
        let mut random = Random::new(11);
        let mut inputs = random.normals(N_TOKENS * n_embd, 1.0);
        inputs.chunks_exact_mut(n_embd).for_each(|row| row[0] = BIAS);
        // Bases: fc1 holds each twice, once with its sign turned, and a unit vector for the bias.
        let mut bases = random.normals(N_LINEAR * n_embd, 1.0 / (n_embd as f32).sqrt());
        bases.chunks_exact_mut(n_embd).for_each(|row| row[0] = 0.0);
        let mut fc1 = bases.clone();
        fc1.extend(bases.iter().map(|v| -v));
        fc1.extend((0..2 * n_embd).map(|ix| if ix == 0 { 1.0 } else { 0.0 }));
        let (mut fc2, mut gate) = (Vec::new(), Vec::new());
        for _ in 0..n_ff {
            // A score of variance 1 less 1.3: one in ten fires.
            let mut mix = random.normals(N_LINEAR, ((1.0 - noise * noise) / N_LINEAR as f32).sqrt());
            let bias = -1.3 / BIAS;
            let mut row = random.normals(n_embd, noise / (n_embd as f32).sqrt());
            for (basis, factor) in bases.chunks_exact(n_embd).zip(&mix) {
                row.iter_mut().zip(basis).for_each(|(row, v)| *row += factor * v);
            }
            row[0] = bias;
            gate.extend_from_slice(&row);
            fc2.extend_from_slice(&mix);
            mix.iter_mut().for_each(|v| *v = -*v);
            fc2.extend_from_slice(&mix);
            fc2.extend_from_slice(&[bias, 0.0]);
        }
        model.predictors[0] = PredictorWeights::LowRank(LowRank {
            fc1: encoded("fc1", ty, RANK, n_embd, &fc1),
            fc2: encoded("fc2", ty, n_ff, RANK, &fc2),
            threshold: THRESHOLD,
        });
        let n_vocab = model.spec.n_vocab;
        let rows = inputs.iter().copied().cycle().take(n_vocab * n_embd).collect();
        let token = WeightMatrix::from_f32("token_embd", n_vocab, n_embd, rows).expect("the shape fits");
        model.dense[0] = DensePart::Embedding(EmbeddingWeights { token, position: None });
        Self { model, inputs, gate }
    }

    fn load(&self, backend: &mut dyn HybridBackend) {
        for part in &self.model.dense {
            backend.load_dense(part.clone()).expect("every type is taken");
        }
        backend.load_predictor(LAYER, self.model.predictors[0].clone()).expect("every type is taken");
        backend.reserve(SeqId(0), N_TOKENS, N_TOKENS).expect("the positions fit");
    }

    fn embed(backend: &mut dyn HybridBackend, n: usize) -> Vec<StepRow> {
        let row = |ix| StepRow { seq: SeqId(0), pos: ix, token: TokenId(ix) };
        let rows: Vec<_> = (0..n as u32).map(row).collect();
        backend.embed(&Step { rows: &rows, mode: ActiveMode::Predictor });
        rows
    }

    fn quality(&self, predicted: &FfnInput) -> Quality {
        let n_embd = self.model.spec.n_embd;
        let mut counter = QualityCounter::default();
        for (token, x) in self.inputs.chunks_exact(n_embd).enumerate() {
            for (j, gate) in (0..).map(NeuronId).zip(self.gate.chunks_exact(n_embd)) {
                let product: f32 = gate.iter().zip(x).map(|(g, x)| g * x).sum();
                let score = if predicted.active.contains(token, j) { 1.0 } else { -1.0 };
                counter.add(&[score], 0.0, &[product.max(0.0)]);
            }
        }
        counter.quality().expect("neurons were counted")
    }
}

fn predict(backend: &mut dyn HybridBackend, rows: &[StepRow], out: &mut FfnInput) {
    backend.ffn_input(LAYER, &Step { rows, mode: ActiveMode::Predictor }, out);
}

fn predictor(criterion: &mut Criterion) {
    let (n_embd, n_ff) = shape();
    for ty in [WeightType::F16, WeightType::Q8_0, WeightType::Q4_0] {
        let mut group = criterion.benchmark_group(format!("low-rank predictor {ty} {n_embd}-{RANK}-{n_ff}"));
        let case = Case::new(0.3, n_embd, n_ff, ty);
        let mut reference = ReferenceBackend::new(Arc::clone(&case.model.spec), Rounding::None);
        case.load(&mut reference);
        let rows = Case::embed(&mut reference, N_TOKENS);
        let mut want = FfnInput::with_capacity(N_TOKENS, n_embd, n_ff);
        predict(&mut reference, &rows, &mut want);

        let mut cpu = CpuBackend::new(Arc::clone(&case.model.spec), CpuOptions::default())
            .expect("threads can be started");
        case.load(&mut cpu);
        for n in [N_TOKENS, 1] {
            let rows = Case::embed(&mut cpu, n);
            let mut got = FfnInput::with_capacity(n, n_embd, n_ff);
            cpu.take_cost();
            predict(&mut cpu, &rows, &mut got);
            let bytes = cpu.take_cost().predictor_bytes;
            let differ: u32 = (0..n)
                .flat_map(|row| got.active.row(row).iter().zip(want.active.row(row)))
                .map(|(a, b)| (a ^ b).count_ones())
                .sum();
            assert!(differ as usize * 100 <= n * n_ff, "{ty}: {differ} of {} neurons differ", n * n_ff);
            if n == N_TOKENS {
                let quality = case.quality(&got);
                assert!(quality.recall > 0.85 && quality.precision > 0.4, "{ty}: {quality:?}");
                eprintln!(
                    "{ty}: recall {:.1} %, precision {:.1} %; active {:.1} %, predicted {:.1} %",
                    100.0 * quality.recall,
                    100.0 * quality.precision,
                    100.0 * quality.active_share,
                    100.0 * quality.predicted_share
                );
            }
            group.throughput(Throughput::Bytes(bytes));
            group.bench_function(format!("{n} tokens"), |bencher| {
                bencher.iter(|| {
                    predict(&mut cpu, &rows, &mut got);
                    black_box(&got);
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, predictor);
criterion_main!(benches);
