use std::path::Path;

use powerinfer_core::{Device, LoadOptions, Model, SessionOptions};
use powerinfer_gguf::GgufFile;
use powerinfer_predictor::{FloatType, PredictorLayer};
use powerinfer_sparse_ops::reference::Rounding;
use powerinfer_sparse_ops::{ActiveMode, TokenId};
use tempfile::TempDir;

use super::*;

mod quantize;

const N_EMBD: usize = 32;
const N_FF: usize = 64;
const N_VOCAB: usize = 48;
/// Over 10, so that the order of names differs from that of numbers.
const N_LAYER: u32 = 11;
const RANK: usize = 3;

/// Repeatable numbers in -1..1, exact in F16.
struct Numbers(u32);

impl Numbers {
    fn take(&mut self, n: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((self.0 >> 21) as f32 - 1024.0) / 1024.0
        };
        (0..n).map(|_| next()).collect()
    }
}

fn encoded(ty: WeightType, n_cols: usize, values: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    encode(values.chunks_exact(n_cols), ty, &mut out, &mut RoundingError::default()).unwrap();
    out
}

/// A dense model and its predictors in a folder, and changes to them.
struct Setup {
    folder: TempDir,
    arch: &'static str,
    down: WeightType,
    hidden_act: Option<&'static str>,
    magic: Magic,
    /// Layers, width, neurons and value offset of the predictors.
    predictor: (u32, usize, usize, f32),
}

impl Setup {
    fn new(down: WeightType) -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            arch: "llama",
            down,
            hidden_act: Some("relu"),
            magic: Magic::Gguf,
            predictor: (N_LAYER, N_EMBD, N_FF, 0.0),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn request(&self) -> ConvertRequest {
        let new =
            ConvertRequest::new(self.path("dense.gguf"), self.path("predictor"), self.path("sparse.gguf"));
        // Some tests convert again and again.
        ConvertRequest { replace: true, ..new }
    }

    fn down_values(layer: u32) -> Vec<f32> {
        Numbers(1000 + layer).take(N_EMBD * N_FF)
    }

    fn write_model(&self) {
        let arch = self.arch;
        let mut writer = GgufWriter::new(self.magic);
        let mut key = |name: &str, value: Value| {
            writer.key(name, value).unwrap();
        };
        key("general.architecture", arch.into());
        key("general.name", "tiny".into());
        key(FILE_TYPE_KEY, 99u32.into());
        for (name, value) in [
            ("block_count", N_LAYER),
            ("embedding_length", N_EMBD as u32),
            ("feed_forward_length", N_FF as u32),
            ("context_length", 64),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
        ] {
            key(&format!("{arch}.{name}"), value.into());
        }
        key(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32.into());
        if let Some(name) = self.hidden_act {
            key(&format!("{arch}.hidden_act"), name.into());
        }
        key("tokenizer.ggml.model", "llama".into());
        key("tokenizer.ggml.tokens", (0..N_VOCAB).map(|i| format!("t{i}")).collect::<Vec<_>>().into());
        key("tokenizer.ggml.scores", vec![0f32; N_VOCAB].into());
        let mut numbers = Numbers(7);
        let mut tensor = |name: &str, dims: &[usize], ty: WeightType, values: Vec<f32>| {
            writer.tensor(name, dims, ty.into(), encoded(ty, dims[0], &values)).unwrap();
        };
        let f32 = WeightType::F32;
        tensor("token_embd.weight", &[N_EMBD, N_VOCAB], f32, numbers.take(N_EMBD * N_VOCAB));
        tensor("output_norm.weight", &[N_EMBD], f32, vec![1.0; N_EMBD]);
        for layer in 0..N_LAYER {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            tensor(&name("attn_norm"), &[N_EMBD], f32, vec![1.0; N_EMBD]);
            tensor(&name("ffn_norm"), &[N_EMBD], f32, vec![1.0; N_EMBD]);
            for (part, n_rows) in [
                ("attn_q", N_EMBD),
                ("attn_k", N_EMBD / 2),
                ("attn_v", N_EMBD / 2),
                ("attn_output", N_EMBD),
                ("ffn_gate", N_FF),
                ("ffn_up", N_FF),
            ] {
                tensor(&name(part), &[N_EMBD, n_rows], f32, numbers.take(N_EMBD * n_rows));
            }
            tensor(&name("ffn_down"), &[N_FF, N_EMBD], self.down, Self::down_values(layer));
        }
        writer.write(self.path("dense.gguf")).unwrap();
    }

