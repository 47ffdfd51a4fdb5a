//! Load a model, stream text: `cargo run --release --example 01_ten_lines`.
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use powerinfer::{GenerateOptions, LoadOptions, Model, SessionOptions, tokenizer::Encode};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())?;
    let prompt = model
        .tokenizer()
        .encode("<|endoftext|>Once upon a time", Encode { parse_special: true, ..Encode::default() })?;
    let mut session = model.session(&SessionOptions::default())?;
    let options = GenerateOptions { max_tokens: Some(60), ..GenerateOptions::default() };
    for piece in session.generate(&prompt, options)? {
        print!("{}", piece?.text);
    }
    println!();
    Ok(())
}
