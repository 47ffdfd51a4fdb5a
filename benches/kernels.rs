//! Matrix times one and 64 vectors on one thread, for each weight type and instruction set.
//!
//! Goes through the backend's output head, which is its plainest product. Every case first compares rows with sums in f64
//! over the decoded weights. Throughput counts the bytes of weights, once however many vectors there are.
#![expect(clippy::expect_used, reason = "a bench that cannot be set up should stop")]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use powerinfer_cpu::{CpuBackend, CpuLevel, CpuOptions};
use powerinfer_sparse_ops::{
    ActiveMode, DensePart, EmbeddingWeights, HeadWeights, HybridBackend, ModelSpec, NormWeights, SeqId, Step,
    StepRow, TokenId, WeightBytes, WeightMatrix, WeightType,
};
use powerinfer_testing::tiny::{Random, TinyModel, TinyOptions, encoded};
use powerinfer_testing::tolerance::{NMSE_8_BIT, NMSE_F32, assert_close};

const TYPES: [WeightType; 11] = [
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
];
const MANY: usize = 64;

/// Rows and columns. Timed, even 4-bit weights are more than a core's own caches hold; tested, a few rows will do.
fn shape() -> (usize, usize) {
    if std::env::args().any(|arg| arg == "--bench") { (8192, 4096) } else { (72, 512) }
}

fn is_float(ty: WeightType) -> bool {
    matches!(ty, WeightType::F32 | WeightType::F16 | WeightType::BF16)
}

/// Random weights; blocks from random bytes that are small numbers wherever a scale stands.
fn weights(ty: WeightType, n_rows: usize, n_cols: usize) -> WeightMatrix {
    let mut random = Random::new(3);
    if is_float(ty) {
        return encoded("output", ty, n_rows, n_cols, &random.normals(n_rows * n_cols, 0.02));
    }
    let n_bytes = ty.row_bytes(n_cols).expect("whole blocks") * n_rows;
    let words = (0..n_bytes.div_ceil(8)).map(|_| random.next_u64() & 0x3333_3333_3333_3333);
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(n_bytes);
    WeightMatrix::try_new("output", ty, n_rows, n_cols, WeightBytes::from_vec(bytes)).expect("the shape fits")
}

/// The vectors, one a token.
fn tokens(n_vocab: usize, n_cols: usize) -> (WeightMatrix, Vec<Vec<f32>>) {
    let vectors: Vec<_> = (0..MANY).map(|token| Random::new(token as u64).normals(n_cols, 1.0)).collect();
    // Tokens behind the first 64 are never used, but belong to the shape.
    let rows: Vec<f32> = vectors.iter().flatten().copied().cycle().take(n_vocab * n_cols).collect();
    (encoded("token_embd", WeightType::F32, n_vocab, n_cols, &rows), vectors)
}

fn rms_normed(x: &[f32], eps: f32) -> Vec<f64> {
    let square: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
    let scale = 1.0 / (square / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().map(|&v| f64::from(v) * scale).collect()
}

fn check(what: &str, output: &WeightMatrix, normed: &[f64], logits: &[f32]) {
    let mut row = vec![0.0; output.n_cols()];
    let rows: Vec<usize> = (0..output.n_rows()).step_by(output.n_rows().div_ceil(64)).collect();
    let product = |r: usize| {
        output.decode_row(r, &mut row);
        row.iter().zip(normed).map(|(&w, x)| f64::from(w) * x).sum::<f64>() as f32
    };
    let want: Vec<f32> = rows.iter().copied().map(product).collect();
    let got: Vec<f32> = rows.iter().map(|&r| logits[r]).collect();
    assert_close(what, &got, &want, if is_float(output.ty()) { NMSE_F32 } else { NMSE_8_BIT });
}

fn kernels(criterion: &mut Criterion) {
    let (n_rows, n_cols) = shape();
    let tiny = TinyModel::new(TinyOptions { n_embd: n_cols, n_ff: 32, ..TinyOptions::default() });
    let spec = ModelSpec { n_vocab: n_rows, n_layer: 0, n_ff: vec![], ..(*tiny.spec).clone() };
    let spec = Arc::new(spec);
    let (token, vectors) = tokens(n_rows, n_cols);
    let steps: Vec<_> =
        (0..MANY as u32).map(|token| StepRow { seq: SeqId(0), pos: token, token: TokenId(token) }).collect();
    for ty in TYPES {
        let output = weights(ty, n_rows, n_cols);
        let mut group = criterion.benchmark_group(format!("{ty} {n_rows}x{n_cols}"));
        group.throughput(Throughput::Bytes(output.n_bytes() as u64));
        group
            .sample_size(20)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        for level in CpuLevel::available() {
            let options = CpuOptions { threads: 1, level: Some(level), ..CpuOptions::default() };
            let mut cpu = CpuBackend::new(Arc::clone(&spec), options).expect("a thread can be started");
            let embedding = EmbeddingWeights { token: token.clone(), position: None };
            let norm = NormWeights { weight: vec![1.0; n_cols], bias: None };
            let head = HeadWeights { norm, output: output.clone() };
            for part in [DensePart::Embedding(embedding), DensePart::Head(head)] {
                cpu.load_dense(part).expect("every type is taken");
            }
            for n in [1, MANY] {
                if n > 1 && level == CpuLevel::Scalar && n_rows > 100 {
                    // Seconds for each product, to compare with nothing.
                    continue;
                }
                cpu.reserve(SeqId(0), n, n).expect("the positions fit");
                cpu.embed(&Step { rows: &steps[..n], mode: ActiveMode::Dense });
                let mut logits = vec![0.0; n * n_rows];
                cpu.head(0..n, &mut logits);
                let name = format!("{} x{n}", level.name());
                for (ix, logits) in logits.chunks_exact(n_rows).enumerate().step_by(MANY - 1) {
                    check(&format!("{ty} {name}"), &output, &rms_normed(&vectors[ix], spec.norm.eps), logits);
                }
                group.bench_function(name, |bencher| bencher.iter(|| cpu.head(0..n, &mut logits)));
            }
        }
        group.finish();
    }
}

criterion_group!(benches, kernels);
criterion_main!(benches);
