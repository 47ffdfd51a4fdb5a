//! The `powerinfer` command-line program.

#[allow(dead_code, reason = "called by the subcommand `convert`")]
mod convert;

fn main() {}
