//! `powerinfer calibrate` and `powerinfer evaluate`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Folder, golden, powerinfer};
use serde_json::{Value, json};

const SIDE: &str = "m.calibration.safetensors";

/// Text of some variety.
fn story(n: usize) -> String {
    let who = ["a girl", "the dog", "an old king", "Tom", "her mother"];
    let what = ["went to the park", "found a red ball", "was very sad", "sang a song", "looked at the sky"];
    (0..n).map(|i| format!("Day {i}: {} {}. ", who[i % 5], what[(i / 3) % 5])).collect()
}

/// A dense ReLU model and two texts in a folder.
fn model(folder: &Folder) -> (String, String, String) {
    let model = folder.write("m.gguf", std::fs::read(golden("dense-bamboo-q4_0.gguf")).unwrap());
    (model, folder.write("a.txt", story(120)), folder.write("b.txt", story(40).to_uppercase()))
}

fn figures(layer: &Value) -> Vec<f64> {
    ["active", "selected", "precision", "recall", "mass_recall"]
        .map(|key| layer[key].as_f64().unwrap_or_else(|| panic!("{key} of {layer}")))
        .to_vec()
}

#[test]
fn a_calibrated_model_predicts_without_being_told() {
    let folder = Folder::new();
    let (model, a, b) = model(&folder);
    let flags = ["calibrate", "-m", &model, "--text", &a, &b, "--tokens", "1024", "--all-layers", "-t", "2"];
    let run = powerinfer(&[&flags[..], &["--json"]].concat());
    let answer = run.json();
    assert_eq!(folder.names(), ["a.txt", "b.txt", SIDE, "m.gguf"]);
    assert_eq!((&answer["model"], &answer["target_recall"]), (&json!(model), &json!(0.99)));
    assert!(answer["out"].as_str().unwrap().ends_with(SIDE), "{answer}");
    let layers = answer["layers"].as_array().unwrap();
    for layer in layers {
        assert!(figures(layer).iter().all(|share| (0.0..=1.0).contains(share)), "{layer}");
        assert_eq!((&layer["used"], &layer["reason"]), (&json!(true), &json!("as_asked")));
    }

    let table = powerinfer(&flags);
    assert_eq!((table.code, table.stdout.lines().count()), (0, layers.len() + 2), "{table:?}");
    for word in ["selected", "precision", "recall", "mass recall", "outliers", "why", "as asked", "mean"] {
        assert!(table.stdout.contains(word), "{word}: {table:?}");
    }
    assert!(table.stderr.contains("written: "), "{table:?}");

    let generate = ["generate", "-m", &model, "-p", "Day", "-n", "4", "--temp", "0"];
    let summary = powerinfer(&generate).stderr;
    assert!(summary.contains("recall 0.99 in layers 0-") && summary.contains("mode predictor"), "{summary}");
    let summary = powerinfer(&[&generate[..], &["--no-calibration"]].concat()).stderr;
    assert!(summary.contains("mode exact"), "{summary}");
    let summary = powerinfer(&[&generate[..], &["--recall", "0.96"]].concat()).stderr;
    assert!(summary.contains("recall 0.98 in"), "{summary}");
    powerinfer(&[&generate[..], &["--calibration", &a]].concat()).refuses(1, &["a.txt", "safetensors"]);
    let other = golden("dense-llama-q4_0.gguf");
    let side = folder.arg(SIDE);
    powerinfer(&["generate", "-m", &other, "-p", "a", "--calibration", &side, "--activation", "relu"])
        .refuses(1, &["belongs to a model with fingerprint", answer["fingerprint"].as_str().unwrap()]);

    let evaluate = ["evaluate", "-m", &model, "--text", &b, "--tokens", "512"];
    let measured = powerinfer(&[&evaluate[..], &["--json"]].concat()).json();
    assert_eq!(measured["layers"].as_array().unwrap().len(), layers.len());
    assert!(measured["layers"].as_array().unwrap().iter().all(|layer| layer["predicted"] == true));
    let mean = figures(&measured["mean"]);
    assert!(mean[3] > 0.95 && mean[4] >= mean[3], "{measured}");
    let table = powerinfer(&evaluate);
    assert!(table.stdout.contains("as predicted") && table.stdout.contains("precision"), "{table:?}");
}

#[test]
fn layers_are_timed_and_the_recall_is_kept() {
    let folder = Folder::new();
    let (model, a, _) = model(&folder);
    let out = folder.arg("other.safetensors");
    let flags = ["calibrate", "-m", &model, "--text", &a, "--tokens", "256", "--recall", "0.97", "-o", &out];
    let answer = powerinfer(&[&flags[..], &["--json"]].concat()).json();
    assert_eq!(answer["target_recall"], json!(0.97));
    for layer in answer["layers"].as_array().unwrap() {
        assert!(layer["exact_us"].as_f64().unwrap() > 0.0, "{layer}");
        assert!(["faster", "slower"].contains(&layer["reason"].as_str().unwrap()), "{layer}");
    }
    assert_eq!(folder.names(), ["a.txt", "b.txt", "m.gguf", "other.safetensors"]);
}

#[test]
fn what_cannot_be_calibrated_leaves_no_file() {
    let folder = Folder::new();
    let (model, a, _) = model(&folder);
    let short = folder.write("short.txt", "Hi.");
    powerinfer(&["calibrate", "-m", &model, "--text", &short]).refuses(1, &["tokens, at least"]);
    powerinfer(&["calibrate", "-m", &model, "--text", &folder.arg("none")]).refuses(1, &["cannot read"]);
    powerinfer(&["calibrate", "-m", &model, "--text", &a, "--activation", "silu"])
        .refuses(1, &["silu", "no exact zeros"]);
    powerinfer(&["calibrate", "-m", &model]).refuses(2, &["--text"]);
    powerinfer(&["calibrate", "-m", &model, "--text", &a, "--recall", "1"]).refuses(2, &["--recall"]);
    powerinfer(&["calibrate", "-m", &model, "--text", &a, "--calibration", &a])
        .refuses(2, &["--calibration"]);
    powerinfer(&["calibrate", "--text", &a]).refuses(2, &["--out"]);
    powerinfer(&["evaluate", "-m", &model, "--text", &a]).refuses(1, &["needs a model with predictors"]);
    assert_eq!(folder.names(), ["a.txt", "b.txt", "m.gguf", "short.txt"]);
}
