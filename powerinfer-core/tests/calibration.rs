//! From a model and some text to gate copies, and back into the model.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::path::Path;

use powerinfer_core::calibration::{
    CalibrateError, CalibrateOptions, Phase, Progress, RECALLS, RecordOptions, calibrate, evaluate,
    fingerprint,
};
use powerinfer_core::{
    Activation, ActiveMode, CalibrationChoice, CalibrationFile, CancelToken, GgufFile, GgufModel, LoadError,
    LoadOptions, Model, NoteLevel, SessionError, SessionOptions, TokenId, calibration_path,
};
use powerinfer_testing::tiny::Random;
use support::{N_EMBD, N_FF, N_LAYER, N_VOCAB, TinyFile};

fn text(seed: u64, n: usize, n_vocab: usize) -> Vec<TokenId> {
    let mut random = Random::new(seed);
    (0..n).map(|_| TokenId(random.below(n_vocab) as u32)).collect()
}

fn record() -> RecordOptions {
    RecordOptions { n_tokens: 2048, sequence_len: 32, threads: 2, ..RecordOptions::default() }
}

fn options() -> CalibrateOptions {
    CalibrateOptions { record: record(), all_layers: true, ..CalibrateOptions::default() }
}

fn parsed(bytes: Vec<u8>) -> GgufModel {
    GgufModel::from(GgufFile::from_bytes(bytes).unwrap())
}

fn calibrated(file: &GgufModel, options: &CalibrateOptions) -> Result<CalibrationFile, CalibrateError> {
    let n_vocab = Model::load(file, &LoadOptions::default()).unwrap().spec().n_vocab;
    let texts = [text(1, 3000, n_vocab), text(2, 3000, n_vocab)];
    calibrate(file, &LoadOptions::default(), &texts, options, &CancelToken::new(), &mut |_| ())
}

/// Writes a model and its calibration beside it; the model's path.
fn write(folder: &Path, bytes: &[u8], calibration: &CalibrationFile) -> std::path::PathBuf {
    let path = folder.join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    calibration.write(calibration_path(&path)).unwrap();
    path
}

/// Calibrates, loads the result from its file, and measures it on other text.
fn check_recall(bytes: Vec<u8>, choice: impl FnOnce(&Path) -> CalibrationChoice) {
    let folder = tempfile::tempdir().unwrap();
    let file = parsed(bytes.clone());
    let calibration = calibrated(&file, &options()).unwrap();
    let path = write(folder.path(), &bytes, &calibration);
    let mut shares = Vec::new();
    let choice = choice(&calibration_path(&path));
    for recall in RECALLS {
        let load =
            LoadOptions { calibration: choice.clone(), recall: Some(recall), ..LoadOptions::default() };
        let model = Model::open(&path, &load).unwrap();
        let texts = [text(3, 2000, model.spec().n_vocab)];
        let layers = evaluate(&file, &model, &texts, &record(), &CancelToken::new(), &mut |_| ()).unwrap();
        assert_eq!(layers.len(), model.spec().n_layer);
        for layer in &layers {
            assert!(layer.predicted);
            assert!(layer.quality.recall >= f64::from(recall) - 0.01, "{recall}: {layer:?}");
            assert!(layer.mass_recall >= layer.quality.recall, "{recall}: {layer:?}");
            assert!(layer.quality.predicted_share < 0.9, "{recall}: {layer:?}");
        }
        shares.push(layers.iter().map(|layer| layer.quality.predicted_share).sum::<f64>());
    }
    assert!(shares.is_sorted(), "more recall takes more neurons: {shares:?}");
}

#[test]
fn the_wanted_recall_is_reached_on_other_text() {
    check_recall(TinyFile::dense().bytes(), |_| CalibrationChoice::Beside);
}

