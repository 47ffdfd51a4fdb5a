//! Finding entries of a file by name, without copying the names.

use std::hash::{BuildHasher, RandomState};

/// A hash table from names to entry numbers. It stores 8 bytes a slot; the names stay in the file and are
/// reached through a closure. The hash is keyed, so a file cannot choose names that collide.
pub(crate) struct NameTable {
    /// High half: upper bits of the hash. Low half: entry number plus one. Zero: empty.
    slots: Vec<u64>,
    hasher: RandomState,
}

/// Two entries with one name.
#[derive(Debug)]
pub(crate) struct Duplicate {
    pub(crate) first: usize,
    pub(crate) second: usize,
}

const HIGH: u64 = 0xffff_ffff_0000_0000;

impl NameTable {
    /// A table of `n` entries whose names `name` returns. `n` stays below 2^32: an entry has at least 14
    /// bytes, and callers check the count.
    pub(crate) fn build<'a>(n: usize, name: impl Fn(usize) -> &'a [u8]) -> Result<Self, Duplicate> {
        // At most three quarters full.
        let n_slots = n.saturating_add(n / 3).saturating_add(1).next_power_of_two();
        let mut table = Self { slots: vec![0; n_slots], hasher: RandomState::new() };
        for entry in 0..n {
            let wanted = name(entry);
            match table.probe(wanted, &name) {
                Probe::Found(first) => return Err(Duplicate { first, second: entry }),
                Probe::Free(slot, tag) => {
                    if let Some(slot) = table.slots.get_mut(slot) {
                        *slot = tag | (entry as u64).saturating_add(1);
                    }
                }
            }
        }
        Ok(table)
    }

    pub(crate) fn find<'a>(&self, wanted: &[u8], name: impl Fn(usize) -> &'a [u8]) -> Option<usize> {
        match self.probe(wanted, &name) {
            Probe::Found(entry) => Some(entry),
            Probe::Free(..) => None,
        }
    }

    fn probe<'a>(&self, wanted: &[u8], name: &impl Fn(usize) -> &'a [u8]) -> Probe {
        let hash = self.hasher.hash_one(wanted);
        let mask = self.slots.len().wrapping_sub(1);
        #[expect(clippy::cast_possible_truncation, reason = "masked to the table right after")]
        let mut slot = hash as usize & mask;
        loop {
            let found = self.slots.get(slot).copied().unwrap_or(0);
            if found == 0 {
                return Probe::Free(slot, hash & HIGH);
            }
            let entry = (found & !HIGH).saturating_sub(1) as usize;
            if found & HIGH == hash & HIGH && name(entry) == wanted {
                return Probe::Found(entry);
            }
            slot = slot.wrapping_add(1) & mask;
        }
    }
}

enum Probe {
    Found(usize),
    Free(usize, u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_each_name_and_no_other() {
        for n in [0usize, 1, 2, 3, 7, 1000] {
            let names: Vec<String> = (0..n).map(|i| format!("blk.{i}")).collect();
            let at = |i: usize| names[i].as_bytes();
            let table = NameTable::build(n, at).expect("all differ");
            assert!(table.slots.len() > n);
            for i in 0..n {
                assert_eq!(table.find(names[i].as_bytes(), at), Some(i));
            }
            assert_eq!(table.find(b"blk.x", at), None);
        }
    }

    #[test]
    fn reports_both_places_of_a_duplicate() {
        let names: [&[u8]; 4] = [b"a", b"b", b"c", b"b"];
        let Err(duplicate) = NameTable::build(4, |i| names[i]) else { panic!("two are equal") };
        assert_eq!((duplicate.first, duplicate.second), (1, 3));
    }
}
