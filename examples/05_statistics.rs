//! What a token costs in each mode: bytes read, rows computed, neurons that were looked at and that fired.
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use powerinfer::sampling::SamplingParams;
use powerinfer::tokenizer::Encode;
use powerinfer::{ActiveMode, GenerateOptions, LoadOptions, Model, SessionOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())?;
    let how = Encode { parse_special: true, ..Encode::default() };
    let prompt = model.tokenizer().encode("<|endoftext|>One day, a girl", how)?;
    let mut modes = vec![ActiveMode::Dense];
    if model.spec().activation.has_exact_zeros() {
        modes.push(ActiveMode::Exact);
    }
    if model.has_predictors() {
        modes.push(ActiveMode::Predictor);
    }
    let mut texts = Vec::new();
    for mode in modes {
        let mut session = model.session(&SessionOptions { mode: Some(mode), ..SessionOptions::default() })?;
        let sampling = SamplingParams::greedy();
        let options = GenerateOptions { sampling, max_tokens: Some(64), ..GenerateOptions::default() };
        let text = session.generate(&prompt, options)?.into_text()?;
        let decode = session.stats().decode;
        let per_token = |n: u64| n as f64 / decode.tokens as f64;
        println!(
            "{:9}  {:7.0} bytes/token  {:6.1} up rows  {:6.1} down rows  active {:5.1} %  fired {:4.1} %",
            mode.name(),
            decode.bytes_per_token(),
            per_token(decode.cost.up_rows),
            per_token(decode.cost.down_rows),
            100.0 * decode.active_share(),
            100.0 * decode.fired_share()
        );
        texts.push((mode, text));
    }
    // Leaving out what is exactly zero changes nothing; a predictor may miss a neuron, and so change the text.
    let exact = texts.iter().find(|(mode, _)| *mode == ActiveMode::Exact);
    assert!(exact.is_none_or(|(_, text)| *text == texts[0].1));
    println!("\nOne day, a girl{}", texts[0].1);
    Ok(())
}
