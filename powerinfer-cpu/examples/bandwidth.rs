//! How much of the memory's speed a matrix-vector product reaches, for a few weight types.
//!
//! `cargo run --release -p powerinfer-cpu --example bandwidth [-- THREADS]`; matrices of 16 000 × 4096.
#![expect(clippy::print_stdout, reason = "a program that reports")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use powerinfer_cpu::{CpuBackend, CpuLevel, CpuOptions, Pool, default_threads};
use powerinfer_sparse_ops::{
    ActiveMode, DensePart, EmbeddingWeights, HeadWeights, HybridBackend, ModelSpec, NormWeights, SeqId, Step,
    StepRow, TokenId, WeightBytes, WeightMatrix, WeightType,
};
use powerinfer_testing::tiny::{TinyModel, TinyOptions};

const N_EMBD: usize = 4096;
const N_ROWS: usize = 16_000;

fn main() {
    let threads =
        std::env::args().nth(1).map_or_else(default_threads, |n| n.parse().expect("a number of threads"));
    let spec = ModelSpec {
        n_vocab: N_ROWS,
        n_layer: 0,
        n_ff: vec![],
        ..(*TinyModel::new(TinyOptions { n_embd: N_EMBD, n_ff: 32, ..TinyOptions::default() }).spec).clone()
    };
    let spec = Arc::new(spec);
    stream(threads);
    for ty in [
        WeightType::F32,
        WeightType::F16,
        WeightType::BF16,
        WeightType::Q8_0,
        WeightType::Q6_K,
        WeightType::Q5_K,
        WeightType::Q5_0,
        WeightType::Q4_K,
        WeightType::Q4_1,
        WeightType::Q4_0,
        WeightType::Q2_K,
    ] {
        product(&spec, ty, CpuLevel::detect(), threads);
    }
}

/// A plain read of 1 GiB.
fn stream(threads: usize) {
    let mut pool = Pool::try_new(threads).expect("threads start");
    let data = vec![1u64; 1 << 27];
    let seconds = best(|| {
        let total = AtomicU64::new(0);
        pool.run(1 << 10, |chunk, _| {
            let sum = data[chunk << 17..(chunk + 1) << 17].iter().fold(0, |a: u64, b| a.wrapping_add(*b));
            total.fetch_add(sum, Ordering::Relaxed);
        });
        assert_eq!(total.into_inner(), 1 << 27);
    });
    println!("{threads} threads, plain read: {:.1} GB/s", (data.len() * 8) as f64 / seconds / 1e9);
}

fn product(spec: &Arc<ModelSpec>, ty: WeightType, level: CpuLevel, threads: usize) {
    let n_bytes = ty.row_bytes(N_EMBD).expect("whole blocks") * N_ROWS;
    // Bytes that are small numbers in every type.
    let output =
        WeightMatrix::try_new("output", ty, N_ROWS, N_EMBD, WeightBytes::from_vec(vec![0x11; n_bytes]))
            .expect("the shape fits");
    let options = CpuOptions { threads, level: Some(level), ..CpuOptions::default() };
    let mut cpu = CpuBackend::new(Arc::clone(spec), options).expect("threads start");
    let norm = NormWeights { weight: vec![1.0; N_EMBD], bias: None };
    cpu.load_dense(DensePart::Embedding(EmbeddingWeights { token: output.clone(), position: None }))
        .expect("every type is taken");
    cpu.load_dense(DensePart::Head(HeadWeights { norm, output })).expect("every type is taken");
    for n_rows in [1, 16] {
        cpu.reserve(SeqId(0), 1, n_rows).expect("one position fits");
        let rows = vec![StepRow { seq: SeqId(0), pos: 0, token: TokenId(1) }; n_rows];
        cpu.embed(&Step { rows: &rows, mode: ActiveMode::Dense });
        let mut logits = vec![0.0; n_rows * N_ROWS];
        let seconds = best(|| cpu.head(0..n_rows, &mut logits));
        assert!(logits[0].is_finite() && logits.iter().all(|v| *v == logits[0]), "every row is the same");
        println!(
            "{ty:6} {:7} {n_rows:2} vectors: {:6.1} GB/s of weights, {:6.1} G multiply-adds/s",
            level.name(),
            n_bytes as f64 / seconds / 1e9,
            (n_rows * N_ROWS * N_EMBD) as f64 / seconds / 1e9,
        );
    }
}

/// Seconds of the fastest of some runs.
fn best(mut work: impl FnMut()) -> f64 {
    let time = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    };
    (0..3).map(|_| time(&mut work)).fold(f64::INFINITY, f64::min)
}
