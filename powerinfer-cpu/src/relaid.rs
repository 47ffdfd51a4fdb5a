//! A Q8_0 down projection turned from by output to by neuron, without a change of any weight.
//!
//! The blocks of such a matrix run over 32 neurons, so a row of one neuron has a scale of its own for every output.
//! Its integers are put together, and the scales of a block, which its 32 neurons share, stand before them:
//!
//! ```text
//! file     row e:    [ d(e,0) q(e,0..32) | d(e,1) q(e,32..64) | … ]
//! here     block b:  d(·,b)                                n_embd f16
//!                    q(·,32b) | q(·,32b + 1) | …           n_embd i8 for each of 32 neurons
//! ```
//!
//! The bytes are as many as before. A silent neuron skips its values, and a silent block its scales as well.

use std::sync::Arc;

use powerinfer_sparse_ops::block::BlockQ8_0;
use powerinfer_sparse_ops::{WeightMatrix, WeightType};

use crate::memory::Memory;

/// Neurons that share a scale, and that the FFN takes together: half a word of the active sets.
pub(crate) const BLOCK: usize = 32;

/// See the module text.
#[derive(Clone, Debug)]
pub(crate) struct RelaidDown {
    memory: Arc<Memory>,
    /// Offset of the first block.
    at: usize,
    n_embd: usize,
}

/// Bytes of a block of 32 neurons.
pub(crate) fn block_bytes(n_embd: usize) -> usize {
    (2 + BLOCK) * n_embd
}

/// Writes one block of a matrix `[n_embd, n_ff]`, one row an output.
///
/// # Shapes
/// `out [block_bytes(n_embd)]`, at an even address.
///
/// # Panics
/// If the matrix is not Q8_0.
pub(crate) fn turn_block(by_output: &WeightMatrix, block: usize, out: &mut [u8]) {
    assert_eq!(by_output.ty(), WeightType::Q8_0, "{by_output:?}: type to lay out anew");
    let n_embd = by_output.n_rows();
    let (scales, values) = out.split_at_mut(2 * n_embd);
    let scales: &mut [u16] = bytemuck::cast_slice_mut(scales);
    for (e, scale) in scales.iter_mut().enumerate() {
        let source = &bytemuck::cast_slice::<u8, BlockQ8_0>(by_output.row(e))[block];
        *scale = source.d.to_bits();
        for (j, q) in source.qs.into_iter().enumerate() {
            values[j * n_embd + e] = q.cast_unsigned();
        }
    }
}

impl RelaidDown {
    /// The blocks that lie at `at` in `memory`.
    pub(crate) fn new(memory: Arc<Memory>, at: usize, n_embd: usize) -> Self {
        Self { memory, at, n_embd }
    }

    /// Bytes of the scales of one block.
    pub(crate) fn scale_bytes(&self) -> usize {
        2 * self.n_embd
    }

    /// Bytes of the values of one neuron.
    pub(crate) fn value_bytes(&self) -> usize {
        self.n_embd
    }

    /// Scales `[n_embd]` (f16 bits) and values `[32, n_embd]` of one block.
    pub(crate) fn block(&self, block: usize) -> (&[u16], &[i8]) {
        let n_bytes = block_bytes(self.n_embd);
        let bytes = &self.memory.bytes()[self.at + block * n_bytes..][..n_bytes];
        let (scales, values) = bytes.split_at(self.scale_bytes());
        (bytemuck::cast_slice(scales), bytemuck::cast_slice(values))
    }
}
