//! The tokenizer's part of the metadata.

use powerinfer_gguf::{GgufError, GgufModel};

use crate::load::LoadError;
use crate::tokenizer::{PreTokenizer, Tokenizer, TokenizerOptions, VocabSource};

/// Reads the tokenizer of a file, whatever its architecture and weights are.
///
/// `pre_tokenizer` overrides the rule that the file names for cutting text.
///
/// # Errors
/// [`LoadError::File`] for a key that is missing or of another type, [`LoadError::Tokenizer`] for a vocabulary
/// that does not fit together.
pub fn read_tokenizer(file: &GgufModel, pre_tokenizer: Option<PreTokenizer>) -> Result<Tokenizer, LoadError> {
    let options = TokenizerOptions { pre_override: pre_tokenizer, ..TokenizerOptions::default() };
    Ok(Tokenizer::new(&read(file)?, options)?)
}

/// Reads the keys `tokenizer.ggml.…`.
fn read(file: &GgufModel) -> Result<VocabSource, GgufError> {
    let meta = file.metadata();
    let id = |name: &str| meta.find::<u32>(&format!("tokenizer.ggml.{name}_token_id"));
    let flag = |name: &str| meta.find::<bool>(&format!("tokenizer.ggml.{name}"));
    let owned = |list: Vec<&[u8]>| list.into_iter().map(<[u8]>::to_vec).collect::<Vec<_>>();
    Ok(VocabSource {
        model: meta.require("tokenizer.ggml.model")?,
        pre: meta.find("tokenizer.ggml.pre")?,
        tokens: owned(meta.require("tokenizer.ggml.tokens")?),
        scores: meta.find("tokenizer.ggml.scores")?,
        token_types: meta.find("tokenizer.ggml.token_type")?,
        merges: meta.find("tokenizer.ggml.merges")?.map(owned),
        bos: id("bos")?,
        eos: id("eos")?,
        eot: id("eot")?,
        eom: id("eom")?,
        unk: id("unknown")?,
        // Converters and the original engine write this key misspelt.
        sep: id("seperator")?,
        pad: id("padding")?,
        mask: id("mask")?,
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
        add_space_prefix: flag("add_space_prefix")?,
        ..VocabSource::default()
    })
}

/// The text of the chat template, if the file has one.
pub(crate) fn chat_template(file: &GgufModel) -> Result<Option<&str>, GgufError> {
    file.metadata().find("tokenizer.chat_template")
}
