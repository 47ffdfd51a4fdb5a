//! Every kernel of `powerinfer-cuda`, run by the emulator in several orders and compared with the scalar code of
//! `powerinfer-sparse-ops` or with plain loops.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod device;
mod ffn;
mod matrices;
mod predictors;
mod rows;
mod shim;
