//! Sets of neurons: the ones a backend holds, and the ones that are predicted to fire.

use crate::NeuronId;

/// The neurons of one layer that one backend holds, as a sorted list and as bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeuronSet {
    n_ff: usize,
    ids: Vec<NeuronId>,
    words: Vec<u64>,
}

impl NeuronSet {
    /// All neurons `0..n_ff`.
    pub fn all(n_ff: usize) -> Self {
        Self::from_sorted(n_ff, (0..n_ff as u32).map(NeuronId).collect())
    }

    /// No neuron of a layer that has `n_ff`.
    pub fn none(n_ff: usize) -> Self {
        Self::from_sorted(n_ff, Vec::new())
    }

    /// The given neurons, in any order; repeated ones count once.
    ///
    /// # Panics
    /// If an id is not below `n_ff`.
    pub fn from_ids(n_ff: usize, ids: impl IntoIterator<Item = NeuronId>) -> Self {
        let mut ids: Vec<NeuronId> = ids.into_iter().collect();
        ids.sort_unstable();
        ids.dedup();
        Self::from_sorted(n_ff, ids)
    }

    fn from_sorted(n_ff: usize, ids: Vec<NeuronId>) -> Self {
        let mut words = vec![0u64; n_ff.div_ceil(64)];
        for id in &ids {
            assert!(id.index() < n_ff, "neuron {id} is not below n_ff {n_ff}");
            words[id.index() / 64] |= 1 << (id.index() % 64);
        }
        Self { n_ff, ids, words }
    }

    /// Number of neurons of the layer, owned or not.
    pub fn n_ff(&self) -> usize {
        self.n_ff
    }

    /// Number of neurons in the set.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether the set has no neuron.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Whether the set has every neuron of the layer.
    pub fn is_all(&self) -> bool {
        self.ids.len() == self.n_ff
    }

    /// The neurons in ascending order.
    pub fn ids(&self) -> &[NeuronId] {
        &self.ids
    }

    /// Whether `id` is in the set; an id beyond the layer is not.
    pub fn contains(&self, id: NeuronId) -> bool {
        self.words.get(id.index() / 64).is_some_and(|w| w >> (id.index() % 64) & 1 == 1)
    }

    /// The set as bits, 64 neurons a word, lowest id in the lowest bit.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// The neurons that are not in the set.
    pub fn complement(&self) -> Self {
        Self::from_sorted(
            self.n_ff,
            (0..self.n_ff as u32).map(NeuronId).filter(|&id| !self.contains(id)).collect(),
        )
    }
}

/// For each row of a step, the neurons of a layer that are to be computed: one bit each.
///
/// Rows are the tokens of the step; a prompt of n tokens has n different sets. The buffer is made once for
/// the largest batch and reused, so that a step does not allocate.
#[derive(Clone, Debug, Default)]
pub struct ActiveBatch {
    n_ff: usize,
    n_rows: usize,
    words: Vec<u64>,
}

impl ActiveBatch {
    /// Makes room for `max_rows` rows of up to `max_n_ff` neurons.
    pub fn with_capacity(max_rows: usize, max_n_ff: usize) -> Self {
        Self { n_ff: 0, n_rows: 0, words: vec![0; max_rows * max_n_ff.div_ceil(64)] }
    }

    /// Starts a batch of `n_rows` empty sets over `n_ff` neurons; allocates only beyond the capacity.
    pub fn reset(&mut self, n_rows: usize, n_ff: usize) {
        (self.n_rows, self.n_ff) = (n_rows, n_ff);
        let n = n_rows * n_ff.div_ceil(64);
        if self.words.len() < n {
            self.words.resize(n, 0);
        }
        self.words[..n].fill(0);
    }

    /// Puts every neuron of every row into its set.
    pub fn fill(&mut self) {
        (0..self.n_rows).for_each(|row| self.fill_row(row));
    }

    /// Puts every neuron into the set of `row`.
    pub fn fill_row(&mut self, row: usize) {
        let (n, tail) = (self.words_per_row(), self.n_ff % 64);
        let words = self.row_mut(row);
        words.fill(u64::MAX);
        if tail != 0 {
            words[n - 1] = (1 << tail) - 1;
        }
    }

    /// Number of rows (tokens of the step).
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Number of neurons of the layer.
    pub fn n_ff(&self) -> usize {
        self.n_ff
    }

    /// Words a row takes: `ceil(n_ff / 64)`.
    pub fn words_per_row(&self) -> usize {
        self.n_ff.div_ceil(64)
    }

    /// The bits of one row; those past `n_ff` are zero.
    pub fn row(&self, row: usize) -> &[u64] {
        let n = self.words_per_row();
        &self.words[row * n..(row + 1) * n]
    }

    /// The bits of one row, to be written; those past `n_ff` must stay zero.
    pub fn row_mut(&mut self, row: usize) -> &mut [u64] {
        let n = self.words_per_row();
        &mut self.words[row * n..(row + 1) * n]
    }

    /// All rows, one after the other.
    pub fn words(&self) -> &[u64] {
        &self.words[..self.n_rows * self.words_per_row()]
    }

