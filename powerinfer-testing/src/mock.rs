//! A device without hardware: memory of its own with a limit, work that ends as late as it may, and a clock that counts
//! what a real one would take.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{
    ActiveBatch, BackendError, BackendInfo, BlockKind, DensePart, DownWeights, FfnInput, FfnWeights,
    HybridBackend, LayerId, ModelSpec, NeuronId, NeuronSet, PredictorWeights, SeqId, Step, StepCost, Ticket,
    WeightBytes, WeightMatrix,
};

/// What a [`MockDevice`] has allocated, seen from outside.
#[derive(Debug, Default)]
pub struct Account {
    used: AtomicU64,
    peak: AtomicU64,
    /// For each layer and neuron.
    asked: Mutex<Vec<Vec<u64>>>,
}

impl Account {
    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    /// Most bytes that were ever in use.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::SeqCst)
    }

    /// How many tokens had each neuron of a layer in the active set that came with them, held or not, `[n_ff]`; empty
    /// for a layer that the device was never asked about.
    pub fn asked(&self, layer: LayerId) -> Vec<u64> {
        let asked = self.asked.lock().expect("nobody panics while counting");
        asked.get(layer.index()).cloned().unwrap_or_default()
    }

    fn ask(&self, layer: LayerId, active: &ActiveBatch) {
        let mut asked = self.asked.lock().expect("nobody panics while counting");
        let n_layer = asked.len().max(layer.index() + 1);
        asked.resize_with(n_layer, Vec::new);
        let counts = &mut asked[layer.index()];
        counts.resize(active.n_ff(), 0);
        for row in 0..active.n_rows() {
            for (id, count) in (0..).map(NeuronId).zip(counts.iter_mut()) {
                *count += u64::from(active.contains(row, id));
            }
        }
    }

    fn take(&self, n_bytes: u64) {
        let used = self.used.fetch_add(n_bytes, Ordering::SeqCst) + n_bytes;
        self.peak.fetch_max(used, Ordering::SeqCst);
    }

    fn give_back(&self, n_bytes: u64) {
        self.used.fetch_sub(n_bytes, Ordering::SeqCst);
    }
}

/// Time that passes by the bytes that are read and moved, shared by the backends of one engine. The thread that calls
/// them lives on it; what is asynchronous runs beside it.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// Nanoseconds since the beginning.
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn advance(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::SeqCst);
    }

    /// Waits until `ns`, if that is not past.
    fn wait(&self, ns: u64) {
        self.0.fetch_max(ns, Ordering::SeqCst);
    }
}

/// How fast a backend is.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// Bytes of weights and keys read in a nanosecond (GB/s).
    pub memory: f64,
    /// Bytes moved to and from it in a nanosecond.
    pub link: f64,
    /// Nanoseconds of a transfer of any size.
    pub latency_ns: u64,
    /// Whether its FFN work runs beside the caller.
    pub asynchronous: bool,
}

/// A backend whose calls take the time that [`Speed`] says, on a shared [`Clock`].
pub struct Timed {
    inner: Box<dyn HybridBackend>,
    speed: Speed,
    clock: Clock,
    /// When the work that was started on it ends.
    busy_until: u64,
    /// Cost since the last `take_cost`.
    cost: StepCost,
    n_embd: usize,
}

impl std::fmt::Debug for Timed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Timed").field("speed", &self.speed).finish_non_exhaustive()
    }
}

impl Timed {
    /// `inner`, which must have taken no step yet, at a speed.
    pub fn new(inner: Box<dyn HybridBackend>, spec: &ModelSpec, speed: Speed, clock: Clock) -> Self {
        Self { inner, speed, clock, busy_until: 0, cost: StepCost::default(), n_embd: spec.n_embd }
    }

    /// Nanoseconds that the work since the last call takes.
    fn work(&mut self) -> u64 {
        let cost = self.inner.take_cost();
        self.cost += cost;
        ((cost.weight_bytes + cost.kv_bytes) as f64 / self.speed.memory) as u64
    }

