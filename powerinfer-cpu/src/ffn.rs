//! The FFN: neurons in blocks of 32, gate before up before down.
//!
//! **Down by neuron.** Block `b` belongs to chunk `b mod 32`, whatever the number of threads. A chunk adds its
//! neurons in ascending order into a sum of its own, and the sums of the chunks are added in order, so the bits
//! depend on the neurons alone. A neuron whose hidden value is zero adds zero, so leaving it out changes nothing.
//!
//! A Q8_0 down projection of a ReLU model that lies by output is turned once, at load ([`RelaidDown`]).
//!
//! **Down by output.** The hidden vector of all neurons is completed first and goes through an ordinary product.
//!
//! From [`gemm::MIN_ROWS`] rows on, where there are kernels for it, all neurons are computed for all rows, and the
//! hidden values of those that are not wanted become zero: which neurons a row wants hardly matters when together the
//! rows want all of them. The bits are those of a row alone.
//!
//! One row alone goes through list by list: the neurons of a chunk that it wants, their gates, then what is left of
//! them. Where it wants all neurons of a layer with a [`Certificate`], that is asked first which of their gates need be
//! computed. A batch goes through in tiles of 16 rows, each row as if it were alone.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use powerinfer_sparse_ops::{
    ActiveMode, DownWeights, FfnInput, FfnWeights, Gating, ModelSpec, NeuronId, NeuronSet, StepCost,
    WeightMatrix, WeightType,
};

use crate::certificate::{Certificate, CertifiedBuffers, CertifiedInput};
use crate::input::{Forms, Input, InputBuffers};
use crate::kernel::gemm;
use crate::kernel::{AXPY_ROWS, Asks, axpy, axpy_scaled, dot_list, dot_list_asking, dot_rows, worth_asking};
use crate::level::CpuLevel;
use crate::matmul::{Cpu, matmul};
use crate::ops::add;
use crate::pool::Pool;
use crate::relaid::{BLOCK, RelaidDown};
use crate::rows::{Filled, Planned, PlannedCertificate, PlannedTurned, Planner, Rows, Source};

/// Chunks that neurons are dealt out to. Enough that 12 or 24 threads get nearly equal shares, few enough that
/// adding up the sums is small beside the weights (32 · 16 KiB for 4096 wide models).
const CHUNKS: usize = 32;

/// Rows of a tile: the sums of a chunk, 16 · 16 KiB for 4096 wide models, stay in the second level cache.
const TILE_ROWS: usize = 16;

/// Columns of a piece when the sums of the chunks are added.
const REDUCE_COLUMNS: usize = 512;

/// Neurons of a list: enough that the memory can be asked for the next rows while these are computed, few enough for
/// the stack.
const LIST: usize = 128;

/// Neurons of a list whose rows are computed together: few enough that their rows and those of the next ones stay in the
/// caches, enough that asking the memory for them can be spread.
const FLOW: usize = 16;

/// Slices that are asked for at a time: up and down rows of as many neurons, and as many first rows.
type FlowAsks<'a> = Asks<'a, { 3 * FLOW }>;

const GATE: u8 = 1;
const UP: u8 = 2;
const DOWN: u8 = 4;

/// The neurons of one layer that are held.
#[derive(Debug)]
pub(crate) struct LayerFfn {
    gate: Option<Rows>,
    certificate: Option<Certificate>,
    up: Rows,
    up_bias: Option<Vec<f32>>,
    down: Down,
    /// Of the rows here, those whose neurons are held.
    owned: NeuronSet,
    /// If there are rows for some neurons of the layer only: which.
    gathered: Option<NeuronSet>,
    /// `None` while nobody counts.
    fired: Option<Fired>,
}

/// What fired since counting began.
#[derive(Debug)]
struct Fired {
    /// For how many rows each neuron, `[rows of the matrices]`.
    by_neuron: Box<[AtomicU64]>,
    /// How many neurons for each row of the last step, `[max_rows]`.
    by_row: Box<[AtomicU32]>,
    n_rows: AtomicUsize,
}

#[derive(Debug)]
enum Down {
    ByNeuron(Rows),
    Relaid(RelaidDown),
    ByOutput(Rows),
}

/// A layer whose weights have a place in memory but are not there yet.
#[derive(Debug)]
pub(crate) struct PlannedFfn {
    gate: Option<Planned>,
    /// The gate, if there can be a certificate for it.
    certifiable: Option<Source>,
    certificate: Option<PlannedCertificate>,
    up: Planned,
    up_bias: Option<Vec<f32>>,
    down: PlannedDown,
    owned: NeuronSet,
    gathered: Option<NeuronSet>,
}

#[derive(Debug)]
enum PlannedDown {
    ByNeuron(Planned),
    Relaid(PlannedTurned),
    ByOutput(Planned),
}

