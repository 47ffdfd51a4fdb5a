//! The planner: which parts and neurons go to which device.
//!
//! A token costs the time to read what it needs where that lies, and for each layer whose neurons are not all at its
//! home one exchange. A layer on host and devices takes as long as the slowest of them:
//!
//! ```text
//! T = Σ layers ( dense(home) + max over owners (read bytes ÷ bandwidth) + exchange, if another than home owns )
//!   + head(home) + hand-overs between homes
//! read bytes of neurons   p · (up + down) + g · gate     p: rate of activation; g: p with a predictor, otherwise 1
//! ```
//!
//! For each layer the planner looks at every choice of home and at numbers of neurons, hottest first, and keeps the
//! lower convex hull of (bytes, time): what more bytes save. The steps of all hulls are taken in the order of seconds
//! saved for a byte, as far as they fit: of neurons a part, of a home all or nothing. A few other numbers of homes are tried
//! as well. The same steps with the last one in fractions are the linear relaxation, a bound that no placement on this
//! device beats but for the width of a step; the plan says how far it is from it ([`Plan::gap`]).
//!
//! Several devices are filled one after the other, each with what is still on the host; nothing is said of how far that
//! is from the best placement on all of them.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::path::PathBuf;

use powerinfer_predictor::ActivationCounts;
use powerinfer_sparse_ops::{ActiveMode, NeuronId, NeuronSet};

use super::device::{Accelerator, Host};
use super::rates::Rates;
use super::shape::{LayerShape, ModelShape};
use super::{Assignment, LayerAssignment};

/// What to plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// How often its neurons are active.
    pub rates: &'a Rates,
    /// Which neurons are computed.
    pub mode: ActiveMode,
    /// The host.
    pub host: &'a Host,
    /// Devices besides it, in the order in which they are filled.
    pub devices: &'a [Accelerator],
    /// Positions of a sequence.
    pub n_ctx: usize,
    /// Tokens of a step.
    pub n_batch: usize,
    /// Sequences at a time.
    pub n_seq: usize,
}

/// What a plan that is made while a model is loaded is made for.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// The host.
    pub host: Host,
    /// As many as [`crate::LoadOptions::accelerators`], in the same order.
    pub devices: Vec<Accelerator>,
    /// How often neurons are active.
    pub statistics: Statistics,
    /// Rate of the neurons of layers that the statistics do not fit, which are refused without it.
    pub fallback_rate: Option<f32>,
    /// Positions of a sequence; `None` for the default of a session.
    pub n_ctx: Option<usize>,
    /// Sequences at a time.
    pub n_seq: usize,
    /// Whether neurons may leave the host, or dense parts alone.
    pub neurons: bool,
    /// Decodes with the first layers, at most 1 GiB of them beside tables and predictors, on the host and on each device, and plans with the speeds
    /// that this shows in the place of those given.
    pub measure: bool,
    /// A file that keeps the plan, as [`super::plan_path`] names it. What it holds is used as long as all that it was made
    /// for is the same and it fits the free memory; a note says when it is made anew, and why.
    pub saved: Option<PathBuf>,
    /// Whether a new plan is made whatever that file holds.
    pub anew: bool,
}

impl PlanOptions {
    /// One sequence of the default length, neurons on devices where that saves time, the figures as given, and nothing
    /// kept.
    pub fn new(host: Host, devices: Vec<Accelerator>, statistics: Statistics) -> Self {
        Self {
            host,
            devices,
            statistics,
            fallback_rate: None,
            n_ctx: None,
            n_seq: 1,
            neurons: true,
            measure: false,
            saved: None,
            anew: false,
        }
    }
}

/// What is known of how often neurons are active.
#[derive(Clone, Debug, PartialEq)]
pub enum Statistics {
    /// Nothing: every neuron has this rate, and which of them go to a device is chance.
    Unknown {
        /// The rate.
        rate: f32,
    },
    /// Counts on some text.
    Counts(Box<ActivationCounts>),
}