    fn transfer(&self, n_bytes: usize) -> u64 {
        self.speed.latency_ns + (n_bytes as f64 / self.speed.link) as u64
    }

    /// The caller waits for a call.
    fn call<T>(&mut self, call: impl FnOnce(&mut dyn HybridBackend) -> T) -> T {
        self.clock.wait(self.busy_until);
        let result = call(self.inner.as_mut());
        let ns = self.work();
        self.clock.advance(ns);
        result
    }
}

impl HybridBackend for Timed {
    fn info(&self) -> BackendInfo {
        BackendInfo { asynchronous: self.speed.asynchronous, ..self.inner.info() }
    }

    fn load_dense(&mut self, part: DensePart) -> Result<(), BackendError> {
        self.inner.load_dense(part)
    }

    fn load_ffn(
        &mut self,
        layer: LayerId,
        weights: FfnWeights,
        owned: &NeuronSet,
    ) -> Result<(), BackendError> {
        self.inner.load_ffn(layer, weights, owned)
    }

    /// The copy runs beside the caller; what is started later waits for it.
    fn swap_neurons(
        &mut self,
        layer: LayerId,
        weights: &FfnWeights,
        leave: &[NeuronId],
        enter: &[NeuronId],
    ) -> bool {
        let swapped = self.inner.swap_neurons(layer, weights, leave, enter);
        let cost = self.inner.take_cost();
        self.cost += cost;
        if cost.swapped_bytes > 0 {
            let ns = self.transfer(cost.swapped_bytes as usize);
            self.busy_until = self.busy_until.max(self.clock.now()) + ns;
        }
        swapped
    }

    fn load_predictor(&mut self, layer: LayerId, weights: PredictorWeights) -> Result<(), BackendError> {
        self.inner.load_predictor(layer, weights)
    }

    fn load_done(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), BackendError> {
        self.inner.load_done(progress)
    }

    fn reserve(&mut self, seq: SeqId, kv_len: usize, max_rows: usize) -> Result<(), BackendError> {
        self.inner.reserve(seq, kv_len, max_rows)
    }

    fn kv_copy(&mut self, from: SeqId, to: SeqId, range: Range<u32>) {
        self.inner.kv_copy(from, to, range);
    }

    fn release(&mut self, seq: SeqId) {
        self.inner.release(seq);
    }

    fn embed(&mut self, step: &Step<'_>) {
        self.call(|b| b.embed(step));
    }

    fn set_hidden(&mut self, step: &Step<'_>, h: &[f32]) {
        self.clock.advance(self.transfer(4 * h.len()));
        self.call(|b| b.set_hidden(step, h));
    }

    fn whole_layer(&mut self, layer: LayerId, step: &Step<'_>) -> bool {
        self.call(|b| b.whole_layer(layer, step))
    }

    fn attend(&mut self, layer: LayerId, step: &Step<'_>) {
        self.call(|b| b.attend(layer, step));
    }

    fn ffn_input(&mut self, layer: LayerId, step: &Step<'_>, out: &mut FfnInput) {
        self.call(|b| b.ffn_input(layer, step, out));
    }

    fn ffn_start(&mut self, layer: LayerId, input: &FfnInput) -> Ticket {
        let ticket = self.inner.ffn_start(layer, input);
        let ns = self.work();
        if self.speed.asynchronous {
            let arrives =
                self.clock.now() + self.transfer(4 * input.x.len() + 8 * input.active.words().len());
            self.busy_until = self.busy_until.max(arrives) + ns;
        } else {
            self.clock.advance(ns);
        }
        ticket
    }

    fn ffn_finish(&mut self, ticket: Ticket, acc: &mut [f32]) {
        if self.speed.asynchronous {
            self.clock.wait(self.busy_until);
            self.clock.advance(self.transfer(4 * ticket.n_rows * self.n_embd));
        }
        self.inner.ffn_finish(ticket, acc);
    }

