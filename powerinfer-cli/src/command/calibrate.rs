//! `powerinfer calibrate`: 2-bit gate copies of a model with thresholds for a wanted recall, beside the model.

use std::path::PathBuf;

use indicatif::ProgressBar;
use powerinfer_core::calibration::{
    CalibrateError, CalibrateOptions, Phase, Progress, RecordOptions, calibrate,
};
use powerinfer_core::tokenizer::Tokenizer;
use powerinfer_core::{CalibrationFile, TokenId, calibration_path, read_tokenizer};
use powerinfer_predictor::{LayerFigures, RecallFigures, UseReason};
use serde::Serialize;

use crate::args::CalibrateArgs;
use crate::command::generate::cancel_on_ctrl_c;
use crate::error::CliError;
use crate::options::{self, Source};
use crate::output::{percent, print, print_json, progress_bar, say, table};

#[derive(Debug, Serialize)]
struct Outcome {
    model: String,
    out: PathBuf,
    fingerprint: String,
    n_tokens: u64,
    target_recall: f32,
    layers: Vec<LayerOutcome>,
}

#[derive(Debug, Serialize)]
struct LayerOutcome {
    layer: usize,
    active: f64,
    #[serde(flatten)]
    at: RecallFigures,
    outlier_columns: usize,
    used: bool,
    reason: UseReason,
    exact_us: f64,
    predictor_us: f64,
}

pub(crate) fn run(args: &CalibrateArgs) -> Result<(), CliError> {
    let source = Source::of(args.model.model.as_ref());
    let out = match (&args.out, &source) {
        (Some(out), _) => out.clone(),
        (None, Source::File(path)) => calibration_path(path),
        (None, Source::Demo) => return Err(CliError::NoOutput),
    };
    let file = source.open()?;
    let load = options::load_options(&args.model, None, None)?;
    let tokenizer = read_tokenizer(&file, args.model.pre).map_err(|error| source.load_error(error))?;
    let texts = read_texts(&args.text, &tokenizer)?;
    let options = CalibrateOptions {
        record: record_options(args.tokens, &args.model.device, &tokenizer, source.is_demo()),
        recall: args.model.recall.unwrap_or(CalibrateOptions::default().recall),
        all_layers: args.all_layers,
    };
    let cancel = cancel_on_ctrl_c()?;
    let bar = phase_bar();
    let calibration = calibrate(&file, &load, &texts, &options, &cancel, &mut |at| show(&bar, at));
    bar.finish_and_clear();
    let calibration = calibration.map_err(|error| failed(error, &source))?;
    calibration.write(&out)?;
    let outcome = outcome(source.name(), out, &calibration);
    if args.json {
        return print_json(&outcome);
    }
    print_table(&outcome)?;
    say(&format!("written: {}", outcome.out.display()));
    Ok(())
}

/// The ids of each text, without special tokens: sequences are cut from anywhere in it.
pub(crate) fn read_texts(paths: &[PathBuf], tokenizer: &Tokenizer) -> Result<Vec<Vec<TokenId>>, CliError> {
    paths.iter().map(|path| Ok(tokenizer.encode(&options::read_text(path)?, Default::default())?)).collect()
}

pub(crate) fn record_options(
    n_tokens: u32,
    device: &crate::args::DeviceArgs,
    tokenizer: &Tokenizer,
    is_demo: bool,
) -> RecordOptions {
    RecordOptions {
        n_tokens: n_tokens as usize,
        bos: options::bos(tokenizer, is_demo),
        threads: options::threads(device),
        ..RecordOptions::default()
    }
}

/// A bar that begins anew with each phase.
pub(crate) fn phase_bar() -> ProgressBar {
    progress_bar(1, "{msg:<8} {bar:40} {pos}/{len}, {eta} left")
}

pub(crate) fn show(bar: &ProgressBar, at: Progress) {
    let name = match at.phase {
        Phase::Record => "tokens",
        Phase::Fit => "layers",
        Phase::Time => "timing",
    };
    if bar.message() != name {
        bar.reset_eta();
        bar.set_message(name);
    }
    bar.set_length(at.total as u64);
    bar.set_position(at.done as u64);
}

pub(crate) fn failed(error: CalibrateError, source: &Source) -> CliError {
    match error {
        CalibrateError::Cancelled => CliError::Interrupted,
        CalibrateError::Load(error) => source.load_error(error),
        other => CliError::Calibrate(other),
    }
}

fn outcome(model: String, out: PathBuf, calibration: &CalibrationFile) -> Outcome {
    let target = calibration.default_recall();
    let place = calibration.recalls().iter().position(|&recall| recall == target).unwrap_or(0);
    let layers = calibration.layers().iter().enumerate().map(|(ix, layer)| {
        let LayerFigures { used, reason, exact_us, predictor_us, active, at } = layer.figures();
        LayerOutcome {
            layer: ix,
            active: *active,
            at: at[place],
            outlier_columns: layer.n_outliers(),
            used: *used,
            reason: *reason,
            exact_us: *exact_us,
            predictor_us: *predictor_us,
        }
    });
    Outcome {
        model,
        out,
        fingerprint: calibration.fingerprint().to_owned(),
        n_tokens: calibration.n_tokens(),
        target_recall: target,
        layers: layers.collect(),
    }
}

fn print_table(outcome: &Outcome) -> Result<(), CliError> {
    let head =
        ["layer", "active", "selected", "precision", "recall", "mass recall", "outliers", "used", "why"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let row = |name: String, active: f64, at: &RecallFigures, rest: [String; 3]| {
        let shares = [percent(active), percent(at.selected), percent(at.precision)];
        let recalls = [at.recall, at.mass_recall].map(|share| format!("{:.2} %", 100.0 * share));
        [vec![name], shares.to_vec(), recalls.to_vec(), rest.to_vec()].concat()
    };
    for layer in &outcome.layers {
        let why = match layer.reason {
            UseReason::AsAsked => "as asked".to_owned(),
            UseReason::Faster | UseReason::Slower => {
                format!("{:.0} us exact, {:.0} us with it", layer.exact_us, layer.predictor_us)
            }
        };
        let used = if layer.used { "yes" } else { "no" };
        let rest = [layer.outlier_columns.to_string(), used.to_owned(), why];
        rows.push(row(layer.layer.to_string(), layer.active, &layer.at, rest));
    }
    let mean = |of: &dyn Fn(&LayerOutcome) -> f64| {
        outcome.layers.iter().map(of).sum::<f64>() / outcome.layers.len() as f64
    };
    let at = RecallFigures {
        recall: mean(&|l| l.at.recall),
        precision: mean(&|l| l.at.precision),
        selected: mean(&|l| l.at.selected),
        mass_recall: mean(&|l| l.at.mass_recall),
    };
    let n_used = outcome.layers.iter().filter(|layer| layer.used).count();
    let rest = [String::new(), format!("{n_used} of {}", outcome.layers.len()), String::new()];
    rows.push(row("mean".to_owned(), mean(&|l| l.active), &at, rest));
    print(&table(&rows))
}
