//! The `powerinfer` command-line program: flags in `args`, their meaning in `options`, a file for each command.
#![forbid(unsafe_code)]

mod args;
mod bandwidth;
mod command;
mod convert;
mod error;
mod options;
mod output;
mod placement;

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use command::{bench, calibrate, evaluate, generate, inspect, logits, perplexity, quantize, tokenize};
use error::CliError;

fn main() -> ExitCode {
    if let Some(flag) = std::env::args().skip(1).find(|arg| is_layer_flag(arg)) {
        output::say(&format!(
            "error: {flag}: neurons are placed, not layers; say how much memory of the GPU may be used with --vram-budget SIZE"
        ));
        return ExitCode::from(2);
    }
    let result = match Cli::parse().command {
        Command::Generate(args) => generate::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Calibrate(args) => calibrate::run(&args),
        Command::Evaluate(args) => evaluate::run(&args),
        Command::Convert(args) => command::convert::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Profile(args) => command::profile::run(&args),
        Command::Plan(args) => command::plan::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_closed_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            // Whoever pressed Ctrl-C knows.
            if !matches!(error, CliError::Interrupted) {
                output::say(&format!("error: {}", chain(&error)));
            }
            ExitCode::from(error.exit_code())
        }
    }
}

/// Flags of other programs for the number of layers on a GPU.
fn is_layer_flag(arg: &str) -> bool {
    let name = arg.split('=').next().unwrap_or_default();
    matches!(name, "-ngl" | "--n-gpu-layers" | "--gpu-layers")
}

/// The error and its sources in one line, without repeating what a source only passes on.
fn chain(error: &CliError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    text
}
