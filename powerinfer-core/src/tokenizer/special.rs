//! Finding special tokens in text.

use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

/// Longest text of a special token. Looking for tokens takes at most this many steps for each byte of a text; the longest
/// in published vocabularies, runs of white space, have less than 100 bytes.
pub(super) const MAX_SPECIAL_BYTES: usize = 256;

/// A special token found in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) range: Range<usize>,
    pub(super) id: u32,
}

/// The texts of all special tokens, as a tree over their bytes.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    nodes: Vec<Node>,
    /// Child of the root for each byte, 0 for none.
    first: [u32; 256],
}

#[derive(Debug, Default)]
struct Node {
    children: BTreeMap<u8, u32>,
    /// The token that ends here.
    id: Option<u32>,
}

impl SpecialTokens {
    /// Builds the tree. Empty texts are left out; of equal texts the first counts.
    pub(super) fn new<'a>(tokens: impl Iterator<Item = (u32, &'a [u8])>) -> Self {
        let mut tree = Self { nodes: vec![Node::default()], first: [0; 256] };
        for (id, text) in tokens {
            if !text.is_empty() {
                tree.insert(id, text);
            }
        }
        for (&byte, &child) in &tree.nodes[0].children {
            tree.first[usize::from(byte)] = child;
        }
        tree
    }

    fn insert(&mut self, id: u32, text: &[u8]) {
        let mut at = 0;
        for &byte in text {
            at = match self.nodes[at].children.get(&byte) {
                Some(&child) => child as usize,
                None => {
                    let child = self.nodes.len();
                    self.nodes.push(Node::default());
                    // The vocabulary bounds the tree far below 2^32 nodes.
                    self.nodes[at].children.insert(byte, child as u32);
                    child
                }
            };
        }
        self.nodes[at].id.get_or_insert(id);
    }

    /// The longest token that begins at `start`, is at most `most` bytes long and accepted.
    fn longest(
        &self,
        text: &[u8],
        start: usize,
        most: usize,
        accept: impl Fn(&Found) -> bool,
    ) -> Option<Found> {
        let mut at = self.first[usize::from(*text.get(start)?)] as usize;
        let mut best = None;
        let limit = text.len().min(start.saturating_add(most));
        let mut end = start + 1;
        while at != 0 && end <= limit {
            if let Some(id) = self.nodes[at].id {
                let found = Found { range: start..end, id };
                if accept(&found) {
                    best = Some(found);
                }
            }
            at =
                text.get(end).and_then(|b| self.nodes[at].children.get(b)).map_or(0, |&child| child as usize);
            end += 1;
        }
        best
    }

    /// All special tokens of a text, in order and without overlap: where two overlap the longer one wins, wherever
    /// it begins; of two equally long ones the first.
    ///
    /// Only the longest candidate of each position is kept; a shorter one is looked for when it turns out not to fit.
    pub(super) fn find(&self, text: &[u8], accept: impl Fn(&Found) -> bool) -> Vec<Found> {
        let mut queue: BinaryHeap<(usize, std::cmp::Reverse<usize>, u32)> = BinaryHeap::new();
        let push = |queue: &mut BinaryHeap<_>, found: Found| {
            queue.push((found.range.len(), std::cmp::Reverse(found.range.start), found.id));
        };
        for start in 0..text.len() {
            if let Some(found) = self.longest(text, start, usize::MAX, &accept) {
                push(&mut queue, found);
            }
        }
        let mut taken: BTreeMap<usize, Found> = BTreeMap::new();
        while let Some((len, std::cmp::Reverse(start), id)) = queue.pop() {
            let covered =
                taken.range(..=start).next_back().is_some_and(|(_, before)| before.range.end > start);
            if covered {
                continue;
            }
            let room = taken.range(start..).next().map_or(usize::MAX, |(&next, _)| next - start);
            if len <= room {
                taken.insert(start, Found { range: start..start + len, id });
            } else if let Some(shorter) = self.longest(text, start, room, &accept) {
                push(&mut queue, shorter);
            }
        }
        taken.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::SpecialTokens;

    fn found(tokens: &[&str], text: &str) -> Vec<(usize, u32)> {
        let tree = SpecialTokens::new((0..).zip(tokens.iter().map(|t| t.as_bytes())));
        tree.find(text.as_bytes(), |_| true).into_iter().map(|f| (f.range.start, f.id)).collect()
    }

    #[test]
    fn longest_wins_at_one_position() {
        assert_eq!(found(&["<s>", "<s>x", "y"], "a<s>xy<s>"), [(1, 1), (5, 2), (6, 0)]);
    }

    #[test]
    fn longer_token_wins_over_an_earlier_one() {
        assert_eq!(found(&["ab", "bcd"], "abcd"), [(1, 1)]);
        // The first position falls back to a shorter token that still fits.
        assert_eq!(found(&["abc", "a", "cdef"], "abcdef"), [(0, 1), (2, 2)]);
    }

    #[test]
    fn refused_tokens_do_not_hide_shorter_ones() {
        let tree = SpecialTokens::new([(0, b"ab".as_slice()), (1, b"a".as_slice())].into_iter());
        let ids: Vec<u32> = tree.find(b"ab", |f| f.id == 1).into_iter().map(|f| f.id).collect();
        assert_eq!(ids, [1]);
    }

    #[test]
    fn runs_are_taken_from_the_left() {
        assert_eq!(found(&["  ", "    "], "          "), [(0, 1), (4, 1), (8, 0)]);
        assert_eq!(found(&["", "x"], ""), []);
    }
}