impl PlannedFfn {
    /// Gates lie together, since they are read one after the other when there is no predictor; what else a neuron
    /// has lies together behind them, since it is read if the gate is open. Where the down projection lies by neuron,
    /// only the rows of neurons that are held get a place.
    pub(crate) fn new(
        planner: &mut Planner,
        spec: &ModelSpec,
        weights: FfnWeights,
        owned: NeuronSet,
    ) -> Self {
        let FfnWeights { gate, up, up_bias, down } = weights;
        let gathers = !owned.is_all() && matches!(down, DownWeights::ByNeuron(_));
        let (owned, gathered) =
            if gathers { (NeuronSet::all(owned.len()), Some(owned)) } else { (owned, None) };
        let ids: Option<Arc<[NeuronId]>> = gathered.as_ref().map(|owned| owned.ids().into());
        let source = |matrix: &WeightMatrix| match &ids {
            None => Source::from(matrix),
            Some(ids) => Source::gathered(matrix, Arc::clone(ids)),
        };
        let up_bias = match &ids {
            None => up_bias,
            Some(ids) => up_bias.map(|bias| ids.iter().map(|id| bias[id.index()]).collect()),
        };
        let gate = gate.as_ref().map(source);
        let certifiable = gate
            .clone()
            .filter(|gate| Certificate::exists_for(gate.matrix()))
            .filter(|_| spec.activation.has_exact_zeros());
        let gate = gate.map(|gate| planner.matrix(gate));
        let (up, down) = match down {
            DownWeights::ByNeuron(down) => {
                let planned = planner.neurons([source(&up)], Some(source(&down)));
                (planned[0], PlannedDown::ByNeuron(planned[1]))
            }
            DownWeights::ByOutput(w) => {
                let up = planner.matrix(&up);
                let turns = w.ty() == WeightType::Q8_0 && spec.activation.has_exact_zeros();
                let down = if turns {
                    PlannedDown::Relaid(planner.turned(&w))
                } else {
                    PlannedDown::ByOutput(planner.matrix(&w))
                };
                (up, down)
            }
        };
        Self { gate, certifiable, certificate: None, up, up_bias, down, owned, gathered }
    }

    /// The gate, if there can be a certificate for it.
    pub(crate) fn certifiable(&self) -> Option<&Source> {
        self.certifiable.as_ref()
    }

    /// Plans a certificate, if there can be one.
    pub(crate) fn certify(&mut self, planner: &mut Planner) {
        self.certificate = self.certifiable.as_ref().map(|gate| planner.certificate(gate));
    }

    pub(crate) fn filled(self, filled: &Filled) -> LayerFfn {
        LayerFfn {
            gate: self.gate.map(|gate| filled.rows(gate)),
            certificate: self.certificate.map(|certificate| filled.certificate(certificate)),
            up: filled.rows(self.up),
            up_bias: self.up_bias,
            down: match self.down {
                PlannedDown::ByNeuron(down) => Down::ByNeuron(filled.rows(down)),
                PlannedDown::Relaid(down) => Down::Relaid(filled.relaid(down)),
                PlannedDown::ByOutput(down) => Down::ByOutput(filled.rows(down)),
            },
            owned: self.owned,
            gathered: self.gathered,
            fired: None,
        }
    }

    pub(crate) fn is_relaid(&self) -> bool {
        matches!(self.down, PlannedDown::Relaid(_))
    }
}

impl LayerFfn {
    /// The neurons of the layer that there are rows for, if not for all: what is computed with them gets the active
    /// sets as [`ActiveBatch::select`](powerinfer_sparse_ops::ActiveBatch::select) makes them.
    pub(crate) fn gathered(&self) -> Option<&NeuronSet> {
        self.gathered.as_ref()
    }

    /// Begins or ends counting which neurons fire.
    pub(crate) fn record_fired(&mut self, on: bool, max_rows: usize) {
        self.fired = on.then(|| Fired {
            by_neuron: (0..self.n_ff()).map(|_| AtomicU64::new(0)).collect(),
            by_row: (0..max_rows).map(|_| AtomicU32::new(0)).collect(),
            n_rows: AtomicUsize::new(0),
        });
    }

    /// Adds what was counted to `counts [n_ff]` of the whole layer; says whether there was counting.
    pub(crate) fn take_fired(&mut self, counts: &mut [u64]) -> bool {
        let Some(fired) = &mut self.fired else { return false };
        for (i, n) in fired.by_neuron.iter_mut().enumerate() {
            let neuron = self.gathered.as_ref().map_or(i, |of| of.ids()[i].index());
            counts[neuron] += std::mem::take(n.get_mut());
        }
        true
    }

    /// Adds what was counted for each row of the last step to `counts [n_rows]`; says whether there was counting.
    pub(crate) fn take_fired_by_row(&mut self, counts: &mut [u32]) -> bool {
        let Some(fired) = &mut self.fired else { return false };
        assert_eq!(counts.len(), *fired.n_rows.get_mut(), "rows of the last step");
        counts.iter_mut().zip(&mut fired.by_row).for_each(|(to, n)| *to += std::mem::take(n.get_mut()));
        true
    }

    /// Makes room to count for steps of `max_rows`, if there is counting.
    pub(crate) fn make_room(&mut self, max_rows: usize) {
        if let Some(fired) = &mut self.fired
            && fired.by_row.len() < max_rows
        {
            fired.by_row = (0..max_rows).map(|_| AtomicU32::new(0)).collect();
        }
    }

    /// Begins to count for the rows of another step.
    fn note_step(&self, n_rows: usize) {
        if let Some(fired) = &self.fired {
            fired.n_rows.store(n_rows, Ordering::Relaxed);
            fired.by_row[..n_rows].iter().for_each(|n| n.store(0, Ordering::Relaxed));
        }
    }

