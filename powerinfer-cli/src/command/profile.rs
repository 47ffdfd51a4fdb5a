//! `powerinfer profile`: how often each neuron fires, into a file beside the model.

use powerinfer_core::profile::{ProfileError, ProfileOptions, profile};
use powerinfer_core::{SessionError, calibration};
use powerinfer_predictor::ActivationCounts;

use crate::args::ProfileArgs;
use crate::command::calibrate::read_texts;
use crate::command::generate::cancel_on_ctrl_c;
use crate::error::CliError;
use crate::options::{self, Loaded, Source};
use crate::output::{percent, print, progress_bar, say};
use crate::placement::statistics_path;

/// The beginning of the generated text that the project calibrates its own models on.
const TEXT: &str = include_str!("../../data/generated-text.txt");

pub(crate) fn run(args: &ProfileArgs) -> Result<(), CliError> {
    let source = Source::of(args.model.model.as_ref());
    let out = match (&args.out, &source) {
        (Some(out), _) => out.clone(),
        (None, Source::File(path)) => statistics_path(path),
        (None, Source::Demo) => return Err(CliError::NoOutput),
    };
    let earlier = args.merge.iter().map(ActivationCounts::open).collect::<Result<Vec<_>, _>>();
    let earlier = earlier.map_err(CliError::Statistics)?;
    let fingerprint = calibration::fingerprint(&source.open()?);
    let model = Loaded::new(&args.model, None)?.model;
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
    for earlier in &earlier {
        counts.merge(earlier).map_err(CliError::Statistics)?;
    }
    counts.write(&out).map_err(CliError::Statistics)?;
    print(&table(&counts))?;
    say(&format!("written: {}", out.display()));
    Ok(())
}

fn table(counts: &ActivationCounts) -> String {
    let mut text = format!("{} tokens\nlayer   active   80 % of it is of   never fired\n", counts.n_tokens());
    for layer in (0..counts.n_layer() as u32).map(powerinfer_core::LayerId) {
        let share = counts.active_share(layer).unwrap_or(0.0);
        let hot = counts.share_making(layer, 0.8).unwrap_or(0.0);
        let never = counts.layer(layer).map_or(0, |c| c.iter().filter(|&&n| n == 0).count());
        text += &format!("{:>5}  {:>7}   {:>15}   {never:>11}\n", layer.0, percent(share), percent(hot));
    }
    text
}
