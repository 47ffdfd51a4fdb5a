//! What the FFN of a layer really gives, in f32 from the file's own weights.

use std::ops::Range;

use powerinfer_gguf::GgufModel;
use powerinfer_sparse_ops::{DownWeights, FfnWeights, Gating, LayerId, ModelSpec, WeightMatrix};

use super::LoadError;
use super::products::Inputs;
use crate::load::layer_ffn;

pub(super) struct Truth {
    layer: LayerId,
    ffn: FfnWeights,
    gating: Gating,
    /// Length of each neuron's row of the down projection, `[n_ff]`.
    down_norms: Vec<f32>,
}

impl Truth {
    pub(super) fn read(file: &GgufModel, spec: &ModelSpec, layer: LayerId) -> Result<Self, LoadError> {
        let ffn = layer_ffn(file, spec, layer)?;
        let down_norms = down_norms(&ffn.down);
        Ok(Self { layer, ffn, gating: spec.gating, down_norms })
    }

    pub(super) fn layer(&self) -> LayerId {
        self.layer
    }

    /// What decides whether a neuron is active: the gate, or without one the up projection.
    pub(super) fn gate(&self) -> &WeightMatrix {
        self.ffn.gate.as_ref().unwrap_or(&self.ffn.up)
    }

    /// Values before the activation; active is what is above zero.
    ///
    /// # Shapes
    /// The result is `[neurons.len(), n_rows]`.
    pub(super) fn gates(&self, neurons: Range<usize>, x: &Inputs<'_>, threads: usize) -> Vec<f32> {
        let mut gates = x.matrix(self.gate(), neurons.clone(), threads);
        if let (None, Some(bias)) = (&self.ffn.gate, &self.ffn.up_bias) {
            add_bias(&mut gates, &bias[neurons], x.n_rows());
        }
        gates
    }

    /// How much each neuron adds to the FFN's sum: `act(gate) · |up| · ‖down‖`, or `act(up) · ‖down‖` without
    /// a gate; 0 where it is not active.
    ///
    /// # Shapes
    /// `gates` and the result are `[neurons.len(), n_rows]`.
    pub(super) fn gains(
        &self,
        neurons: Range<usize>,
        gates: &[f32],
        x: &Inputs<'_>,
        threads: usize,
    ) -> Vec<f32> {
        let n_rows = x.n_rows().max(1);
        let mut gains = match self.gating {
            Gating::None => vec![1.0; gates.len()],
            Gating::Gate | Gating::GateAndUp => {
                let mut up = x.matrix(&self.ffn.up, neurons.clone(), threads);
                if let Some(bias) = &self.ffn.up_bias {
                    add_bias(&mut up, &bias[neurons.clone()], n_rows);
                }
                let both = self.gating == Gating::GateAndUp;
                up.iter_mut().for_each(|up| *up = if both { up.max(0.0) } else { up.abs() });
                up
            }
        };
        let rows = gains.chunks_exact_mut(n_rows).zip(gates.chunks_exact(n_rows));
        for ((gains, gates), &norm) in rows.zip(&self.down_norms[neurons]) {
            gains.iter_mut().zip(gates).for_each(|(gain, gate)| *gain *= gate.max(0.0) * norm);
        }
        gains
    }
}

fn add_bias(products: &mut [f32], bias: &[f32], n_rows: usize) {
    for (products, bias) in products.chunks_exact_mut(n_rows.max(1)).zip(bias) {
        products.iter_mut().for_each(|product| *product += bias);
    }
}

fn down_norms(down: &DownWeights) -> Vec<f32> {
    let matrix = down.matrix();
    let mut row = vec![0.0; matrix.n_cols()];
    match down {
        DownWeights::ByNeuron(_) => (0..matrix.n_rows())
            .map(|neuron| {
                matrix.decode_row(neuron, &mut row);
                row.iter().map(|w| w * w).sum::<f32>().sqrt()
            })
            .collect(),
        DownWeights::ByOutput(_) => {
            let mut squares = vec![0f32; matrix.n_cols()];
            for output in 0..matrix.n_rows() {
                matrix.decode_row(output, &mut row);
                squares.iter_mut().zip(&row).for_each(|(sum, w)| *sum += w * w);
            }
            squares.into_iter().map(f32::sqrt).collect()
        }
    }
}
