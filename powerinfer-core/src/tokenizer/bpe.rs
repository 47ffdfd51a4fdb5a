//! Byte-level BPE: cut the text into pieces, then merge within each piece in the order of training.

use super::bytes;
use super::error::TokenizerError;
use super::merge::{Merge, Merger, Symbol};
use super::split::PreTokenizer;
use super::vocab::Vocab;
use std::collections::HashMap;

/// What encoding needs beside the vocabulary.
#[derive(Debug)]
pub(super) struct Bpe {
    pub(super) pre: PreTokenizer,
    /// By the ids of left and right.
    merges: HashMap<(u32, u32), Merge>,
    /// The token of each byte.
    bytes: Vec<Option<u32>>,
}

impl Bpe {
    /// Checks and indexes the merges; of two merges of the same pair the first counts.
    pub(super) fn new(vocab: &Vocab, merges: &[Vec<u8>], pre: PreTokenizer) -> Result<Self, TokenizerError> {
        let mut table = HashMap::with_capacity(merges.len());
        for (index, line) in merges.iter().enumerate() {
            let (pair, id) = parse_merge(vocab, index, line)?;
            // At most as many merges as the vocabulary has tokens matter, so the order fits.
            table.entry(pair).or_insert(Merge { order: u32::try_from(index).unwrap_or(u32::MAX), id });
        }
        let byte_token = |byte| vocab.id_of(bytes::byte_to_char(byte).encode_utf8(&mut [0; 4]).as_bytes());
        Ok(Self { pre, merges: table, bytes: (0..=255).map(byte_token).collect() })
    }

    /// Appends the ids of a text.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], merger: &mut Merger, out: &mut Vec<u32>) {
        self.pre.split(text, |piece| self.encode_piece(vocab, piece, merger, out));
    }

    fn encode_piece(&self, vocab: &Vocab, piece: &[u8], merger: &mut Merger, out: &mut Vec<u32>) {
        if let [byte] = piece {
            out.extend(self.bytes[usize::from(*byte)]);
            return;
        }
        if self.pre.ignores_merges()
            && piece.len() <= vocab.max_text_len()
            && let Some(id) = vocab.id_of(bytes::encode(piece).as_bytes())
        {
            out.push(id);
            return;
        }
        merger.symbols.clear();
        merger.symbols.extend(piece.iter().enumerate().map(|(start, &byte)| Symbol {
            id: self.bytes[usize::from(byte)],
            start,
            end: start + 1,
        }));
        merger.run(|left, right| self.merges.get(&(left.id?, right.id?)).copied());
        // A byte without a token is left out, as in llama.cpp.
        out.extend(merger.symbols.iter().filter(|s| s.start < s.end).filter_map(|s| s.id));
    }
}

/// The pair of ids that a merge line names, and the id that it makes.
fn parse_merge(vocab: &Vocab, index: usize, line: &[u8]) -> Result<((u32, u32), u32), TokenizerError> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let space = line.iter().skip(1).position(|&byte| byte == b' ').map(|at| at + 1);
    let Some(space) = space.filter(|&at| at + 1 < line.len()) else {
        return Err(TokenizerError::MergeWithoutSpace { index, line: text(line) });
    };
    let (left, right) = (&line[..space], &line[space + 1..]);
    let id = |piece: &[u8]| {
        vocab.id_of(piece).ok_or_else(|| TokenizerError::MergeOfUnknownPiece {
            index,
            line: text(line),
            piece: text(piece),
        })
    };
    Ok(((id(left)?, id(right)?), id(&[left, right].concat())?))
}
