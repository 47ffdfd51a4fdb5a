//! `powerinfer inspect`: what a file holds, and whether it can be run.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;

use powerinfer_core::{ActiveMode, LoadOptions, Model, NoteLevel};
use powerinfer_gguf::{ArrayRef, GgufModel, Tensor, ValueRef};
use serde::Serialize;
use serde_json::Value as Json;

use crate::args::InspectArgs;
use crate::error::CliError;
use crate::options::Source;
use crate::output::{bytes, print, print_json, table};

/// Elements of an array that are shown, and characters of a text.
const MAX_ELEMENTS: usize = 6;
const MAX_CHARS: usize = 60;

#[derive(Debug, Serialize)]
struct Report {
    file: String,
    magic: String,
    version: u32,
    alignment: u32,
    n_shards: usize,
    n_keys: usize,
    n_tensors: usize,
    tensor_bytes: u64,
    metadata: serde_json::Map<String, Json>,
    types: Vec<TypeTotal>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tensors: Vec<TensorLine>,
    verdict: Verdict,
}

#[derive(Debug, Serialize)]
struct TypeTotal {
    #[serde(rename = "type")]
    ty: String,
    n_tensors: usize,
    n_bytes: u64,
}

#[derive(Debug, Serialize)]
struct TensorLine {
    name: String,
    dims: Vec<usize>,
    #[serde(rename = "type")]
    ty: String,
    n_bytes: usize,
    offset: usize,
    shard: usize,
}

#[derive(Debug, Serialize)]
struct Verdict {
    can_run: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    activation: Option<&'static str>,
    modes: Vec<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    default_mode: Option<&'static str>,
    notes: Vec<Note>,
}

#[derive(Debug, Serialize)]
struct Note {
    level: &'static str,
    text: String,
}

pub(crate) fn run(args: &InspectArgs) -> Result<(), CliError> {
    let file = Source::File(args.path.clone()).open()?;
    let report = report(&args.path, &file, args.tensors);
    if args.json { print_json(&report) } else { print(&text(&report, &file)) }
}

fn report(path: &Path, file: &GgufModel, with_tensors: bool) -> Report {
    let mut totals: BTreeMap<&str, TypeTotal> = BTreeMap::new();
    for tensor in file.tensors() {
        let ty = tensor.ty().name();
        let total =
            totals.entry(ty).or_insert_with(|| TypeTotal { ty: ty.to_owned(), n_tensors: 0, n_bytes: 0 });
        total.n_tensors += 1;
        total.n_bytes += tensor.n_bytes() as u64;
    }
    let mut types: Vec<TypeTotal> = totals.into_values().collect();
    types.sort_by_key(|total| std::cmp::Reverse(total.n_bytes));
    let head = &file.files()[0];
    Report {
        file: path.display().to_string(),
        magic: file.magic().to_string(),
        version: head.version(),
        alignment: head.alignment(),
        n_shards: file.files().len(),
        n_keys: file.metadata().len(),
        n_tensors: file.n_tensors(),
        tensor_bytes: types.iter().map(|total| total.n_bytes).sum(),
        metadata: file.metadata().iter().map(|(key, value)| (key.to_owned(), json_value(value))).collect(),
        types,
        tensors: if with_tensors { tensor_lines(file) } else { Vec::new() },
        verdict: verdict(path),
    }
}

fn tensor_lines(file: &GgufModel) -> Vec<TensorLine> {
    let line = |shard: usize, tensor: Tensor<'_>| TensorLine {
        name: tensor.name().to_owned(),
        dims: tensor.dims().to_vec(),
        ty: tensor.ty().name().to_owned(),
        n_bytes: tensor.n_bytes(),
        offset: tensor.offset(),
        shard,
    };
    file.files()
        .iter()
        .enumerate()
        .flat_map(|(shard, file)| file.tensors().map(move |tensor| line(shard, tensor)))
        .collect()
}

/// Loads the model as `generate` would.
fn verdict(path: &Path) -> Verdict {
    let model = match Model::open(path, &LoadOptions::default()) {
        Ok(model) => model,
        Err(error) => {
            return Verdict {
                can_run: false,
                reason: Some(with_sources(&error)),
                activation: None,
                modes: vec![],
                default_mode: None,
                notes: vec![],
            };
        }
    };
    let spec = model.spec();
    let mut modes = vec![ActiveMode::Dense];
    if spec.activation.has_exact_zeros() {
        modes.push(ActiveMode::Exact);
    }
    if model.has_predictors() {
        modes.push(ActiveMode::Predictor);
    }
    let note = |(level, text): (NoteLevel, &str)| Note {
        level: match level {
            NoteLevel::Info => "info",
            NoteLevel::Warning => "warning",
        },
        text: text.to_owned(),
    };
    Verdict {
        can_run: true,
        reason: None,
        activation: Some(spec.activation.name()),
        modes: modes.into_iter().map(ActiveMode::name).collect(),
        default_mode: Some(model.default_mode().name()),
        notes: model.notes().iter().map(note).collect(),
    }
}

fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let _ = write!(text, ": {error}");
        source = error.source();
    }
    text
}

fn text(report: &Report, file: &GgufModel) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(out, "{}", report.file);
    let shards = if report.n_shards == 1 { String::new() } else { format!(", {} files", report.n_shards) };
    let _ = writeln!(
        out,
        "{} version {}, alignment {}{shards}, {} keys, {} tensors of {}",
        report.magic,
        report.version,
        report.alignment,
        report.n_keys,
        report.n_tensors,
        bytes(report.tensor_bytes as f64)
    );
    out += "\nMetadata\n";
    for (key, value) in file.metadata().iter() {
        let _ = writeln!(out, "  {} = {}", key.escape_debug(), short_value(value));
    }
    out += "\nTypes\n";
    let totals =
        report.types.iter().map(|t| vec![t.ty.clone(), t.n_tensors.to_string(), bytes(t.n_bytes as f64)]);
    out += &indented(&with_head(["type", "tensors", "bytes"], totals));
    if !report.tensors.is_empty() {
        out += "\nTensors\n";
        let head = ["name", "shape", "type", "bytes", "offset"];
        let lines = report.tensors.iter().map(|t| {
            let dims: Vec<String> = t.dims.iter().map(ToString::to_string).collect();
            let name = t.name.escape_debug().to_string();
            vec![name, dims.join(" x "), t.ty.clone(), t.n_bytes.to_string(), t.offset.to_string()]
        });
        out += &indented(&with_head(head, lines));
    }
    out += "\nVerdict\n";
    out += &verdict_text(&report.verdict);
    out
}

fn verdict_text(verdict: &Verdict) -> String {
    if let Some(reason) = &verdict.reason {
        return format!("  cannot be run: {reason}\n");
    }
    let mut out = format!(
        "  can be run; activation {}, modes {} (default {})\n",
        verdict.activation.unwrap_or("?"),
        verdict.modes.join(", "),
        verdict.default_mode.unwrap_or("?")
    );
    for note in &verdict.notes {
        let _ = writeln!(out, "  {}: {}", note.level, note.text);
    }
    out
}

fn with_head<const N: usize>(head: [&str; N], rows: impl Iterator<Item = Vec<String>>) -> Vec<Vec<String>> {
    std::iter::once(head.map(str::to_owned).to_vec()).chain(rows).collect()
}

fn indented(rows: &[Vec<String>]) -> String {
    table(rows).lines().map(|line| format!("  {line}\n")).collect()
}

/// A value on one line.
fn short_value(value: ValueRef<'_>) -> String {
    match value {
        ValueRef::Array(array) => {
            let shown: Vec<String> = array.iter().take(MAX_ELEMENTS).map(short_value).collect();
            let more = if array.len() > MAX_ELEMENTS { ", …" } else { "" };
            format!("{} x {} [{}{more}]", array.len(), array.element_type(), shown.join(", "))
        }
        ValueRef::String(text) => {
            let text = String::from_utf8_lossy(text);
            let shown: String = text.chars().take(MAX_CHARS).collect();
            let more = if shown.len() < text.len() { "…" } else { "" };
            format!("\"{}{more}\"", shown.escape_debug())
        }
        ValueRef::Bool(value) => value.to_string(),
        ValueRef::F32(value) => value.to_string(),
        ValueRef::F64(value) => value.to_string(),
        other => other.as_integer().map_or_else(|| "?".to_owned(), |n| n.to_string()),
    }
}

/// A value as JSON: arrays that are long as their length, type and first elements. Texts that are not UTF-8 and
/// numbers that JSON lacks come as text.
fn json_value(value: ValueRef<'_>) -> Json {
    match value {
        ValueRef::Array(array) => json_array(array),
        ValueRef::String(text) => String::from_utf8_lossy(text).into_owned().into(),
        ValueRef::Bool(value) => value.into(),
        ValueRef::F32(value) if value.is_finite() => {
            // Through text, so that 0.1 stays 0.1 and does not gain the digits of a double.
            value.to_string().parse::<f64>().map_or(Json::Null, Json::from)
        }
        ValueRef::F64(value) if value.is_finite() => value.into(),
        ValueRef::F32(value) => value.to_string().into(),
        ValueRef::F64(value) => value.to_string().into(),
        ValueRef::U64(value) => value.into(),
        other => other.as_integer().and_then(|n| i64::try_from(n).ok()).map_or(Json::Null, Json::from),
    }
}

fn json_array(array: ArrayRef<'_>) -> Json {
    let first: Vec<Json> = array.iter().take(MAX_ELEMENTS).map(json_value).collect();
    if array.len() <= MAX_ELEMENTS {
        return first.into();
    }
    serde_json::json!({ "length": array.len(), "type": array.element_type().to_string(), "first": first })
}