#[test]
fn the_wanted_recall_is_reached_in_every_family() {
    for name in ["opt-q4_0", "falcon7-f16", "bamboo-q4_0", "dense-bamboo-q4_0"] {
        let path = format!("{}/tests/data/golden/{name}.gguf", env!("CARGO_MANIFEST_DIR"));
        // Some of these have predictors of their own, which the copies replace only when asked to.
        check_recall(std::fs::read(path).unwrap(), |path| CalibrationChoice::File(path.to_owned()));
    }
}

#[test]
fn a_calibration_beside_a_model_makes_mode_predictor_and_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = TinyFile::dense().bytes();
    let file = parsed(bytes.clone());
    let mut calibration = calibrated(&file, &options()).unwrap();
    let mut figures = calibration.layers()[1].figures().clone();
    figures.used = false;
    calibration.layers_mut()[1].decide(false, figures.reason, 1.0, 2.0);
    let path = write(folder.path(), &bytes, &calibration);

    let model = Model::open(&path, &LoadOptions::default()).unwrap();
    assert_eq!(model.default_mode(), ActiveMode::Predictor);
    let notes: Vec<&str> = model.notes().iter().map(|(_, line)| line).collect();
    let said = notes.iter().any(|n| n.contains("recall 0.99") && n.contains("layers 0, 2-11"));
    assert!(said, "{notes:?}");
    let predicted: Vec<bool> = model.spec().layers().map(|l| model.layer_has_predictor(l)).collect();
    assert_eq!((predicted[1], predicted.iter().filter(|p| **p).count()), (false, N_LAYER - 1));

    for plain in [
        Model::open(&path, &LoadOptions { calibration: CalibrationChoice::Never, ..LoadOptions::default() }),
        Model::load(&file, &LoadOptions::default()),
    ] {
        assert_eq!(plain.unwrap().default_mode(), ActiveMode::Exact);
    }
    // A wish that the file has no thresholds for.
    let load = LoadOptions {
        calibration: CalibrationChoice::File(calibration_path(&path)),
        recall: Some(0.999),
        ..LoadOptions::default()
    };
    assert!(matches!(Model::open(&path, &load), Err(LoadError::Calibration(_))));
}

#[test]
fn the_first_position_is_exact_and_later_ones_read_less() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = TinyFile::dense().bytes();
    let calibration = calibrated(&parsed(bytes.clone()), &options()).unwrap();
    let path = write(folder.path(), &bytes, &calibration);
    let load = LoadOptions { recall: Some(0.95), ..LoadOptions::default() };
    let model = Model::open(&path, &load).unwrap();
    let ids = text(9, 24, N_VOCAB);
    let run = |mode| {
        let options = SessionOptions { n_ctx: Some(32), mode: Some(mode) };
        let mut session = model.session(&options).unwrap();
        let first: Vec<u32> = session.prefill(&ids[..1]).unwrap().iter().map(|v| v.to_bits()).collect();
        session.prefill(&ids[1..]).unwrap();
        (first, session.stats().prefill)
    };
    let (exact, predictor) = (run(ActiveMode::Exact), run(ActiveMode::Predictor));
    assert_eq!(exact.0, predictor.0, "position 0 is computed in full");
    assert!(predictor.1.active_share() < 0.9 && exact.1.active_share() == 1.0);
}

