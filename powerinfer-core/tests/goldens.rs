//! Logits and greedy ids of tiny models against the original C++ engine and against PyTorch transformers.
//!
//! The repository holds a subset that covers every family and type. The environment variable
//! `POWERINFER_DATA` may name a folder with the rest in its folder `golden`; without it, that is said.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]
#![expect(clippy::print_stdout, reason = "figures, for whoever runs it with --nocapture")]

mod support;

use std::path::{Path, PathBuf};

use powerinfer_core::{Device, GgufFile, LoadOptions, Model, Probe, SessionOptions};
use powerinfer_sparse_ops::reference::Rounding;
use powerinfer_sparse_ops::{LayerId, TokenId};
use powerinfer_testing::tolerance::{NMSE_DIVERGED, nmse};
use serde_json::Value;
use support::TinyFile;

/// Goldens in the repository.
const N_OWN: usize = 8;

/// One stored model with its logits.
struct Golden {
    name: String,
    model: PathBuf,
    /// What is fed, one position a row of logits.
    ids: Vec<TokenId>,
    /// Row whose arg max is the first greedy id, and the ids.
    greedy: Option<(usize, Vec<u32>)>,
    logits: Vec<f32>,
    n_vocab: usize,
    info: Value,
}

impl Golden {
    fn read(json: &Path) -> Self {
        let info: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        let ids = |key: &str| -> Vec<u32> {
            let list = info[key].as_array().unwrap_or_else(|| panic!("{json:?}: no list `{key}`"));
            list.iter().map(|v| v.as_u64().unwrap() as u32).collect()
        };
        let name = info["name"].as_str().unwrap().to_owned();
        let (fed, greedy) = if info.get("prompt_ids").is_some() {
            let (prompt, greedy) = (ids("prompt_ids"), ids("greedy_ids"));
            let fed = [&prompt[..], &greedy[..greedy.len() - 1]].concat();
            (fed, Some((prompt.len() - 1, greedy)))
        } else {
            (ids("ids"), None)
        };
        let bytes = std::fs::read(json.with_file_name(format!("{name}.logits.f32"))).unwrap();
        let logits: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let n_vocab = logits.len() / fed.len();
        assert_eq!(info["logits_shape"], serde_json::json!([fed.len(), n_vocab]), "{name}");
        Self {
            model: json.with_file_name(format!("{name}.gguf")),
            name,
            ids: fed.into_iter().map(TokenId).collect(),
            greedy,
            logits,
            n_vocab,
            info,
        }
    }

    fn limits(&self, key: &str) -> (f64, f64) {
        let limit = |part: &str| self.info[key][part].as_f64().unwrap();
        (limit("max_abs"), limit("rel_l2"))
    }

    fn load(&self, device: Device) -> Model {
        Model::open(&self.model, &LoadOptions { device, ..LoadOptions::default() })
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// Logits of all positions, fed in chunks of the given size.
    fn run(&self, model: &Model, chunk: usize) -> Vec<f32> {
        let mut session = model.session(&SessionOptions::default()).unwrap();
        let mut logits = Vec::new();
        for ids in self.ids.chunks(chunk) {
            session.evaluate(ids, |_, row| logits.extend_from_slice(row)).unwrap();
        }
        logits
    }

    /// `max_abs` and `rel_l2` as the goldens define them.
    fn deviation(&self, got: &[f32]) -> (f64, f64) {
        assert_eq!(got.len(), self.logits.len(), "{}", self.name);
        assert!(got.iter().all(|v| v.is_finite()), "{}: a logit is no number", self.name);
        let mut max_abs = 0f64;
        let mut rel_l2 = 0f64;
        for (got, want) in got.chunks(self.n_vocab).zip(self.logits.chunks(self.n_vocab)) {
            let diff: Vec<f64> = got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w)).collect();
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|d| d * d).sum::<f64>().sqrt();
            max_abs = diff.iter().fold(max_abs, |m, d| m.max(d.abs()));
            let relative = norm(&mut diff.iter().copied()) / norm(&mut want.iter().map(|&w| f64::from(w)));
            rel_l2 = rel_l2.max(relative);
        }
        (max_abs, rel_l2)
    }

    /// Fails unless the logits are within the limits and the greedy ids equal; says where it began.
    fn check(&self, what: &str, model: &Model, got: &[f32], limits: (f64, f64)) {
        let (max_abs, rel_l2) = self.deviation(got);
        if max_abs > limits.0 || rel_l2 > limits.1 {
            panic!(
                "{} {what}: max_abs {max_abs:.2e} (limit {:.0e}), rel_l2 {rel_l2:.2e} (limit {:.0e}); {}",
                self.name,
                limits.0,
                limits.1,
                self.diagnosis(model)
            );
        }
        if let Some((first, greedy)) = &self.greedy {
            let rows = got.chunks(self.n_vocab).skip(*first);
            let ids: Vec<u32> = rows.map(arg_max).collect();
            assert_eq!(&ids, greedy, "{} {what}: greedy ids", self.name);
        }
    }

    /// Where the residual stream leaves the float reference's, in words.
    fn diagnosis(&self, model: &Model) -> String {
        let reference = self.load(Device::Reference(Rounding::None));
        if model.backends() == reference.backends() {
            return "the float reference itself, which no trace is compared with".to_owned();
        }
        match first_diverging_layer(&reference, model, &self.ids) {
            Some((layer, error)) => {
                format!("the trace leaves the float reference after layer {layer}: NMSE {error:.1e}")
            }
            None => "the trace follows the float reference through every layer: the head differs".to_owned(),
        }
    }
}

