//! `powerinfer tokenize`, `logits`, `perplexity`, `bench`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Folder, golden, patched, powerinfer};
use powerinfer_core::{ActiveMode, Device, LoadOptions, Model, Rounding, SessionOptions, TokenId};
use serde_json::{Value, json};

fn reference(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Model {
    let options = LoadOptions { device: Device::Reference(Rounding::None), ..LoadOptions::default() };
    Model::from_bytes(bytes, &options).unwrap()
}

#[test]
fn text_becomes_ids_with_their_pieces() {
    let run = powerinfer(&["tokenize", "-p", "Once upon\na time"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    let pieces: Vec<&str> =
        run.stdout.lines().map(|line| line.trim_start().split_once("  ").unwrap().1).collect();
    assert_eq!(pieces[0], "\"<|endoftext|>\"");
    assert!(pieces.contains(&"\"\\n\""), "{run:?}");
    let text: String = pieces[1..].iter().map(|piece| piece.trim_matches('"')).collect();
    assert_eq!(text, "Once upon\\na time");
}

#[test]
fn json_texts_become_json_ids() {
    let folder = Folder::new();
    let file = folder.write("in.json", json!(["Once", "", "a <|endoftext|>"]).to_string());
    let plain = powerinfer(&["tokenize", "--file", &file, "--json", "--no-bos"]).json();
    let special = powerinfer(&["tokenize", "--file", &file, "--json", "--no-bos", "--parse-special"]).json();
    assert_eq!(plain.as_array().unwrap().len(), 3);
    assert_eq!((&plain[0], &plain[1]), (&special[0], &json!([])));
    assert_ne!(plain[2], special[2]);
    assert_eq!(special[2].as_array().unwrap().last(), Some(&json!(0)));
    let with_bos = powerinfer(&["tokenize", "-p", "Once", "--json"]).json();
    let ids = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone()).unwrap();
    assert_eq!(ids(&with_bos), [vec![0], ids(&plain[0])].concat());
}

#[test]
fn a_vocabulary_is_enough_to_tokenize() {
    let folder = Folder::new();
    let other = folder.write("other.gguf", patched("opt-q4_0.gguf", b"general.architecture", b"opt", b"abc"));
    let ids = |path: &str| powerinfer(&["tokenize", "-m", path, "-p", "hi", "--json"]).json();
    assert_eq!(ids(&other), ids(&golden("opt-q4_0.gguf")));
}

#[test]
fn tokenize_refuses_what_is_no_array_of_texts() {
    let folder = Folder::new();
    let number = folder.write("number.json", "[1]");
    powerinfer(&["tokenize", "--file", &number])
        .refuses(1, &["number.json", "JSON array of strings", "line 1"]);
    powerinfer(&["tokenize", "--file", &folder.arg("none")]).refuses(1, &["cannot read", "none"]);
    powerinfer(&["tokenize"]).refuses(2, &["--prompt", "--file"]);
    powerinfer(&["tokenize", "-p", "a", "--file", &number]).refuses(2, &["cannot be used with"]);
}

fn golden_case(name: &str) -> (Vec<u32>, Vec<f32>, f64) {
    let case: Value =
        serde_json::from_slice(&std::fs::read(golden(&format!("{name}.json"))).unwrap()).unwrap();
    let list = |key: &str| serde_json::from_value::<Vec<u32>>(case[key].clone()).unwrap();
    let mut ids = list("prompt_ids");
    ids.extend(list("greedy_ids"));
    let n_rows = case["logits_shape"][0].as_u64().unwrap() as usize;
    ids.truncate(n_rows);
    let bytes = std::fs::read(golden(&format!("{name}.logits.f32"))).unwrap();
    let logits = bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
    (ids, logits, case["tolerance_float_activations"]["max_abs"].as_f64().unwrap())
}

#[test]
fn logits_are_those_of_the_golden_files_and_round_trip() {
    let folder = Folder::new();
    let out = folder.arg("logits.json");
    for name in ["opt-q4_0", "falcon7-f16"] {
        let (ids, expected, max_difference) = golden_case(name);
        let path = golden(&format!("{name}.gguf"));
        let list = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let flags = ["logits", "-m", &path, "--tokens", &list, "--out", &out, "--device", "reference"];
        let run = powerinfer(&flags);
        assert_eq!((run.code, run.stdout.as_str()), (0, ""), "{run:?}");
        let answer: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
        assert_eq!((&answer["tokens"], &answer["mode"]), (&json!(ids), &json!("predictor")));
        assert_eq!(answer["model"], path);
        let rows: Vec<Vec<f32>> = serde_json::from_value(answer["logits"].clone()).unwrap();
        assert_eq!(rows.len(), ids.len());
        assert_eq!(answer["n_vocab"], rows[0].len());
        for (got, expected) in rows.concat().iter().zip(&expected) {
            assert!(
                f64::from((got - expected).abs()) <= max_difference,
                "{name}: {got}, expected {expected}"
            );
        }
        // The same bits as in this process.
        let mut session =
            reference(std::fs::read(&path).unwrap()).session(&SessionOptions::default()).unwrap();
        let tokens: Vec<TokenId> = ids.iter().copied().map(TokenId).collect();
        let mut here: Vec<f32> = Vec::new();
        session.evaluate(&tokens, |_, row| here.extend_from_slice(row)).unwrap();
        assert!(rows.concat().iter().map(|v| v.to_bits()).eq(here.iter().map(|v| v.to_bits())), "{name}");
    }
    assert_eq!(folder.names(), ["logits.json"]);
}

#[test]
fn failed_logits_leave_no_file() {
    let folder = Folder::new();
    let out = folder.arg("logits.json");
    powerinfer(&["logits", "--tokens", "1,99999", "--out", &out])
        .refuses(1, &["token 99999 at place 1", "2048"]);
    powerinfer(&["logits", "--tokens", "1,x", "--out", &out]).refuses(2, &["--tokens", "'x'"]);
    powerinfer(&["logits", "--tokens", "", "--out", &out]).refuses(2, &["--tokens"]);
    powerinfer(&["logits", "--tokens", "1"]).refuses(2, &["--out"]);
    powerinfer(&["logits", "-m", "none.gguf", "--tokens", "1", "--out", &out]).refuses(1, &["none.gguf"]);
    assert!(folder.names().is_empty());
    let nowhere = folder.arg("nowhere/logits.json");
    powerinfer(&["logits", "--tokens", "1", "--out", &nowhere]).refuses(1, &["cannot write", "nowhere"]);
}

const STORY: &str = "Once upon a time, there was a little girl named Lily. She liked to play in the park with \
    her dog. One day, the dog ran away. Lily was very sad. She looked and looked, but she could not find it.";

/// Perplexity the slow way: token by token, sums of exponentials without care.
fn slow_perplexity(mode: ActiveMode, n_ctx: usize) -> (f64, usize) {
    let model = reference(powerinfer_demo_model::MODEL);
    let mut ids = vec![TokenId(0)];
    ids.extend(model.tokenizer().encode(STORY, Default::default()).unwrap());
    let options = SessionOptions { n_ctx: Some(n_ctx), mode: Some(mode) };
    let (mut sum, mut n) = (0.0, 0);
    for chunk in ids.chunks_exact(n_ctx) {
        let mut session = model.session(&options).unwrap();
        for i in 0..n_ctx - 1 {
            let logits = session.decode(if i == 0 { TokenId(0) } else { chunk[i] }).unwrap();
            if i >= n_ctx / 2 {
                let total: f64 = logits.iter().map(|&v| f64::from(v).exp()).sum();
                sum += total.ln() - f64::from(logits[chunk[i + 1].index()]);
                n += 1;
            }
        }
    }
    ((sum / f64::from(n)).exp(), n as usize)
}

#[test]
fn perplexity_is_that_of_the_definition_in_every_mode() {
    let folder = Folder::new();
    let text = folder.write("story.txt", STORY);
    let flags = ["perplexity", "-f", &text, "-c", "16", "--device", "reference"];
    let modes = ["--mode", "dense", "--mode", "exact,predictor"];
    let run = powerinfer(&[&flags[..], &modes, &["--json"]].concat());
    let answer = run.json();
    let modes = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];
    assert_eq!(answer.as_array().unwrap().len(), modes.len());
    for (outcome, mode) in answer.as_array().unwrap().iter().zip(modes) {
        let (expected, n_scored) = slow_perplexity(mode, 16);
        assert_eq!((&outcome["mode"], &outcome["n_scored"]), (&json!(mode.name()), &json!(n_scored)));
        let got = outcome["ppl"].as_f64().unwrap();
        assert!((got / expected - 1.0).abs() < 1e-3, "{mode:?}: {got}, expected {expected}");
        assert!(outcome["ppl_error"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(answer[0]["ppl"], answer[1]["ppl"]);
    assert_eq!(answer[0]["active_share"], 1.0);
    assert!(answer[2]["active_share"].as_f64().unwrap() < 0.5);
    assert!(answer[2]["fired_share"].as_f64().unwrap() <= answer[2]["active_share"].as_f64().unwrap());

    let table = powerinfer(&[&flags[..], &["--chunks", "1"]].concat());
    assert_eq!(table.code, 0, "{table:?}");
    assert!(table.stdout.lines().nth(1).is_some_and(|line| line.starts_with("predictor")), "{table:?}");
    assert!(table.stderr.contains("1 chunks of 16 tokens, 7 tokens scored"), "{table:?}");
}

#[test]
fn perplexity_refuses_short_texts_and_missing_ones() {
    let folder = Folder::new();
    let text = folder.write("short.txt", "Once upon a time");
    powerinfer(&["perplexity", "-f", &text]).refuses(1, &["needs at least 1024", "smaller -c"]);
    powerinfer(&["perplexity", "-f", &folder.arg("none")]).refuses(1, &["cannot read", "none"]);
    powerinfer(&["perplexity"]).refuses(2, &["--file"]);
    powerinfer(&["perplexity", "-f", &text, "-c", "2"]).refuses(2, &["--ctx-size"]);
    let dense = golden("dense-bamboo-q4_0.gguf");
    let long = folder.write("long.txt", STORY);
    powerinfer(&["perplexity", "-m", &dense, "-f", &long, "-c", "8", "--mode", "predictor"])
        .refuses(1, &["needs a model with predictors"]);
}

#[test]
fn bench_prints_medians_and_every_measurement() {
    let flags = ["bench", "-p", "8", "-n", "4", "--repeats", "3", "-t", "1", "--no-stream", "--json"];
    let one = powerinfer(&flags).json();
    for key in ["prefill_tok_s", "decode_tok_s"] {
        let figure = &one[key];
        let all: Vec<f64> = serde_json::from_value(figure["all"].clone()).unwrap();
        assert_eq!(all.len(), 3);
        let mut sorted = all.clone();
        sorted.sort_by(f64::total_cmp);
        assert_eq!(figure["median"], sorted[1]);
        assert_eq!((&figure["min"], &figure["max"]), (&json!(sorted[0]), &json!(sorted[2])));
        assert!(sorted[0] > 0.0);
    }
    assert!(one["bytes_per_token"].as_f64().unwrap() > 0.0);
    assert_eq!((&one["stream_bytes_s"], &one["stream_share"]), (&Value::Null, &Value::Null));

    let two = powerinfer(&[&flags[..], &["--mode", "dense,exact"]].concat()).json();
    assert_eq!((&two[0]["mode"], &two[1]["mode"]), (&json!("dense"), &json!("exact")));
    assert!(two[1]["bytes_per_token"].as_f64() < two[0]["bytes_per_token"].as_f64());

    let table = powerinfer(&["bench", "-p", "8", "-n", "4", "--repeats", "1", "--no-stream"]);
    assert_eq!(table.stdout.lines().count(), 2, "{table:?}");
    powerinfer(&["bench", "-n", "0"]).refuses(2, &["--n-gen"]);
    powerinfer(&["bench", "--repeats", "0"]).refuses(2, &["--repeats"]);
}