    fn write_predictor(&self) {
        let (n_layer, n_embd, n_ff, offset) = self.predictor;
        let layers = (0..n_layer).map(|layer| {
            let mut values = Numbers(500 + layer);
            let fc1 = values.take(RANK * n_embd);
            let fc2 = values.take(RANK * n_ff).iter().map(|v| v + offset).collect();
            PredictorLayer::new(RANK, fc1, fc2).unwrap()
        });
        let file = PredictorFile::new(layers.collect(), Some(0.25)).unwrap();
        file.write(self.path("predictor"), FloatType::F32).unwrap();
    }

    fn write(&self) {
        self.write_model();
        self.write_predictor();
    }

    fn convert(&self, request: &ConvertRequest) -> Result<ConvertReport, ConvertError> {
        convert(request, &mut |_, _, _| {})
    }

    fn converted(&self, request: &ConvertRequest) -> (ConvertReport, GgufFile) {
        let report = self.convert(request).unwrap();
        (report, GgufFile::read(&request.output).unwrap())
    }

    /// The error of the unchanged request, with a check that nothing was written.
    fn error(&self) -> ConvertError {
        self.write();
        self.error_of(&self.request())
    }

    fn error_of(&self, request: &ConvertRequest) -> ConvertError {
        let error = self.convert(request).unwrap_err();
        assert!(!self.path("sparse.gguf").exists(), "{error}");
        error
    }
}

fn logits(path: &Path, mode: ActiveMode) -> Vec<f32> {
    let device = Device::Reference(Rounding::None);
    let model = Model::from_bytes(fs::read(path).unwrap(), &LoadOptions { device, ..LoadOptions::default() });
    let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
    let mut session = model.unwrap().session(&options).unwrap();
    let mut logits = Vec::new();
    session.evaluate(&[3, 14, 15, 9, 26].map(TokenId), |_, row| logits.extend_from_slice(row)).unwrap();
    assert_eq!(logits.len(), 5 * N_VOCAB);
    logits
}

fn down_rows(file: &GgufFile, layer: u32) -> Vec<f32> {
    file.tensor(&format!("blk.{layer}.ffn_down_t.weight")).unwrap().decode().unwrap()
}

#[test]
fn float_models_keep_their_logits_to_the_bit() {
    for ty in [WeightType::F32, WeightType::F16] {
        let setup = Setup::new(ty);
        setup.write();
        let (report, file) = setup.converted(&setup.request());
        assert_eq!(report.down_type, ty);
        assert_eq!(report.down_overall().relative_rms(), 0.0);
        assert_eq!(report.down.len(), N_LAYER as usize);
        assert_eq!(report.predictor.relative_rms(), 0.0, "the numbers of the predictors are exact in F16");
        assert_eq!(file.magic(), Magic::Pwri);
        let dense = logits(&setup.path("dense.gguf"), ActiveMode::Exact);
        assert!(dense.iter().any(|v| v.abs() > 0.1), "logits that are all zero would compare nothing");
        assert_eq!(logits(&setup.path("sparse.gguf"), ActiveMode::Exact), dense, "{ty}");
        assert_eq!(logits(&setup.path("sparse.gguf"), ActiveMode::Dense), dense, "{ty}");
        let predicted = logits(&setup.path("sparse.gguf"), ActiveMode::Predictor);
        assert_ne!(predicted, dense, "random predictors leave out neurons that matter");
    }
}

#[test]
fn a_threshold_below_every_score_predicts_every_neuron() {
    let setup = Setup::new(WeightType::F32);
    setup.write();
    let request = ConvertRequest { sparse_threshold: Some(-1e30), ..setup.request() };
    assert_eq!(setup.convert(&request).unwrap().sparse_threshold, -1e30);
    let exact = logits(&request.output, ActiveMode::Exact);
    assert_eq!(logits(&request.output, ActiveMode::Predictor), exact);
}

