//! A Q8_0 down projection turned from by output to by neuron, without a change of any weight.
//!
//! The blocks of such a matrix run over 32 neurons, so a row of one neuron has a scale of its own for every output.
//! Its integers are put together, and the scales of a block, which its 32 neurons share, stand apart:
//!
//! ```text
//! file     row e:    [ d(e,0) q(e,0..32) | d(e,1) q(e,32..64) | … ]
//! here     scales:   d(·,0) | d(·,1) | …            n_embd f16 for each block of neurons
//!          values:   q(·,0) | q(·,1) | q(·,2) | …   n_embd i8 for each neuron
//! ```
//!
//! The bytes are as many as before. A silent neuron skips its values, and a silent block its scales as well.

use powerinfer_sparse_ops::block::BlockQ8_0;
use powerinfer_sparse_ops::{WeightMatrix, WeightType};

use crate::pool::Pool;

/// Neurons that share a scale, and that the FFN takes together: half a word of the active sets.
pub(crate) const BLOCK: usize = 32;

/// See the module text.
#[derive(Debug)]
pub(crate) struct RelaidDown {
    n_embd: usize,
    /// `[n_ff / 32, n_embd]`, f16 bits.
    scales: Vec<u16>,
    /// `[n_ff, n_embd]`.
    values: Vec<i8>,
}

impl RelaidDown {
    /// Copies a matrix `[n_embd, n_ff]`, one row an output.
    ///
    /// # Panics
    /// If it is not Q8_0.
    pub(crate) fn new(pool: &mut Pool, by_output: &WeightMatrix) -> Self {
        assert_eq!(by_output.ty(), WeightType::Q8_0, "{by_output:?}: type to lay out anew");
        let (n_embd, n_ff) = (by_output.n_rows(), by_output.n_cols());
        let block = |output: usize, block: usize| -> &BlockQ8_0 {
            &bytemuck::cast_slice::<u8, BlockQ8_0>(by_output.row(output))[block]
        };
        let mut scales = vec![0; n_ff / BLOCK * n_embd];
        pool.run_pieces(&mut scales, n_embd, |b, scales| {
            for (e, scale) in scales.iter_mut().enumerate() {
                *scale = block(e, b).d.to_bits();
            }
        });
        let mut values = vec![0; n_ff * n_embd];
        pool.run_pieces(&mut values, BLOCK * n_embd, |b, values| {
            for e in 0..n_embd {
                for (j, q) in block(e, b).qs.into_iter().enumerate() {
                    values[j * n_embd + e] = q;
                }
            }
        });
        Self { n_embd, scales, values }
    }

    /// Bytes of the copy.
    pub(crate) fn n_bytes(&self) -> usize {
        2 * self.scales.len() + self.values.len()
    }

    /// Bytes of the scales of one block.
    pub(crate) fn scale_bytes(&self) -> usize {
        2 * self.n_embd
    }

    /// Bytes of the values of one neuron.
    pub(crate) fn value_bytes(&self) -> usize {
        self.n_embd
    }

    /// Scales `[n_embd]` and values `[32, n_embd]` of one block.
    pub(crate) fn block(&self, block: usize) -> (&[u16], &[i8]) {
        let n = self.n_embd;
        (&self.scales[block * n..][..n], &self.values[block * BLOCK * n..][..BLOCK * n])
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_testing::tiny::{Random, encoded};

    use super::*;

    #[test]
    fn every_weight_is_what_it_was() {
        let (n_embd, n_ff) = (48, 96);
        let weights = Random::new(1).normals(n_embd * n_ff, 1.0);
        let matrix = encoded("down", WeightType::Q8_0, n_embd, n_ff, &weights);
        let relaid = RelaidDown::new(&mut Pool::try_new(2).unwrap(), &matrix);
        let mut row = vec![0.0; n_ff];
        for e in 0..n_embd {
            matrix.decode_row(e, &mut row);
            for (j, &w) in row.iter().enumerate() {
                let (scales, values) = relaid.block(j / BLOCK);
                let value = f32::from(values[j % BLOCK * n_embd + e]);
                assert_eq!(half::f16::from_bits(scales[e]).to_f32() * value, w);
            }
        }
        let n_bytes = relaid.scale_bytes() * n_ff / BLOCK + relaid.value_bytes() * n_ff;
        assert_eq!(n_bytes, matrix.n_bytes());
    }
}
