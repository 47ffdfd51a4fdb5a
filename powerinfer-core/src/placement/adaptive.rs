//! Neurons that move between host and device while a model runs.

use powerinfer_sparse_ops::{
    ActiveBatch, ActiveMode, FfnInput, FfnWeights, HybridBackend, LayerId, NeuronId, Step,
};

use super::Assignment;

/// How neurons move between the host and its devices while a model runs.
///
/// Each neuron has a rate: the share of recent tokens that wanted it, older ones counting less and less. In mode
/// `predictor` these are the tokens whose active set it is in, in mode `exact` those that it fired for, which the
/// backends count; in mode `dense`, where all neurons are read, nothing moves. After a step, one layer after the other,
/// a device exchanges the neurons of the lowest rates that it holds for those of the highest rates that nobody but the
/// host holds, as long as an exchange pays: what it saves within the half-life must be `hysteresis` times what it costs.
/// The host keeps all weights of such layers meanwhile, and computes the neurons that no device holds.
///
/// A prompt's batches are computed by the host for all of its neurons, which is slower than with a placement that stays.
///
/// Sums are added in another order after an exchange, so logits differ in their last bits, as they do between two
/// placements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveOptions {
    /// Tokens after which an activation counts half.
    pub half_life: f32,
    /// An exchange happens if the difference of the rates, times the half-life, is at least this: the reads of the
    /// neuron that the host is expected to be spared. Moving a neuron takes a few times as long as reading it, and rates
    /// are estimates.
    pub hysteresis: f32,
    /// Bytes of weights that may be moved after a token.
    pub bytes_per_token: u64,
}

impl Default for AdaptiveOptions {
    fn default() -> Self {
        Self { half_life: 256.0, hysteresis: 24.0, bytes_per_token: 1 << 20 }
    }
}

/// The state behind [`AdaptiveOptions`]. Allocates nothing after it was made.
#[derive(Debug)]
pub(crate) struct Adaptive {
    options: AdaptiveOptions,
    layers: Vec<LayerState>,
    /// The layer that is looked at next.
    next: usize,
    /// Tokens so far.
    n_tokens: u64,
    /// Whether the backends count what fires, as they do for steps in mode `exact`.
    is_counting: bool,
    /// What backends counted, `[n_ff]` of the widest layer.
    fired: Vec<u64>,
    leave: Vec<NeuronId>,
    enter: Vec<NeuronId>,
}

#[derive(Debug)]
struct LayerState {
    weights: FfnWeights,
    /// Whether host and devices both have neurons, so that there is something to exchange.
    is_split: bool,
    /// Bytes of one neuron.
    neuron_bytes: u64,
    /// Recent activity of each neuron: a sum over tokens, each counting less than the next, up to `1 / (1 - decay)`.
    heat: Vec<f32>,
    /// Tokens up to the last look at the counts.
    seen: u64,
    /// The backend that holds each neuron besides the host; 0 for none.
    holder: Vec<u16>,
    /// Neurons that the host is left with, a bit each.
    cold: Vec<u64>,
    /// Neurons in the order of their heat, hottest first.
    order: Vec<u32>,
}

impl Adaptive {
    pub(crate) fn new(options: AdaptiveOptions, assignment: &Assignment, ffn: Vec<FfnWeights>) -> Self {
        let layers = ffn.into_iter().zip(&assignment.layers).map(|(weights, assigned)| {
            let n_ff = weights.n_ff();
            let mut holder = vec![0; n_ff];
            for (backend, owned) in assigned.owned.iter().enumerate().skip(1) {
                owned.ids().iter().for_each(|id| holder[id.index()] = backend as u16);
            }
            let row_bytes: usize = weights.matrices().map(|m| m.n_bytes() / n_ff).sum();
            let n_cold = assigned.owned[0].len();
            LayerState {
                is_split: n_cold > 0 && n_cold < n_ff,
                neuron_bytes: row_bytes as u64,
                heat: vec![0.0; n_ff],
                seen: 0,
                cold: assigned.owned[0].words().to_vec(),
                holder,
                order: (0..n_ff as u32).collect(),
                weights,
            }
        });
        let layers: Vec<LayerState> = layers.collect();
        let most = layers.iter().map(|l| options.bytes_per_token / l.neuron_bytes.max(1)).max().unwrap_or(0);
        let widest = layers.iter().map(|l| l.heat.len()).max().unwrap_or(0);
        let most = widest.min(most as usize);
        Self {
            options,
            layers,
            next: 0,
            n_tokens: 0,
            is_counting: false,
            fired: vec![0; widest],
            leave: Vec::with_capacity(most),
            enter: Vec::with_capacity(most),
        }
    }

    /// Whether there is a layer that neurons can move in.
    pub(crate) fn is_split(&self) -> bool {
        self.layers.iter().any(|state| state.is_split)
    }

    /// Begins counting for sessions in mode `exact`, if that is their mode; names a backend that holds neurons of a layer
    /// that could be exchanged and does not count.
    pub(crate) fn start(
        &mut self,
        mode: ActiveMode,
        backends: &mut [Box<dyn HybridBackend>],
    ) -> Option<String> {
        if !self.is_split() {
            return None;
        }
        self.count_from_now(true, backends);
        let mut without = None;
        let ids = (0..).map(LayerId).zip(&self.layers);
        for (layer, state) in ids.filter(|(_, state)| state.is_split) {
            for (backend, device) in backends.iter_mut().enumerate() {
                let fired = &mut self.fired[..state.heat.len()];
                if state.is_holder(backend) && !device.take_fired(layer, fired) {
                    without = without.or_else(|| Some(device.info().name));
                }
            }
        }
        if mode != ActiveMode::Exact {
            self.count_from_now(false, backends);
        }
        without
    }