#[test]
fn other_models_and_damaged_files_are_refused_when_named_and_left_aside_when_found() {
    let folder = tempfile::tempdir().unwrap();
    let file = TinyFile::dense();
    let calibration = calibrated(&parsed(file.bytes()), &options()).unwrap();
    let mut other = TinyFile::dense();
    let mut gate = other.values("blk.3.ffn_gate.weight");
    gate.iter_mut().for_each(|w| *w *= 1.01);
    other.tensor("blk.3.ffn_gate.weight", &[N_EMBD, N_FF], gate);
    let path = write(folder.path(), &other.bytes(), &calibration);
    let side = calibration_path(&path);
    let named = LoadOptions { calibration: CalibrationChoice::File(side.clone()), ..LoadOptions::default() };

    let text = Model::open(&path, &named).err().unwrap().to_string();
    let got = fingerprint(&parsed(other.bytes()));
    assert!(text.contains(calibration.fingerprint()) && text.contains(&got), "{text}");
    let left_aside = || {
        let model = Model::open(&path, &LoadOptions::default()).unwrap();
        assert_eq!(model.default_mode(), ActiveMode::Exact);
        let warned = |(level, line): (NoteLevel, &str)| {
            level == NoteLevel::Warning && line.contains("m.calibration.safetensors")
        };
        assert!(model.notes().iter().any(warned), "{:?}", model.notes());
    };
    left_aside();

    let whole = std::fs::read(&side).unwrap();
    std::fs::write(&side, &whole[..whole.len() / 2]).unwrap();
    assert!(matches!(Model::open(&path, &named), Err(LoadError::Calibration(_))));
    left_aside();
    std::fs::remove_file(&side).unwrap();
    assert!(matches!(Model::open(&path, &named), Err(LoadError::Calibration(_))));
}

#[test]
fn a_calibration_of_too_few_layers_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = parsed(TinyFile::dense().bytes());
    let mut whole = calibrated(&file, &options()).unwrap();
    let layer = whole.layers_mut()[0].clone();
    let (print, recalls) = (whole.fingerprint().to_owned(), whole.recalls().to_vec());
    let short = CalibrationFile::new(print, 1, recalls, 0.99, vec![layer]).unwrap();
    let path = write(folder.path(), &TinyFile::dense().bytes(), &short);
    let load = LoadOptions {
        calibration: CalibrationChoice::File(calibration_path(&path)),
        ..LoadOptions::default()
    };
    let err = Model::open(&path, &load).err().unwrap();
    assert!(matches!(err, LoadError::CalibrationLayers { expected: N_LAYER, got: 1 }), "{err}");
}

#[test]
fn a_file_with_predictors_of_its_own_keeps_them_unless_told_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = TinyFile::sparse().bytes();
    let calibration = calibrated(&parsed(bytes.clone()), &options()).unwrap();
    let path = write(folder.path(), &bytes, &calibration);
    let notes = |load: &LoadOptions| format!("{:?}", Model::open(&path, load).unwrap().notes());
    let beside = notes(&LoadOptions::default());
    assert!(beside.contains("rank 8") && beside.contains("has predictors of its own"), "{beside}");
    let calibration = CalibrationChoice::File(calibration_path(&path));
    let named = notes(&LoadOptions { calibration, ..LoadOptions::default() });
    assert!(named.contains("gate copies") && !named.contains("rank 8"), "{named}");
}

#[test]
fn little_memory_takes_more_passes_and_gives_the_same_file() {
    let file = parsed(TinyFile::dense().bytes());
    let passes = |memory_bytes| {
        let record = RecordOptions { memory_bytes, n_tokens: 512, ..record() };
        let options = CalibrateOptions { record, ..options() };
        let texts = [text(1, 600, N_VOCAB)];
        let mut n_tokens = 0;
        let mut progress = |at: Progress| {
            if at.phase == Phase::Record {
                n_tokens = at.total;
                assert!(at.done <= at.total);
            }
        };
        let load = LoadOptions::default();
        let calibration =
            calibrate(&file, &load, &texts, &options, &CancelToken::new(), &mut progress).unwrap();
        (n_tokens / 512, calibration.to_bytes().unwrap())
    };
    let (one, all) = passes(1 << 30);
    let layer_bytes = 16 * 31 * N_EMBD * 4;
    let (three, grouped) = passes(layer_bytes * 5);
    let (each, single) = passes(0);
    assert_eq!((one, three, each), (1, 3, N_LAYER));
    assert!(all == grouped && all == single);
}

