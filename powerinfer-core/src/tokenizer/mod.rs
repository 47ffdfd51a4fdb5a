//! From text to tokens and back.
//!
//! A [`Tokenizer`] is built from a [`VocabSource`]: plain data, as it stands in the `tokenizer.ggml.*` keys of a
//! model file. Two kinds exist: SentencePiece (`llama`) and byte-level BPE (`gpt2`). Ids follow llama.cpp.
//!
//! Text is first searched for special tokens, the rest is cut and merged. What a *user* wrote should be encoded
//! without [`Encode::parse_special`], or as [`Part::Content`], so that it cannot forge the model's control tokens.
//!
//! ```
//! use powerinfer_core::tokenizer::{Encode, Tokenizer, TokenizerOptions, VocabSource};
//!
//! let pieces = ["<unk>", "<s>", "</s>", "\u{2581}", "h", "i", "hi", "\u{2581}hi"];
//! let source = VocabSource {
//!     model: "llama".into(),
//!     tokens: pieces.iter().map(|piece| piece.as_bytes().to_vec()).collect(),
//!     scores: Some(vec![0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0]),
//!     token_types: Some(vec![2, 3, 3, 1, 1, 1, 1, 1]),
//!     ..VocabSource::default()
//! };
//! let tokenizer = Tokenizer::new(&source, TokenizerOptions::default())?;
//! let ids = tokenizer.encode("hi", Encode { add_special: true, parse_special: false })?;
//! assert_eq!(ids.iter().map(|id| id.0).collect::<Vec<_>>(), [1, 7]);
//! assert_eq!(tokenizer.decode(&ids, false)?, b"hi");
//! # Ok::<(), powerinfer_core::tokenizer::TokenizerError>(())
//! ```

mod bpe;
mod bytes;
mod error;
mod merge;
mod special;
mod split;
mod spm;
#[cfg(test)]
pub(crate) mod tests;
mod vocab;

pub use error::TokenizerError;
pub use split::PreTokenizer;
pub use vocab::TokenKind;

use merge::Merger;
use powerinfer_sparse_ops::TokenId;
use special::{Found, MAX_SPECIAL_BYTES, SpecialTokens};
use std::ops::Range;
use vocab::Vocab;

/// A vocabulary as a model file holds it.
///
/// Each field is named after its key in `tokenizer.ggml.*`; `None` where the file has no such key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VocabSource {
    /// `model`: `llama` for SentencePiece, `gpt2` for byte-level BPE.
    pub model: String,
    /// `pre`: how byte-level BPE cuts text before merging.
    pub pre: Option<String>,
    /// `tokens`, as bytes: not every file keeps to UTF-8.
    pub tokens: Vec<Vec<u8>>,
    /// `scores`, one for each token; SentencePiece merges the best first.
    pub scores: Option<Vec<f32>>,
    /// `token_type`, one for each token; see [`TokenKind`].
    pub token_types: Option<Vec<i32>>,
    /// `merges`: two pieces with a space between, in the order of training.
    pub merges: Option<Vec<Vec<u8>>>,
    /// `bos_token_id`
    pub bos: Option<u32>,
    /// `eos_token_id`
    pub eos: Option<u32>,
    /// `eot_token_id`
    pub eot: Option<u32>,
    /// `eom_token_id`
    pub eom: Option<u32>,
    /// `unknown_token_id`
    pub unk: Option<u32>,
    /// `padding_token_id`
    pub pad: Option<u32>,
    /// `seperator_token_id`, spelled so in files
    pub sep: Option<u32>,
    /// `mask_token_id`
    pub mask: Option<u32>,
    /// More tokens that end a generation.
    pub extra_eog: Vec<u32>,
    /// `add_bos_token`
    pub add_bos: Option<bool>,
    /// `add_eos_token`
    pub add_eos: Option<bool>,
    /// `add_space_prefix`
    pub add_space_prefix: Option<bool>,
    /// Special tokens that swallow white space to their left; no key of the file says so.
    pub lstrip: Vec<u32>,
    /// Special tokens that swallow white space to their right.
    pub rstrip: Vec<u32>,
}

