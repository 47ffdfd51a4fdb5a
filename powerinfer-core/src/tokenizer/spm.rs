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
        Self { order, bytes }
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
        let mut start = 0;
        while start < text.len() {
            let end = text.len().min(start + char_len(text[start]));
            merger.symbols.push(Symbol { id: vocab.id_of(&text[start..end]), start, end });
            start = end;
        }
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

/// Length of a UTF-8 sequence by its first byte; 1 for a byte that begins none.
fn char_len(lead: u8) -> usize {
    match lead {
        0xc0..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xff => 4,
        _ => 1,
    }
}
