//! A backend that computes nothing and counts what would move: the exact traffic of a placement.

use std::ops::Range;
use std::sync::Arc;

use powerinfer_sparse_ops::{
    BackendError, BackendInfo, DensePart, FfnInput, FfnWeights, HybridBackend, LayerId, ModelSpec, NeuronSet,
    PredictorWeights, SeqId, Step, StepCost, Ticket,
};

/// Owns neurons like a device of its own: it would be sent `x` and the active bits of each layer it holds
/// neurons of, and would send back one `n_embd`-wide sum a token. As home its values are all zero.
#[derive(Debug)]
pub struct NullBackend {
    spec: Arc<ModelSpec>,
    owned: Vec<usize>,
    n_rows: usize,
    cost: StepCost,
}

impl NullBackend {
    /// A backend that holds nothing yet.
    pub fn new(spec: Arc<ModelSpec>) -> Self {
        Self { owned: vec![0; spec.n_layer], spec, n_rows: 0, cost: StepCost::default() }
    }
}

impl HybridBackend for NullBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "null".into(),
            description: "counts traffic".into(),
            memory_bytes: None,
            asynchronous: false,
        }
    }

    fn load_dense(&mut self, part: DensePart) -> Result<(), BackendError> {
        Ok(part.check(&self.spec)?)
    }

    fn load_ffn(
        &mut self,
        layer: LayerId,
        weights: FfnWeights,
        owned: &NeuronSet,
    ) -> Result<(), BackendError> {
        weights.check(&self.spec, layer)?;
        self.owned[layer.index()] = owned.len();
        Ok(())
    }

    fn load_predictor(&mut self, layer: LayerId, weights: PredictorWeights) -> Result<(), BackendError> {
        Ok(weights.check(&self.spec, layer)?)
    }

    fn reserve(&mut self, _: SeqId, _: usize, _: usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn kv_copy(&mut self, _: SeqId, _: SeqId, _: Range<u32>) {}

    fn release(&mut self, _: SeqId) {}

    fn embed(&mut self, step: &Step<'_>) {
        self.n_rows = step.rows.len();
    }

    fn set_hidden(&mut self, step: &Step<'_>, _: &[f32]) {
        self.n_rows = step.rows.len();
    }

    fn attend(&mut self, _: LayerId, _: &Step<'_>) {}

    fn ffn_input(&mut self, layer: LayerId, step: &Step<'_>, out: &mut FfnInput) {
        out.mode = step.mode;
        out.x.clear();
        out.x.resize(step.rows.len() * self.spec.n_embd, 0.0);
        out.active.reset(step.rows.len(), self.spec.n_ff[layer.index()]);
        out.active.fill();
    }

    fn ffn_start(&mut self, layer: LayerId, input: &FfnInput) -> Ticket {
        let n_rows = input.active.n_rows();
        self.cost.owned_neurons += (n_rows * self.owned[layer.index()]) as u64;
        if self.owned[layer.index()] > 0 {
            self.cost.bytes_in += 4 * input.x.len() as u64 + 8 * input.active.words().len() as u64;
            self.cost.bytes_out += 4 * (n_rows * self.spec.n_embd) as u64;
        }
        Ticket { layer, n_rows, slot: 0 }
    }

    fn ffn_finish(&mut self, ticket: Ticket, acc: &mut [f32]) {
        assert_eq!(acc.len(), ticket.n_rows * self.spec.n_embd, "partial sum of layer {}", ticket.layer);
    }

    fn ffn_add(&mut self, _: LayerId, _: &[f32]) {}

    fn head(&mut self, _: Range<usize>, logits: &mut [f32]) {
        logits.fill(0.0);
    }

    fn hidden(&self, out: &mut [f32]) {
        out.fill(0.0);
    }

    fn take_cost(&mut self) -> StepCost {
        std::mem::take(&mut self.cost)
    }
}