    /// Begins counting anew, or ends it.
    fn count_from_now(&mut self, on: bool, backends: &mut [Box<dyn HybridBackend>]) {
        backends.iter_mut().for_each(|backend| backend.record_fired(on));
        self.is_counting = on;
        self.layers.iter_mut().for_each(|state| state.seen = self.n_tokens);
    }

    /// Counts what the tokens of a step want in a layer, where a predictor says so.
    pub(crate) fn observe(&mut self, layer: LayerId, input: &FfnInput) {
        let state = &mut self.layers[layer.index()];
        if !state.is_split || input.mode != ActiveMode::Predictor {
            return;
        }
        let decay = decay(self.options.half_life);
        for row in 0..input.active.n_rows() {
            for (word, heat) in input.active.row(row).iter().zip(state.heat.chunks_mut(64)) {
                for (i, heat) in heat.iter_mut().enumerate() {
                    *heat = *heat * decay + (word >> i & 1) as f32;
                }
            }
        }
    }

    /// Leaves in the sets what no device holds.
    pub(crate) fn keep_cold(&self, layer: LayerId, active: &mut ActiveBatch) {
        let cold = &self.layers[layer.index()].cold;
        for row in 0..active.n_rows() {
            active.row_mut(row).iter_mut().zip(cold).for_each(|(word, cold)| *word &= cold);
        }
    }

    /// After a step: looks at the next layer that devices have neurons of, and moves what pays.
    pub(crate) fn exchange(&mut self, step: &Step<'_>, backends: &mut [Box<dyn HybridBackend>]) {
        self.n_tokens += step.rows.len() as u64;
        // What other modes do is not counted, or it would be counted twice.
        let counts = step.mode == ActiveMode::Exact;
        if counts != self.is_counting && self.is_split() {
            self.count_from_now(counts, backends);
        }
        if step.mode == ActiveMode::Dense {
            return;
        }
        let n = self.layers.len();
        let Some(layer) = (0..n).map(|i| (self.next + i) % n).find(|&layer| self.layers[layer].is_split)
        else {
            return;
        };
        self.next = layer + 1;
        let state = &mut self.layers[layer];
        let AdaptiveOptions { half_life, hysteresis, .. } = self.options;
        if counts {
            state.count(LayerId(layer as u32), self.n_tokens, half_life, &mut self.fired, backends);
        }
        let heat = &state.heat;
        state.order.sort_unstable_by(|&a, &b| heat[b as usize].total_cmp(&heat[a as usize]).then(a.cmp(&b)));
        let mut n_left = (self.options.bytes_per_token / state.neuron_bytes.max(1)) as usize;
        // A rate is heat times (1 - decay).
        let spared_per_heat = (1.0 - decay(half_life)) * half_life;
        let pays = |enter: u32, leave: u32| {
            (heat[enter as usize] - heat[leave as usize]) * spared_per_heat >= hysteresis
        };
        for (backend, device) in backends.iter_mut().enumerate().skip(1) {
            self.leave.clear();
            self.enter.clear();
            let mut hot = state.order.iter().copied().filter(|&j| state.holder[j as usize] == 0);
            let mut cold = state
                .order
                .iter()
                .rev()
                .copied()
                .filter(|&j| usize::from(state.holder[j as usize]) == backend);
            while n_left > 0
                && let (Some(enter), Some(leave)) = (hot.next(), cold.next())
                && pays(enter, leave)
            {
                self.enter.push(NeuronId(enter));
                self.leave.push(NeuronId(leave));
                n_left -= 1;
            }
            let id = LayerId(layer as u32);
            if self.enter.is_empty() || !device.swap_neurons(id, &state.weights, &self.leave, &self.enter) {
                continue;
            }
            for (enter, leave) in self.enter.iter().zip(&self.leave) {
                state.holder[enter.index()] = backend as u16;
                state.holder[leave.index()] = 0;
                state.cold[enter.index() / 64] &= !(1 << (enter.index() % 64));
                state.cold[leave.index() / 64] |= 1 << (leave.index() % 64);
            }
        }
    }
}

impl LayerState {
    /// Whether a backend holds neurons that may be exchanged.
    fn is_holder(&self, backend: usize) -> bool {
        backend == 0 || self.holder.iter().any(|&holder| usize::from(holder) == backend)
    }

    /// Adds what fired since the last look, `n_tokens` tokens after the first.
    fn count(
        &mut self,
        layer: LayerId,
        n_tokens: u64,
        half_life: f32,
        fired: &mut [u64],
        backends: &mut [Box<dyn HybridBackend>],
    ) {
        let fired = &mut fired[..self.heat.len()];
        fired.fill(0);
        for (backend, device) in backends.iter_mut().enumerate() {
            if self.is_holder(backend) {
                device.take_fired(layer, fired);
            }
        }
        let n_new = n_tokens - self.seen;
        self.seen = n_tokens;
        if n_new == 0 {
            return;
        }
        // As if what fired had done so evenly in between.
        let decay = decay(half_life);
        let remains = decay.powf(n_new as f32);
        let of_each = (1.0 - remains) / (1.0 - decay) / n_new as f32;
        for (heat, &fired) in self.heat.iter_mut().zip(&*fired) {
            *heat = *heat * remains + fired as f32 * of_each;
        }
    }
}

/// What remains of an activation after one more token.
fn decay(half_life: f32) -> f32 {
    (-std::f32::consts::LN_2 / half_life).exp()
}
