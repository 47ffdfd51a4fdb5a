//! Quantised rows with their integers apart from their scales, and vectors of the same shape.
//!
//! A file keeps a row of Q8_0, Q4_0 or Q4_1 as blocks of 32 weights, each a scale and its integers. Here the
//! integers of a row lie together and so do its scales: vector registers take 64 integers or 16 scales at once,
//! and the bytes are as many as before. Nothing is rounded.
//!
//! Blocks go in groups of four; the last group of a row holds what is left. A group has the first halves of its
//! blocks, then the second halves, so that four lanes of 32 bits belong to one block whatever the width of a
//! register:
//!
//! ```text
//! group of m blocks    [b0 0..16] [b1 0..16] … [b(m−1) 0..16]   [b0 16..32] [b1 16..32] … [b(m−1) 16..32]
//! Q8_0                 32 · m bytes in this order, each q + 128
//! Q4_0, Q4_1           16 · m bytes: the first halves in the low nibbles, the second in the high ones
//! vectors              as Q8_0, signed, filled up with zeros to whole super-groups of 16 blocks
//! ```

use powerinfer_sparse_ops::WeightType;
use powerinfer_sparse_ops::block::{BlockQ4_0, BlockQ4_1, BlockQ8_0};

/// Weights of a block.
pub(crate) const BLOCK: usize = 32;

/// Blocks of a group.
pub(crate) const GROUP: usize = 4;

/// Vectors are filled up to a multiple of this length: 16 blocks, the lanes of the widest register.
pub(crate) const PADDED_TO: usize = 512;

/// The weight types that are laid out so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planar {
    Q8_0,
    Q4_0,
    Q4_1,
}

impl Planar {
    /// The form of a weight type, if it has one.
    pub(crate) fn of(ty: WeightType) -> Option<Self> {
        match ty {
            WeightType::Q8_0 => Some(Self::Q8_0),
            WeightType::Q4_0 => Some(Self::Q4_0),
            WeightType::Q4_1 => Some(Self::Q4_1),
            _ => None,
        }
    }

    /// What is subtracted from the unsigned integers; a power of two.
    pub(crate) fn offset(self) -> i32 {
        match self {
            Self::Q8_0 => 128,
            Self::Q4_0 => 8,
            Self::Q4_1 => 0,
        }
    }

    /// Bytes of the integers of a row.
    #[inline(always)]
    pub(crate) fn quant_bytes(self, n_cols: usize) -> usize {
        match self {
            Self::Q8_0 => n_cols,
            Self::Q4_0 | Self::Q4_1 => n_cols / 2,
        }
    }

    /// Takes a row of a file apart.
    ///
    /// # Shapes
    /// `row` holds `n_cols` weights, `quants [quant_bytes]`, `scales [n_cols / 32]` and for Q4_1 the minima behind them.
    pub(crate) fn split(self, row: &[u8], quants: &mut [u8], scales: &mut [u16]) {
        match self {
            Self::Q8_0 => {
                let blocks: &[BlockQ8_0] = bytemuck::cast_slice(row);
                for (group, out) in blocks.chunks(GROUP).zip(quants.chunks_mut(GROUP * BLOCK)) {
                    let (first, second) = out.split_at_mut(group.len() * BLOCK / 2);
                    for (i, block) in group.iter().enumerate() {
                        for j in 0..BLOCK / 2 {
                            first[i * BLOCK / 2 + j] = block.qs[j].cast_unsigned() ^ 0x80;
                            second[i * BLOCK / 2 + j] = block.qs[BLOCK / 2 + j].cast_unsigned() ^ 0x80;
                        }
                    }
                }
                scales.iter_mut().zip(blocks).for_each(|(s, b)| *s = b.d.to_bits());
            }
            Self::Q4_0 => {
                let blocks: &[BlockQ4_0] = bytemuck::cast_slice(row);
                quants.chunks_exact_mut(BLOCK / 2).zip(blocks).for_each(|(q, b)| q.copy_from_slice(&b.qs));
                scales.iter_mut().zip(blocks).for_each(|(s, b)| *s = b.d.to_bits());
            }
            Self::Q4_1 => {
                let blocks: &[BlockQ4_1] = bytemuck::cast_slice(row);
                quants.chunks_exact_mut(BLOCK / 2).zip(blocks).for_each(|(q, b)| q.copy_from_slice(&b.qs));
                let (scales, mins) = scales.split_at_mut(blocks.len());
                scales.iter_mut().zip(blocks).for_each(|(s, b)| *s = b.d.to_bits());
                mins.iter_mut().zip(blocks).for_each(|(m, b)| *m = b.m.to_bits());
            }
        }
    }
}

/// A row of weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanarRow<'a> {
    /// `[n_cols]` or `[n_cols / 2]` bytes, see the module text.
    pub(crate) quants: &'a [u8],
    /// f16 bits, `[n_cols / 32]`.
    pub(crate) scales: &'a [u16],
    /// f16 bits, `[n_cols / 32]`; Q4_1 only, otherwise empty.
    pub(crate) mins: &'a [u16],
}