/// What the caller may decide about a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenizerOptions {
    /// Cut text by this rule, whatever the file says.
    pub pre_override: Option<PreTokenizer>,
    /// Longest text accepted, in bytes; never more than [`MAX_TEXT_BYTES`].
    pub max_text_bytes: usize,
}

impl Default for TokenizerOptions {
    fn default() -> Self {
        Self { pre_override: None, max_text_bytes: 64 << 20 }
    }
}

/// No text longer than this is encoded, whatever the options say: positions in it must fit 32 bits after escaping.
pub const MAX_TEXT_BYTES: usize = 1 << 30;

/// Something about the vocabulary that the user should hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenizerWarning {
    /// A BPE file does not say how text is cut.
    MissingPreTokenizer,
    /// A SentencePiece file has no scores, so that merges have no order.
    MissingScores,
}

impl std::fmt::Display for TokenizerWarning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::MissingPreTokenizer => {
                "the file has no `tokenizer.ggml.pre`; text is cut by the rule `default`, which is not the one \
                 that most models were trained with"
            }
            Self::MissingScores => "the file has no `tokenizer.ggml.scores`; pieces are merged from left to right",
        })
    }
}

/// How to encode a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Encode {
    /// Put BOS in front and EOS behind, if the vocabulary asks for them.
    pub add_special: bool,
    /// Recognize control tokens written out in the text. User-defined tokens are always recognized.
    pub parse_special: bool,
}

/// A stretch of a prompt, by who wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Written by the model's template: control tokens are recognized.
    Template(String),
    /// Written by a user or tool: control tokens are plain text.
    Content(String),
}

impl Part {
    /// The text, whoever wrote it.
    pub fn text(&self) -> &str {
        match self {
            Self::Template(text) | Self::Content(text) => text,
        }
    }
}

#[derive(Debug)]
enum Kind {
    Spm(spm::Spm),
    Bpe(bpe::Bpe),
}

/// Encodes text as token ids and decodes ids to bytes.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    kind: Kind,
    special: SpecialTokens,
    lstrip: Vec<u32>,
    rstrip: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
    add_space_prefix: bool,
    max_text_bytes: usize,
    warnings: Vec<TokenizerWarning>,
}

/// A stretch of text, or a token found in it.
enum Fragment {
    Text(Range<usize>),
    Token(u32),
}

impl Tokenizer {
    /// Checks a vocabulary and builds its indexes.
    ///
    /// Where the file does not say: SentencePiece adds BOS and a leading space, takes 0, 1 and 2 for unknown, BOS and
    /// EOS; BPE adds BOS only with the splitters of Llama 3 and Tekken; nothing adds EOS.
    ///
    /// # Errors
    ///
    /// A [`TokenizerError`] that names what does not fit.
    pub fn new(source: &VocabSource, options: TokenizerOptions) -> Result<Self, TokenizerError> {
        let is_spm = match source.model.as_str() {
            "llama" => true,
            "gpt2" => false,
            model => return Err(TokenizerError::UnsupportedModel { model: model.to_owned() }),
        };
        let vocab = Vocab::new(source, is_spm)?;
        if let Some((id, text)) = vocab.special_texts().find(|(_, text)| text.len() > MAX_SPECIAL_BYTES) {
            let (len_bytes, limit_bytes) = (text.len(), MAX_SPECIAL_BYTES);
            return Err(TokenizerError::SpecialTokenTooLong { id, len_bytes, limit_bytes });
        }
        let mut warnings = Vec::new();
        let kind = if is_spm {
            Kind::Spm(spm::Spm::new(&vocab, &checked_scores(source, &mut warnings)?))
        } else {
            let pre = pre_tokenizer(source, options, &mut warnings)?;
            let merges = source.merges.as_deref().ok_or(TokenizerError::MissingMerges)?;
            Kind::Bpe(bpe::Bpe::new(&vocab, merges, pre)?)
        };
        let adds_bos = match &kind {
            Kind::Spm(_) => true,
            Kind::Bpe(bpe) => bpe.pre.adds_bos(),
        };
        for (which, asked, id) in
            [("bos", source.add_bos, vocab.special.bos), ("eos", source.add_eos, vocab.special.eos)]
        {
            if asked == Some(true) && id.is_none() {
                return Err(TokenizerError::MissingSpecial { which });
            }
        }
        Ok(Self {
            special: SpecialTokens::new(vocab.special_texts()),
            add_bos: source.add_bos.unwrap_or(adds_bos && vocab.special.bos.is_some()),
            add_eos: source.add_eos.unwrap_or(false),
            add_space_prefix: is_spm && source.add_space_prefix.unwrap_or(true),
            lstrip: source.lstrip.clone(),
            rstrip: source.rstrip.clone(),
            max_text_bytes: options.max_text_bytes.min(MAX_TEXT_BYTES),
            vocab,
            kind,
            warnings,
        })
    }