/// Where everything goes, and what that takes and gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Who holds what; backend 0 is the host, backend `i` the device `i - 1` of the request.
    pub assignment: Assignment,
    /// One for each device.
    pub devices: Vec<DevicePlan>,
    /// Seconds of a token.
    pub token_seconds: f64,
    /// Seconds of a token with everything on the host.
    pub host_seconds: f64,
    /// How much longer a token takes than by the linear relaxation, as a share of that. With several devices the largest
    /// such share, each for its device given what those before it hold.
    pub gap: f64,
}

/// What one device holds.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct DevicePlan {
    /// Its name.
    pub name: String,
    /// Bytes that may be used.
    pub usable_bytes: u64,
    /// Bytes by part.
    pub bytes: PartBytes,
    /// Layers that are at home here.
    pub n_homes: usize,
    /// Whether the head is.
    pub has_head: bool,
    /// Neurons that are here.
    pub n_neurons: usize,
    /// Of so many.
    pub of_neurons: usize,
    /// Share of all activations that are of these neurons.
    pub active_share: f64,
    /// What did not go the way one might wish, and why.
    pub reasons: Vec<String>,
}

/// Bytes on a device, with every allocation rounded up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PartBytes {
    /// Attention and norms.
    pub dense: u64,
    /// Last norm and output matrix.
    pub head: u64,
    /// Keys and values.
    pub kv: u64,
    /// Predictors.
    pub predictors: u64,
    /// Neurons.
    pub neurons: u64,
    /// What steps work in.
    pub steps: u64,
}

impl PartBytes {
    /// All of them.
    pub fn total(&self) -> u64 {
        let Self { dense, head, kv, predictors, neurons, steps } = *self;
        [dense, head, kv, predictors, neurons, steps].into_iter().fold(0, u64::saturating_add)
    }
}

/// A layer while devices are filled.
#[derive(Clone, Debug)]
struct LayerState {
    home: usize,
    /// Up to which of its neurons, hottest first, the devices hold them.
    ends: Vec<usize>,
}

impl LayerState {
    /// How many neurons devices hold.
    fn n_placed(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }
}

/// A choice for a layer on the device that is filled.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    moves_home: bool,
    /// Neurons, beginning with the hottest that no device before holds.
    n: usize,
    bytes: u64,
    seconds: f64,
}

/// Whose home may move to the device that is filled.
#[derive(Clone, Copy, Debug)]
enum Homes {
    /// Any that gains by it.
    WherePays,
    /// The first so many layers have to, the others do not.
    First(usize),
}

/// The lower convex hulls of the choices for a layer, see [`Planner::hull`].
struct Hulls {
    /// Its home may move or not.
    any: Vec<Choice>,
    /// Its home does not move.
    stays: Vec<Choice>,
    /// Its home moves, if it is not on a device already.
    moves: Option<Vec<Choice>>,
}

/// Numbers of neurons that are looked at for a layer.
const GRID: usize = 512;

#[derive(Clone)]
struct Planner<'a> {
    request: PlanRequest<'a>,
    layers: Vec<LayerState>,
    head: usize,
}

/// Places everything.
///
/// The order of neurons in a layer is that of their rates, the lower id first where they are equal.
pub fn plan(request: &PlanRequest<'_>) -> Plan {
    let n_layer = request.shape.layers.len();
    let mut planner =
        Planner { request: *request, layers: vec![LayerState { home: 0, ends: vec![] }; n_layer], head: 0 };
    let host_seconds = planner.token_seconds();
    let mut gap = 0f64;
    let mut devices = Vec::with_capacity(request.devices.len());
    for device in 0..request.devices.len() {
        let (reasons, device_gap) = planner.fill(device);
        gap = gap.max(device_gap);
        devices.push(planner.describe(device, reasons));
    }
    Plan {
        token_seconds: planner.token_seconds(),
        assignment: planner.assignment(),
        devices,
        host_seconds,
        gap,
    }
}

