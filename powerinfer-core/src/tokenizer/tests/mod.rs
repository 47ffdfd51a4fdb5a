//! Tests over whole vocabularies.

mod behavior;
mod errors;
mod golden;
mod properties;
pub(crate) mod vocab_file;

use super::{Encode, Tokenizer, VocabSource, bytes};
use powerinfer_sparse_ops::TokenId;

/// Six pieces and the bytes.
fn spm_source() -> VocabSource {
    let pieces = ["<unk>", "<s>", "</s>", "\u{2581}", "h", "i", "hi", "\u{2581}hi"];
    let mut tokens: Vec<Vec<u8>> = pieces.iter().map(|piece| piece.as_bytes().to_vec()).collect();
    tokens.extend((0..=255).map(|byte: u8| format!("<0x{byte:02X}>").into_bytes()));
    let mut scores = vec![0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0];
    scores.resize(tokens.len(), 0.0);
    let mut types = vec![2, 3, 3, 1, 1, 1, 1, 1];
    types.resize(tokens.len(), 6);
    VocabSource {
        model: "llama".into(),
        tokens,
        scores: Some(scores),
        token_types: Some(types),
        ..VocabSource::default()
    }
}

/// The bytes, some merges, and two special tokens at the end.
fn bpe_source() -> VocabSource {
    let merges = ["l l", "h e", "he ll", "hell o"];
    let mut tokens: Vec<Vec<u8>> =
        (0..=255).map(|byte| bytes::byte_to_char(byte).to_string().into_bytes()).collect();
    tokens.extend(["ll", "he", "hell", "hello", "xy"].map(|piece| piece.as_bytes().to_vec()));
    let mut types = vec![1; tokens.len()];
    tokens.extend(["<|user|>", "<|end|>"].map(|piece| piece.as_bytes().to_vec()));
    types.extend([4, 3]);
    VocabSource {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens,
        token_types: Some(types),
        merges: Some(merges.iter().map(|line| line.as_bytes().to_vec()).collect()),
        ..VocabSource::default()
    }
}

fn texts(tokenizer: &Tokenizer, ids: &[TokenId]) -> Vec<String> {
    let text = |&id| String::from_utf8_lossy(tokenizer.token_text(id).expect("a known id")).into_owned();
    ids.iter().map(text).collect()
}

fn ids_of(tokenizer: &Tokenizer, text: impl AsRef<[u8]>) -> Vec<TokenId> {
    tokenizer.encode(text, Encode::default()).expect("a short text")
}