#[test]
fn keys_tensors_and_layers_come_through() {
    let setup = Setup::new(WeightType::F32);
    setup.write();
    let mut last = (0, 0);
    let mut n_calls = 0;
    let report = convert(&setup.request(), &mut |_, done, total| {
        assert!(done > last.0 && done <= total);
        last = (done, total);
        n_calls += 1;
    })
    .unwrap();
    let file = GgufFile::read(setup.path("sparse.gguf")).unwrap();
    assert_eq!((last.0, n_calls), (last.1, report.n_tensors));
    assert_eq!(report.n_tensors, 2 + 11 * N_LAYER as usize);
    assert_eq!(report.output_bytes, file.bytes().len() as u64);
    let dense = GgufFile::read(setup.path("dense.gguf")).unwrap();
    assert_eq!(file.n_tensors(), dense.n_tensors() + 2 * N_LAYER as usize);
    for (key, value) in dense.metadata().iter() {
        assert_eq!(file.metadata().get(key), Some(value), "{key}");
    }
    assert_eq!(file.metadata().require::<f32>(THRESHOLD_KEY).unwrap(), 0.25);
    for layer in 0..N_LAYER {
        let down = Matrix::new("down", N_EMBD, N_FF, Setup::down_values(layer)).unwrap();
        assert_eq!(down_rows(&file, layer), down.transposed().values(), "layer {layer}");
        assert!(file.tensor(&format!("blk.{layer}.ffn_down.weight")).is_none());
        let fc1 = file.tensor(&format!("blk.{layer}.fc1.weight")).unwrap();
        assert_eq!((fc1.dims(), fc1.ty()), ([N_EMBD, RANK].as_slice(), GgmlType::F16));
        assert_eq!(fc1.decode().unwrap(), Numbers(500 + layer).take(RANK * N_EMBD), "layer {layer}");
        let fc2 = file.tensor(&format!("blk.{layer}.fc2.weight")).unwrap();
        assert_eq!(fc2.dims(), [RANK, N_FF]);
    }
}

#[test]
fn quantised_down_projections_report_what_the_second_rounding_costs() {
    for (ty, low, high) in [(WeightType::Q8_0, 1e-3, 1e-2), (WeightType::Q4_0, 2e-2, 2e-1)] {
        let setup = Setup::new(ty);
        setup.write();
        let (report, file) = setup.converted(&setup.request());
        assert_eq!((report.down_type, report.down_from.as_str()), (ty, ty.name()));
        let dense = GgufFile::read(setup.path("dense.gguf")).unwrap();
        let mut square = 0.0;
        let mut square_error = 0.0;
        for layer in 0..N_LAYER {
            let before = dense.tensor(&format!("blk.{layer}.ffn_down.weight")).unwrap().decode().unwrap();
            let after = down_rows(&file, layer);
            for e in 0..N_EMBD {
                for j in 0..N_FF {
                    let (before, after) = (f64::from(before[e * N_FF + j]), f64::from(after[j * N_EMBD + e]));
                    square += before * before;
                    square_error += (before - after) * (before - after);
                }
            }
            let error = report.down[layer as usize].relative_rms();
            assert!((low..high).contains(&error), "{ty} layer {layer}: {error}");
        }
        let expected = (square_error / square).sqrt();
        let overall = report.down_overall().relative_rms();
        assert!((overall - expected).abs() < 1e-9, "{overall} {expected}");
        assert!(report.to_string().contains("relative RMS error"), "{report}");
        logits(&setup.path("sparse.gguf"), ActiveMode::Predictor);
    }
}

