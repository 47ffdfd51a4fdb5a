//! Kernels in plain Rust: what every other folder is checked against, and what runs where there is none.

pub(super) mod attention;
pub(super) mod axpy;
pub(super) mod dot;
pub(super) mod gate_copy;
