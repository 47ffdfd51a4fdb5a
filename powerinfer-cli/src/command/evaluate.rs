//! `powerinfer evaluate`: how well the predictors of a model name the neurons that fire.

use powerinfer_core::calibration::{LayerEvaluation, evaluate};
use powerinfer_predictor::Quality;
use serde::Serialize;

use crate::args::EvaluateArgs;
use crate::command::calibrate::{failed, phase_bar, read_texts, record_options, show};
use crate::command::generate::cancel_on_ctrl_c;
use crate::error::CliError;
use crate::options::Loaded;
use crate::output::{percent, print, print_json, table};

#[derive(Debug, Serialize)]
struct Outcome {
    model: String,
    layers: Vec<Line>,
    /// Means over the layers.
    mean: Line,
}

#[derive(Clone, Debug, Serialize)]
struct Line {
    layer: Option<u32>,
    /// `None` in the line of means.
    predicted: Option<bool>,
    recall: f64,
    precision: f64,
    active: f64,
    selected: f64,
    mass_recall: f64,
    /// What sign bits would have to select for the same recall.
    sign_bits: f64,
}

pub(crate) fn run(args: &EvaluateArgs) -> Result<(), CliError> {
    let loaded = Loaded::new(&args.model, None, None)?;
    let file = loaded.source.open()?;
    let tokenizer = loaded.model.tokenizer();
    let texts = read_texts(&args.text, tokenizer)?;
    let options = record_options(args.tokens, &args.model.device, tokenizer, loaded.source.is_demo());
    let cancel = cancel_on_ctrl_c()?;
    let bar = phase_bar();
    let layers = evaluate(&file, &loaded.model, &texts, &options, &cancel, &mut |at| show(&bar, at));
    bar.finish_and_clear();
    let layers = layers.map_err(|error| failed(error, &loaded.source))?;
    let lines: Vec<Line> = layers.iter().map(line).collect();
    let outcome = Outcome { model: loaded.source.name(), mean: mean(&lines), layers: lines };
    if args.json { print_json(&outcome) } else { print_table(&outcome) }
}

fn line(layer: &LayerEvaluation) -> Line {
    let Quality { recall, precision, active_share, predicted_share } = layer.quality;
    Line {
        layer: Some(layer.layer.0),
        predicted: Some(layer.predicted),
        recall,
        precision,
        active: active_share,
        selected: predicted_share,
        mass_recall: layer.mass_recall,
        sign_bits: layer.sign_bits_share,
    }
}

fn mean(lines: &[Line]) -> Line {
    let mean = |of: fn(&Line) -> f64| lines.iter().map(of).sum::<f64>() / lines.len() as f64;
    Line {
        layer: None,
        predicted: None,
        recall: mean(|l| l.recall),
        precision: mean(|l| l.precision),
        active: mean(|l| l.active),
        selected: mean(|l| l.selected),
        mass_recall: mean(|l| l.mass_recall),
        sign_bits: mean(|l| l.sign_bits),
    }
}

fn print_table(outcome: &Outcome) -> Result<(), CliError> {
    let head = ["layer", "active", "selected", "precision", "recall", "mass recall", "by signs", "computed"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for line in outcome.layers.iter().chain([&outcome.mean]) {
        rows.push(vec![
            line.layer.map_or_else(|| "mean".to_owned(), |layer| layer.to_string()),
            percent(line.active),
            percent(line.selected),
            percent(line.precision),
            format!("{:.2} %", 100.0 * line.recall),
            format!("{:.2} %", 100.0 * line.mass_recall),
            percent(line.sign_bits),
            line.predicted
                .map_or("", |predicted| if predicted { "as predicted" } else { "exactly" })
                .to_owned(),
        ]);
    }
    print(&table(&rows))
}
