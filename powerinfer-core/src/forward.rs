//! The forward pass: one function for every model family, read from top to bottom.

use std::ops::Range;

use powerinfer_sparse_ops::{BlockKind, FfnInput, HybridBackend, LayerId, ModelSpec, Step, StepCost, Ticket};

use crate::placement::{Adaptive, Assignment};

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

/// The backends, who has what, and the buffers of a step. Buffers are made once, for the largest step.
pub(crate) struct Forward {
    pub(crate) backends: Vec<Box<dyn HybridBackend>>,
    route: Route,
    adaptive: Option<Adaptive>,
    parallel: bool,
    n_embd: usize,
    ffn_input: FfnInput,
    /// Sum over the owners' partial sums, or a residual stream on its way, `[n_rows, n_embd]`.
    sum: Vec<f32>,
    /// A place for each backend.
    tickets: Vec<Option<Ticket>>,
}

/// The way of a step through the backends, which are named by their place.
struct Route {
    /// Home of the token tables.
    embed: usize,
    layers: Vec<LayerRoute>,
    /// Home of the head.
    head: usize,
}

/// Who works on one layer.
struct LayerRoute {
    /// Attention, norms, keys and values.
    home: usize,
    /// Owners of neurons in the order in which they start: asynchronous ones first.
    start: Vec<usize>,
    /// The same without home, in the order in which their sums are added.
    others: Vec<usize>,
}

impl LayerRoute {
    fn home_owns(&self) -> bool {
        self.others.len() < self.start.len()
    }
}

impl Forward {
    /// With `adaptive`, the host (backend 0) has all neurons of layers that are split and leaves to the others what they
    /// hold.
    ///
    /// # Panics
    /// If the assignment names a backend that is not there.
    pub(crate) fn new(
        spec: &ModelSpec,
        backends: Vec<Box<dyn HybridBackend>>,
        assignment: &Assignment,
        adaptive: Option<Adaptive>,
        max_rows: usize,
    ) -> Self {
        let is_asynchronous: Vec<bool> = backends.iter().map(|b| b.info().asynchronous).collect();
        let layers = assignment.layers.iter().map(|layer| {
            let owners = (0..backends.len()).filter(|&b| !layer.owned[b].is_empty());
            let others = owners.clone().filter(|&b| b != layer.home).collect();
            let mut start: Vec<usize> = owners.collect();
            // The host comes last, after those whose neurons it leaves out.
            start.sort_by_key(|&b| (b == 0, !is_asynchronous[b]));
            LayerRoute { home: layer.home, start, others }
        });
        let route = Route { embed: assignment.embed, layers: layers.collect(), head: assignment.head };
        Self {
            route,
            adaptive,
            parallel: spec.block == BlockKind::Parallel,
            n_embd: spec.n_embd,
            ffn_input: FfnInput::with_capacity(max_rows, spec.n_embd, spec.max_n_ff()),
            sum: vec![0.0; max_rows * spec.n_embd],
            tickets: backends.iter().map(|_| None).collect(),
            backends,
        }
    }

    /// Whether neurons move, and by what the backends count.
    pub(crate) fn is_adaptive(&self) -> bool {
        self.adaptive.as_ref().is_some_and(Adaptive::is_split)
    }

    /// The backends that hold anything.
    pub(crate) fn used(&mut self) -> impl Iterator<Item = &mut Box<dyn HybridBackend>> {
        let Self { backends, route, .. } = self;
        let is_used = |backend: usize| {
            let layers = || route.layers.iter();
            backend == route.embed
                || backend == route.head
                || layers().any(|l| l.home == backend || l.start.contains(&backend))
        };
        backends.iter_mut().enumerate().filter(move |(i, _)| is_used(*i)).map(|(_, backend)| backend)
    }

    /// The backends that hold neurons of a layer.
    pub(crate) fn owners(&mut self, layer: LayerId) -> impl Iterator<Item = &mut Box<dyn HybridBackend>> {
        let Self { backends, route, .. } = self;
        let start = &route.layers[layer.index()].start;
        backends.iter_mut().enumerate().filter(|(i, _)| start.contains(i)).map(|(_, backend)| backend)
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
        let Self { backends, route, adaptive, ffn_input, tickets, .. } = self;
        let sum = &mut self.sum[..step.rows.len() * self.n_embd];
        // h [n_rows, n_embd] = token row (+ position row)
        backends[route.embed].embed(step);
        let mut at = route.embed;
        for (layer, way) in (0..).map(LayerId).zip(&route.layers) {
            hand_over(backends, at, way.home, step, sum);
            at = way.home;
            // Where nobody else is needed and nobody looks, nothing leaves home.
            let is_alone = way.others.is_empty() && way.home_owns();
            if watch.is_some() || !is_alone || !backends[at].whole_layer(layer, step) {
                // A parallel block (falcon) feeds its FFN from the block's input, others from what attention left.
                if self.parallel {
                    backends[at].ffn_input(layer, step, ffn_input);
                    backends[at].attend(layer, step);
                } else {
                    backends[at].attend(layer, step);
                    backends[at].ffn_input(layer, step, ffn_input);
                }
                if let Some(watch) = watch.as_deref_mut() {
                    watch.ffn_input(layer, ffn_input);
                }
                if let Some(adaptive) = adaptive {
                    adaptive.observe(layer, ffn_input);
                }
                // y = sum over owners of (sum over owned, active neurons i of hidden_i · down_i)
                for &owner in &way.start {
                    if let (0, Some(adaptive)) = (owner, &adaptive) {
                        adaptive.keep_cold(layer, &mut ffn_input.active);
                    }
                    tickets[owner] = Some(backends[owner].ffn_start(layer, ffn_input));
                }
                sum.fill(0.0);
                for &owner in &way.others {
                    let ticket = tickets[owner].take().expect("each owner was started");
                    backends[owner].ffn_finish(ticket, sum);
                }
                // h += y
                match tickets[at].take() {
                    Some(ticket) => backends[at].ffn_close(ticket, sum),
                    None => backends[at].ffn_add(layer, sum),
                }
            }
            if let Some(watch) = watch.as_deref_mut() {
                backends[at].hidden(sum);
                watch.after_layer(layer, sum);
            }
        }
        if !wanted.is_empty() {
            hand_over(backends, at, route.head, step, sum);
            backends[route.head].head(wanted, logits);
        }
        if let Some(adaptive) = adaptive {
            adaptive.exchange(step, backends);
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

/// Brings the residual stream from one home to the next.
fn hand_over(
    backends: &mut [Box<dyn HybridBackend>],
    from: usize,
    to: usize,
    step: &Step<'_>,
    h: &mut [f32],
) {
    if from != to {
        backends[from].hidden(h);
        backends[to].set_hidden(step, h);
    }
}

impl std::fmt::Debug for Forward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.backends.iter().map(|b| b.info().name).collect();
        f.debug_struct("Forward").field("backends", &names).finish_non_exhaustive()
    }
}