    fn ffn_add(&mut self, layer: LayerId, acc: &[f32]) {
        self.inner.ffn_add(layer, acc);
    }

    fn head(&mut self, rows: Range<usize>, logits: &mut [f32]) {
        self.call(|b| b.head(rows, logits));
    }

    fn hidden(&self, out: &mut [f32]) {
        self.clock.advance(self.transfer(4 * out.len()));
        self.inner.hidden(out);
    }

    fn record_fired(&mut self, on: bool) {
        self.inner.record_fired(on);
    }

    fn take_fired(&mut self, layer: LayerId, counts: &mut [u64]) -> bool {
        self.inner.take_fired(layer, counts)
    }

    fn take_fired_by_row(&mut self, layer: LayerId, counts: &mut [u32]) -> bool {
        self.inner.take_fired_by_row(layer, counts)
    }

    fn take_cost(&mut self) -> StepCost {
        std::mem::take(&mut self.cost)
    }
}

/// How a [`MockDevice`] behaves.
#[derive(Clone, Debug, Default)]
pub struct MockOptions {
    /// Bytes of its memory; `None` for no limit.
    pub memory_bytes: Option<u64>,
    /// Compute in `ffn_finish` what `ffn_start` was given, as a device that is late does; otherwise at once.
    pub late: bool,
}

/// Every allocation is a multiple of this.
const ALIGN: u64 = 256;

/// An accelerator in host memory. It computes as the reference backend does, on copies of the rows that it holds; every
/// other row of its copies is no number, so that one read too many shows in the logits. `x`, active bits and sums are
/// copied in and out and counted.
#[derive(Debug)]
pub struct MockDevice {
    spec: Arc<ModelSpec>,
    inner: ReferenceBackend,
    options: MockOptions,
    account: Arc<Account>,
    /// Bytes of this device; other devices may have the same account.
    used: u64,
    homes: Vec<bool>,
    owned: Vec<NeuronSet>,
    has_head: bool,
    sequences: Vec<(SeqId, u64)>,
    scratch: u64,
    /// Copies of inputs that wait for their `ffn_finish`, and tickets of the inner backend.
    started: Vec<Started>,
    next_slot: u32,
    traffic: StepCost,
    only_sums: bool,
}

#[derive(Debug)]
struct Started {
    slot: u32,
    work: Work,
}

#[derive(Debug)]
enum Work {
    Waiting(FfnInput),
    Done(Ticket),
}

impl MockDevice {
    /// A device that holds nothing yet.
    pub fn new(spec: Arc<ModelSpec>, options: MockOptions, account: Arc<Account>) -> Self {
        Self {
            inner: ReferenceBackend::new(Arc::clone(&spec), Rounding::None),
            homes: vec![false; spec.n_layer],
            owned: spec.n_ff.iter().map(|&n_ff| NeuronSet::none(n_ff)).collect(),
            has_head: false,
            spec,
            options,
            account,
            used: 0,
            sequences: Vec::new(),
            scratch: 0,
            started: Vec::new(),
            next_slot: 0,
            traffic: StepCost::default(),
            only_sums: false,
        }
    }

    /// The same device, which knows how often neurons fired only as sums over the rows of a step.
    #[must_use]
    pub fn with_only_sums(mut self) -> Self {
        self.only_sums = true;
        self
    }

    fn allocate(&mut self, what: &str, parts: impl IntoIterator<Item = u64>) -> Result<u64, BackendError> {
        let need = parts.into_iter().map(|n| n.next_multiple_of(ALIGN)).sum::<u64>();
        let left = self.options.memory_bytes.map_or(u64::MAX, |limit| limit - self.used);
        if need > left {
            return Err(BackendError::OutOfMemory {
                backend: "mock".into(),
                what: what.to_owned(),
                need_bytes: need,
                have_bytes: left,
            });
        }
        self.used += need;
        self.account.take(need);
        Ok(need)
    }