#[test]
fn unquantised_weights_replace_the_first_rounding_and_must_be_of_the_same_model() {
    let setup = Setup::new(WeightType::Q4_0);
    setup.write();
    let write = |layer_of: fn(u32) -> u32| {
        let tensors: Vec<_> = (0..N_LAYER)
            .map(|layer| {
                let values = Setup::down_values(layer_of(layer));
                (unquantised_name(LayerId(layer)), encoded(WeightType::F32, N_FF, &values))
            })
            .collect();
        safetensors_file(&setup.path("full.safetensors"), &tensors, &[N_EMBD, N_FF]);
    };
    write(|layer| layer);
    let request = ConvertRequest {
        down_from: Some(setup.path("full.safetensors")),
        down_type: Some(WeightType::F16),
        ..setup.request()
    };
    let (report, file) = setup.converted(&request);
    assert_eq!(report.down_overall().relative_rms(), 0.0);
    let down = Matrix::new("down", N_EMBD, N_FF, Setup::down_values(10)).unwrap();
    assert_eq!(down_rows(&file, 10), down.transposed().values());
    fs::remove_file(&request.output).unwrap();
    write(|layer| if layer == 4 { 5 } else { layer });
    let error = setup.error_of(&request);
    assert!(matches!(error, ConvertError::OtherWeights { layer: LayerId(4), .. }), "{error}");
}

/// Writes F32 tensors of one shape; the format is a length, a JSON header and the bytes.
fn safetensors_file(path: &Path, tensors: &[(String, Vec<u8>)], shape: &[usize]) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        let info = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets });
        header.insert(name.clone(), info);
        data.extend_from_slice(bytes);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], &header, &data].concat()).unwrap();
}

#[test]
fn a_type_for_every_matrix_holds_for_all_and_is_costed() {
    let setup = Setup::new(WeightType::F32);
    setup.write();
    let request = ConvertRequest { matrix_type: Some(WeightType::Q8_0), ..setup.request() };
    let (report, file) = setup.converted(&request);
    for tensor in file.tensors() {
        let expected = match tensor.name() {
            // A rank of 3 is no whole block.
            name if name.contains(".fc") => GgmlType::F16,
            name if name.contains("norm") => GgmlType::F32,
            _ => GgmlType::Q8_0,
        };
        assert_eq!(tensor.ty(), expected, "{tensor:?}");
    }
    assert_eq!(report.predictor_type, WeightType::F16);
    assert!(report.notes.iter().any(|note| note.contains("rank of 3")), "{:?}", report.notes);
    let error = report.matrices.unwrap().relative_rms();
    assert!((1e-3..1e-2).contains(&error), "{error}");
    assert_eq!(file.metadata().require::<u32>(FILE_TYPE_KEY).unwrap(), 7);
    logits(&request.output, ActiveMode::Exact);
}

#[test]
fn types_that_do_not_fit_are_refused() {
    let setup = Setup::new(WeightType::F32);
    setup.write();
    let request = ConvertRequest { predictor_type: Some(WeightType::Q8_0), ..setup.request() };
    let error = setup.error_of(&request);
    assert!(
        matches!(&error, ConvertError::RowLength { tensor, n_cols: RANK, .. } if tensor == "blk.0.fc2.weight"),
        "{error}"
    );
    let request = ConvertRequest { down_type: Some(WeightType::Q6_K), ..setup.request() };
    let error = setup.error_of(&request);
    assert!(matches!(error, ConvertError::NoEncoder { ty: WeightType::Q6_K, .. }), "{error}");
    let request = ConvertRequest { sparse_threshold: Some(f32::NAN), ..setup.request() };
    let error = setup.error_of(&request);
    assert!(matches!(error, ConvertError::Threshold { .. }), "{error}");
}

#[test]
fn models_without_exact_zeros_are_refused() {
    let with = |hidden_act| Setup { hidden_act, ..Setup::new(WeightType::F32) };
    let error = with(Some("silu")).error();
    assert!(matches!(&error, ConvertError::NotRelu { activation, .. } if activation == "silu"), "{error}");
    let setup = with(None);
    let error = setup.error();
    assert!(
        matches!(&error, ConvertError::ActivationUnknown { key } if key == "llama.hidden_act"),
        "{error}"
    );
    let silu = ConvertRequest { activation: Some(Activation::Silu), ..setup.request() };
    let error = setup.error_of(&silu);
    assert!(matches!(error, ConvertError::NotRelu { .. }), "{error}");
    let relu = ConvertRequest { activation: Some(Activation::Relu), ..setup.request() };
    let (_, file) = setup.converted(&relu);
    assert_eq!(file.metadata().require::<&str>("llama.hidden_act").unwrap(), "relu");
    let bamboo = Setup { arch: "bamboo", ..with(None) };
    bamboo.write();
    let (report, _) = bamboo.converted(&bamboo.request());
    assert!(report.notes.iter().any(|note| note.contains("bamboo")), "{:?}", report.notes);
}

