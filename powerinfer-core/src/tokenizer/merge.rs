//! Merging neighbors, best first, until no pair merges: the loop behind both SPM and BPE.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A stretch of the input, and the token it is, if it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Symbol {
    pub(super) id: Option<u32>,
    /// First byte.
    pub(super) start: usize,
    /// One past the last byte; equal to `start` when the symbol has become part of another.
    pub(super) end: usize,
}

/// What a pair of neighbors becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Merge {
    /// The smallest goes first; among equals the leftmost.
    pub(super) order: u32,
    pub(super) id: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Links {
    prev: u32,
    next: u32,
}

/// A merge to try: it is stale if the two symbols are no longer as long as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    order: u32,
    left: u32,
    right: u32,
    id: u32,
    end: usize,
    mid: usize,
}

const NONE: u32 = u32::MAX;

/// Merges a list of symbols in place; buffers are kept for the next list.
#[derive(Debug, Default)]
pub(super) struct Merger {
    pub(super) symbols: Vec<Symbol>,
    links: Vec<Links>,
    queue: BinaryHeap<Reverse<Candidate>>,
    /// Candidates queued since the start: the work done, for tests.
    pub(super) n_queued: usize,
}

impl Merger {
    /// Merges [`Merger::symbols`]; afterwards those with `start < end` are the result, in order.
    ///
    /// `pair` says what two neighbors become. At most three pairs are asked per symbol, so the time is
    /// O(n log n), whatever the input.
    pub(super) fn run(&mut self, pair: impl Fn(Symbol, Symbol) -> Option<Merge>) {
        // Fewer than 2^32 symbols: the caller bounds the text by `MAX_TEXT_BYTES`.
        let n = self.symbols.len() as u32;
        self.queue.clear();
        self.links.clear();
        self.links.extend(
            (0..n).map(|ix| Links { prev: ix.wrapping_sub(1), next: if ix + 1 < n { ix + 1 } else { NONE } }),
        );
        for right in 1..n {
            self.queue_pair(right - 1, right, &pair);
        }
        while let Some(Reverse(best)) = self.queue.pop() {
            self.apply(best, &pair);
        }
    }

    fn queue_pair(&mut self, left: u32, right: u32, pair: &impl Fn(Symbol, Symbol) -> Option<Merge>) {
        if left == NONE || right == NONE {
            return;
        }
        let (a, b) = (self.symbols[left as usize], self.symbols[right as usize]);
        if let Some(Merge { order, id }) = pair(a, b) {
            self.n_queued += 1;
            self.queue.push(Reverse(Candidate { order, left, right, id, end: b.end, mid: a.end }));
        }
    }

    fn apply(&mut self, merge: Candidate, pair: &impl Fn(Symbol, Symbol) -> Option<Merge>) {
        let (left, right) = (self.symbols[merge.left as usize], self.symbols[merge.right as usize]);
        let alive = left.start < left.end && right.start < right.end;
        if !alive || left.end != merge.mid || right.end != merge.end {
            return;
        }
        self.symbols[merge.left as usize].end = right.end;
        self.symbols[merge.left as usize].id = Some(merge.id);
        self.symbols[merge.right as usize].end = right.start;
        let next = self.links[merge.right as usize].next;
        self.links[merge.left as usize].next = next;
        if next != NONE {
            self.links[next as usize].prev = merge.left;
        }
        let prev = self.links[merge.left as usize].prev;
        self.queue_pair(prev, merge.left, pair);
        self.queue_pair(merge.left, next, pair);
    }
}

#[cfg(test)]
mod tests {
    use super::{Merge, Merger, Symbol};

    fn symbols(n: usize) -> Vec<Symbol> {
        (0..n).map(|ix| Symbol { id: Some(1), start: ix, end: ix + 1 }).collect()
    }

    fn lengths(merger: &Merger) -> Vec<usize> {
        merger.symbols.iter().map(|s| s.end - s.start).filter(|&len| len > 0).collect()
    }

    /// Doubles equal neighbors: ids are lengths, up to 16; longer ones come first or last.
    fn doubling(longest_first: bool) -> impl Fn(Symbol, Symbol) -> Option<Merge> {
        move |a, b| {
            let id = a.id? + b.id?;
            let order = if longest_first { 16 - id.min(16) } else { id };
            (a.id == b.id && id <= 16).then_some(Merge { order, id })
        }
    }

    #[test]
    fn leftmost_of_equals_goes_first() {
        let mut merger = Merger { symbols: symbols(7), ..Merger::default() };
        merger.run(doubling(false));
        assert_eq!(lengths(&merger), [4, 2, 1]);
    }

    #[test]
    fn order_decides_before_position() {
        let mut merger = Merger { symbols: symbols(4), ..Merger::default() };
        merger.run(|a, b| {
            Some(Merge { order: 10 - (a.start as u32), id: a.id? + b.id? }).filter(|m| m.id == 2)
        });
        assert_eq!(lengths(&merger), [2, 2]);
        let mut merger = Merger { symbols: symbols(3), ..Merger::default() };
        merger.run(|a, b| {
            Some(Merge { order: 10 - (a.start as u32), id: a.id? + b.id? }).filter(|m| m.id == 2)
        });
        assert_eq!(lengths(&merger), [1, 2]);
    }

    #[test]
    fn work_grows_with_the_length_of_the_text() {
        for longest_first in [false, true] {
            let mut work = Vec::new();
            for n in [1 << 10, 1 << 14] {
                let mut merger = Merger { symbols: symbols(n), ..Merger::default() };
                merger.run(doubling(longest_first));
                assert_eq!(lengths(&merger), vec![16; n / 16]);
                work.push(merger.n_queued);
            }
            assert!(work[1] <= work[0] * 17, "16 times the text took {work:?} queue operations");
        }
    }
}