/// Rows of a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanarRows<'a> {
    pub(crate) kind: Planar,
    /// From the first row on.
    pub(crate) bytes: &'a [u8],
    /// Bytes from row to row.
    pub(crate) stride: usize,
    pub(crate) n_cols: usize,
}

impl<'a> PlanarRows<'a> {
    /// Bytes of a row.
    #[inline(always)]
    pub(crate) fn row_bytes(&self) -> usize {
        let n_f16 = if self.kind == Planar::Q4_1 { 2 } else { 1 };
        self.kind.quant_bytes(self.n_cols) + 2 * n_f16 * (self.n_cols / BLOCK)
    }

    #[inline(always)]
    pub(crate) fn bytes(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.stride..][..self.row_bytes()]
    }

    /// Inlined, as is what it calls: this runs for each row of weights, and a row handed over in memory takes longer than
    /// a tenth of its product.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> PlanarRow<'a> {
        self.split(self.bytes(row))
    }

    /// The parts of the bytes of a row.
    #[inline(always)]
    pub(crate) fn split<'b>(&self, bytes: &'b [u8]) -> PlanarRow<'b> {
        let (quants, scales) = bytes.split_at(self.kind.quant_bytes(self.n_cols));
        let (scales, mins) = bytemuck::cast_slice(scales).split_at(self.n_cols / BLOCK);
        PlanarRow { quants, scales, mins }
    }
}

impl PlanarRow<'_> {
    /// The unsigned integers of a block, in order.
    pub(crate) fn block(&self, kind: Planar, block: usize) -> [u8; BLOCK] {
        let half = BLOCK / 2;
        let mut out = [0; BLOCK];
        match kind {
            Planar::Q8_0 => {
                let group = block / GROUP * GROUP;
                let n = GROUP.min(self.scales.len() - group);
                let at = group * BLOCK + (block - group) * half;
                out[..half].copy_from_slice(&self.quants[at..at + half]);
                out[half..].copy_from_slice(&self.quants[at + n * half..][..half]);
            }
            Planar::Q4_0 | Planar::Q4_1 => {
                for (j, byte) in self.quants[block * half..][..half].iter().enumerate() {
                    out[j] = byte & 15;
                    out[half + j] = byte >> 4;
                }
            }
        }
        out
    }
}

/// A vector in blocks of 32: `x ≈ d · q`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanarX<'a> {
    /// `[n_pad]`, see the module text.
    pub(crate) q: &'a [i8],
    /// Scale of each block, `[n_pad / 32]`; 0 in the padding.
    pub(crate) d: &'a [f32],
    /// Sum of the integers of each block, `[n_pad / 32]`.
    pub(crate) sums: &'a [i32],
}

impl PlanarX<'_> {
    /// The halves of a block, in order.
    #[inline]
    pub(crate) fn block(&self, block: usize) -> [&[i8; BLOCK / 2]; 2] {
        let halves = self.q.as_chunks::<{ BLOCK / 2 }>().0;
        let at = block / GROUP * (2 * GROUP) + block % GROUP;
        [&halves[at], &halves[at + GROUP]]
    }

    /// The integers of a block.
    #[cfg(test)]
    pub(crate) fn values(&self, block: usize) -> [i8; BLOCK] {
        let [first, second] = self.block(block);
        std::array::from_fn(|i| if i < BLOCK / 2 { first[i] } else { second[i - BLOCK / 2] })
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_sparse_ops::block::decode_row;
    use powerinfer_testing::tiny::{Random, encoded};

    use super::*;

    #[test]
    fn a_row_taken_apart_holds_the_same_weights() {
        let mut random = Random::new(1);
        for ty in [WeightType::Q8_0, WeightType::Q4_0] {
            let kind = Planar::of(ty).unwrap();
            for n in (1..=18).map(|n| n * BLOCK) {
                let matrix = encoded("w", ty, 1, n, &random.normals(n, 1.0));
                let mut want = vec![0.0; n];
                decode_row(ty, matrix.row(0), &mut want);
                let mut quants = vec![0; kind.quant_bytes(n)];
                let mut scales = vec![0; n / BLOCK];
                assert_eq!(quants.len() + 2 * scales.len(), matrix.n_bytes());
                kind.split(matrix.row(0), &mut quants, &mut scales);
                let row = PlanarRow { quants: &quants, scales: &scales, mins: &[] };
                for block in 0..n / BLOCK {
                    let d = half::f16::from_bits(row.scales[block]).to_f32();
                    for (j, u) in row.block(kind, block).into_iter().enumerate() {
                        assert_eq!(d * (i32::from(u) - kind.offset()) as f32, want[block * BLOCK + j]);
                    }
                }
            }
        }
    }
}
