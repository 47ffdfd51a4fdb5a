//! LLM inference with hot and cold neurons.
#![forbid(unsafe_code)]

pub mod chat;
pub mod sampling;
pub mod text;
pub mod tokenizer;