#[test]
fn predictors_of_another_model_are_refused() {
    let with = |predictor| Setup { predictor, ..Setup::new(WeightType::F32) }.error();
    let error = with((N_LAYER - 1, N_EMBD, N_FF, 0.0));
    assert!(matches!(error, ConvertError::PredictorLayers { expected: 11, got: 10 }), "{error}");
    let error = with((N_LAYER + 1, N_EMBD, N_FF, 0.0));
    assert!(matches!(error, ConvertError::PredictorLayers { expected: 11, got: 12 }), "{error}");
    let error = with((N_LAYER, N_EMBD + 1, N_FF, 0.0));
    assert!(matches!(error, ConvertError::PredictorShape { dim: "n_embd", got: 33, .. }), "{error}");
    let error = with((N_LAYER, N_EMBD, N_FF - 1, 0.0));
    assert!(matches!(error, ConvertError::PredictorShape { dim: "n_ff", got: 63, .. }), "{error}");
    // Fits, but an F16 cannot hold its numbers.
    let error = with((N_LAYER, N_EMBD, N_FF, 1e6));
    assert!(matches!(error, ConvertError::Write(WriteError::Source { .. })), "{error}");
    let setup = Setup::new(WeightType::F32);
    setup.write_model();
    let error = setup.error_of(&setup.request());
    assert!(matches!(error, ConvertError::Predictor(PredictorError::Read { .. })), "{error}");
}

#[test]
fn files_that_are_no_dense_model_are_refused() {
    let error = Setup { magic: Magic::Pwri, ..Setup::new(WeightType::F32) }.error();
    assert!(matches!(error, ConvertError::AlreadySparse { .. }), "{error}");
    let error = Setup { arch: "gpt2", ..Setup::new(WeightType::F32) }.error();
    assert!(matches!(&error, ConvertError::UnsupportedArch { arch } if arch == "gpt2"), "{error}");
    let setup = Setup::new(WeightType::F32);
    setup.write_predictor();
    fs::write(setup.path("dense.gguf"), b"GGUF").unwrap();
    let error = setup.error_of(&setup.request());
    assert!(matches!(error, ConvertError::Model { .. }), "{error}");
}

#[test]
fn an_output_that_is_an_input_is_refused() {
    let setup = Setup::new(WeightType::F32);
    setup.write();
    for (output, input) in [
        ("predictor/../dense.gguf", "dense.gguf"),
        ("predictor/model.safetensors", "predictor/model.safetensors"),
    ] {
        let before = fs::read(setup.path(input)).unwrap();
        let request = ConvertRequest { output: setup.path(output), ..setup.request() };
        let error = setup.error_of(&request);
        assert!(matches!(error, ConvertError::SameFile { .. }), "{error}");
        assert_eq!(fs::read(setup.path(input)).unwrap(), before);
    }
}

#[test]
fn an_output_that_exists_is_kept_unless_it_may_be_replaced() {
    let setup = Setup::new(WeightType::F32);
    setup.write();
    let request = ConvertRequest { replace: false, ..setup.request() };
    fs::write(&request.output, "precious").unwrap();
    let error = convert(&request, &mut |_, _, _| {}).unwrap_err();
    assert!(matches!(&error, ConvertError::Exists { path } if *path == request.output), "{error}");
    assert!(error.to_string().contains("--force"), "{error}");
    assert_eq!(fs::read(&request.output).unwrap(), b"precious");
    convert(&setup.request(), &mut |_, _, _| {}).unwrap();
    assert_eq!(GgufModel::open(&request.output).unwrap().magic(), Magic::Pwri);
    fs::remove_file(&request.output).unwrap();
    convert(&request, &mut |_, _, _| {}).unwrap();
}
