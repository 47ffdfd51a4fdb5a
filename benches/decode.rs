//! Decode of the embedded model, end to end, in each mode.
//!
//! Modes `dense` and `exact` must give the same tokens before anything is timed.
#![expect(clippy::expect_used, reason = "a bench that cannot be set up should stop")]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use powerinfer_core::sampling::SamplingParams;
use powerinfer_core::{GenerateOptions, LoadOptions, Model, Session, SessionOptions};
use powerinfer_sparse_ops::{ActiveMode, TokenId};

const MODES: [ActiveMode; 3] = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];
const N_PROMPT: usize = 128;
const N_DECODE: usize = 32;

fn prompt() -> Vec<TokenId> {
    (0..N_PROMPT).map(|ix| TokenId(((ix * 131 + 7) % 2000) as u32)).collect()
}

fn session(model: &Model, mode: ActiveMode) -> Session {
    let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
    model.session(&options).expect("the model has predictors and room")
}

fn greedy_tokens(model: &Model, mode: ActiveMode) -> Vec<TokenId> {
    let options = GenerateOptions {
        sampling: SamplingParams::greedy(),
        max_tokens: Some(N_DECODE),
        ignore_end: true,
        ..GenerateOptions::default()
    };
    let mut session = session(model, mode);
    let generation = session.generate(&prompt(), options).expect("the prompt fits");
    generation.filter_map(|piece| piece.expect("the model computes numbers").token).collect()
}

fn demo(criterion: &mut Criterion) {
    let model = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())
        .expect("the embedded model loads");
    let want = greedy_tokens(&model, ActiveMode::Dense);
    assert_eq!(want.len(), N_DECODE);
    assert_eq!(greedy_tokens(&model, ActiveMode::Exact), want, "dense and exact differ");

    let mut group = criterion.benchmark_group("decode demo model");
    group.throughput(Throughput::Elements(N_DECODE as u64));
    for mode in MODES {
        let mut session = session(&model, mode);
        session.prefill(&prompt()).expect("the prompt fits");
        group.bench_function(mode.name(), |bencher| {
            bencher.iter(|| {
                session.rewind(N_PROMPT).expect("rewinding to the prompt");
                for &token in &want {
                    session.decode(token).expect("the token fits");
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, demo);
criterion_main!(benches);