#[test]
fn cancelling_ends_it_in_every_phase() {
    let file = parsed(TinyFile::dense().bytes());
    for phase in [Phase::Record, Phase::Fit, Phase::Time] {
        let cancel = CancelToken::new();
        let options = CalibrateOptions { all_layers: false, ..options() };
        let texts = [text(1, 3000, N_VOCAB)];
        let load = LoadOptions::default();
        let result = calibrate(&file, &load, &texts, &options, &cancel, &mut |at| {
            if at.phase == phase {
                cancel.cancel();
            }
        });
        assert!(matches!(result, Err(CalibrateError::Cancelled)), "{phase:?}: {result:?}");
    }
}

#[test]
fn layers_are_used_by_what_was_measured() {
    let file = parsed(TinyFile::dense().bytes());
    let calibration = calibrated(&file, &CalibrateOptions { all_layers: false, ..options() }).unwrap();
    for layer in calibration.layers() {
        let f = layer.figures();
        assert!(f.exact_us > 0.0 && f.predictor_us > 0.0, "{f:?}");
        assert_eq!(f.used, f.predictor_us < f.exact_us * 0.97, "{f:?}");
    }
}

#[test]
fn what_cannot_be_calibrated_is_refused() {
    let file = parsed(TinyFile::dense().bytes());
    let run = |load: LoadOptions, n: usize, recall: f32| {
        let options = CalibrateOptions { recall, ..options() };
        let texts = [text(1, n, N_VOCAB)];
        calibrate(&file, &load, &texts, &options, &CancelToken::new(), &mut |_| ()).unwrap_err()
    };
    let silu = LoadOptions { activation: Some(Activation::Silu), ..LoadOptions::default() };
    let err = run(silu, 1000, 0.99);
    assert!(matches!(err, CalibrateError::NoZeros { activation: "silu" }), "{err}");
    let err = run(LoadOptions::default(), 10, 0.99);
    assert!(matches!(err, CalibrateError::TextTooShort { n_tokens: 10, .. }), "{err}");
    for recall in [0.0, 1.0, f32::NAN] {
        let err = run(LoadOptions::default(), 1000, recall);
        assert!(matches!(err, CalibrateError::Predictor(_)), "{err}");
    }
    let mut broken = TinyFile::dense();
    broken.tensor("blk.2.ffn_norm.weight", &[N_EMBD], vec![f32::NAN; N_EMBD]);
    let err = calibrated(&parsed(broken.bytes()), &options()).unwrap_err();
    assert!(matches!(err, CalibrateError::NotFinite { layer } if layer.0 == 2), "{err}");
    let mut broken = TinyFile::dense();
    let mut gate = broken.values("blk.2.ffn_gate.weight");
    gate[7] = f32::NAN;
    broken.tensor("blk.2.ffn_gate.weight", &[N_EMBD, N_FF], gate);
    let err = calibrated(&parsed(broken.bytes()), &options()).unwrap_err();
    assert!(matches!(err, CalibrateError::GateCopy { layer, .. } if layer.0 == 2), "{err}");

    let model = Model::load(&file, &LoadOptions::default()).unwrap();
    let texts = [text(1, 1000, N_VOCAB)];
    let err = evaluate(&file, &model, &texts, &record(), &CancelToken::new(), &mut |_| ()).unwrap_err();
    assert!(matches!(err, CalibrateError::Session(SessionError::NoPredictors)), "{err}");
}

#[test]
fn fingerprints_tell_files_apart_and_stay() {
    let print = |file: &TinyFile| fingerprint(&parsed(file.bytes()));
    let plain = print(&TinyFile::dense());
    assert_eq!(plain, print(&TinyFile::dense()));
    assert_eq!(plain.len(), 32);
    let mut key = TinyFile::dense();
    key.set("general.name", "another");
    assert_ne!(print(&key), plain);
    let mut weight = TinyFile::dense();
    let mut gate = weight.values("blk.11.ffn_gate.weight");
    gate[N_EMBD * N_FF - 1] += 1.0;
    weight.tensor("blk.11.ffn_gate.weight", &[N_EMBD, N_FF], gate);
    assert_ne!(print(&weight), plain);
}
