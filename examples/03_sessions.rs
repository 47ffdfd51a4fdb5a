//! Two texts over one set of weights, taking turns; then a fork and a rewind.
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use std::error::Error;

use powerinfer::sampling::{Sampler, SamplingParams};
use powerinfer::tokenizer::Encode;
use powerinfer::{GenerateOptions, LoadOptions, Model, Session, SessionOptions};

fn start(model: &Model, text: &str) -> Result<Session, Box<dyn Error>> {
    let mut session = model.session(&SessionOptions::default())?;
    let how = Encode { parse_special: true, ..Encode::default() };
    session.prefill(&model.tokenizer().encode(format!("<|endoftext|>{text}"), how)?)?;
    Ok(session)
}

fn text(session: &Session) -> Result<String, Box<dyn Error>> {
    let bytes = session.model().tokenizer().decode(session.tokens(), false)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())?;

    // Each session has its own tokens, cache and statistics.
    let mut sessions = [start(&model, "The dog ran to")?, start(&model, "The bird wanted to")?];
    let mut greedy = Sampler::new(SamplingParams::greedy(), model.spec().n_vocab)?;
    for _ in 0..16 {
        for session in &mut sessions {
            let next = greedy.sample(session.logits())?;
            session.decode(next)?;
        }
    }
    for session in &sessions {
        println!("{}\n", text(session)?);
    }

    // A fork starts with the same tokens, without computing them again, and goes its own way.
    let [mut dog, _] = sessions;
    let mut other = dog.fork()?;
    for seed in [1, 2] {
        let len = other.tokens().len();
        let last = other.tokens()[len - 1];
        // The last token once more, since a rewind forgets the logits after it.
        other.rewind(len - 1)?;
        let sampling = SamplingParams::default().seed(seed);
        let options = GenerateOptions { sampling, max_tokens: Some(24), ..GenerateOptions::default() };
        println!("… {}\n", other.generate(&[last], options)?.into_text()?);
        // Back to where the fork began: a rewind costs nothing.
        other.rewind(len)?;
    }

    // The first session noticed nothing of this.
    let next = greedy.sample(dog.logits())?;
    dog.decode(next)?;
    println!("{}", text(&dog)?);
    Ok(())
}
