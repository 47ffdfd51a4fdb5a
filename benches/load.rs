//! From a file to the first token: the header, the model, and the logits behind a short prompt.
//!
//! The embedded model is written to a temporary file and mapped, so its pages are in memory already; what a disk adds is
//! not measured. The first token must be that of the embedded model.
#![expect(clippy::expect_used, reason = "a bench that cannot be set up should stop")]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use powerinfer_core::{GgufModel, LoadOptions, Model, SessionOptions};
use powerinfer_sparse_ops::TokenId;

const PROMPT: [u32; 8] = [0, 138, 269, 400, 531, 662, 793, 924];

fn first_token(model: &Model) -> TokenId {
    let mut session = model.session(&SessionOptions::default()).expect("there is room for the context");
    let logits = session.prefill(&PROMPT.map(TokenId)).expect("the prompt fits");
    let best = (0..).zip(logits).max_by(|(_, a), (_, b)| a.total_cmp(b)).expect("there are logits");
    TokenId(best.0)
}

fn open(path: &Path) -> GgufModel {
    GgufModel::open(path).expect("the file was just written")
}

fn load(path: &Path) -> Model {
    Model::load(&open(path), &LoadOptions::default()).expect("the embedded model loads")
}

fn loads(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, powerinfer_demo_model::MODEL).expect("the file can be written");
    let embedded = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default());
    let want = first_token(&embedded.expect("the embedded model loads"));
    assert_eq!(first_token(&load(&path)), want, "mapped and embedded differ");

    let mut group = criterion.benchmark_group("demo model from a mapped file");
    group.throughput(Throughput::Bytes(powerinfer_demo_model::MODEL.len() as u64));
    group.bench_function("header", |bencher| bencher.iter(|| open(&path)));
    group.bench_function("load", |bencher| bencher.iter(|| load(&path)));
    group.bench_function("first token", |bencher| bencher.iter(|| black_box(first_token(&load(&path)))));
    group.finish();
}

criterion_group!(benches, loads);
criterion_main!(benches);
