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
    /// Bytes of the first GPU that may be used; needs the feature `cuda`
    #[arg(long)]
    vram_budget: Option<u64>,
    /// dense, exact or predictor; the best the file allows unless given
    #[arg(long, value_parser = mode)]
    mode: Option<ActiveMode>,
}

fn mode(name: &str) -> Result<ActiveMode, String> {
    let modes = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];
    modes.into_iter().find(|mode| mode.name() == name).ok_or_else(|| "dense, exact or predictor".to_owned())
}

/// Plans for the first GPU.
#[cfg(feature = "cuda")]
fn use_gpu(load: &mut LoadOptions, bytes: u64) -> Result<(), String> {
    use powerinfer::placement::{Accelerator, Bandwidth, Budget, Host, PlanOptions, Statistics};
    let gpus = powerinfer::cuda_devices().map_err(|error| error.to_string())?;
    let gpu = gpus.first().ok_or("there is none")?;
    // Figures to begin with; both are measured.
    let host = Host { name: "host".to_owned(), bandwidth: Bandwidth { dense: 50e9, gather: 35e9 } };
    let device = Accelerator {
        name: gpu.name.clone(),
        free_bytes: gpu.free_bytes,
        budget: Budget::Bytes(bytes),
        bandwidth: Bandwidth { dense: 400e9, gather: 300e9 },
        link: 20e9,
        latency: 15e-6,
        granule: Accelerator::CUDA_GRANULE,
        kv_value_bytes: 2,
    };
    let options = powerinfer::CudaOptions {
        device: gpu.device,
        memory_limit: Some(device.usable_bytes()),
        ..powerinfer::CudaOptions::default()
    };
    load.accelerators = vec![Device::Cuda(options)];
    let statistics = Statistics::Unknown { rate: 0.2 };
    load.plan = Some(PlanOptions { measure: true, ..PlanOptions::new(host, vec![device], statistics) });
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn use_gpu(_: &mut LoadOptions, _: u64) -> Result<(), String> {
    Err("the example was built without the feature `cuda`".to_owned())
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let mut load = LoadOptions { mode: args.mode, ..LoadOptions::default() };
    if let Some(threads) = args.threads {
        load.device = Device::Cpu(CpuOptions { threads, ..CpuOptions::default() });
    }
    if let Some(bytes) = args.vram_budget.filter(|&bytes| bytes > 0)
        && let Err(reason) = use_gpu(&mut load, bytes)
    {
        eprintln!("no part of the model is on a GPU, because {reason}");
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
