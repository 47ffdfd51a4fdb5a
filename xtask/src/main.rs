//! Chores of the workspace.
//!
//! ```text
//! cargo run -p xtask -- ptx [--check] [--nvrtc PATH]
//! ```
//! compiles `powerinfer-cuda/kernels` to PTX, or checks that the PTX at hand is what comes out. PATH is libnvrtc of
//! CUDA 12.0; without it the loader's places are searched.

mod nvrtc;
mod ptx;

use std::process::ExitCode;

#[expect(clippy::print_stderr, reason = "a program")]
fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut args: impl Iterator<Item = String>) -> Result<(), String> {
    const USAGE: &str = "usage: cargo run -p xtask -- ptx [--check] [--nvrtc PATH]";
    if args.next().as_deref() != Some("ptx") {
        return Err(USAGE.to_owned());
    }
    let (mut check, mut path) = (false, None);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--check" => check = true,
            "--nvrtc" => path = Some(args.next().ok_or(USAGE)?),
            _ => return Err(USAGE.to_owned()),
        }
    }
    ptx::run(check, path.as_deref()).map_err(|e| e.to_string())
}
