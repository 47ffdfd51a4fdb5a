//! The original engine's rounding of intermediate values.

use half::f16;

use crate::block::{BlockQ8_0, BlockQ8K, quantize_q8_0, quantize_q8_k};
use crate::{Activation, WeightType};

/// Whether intermediate values are rounded as the original C++ engine rounds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Rounding {
    /// Activations, keys, values and probabilities stay f32.
    #[default]
    None,
    /// Before a product, activations are rounded to the partner type of the weights; attention and SiLU are
    /// done in f16; the hidden vector is rounded in blocks of 32 neurons in file order.
    Original,
}

impl Rounding {
    /// The activations as a product with weights of type `ty` sees them.
    pub(super) fn activations(self, ty: WeightType, x: &[f32]) -> Vec<f32> {
        use WeightType as W;
        match (self, ty) {
            (Self::None, _) | (_, W::F32 | W::BF16) => x.to_vec(),
            (_, W::F16) => self.stored(x),
            (_, W::Q4_0 | W::Q4_1 | W::Q5_0 | W::Q5_1 | W::Q8_0 | W::IQ4_NL | W::MXFP4) => through_q8_0(x),
            (_, W::Q2_K | W::Q3_K | W::Q4_K | W::Q5_K | W::Q6_K) => through_q8_k(x),
        }
    }

    /// The hidden vector as the product with transposed down rows of type `ty` sees it. `off(j)` gives the
    /// value that stands in the place of a neuron that was left out, which takes part in the rounding of its
    /// block and in nothing else.
    pub(super) fn hidden(
        self,
        ty: WeightType,
        hidden: &[f32],
        off: impl Fn(usize) -> Option<f32>,
    ) -> Vec<f32> {
        match self {
            Self::None => hidden.to_vec(),
            Self::Original => {
                let filled: Vec<f32> = hidden.iter().enumerate().map(|(j, &v)| off(j).unwrap_or(v)).collect();
                self.activations(ty, &filled)
            }
        }
    }

    /// Values as the KV cache keeps them.
    pub(super) fn stored(self, values: &[f32]) -> Vec<f32> {
        values.iter().map(|&v| self.f16(v)).collect()
    }

    pub(super) fn activation(self, activation: Activation, v: f32) -> f32 {
        match activation {
            Activation::Silu | Activation::Gelu => self.f16(activation.apply(self.f16(v))),
            Activation::Relu => activation.apply(v),
        }
    }

    /// `v`, to the nearest f16 under the original's rules.
    pub(super) fn f16(self, v: f32) -> f32 {
        match self {
            Self::None => v,
            Self::Original => f16::from_f32(v).to_f32(),
        }
    }
}

/// To blocks of 32 and back; a last block that is not full is rounded as if zeros followed.
fn through_q8_0(x: &[f32]) -> Vec<f32> {
    let mut padded = x.to_vec();
    padded.resize(x.len().next_multiple_of(32), 0.0);
    let mut blocks = vec![bytemuck::Zeroable::zeroed(); padded.len() / 32];
    quantize_q8_0(&padded, &mut blocks);
    let values = blocks.iter().flat_map(|b: &BlockQ8_0| b.qs.map(|q| f32::from(q) * b.d.to_f32()));
    values.take(x.len()).collect()
}

fn through_q8_k(x: &[f32]) -> Vec<f32> {
    let mut blocks = vec![bytemuck::Zeroable::zeroed(); x.len() / 256];
    quantize_q8_k(x, &mut blocks);
    blocks.iter().flat_map(|b: &BlockQ8K| b.qs.map(|q| f32::from(q) * b.d)).collect()
}
