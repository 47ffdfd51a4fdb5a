//! The tokens: their texts, kinds and roles, checked once.

use super::error::TokenizerError;
use super::{VocabSource, bytes, spm};
use std::collections::{BTreeSet, HashMap};

/// What a token is for, by `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Stands for text that no token covers.
    Unknown,
    /// Steers the model; not part of the text.
    Control,
    /// Text that is always one token.
    UserDefined,
    /// A place kept free.
    Unused,
    /// One byte, written `<0xNN>`.
    Byte,
}

impl TokenKind {
    fn from_file(code: i32) -> Self {
        match code {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

/// Ids of the tokens with a role; none where the file has no such token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Special {
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) unk: Option<u32>,
    pub(super) pad: Option<u32>,
    pub(super) sep: Option<u32>,
    pub(super) mask: Option<u32>,
}

/// Texts that end a generation in some published model, whatever the file says about ids.
const END_TEXTS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    // Padding, repository and file marks of code models: what follows is another document.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Texts that steer code models and are special even where the file calls them ordinary.
const CONTROL_TEXTS: &[&str] = &[
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
];

#[derive(Debug)]
struct Token {
    text: Box<[u8]>,
    /// What the token adds to decoded text.
    piece: Box<[u8]>,
    kind: TokenKind,
}

/// A checked vocabulary.
#[derive(Debug)]
pub(super) struct Vocab {
    tokens: Vec<Token>,
    by_text: HashMap<Box<[u8]>, u32>,
    max_text_len: usize,
    pub(super) special: Special,
    end: BTreeSet<u32>,
}

impl Vocab {
    /// Checks the source's tokens, types and ids. Whether scores and merges fit is checked where they are used.
    ///
    /// # Errors
    ///
    /// See [`TokenizerError`].
    pub(super) fn new(source: &VocabSource, is_spm: bool) -> Result<Self, TokenizerError> {
        let n_vocab = source.tokens.len();
        if n_vocab == 0 {
            return Err(TokenizerError::NoTokens);
        }
        // Ids stay below 2^31, so that every file format can hold them.
        if i32::try_from(n_vocab).is_err() {
            return Err(TokenizerError::TooManyTokens { got: n_vocab, limit: i32::MAX as usize });
        }
        check_len("token_type", source.token_types.as_ref().map(Vec::len), n_vocab)?;
        check_len("scores", source.scores.as_ref().map(Vec::len), n_vocab)?;
        let special = special_ids(source, is_spm)?;
        let mut by_text = HashMap::with_capacity(n_vocab);
        let mut tokens = Vec::with_capacity(n_vocab);
        for (id, text) in (0..).zip(&source.tokens) {
            let code = source.token_types.as_ref().map_or(1, |types| types[id as usize]);
            let mut kind = TokenKind::from_file(code);
            if contains(END_TEXTS, text) || contains(CONTROL_TEXTS, text) {
                kind = TokenKind::Control;
            }
            let piece = piece(id, text, kind, is_spm)?;
            // Of two tokens with one text only the first is ever produced.
            by_text.entry(Box::from(text.as_slice())).or_insert(id);
            tokens.push(Token { text: Box::from(text.as_slice()), piece, kind });
        }
        let max_text_len = source.tokens.iter().map(Vec::len).max().unwrap_or(0);
        let mut vocab = Self { tokens, by_text, max_text_len, special, end: BTreeSet::new() };
        vocab.end = vocab.end_ids(source)?;
        Ok(vocab)
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Length in bytes of the longest token text.
    pub(super) fn max_text_len(&self) -> usize {
        self.max_text_len
    }

    /// The token with this text.
    pub(super) fn id_of(&self, text: &[u8]) -> Option<u32> {
        // Longer texts need not be hashed: a merge of long neighbors is asked for again and again.
        if text.len() > self.max_text_len {
            return None;
        }
        self.by_text.get(text).copied()
    }

    pub(super) fn text(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(id as usize).map(|token| &*token.text)
    }

    pub(super) fn piece(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(id as usize).map(|token| &*token.piece)
    }

    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.tokens.get(id as usize).map(|token| token.kind)
    }

    pub(super) fn is_end(&self, id: u32) -> bool {
        self.end.contains(&id)
    }

    pub(super) fn end(&self) -> impl Iterator<Item = u32> {
        self.end.iter().copied()
    }

