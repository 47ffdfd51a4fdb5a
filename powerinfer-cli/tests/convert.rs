//! `powerinfer convert`: the flags; what it writes is tested beside the code.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Folder, Run, golden, powerinfer};
use powerinfer_gguf::GgufModel;
use powerinfer_predictor::{FloatType, PredictorFile, PredictorLayer};

const RANK: usize = 8;

/// Writes predictors for a golden model whose scores are all 0, so that every neuron counts as active.
fn write_predictor(folder: &Folder, model: &str, n_layer_off: usize) {
    let file = GgufModel::open(model).unwrap();
    let number = |key: &str| file.metadata().require::<usize>(&format!("bamboo.{key}")).unwrap();
    let (n_embd, n_ff) = (number("embedding_length"), number("feed_forward_length"));
    let layer = || PredictorLayer::new(RANK, vec![0.0; RANK * n_embd], vec![0.0; RANK * n_ff]).unwrap();
    let layers = (n_layer_off..number("block_count")).map(|_| layer()).collect();
    PredictorFile::new(layers, Some(0.0)).unwrap().write(folder.path("predictor"), FloatType::F32).unwrap();
}

fn convert(folder: &Folder, model: &str, more: &[&str]) -> Run {
    let (predictor, out) = (folder.arg("predictor"), folder.arg("sparse.gguf"));
    powerinfer(&[&["convert", "--model", model, "--predictor", &predictor, "--out", &out], more].concat())
}

#[test]
fn the_output_runs_with_predictors_and_its_cost_is_printed() {
    let folder = Folder::new();
    let model = golden("dense-bamboo-q4_0.gguf");
    write_predictor(&folder, &model, 0);
    let run = convert(&folder, &model, &["--down-type", "f32", "--predictor-type", "F32"]);
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(run.stderr, "");
    for text in ["sparse.gguf: ", "down projections: Q4_0 to F32, lossless", "predictors: F32, lossless"] {
        assert!(run.stdout.contains(text), "`{text}` is missing: {run:?}");
    }
    assert_eq!(folder.names(), ["predictor", "sparse.gguf"]);
    let out = folder.arg("sparse.gguf");
    let report = powerinfer(&["inspect", &out, "--json"]).json();
    assert_eq!(report["magic"], "PWRI");
    assert_eq!(report["verdict"]["default_mode"], "predictor");
    let before = std::fs::read(&out).unwrap();
    convert(&folder, &model, &["--type", "f32"]).refuses(1, &["sparse.gguf", "exists already", "--force"]);
    assert_eq!(std::fs::read(&out).unwrap(), before);
    assert_eq!(convert(&folder, &model, &["--type", "f32", "--force"]).code, 0);
    assert_ne!(std::fs::read(&out).unwrap(), before);
    assert_eq!(folder.names(), ["predictor", "sparse.gguf"]);
    assert_eq!(powerinfer(&["generate", "-m", &out, "-p", "a", "-n", "3", "-q"]).code, 0);
}

#[test]
fn what_does_not_fit_is_named_and_nothing_is_written() {
    let folder = Folder::new();
    let model = golden("dense-bamboo-q4_0.gguf");
    convert(&folder, &model, &[]).refuses(1, &["predictor"]);
    convert(&folder, &folder.arg("none.gguf"), &[]).refuses(1, &["none.gguf"]);
    convert(&folder, &model, &["--type", "Q9_9"]).refuses(2, &["--type", "Q9_9", "known: F32, F16"]);
    convert(&folder, &model, &["--predictor-type", "x"]).refuses(2, &["--predictor-type"]);
    convert(&folder, &model, &["--sparse-threshold", "nan"]).refuses(2, &["--sparse-threshold", "finite"]);
    powerinfer(&["convert", "--model", &model]).refuses(2, &["--predictor", "--out"]);
    write_predictor(&folder, &model, 1);
    convert(&folder, &model, &[]).refuses(1, &["layer"]);
    assert_eq!(folder.names(), ["predictor"]);
}