/// The first layer after which two models' residual streams differ by more than rounding, and by how much.
fn first_diverging_layer(want: &Model, got: &Model, ids: &[TokenId]) -> Option<(usize, f64)> {
    let errors = layer_errors(want, got, ids);
    errors.into_iter().enumerate().find(|(_, error)| *error > NMSE_DIVERGED)
}

fn layer_errors(want: &Model, got: &Model, ids: &[TokenId]) -> Vec<f64> {
    let (want, got) = (trace(want, ids), trace(got, ids));
    assert!(want.len() == got.len() && !want.is_empty(), "layers of both models");
    got.iter().zip(&want).map(|(got, want)| nmse(got, want)).collect()
}

/// The residual stream after each layer.
fn trace(model: &Model, ids: &[TokenId]) -> Vec<Vec<f32>> {
    struct Record(Vec<Vec<f32>>);
    impl Probe for Record {
        fn after_layer(&mut self, _: LayerId, h: &[f32]) {
            self.0.push(h.to_vec());
        }
    }
    let mut record = Record(Vec::new());
    model.session(&SessionOptions::default()).unwrap().trace(ids, &mut record).unwrap();
    record.0
}

fn arg_max(row: &[f32]) -> u32 {
    let best = (0..row.len()).reduce(|best, ix| if row[ix] > row[best] { ix } else { best });
    best.unwrap() as u32
}

/// All goldens in a folder, in the order of their names.
fn goldens(folder: &Path) -> Vec<Golden> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{folder:?}: {error}"))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "json") && path.with_extension("gguf").exists())
        .collect();
    paths.sort();
    paths.iter().map(|path| Golden::read(path)).collect()
}

fn data(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(folder)
}

/// The repository's own goldens, and the others of the folder that the environment names.
fn original_goldens() -> Vec<Golden> {
    let mut all = goldens(&data("golden"));
    assert_eq!(all.len(), N_OWN, "goldens of the repository");
    let Some(folder) = std::env::var_os("POWERINFER_DATA") else {
        println!("POWERINFER_DATA names no folder: {N_OWN} goldens of the repository only");
        return all;
    };
    let folder = Path::new(&folder).join("golden");
    for other in goldens(&folder) {
        if all.iter().all(|golden| golden.name != other.name) {
            all.push(other);
        }
    }
    assert!(all.len() > N_OWN, "{folder:?} has no golden that the repository lacks");
    all
}

#[test]
fn the_reference_backend_with_the_originals_rounding_meets_the_strict_tolerance() {
    for golden in original_goldens() {
        let model = golden.load(Device::Reference(Rounding::Original));
        for chunk in [1, 5, 32] {
            let got = golden.run(&model, chunk);
            golden.check(&format!("in chunks of {chunk}"), &model, &got, golden.limits("tolerance"));
        }
        let (max_abs, rel_l2) = golden.deviation(&golden.run(&model, 1));
        println!("{:24} reference, rounded: max_abs {max_abs:.1e} rel_l2 {rel_l2:.1e}", golden.name);
    }
}

#[test]
fn the_reference_backend_without_rounding_meets_the_tolerance_for_float_activations() {
    for golden in original_goldens() {
        let model = golden.load(Device::Reference(Rounding::None));
        let got = golden.run(&model, 32);
        golden.check("float", &model, &got, golden.limits("tolerance_float_activations"));
    }
}

#[test]
fn the_wrong_rules_are_noticed() {
    // Without the rounding rules the strict tolerance must fail for every quantised file.
    let mut n_seen = 0;
    for golden in original_goldens().iter().filter(|g| g.info["type"] != "F16") {
        let (max_abs, _) = golden.deviation(&golden.run(&golden.load(Device::Reference(Rounding::None)), 32));
        assert!(max_abs > golden.limits("tolerance").0, "{}: rounding makes no difference", golden.name);
        n_seen += 1;
    }
    assert!(n_seen > 0);
}

#[cfg(feature = "cpu")]
#[test]
fn the_cpu_backend_meets_the_tolerance_for_float_activations() {
    use powerinfer_core::{CpuLevel, CpuOptions};
    for golden in original_goldens() {
        for level in CpuLevel::available() {
            for threads in [1, 2, 3] {
                let options = CpuOptions { threads, level: Some(level), ..CpuOptions::default() };
                let model = golden.load(Device::Cpu(options));
                for chunk in [1, 4, 32] {
                    let got = golden.run(&model, chunk);
                    let what = format!("{level:?}, {threads} threads, chunks of {chunk}");
                    golden.check(&what, &model, &got, golden.limits("tolerance_float_activations"));
                }
            }
            let (max_abs, _) = golden.deviation(&golden.run(&golden.load(Device::default()), 1));
            println!("{:24} cpu {level:?}: max_abs {max_abs:.1e}", golden.name);
        }
    }
}