    /// Tokens that are looked for in text before anything else.
    pub(super) fn special_texts(&self) -> impl Iterator<Item = (u32, &[u8])> {
        (0..).zip(&self.tokens).filter_map(|(id, token)| {
            let special =
                matches!(token.kind, TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown);
            special.then_some((id, &*token.text))
        })
    }

    fn end_ids(&self, source: &VocabSource) -> Result<BTreeSet<u32>, TokenizerError> {
        let named = [("eos", self.special.eos), ("eot", source.eot), ("eom", source.eom)];
        let extra = source.extra_eog.iter().map(|&id| ("eog", Some(id)));
        let mut end = BTreeSet::new();
        for (key, id) in named.into_iter().chain(extra) {
            end.extend(in_range(key, id, self.len())?);
        }
        end.extend(END_TEXTS.iter().filter_map(|text| self.id_of(text.as_bytes())));
        let ends = |text: &str| self.id_of(text.as_bytes()).is_some();
        // Formats with channels end a message with `<|end|>` and go on; others use `</s>` for something else.
        let goes_on = (ends("<|return|>") && ends("<|call|>")) || (ends("<|flush|>") && ends("<|calls|>"));
        for (text, drop) in [("<|end|>", goes_on), ("</s>", ends("<|tool_response>"))] {
            if let Some(id) = self.id_of(text.as_bytes())
                && drop
                && self.special.eos != Some(id)
            {
                end.remove(&id);
            }
        }
        Ok(end)
    }
}

fn contains(texts: &[&str], text: &[u8]) -> bool {
    texts.iter().any(|known| known.as_bytes() == text)
}

fn check_len(array: &'static str, got: Option<usize>, expected: usize) -> Result<(), TokenizerError> {
    match got {
        Some(got) if got != expected => Err(TokenizerError::Length { array, expected, got }),
        _ => Ok(()),
    }
}

fn in_range(key: &'static str, id: Option<u32>, n_vocab: usize) -> Result<Option<u32>, TokenizerError> {
    match id {
        Some(id) if id as usize >= n_vocab => Err(TokenizerError::IdOutOfRange { key, id, n_vocab }),
        id => Ok(id),
    }
}

/// Ids named by the file; SentencePiece files without ids mean those that its trainer gives out.
fn special_ids(source: &VocabSource, is_spm: bool) -> Result<Special, TokenizerError> {
    let n_vocab = source.tokens.len();
    let default = |id: u32| (is_spm && (id as usize) < n_vocab).then_some(id);
    let strip = source.lstrip.iter().chain(&source.rstrip);
    for &id in strip {
        in_range("strip", Some(id), n_vocab)?;
    }
    Ok(Special {
        bos: in_range("bos", source.bos, n_vocab)?.or_else(|| default(1)),
        eos: in_range("eos", source.eos, n_vocab)?.or_else(|| default(2)),
        unk: in_range("unk", source.unk, n_vocab)?.or_else(|| default(0)),
        pad: in_range("pad", source.pad, n_vocab)?,
        sep: in_range("sep", source.sep, n_vocab)?,
        mask: in_range("mask", source.mask, n_vocab)?,
    })
}

/// What a token adds to decoded text.
fn piece(id: u32, text: &[u8], kind: TokenKind, is_spm: bool) -> Result<Box<[u8]>, TokenizerError> {
    Ok(match kind {
        TokenKind::Byte => {
            let byte = parse_byte(text).ok_or_else(|| TokenizerError::BadByteToken {
                id,
                text: String::from_utf8_lossy(text).into_owned(),
            })?;
            Box::new([byte])
        }
        TokenKind::Normal if is_spm => unescape_spaces(text).into_boxed_slice(),
        TokenKind::Normal => match bytes::decode(text) {
            Some(bytes) => bytes.into_boxed_slice(),
            None => Box::from(text),
        },
        TokenKind::Unused => Box::default(),
        TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown => Box::from(text),
    })
}

/// The byte that `<0xNN>` names.
fn parse_byte(text: &[u8]) -> Option<u8> {
    let [b'<', b'0', b'x', high, low, b'>'] = *text else {
        return None;
    };
    let digit = |c: u8| char::from(c).to_digit(16);
    u8::try_from(digit(high)? * 16 + digit(low)?).ok()
}

fn unescape_spaces(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        if let Some(after_space) = rest.strip_prefix(spm::SPACE.as_bytes()) {
            out.push(b' ');
            rest = after_space;
        } else {
            out.push(first);
            rest = after;
        }
    }
    out
}