impl Planner<'_> {
    fn layer(&self, layer: usize) -> &LayerShape {
        &self.request.shape.layers[layer]
    }

    /// Bytes that a token reads of the neurons `from..to` of a layer, hottest first.
    fn read_bytes(&self, layer: usize, from: usize, to: usize) -> f64 {
        let shape = self.layer(layer);
        let all = (to - from) as f64;
        let active = self.request.rates.sum(layer, from, to);
        let (gates, rest) = match self.request.mode {
            ActiveMode::Dense => (all, all),
            ActiveMode::Exact => (all, active),
            ActiveMode::Predictor if shape.predictor_bytes > 0 => (active, active),
            ActiveMode::Predictor => (all, active),
        };
        // Without a gate, up is computed first.
        let first = if shape.gate_row_bytes > 0 { shape.gate_row_bytes } else { shape.up_row_bytes };
        let others = shape.gate_row_bytes + shape.up_row_bytes + shape.down_row_bytes - first;
        gates * first as f64 + rest * others as f64
    }

    fn dense_bandwidth(&self, backend: usize) -> f64 {
        match backend {
            0 => self.request.host.bandwidth.dense,
            device => self.request.devices[device - 1].bandwidth.dense,
        }
    }

    fn neuron_bandwidth(&self, backend: usize) -> f64 {
        let bandwidth = match backend {
            0 => self.request.host.bandwidth,
            device => self.request.devices[device - 1].bandwidth,
        };
        if self.request.mode == ActiveMode::Dense { bandwidth.dense } else { bandwidth.gather }
    }

    /// Seconds of moving some vectors of the residual stream's width between the host and a device.
    fn transfers(&self, device: usize, n: usize, more_bytes: usize) -> f64 {
        let device = &self.request.devices[device];
        let bytes = 4 * n * self.request.shape.n_embd + more_bytes;
        n as f64 * device.latency + bytes as f64 / device.link
    }

    /// There with `x` and the active bits, back with the sum.
    fn exchange(&self, layer: usize, device: usize) -> f64 {
        self.transfers(device, 2, self.layer(layer).n_ff / 8)
    }

    fn dense_bytes(&self, layer: usize) -> u64 {
        let shape = self.layer(layer);
        let predictor = if self.request.mode == ActiveMode::Predictor { shape.predictor_bytes } else { 0 };
        let kv = self.request.shape.kv_bytes(self.request.n_ctx, 1, 2);
        // On average half of the context is in use.
        shape.dense_bytes + predictor + kv / 2
    }

    /// Bytes of keys and values of a layer on a device.
    fn kv_bytes(&self, device: usize) -> u64 {
        let PlanRequest { shape, n_ctx, n_seq, .. } = self.request;
        shape.kv_bytes(n_ctx, n_seq, self.request.devices[device].kv_value_bytes)
    }

    /// Bytes of the head on a device.
    fn head_bytes(&self, device: usize) -> u64 {
        self.request.devices[device].buffer(self.request.shape.head_bytes)
    }

    /// Bytes that steps work in on a device.
    fn step_bytes(&self, device: usize) -> u64 {
        let PlanRequest { shape, n_batch, n_ctx, devices, .. } = self.request;
        let buffers = [shape.constant_bytes(), shape.counter_bytes, shape.step_bytes(n_batch, n_ctx)];
        buffers.map(|n| devices[device].buffer(n)).into_iter().fold(0, u64::saturating_add)
    }

    /// Seconds of a layer.
    fn layer_seconds(&self, layer: usize, home: usize, ends: &[usize]) -> f64 {
        let n_ff = self.layer(layer).n_ff;
        let dense = self.dense_bytes(layer) as f64 / self.dense_bandwidth(home);
        let mut from = 0;
        let mut slowest = 0f64;
        let mut exchanges = 0.0;
        let host = (n_ff, 0);
        for (to, backend) in ends.iter().copied().zip(1..).chain([host]) {
            if to > from {
                let seconds = self.read_bytes(layer, from, to) / self.neuron_bandwidth(backend);
                slowest = slowest.max(seconds);
                if backend != home {
                    // Between the host and whichever of the two is a device.
                    exchanges += self.exchange(layer, backend.max(home) - 1);
                }
            }
            from = from.max(to);
        }
        dense + slowest + exchanges
    }

    /// Seconds of a token.
    fn token_seconds(&self) -> f64 {
        let layers = self.layers.iter().enumerate();
        let layers: f64 = layers.map(|(i, l)| self.layer_seconds(i, l.home, &l.ends)).sum();
        let head = self.request.shape.head_bytes as f64 / self.dense_bandwidth(self.head);
        let homes = || self.layers.iter().map(|l| l.home);
        let steps = std::iter::once(0).chain(homes()).zip(homes().chain([self.head]));
        let hand_overs: f64 = steps
            .map(|(from, to)| {
                let one = |backend: usize| if backend > 0 { self.transfers(backend - 1, 1, 0) } else { 0.0 };
                if from == to { 0.0 } else { one(from) + one(to) }
            })
            .sum();
        layers + head + hand_overs
    }

    /// The choice for a layer, with `n` neurons more on the device that is filled.
    fn choice(&self, device: usize, layer: usize, moves_home: bool, n: usize) -> Choice {
        let state = &self.layers[layer];
        let shape = self.layer(layer);
        let first = state.n_placed();
        let mut ends = state.ends.clone();
        ends.push(first + n);
        let home = if moves_home { device + 1 } else { state.home };
        let accelerator = &self.request.devices[device];
        let mut bytes = accelerator.buffer(shape.neuron_bytes(n));
        if moves_home {
            let home = [shape.dense_bytes, shape.predictor_bytes, self.kv_bytes(device)];
            bytes = home.map(|n| accelerator.buffer(n)).into_iter().fold(bytes, u64::saturating_add);
        }
        Choice { moves_home, n, bytes, seconds: self.layer_seconds(layer, home, &ends) }
    }

    /// The lower convex hull of the choices for a layer from `least` neurons on, its home moved or not as `homes` say.
    fn hull(&self, device: usize, layer: usize, least: usize, homes: &[bool]) -> Vec<Choice> {
        let state = &self.layers[layer];
        let shape = self.layer(layer);
        let first = state.n_placed();
        let left = if shape.stays.is_some() { 0 } else { shape.n_ff - first };
        let mut choices = Vec::with_capacity(2 * GRID + 4);
        for &moves_home in homes {
            if moves_home && state.home != 0 {
                continue;
            }
            let step = left.div_ceil(GRID).max(1);
            let numbers = (least..left).step_by(step).chain([left]);
            choices.extend(numbers.map(|n| self.choice(device, layer, moves_home, n)));
        }
        choices.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.seconds.total_cmp(&b.seconds)));
        let mut hull: Vec<Choice> = Vec::new();
        for choice in choices {
            if hull.last().is_some_and(|last| choice.seconds >= last.seconds) {
                continue;
            }
            while let [.., a, b] = hull[..]
                && saved_per_byte(&a, &choice) >= saved_per_byte(&a, &b)
            {
                hull.pop();
            }
            hull.push(choice);
        }
        hull
    }

    /// Fills a device; what is to be said about it, and how far from the bound it ends.
    fn fill(&mut self, device: usize) -> (Vec<String>, f64) {
        let accelerator = &self.request.devices[device];
        let steps = self.step_bytes(device);
        let usable = accelerator.usable_bytes();
        let why_nothing = if usable == 0 {
            Some(match accelerator.budget {
                super::Budget::Bytes(0) => "the budget is 0".to_owned(),
                _ => format!(
                    "{} bytes are free, {} of them are left to the driver",
                    accelerator.free_bytes,
                    Accelerator::RESERVE_BYTES
                ),
            })
        } else {
            (usable < steps).then(|| {
                format!(
                    "a step of {} tokens works in {steps} bytes, {} more than the {usable} that may be used",
                    self.request.n_batch,
                    steps - usable
                )
            })
        };
        if let Some(reason) = why_nothing {
            self.take_nothing();
            return (vec![reason], 0.0);
        }
        let left = usable - steps;
        let hulls = self.hulls(device);
        let bound = self.bound(device, left, &hulls);
        self.take_best(device, left, &hulls);
        let gap = if bound > 0.0 { (self.token_seconds() / bound - 1.0).max(0.0) } else { 0.0 };
        (self.reasons(device, usable, left), gap)
    }

    /// Leaves a device empty.
    fn take_nothing(&mut self) {
        self.layers.iter_mut().for_each(|l| l.ends.push(l.n_placed()));
    }

    /// Takes the best of a few ways to fill a device. Hand-overs between homes belong to no step, so only whole ways show
    /// whether moving homes pays.
    fn take_best(&mut self, device: usize, left: u64, hulls: &[Hulls]) {
        let start = self.clone();
        self.take_nothing();
        let mut consider = |homes: Homes, with_head: bool| {
            let mut way = start.clone();
            let fits = way.take_steps(device, left, hulls, homes, with_head);
            if fits && way.token_seconds() < self.token_seconds() {
                self.clone_from(&way);
            }
            way.layers.iter().filter(|l| l.home == device + 1).count()
        };
        let n_moved = consider(Homes::WherePays, true);
        // The last home that did not fit may be worth some neurons, and the last that did less than others.
        for n in n_moved.saturating_sub(1)..=n_moved + 2 {
            consider(Homes::First(n), true);
            consider(Homes::First(n), false);
        }
        consider(Homes::First(0), true);
    }

    /// What is to be said about a device that has been filled.
    fn reasons(&self, device: usize, usable: u64, left: u64) -> Vec<String> {
        let mut reasons = Vec::new();
        let n_bytes = self.describe(device, Vec::new()).bytes.total();
        let is_all = self
            .layers
            .iter()
            .zip(&self.request.shape.layers)
            .all(|(l, s)| l.home > 0 && l.n_placed() == s.n_ff);
        if n_bytes == 0 {
            let smallest = self.smallest_part(device);
            reasons.push(if smallest > left {
                format!(
                    "the smallest part needs {smallest} bytes, {} more than the {left} that are left beside a step",
                    smallest - left
                )
            } else {
                "nothing that fits saves as much as its exchange with the host costs".to_owned()
            });
        } else if !is_all && usable - n_bytes > usable / 100 {
            reasons.push(format!(
                "{} are left empty: nothing more that fits there saves time",
                super::report::size(usable - n_bytes)
            ));
        }
        let stays: Vec<&String> =
            self.request.shape.layers.iter().filter_map(|layer| layer.stays.as_ref()).collect();
        if let Some(first) = stays.first() {
            reasons.push(format!("the neurons of {} layers stay on the host: {first}", stays.len()));
        }
        reasons
    }

    /// Bytes of the smallest part that could go to a device.
    fn smallest_part(&self, device: usize) -> u64 {
        let accelerator = &self.request.devices[device];
        let layers = self.request.shape.layers.iter().zip(&self.layers);
        let parts = layers.flat_map(|(shape, state)| {
            let has_neurons = shape.stays.is_none() && state.n_placed() < shape.n_ff;
            let home = [shape.dense_bytes, shape.predictor_bytes, self.kv_bytes(device)];
            let home = home.into_iter().map(|n| accelerator.buffer(n)).fold(0, u64::saturating_add);
            [has_neurons.then(|| accelerator.buffer(shape.neuron_bytes(1))), Some(home)]
        });
        parts.flatten().chain([self.head_bytes(device)]).filter(|&n| n > 0).min().unwrap_or(0)
    }

    /// The head as a step, what a byte saves and the bytes, if it saves anything.
    fn head_step(&self, device: usize) -> Option<(f64, u64)> {
        let bytes = self.head_bytes(device);
        let of_byte = 1.0 / self.dense_bandwidth(0) - 1.0 / self.dense_bandwidth(device + 1);
        let saved = self.request.shape.head_bytes as f64 * of_byte;
        (self.head == 0 && saved > 0.0).then_some((saved / bytes as f64, bytes))
    }

    /// The hulls of all layers.
    fn hulls(&self, device: usize) -> Vec<Hulls> {
        let hulls = |layer| Hulls {
            any: self.hull(device, layer, 0, &[false, true]),
            stays: self.hull(device, layer, 0, &[false]),
            moves: (self.layers[layer].home == 0).then(|| self.hull(device, layer, 0, &[true])),
        };
        (0..self.layers.len()).map(hulls).collect()
    }

    /// Seconds of a token that no way of filling a device is below.
    fn bound(&self, device: usize, left: u64, hulls: &[Hulls]) -> f64 {
        let now = self.token_seconds();
        let moved = now - self.most_saved(device, left, hulls.iter().map(|h| &h.any), true);
        if device > 0 {
            return moved;
        }
        // Either everything is at home on the host, or the residual stream goes to the device once at least.
        let stayed = now - self.most_saved(device, left, hulls.iter().map(|h| &h.stays), false);
        stayed.min(moved + self.transfers(device, 1, 0))
    }

    /// What `left` bytes save at most by steps of some hulls, and perhaps by the head: the linear relaxation.
    fn most_saved<'h>(
        &self,
        device: usize,
        left: u64,
        hulls: impl Iterator<Item = &'h Vec<Choice>>,
        with_head: bool,
    ) -> f64 {
        let mut steps: Vec<(f64, u64)> = self.head_step(device).into_iter().filter(|_| with_head).collect();
        for hull in hulls {
            steps.extend(hull.windows(2).map(|w| (saved_per_byte(&w[0], &w[1]), w[1].bytes - w[0].bytes)));
        }
        steps.sort_by(|a, b| b.0.total_cmp(&a.0));
        let (mut saved, mut left) = (0.0, left as f64);
        for (per_byte, bytes) in steps {
            saved += per_byte * left.min(bytes as f64);
            left = (left - bytes as f64).max(0.0);
        }
        saved
    }

    /// Takes the steps of all hulls, best first, as far as they fit into `left` bytes. A move of a home that does not
    /// fit is left out, and the layer goes on without; of neurons that do not fit, as many as do are taken. Says whether
    /// the homes that have to move fit.
    fn take_steps(
        &mut self,
        device: usize,
        mut left: u64,
        hulls: &[Hulls],
        homes: Homes,
        with_head: bool,
    ) -> bool {
        let n_layer = self.layers.len();
        // Best first, the first layer where they are equal.
        let mut queue = BinaryHeap::new();
        let mut now: Vec<Cow<'_, [Choice]>> = Vec::with_capacity(n_layer);
        let mut at = vec![0; n_layer];
        let push = |queue: &mut BinaryHeap<Queued>, hull: &[Choice], at: usize, layer: usize| {
            if at + 1 < hull.len() {
                queue.push(Queued { per_byte: saved_per_byte(&hull[at], &hull[at + 1]), layer });
            }
        };
        for (layer, hulls) in hulls.iter().enumerate() {
            let hull = match (homes, &hulls.moves) {
                (Homes::WherePays, _) => &hulls.any,
                (Homes::First(n), Some(moves)) if layer < n => moves,
                (Homes::First(_), _) => &hulls.stays,
            };
            let Some(rest) = left.checked_sub(hull[0].bytes) else { return false };
            left = rest;
            push(&mut queue, hull, 0, layer);
            now.push(Cow::Borrowed(hull));
        }
        if let Some((per_byte, _)) = self.head_step(device).filter(|_| with_head) {
            queue.push(Queued { per_byte, layer: n_layer });
        }
        while let Some(Queued { layer, .. }) = queue.pop() {
            if layer == n_layer {
                let bytes = self.head_bytes(device);
                if bytes <= left {
                    left -= bytes;
                    self.head = device + 1;
                }
                continue;
            }
            let (from, to) = (now[layer][at[layer]], now[layer][at[layer] + 1]);
            let bytes = to.bytes - from.bytes;
            if bytes <= left {
                left -= bytes;
                at[layer] += 1;
                push(&mut queue, &now[layer], at[layer], layer);
                continue;
            }
            if from.moves_home == to.moves_home {
                if let Some(part) = self.part_of(device, layer, from, to, left) {
                    left -= part.bytes - from.bytes;
                    now[layer] = Cow::Owned(vec![part]);
                    at[layer] = 0;
                }
            } else {
                now[layer] = Cow::Owned(self.hull(device, layer, from.n, &[from.moves_home]));
                at[layer] = 0;
                push(&mut queue, &now[layer], 0, layer);
            }
        }
        for (layer, state) in self.layers.iter_mut().enumerate() {
            let choice = now[layer][at[layer]];
            if choice.moves_home {
                state.home = device + 1;
            }
            state.ends.push(state.n_placed() + choice.n);
        }
        true
    }

    /// As many neurons of a step as fit into `left` bytes, if they save anything.
    fn part_of(&self, device: usize, layer: usize, from: Choice, to: Choice, left: u64) -> Option<Choice> {
        let choice = |n| self.choice(device, layer, to.moves_home, n);
        let (mut low, mut high) = (from.n, to.n);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if choice(middle).bytes - from.bytes <= left { low = middle } else { high = middle - 1 }
        }
        Some(choice(low)).filter(|choice| choice.seconds < from.seconds)
    }

    fn describe(&self, device: usize, reasons: Vec<String>) -> DevicePlan {
        let accelerator = &self.request.devices[device];
        let shape = self.request.shape;
        let mut bytes = PartBytes::default();
        let (mut n_homes, mut n_neurons) = (0, 0);
        let (mut active, mut all_active) = (0.0, 0.0);
        for (layer, state) in self.layers.iter().enumerate() {
            let layer_shape = self.layer(layer);
            let (from, to) = self.range(state, device);
            n_neurons += to - from;
            bytes.neurons += accelerator.buffer(layer_shape.neuron_bytes(to - from));
            active += self.request.rates.sum(layer, from, to);
            all_active += self.request.rates.sum(layer, 0, layer_shape.n_ff);
            if state.home == device + 1 {
                n_homes += 1;
                bytes.dense += accelerator.buffer(layer_shape.dense_bytes);
                bytes.predictors += accelerator.buffer(layer_shape.predictor_bytes);
                bytes.kv = bytes.kv.saturating_add(accelerator.buffer(self.kv_bytes(device)));
            }
        }
        let has_head = self.head == device + 1;
        if has_head {
            bytes.head = self.head_bytes(device);
        }
        if bytes.total() > 0 {
            bytes.steps = self.step_bytes(device);
        }
        DevicePlan {
            name: accelerator.name.clone(),
            usable_bytes: accelerator.usable_bytes(),
            bytes,
            n_homes,
            has_head,
            n_neurons,
            of_neurons: shape.layers.iter().map(|layer| layer.n_ff).sum(),
            active_share: if all_active > 0.0 { active / all_active } else { 0.0 },
            reasons,
        }
    }

    /// The neurons of a layer on a device, hottest first.
    fn range(&self, state: &LayerState, device: usize) -> (usize, usize) {
        let from = if device > 0 { state.ends[device - 1] } else { 0 };
        (from, state.ends[device])
    }

    fn assignment(&self) -> Assignment {
        let layers = self.layers.iter().enumerate().map(|(layer, state)| {
            let n_ff = self.layer(layer).n_ff;
            let order = self.request.rates.order(layer);
            let set = |(from, to): (usize, usize)| {
                NeuronSet::from_ids(n_ff, order[from..to].iter().copied().map(NeuronId))
            };
            let last = state.n_placed();
            let devices = (0..self.request.devices.len()).map(|device| set(self.range(state, device)));
            let owned = std::iter::once(set((last, n_ff))).chain(devices).collect();
            LayerAssignment { home: state.home, owned }
        });
        Assignment { embed: 0, head: self.head, layers: layers.collect() }
    }
}

/// A step that may be taken next.
#[derive(Clone, Copy, Debug)]
struct Queued {
    per_byte: f64,
    layer: usize,
}

impl Ord for Queued {
    fn cmp(&self, other: &Self) -> Ordering {
        self.per_byte.total_cmp(&other.per_byte).then(other.layer.cmp(&self.layer))
    }
}

impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Queued {}

fn saved_per_byte(from: &Choice, to: &Choice) -> f64 {
    (from.seconds - to.seconds) / ((to.bytes - from.bytes).max(1)) as f64
}