    /// The ids of a text. Bytes that are not UTF-8 become byte tokens (SentencePiece) or U+FFFD (BPE).
    ///
    /// # Errors
    ///
    /// [`TokenizerError::TextTooLong`].
    pub fn encode(&self, text: impl AsRef<[u8]>, how: Encode) -> Result<Vec<TokenId>, TokenizerError> {
        let text = text.as_ref();
        let content = 0..if how.parse_special { 0 } else { text.len() };
        let ids = self.encode_text(text, &[content])?;
        Ok(if how.add_special { self.with_special(ids, false) } else { ids })
    }

    /// The ids of a prompt in parts, as if it were one text, but with control tokens recognized only inside
    /// [`Part::Template`] stretches.
    ///
    /// With `add_special` BOS is added unless the prompt begins with it already, as templates often write it.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::TextTooLong`].
    pub fn encode_parts(&self, parts: &[Part], add_special: bool) -> Result<Vec<TokenId>, TokenizerError> {
        let len_bytes = parts.iter().map(|part| part.text().len()).fold(0, usize::saturating_add);
        self.check_len(len_bytes)?;
        let mut text = String::with_capacity(len_bytes);
        let mut content = Vec::new();
        for part in parts {
            let start = text.len();
            text.push_str(part.text());
            if matches!(part, Part::Content(text) if !text.is_empty()) {
                content.push(start..text.len());
            }
        }
        let ids = self.encode_text(text.as_bytes(), &content)?;
        Ok(if add_special { self.with_special(ids, true) } else { ids })
    }

    /// Removes all but one BOS from the beginning and says how many went.
    ///
    /// A template that writes BOS and a tokenizer that adds it make two, which models answer worse.
    pub fn drop_repeated_bos(&self, ids: &mut Vec<TokenId>) -> usize {
        let Some(bos) = self.bos() else { return 0 };
        let leading = ids.iter().take_while(|&&id| id == bos).count();
        let extra = leading.saturating_sub(1);
        ids.drain(..extra);
        extra
    }

    /// The bytes that a token adds to the text; none for an id that is not in the vocabulary.
    ///
    /// Control and unknown tokens add their own text if `special` is set and nothing otherwise. A character may
    /// be spread over several tokens, so the bytes need not be UTF-8.
    pub fn token_bytes(&self, id: TokenId, special: bool) -> Option<&[u8]> {
        let hidden = matches!(self.vocab.kind(id.0)?, TokenKind::Control | TokenKind::Unknown) && !special;
        if hidden { Some(&[]) } else { self.vocab.piece(id.0) }
    }