    /// Notes whether a neuron fired.
    #[inline]
    fn note(&self, neuron: usize, value: f32) {
        if let Some(fired) = &self.fired
            && value != 0.0
        {
            fired.by_neuron[neuron].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes that so many more neurons fired for a row.
    #[inline]
    fn note_row(&self, row: usize, n_fired: usize) {
        if let Some(fired) = &self.fired {
            fired.by_row[row].fetch_add(n_fired as u32, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_by_output(&self) -> bool {
        matches!(self.down, Down::ByOutput(_))
    }

    fn n_ff(&self) -> usize {
        self.up.n_rows()
    }

    /// Whether batches can be taken all neurons at a time.
    fn has_gemm(&self, level: CpuLevel) -> bool {
        let dots = self.gate.iter().chain([&self.up]).all(|w| gemm::has_gemm(level, w.ty()));
        dots && match &self.down {
            Down::ByNeuron(down) => gemm::has_down(level, down.ty()),
            Down::Relaid(_) => gemm::has_down(level, WeightType::Q8_0),
            Down::ByOutput(_) => true,
        }
    }
}

/// Room for one layer at a time.
#[derive(Debug, Default)]
pub(crate) struct FfnScratch {
    /// Sums of the chunks, `[CHUNKS, TILE_ROWS, n_embd]`.
    sums: Vec<f32>,
    /// Hidden vectors, `[n_rows, n_ff]`; only for down by output and for batches.
    hidden: Vec<f32>,
    /// For each neuron, which of its rows were read in this step.
    read: Vec<AtomicU8>,
    certified: CertifiedBuffers,
}

impl FfnScratch {
    /// Makes room for batches of `max_rows`.
    pub(crate) fn reserve(&mut self, spec: &ModelSpec, max_rows: usize, by_neuron: bool, by_output: bool) {
        let grow = |v: &mut Vec<f32>, n: usize| v.resize(v.len().max(n), 0.0);
        if by_neuron {
            grow(&mut self.sums, CHUNKS * TILE_ROWS.min(max_rows) * spec.n_embd);
        }
        if by_output || max_rows >= gemm::MIN_ROWS {
            grow(&mut self.hidden, max_rows * spec.max_n_ff());
        }
        self.read.resize_with(spec.max_n_ff(), AtomicU8::default);
        self.certified.reserve(spec.n_embd);
    }
}

/// What is the same for a whole layer.
struct LayerStep<'a> {
    spec: &'a ModelSpec,
    level: CpuLevel,
    layer: &'a LayerFfn,
    input: &'a FfnInput,
    x: Input<'a>,
    /// Whether a zero gate ends the neuron.
    skip: bool,
    /// What shows which gates need not be computed; only if there is one row, which wants all neurons.
    certified: Option<(&'a Certificate, CertifiedInput<'a>)>,
    read: &'a [AtomicU8],
    counts: &'a Counts,
}

/// Sums over chunks; integers, so their order does not matter.
#[derive(Debug, Default)]
struct Counts {
    certified: AtomicU64,
    gate: AtomicU64,
    up: AtomicU64,
    down: AtomicU64,
    active: AtomicU64,
    fired: AtomicU64,
}

fn count(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

/// Hidden values of a block of neurons, a row for each row of a tile.
type Hidden = [[f32; BLOCK]; TILE_ROWS];

/// Writes the sums over owned and active neurons to `out`.
///
/// # Shapes
/// `input.x, out [n_rows, n_embd]`.
pub(crate) fn ffn(
    cpu: &mut Cpu,
    spec: &ModelSpec,
    layer: &LayerFfn,
    input: &FfnInput,
    scratch: &mut FfnScratch,
    buffers: &mut InputBuffers,
    out: &mut [f32],
) -> StepCost {
    let n_rows = input.active.n_rows();
    layer.note_step(n_rows);
    if layer.owned.is_empty() || n_rows == 0 {
        out.fill(0.0);
        return StepCost::default();
    }
    let FfnScratch { sums, hidden, read, certified } = scratch;
    let n_ff = layer.n_ff();
    if n_rows >= gemm::MIN_ROWS && layer.has_gemm(cpu.level) {
        return many(cpu, spec, layer, input, &mut hidden[..n_rows * n_ff], buffers, out);
    }
    read[..n_ff].iter_mut().for_each(|r| *r.get_mut() = 0);
    let forms = layer
        .gate
        .as_ref()
        .map_or(Forms::default(), |gate| Forms::of(gate.ty()))
        .and(Forms::of(layer.up.ty()));
    let counts = Counts::default();
    let skip = input.mode != ActiveMode::Dense && spec.activation.has_exact_zeros();
    let wants_all = n_rows == 1 && n_wanted(input) == n_ff;
    let certificate = layer.certificate.as_ref().filter(|_| skip && wants_all);
    let step = LayerStep {
        spec,
        level: cpu.level,
        layer,
        input,
        x: buffers.prepare(&mut cpu.pool, &input.x, spec.n_embd, forms),
        skip,
        certified: certificate.map(|c| (c, certified.prepare(&mut cpu.pool, &input.x))),
        read: &read[..n_ff],
        counts: &counts,
    };
    if let Down::ByOutput(down) = &layer.down {
        let hidden = &mut hidden[..n_rows * n_ff];
        if n_rows == 1 {
            step.hidden_of_one(&mut cpu.pool, hidden);
        } else {
            step.hidden(&mut cpu.pool, hidden);
        }
        let hidden = buffers.prepare(&mut cpu.pool, hidden, n_ff, Forms::of(down.ty()));
        matmul(cpu, down, &hidden, None, out);
        count(&counts.down, n_rows * layer.owned.len());
    } else if n_rows == 1 {
        step.one_by_neuron(&mut cpu.pool, sums, out);
    } else {
        for start in (0..n_rows).step_by(TILE_ROWS) {
            let rows = start..n_rows.min(start + TILE_ROWS);
            let out = &mut out[start * spec.n_embd..rows.end * spec.n_embd];
            step.tile_by_neuron(&mut cpu.pool, rows, sums, out);
        }
    }
    let was_read = |read: &AtomicU8, row: u8| read.load(Ordering::Relaxed) & row != 0;
    let rows_read = |row: u8| match (n_rows, row) {
        // What one row wants, it reads.
        (1, GATE) => counts.gate.load(Ordering::Relaxed) as usize,
        (1, UP) => counts.up.load(Ordering::Relaxed) as usize,
        (1, DOWN) => counts.down.load(Ordering::Relaxed) as usize,
        _ => read[..n_ff].iter().filter(|r| was_read(r, row)).count(),
    };
    let down_bytes = match &layer.down {
        Down::ByNeuron(down) => rows_read(DOWN) * down.row_bytes(),
        Down::Relaid(down) => {
            let blocks = read[..n_ff].chunks(BLOCK);
            let n_blocks = blocks.filter(|b| b.iter().any(|r| was_read(r, DOWN))).count();
            rows_read(DOWN) * down.value_bytes() + n_blocks * down.scale_bytes()
        }
        Down::ByOutput(down) => down.n_bytes(),
    };
    let certificate_bytes =
        certificate.map_or(0, |c| counts.certified.load(Ordering::Relaxed) as usize * c.row_bytes());
    let weight_bytes = certificate_bytes
        + rows_read(GATE) * layer.gate.as_ref().map_or(0, Rows::row_bytes)
        + rows_read(UP) * layer.up.row_bytes()
        + down_bytes;
    StepCost {
        weight_bytes: weight_bytes as u64,
        gate_rows: counts.gate.into_inner(),
        up_rows: counts.up.into_inner(),
        down_rows: counts.down.into_inner(),
        active_neurons: counts.active.into_inner(),
        fired_neurons: counts.fired.into_inner(),
        owned_neurons: (n_rows * layer.owned.len()) as u64,
        ..StepCost::default()
    }
}

/// Neurons that the only row wants, owned or not.
fn n_wanted(input: &FfnInput) -> usize {
    input.active.row(0).iter().map(|word| word.count_ones() as usize).sum()
}

/// All neurons for all rows; see the module text.
fn many(
    cpu: &mut Cpu,
    spec: &ModelSpec,
    layer: &LayerFfn,
    input: &FfnInput,
    hidden: &mut [f32],
    buffers: &mut InputBuffers,
    out: &mut [f32],
) -> StepCost {
    let (level, n_rows, n_ff) = (cpu.level, input.active.n_rows(), layer.n_ff());
    let gate_ty = layer.gate.as_ref().map_or(layer.up.ty(), Rows::ty);
    let x = buffers.prepare(
        &mut cpu.pool,
        &input.x,
        spec.n_embd,
        Forms::of(gate_ty).and(Forms::of(layer.up.ty())),
    );
    let counts = Counts::default();
    let step =
        LayerStep { spec, level, layer, input, x, skip: false, certified: None, read: &[], counts: &counts };
    let wants = |block: usize, row: usize| step.wanted(block, row..row + 1)[0];
    // Gates first, where hidden values will be.
    if let Some(gate) = &layer.gate {
        let x = cpu.buffers.prepare(&mut cpu.pool, gate.ty(), x);
        cpu.pool.run_columns_with(hidden, n_ff, gemm::BAND_ROWS, &mut cpu.locals, |_, hidden, local| {
            gemm::gemm(level, gate, hidden.range(), &x, local, &mut |row, at, gates| {
                for (to, gate) in hidden.row(row)[at..].iter_mut().zip(gates) {
                    *to = spec.activation.apply(*gate);
                }
            });
        });
    }
    let x = cpu.buffers.prepare(&mut cpu.pool, layer.up.ty(), x);
    cpu.pool.run_columns_with(hidden, n_ff, gemm::BAND_ROWS, &mut cpu.locals, |_, hidden, local| {
        let neurons = hidden.range();
        let gated = layer.gate.is_some();
        gemm::gemm(level, &layer.up, neurons.clone(), &x, local, &mut |row, at, ups| {
            for (i, (to, up)) in hidden.row(row)[at..].iter_mut().zip(ups).enumerate() {
                let gate = if gated { *to } else { 1.0 };
                *to = step.hidden_value(neurons.start + at + i, gate, *up);
            }
        });
        let (mut n_active, mut n_fired) = (0, 0);
        for row in 0..n_rows {
            let before = n_fired;
            for (block, values) in (neurons.start / BLOCK..).zip(hidden.row(row).chunks_mut(BLOCK)) {
                let wanted = wants(block, row);
                n_active += wanted.count_ones() as usize;
                for (bit, value) in values.iter_mut().enumerate() {
                    *value = if wanted >> bit & 1 == 1 { *value } else { 0.0 };
                    n_fired += usize::from(*value != 0.0);
                    layer.note(block * BLOCK + bit, *value);
                }
            }
            layer.note_row(row, n_fired - before);
        }
        count(&counts.active, n_active);
        count(&counts.fired, n_fired);
    });
    let n_chunks = CHUNKS.min(n_ff.div_ceil(BLOCK));
    let down_bytes = match &layer.down {
        Down::ByNeuron(down) => {
            let hidden = gemm::Hidden { values: hidden, n_ff, n_chunks };
            cpu.pool.run_columns_with(
                out,
                spec.n_embd,
                gemm::BAND_COLUMNS,
                &mut cpu.locals,
                |_, out, local| {
                    gemm::down(level, down.ty(), |i| down.bytes(i), hidden, local, out);
                },
            );
            down.n_bytes()
        }
        Down::Relaid(down) => {
            let hidden = gemm::Hidden { values: hidden, n_ff, n_chunks };
            cpu.pool.run_columns_with(
                out,
                spec.n_embd,
                gemm::BAND_COLUMNS,
                &mut cpu.locals,
                |_, out, local| {
                    gemm::down_scaled(level, |b| down.block(b), spec.n_embd, hidden, local, out);
                },
            );
            n_ff * down.value_bytes() + n_ff / BLOCK * down.scale_bytes()
        }
        Down::ByOutput(down) => {
            let hidden = buffers.prepare(&mut cpu.pool, hidden, n_ff, Forms::of(down.ty()));
            matmul(cpu, down, &hidden, None, out);
            down.n_bytes()
        }
    };
    let products = (n_rows * n_ff) as u64;
    StepCost {
        weight_bytes: (layer.gate.as_ref().map_or(0, Rows::n_bytes) + layer.up.n_bytes() + down_bytes) as u64,
        gate_rows: if layer.gate.is_some() { products } else { 0 },
        up_rows: products,
        down_rows: products,
        active_neurons: counts.active.into_inner(),
        fired_neurons: counts.fired.into_inner(),
        owned_neurons: (n_rows * layer.owned.len()) as u64,
        ..StepCost::default()
    }
}

impl LayerStep<'_> {
    /// Completes the hidden vector of the only row, zero where a neuron is not owned, not active or silent.
    fn hidden_of_one(&self, pool: &mut Pool, hidden: &mut [f32]) {
        pool.run_pieces(hidden, LIST, |piece, out| {
            let blocks = piece * LIST / BLOCK..(piece * LIST + out.len()).div_ceil(BLOCK);
            let mut list = List::default();
            blocks.for_each(|block| list.push(block, self.wanted_by_one(block)));
            self.compute(&mut list);
            out.fill(0.0);
            for (&neuron, &value) in list.neurons().iter().zip(&list.values) {
                out[neuron as usize - piece * LIST] = value;
            }
        });
    }

    /// The only row, with down by neuron.
    fn one_by_neuron(&self, pool: &mut Pool, sums: &mut [f32], out: &mut [f32]) {
        let n_blocks = self.layer.n_ff().div_ceil(BLOCK);
        let n_chunks = CHUNKS.min(n_blocks);
        let sums = &mut sums[..n_chunks * out.len()];
        match &self.layer.down {
            Down::ByNeuron(down) => {
                // Where one piece ends and the next begins, the stages of the flow do not overlap.
                let n_pieces = if pool.n_threads() == 1 { 1 } else { 8 * pool.n_threads() };
                let n = n_chunks.div_ceil(n_pieces);
                pool.run_pieces(sums, n * out.len(), |piece, sums| {
                    let chunks = piece * n..n_chunks.min((piece + 1) * n);
                    self.flow(chunks, n_chunks, down, sums);
                });
            }
            Down::Relaid(down) => pool.run_pieces(sums, out.len(), |chunk, sum| {
                sum.fill(0.0);
                let mut blocks = (chunk..n_blocks).step_by(CHUNKS).peekable();
                let mut list = List::default();
                while blocks.peek().is_some() {
                    list.n = 0;
                    while let Some(block) = blocks.next_if(|_| list.n + BLOCK <= LIST) {
                        list.push(block, self.wanted_by_one(block));
                    }
                    self.compute(&mut list);
                    self.add_relaid(&list, down, sum);
                }
            }),
            Down::ByOutput(_) => unreachable!("products by output take the whole hidden vector"),
        }
        add_chunks(pool, sums, n_chunks, out);
    }

    fn wanted_by_one(&self, block: usize) -> u32 {
        self.wanted(block, 0..1)[0]
    }

    /// Computes the hidden values of the neurons of a list, for the only row. Neurons that turn out to be silent are
    /// taken off unless the mode is dense.
    fn compute(&self, list: &mut List) {
        let w = self.layer;
        count(&self.counts.active, list.n);
        if let Some((certificate, x)) = &self.certified {
            count(&self.counts.certified, list.n);
            list.n = certificate.keep(self.level, x, &mut list.neurons[..list.n]);
        }
        if let Some(gate) = &w.gate {
            count(&self.counts.gate, list.n);
            dot_list(self.level, gate, &list.neurons[..list.n], &self.x, &mut list.values);
            let mut kept = 0;
            for i in 0..list.n {
                let gate = self.spec.activation.apply(list.values[i]);
                list.neurons[kept] = list.neurons[i];
                list.gates[kept] = gate;
                kept += usize::from(!self.skip || gate != 0.0);
            }
            list.n = kept;
        }
        count(&self.counts.up, list.n);
        dot_list(self.level, &w.up, &list.neurons[..list.n], &self.x, &mut list.values);
        let dense = self.input.mode == ActiveMode::Dense;
        let (mut kept, mut n_fired) = (0, 0);
        for i in 0..list.n {
            let neuron = list.neurons[i];
            let value = self.hidden_value(neuron as usize, list.gates[i], list.values[i]);
            list.neurons[kept] = neuron;
            list.values[kept] = value;
            n_fired += usize::from(value != 0.0);
            w.note(neuron as usize, value);
            kept += usize::from(dense || value != 0.0);
        }
        list.n = kept;
        w.note_row(0, n_fired);
        count(&self.counts.fired, n_fired);
    }

    /// Computes the neurons of some chunks for the only row, and their sums. Some neurons at a time go through three
    /// stages: first rows (the gates, if there are any), then up rows of those that are not silent, then down rows. While
    /// the stages of some are computed, the memory is asked for the rows of the next:
    ///
    /// ```text
    /// computed      first(0)   first(1) up(0) down(0)        first(2) up(1) down(1)        first(3) …
    /// asked for                up(0) down(0) first(2)        up(1) down(1) first(3)        …
    /// ```
    ///
    /// Every row is asked for once and computed once, so each that is computed takes one along.
    ///
    /// # Shapes
    /// `sums [chunks.len(), n_embd]`.
    fn flow(&self, chunks: Range<usize>, n_chunks: usize, down: &Rows, sums: &mut [f32]) {
        sums.fill(0.0);
        let w = self.layer;
        let n_embd = self.spec.n_embd;
        let first = w.gate.as_ref().unwrap_or(&w.up);
        // Those behind the piece are what this thread computes next, as a rule. Of those that have a certificate, most
        // are not read.
        let end = if self.certified.is_some() { chunks.end } else { n_chunks };
        let mut stream = Stream::new(self, chunks.start..end);
        let mut soon = [stream.next(), stream.next()];
        let mut asks = FlowAsks::default();
        let first_row = |&neuron: &u32| worth_asking(first, neuron as usize);
        soon.iter()
            .for_each(|some| some.kept.neurons().iter().for_each(|neuron| asks.push(first_row(neuron))));
        let (mut last, mut downs) = (SomeOf::default(), Kept::default());
        last.chunk = chunks.start;
        loop {
            soon.swap(0, 1);
            let now = std::mem::take(&mut soon[1]);
            let goes_on = now.kept.n > 0 && now.chunk < chunks.end;
            let mut kept = Kept::default();
            if goes_on {
                let some = now.kept.neurons();
                soon[1] = stream.next();
                if self.certified.is_none() {
                    count(&self.counts.active, some.len());
                }
                count(if w.gate.is_some() { &self.counts.gate } else { &self.counts.up }, some.len());
                let mut values = [0.0; FLOW];
                dot_list_asking(self.level, first, some, &self.x, &mut values, &mut asks);
                for (&neuron, &value) in some.iter().zip(&values) {
                    let value = if w.gate.is_some() { self.spec.activation.apply(value) } else { value };
                    kept.push(neuron, value, w.gate.is_none() || !self.skip || value != 0.0);
                }
            }
            asks.finish();
            if w.gate.is_some() {
                kept.neurons().iter().for_each(|&n| asks.push(worth_asking(&w.up, n as usize)));
            }
            kept.neurons().iter().for_each(|&n| asks.push(worth_asking(down, n as usize)));
            if goes_on {
                soon[1].kept.neurons().iter().for_each(|neuron| asks.push(first_row(neuron)));
            }
            self.hidden_of_some(&last.kept, &mut downs, &mut asks);
            let sum = &mut sums[(last.chunk - chunks.start) * n_embd..][..n_embd];
            self.add_some(&mut downs, !goes_on || now.chunk != last.chunk, down, &mut asks, sum);
            if !goes_on {
                return;
            }
            last = SomeOf { chunk: now.chunk, kept };
        }
    }

    /// Appends neurons whose gates are known, with their hidden values, to `downs`, but for those that are silent.
    fn hidden_of_some(&self, some: &Kept, downs: &mut Kept, asks: &mut FlowAsks<'_>) {
        let w = self.layer;
        let (mut gates, mut ups) = ([1.0; Kept::ROOM], some.values);
        if w.gate.is_some() {
            gates = some.values;
            count(&self.counts.up, some.n);
            dot_list_asking(self.level, &w.up, some.neurons(), &self.x, &mut ups, asks);
        }
        let dense = self.input.mode == ActiveMode::Dense;
        let (before, mut n_fired) = (downs.n, 0);
        for (i, &neuron) in some.neurons().iter().enumerate() {
            let value = self.hidden_value(neuron as usize, gates[i], ups[i]);
            n_fired += usize::from(value != 0.0);
            w.note(neuron as usize, value);
            downs.push(neuron, value, dense || value != 0.0);
        }
        w.note_row(0, n_fired);
        count(&self.counts.fired, n_fired);
        count(&self.counts.down, downs.n - before);
    }

    /// `sum += value · down row` for neurons in order, as many as go together, or all; the others stay.
    fn add_some(&self, some: &mut Kept, all: bool, down: &Rows, asks: &mut FlowAsks<'_>, sum: &mut [f32]) {
        let row = |&neuron: &u32| down.bytes(neuron as usize);
        let (groups, rest) = some.neurons().as_chunks::<AXPY_ROWS>();
        for (group, values) in groups.iter().zip(some.values.as_chunks().0) {
            axpy(self.level, down.ty(), *values, group.each_ref().map(row), sum, asks.take());
        }
        let added = some.n - rest.len();
        if all {
            for (neuron, &value) in rest.iter().zip(&some.values[added..]) {
                axpy(self.level, down.ty(), [value], [row(neuron)], sum, asks.take());
            }
            some.n = 0;
        } else {
            some.neurons.copy_within(added..some.n, 0);
            some.values.copy_within(added..some.n, 0);
            some.n -= added;
        }
    }

    fn hidden_value(&self, neuron: usize, gate: f32, up: f32) -> f32 {
        let up = self.layer.up_bias.as_ref().map_or(up, |b| up + b[neuron]);
        match self.spec.gating {
            Gating::None => self.spec.activation.apply(up),
            Gating::Gate => gate * up,
            Gating::GateAndUp => gate * self.spec.activation.apply(up),
        }
    }

    /// `sum += values · down rows` of a list, in order.
    fn add_relaid(&self, list: &List, down: &RelaidDown, sum: &mut [f32]) {
        count(&self.counts.down, list.n);
        let block_of = |neuron: u32| neuron as usize / BLOCK;
        let mut values = &list.values[..list.n];
        for neurons in list.neurons().chunk_by(|a, b| block_of(*a) == block_of(*b)) {
            let (these, rest) = values.split_at(neurons.len());
            values = rest;
            let mut terms = [(0, 0.0); BLOCK];
            for (term, (&neuron, &value)) in terms.iter_mut().zip(neurons.iter().zip(these)) {
                *term = (neuron as usize % BLOCK, value);
                self.mark(neuron as usize, DOWN);
            }
            let (scales, rows) = down.block(block_of(neurons[0]));
            axpy_scaled(self.level, &terms[..neurons.len()], scales, rows, sum);
        }
    }

    /// Completes the hidden vectors, zero where a neuron is not owned, not active or silent.
    fn hidden(&self, pool: &mut Pool, hidden: &mut [f32]) {
        let n_ff = self.layer.n_ff();
        pool.run_columns(hidden, n_ff, BLOCK, |block, columns| {
            let n_rows = columns.n_rows();
            for start in (0..n_rows).step_by(TILE_ROWS) {
                let rows = start..n_rows.min(start + TILE_ROWS);
                let values = self.block(block, rows.clone(), &self.wanted(block, rows.clone()));
                for (row, values) in rows.zip(&values) {
                    let out = columns.row(row);
                    out.copy_from_slice(&values[..out.len()]);
                }
            }
        });
    }

    /// A tile of rows with down by neuron.
    fn tile_by_neuron(&self, pool: &mut Pool, rows: Range<usize>, sums: &mut [f32], out: &mut [f32]) {
        let n_blocks = self.layer.n_ff().div_ceil(BLOCK);
        let n_chunks = CHUNKS.min(n_blocks);
        let sums = &mut sums[..n_chunks * out.len()];
        pool.run_pieces(sums, out.len(), |chunk, sum| {
            sum.fill(0.0);
            for block in (chunk..n_blocks).step_by(CHUNKS) {
                let wanted = self.wanted(block, rows.clone());
                if wanted.iter().all(|&w| w == 0) {
                    continue;
                }
                let hidden = self.block(block, rows.clone(), &wanted);
                self.add_down(block, &wanted, &hidden, sum);
            }
        });
        add_chunks(pool, sums, n_chunks, out);
    }

    /// Which neurons of a block are owned and active, a bit each, for each row of a tile.
    fn wanted(&self, block: usize, rows: Range<usize>) -> [u32; TILE_ROWS] {
        let half = |words: &[u64]| (words[block / 2] >> (block % 2 * BLOCK)) as u32;
        let owned = half(self.layer.owned.words());
        let mut wanted = [0; TILE_ROWS];
        for (wanted, row) in wanted.iter_mut().zip(rows) {
            *wanted = owned & half(self.input.active.row(row));
        }
        wanted
    }

    /// Hidden values of the wanted neurons of a block; 0 for the others.
    fn block(&self, block: usize, rows: Range<usize>, wanted: &[u32; TILE_ROWS]) -> Hidden {
        let w = self.layer;
        let mut hidden = [[0.0; BLOCK]; TILE_ROWS];
        let (mut n_active, mut n_gate, mut n_up) = (0, 0, 0);
        let mut n_fired = [0; TILE_ROWS];
        for bit in bits(wanted.iter().fold(0, |all, w| all | w)) {
            let neuron = block * BLOCK + bit;
            let mut batch =
                Batch::new(rows.clone().zip(wanted).filter(|(_, w)| *w >> bit & 1 == 1).map(|(r, _)| r));
            n_active += batch.n;
            if let Some(gate) = &w.gate {
                batch.dot(self.level, gate, neuron, &self.x);
                n_gate += batch.n;
                self.mark(neuron, GATE);
                batch.keep_gates(|g| self.spec.activation.apply(g), self.skip);
            }
            if batch.n == 0 {
                continue;
            }
            batch.dot(self.level, &w.up, neuron, &self.x);
            n_up += batch.n;
            self.mark(neuron, UP);
            for (row, up, gate) in batch.values() {
                let value = self.hidden_value(neuron, gate, up);
                n_fired[row - rows.start] += usize::from(value != 0.0);
                w.note(neuron, value);
                hidden[row - rows.start][bit] = value;
            }
        }
        count(&self.counts.active, n_active);
        count(&self.counts.gate, n_gate);
        count(&self.counts.up, n_up);
        count(&self.counts.fired, n_fired.iter().sum());
        rows.zip(n_fired).for_each(|(row, n_fired)| w.note_row(row, n_fired));
        hidden
    }

    /// `sum += hidden · down rows` for a block of neurons, each row of the tile in ascending order of neurons.
    fn add_down(&self, block: usize, wanted: &[u32; TILE_ROWS], hidden: &Hidden, sum: &mut [f32]) {
        let dense = self.input.mode == ActiveMode::Dense;
        let mut n_down = 0;
        for (row, sum) in sum.chunks_exact_mut(self.spec.n_embd).enumerate() {
            let mut terms = [(0, 0.0); BLOCK];
            let mut n = 0;
            for bit in bits(wanted[row]).filter(|&bit| dense || hidden[row][bit] != 0.0) {
                terms[n] = (bit, hidden[row][bit]);
                n += 1;
                self.mark(block * BLOCK + bit, DOWN);
            }
            n_down += n;
            self.add_terms(block, &terms[..n], sum);
        }
        count(&self.counts.down, n_down);
    }

    /// `sum += Σ value · down row` over neurons of a block, given by their place in it.
    fn add_terms(&self, block: usize, terms: &[(usize, f32)], sum: &mut [f32]) {
        match &self.layer.down {
            Down::ByNeuron(down) => {
                let row = |(bit, _)| down.bytes(block * BLOCK + bit);
                let (groups, rest) = terms.as_chunks::<AXPY_ROWS>();
                for group in groups {
                    axpy(self.level, down.ty(), group.map(|(_, a)| a), group.map(row), sum, [&[]; AXPY_ROWS]);
                }
                for &term in rest {
                    axpy(self.level, down.ty(), [term.1], [row(term)], sum, [&[]]);
                }
            }
            Down::Relaid(down) if !terms.is_empty() => {
                let (scales, values) = down.block(block);
                axpy_scaled(self.level, terms, scales, values, sum);
            }
            Down::Relaid(_) => {}
            Down::ByOutput(_) => unreachable!("products by output take the whole hidden vector"),
        }
    }

    fn mark(&self, neuron: usize, row: u8) {
        // One thread at a time works on a neuron.
        let read = &self.read[neuron];
        read.store(read.load(Ordering::Relaxed) | row, Ordering::Relaxed);
    }
}

/// `out` = the sums of the chunks, added in order.
fn add_chunks(pool: &mut Pool, sums: &[f32], n_chunks: usize, out: &mut [f32]) {
    let n = out.len();
    pool.run_pieces(out, REDUCE_COLUMNS, |piece, out| {
        let at = piece * REDUCE_COLUMNS;
        out.copy_from_slice(&sums[at..at + out.len()]);
        for chunk in 1..n_chunks {
            add(out, &sums[chunk * n + at..][..out.len()]);
        }
    });
}

/// Some neurons, ascending, with a value each.
struct List {
    n: usize,
    neurons: [u32; LIST],
    /// Gates of the neurons; 1 without gating.
    gates: [f32; LIST],
    values: [f32; LIST],
}

impl Default for List {
    fn default() -> Self {
        Self { n: 0, neurons: [0; LIST], gates: [1.0; LIST], values: [0.0; LIST] }
    }
}

impl List {
    fn neurons(&self) -> &[u32] {
        &self.neurons[..self.n]
    }

    /// Appends neurons of a block, a bit each.
    fn push(&mut self, block: usize, wanted: u32) {
        for bit in bits(wanted) {
            self.neurons[self.n] = (block * BLOCK + bit) as u32;
            self.n += 1;
        }
    }
}

/// Some neurons of a chunk; none after the last.
#[derive(Default)]
struct SomeOf {
    chunk: usize,
    kept: Kept,
}

/// The neurons that the only row wants of some chunks, some at a time.
struct Stream<'a> {
    step: &'a LayerStep<'a>,
    chunks: Range<usize>,
    /// Next block of the first chunk.
    block: usize,
    /// Neurons of the first chunk that are left.
    list: List,
    at: usize,
}

impl<'a> Stream<'a> {
    fn new(step: &'a LayerStep<'a>, chunks: Range<usize>) -> Self {
        Self { step, block: chunks.start, chunks, list: List::default(), at: 0 }
    }

    fn next(&mut self) -> SomeOf {
        while self.at == self.list.n && !self.chunks.is_empty() {
            self.refill();
        }
        let mut some = SomeOf { chunk: self.chunks.start, kept: Kept::default() };
        for &neuron in self.list.neurons()[self.at..].iter().take(FLOW) {
            some.kept.push(neuron, 0.0, true);
        }
        self.at += some.kept.n;
        some
    }

    /// Lists the neurons of the next blocks of the chunk, or goes on to the next chunk.
    fn refill(&mut self) {
        let n_blocks = self.step.layer.n_ff().div_ceil(BLOCK);
        (self.list.n, self.at) = (0, 0);
        while self.block < n_blocks && self.list.n + BLOCK <= LIST {
            self.list.push(self.block, self.step.wanted_by_one(self.block));
            self.block += CHUNKS;
        }
        if self.list.n == 0 && self.block >= n_blocks {
            self.chunks.start += 1;
            self.block = self.chunks.start;
        } else if let Some((certificate, x)) = &self.step.certified {
            count(&self.step.counts.active, self.list.n);
            count(&self.step.counts.certified, self.list.n);
            self.list.n = certificate.keep(self.step.level, x, &mut self.list.neurons[..self.list.n]);
        }
    }
}

/// Some neurons, ascending, with a value each.
#[derive(Default)]
struct Kept {
    n: usize,
    neurons: [u32; Self::ROOM],
    values: [f32; Self::ROOM],
}

impl Kept {
    /// [`FLOW`], those that wait until as many as go together are there, and one that is written before it is known
    /// whether it is wanted.
    const ROOM: usize = FLOW + AXPY_ROWS;

    fn neurons(&self) -> &[u32] {
        &self.neurons[..self.n]
    }

    /// Appends a neuron if it is `wanted`.
    fn push(&mut self, neuron: u32, value: f32, wanted: bool) {
        self.neurons[self.n] = neuron;
        self.values[self.n] = value;
        self.n += usize::from(wanted);
    }
}

/// Positions of the ones, ascending.
fn bits(mut word: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros() as usize);
        word &= word.wrapping_sub(1);
        bit
    })
}

