//! A backend that does not say what it moves.

use std::ops::Range;

use powerinfer_sparse_ops::{
    BackendError, BackendInfo, DensePart, FfnInput, FfnWeights, HybridBackend, LayerId, NeuronId, NeuronSet,
    PredictorWeights, SeqId, Step, StepCost, Ticket,
};

/// The suite compares costs with those of a backend that moves nothing; what is moved has tests of its own.
pub(crate) struct NoTraffic(pub(crate) Box<dyn HybridBackend>);

impl HybridBackend for NoTraffic {
    fn info(&self) -> BackendInfo {
        self.0.info()
    }

    fn load_dense(&mut self, part: DensePart) -> Result<(), BackendError> {
        self.0.load_dense(part)
    }

    fn load_ffn(&mut self, layer: LayerId, w: FfnWeights, owned: &NeuronSet) -> Result<(), BackendError> {
        self.0.load_ffn(layer, w, owned)
    }

    fn swap_neurons(
        &mut self,
        layer: LayerId,
        weights: &FfnWeights,
        leave: &[NeuronId],
        enter: &[NeuronId],
    ) -> bool {
        self.0.swap_neurons(layer, weights, leave, enter)
    }

    fn load_predictor(&mut self, layer: LayerId, weights: PredictorWeights) -> Result<(), BackendError> {
        self.0.load_predictor(layer, weights)
    }

    fn reserve(&mut self, seq: SeqId, kv_len: usize, max_rows: usize) -> Result<(), BackendError> {
        self.0.reserve(seq, kv_len, max_rows)
    }

    fn kv_copy(&mut self, from: SeqId, to: SeqId, range: Range<u32>) {
        self.0.kv_copy(from, to, range);
    }

    fn release(&mut self, seq: SeqId) {
        self.0.release(seq);
    }

    fn embed(&mut self, step: &Step<'_>) {
        self.0.embed(step);
    }

    fn set_hidden(&mut self, step: &Step<'_>, h: &[f32]) {
        self.0.set_hidden(step, h);
    }

    fn whole_layer(&mut self, layer: LayerId, step: &Step<'_>) -> bool {
        self.0.whole_layer(layer, step)
    }

    fn attend(&mut self, layer: LayerId, step: &Step<'_>) {
        self.0.attend(layer, step);
    }

    fn ffn_input(&mut self, layer: LayerId, step: &Step<'_>, out: &mut FfnInput) {
        self.0.ffn_input(layer, step, out);
    }

    fn ffn_start(&mut self, layer: LayerId, input: &FfnInput) -> Ticket {
        self.0.ffn_start(layer, input)
    }

    fn ffn_finish(&mut self, ticket: Ticket, acc: &mut [f32]) {
        self.0.ffn_finish(ticket, acc);
    }

    fn ffn_add(&mut self, layer: LayerId, acc: &[f32]) {
        self.0.ffn_add(layer, acc);
    }

    fn ffn_close(&mut self, ticket: Ticket, acc: &mut [f32]) {
        self.0.ffn_close(ticket, acc);
    }

    fn head(&mut self, rows: Range<usize>, logits: &mut [f32]) {
        self.0.head(rows, logits);
    }

    fn hidden(&self, out: &mut [f32]) {
        self.0.hidden(out);
    }

    fn take_cost(&mut self) -> StepCost {
        StepCost { bytes_in: 0, bytes_out: 0, ..self.0.take_cost() }
    }
}
