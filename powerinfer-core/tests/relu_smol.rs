//! A real ReLU-sparse model of 135 M weights. It is not in the repository: the environment variable
//! `POWERINFER_DATA` may name a folder that has it as `models/relu-smol/relu-smol-135m-q8_0.gguf`; without it,
//! that is said.
#![cfg(feature = "cpu")]

use std::path::Path;

use powerinfer_core::sampling::SamplingParams;
use powerinfer_core::tokenizer::Encode;
use powerinfer_core::{
    ActiveMode, CpuOptions, Device, GenerateOptions, LoadOptions, Model, SessionOptions, TokenId,
};

const N_TOKENS: usize = 16;

#[test]
fn exact_and_dense_write_the_same_text_token_for_token() {
    let Some(folder) = std::env::var_os("POWERINFER_DATA") else {
        println!("not checked: POWERINFER_DATA names no folder");
        return;
    };
    let path = Path::new(&folder).join("models/relu-smol/relu-smol-135m-q8_0.gguf");
    if !path.exists() {
        println!("not checked: there is no {}", path.display());
        return;
    }
    let device = Device::Cpu(CpuOptions { threads: 2, ..CpuOptions::default() });
    let model = Model::open(&path, &LoadOptions { device, ..LoadOptions::default() }).unwrap();
    let prompt = model.tokenizer().encode("The capital of France is", Encode::default()).unwrap();
    let run = |mode| {
        let mut session = model.session(&SessionOptions { n_ctx: Some(64), mode: Some(mode) }).unwrap();
        let options = GenerateOptions {
            sampling: SamplingParams::greedy(),
            max_tokens: Some(N_TOKENS),
            ignore_end: true,
            ..GenerateOptions::default()
        };
        let pieces: Vec<_> =
            session.generate(&prompt, options).unwrap().map(|piece| piece.unwrap()).collect();
        let ids: Vec<TokenId> = pieces.iter().filter_map(|piece| piece.token).collect();
        let text: String = pieces.iter().map(|piece| &*piece.text).collect();
        (ids, text, session.stats().decode)
    };
    let (dense_ids, dense_text, dense) = run(ActiveMode::Dense);
    let (exact_ids, exact_text, exact) = run(ActiveMode::Exact);
    println!("{} -> {dense_text:?}", path.display());
    assert_eq!(dense_ids.len(), N_TOKENS);
    assert_eq!((exact_ids, exact_text), (dense_ids, dense_text));
    assert!(exact.bytes_per_token() < dense.bytes_per_token(), "neurons that do not fire are not read");
}