    /// The bytes of many tokens.
    ///
    /// Where encoding puts a space in front of text (at the beginning and after a special token), that space is taken
    /// away again, so that text comes back as it was. To decode the continuation of a text, concatenate
    /// [`Tokenizer::token_bytes`].
    ///
    /// # Errors
    ///
    /// [`TokenizerError::UnknownId`].
    pub fn decode(&self, ids: &[TokenId], special: bool) -> Result<Vec<u8>, TokenizerError> {
        self.check_ids(ids)?;
        let mut out = Vec::new();
        let mut at_start = self.add_space_prefix;
        for &id in ids {
            let bytes = self.token_bytes(id, special).unwrap_or_default();
            if self.is_special(id) {
                out.extend_from_slice(bytes);
                at_start = self.add_space_prefix;
            } else {
                let strip = at_start && bytes.first() == Some(&b' ');
                out.extend_from_slice(&bytes[usize::from(strip)..]);
                at_start = false;
            }
        }
        Ok(out)
    }

    /// Checks that all ids are in the vocabulary.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::UnknownId`] naming the first that is not.
    pub fn check_ids(&self, ids: &[TokenId]) -> Result<(), TokenizerError> {
        match ids.iter().position(|id| id.index() >= self.n_vocab()) {
            Some(position) => {
                Err(TokenizerError::UnknownId { id: ids[position].0, position, n_vocab: self.n_vocab() })
            }
            None => Ok(()),
        }
    }

    /// The text of a token as the vocabulary writes it.
    pub fn token_text(&self, id: TokenId) -> Option<&[u8]> {
        self.vocab.text(id.0)
    }

    /// The token with exactly this text in the vocabulary's writing.
    pub fn token_with_text(&self, text: impl AsRef<[u8]>) -> Option<TokenId> {
        self.vocab.id_of(text.as_ref()).map(TokenId)
    }

    /// What a token is for.
    pub fn token_kind(&self, id: TokenId) -> Option<TokenKind> {
        self.vocab.kind(id.0)
    }

