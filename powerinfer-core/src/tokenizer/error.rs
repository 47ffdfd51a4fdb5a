//! What can be wrong with a vocabulary, or with a text to encode.

use super::split::PreTokenizer;

/// Why a tokenizer could not be built, or a text not be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// `tokenizer.ggml.model` names a kind that is not implemented.
    #[error("tokenizer model `{model}` is not supported (known: `llama`, `gpt2`)")]
    UnsupportedModel {
        /// The name found.
        model: String,
    },
    /// `tokenizer.ggml.pre` names a splitter that is not implemented.
    #[error(
        "pre-tokenizer `{pre}` is not known; choose one explicitly to override it (known: {})",
        PreTokenizer::known_names()
    )]
    UnknownPreTokenizer {
        /// The name found.
        pre: String,
    },
    /// The vocabulary holds no token.
    #[error("the vocabulary has no tokens")]
    NoTokens,
    /// The vocabulary has more tokens than ids.
    #[error("the vocabulary has {got} tokens, at most {limit} are accepted")]
    TooManyTokens {
        /// Number of tokens.
        got: usize,
        /// The most that is accepted.
        limit: usize,
    },
    /// An array that goes with the tokens has another length.
    #[error("`{array}` has {got} entries for {expected} tokens")]
    Length {
        /// The array's name.
        array: &'static str,
        /// Number of tokens.
        expected: usize,
        /// Number of entries found.
        got: usize,
    },
    /// A score is not a number.
    #[error("the score of token {id} is not a number")]
    BadScore {
        /// The token.
        id: u32,
    },
    /// A special token's id is not in the vocabulary.
    #[error("`{key}` is {id}, but the vocabulary has {n_vocab} tokens")]
    IdOutOfRange {
        /// The key, for example `bos`.
        key: &'static str,
        /// The id found.
        id: u32,
        /// Number of tokens.
        n_vocab: usize,
    },
    /// A token is to be added to every text, but the vocabulary does not name it.
    #[error("`add_{which}` is set, but the vocabulary has no {which} token")]
    MissingSpecial {
        /// `bos` or `eos`.
        which: &'static str,
    },
    /// A token of the type "byte" is not of the form `<0xNN>`.
    #[error("token {id} has the type byte, but its text `{text}` is not of the form `<0xNN>`")]
    BadByteToken {
        /// The token.
        id: u32,
        /// Its text.
        text: String,
    },
    /// A special token's text is so long that looking for it could take quadratic time.
    #[error("special token {id} is {len_bytes} bytes long, at most {limit_bytes} are accepted")]
    SpecialTokenTooLong {
        /// The token.
        id: u32,
        /// Length of its text.
        len_bytes: usize,
        /// The most that is accepted.
        limit_bytes: usize,
    },
    /// A byte-level BPE vocabulary without merges.
    #[error("a `gpt2` vocabulary needs merges, the file has none")]
    MissingMerges,
    /// A merge line is not two pieces with a space between.
    #[error("merge {index} `{line}` is not two pieces with a space between")]
    MergeWithoutSpace {
        /// Position in the list of merges.
        index: usize,
        /// The line.
        line: String,
    },
    /// A merge line names a piece that is not a token.
    #[error("merge {index} `{line}` names `{piece}`, which is not in the vocabulary")]
    MergeOfUnknownPiece {
        /// Position in the list of merges.
        index: usize,
        /// The line.
        line: String,
        /// The piece that is not a token.
        piece: String,
    },
    /// A text is longer than the tokenizer was told to accept.
    #[error("the text has {len_bytes} bytes, at most {limit_bytes} are accepted")]
    TextTooLong {
        /// Length of the text.
        len_bytes: usize,
        /// The limit in force.
        limit_bytes: usize,
    },
    /// An id given by the caller is not in the vocabulary.
    #[error("token id {id} at position {position} is not in the vocabulary of {n_vocab} tokens")]
    UnknownId {
        /// The id.
        id: u32,
        /// Its position in the list given.
        position: usize,
        /// Number of tokens.
        n_vocab: usize,
    },
}
