//! What can go wrong between logits and a token.

use powerinfer_sparse_ops::TokenId;

/// Why a sampler could not be made, or could not pick a token.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// The vocabulary is empty, or larger than token ids can name.
    #[error("vocabulary size is {n_vocab}, expected 1 to 4294967295 tokens")]
    VocabularySize {
        /// The size that was given.
        n_vocab: usize,
    },
    /// A numeric setting is not a number or lies outside its range.
    #[error("sampling setting `{name}` is {got}, expected {expected}")]
    SettingRange {
        /// Field of [`SamplingParams`](super::SamplingParams).
        name: &'static str,
        /// The legal range in words.
        expected: &'static str,
        /// The value that was given.
        got: f64,
    },
    /// The penalty window is longer than a sampler is willing to hold.
    #[error("sampling setting `repeat_last_n` is {got} tokens, expected at most {limit}")]
    WindowTooLong {
        /// The length that was given, in tokens.
        got: usize,
        /// The longest allowed, in tokens.
        limit: usize,
    },
    /// A logit bias names a token that the vocabulary lacks.
    #[error("logit bias for token {token}, expected an id below {n_vocab}")]
    BiasToken {
        /// The token that was named.
        token: TokenId,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A logit bias is not a number or is positive infinity.
    #[error("logit bias of token {token} is {got}, expected a finite number or negative infinity")]
    BiasValue {
        /// The token that was named.
        token: TokenId,
        /// The bias that was given.
        got: f32,
    },
    /// A token handed to the sampler is outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {n_vocab} tokens")]
    TokenOutOfRange {
        /// The token that was given.
        token: TokenId,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// The logits do not have one entry per token.
    #[error("got {got} logits, expected {expected}, one per token of the vocabulary")]
    LogitsLength {
        /// Size of the vocabulary.
        expected: usize,
        /// Length of the slice that was given.
        got: usize,
    },
    /// A logit is not a number or is positive infinity: the model's arithmetic broke.
    #[error("logit of token {token} is {got}, expected a finite number or negative infinity")]
    BadLogit {
        /// First token with such a logit; its id is the index into the logits.
        token: TokenId,
        /// The logit.
        got: f32,
    },
    /// Every token is at negative infinity, by the model or by bias.
    #[error("none of the {n_vocab} tokens is possible: every logit is negative infinity")]
    NoCandidate {
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// No seed was given and the operating system gave no random bytes for one.
    #[error("the operating system gave no random seed")]
    NoSeed {
        /// What the operating system answered.
        #[from]
        source: rand::rngs::SysError,
    },
}
