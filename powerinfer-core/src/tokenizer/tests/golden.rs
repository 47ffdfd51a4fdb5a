//! Ids of hard strings, recorded from other engines.
//!
//! The vocabulary of the demo model is part of this repository, with ids from Hugging Face `tokenizers` 0.23.3: its file
//! says how they were made.
//!
//! The other vocabularies are not. The environment variable `POWERINFER_DATA` names a folder that holds them, with
//! `golden/` and `models/`; what is missing there is named and passed over.

use super::vocab_file;
use crate::tokenizer::{Encode, Tokenizer, TokenizerOptions};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A file of the folder that the caller names, if it is there.
fn shared(file: &str) -> Option<PathBuf> {
    let Some(folder) = std::env::var_os("POWERINFER_DATA") else {
        println!("skipped: POWERINFER_DATA names no folder with recorded vocabularies");
        return None;
    };
    let path = Path::new(&folder).join(file);
    if !path.exists() {
        println!("skipped: the folder named by POWERINFER_DATA has no {file}");
        return None;
    }
    Some(path)
}

fn demo_tokenizer() -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../powerinfer-demo-model/tiny-stories-relu.gguf");
    tokenizer(&path)
}

fn tokenizer(path: &Path) -> Tokenizer {
    let (source, _) = vocab_file::read(path);
    Tokenizer::new(&source, TokenizerOptions::default()).expect("a good vocabulary")
}

fn bytes_of_hex(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")).collect()
}

/// The ids to expect: llama.cpp's where they differ from the original engine's.
fn expected(case: &Value, key: &str) -> Option<Vec<u64>> {
    let ids = case.get(format!("{key}_llamacpp")).unwrap_or(&case[key]);
    Some(ids.as_array()?.iter().map(|id| id.as_u64().expect("an id")).collect())
}

fn check(ids_file: &str, vocab_file: &str) {
    let (Some(ids_path), Some(vocab_path)) = (shared(ids_file), shared(vocab_file)) else { return };
    let text = std::fs::read_to_string(ids_path).expect("the recorded ids");
    compare(ids_file, &text, &tokenizer(&vocab_path));
}

fn compare(ids_file: &str, text: &str, tokenizer: &Tokenizer) {
    let recorded: Value = serde_json::from_str(text).expect("JSON");
    let mut wrong = Vec::new();
    let (mut n_compared, mut n_without_ids) = (0, 0);
    for case in recorded["cases"].as_array().expect("cases") {
        let bytes = bytes_of_hex(case["hex"].as_str().expect("hex"));
        for (key, parse_special) in [("ids", false), ("ids_special", true)] {
            let Some(expected) = expected(case, key) else {
                n_without_ids += 1;
                continue;
            };
            let how = Encode { add_special: false, parse_special };
            let ids = tokenizer.encode(&bytes, how).expect("a short text");
            let got: Vec<u64> = ids.iter().map(|id| u64::from(id.0)).collect();
            n_compared += 1;
            if got != expected {
                wrong.push(format!(
                    "{key} of {:?}: {got:?}, not {expected:?}",
                    String::from_utf8_lossy(&bytes)
                ));
            }
            let decoded = tokenizer.decode(&ids, true).expect("ids from the vocabulary");
            // SentencePiece writes a space as U+2581, so that character itself comes back as a space.
            let comes_back = std::str::from_utf8(&bytes).is_ok_and(|text| !text.contains('\u{2581}'));
            if comes_back && !parse_special && decoded != bytes {
                wrong.push(format!("decoded {:?}", String::from_utf8_lossy(&decoded)));
            }
        }
    }
    println!("{ids_file}: {n_compared} compared, {n_without_ids} without recorded ids");
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(n_compared + n_without_ids == 162, "81 texts, each in two ways");
}

#[test]
fn llama() {
    check("golden/vocab/tokenizer-llama.json", "golden/vocab/ggml-vocab-llama.gguf");
}

#[test]
fn falcon() {
    check("golden/vocab/tokenizer-falcon.json", "golden/vocab/ggml-vocab-falcon.gguf");
}

#[test]
fn gpt_neox() {
    check("golden/vocab/tokenizer-gpt-neox.json", "golden/vocab/ggml-vocab-gpt-neox.gguf");
}

#[test]
fn starcoder() {
    check("golden/vocab/tokenizer-starcoder.json", "golden/vocab/ggml-vocab-starcoder.gguf");
}

#[test]
fn smollm2() {
    check("golden/tokenizer-smollm2.json", "models/relu-smol/relu-smol-135m-q8_0.gguf");
}

#[test]
fn tiny_stories() {
    let text = include_str!("tiny-stories-ids.json");
    compare("tiny-stories-ids.json", text, &demo_tokenizer());
    let recorded: Value = serde_json::from_str(text).expect("JSON");
    let cases = recorded["cases"].as_array().expect("cases");
    // Otherwise nothing is tested of recognizing control tokens.
    assert!(cases.iter().any(|case| case["ids"] != case["ids_special"]));
    // All but those that are not UTF-8.
    let n_recorded =
        cases.iter().filter(|case| case["ids"].is_array() && case["ids_special"].is_array()).count();
    assert_eq!(n_recorded, 74);
}

/// The vocabulary of the small model that comes with the project.
#[test]
fn tiny_stories_text_comes_back() {
    let tokenizer = demo_tokenizer();
    assert!(tokenizer.warnings().is_empty());
    let text = "Once upon a time, there was a little girl named Lily.\nShe didn't like \u{1f600}!  ";
    let ids = tokenizer.encode(text, Encode::default()).expect("a short text");
    assert!(ids.len() < text.len() / 2, "{} tokens", ids.len());
    assert_eq!(tokenizer.decode(&ids, false).expect("known ids"), text.as_bytes());
}
