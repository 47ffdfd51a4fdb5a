//! `powerinfer profile`: how often each neuron fires, into a file beside the model.

use std::path::{Path, PathBuf};

use powerinfer_core::profile::{ProfileError, ProfileOptions, profile};
use powerinfer_core::{LayerId, SessionError, calibration};
use powerinfer_predictor::ActivationCounts;

use crate::args::{ProfileArgs, StatisticsFormat};
use crate::command::calibrate::read_texts;
use crate::command::generate::cancel_on_ctrl_c;
use crate::error::CliError;
use crate::options::{self, Loaded, Source};
use crate::output::{percent, print, progress_bar, say, table};
use crate::placement::statistics_path;

/// The beginning of the generated text that the project calibrates its own models on.
const TEXT: &str = include_str!("../../data/generated-text.txt");

pub(crate) fn run(args: &ProfileArgs) -> Result<(), CliError> {
    let source = Source::of(args.model.model.as_ref());
    let (format, out) = format_and_place(args, &source)?;
    let earlier = args.merge.iter().map(ActivationCounts::open).collect::<Result<Vec<_>, _>>();
    let earlier = earlier.map_err(CliError::Statistics)?;
    let fingerprint = calibration::fingerprint(&source.open()?);
    let model = Loaded::new(&args.model, None, None)?.model;
    let texts = if args.text.is_empty() {
        vec![model.tokenizer().encode(TEXT, Default::default())?]
    } else {
        read_texts(&args.text, model.tokenizer())?
    };
    let options = ProfileOptions {
        n_tokens: args.tokens as usize,
        bos: options::bos(model.tokenizer(), source.is_demo()),
        ..ProfileOptions::default()
    };
    let cancel = cancel_on_ctrl_c()?;
    let bar = progress_bar(u64::from(args.tokens), "tokens {bar:40} {pos}/{len}, {eta} left");
    let counts = profile(&model, &texts, &options, &cancel, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let mut counts = match counts {
        Err(ProfileError::Session(SessionError::Cancelled { .. })) => return Err(CliError::Interrupted),
        other => other.map_err(CliError::Profile)?.of_model(fingerprint),
    };
    let has_histograms = |counts: &ActivationCounts| counts.histogram(LayerId(0)).is_some();
    if has_histograms(&counts) && !earlier.iter().all(has_histograms) {
        say("info: the sum says nothing of single tokens, since not all that is added does");
    }
    for earlier in &earlier {
        counts.merge(earlier).map_err(CliError::Statistics)?;
    }
    let written = match format {
        StatisticsFormat::Safetensors => counts.write(&out),
        StatisticsFormat::Pt => counts.write_pt(&out),
    };
    written.map_err(CliError::Statistics)?;
    print(&format!("{} tokens\n{}", counts.n_tokens(), table(&rows(&counts))))?;
    say(&match format {
        StatisticsFormat::Safetensors => format!("written: {}", out.display()),
        StatisticsFormat::Pt => {
            let last = counts.n_layer() - 1;
            format!("written: activation_0.pt to activation_{last}.pt, counts alone, in {}", out.display())
        }
    });
    Ok(())
}

/// What is written, and where to.
fn format_and_place(args: &ProfileArgs, source: &Source) -> Result<(StatisticsFormat, PathBuf), CliError> {
    // `activation/` is to be a folder before it is there.
    let is_folder =
        |out: &Path| out.is_dir() || out.as_os_str().to_string_lossy().ends_with(std::path::is_separator);
    let format = args.format.unwrap_or_else(|| match &args.out {
        Some(out) if is_folder(out) => StatisticsFormat::Pt,
        _ => StatisticsFormat::Safetensors,
    });
    let out = match (&args.out, source) {
        (Some(out), _) if out.extension().is_some_and(|e| e == "pt") && !is_folder(out) => {
            return Err(CliError::OnePtFile { path: out.clone() });
        }
        (Some(out), _) => out.clone(),
        (None, Source::Demo) => return Err(CliError::NoOutput),
        (None, Source::File(path)) => match format {
            StatisticsFormat::Safetensors => statistics_path(path),
            // Where PowerInfer looks for it.
            StatisticsFormat::Pt => path.with_file_name("activation"),
        },
    };
    Ok((format, out))
}

/// For each layer, what of it fires.
fn rows(counts: &ActivationCounts) -> Vec<Vec<String>> {
    let head = ["layer", "active", "9 of 10 tokens up to", "80 % of it is of", "never fired"];
    let layers = (0..counts.n_layer() as u32).map(LayerId).map(|layer| {
        let share = counts.active_share(layer).unwrap_or(0.0);
        let most = counts.histogram(layer).map(|histogram| histogram.share_within(0.9));
        let hot = counts.share_making(layer, 0.8).unwrap_or(0.0);
        let never = counts.layer(layer).map_or(0, |c| c.iter().filter(|&&n| n == 0).count());
        let most = most.map_or("-".to_owned(), percent);
        vec![layer.to_string(), percent(share), most, percent(hot), never.to_string()]
    });
    std::iter::once(head.map(str::to_owned).to_vec()).chain(layers).collect()
}
