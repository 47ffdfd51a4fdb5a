//! Tests over whole vocabularies.

mod golden;
pub(crate) mod vocab_file;
