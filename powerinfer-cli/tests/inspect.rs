//! `powerinfer inspect` and the program's own pages.

mod common;

use common::{Folder, golden, patched, powerinfer};

#[test]
fn a_runnable_file_is_described_with_its_activation_and_modes() {
    let run = powerinfer(&["inspect", &golden("opt-q4_0.gguf"), "--tensors"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    for text in [
        "PWRI version 3, alignment 32, 17 keys, 40 tensors",
        "general.architecture = \"opt\"",
        "tokenizer.ggml.tokens = 512 x string [\"<unk>\", \"<s>\"",
        "powerinfer.sparse_threshold = 0.2",
        "blk.1.fc2.weight",
        "32 x 1376",
        "can be run; activation relu, modes dense, exact, predictor (default predictor)",
        "info: activation relu (a PWRI file)",
    ] {
        assert!(run.stdout.contains(text), "`{text}` is missing:\n{}", run.stdout);
    }
    let short = powerinfer(&["inspect", &golden("opt-q4_0.gguf")]);
    assert!(!short.stdout.contains("blk.1.fc2.weight"));
}

#[test]
fn json_holds_the_same_and_its_totals_add_up() {
    let json = powerinfer(&["inspect", &golden("falcon7-f16.gguf"), "--tensors", "--json"]).json();
    assert_eq!(json["magic"], "PWRI");
    assert_eq!(json["metadata"]["general.architecture"], "falcon");
    assert_eq!(json["metadata"]["tokenizer.ggml.tokens"]["type"], "string");
    assert_eq!(json["verdict"]["can_run"], true);
    let sum = |list: &str| -> u64 {
        json[list].as_array().unwrap().iter().map(|entry| entry["n_bytes"].as_u64().unwrap()).sum()
    };
    assert!(sum("tensors") > 0);
    assert_eq!(sum("tensors"), sum("types"));
    assert_eq!(json["tensor_bytes"], sum("types"));
    assert_eq!(json["tensors"].as_array().unwrap().len(), json["n_tensors"].as_u64().unwrap() as usize);
    // A dense file has no predictor mode.
    let dense = powerinfer(&["inspect", &golden("dense-bamboo-q4_0.gguf"), "--json"]).json();
    assert_eq!(dense["verdict"]["modes"], serde_json::json!(["dense", "exact"]));
    assert_eq!(dense["tensors"], serde_json::Value::Null);
}

#[test]
fn a_file_that_cannot_be_run_is_described_and_the_verdict_says_why() {
    let folder = Folder::new();
    // The position table becomes 16-bit integers (id 17 in these files), of which nothing is computed.
    let rows = 2050u64.to_le_bytes();
    let (f16, i16) = ([&rows[..], &[1, 0, 0, 0]].concat(), [&rows[..], &[17, 0, 0, 0]].concat());
    let ty = folder.write("type.gguf", patched("opt-q4_0.gguf", b"position_embd.weight", &f16, &i16));
    let arch = folder.write("arch.gguf", patched("opt-q4_0.gguf", b"general.architecture", b"opt", b"abc"));
    for (path, texts) in [
        (ty, ["tensor `position_embd.weight` is I16", "supported: F32"]),
        (arch, ["architecture `abc` is not supported", "supported: llama"]),
    ] {
        let run = powerinfer(&["inspect", &path]);
        assert_eq!(run.code, 0, "{run:?}");
        assert!(run.stdout.contains("cannot be run: "), "{run:?}");
        assert!(texts.iter().all(|text| run.stdout.contains(text)), "{run:?}");
        let verdict = &powerinfer(&["inspect", &path, "--json"]).json()["verdict"];
        assert_eq!(verdict["can_run"], false);
        assert!(verdict["reason"].as_str().unwrap().contains(texts[0]), "{verdict}");
    }
}

#[test]
fn a_broken_file_gives_the_typed_error_and_nothing_else() {
    let folder = Folder::new();
    let bytes = std::fs::read(golden("opt-q4_0.gguf")).unwrap();
    let cut = folder.write("cut.gguf", &bytes[..bytes.len() - 1]);
    let rows = 2050u64.to_le_bytes();
    let (f16, no_type) = ([&rows[..], &[1, 0, 0, 0]].concat(), [&rows[..], &[99, 0, 0, 0]].concat());
    let ty = folder.write("type.gguf", patched("opt-q4_0.gguf", b"position_embd.weight", &f16, &no_type));
    powerinfer(&["inspect", &folder.arg("missing")]).refuses(1, &["cannot load", "missing", "No such file"]);
    powerinfer(&["inspect", &folder.write("empty", "")]).refuses(1, &["cannot load"]);
    let directory = folder.path("").to_str().unwrap().to_owned();
    powerinfer(&["inspect", &directory]).refuses(1, &["cannot load", &directory, "it is a directory"]);
    #[cfg(unix)]
    powerinfer(&["inspect", "/dev/null"]).refuses(1, &["cannot load", "it is not a regular file"]);
    powerinfer(&["inspect", &cut]).refuses(1, &["cannot load", "blk.1.fc2.weight"]);
    powerinfer(&["inspect", &ty, "--json"]).refuses(1, &["cannot load", "position_embd.weight", "99"]);
}

#[test]
fn every_command_has_a_help_page_and_wrong_ones_are_refused() {
    let help = powerinfer(&["--help"]);
    for command in ["generate", "inspect", "tokenize", "logits", "perplexity", "bench", "convert"] {
        assert!(help.stdout.contains(command), "{help:?}");
        let page = powerinfer(&[command, "--help"]);
        assert_eq!(page.code, 0, "{page:?}");
        assert!(page.stdout.contains(&format!("Usage: powerinfer {command}")), "{page:?}");
    }
    assert!(powerinfer(&["--version"]).stdout.starts_with("powerinfer 0"));
    powerinfer(&["frob"]).refuses(2, &["frob"]);
    powerinfer(&["inspect"]).refuses(2, &["FILE"]);
}