/// The rows of a tile that want one neuron, with its values for them.
struct Batch {
    n: usize,
    rows: [usize; TILE_ROWS],
    values: [f32; TILE_ROWS],
    gates: [f32; TILE_ROWS],
}

impl Batch {
    fn new(rows: impl Iterator<Item = usize>) -> Self {
        let mut batch =
            Self { n: 0, rows: [0; TILE_ROWS], values: [0.0; TILE_ROWS], gates: [1.0; TILE_ROWS] };
        for row in rows {
            batch.rows[batch.n] = row;
            batch.n += 1;
        }
        batch
    }

    /// Values become the products of one row of `w` with the batch.
    fn dot(&mut self, level: CpuLevel, w: &Rows, neuron: usize, x: &Input<'_>) {
        let n = self.n;
        dot_rows(level, w.row(neuron), x, &self.rows[..n], &mut self.values[..n]);
    }

    /// Gates become `act(values)`; rows where that is zero are dropped if `skip`.
    fn keep_gates(&mut self, act: impl Fn(f32) -> f32, skip: bool) {
        let mut kept = 0;
        for i in 0..self.n {
            let gate = act(self.values[i]);
            if !skip || gate != 0.0 {
                self.rows[kept] = self.rows[i];
                self.gates[kept] = gate;
                kept += 1;
            }
        }
        self.n = kept;
    }

    /// Row, value and gate.
    fn values(&self) -> impl Iterator<Item = (usize, f32, f32)> {
        (0..self.n).map(|i| (self.rows[i], self.values[i], self.gates[i]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_come_in_ascending_order() {
        assert_eq!(bits(0).count(), 0);
        assert_eq!(bits(1 << 31 | 0b101).collect::<Vec<_>>(), [0, 2, 31]);
        assert_eq!(bits(u32::MAX).count(), 32);
    }

    #[test]
    fn a_batch_drops_zero_gates_only_if_told_to() {
        for (skip, kept) in [
            (true, vec![(4, 2.0), (6, f32::INFINITY)]),
            (false, vec![(4, 2.0), (5, 0.0), (6, f32::INFINITY)]),
        ] {
            let mut batch = Batch::new(4..7);
            batch.values[..3].copy_from_slice(&[2.0, 0.0, f32::INFINITY]);
            batch.keep_gates(|g| g, skip);
            assert_eq!(batch.values().map(|(row, _, gate)| (row, gate)).collect::<Vec<_>>(), kept);
        }
    }
}