    /// All rows, one after the other, to be written; bits past `n_ff` of a row must stay zero.
    pub fn words_mut(&mut self) -> &mut [u64] {
        let n = self.n_rows * self.words_per_row();
        &mut self.words[..n]
    }

    /// Whether `neuron` is in the set of `row`.
    pub fn contains(&self, row: usize, neuron: NeuronId) -> bool {
        self.row(row)[neuron.index() / 64] >> (neuron.index() % 64) & 1 == 1
    }

    /// Puts `neuron` into the set of `row`.
    pub fn insert(&mut self, row: usize, neuron: NeuronId) {
        assert!(neuron.index() < self.n_ff, "neuron {neuron} is not below n_ff {}", self.n_ff);
        self.row_mut(row)[neuron.index() / 64] |= 1 << (neuron.index() % 64);
    }

    /// The sets as seen by one who has only the neurons `of`, and counts them from 0 up: bit `i` of a row of `out` says
    /// whether neuron `of.ids()[i]` is in the row's set.
    ///
    /// # Panics
    /// If `of` is a set of another layer size.
    pub fn select(&self, of: &NeuronSet, out: &mut Self) {
        assert_eq!(of.n_ff(), self.n_ff, "neurons of the selection and of the sets");
        out.reset(self.n_rows, of.len());
        for row in 0..self.n_rows {
            let (mut at, to) = (0, out.row_mut(row));
            for (&word, &of) in self.row(row).iter().zip(of.words()) {
                let n = of.count_ones() as usize;
                let bits = gathered(word & of, of);
                if bits != 0 {
                    to[at / 64] |= bits << (at % 64);
                    if at % 64 + n > 64 {
                        to[at / 64 + 1] |= bits >> (64 - at % 64);
                    }
                }
                at += n;
            }
        }
    }

    /// Number of (row, neuron) pairs in the sets.
    pub fn count(&self) -> u64 {
        self.words().iter().map(|w| u64::from(w.count_ones())).sum()
    }
}

/// The bits of `word` at the places where `of` has ones, moved together; `word` has ones only there.
fn gathered(word: u64, of: u64) -> u64 {
    if word == of {
        return 1u64.checked_shl(of.count_ones()).map_or(u64::MAX, |bit| bit - 1);
    }
    let (mut rest, mut bits) = (word, 0);
    while rest != 0 {
        let below = (1 << rest.trailing_zeros()) - 1;
        bits |= 1 << (of & below).count_ones();
        rest &= rest - 1;
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neuron_set_sorts_drops_repeats_and_knows_its_complement() {
        let set = NeuronSet::from_ids(70, [69, 3, 3, 64].map(NeuronId));
        assert_eq!(set.ids(), [3, 64, 69].map(NeuronId));
        assert!(set.contains(NeuronId(64)) && !set.contains(NeuronId(63)) && !set.contains(NeuronId(700)));
        let rest = set.complement();
        assert_eq!(rest.len(), 67);
        assert_eq!(rest.complement(), set);
        assert!(NeuronSet::all(70).is_all() && NeuronSet::none(70).is_empty());
    }

    #[test]
    #[should_panic(expected = "neuron 70 is not below n_ff 70")]
    fn a_neuron_set_refuses_an_id_beyond_the_layer() {
        NeuronSet::from_ids(70, [NeuronId(70)]);
    }

    #[test]
    fn a_selection_counts_its_neurons_from_zero() {
        // Every third, a run over the border of a word, all, none.
        let n_ff = 200;
        let sets: [Vec<u32>; 4] =
            [(0..n_ff).step_by(3).collect(), (60..131).collect(), (0..n_ff).collect(), vec![]];
        let rows: [Vec<u32>; 3] =
            [(0..n_ff).filter(|i| i * i % 7 == 1).collect(), (0..n_ff).collect(), vec![63, 64, 199]];
        let mut batch = ActiveBatch::default();
        batch.reset(rows.len(), n_ff as usize);
        for (row, ids) in rows.iter().enumerate() {
            ids.iter().for_each(|&id| batch.insert(row, NeuronId(id)));
        }
        for set in sets {
            let of = NeuronSet::from_ids(n_ff as usize, set.iter().copied().map(NeuronId));
            let mut local = ActiveBatch::default();
            batch.select(&of, &mut local);
            assert_eq!((local.n_rows(), local.n_ff()), (rows.len(), set.len()));
            for (row, ids) in rows.iter().enumerate() {
                let want: Vec<bool> = set.iter().map(|id| ids.contains(id)).collect();
                let got: Vec<bool> =
                    (0..set.len() as u32).map(|i| local.contains(row, NeuronId(i))).collect();
                assert_eq!(got, want, "row {row} of {set:?}");
            }
        }
    }

    #[test]
    fn filling_a_batch_leaves_the_bits_past_the_layer_zero() {
        let mut batch = ActiveBatch::with_capacity(3, 130);
        batch.reset(2, 70);
        batch.fill();
        assert_eq!(batch.count(), 140);
        batch.reset(3, 130);
        assert_eq!(batch.count(), 0);
        batch.insert(2, NeuronId(129));
        assert!(batch.contains(2, NeuronId(129)) && !batch.contains(1, NeuronId(129)));
    }
}
