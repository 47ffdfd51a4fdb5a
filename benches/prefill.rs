//! Prompts of several lengths through the embedded model, in each mode.
//!
//! Each prompt first gives the same logits, to the bit, as the same tokens one by one.
#![expect(clippy::expect_used, reason = "a bench that cannot be set up should stop")]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use powerinfer_core::{LoadOptions, Model, SessionOptions};
use powerinfer_sparse_ops::{ActiveMode, TokenId};

const MODES: [ActiveMode; 3] = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];
/// Tokens; the last is the longest.
const LENGTHS: [usize; 4] = [8, 32, 128, 192];

fn prefill(criterion: &mut Criterion) {
    let model = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())
        .expect("the embedded model loads");
    let prompt: Vec<_> = (0..LENGTHS[3]).map(|ix| TokenId((ix * 131 + 7) as u32 % 2000)).collect();
    let mut group = criterion.benchmark_group("prefill demo model");
    for mode in MODES {
        let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
        let mut session = model.session(&options).expect("the model has predictors and room");
        let mut one_by_one = Vec::new();
        for (n, &token) in (1..).zip(&prompt) {
            let logits = session.decode(token).expect("the token fits");
            if LENGTHS.contains(&n) {
                one_by_one.push((n, logits.to_vec()));
            }
        }
        for (n, want) in one_by_one {
            session.rewind(0).expect("rewinding to the start");
            let got = session.prefill(&prompt[..n]).expect("the prompt fits");
            let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{} with {n} tokens differs from one by one", mode.name());

            group.throughput(Throughput::Elements(n as u64));
            group.bench_function(BenchmarkId::new(mode.name(), n), |bencher| {
                bencher.iter(|| {
                    session.rewind(0).expect("rewinding to the start");
                    session.prefill(&prompt[..n]).expect("the prompt fits");
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, prefill);
criterion_main!(benches);
