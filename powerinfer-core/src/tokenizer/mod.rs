//! stub
use powerinfer_sparse_ops::TokenId;
#[derive(Debug, Default)]
pub struct VocabSource {
    pub model: String,
    pub pre: Option<String>,
    pub tokens: Vec<Vec<u8>>,
    pub scores: Option<Vec<f32>>,
    pub token_types: Option<Vec<i32>>,
    pub merges: Vec<Vec<u8>>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub unk: Option<u32>,
    pub sep: Option<u32>,
    pub pad: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
}
#[derive(Debug, Default)]
pub struct TokenizerOptions {
    pub pre_override: Option<String>,
}
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {}
pub struct Tokenizer(usize);
impl Tokenizer {
    pub fn new(v: VocabSource, _: TokenizerOptions) -> Result<Self, TokenizerError> {
        Ok(Self(v.tokens.len()))
    }
    pub fn warning(&self) -> Option<&str> {
        None
    }
    pub fn n_vocab(&self) -> usize {
        self.0
    }
    pub fn is_end_of_generation(&self, _: TokenId) -> bool {
        false
    }
    pub fn token_bytes(&self, _: TokenId, _: bool) -> Vec<u8> {
        vec![]
    }
}
