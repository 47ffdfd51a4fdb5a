//! SentencePiece vocabularies: merge the neighbors that form the best-scored token.

use super::merge::{Merge, Merger, Symbol};
use super::vocab::Vocab;

/// Replaces spaces by U+2581, as the vocabulary writes them.
pub(super) const SPACE: &str = "\u{2581}";

/// What encoding needs beside the vocabulary.
#[derive(Debug)]
pub(super) struct Spm {
    /// Place of each token in the order of merging: the best score is 0, equal scores share a place.
    order: Vec<u32>,
    /// The token of each byte, for characters that are no token.
    bytes: Vec<Option<u32>>,
    /// No token has a space behind another character, so no merge crosses the place before a word's space and each
    /// word is merged by itself: the same result from a short queue.
    merges_by_word: bool,
}

impl Spm {
    /// `scores` are numbers, one for each token.
    pub(super) fn new(vocab: &Vocab, scores: &[f32]) -> Self {
        let mut best_first: Vec<u32> = (0..vocab.len() as u32).collect();
        best_first.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
        let mut order = vec![0; vocab.len()];
        let mut place = 0;
        for (ix, &id) in best_first.iter().enumerate() {
            if ix > 0 && scores[best_first[ix - 1] as usize] != scores[id as usize] {
                place += 1;
            }
            order[id as usize] = place;
        }
        let bytes = (0..=255_u8)
            .map(|byte| vocab.id_of(format!("<0x{byte:02X}>").as_bytes()).or_else(|| vocab.id_of(&[byte])))
            .collect();
        let crosses_words = |id| vocab.text(id).is_some_and(has_inner_space);
        let merges_by_word = !(0..vocab.len() as u32).any(crosses_words);
        Self { order, bytes, merges_by_word }
    }

    /// Appends the ids of a text whose spaces are still spaces.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], merger: &mut Merger, out: &mut Vec<u32>) {
        let mut escaped = Vec::with_capacity(text.len() + text.len() / 2);
        for &byte in text {
            match byte {
                b' ' => escaped.extend_from_slice(SPACE.as_bytes()),
                _ => escaped.push(byte),
            }
        }
        let text = escaped.as_slice();
        merger.symbols.clear();
        let (mut start, mut after_space) = (0, true);
        while start < text.len() {
            let end = text.len().min(start + char_len(text[start]));
            let is_space = text[start..end] == *SPACE.as_bytes();
            if self.merges_by_word && is_space && !after_space {
                self.merge_word(vocab, text, merger, out);
            }
            merger.symbols.push(Symbol { id: vocab.id_of(&text[start..end]), start, end });
            (start, after_space) = (end, is_space);
        }
        self.merge_word(vocab, text, merger, out);
    }

    /// Merges the symbols collected so far, and takes them out.
    fn merge_word(&self, vocab: &Vocab, text: &[u8], merger: &mut Merger, out: &mut Vec<u32>) {
        merger.run(|left, right| {
            let id = vocab.id_of(&text[left.start..right.end])?;
            Some(Merge { order: self.order[id as usize], id })
        });
        for symbol in merger.symbols.iter().filter(|symbol| symbol.start < symbol.end) {
            match symbol.id {
                Some(id) => out.push(id),
                None => self.push_bytes(vocab, &text[symbol.start..symbol.end], out),
            }
        }
        merger.symbols.clear();
    }

    /// A character that is no token: its bytes, or the unknown token where the vocabulary lacks them.
    fn push_bytes(&self, vocab: &Vocab, bytes: &[u8], out: &mut Vec<u32>) {
        let unknown = vocab.special.unk.into_iter();
        if bytes.iter().all(|&byte| self.bytes[usize::from(byte)].is_some()) {
            out.extend(bytes.iter().filter_map(|&byte| self.bytes[usize::from(byte)]));
        } else {
            out.extend(unknown);
        }
    }
}

/// Whether a space follows another character.
fn has_inner_space(text: &[u8]) -> bool {
    let space = SPACE.as_bytes();
    let ends_in_space = |end: usize| text[..end].ends_with(space);
    (1..text.len()).any(|at| text[at..].starts_with(space) && !ends_in_space(at))
}

/// Length of a UTF-8 sequence by its first byte; 1 for a byte that begins none.
fn char_len(lead: u8) -> usize {
    match lead {
        0xc0..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xff => 4,
        _ => 1,
    }
}