    /// Whether a token steers the model and is not part of the text.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.vocab.kind(id.0) == Some(TokenKind::Control)
    }

    /// Whether generation stops at this token: EOS, end of turn, and all that end a text in some published model.
    pub fn is_end_of_generation(&self, id: TokenId) -> bool {
        self.vocab.is_end(id.0)
    }

    /// All tokens that end a generation, in ascending order.
    pub fn end_of_generation(&self) -> Vec<TokenId> {
        self.vocab.end().map(TokenId).collect()
    }

    /// Number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<TokenId> {
        self.vocab.special.bos.map(TokenId)
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<TokenId> {
        self.vocab.special.eos.map(TokenId)
    }

    /// The token for text that no token covers.
    pub fn unk(&self) -> Option<TokenId> {
        self.vocab.special.unk.map(TokenId)
    }

    /// The token that fills up batches.
    pub fn pad(&self) -> Option<TokenId> {
        self.vocab.special.pad.map(TokenId)
    }

    /// The token between two texts.
    pub fn sep(&self) -> Option<TokenId> {
        self.vocab.special.sep.map(TokenId)
    }

    /// The token for a gap to fill.
    pub fn mask(&self) -> Option<TokenId> {
        self.vocab.special.mask.map(TokenId)
    }

    /// Whether [`Encode::add_special`] puts BOS in front.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether [`Encode::add_special`] puts EOS behind.
    pub fn adds_eos(&self) -> bool {
        self.add_eos
    }

    /// The rule by which text is cut; none for SentencePiece.
    pub fn pre_tokenizer(&self) -> Option<PreTokenizer> {
        match &self.kind {
            Kind::Spm(_) => None,
            Kind::Bpe(bpe) => Some(bpe.pre),
        }
    }

    /// What the user should hear of.
    pub fn warnings(&self) -> &[TokenizerWarning] {
        &self.warnings
    }

    fn is_special(&self, id: TokenId) -> bool {
        matches!(
            self.vocab.kind(id.0),
            Some(TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined)
        )
    }

    fn check_len(&self, len_bytes: usize) -> Result<(), TokenizerError> {
        let limit_bytes = self.max_text_bytes;
        if len_bytes > limit_bytes {
            return Err(TokenizerError::TextTooLong { len_bytes, limit_bytes });
        }
        Ok(())
    }

    fn with_special(&self, mut ids: Vec<TokenId>, one_bos: bool) -> Vec<TokenId> {
        if let Some(bos) = self.bos().filter(|_| self.add_bos) {
            ids.insert(0, bos);
        }
        if one_bos {
            self.drop_repeated_bos(&mut ids);
        }
        ids.extend(self.eos().filter(|_| self.add_eos));
        ids
    }

    /// `content` lists, in order, the ranges in which control tokens are plain text.
    fn encode_text(&self, text: &[u8], content: &[Range<usize>]) -> Result<Vec<TokenId>, TokenizerError> {
        self.check_len(text.len())?;
        let mut merger = Merger::default();
        let mut ids = Vec::new();
        let mut after_special = true;
        for fragment in self.fragments(text, content) {
            match (fragment, &self.kind) {
                (Fragment::Token(id), _) => {
                    ids.push(id);
                    after_special = true;
                    continue;
                }
                (Fragment::Text(range), Kind::Bpe(bpe)) => {
                    bpe.encode(&self.vocab, &text[range], &mut merger, &mut ids);
                }
                (Fragment::Text(range), Kind::Spm(spm)) if self.add_space_prefix && after_special => {
                    let spaced = [b" ", &text[range]].concat();
                    spm.encode(&self.vocab, &spaced, &mut merger, &mut ids);
                }
                (Fragment::Text(range), Kind::Spm(spm)) => {
                    spm.encode(&self.vocab, &text[range], &mut merger, &mut ids);
                }
            }
            after_special = false;
        }
        Ok(ids.into_iter().map(TokenId).collect())
    }

    /// The text cut at its special tokens.
    fn fragments(&self, text: &[u8], content: &[Range<usize>]) -> Vec<Fragment> {
        let plain = |found: &Found| {
            let after = content.partition_point(|range| range.end <= found.range.start);
            content.get(after).is_some_and(|range| range.start < found.range.end)
        };
        let accept =
            |found: &Found| self.vocab.kind(found.id) == Some(TokenKind::UserDefined) || !plain(found);
        let mut fragments = Vec::new();
        let mut at = 0;
        let push_text = |fragments: &mut Vec<Fragment>, mut range: Range<usize>, next: Option<u32>| {
            if next.is_some_and(|id| self.lstrip.contains(&id)) {
                range.end -= text[range.clone()].iter().rev().take_while(|b| is_c_space(**b)).count();
            }
            if !range.is_empty() {
                fragments.push(Fragment::Text(range));
            }
        };
        for found in self.special.find(text, accept) {
            push_text(&mut fragments, at..found.range.start.max(at), Some(found.id));
            fragments.push(Fragment::Token(found.id));
            at = at.max(found.range.end);
            if self.rstrip.contains(&found.id) {
                at += text[at..].iter().take_while(|b| is_c_space(**b)).count();
            }
        }
        push_text(&mut fragments, at..text.len().max(at), None);
        fragments
    }
}

/// White space as C's `isspace` has it.
fn is_c_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

fn checked_scores(
    source: &VocabSource,
    warnings: &mut Vec<TokenizerWarning>,
) -> Result<Vec<f32>, TokenizerError> {
    let Some(scores) = &source.scores else {
        warnings.push(TokenizerWarning::MissingScores);
        return Ok(vec![0.0; source.tokens.len()]);
    };
    match (0..).zip(scores).find(|(_, score)| score.is_nan()) {
        Some((id, _)) => Err(TokenizerError::BadScore { id }),
        None => Ok(scores.clone()),
    }
}

fn pre_tokenizer(
    source: &VocabSource,
    options: TokenizerOptions,
    warnings: &mut Vec<TokenizerWarning>,
) -> Result<PreTokenizer, TokenizerError> {
    if let Some(pre) = options.pre_override {
        return Ok(pre);
    }
    match source.pre.as_deref() {
        Some(name) if !name.is_empty() => PreTokenizer::from_name(name)
            .ok_or_else(|| TokenizerError::UnknownPreTokenizer { pre: name.to_owned() }),
        _ => {
            warnings.push(TokenizerWarning::MissingPreTokenizer);
            Ok(PreTokenizer::Default)
        }
    }
}
