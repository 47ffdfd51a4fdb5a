//! The forward pass: one function for every model family, read from top to bottom.

use std::ops::Range;

use powerinfer_sparse_ops::{BlockKind, FfnInput, HybridBackend, LayerId, ModelSpec, Step, StepCost, Ticket};

/// Watches a step from inside: the residual stream after each layer.
///
/// For traces and comparisons; steps without one copy nothing.
pub trait Probe {
    /// Called after a layer with the residual stream, `h [n_rows, n_embd]`.
    fn after_layer(&mut self, layer: LayerId, h: &[f32]);
}

/// Watches a step from inside while it holds the engine, which only code of this crate may.
pub(crate) trait Watch {
    /// Called with what the owners of neurons get, before they start.
    fn ffn_input(&mut self, layer: LayerId, input: &FfnInput);

    /// Called after a layer with the residual stream, `h [n_rows, n_embd]`.
    fn after_layer(&mut self, layer: LayerId, h: &[f32]);
}

/// The backends and the buffers of a step. Buffers are made once, for the largest step.
pub(crate) struct Forward {
    /// The first one is home; all of them may own neurons.
    pub(crate) backends: Vec<Box<dyn HybridBackend>>,
    parallel: bool,
    n_layer: usize,
    n_embd: usize,
    ffn_input: FfnInput,
    /// Sum over the owners' partial sums, `[n_rows, n_embd]`.
    ffn_sum: Vec<f32>,
    tickets: Vec<Ticket>,
}

impl Forward {
    pub(crate) fn new(spec: &ModelSpec, backends: Vec<Box<dyn HybridBackend>>, max_rows: usize) -> Self {
        Self {
            parallel: spec.block == BlockKind::Parallel,
            n_layer: spec.n_layer,
            n_embd: spec.n_embd,
            ffn_input: FfnInput::with_capacity(max_rows, spec.n_embd, spec.max_n_ff()),
            ffn_sum: vec![0.0; max_rows * spec.n_embd],
            tickets: Vec::with_capacity(backends.len()),
            backends,
        }
    }

    /// Runs a step and writes the logits of its rows `wanted`.
    ///
    /// # Shapes
    /// `logits [wanted.len(), n_vocab]`.
    pub(crate) fn run(
        &mut self,
        step: &Step<'_>,
        wanted: Range<usize>,
        logits: &mut [f32],
        mut watch: Option<&mut dyn Watch>,
    ) {
        let n = step.rows.len() * self.n_embd;
        // h [n_rows, n_embd] = token row (+ position row)
        self.backends[0].embed(step);
        for layer in (0..self.n_layer as u32).map(LayerId) {
            // A parallel block (falcon) feeds its FFN from the block's input, others from what attention left.
            if self.parallel {
                self.backends[0].ffn_input(layer, step, &mut self.ffn_input);
                self.backends[0].attend(layer, step);
            } else {
                self.backends[0].attend(layer, step);
                self.backends[0].ffn_input(layer, step, &mut self.ffn_input);
            }
            if let Some(watch) = watch.as_deref_mut() {
                watch.ffn_input(layer, &self.ffn_input);
            }
            // y = sum over owners of (sum over owned, active neurons i of hidden_i · down_i)
            for backend in self.backends.iter_mut().rev() {
                self.tickets.push(backend.ffn_start(layer, &self.ffn_input));
            }
            let sum = &mut self.ffn_sum[..n];
            sum.fill(0.0);
            for backend in &mut self.backends {
                let ticket = self.tickets.pop().expect("each backend was started once");
                backend.ffn_finish(ticket, sum);
            }
            // h += y
            self.backends[0].ffn_add(layer, sum);
            if let Some(watch) = watch.as_deref_mut() {
                self.backends[0].hidden(sum);
                watch.after_layer(layer, sum);
            }
        }
        if !wanted.is_empty() {
            self.backends[0].head(wanted, logits);
        }
    }

    /// What all backends read, moved and computed since the last call.
    pub(crate) fn take_cost(&mut self) -> StepCost {
        let mut cost = StepCost::default();
        for backend in &mut self.backends {
            cost += backend.take_cost();
        }
        cost
    }
}

impl std::fmt::Debug for Forward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.backends.iter().map(|b| b.info().name).collect();
        f.debug_struct("Forward").field("backends", &names).finish_non_exhaustive()
    }
}
