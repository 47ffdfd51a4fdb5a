//! Sign bits as a predictor, the training-free baseline of the literature (SparseInfer, arXiv 2411.12692): the score of a
//! neuron is the number of columns in which its gate and the input have the same sign.

use std::ops::Range;

use powerinfer_sparse_ops::WeightMatrix;

use super::products::Inputs;

/// Signs of vectors, one bit a column, set where the value is negative.
pub(super) struct Signs {
    words: Vec<u64>,
    n_words: usize,
}

impl Signs {
    pub(super) fn of(x: &Inputs<'_>) -> Self {
        Self::new(x.rows(), x.width())
    }

    fn new<'a>(rows: impl Iterator<Item = &'a [f32]>, width: usize) -> Self {
        let words = rows.flat_map(|row| {
            row.chunks(64).map(|chunk| chunk.iter().rev().fold(0, |word, v| word << 1 | u64::from(*v < 0.0)))
        });
        Self { words: words.collect(), n_words: width.div_ceil(64) }
    }

    fn rows(&self) -> impl Iterator<Item = &[u64]> {
        self.words.chunks_exact(self.n_words)
    }
}

/// How many (neuron, token) pairs have each score, `[n_cols + 1]`.
pub(super) struct SignScores {
    active: Vec<u64>,
    silent: Vec<u64>,
}

impl SignScores {
    pub(super) fn new(n_cols: usize) -> Self {
        Self { active: vec![0; n_cols + 1], silent: vec![0; n_cols + 1] }
    }

    /// Adds some neurons.
    ///
    /// # Shapes
    /// `gates [neurons.len(), n_rows]`: the values before the activation for each row of `x`.
    pub(super) fn add(&mut self, gate: &WeightMatrix, neurons: Range<usize>, gates: &[f32], x: &Signs) {
        let n_cols = gate.n_cols();
        let mut row = vec![0.0; n_cols];
        let n_rows = (x.words.len() / x.n_words).max(1);
        for (neuron, gates) in neurons.zip(gates.chunks_exact(n_rows)) {
            gate.decode_row(neuron, &mut row);
            let signs = Signs::new(std::iter::once(&row[..]), n_cols);
            for (x, &value) in x.rows().zip(gates) {
                let differ: u32 = signs.words.iter().zip(x).map(|(a, b)| (a ^ b).count_ones()).sum();
                let counts = if value > 0.0 { &mut self.active } else { &mut self.silent };
                counts[n_cols - differ as usize] += 1;
            }
        }
    }

    /// Share of all pairs that one threshold for the layer has to name so that at least the share `recall` of the active
    /// ones is among them.
    pub(super) fn selected_for(&self, recall: f64) -> f64 {
        let sum = |counts: &[u64]| counts.iter().sum::<u64>();
        let (n_active, n_silent) = (sum(&self.active), sum(&self.silent));
        let wanted = (recall * n_active as f64).ceil() as u64;
        let (mut found, mut selected) = (0, 0);
        for (active, silent) in self.active.iter().zip(&self.silent).rev() {
            if found >= wanted {
                break;
            }
            found += active;
            selected += active + silent;
        }
        selected as f64 / (n_active + n_silent).max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use powerinfer_testing::tiny::Random;

    #[test]
    fn scores_are_counts_of_equal_signs() {
        let mut random = Random::new(5);
        for n_cols in [1, 63, 64, 65, 200] {
            let (n_ff, n_rows) = (7, 5);
            let gate = random.normals(n_ff * n_cols, 1.0);
            let x = random.normals(n_rows * n_cols, 1.0);
            let matrix = WeightMatrix::from_f32("gate", n_ff, n_cols, gate.clone()).unwrap();
            let inputs = Inputs::new(&x, n_cols);
            let gates = inputs.matrix(&matrix, 0..n_ff, 1);
            let mut scores = SignScores::new(n_cols);
            let signs = Signs::of(&inputs);
            scores.add(&matrix, 0..3, &gates[..3 * n_rows], &signs);
            scores.add(&matrix, 3..n_ff, &gates[3 * n_rows..], &signs);
            // The same by sorting pairs one by one.
            let mut pairs: Vec<(usize, bool)> = Vec::new();
            for neuron in 0..n_ff {
                for row in 0..n_rows {
                    let (w, v) = (&gate[neuron * n_cols..][..n_cols], &x[row * n_cols..][..n_cols]);
                    let same = w.iter().zip(v).filter(|(w, v)| (**w < 0.0) == (**v < 0.0)).count();
                    pairs.push((same, gates[neuron * n_rows + row] > 0.0));
                }
            }
            let n_active = pairs.iter().filter(|(_, active)| *active).count();
            for recall in [0.0, 0.3, 0.9, 1.0] {
                // The highest threshold that names enough of them.
                let named = |threshold: usize| pairs.iter().filter(move |(same, _)| *same >= threshold);
                let is_enough = |threshold: &usize| {
                    let found = named(*threshold).filter(|(_, active)| *active).count();
                    found as f64 >= recall * n_active as f64
                };
                let threshold = (0..=n_cols + 1).rev().find(is_enough).unwrap();
                let want = named(threshold).count() as f64 / pairs.len() as f64;
                assert_eq!(scores.selected_for(recall), want, "{n_cols} columns, recall {recall}");
            }
        }
    }
}