#[test]
fn every_backend_computes_what_transformers_computes() {
    let goldens = goldens(&data("transformers"));
    assert!(goldens.len() >= 7, "every family is there");
    for golden in goldens {
        let limits = golden.limits("tolerance");
        let model = golden.load(Device::Reference(Rounding::None));
        golden.check("reference", &model, &golden.run(&model, 1), limits);
        #[cfg(feature = "cpu")]
        {
            let options = powerinfer_core::CpuOptions {
                kv_type: powerinfer_core::KvType::F32,
                ..powerinfer_core::CpuOptions::default()
            };
            let model = golden.load(Device::Cpu(options));
            for chunk in [1, 7, 32] {
                let got = golden.run(&model, chunk);
                golden.check(&format!("cpu, chunks of {chunk}"), &model, &got, limits);
            }
        }
    }
}

/// Backends that a trace is compared for, besides the float reference.
fn traced_devices() -> Vec<Device> {
    let mut devices = vec![Device::Reference(Rounding::Original)];
    if cfg!(feature = "cpu") {
        devices.push(Device::default());
    }
    devices
}

#[test]
fn rounding_is_no_divergence_and_a_broken_layer_is_named() {
    let transformers = goldens(&data("transformers"));
    for golden in original_goldens().iter().chain(&transformers) {
        let reference = golden.load(Device::Reference(Rounding::None));
        let bytes = std::fs::read(&golden.model).unwrap();
        for device in traced_devices() {
            let options = LoadOptions { device, ..LoadOptions::default() };
            let sound = Model::from_bytes(bytes.clone(), &options).unwrap();
            let errors = layer_errors(&reference, &sound, &golden.ids);
            let rounding = errors.iter().copied().fold(0.0, f64::max);
            assert!(rounding <= NMSE_DIVERGED, "{}, {options:?}: NMSE by layer {errors:?}", golden.name);
            let mut least = f64::INFINITY;
            for layer in 0..errors.len() {
                for part in ["attn_output", "ffn_up"] {
                    // Zero in every type.
                    let mut bytes = bytes.clone();
                    let name = format!("blk.{layer}.{part}.weight");
                    let file = GgufFile::from_bytes(bytes.clone()).unwrap();
                    let tensor = file.tensor(&name).unwrap();
                    bytes[tensor.offset()..][..tensor.n_bytes()].fill(0);
                    let broken = Model::from_bytes(bytes, &options).unwrap();
                    let found = first_diverging_layer(&reference, &broken, &golden.ids);
                    let place = found.map(|(layer, _)| layer);
                    assert_eq!(place, Some(layer), "{}: {name} is zero, {found:?}", golden.name);
                    least = least.min(found.map_or(0.0, |(_, error)| error));
                }
            }
            println!("{:24} rounding {rounding:.1e}, zero matrix {least:.1e}", golden.name);
        }
    }
}

#[test]
fn a_broken_layer_is_named_in_the_middle_of_a_deep_model() {
    let ids = [1, 40, 270, 99, 5].map(TokenId);
    let reference = Device::Reference(Rounding::None);
    let reference = LoadOptions { device: reference, ..LoadOptions::default() };
    let want = TinyFile::dense().load_with(&reference).unwrap();
    for device in traced_devices() {
        let options = LoadOptions { device, ..LoadOptions::default() };
        let sound = TinyFile::dense().load_with(&options).unwrap();
        assert_eq!(first_diverging_layer(&want, &sound, &ids), None, "{options:?}");
        for layer in [0, 1, 7, support::N_LAYER - 1] {
            let name = format!("blk.{layer}.ffn_up.weight");
            let mut file = TinyFile::dense();
            // One neuron's rows negated would be enough for one token; a quarter of them is for every one.
            let mut values = file.values(&name);
            let quarter = values.len() / 4;
            values[..quarter].iter_mut().for_each(|v| *v = -*v);
            file.tensor(&name, &[support::N_EMBD, support::N_FF], values);
            let broken = file.load_with(&options).unwrap();
            let found = first_diverging_layer(&want, &broken, &ids);
            assert_eq!(found.map(|(layer, _)| layer), Some(layer), "{name}: {found:?}");
        }
    }
}

#[test]
fn a_failed_comparison_says_where_it_began() {
    let golden = &goldens(&data("golden"))[0];
    let reference = golden.load(Device::Reference(Rounding::None));
    assert!(golden.diagnosis(&reference).contains("float reference itself"));
    let rounded = golden.load(Device::Reference(Rounding::Original));
    assert!(golden.diagnosis(&rounded).contains("the head differs"));
}