    fn free(&mut self, n_bytes: u64) {
        self.used -= n_bytes;
        self.account.give_back(n_bytes);
    }

    /// Bytes that a step of `max_rows` works in.
    fn scratch_parts(&self, max_rows: usize) -> Vec<u64> {
        let (spec, rows) = (&*self.spec, max_rows as u64);
        let floats = |n: usize| 4 * rows * n as u64;
        // x, active bits and the partial sum of an owner.
        let mut parts = vec![
            floats(spec.n_embd),
            8 * rows * spec.max_n_ff().div_ceil(64) as u64,
            floats(spec.n_embd),
            floats(spec.max_n_ff()),
        ];
        if self.homes.contains(&true) || self.has_head {
            parts.push(floats(spec.n_embd));
        }
        if self.homes.contains(&true) {
            parts.extend([floats(spec.q_dim() + 2 * spec.kv_dim()), floats(spec.q_dim())]);
        }
        if self.has_head {
            parts.push(floats(spec.n_vocab));
        }
        parts
    }

    /// Gives copies of the rows of `owned` to the inner backend.
    fn hold(&mut self, layer: LayerId, weights: &FfnWeights, owned: &NeuronSet) -> Result<(), BackendError> {
        self.owned[layer.index()] = owned.clone();
        let copies = FfnWeights {
            gate: weights.gate.as_ref().map(|m| poisoned(m, owned)),
            up: poisoned(&weights.up, owned),
            down: match &weights.down {
                DownWeights::ByNeuron(m) => DownWeights::ByNeuron(poisoned(m, owned)),
                by_output @ DownWeights::ByOutput(_) => by_output.clone(),
            },
            up_bias: weights.up_bias.clone(),
        };
        self.inner.load_ffn(layer, copies, owned)
    }

    fn start(&mut self, layer: LayerId, input: &FfnInput) -> Work {
        if self.options.late {
            Work::Waiting(input.clone())
        } else {
            Work::Done(self.inner.ffn_start(layer, input))
        }
    }
}

impl Drop for MockDevice {
    fn drop(&mut self) {
        self.account.give_back(self.used);
    }
}

/// The rows of `owned` copied, and bytes that make no number where other rows were.
fn poisoned(matrix: &WeightMatrix, owned: &NeuronSet) -> WeightMatrix {
    let mut bytes = vec![0xFF; matrix.n_bytes()];
    for id in owned.ids() {
        let at = id.index() * matrix.row_bytes();
        bytes[at..at + matrix.row_bytes()].copy_from_slice(matrix.row(id.index()));
    }
    WeightMatrix::try_new(
        matrix.name(),
        matrix.ty(),
        matrix.n_rows(),
        matrix.n_cols(),
        WeightBytes::from_vec(bytes),
    )
    .expect("the shape of a matrix that is one")
}

