//! Products of blocks of rows with all recorded inputs.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};
use powerinfer_sparse_ops::{GateCopy, GateInput, WeightMatrix};

/// Rows of weights that a thread takes at once.
const PART: usize = 32;

/// Inputs of all recorded tokens, `[n_rows, width]`.
#[derive(Debug)]
pub(super) struct Inputs<'a> {
    values: &'a [f32],
    width: usize,
}

impl<'a> Inputs<'a> {
    /// # Panics
    /// If the values are not whole rows.
    pub(super) fn new(values: &'a [f32], width: usize) -> Self {
        assert!(width > 0 && values.len().is_multiple_of(width), "rows of {width} values");
        Self { values, width }
    }

    pub(super) fn n_rows(&self) -> usize {
        self.values.len() / self.width
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &'a [f32]> + use<'a> {
        self.values.chunks_exact(self.width)
    }

    /// Rows `neurons` of a matrix times every input.
    ///
    /// # Shapes
    /// The result is `[neurons.len(), n_rows]`.
    pub(super) fn matrix(&self, matrix: &WeightMatrix, neurons: Range<usize>, threads: usize) -> Vec<f32> {
        let mut weights = vec![0.0; neurons.len() * self.width];
        for (neuron, row) in neurons.zip(weights.chunks_exact_mut(self.width)) {
            matrix.decode_row(neuron, row);
        }
        self.products(&weights, threads)
    }

    /// # Shapes
    /// `weights [n, width]`; the result is `[n, n_rows]`.
    fn products(&self, weights: &[f32], threads: usize) -> Vec<f32> {
        let n_rows = self.n_rows();
        let mut out = vec![0.0; weights.len() / self.width * n_rows];
        if n_rows == 0 {
            return out;
        }
        let x = view(self.values, self.width);
        let parts = Mutex::new(weights.chunks(PART * self.width).zip(out.chunks_mut(PART * n_rows)));
        let work = || {
            loop {
                let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((weights, out)) = next else { return };
                let shape = (out.len() / n_rows, n_rows);
                let mut out = ArrayViewMut2::from_shape(shape, out).expect("parts are whole rows");
                general_mat_mul(1.0, &view(weights, self.width), &x.t(), 0.0, &mut out);
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                let builder = thread::Builder::new().name("powerinfer-calibrate".to_owned());
                // Without another thread the work takes longer, that is all.
                let _ = builder.spawn_scoped(scope, work);
            }
            work();
        });
        out
    }
}

fn view(values: &[f32], width: usize) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape((values.len() / width, width), values).expect("whole rows")
}

/// Scores of a gate copy for all recorded tokens, the same as [`GateCopy::score`] gives.
///
/// The integer sums are taken in f32, which is exact up to 44 000 columns: no sum leaves 24 bits.
pub(super) struct Scorer<'a> {
    copy: &'a GateCopy,
    /// `[n_rows, n_padded]`.
    q: Vec<f32>,
    inputs: Vec<GateInput>,
    /// `[n_rows, n_outliers]`.
    apart: Vec<f32>,
}

impl<'a> Scorer<'a> {
    /// # Shapes
    /// `x [n_rows, n_embd]`.
    pub(super) fn new(copy: &'a GateCopy, x: &[f32]) -> Self {
        let n_rows = x.len() / copy.n_embd();
        let n_outliers = copy.n_outliers();
        let mut quantized = vec![0i8; copy.n_padded()];
        let mut q = Vec::with_capacity(n_rows * copy.n_padded());
        let mut apart = vec![0.0; n_rows * n_outliers];
        let mut inputs = Vec::with_capacity(n_rows);
        for (row, x) in x.chunks_exact(copy.n_embd()).enumerate() {
            let apart = &mut apart[row * n_outliers..][..n_outliers];
            inputs.push(copy.quantize(x, &mut quantized, apart));
            q.extend(quantized.iter().map(|&q| f32::from(q)));
        }
        Self { copy, q, inputs, apart }
    }

    /// # Shapes
    /// The result is `[neurons.len(), n_rows]`.
    pub(super) fn scores(&self, neurons: Range<usize>, threads: usize) -> Vec<f32> {
        let mut codes = Vec::with_capacity(neurons.len() * self.copy.n_padded());
        for neuron in neurons.clone() {
            for group in self.copy.row_groups(neuron) {
                for shift in [0, 2, 4, 6] {
                    codes.extend(group.iter().map(|byte| f32::from(byte >> shift & 3)));
                }
            }
        }
        let mut scores = Inputs::new(&self.q, self.copy.n_padded()).products(&codes, threads);
        let (n_rows, n_outliers) = (self.inputs.len(), self.copy.n_outliers());
        for (neuron, scores) in neurons.zip(scores.chunks_exact_mut(n_rows.max(1))) {
            for (row, score) in scores.iter_mut().enumerate() {
                let apart = &self.apart[row * n_outliers..][..n_outliers];
                *score = self.copy.score_from_dot(neuron, *score as i32, self.inputs[row], apart);
            }
        }
        scores
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_testing::tiny::Random;

    use super::*;

    #[test]
    fn products_are_those_of_the_definition_for_any_number_of_threads() {
        let mut random = Random::new(3);
        for (n, width, n_rows) in [(1, 1, 1), (33, 7, 5), (100, 64, 70), (3, 5, 0)] {
            let weights = random.normals(n * width, 1.0);
            let x = random.normals(n_rows * width, 1.0);
            let matrix = WeightMatrix::from_f32("w", n, width, weights.clone()).unwrap();
            for threads in [0, 1, 3] {
                let got = Inputs::new(&x, width).matrix(&matrix, 0..n, threads);
                assert_eq!(got.len(), n * n_rows);
                for neuron in 0..n {
                    for row in 0..n_rows {
                        let pairs = weights[neuron * width..][..width].iter().zip(&x[row * width..]);
                        let expected: f32 = pairs.map(|(w, x)| w * x).sum();
                        let got = got[neuron * n_rows + row];
                        assert!((got - expected).abs() < 1e-4, "{n} {width} {n_rows}: {got} {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn scores_are_those_of_the_copy_bit_for_bit() {
        let mut random = Random::new(5);
        for (n_ff, n_embd, outliers) in [(40, 64, vec![]), (33, 300, vec![2, 299]), (5, 7, vec![0])] {
            let gate = WeightMatrix::from_f32("g", n_ff, n_embd, random.normals(n_ff * n_embd, 0.1)).unwrap();
            let copy = GateCopy::from_gate(&gate, random.normals(n_embd, 0.5), outliers).unwrap();
            let x = random.normals(6 * n_embd, 1.0);
            let got = Scorer::new(&copy, &x).scores(1..n_ff, 2);
            for (row, x) in x.chunks_exact(n_embd).enumerate() {
                for (neuron, expected) in copy.score(x).into_iter().enumerate().skip(1) {
                    assert_eq!(got[(neuron - 1) * 6 + row].to_bits(), expected.to_bits());
                }
            }
        }
    }
}
