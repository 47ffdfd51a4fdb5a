//! A small text generator with the flags of llama.cpp; without any it runs the embedded story model.
//!
//! `cargo run --release --example generate -- -m model.gguf -p "The sea" -n 64 --temp 0`
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example shows its results")]

use std::error::Error;
use std::io::Write as _;
use std::path::PathBuf;

use clap::Parser;
use powerinfer::sampling::SamplingParams;
use powerinfer::tokenizer::Encode;
use powerinfer::{ActiveMode, CpuOptions, Device, GenerateOptions, LoadOptions, Model, SessionOptions};

#[derive(Parser)]
struct Args {
    /// GGUF or PWRI file
    #[arg(short, long)]
    model: Option<PathBuf>,
    #[arg(short, long, default_value = "Once upon a time, there was a little")]
    prompt: String,
    /// Tokens to generate at most
    #[arg(short, long, default_value_t = 100)]
    n_predict: usize,
    /// One for each physical core unless given
    #[arg(short, long)]
    threads: Option<usize>,
    #[arg(long, default_value_t = 0.8)]
    temp: f32,
    #[arg(short, long)]
    seed: Option<u64>,
    /// dense, exact or predictor; the best the file allows unless given
    #[arg(long, value_parser = mode)]
    mode: Option<ActiveMode>,
}

fn mode(name: &str) -> Result<ActiveMode, String> {
    let modes = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];
    modes.into_iter().find(|mode| mode.name() == name).ok_or_else(|| "dense, exact or predictor".to_owned())
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let mut load = LoadOptions { mode: args.mode, ..LoadOptions::default() };
    if let Some(threads) = args.threads {
        load.device = Device::Cpu(CpuOptions { threads, ..CpuOptions::default() });
    }
    let model = match &args.model {
        Some(path) => Model::open(path, &load)?,
        None => Model::from_bytes(powerinfer_demo_model::MODEL, &load)?,
    };
    for (_, line) in model.notes().iter() {
        eprintln!("{line}");
    }
    let tokenizer = model.tokenizer();
    let mut prompt = tokenizer.encode(&args.prompt, Encode { add_special: true, parse_special: true })?;
    if args.model.is_none() {
        // The story model wants this in front, though its file does not say so.
        prompt.splice(..0, tokenizer.bos());
    }
    let mut session = model.session(&SessionOptions::default())?;
    let sampling = SamplingParams { temperature: args.temp, seed: args.seed, ..SamplingParams::default() };
    let options =
        GenerateOptions { sampling, max_tokens: Some(args.n_predict), ..GenerateOptions::default() };
    print!("{}", args.prompt);
    for piece in session.generate(&prompt, options)? {
        print!("{}", piece?.text);
        std::io::stdout().flush()?;
    }
    let decode = session.stats().decode;
    println!();
    eprintln!("{:.1} tok/s, {:.0} bytes per token", decode.tok_s(), decode.bytes_per_token());
    Ok(())
}
