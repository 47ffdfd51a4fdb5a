//! The `powerinfer` command-line program.
fn main() {}
