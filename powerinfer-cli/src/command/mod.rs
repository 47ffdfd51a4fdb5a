//! A file for each command: `run` takes its flags and does it.

pub(crate) mod bench;
pub(crate) mod calibrate;
pub(crate) mod convert;
pub(crate) mod evaluate;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod logits;
pub(crate) mod perplexity;
pub(crate) mod plan;
pub(crate) mod profile;
pub(crate) mod quantize;
pub(crate) mod tokenize;
