//! The ways a generation ends: a stop text, a number of tokens, a cancel from another thread.
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use std::error::Error;
use std::sync::mpsc;
use std::thread;

use powerinfer::sampling::SamplingParams;
use powerinfer::tokenizer::Encode;
use powerinfer::{CancelToken, FinishReason, GenerateOptions, LoadOptions, Model, SessionOptions};

fn run(
    model: &Model,
    options: GenerateOptions,
    mut on_piece: impl FnMut(),
) -> Result<FinishReason, Box<dyn Error>> {
    let how = Encode { parse_special: true, ..Encode::default() };
    let prompt = model.tokenizer().encode("<|endoftext|>Tom and Sue went to the", how)?;
    let mut session = model.session(&SessionOptions { n_ctx: Some(4096), ..SessionOptions::default() })?;
    let mut generation = session.generate(&prompt, options)?;
    let mut text = String::new();
    for piece in &mut generation {
        text += &piece?.text;
        on_piece();
    }
    let reason = generation.finish_reason().cloned().ok_or("the generation is over")?;
    let shown: String = text.chars().take(60).collect();
    println!("{reason:?} after {} tokens: {shown}…", generation.n_generated());
    Ok(reason)
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())?;
    let greedy = GenerateOptions { sampling: SamplingParams::greedy(), ..GenerateOptions::default() };

    let stop = GenerateOptions { stop: vec![".".to_owned()], ..greedy.clone() };
    assert_eq!(run(&model, stop, || ())?, FinishReason::Stop(".".to_owned()));

    let short = GenerateOptions { max_tokens: Some(5), ..greedy.clone() };
    assert_eq!(run(&model, short, || ())?, FinishReason::Length);

    // Any clone of the token stops the work, at the latest before the next token. This thread waits for the first piece;
    // a token that is cancelled before there is any would end `generate` with an error.
    let cancel = CancelToken::new();
    let endless = GenerateOptions { ignore_end: true, cancel: cancel.clone(), ..greedy };
    let (began, has_begun) = mpsc::channel();
    let reason = thread::scope(|scope| {
        scope.spawn(move || {
            if has_begun.recv().is_ok() {
                cancel.cancel();
            }
        });
        run(&model, endless, move || {
            // Nobody listens after the first piece.
            let _ = began.send(());
        })
    })?;
    assert!(matches!(reason, FinishReason::Cancelled | FinishReason::Length), "{reason:?}");
    Ok(())
}