impl HybridBackend for MockDevice {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "mock".into(),
            description: "a device in host memory".into(),
            memory_bytes: self.options.memory_bytes,
            asynchronous: true,
        }
    }

    fn load_dense(&mut self, part: DensePart) -> Result<(), BackendError> {
        let matrices: Vec<u64> = part.matrices().map(|m| m.n_bytes() as u64).collect();
        let vectors: Vec<usize> = match &part {
            DensePart::Embedding(_) => vec![],
            DensePart::Layer(_, w) => {
                let norms = [Some(&w.attn_norm), w.attn_norm_2.as_ref(), w.ffn_norm.as_ref()];
                let norms = norms
                    .into_iter()
                    .flatten()
                    .flat_map(|n| [Some(n.weight.len()), n.bias.as_ref().map(Vec::len)]);
                let biases = [&w.q, &w.k, &w.v, &w.output].map(|l| l.bias.as_ref().map(Vec::len));
                norms.chain(biases).chain([w.ffn_down_bias.as_ref().map(Vec::len)]).flatten().collect()
            }
            DensePart::Head(w) => [Some(w.norm.weight.len()), w.norm.bias.as_ref().map(Vec::len)]
                .into_iter()
                .flatten()
                .collect(),
        };
        self.allocate(
            "dense weights",
            matrices.into_iter().chain(vectors.into_iter().map(|n| 4 * n as u64)),
        )?;
        match &part {
            DensePart::Layer(layer, _) => self.homes[layer.index()] = true,
            DensePart::Head(_) => self.has_head = true,
            DensePart::Embedding(_) => {}
        }
        self.inner.load_dense(part)
    }

    fn load_ffn(
        &mut self,
        layer: LayerId,
        weights: FfnWeights,
        owned: &NeuronSet,
    ) -> Result<(), BackendError> {
        let n = owned.len();
        let mut parts: Vec<u64> = vec![4 * n as u64];
        parts.extend(weights.gate.iter().chain([&weights.up]).map(|m| (n * m.row_bytes()) as u64));
        parts.extend(weights.up_bias.iter().map(|_| 4 * n as u64));
        parts.push(match &weights.down {
            DownWeights::ByNeuron(m) => (n * m.row_bytes()) as u64,
            DownWeights::ByOutput(m) => m.n_bytes() as u64,
        });
        self.allocate("neurons", parts)?;
        self.hold(layer, &weights, owned)
    }

    fn swap_neurons(
        &mut self,
        layer: LayerId,
        weights: &FfnWeights,
        leave: &[NeuronId],
        enter: &[NeuronId],
    ) -> bool {
        let old = &self.owned[layer.index()];
        assert!(leave.len() == enter.len() && leave.iter().all(|id| old.contains(*id)), "{leave:?} are held");
        let ids = old.ids().iter().copied().filter(|id| !leave.contains(id)).chain(enter.iter().copied());
        let owned = NeuronSet::from_ids(old.n_ff(), ids);
        assert_eq!(owned.len(), old.len(), "{enter:?} are not held");
        let row_bytes: usize = weights.matrices().map(|m| m.n_bytes() / old.n_ff()).sum();
        self.traffic.swapped_bytes += (enter.len() * row_bytes) as u64;
        self.hold(layer, weights, &owned).expect("weights that were taken before");
        true
    }

    fn load_predictor(&mut self, layer: LayerId, weights: PredictorWeights) -> Result<(), BackendError> {
        self.allocate("a predictor", [weights.n_bytes() as u64])?;
        self.inner.load_predictor(layer, weights)
    }

    fn reserve(&mut self, seq: SeqId, kv_len: usize, max_rows: usize) -> Result<(), BackendError> {
        let n_homes = self.homes.iter().filter(|&&is_home| is_home).count();
        let row_bytes = (2 * self.spec.kv_dim()) as u64;
        let want: Vec<u64> = (0..2 * n_homes).map(|_| kv_len as u64 * row_bytes).collect();
        let at = self.sequences.iter().position(|(id, _)| *id == seq).unwrap_or_else(|| {
            self.sequences.push((seq, 0));
            self.sequences.len() - 1
        });
        let rounded: u64 = want.iter().map(|n| n.next_multiple_of(ALIGN)).sum();
        if rounded > self.sequences[at].1 {
            let old = std::mem::take(&mut self.sequences[at].1);
            self.free(old);
            self.sequences[at].1 = self.allocate("keys and values", want)?;
        }
        let parts = self.scratch_parts(max_rows);
        let rounded: u64 = parts.iter().map(|n| n.next_multiple_of(ALIGN)).sum();
        if rounded > self.scratch {
            let old = std::mem::take(&mut self.scratch);
            self.free(old);
            self.scratch = self.allocate("steps", parts)?;
        }
        self.inner.reserve(seq, kv_len, max_rows)
    }

    fn kv_copy(&mut self, from: SeqId, to: SeqId, range: Range<u32>) {
        self.inner.kv_copy(from, to, range);
    }

    fn release(&mut self, seq: SeqId) {
        if let Some(at) = self.sequences.iter().position(|(id, _)| *id == seq) {
            let (_, n_bytes) = self.sequences.swap_remove(at);
            self.free(n_bytes);
        }
        self.inner.release(seq);
    }

    fn embed(&mut self, step: &Step<'_>) {
        self.inner.embed(step);
    }

    fn set_hidden(&mut self, step: &Step<'_>, h: &[f32]) {
        self.traffic.bytes_in += 4 * h.len() as u64;
        self.inner.set_hidden(step, h);
    }

    /// Nothing is counted as moved, since nothing leaves the device.
    fn whole_layer(&mut self, layer: LayerId, step: &Step<'_>) -> bool {
        let mut input = FfnInput::default();
        if self.spec.block == BlockKind::Parallel {
            self.inner.ffn_input(layer, step, &mut input);
            self.inner.attend(layer, step);
        } else {
            self.inner.attend(layer, step);
            self.inner.ffn_input(layer, step, &mut input);
        }
        let ticket = self.inner.ffn_start(layer, &input);
        let mut sum = vec![0.0; input.x.len()];
        self.inner.ffn_close(ticket, &mut sum);
        true
    }

    fn attend(&mut self, layer: LayerId, step: &Step<'_>) {
        self.inner.attend(layer, step);
    }

    fn ffn_input(&mut self, layer: LayerId, step: &Step<'_>, out: &mut FfnInput) {
        self.inner.ffn_input(layer, step, out);
        self.traffic.bytes_out += 4 * out.x.len() as u64 + 8 * out.active.words().len() as u64;
    }

    fn ffn_start(&mut self, layer: LayerId, input: &FfnInput) -> Ticket {
        self.account.ask(layer, &input.active);
        // What was computed here is here.
        if !self.homes[layer.index()] {
            self.traffic.bytes_in += 4 * input.x.len() as u64 + 8 * input.active.words().len() as u64;
        }
        let slot = self.next_slot;
        self.next_slot = slot.wrapping_add(1);
        let work = self.start(layer, input);
        self.started.push(Started { slot, work });
        Ticket { layer, n_rows: input.active.n_rows(), slot }
    }

    fn ffn_finish(&mut self, ticket: Ticket, acc: &mut [f32]) {
        let at = self.started.iter().position(|started| started.slot == ticket.slot);
        let at = at.expect("a ticket is finished once, where it was made");
        let inner = match self.started.swap_remove(at).work {
            Work::Waiting(input) => self.inner.ffn_start(ticket.layer, &input),
            Work::Done(inner) => inner,
        };
        if !self.homes[ticket.layer.index()] {
            self.traffic.bytes_out += 4 * acc.len() as u64;
        }
        self.inner.ffn_finish(inner, acc);
    }

    fn ffn_add(&mut self, layer: LayerId, acc: &[f32]) {
        self.traffic.bytes_in += 4 * acc.len() as u64;
        self.inner.ffn_add(layer, acc);
    }

    fn head(&mut self, rows: Range<usize>, logits: &mut [f32]) {
        self.traffic.bytes_out += 4 * logits.len() as u64;
        self.inner.head(rows, logits);
    }

    fn hidden(&self, out: &mut [f32]) {
        self.inner.hidden(out);
    }

    fn record_fired(&mut self, on: bool) {
        self.inner.record_fired(on);
    }

    fn take_fired(&mut self, layer: LayerId, counts: &mut [u64]) -> bool {
        self.inner.take_fired(layer, counts)
    }

    fn take_fired_by_row(&mut self, layer: LayerId, counts: &mut [u32]) -> bool {
        !self.only_sums && self.inner.take_fired_by_row(layer, counts)
    }

    fn take_cost(&mut self) -> StepCost {
        let mut cost = std::mem::take(&mut self.traffic);
        cost += self.inner.take_cost();
        cost
    }
}
