//! [`CudaBackend`]: the operators of the trait, on a device.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use powerinfer_sparse_ops::{
    Activation, ActiveMode, BackendError, BackendInfo, BlockKind, DensePart, DownWeights, FfnInput,
    FfnWeights, HybridBackend, LayerId, ModelSpec, NeuronId, NeuronSet, PredictorWeights, SeqId, ShapeError,
    Step, StepCost, Ticket, WeightMatrix,
};

use crate::driver;
use crate::gpu::{Buffer, Device, Gpu, GraphKey, HostId, NAME, Piece, Plan, View};
use crate::kernels::{
    ACCUMULATE, CacheTables, CopyInput, FfnView, MATMUL_TOKENS, Matrix, RECTIFY, Rows, SPAN,
};
use crate::load::{Dense, Down, Embedding, Ffn, Head, LinearPieces, NormPieces, Predictor, TILE};
use crate::scratch::{
    LIST_ROWS, LOGIT_ROWS, Scratch, ScratchShape, bits_offset, cache_table_bytes, heads, spans, table_bytes,
};

/// Steps of up to so many tokens take their neurons from lists, larger ones read a row once for 8 tokens.
const LIST_TOKENS: usize = 4;

/// Steps of up to so many tokens run whole layers as graphs; of larger ones the launches are a small part.
const GRAPH_TOKENS: usize = 4;

/// Longest head of a kernel.
const MAX_HEAD_DIM: usize = 256;

/// Bytes of the counters of a layer: steps of one token, then larger ones, whose distinct rows are counted apart.
const COUNTER_BYTES: usize = 2 * BANK_BYTES;

/// Eight counters of 64 bits.
const BANK_BYTES: usize = 64;

/// How a [`CudaBackend`] keeps keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaKvType {
    /// Rounded to 16 bits.
    #[default]
    F16,
    /// As they are.
    F32,
}

impl CudaKvType {
    fn value_bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// How a [`CudaBackend`] is to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Number of the device.
    pub device: usize,
    /// Bytes of device memory that may be taken, as [`CudaBackend::memory_taken`] counts them; `None` for as many as are free.
    pub memory_limit: Option<u64>,
    /// How keys and values are kept.
    pub kv_type: CudaKvType,
    /// Launches each kernel by itself. Otherwise layers that are wholly on the device are kept as one CUDA graph for each shape
    /// of a small step, which gives the same bits with fewer calls of the driver.
    pub without_graphs: bool,
}

/// Computes on an NVIDIA GPU, on copies of the weights in the layout of the file.
///
/// Vectors and sums are f32, weights are decoded to f32, and every sum has a fixed order: the bits of a result depend on
/// the placement, the weights and the inputs of the step, not on timing. Everything is started in order on one
/// stream, and the caller waits only for what comes back: [`HybridBackend::ffn_finish`], [`HybridBackend::ffn_input`],
/// [`HybridBackend::head`] and [`HybridBackend::hidden`].
///
/// A down projection should lie by neuron. One that lies by output is taken of layers that are held whole, and of others if it is
/// of a float type and can be turned without loss.
///
/// All memory of the device is taken while weights are loaded and in [`HybridBackend::reserve`], in pieces that are multiples of 256
/// bytes, and accounted for; see [`CudaBackend::memory_used`]. The limit is compared with [`CudaBackend::memory_taken`], which has
/// the driver's rounding too. The driver's context, the kernels and the graphs are in neither.
///
/// In [`StepCost`] the bytes moved are those of vectors, active sets, sums and logits; the tables of positions and
/// addresses of a step and the counters themselves are not counted.
///
/// # Panics
/// Steps panic if the device fails, since they do not return errors.
#[derive(Debug)]
pub struct CudaBackend {
    spec: Arc<ModelSpec>,
    kv_type: CudaKvType,
    /// In a cell since [`HybridBackend::hidden`] copies too.
    device: RefCell<Device>,
    constants: Constants,
    embedding: Option<Embedding>,
    layers: Vec<Layer>,
    head: Option<Head>,
    n_kv_layer: usize,
    sequences: Vec<Sequence>,
    shape: ScratchShape,
    scratch: Option<Scratch>,
    /// Pinned memory for rows that enter, once there were some.
    entering: Option<(HostId, usize)>,
    /// Rows of the current step.
    n_rows: usize,
    /// Spans of positions that the current step attends over.
    n_spans: usize,
    /// The layer whose FFN input was made here last, and whether it has active sets.
    made: Option<(LayerId, bool)>,
    pending: Option<Pending>,
    /// Whole layers that wait to be launched together.
    waiting: Cell<Option<WholeLayers>>,
    next_slot: u32,
    has_counts: bool,
    fired: Option<Fired>,
    cost: StepCost,
    hidden_bytes: Cell<u64>,
}

#[derive(Debug, Default)]
struct Layer {
    dense: Option<Dense>,
    ffn: Option<Ffn>,
    predictor: Option<Predictor>,
}

/// Frequencies and counters.
#[derive(Debug)]
struct Constants {
    buffer: Buffer,
    freqs: Piece,
    counters: Piece,
    /// Copy of the counters.
    host: HostId,
}

/// Counters of the neurons that fire, `u64 [n_ff]` for each layer.
#[derive(Debug)]
struct Fired {
    buffer: Buffer,
    layers: Vec<Piece>,
    /// Copy of a layer's counters.
    host: HostId,
}

impl Fired {
    fn new(spec: &ModelSpec, device: &mut Device) -> Result<Self, BackendError> {
        let mut plan = Plan::default();
        let layers = spec.n_ff.iter().map(|&n_ff| plan.add(8 * n_ff)).collect();
        let buffer = device.alloc(plan, "counters of neurons")?;
        match device.gpu().alloc_host(8 * spec.max_n_ff()) {
            Ok(host) => Ok(Self { buffer, layers, host }),
            Err(error) => {
                device.free(buffer);
                Err(error)
            }
        }
    }

    fn free(self, device: &mut Device) {
        device.gpu().free_host(self.host);
        device.free(self.buffer);
    }
}

/// Keys and values: for each layer that is at home here, keys and then values, `[kv_len, kv_dim]`.
#[derive(Debug)]
struct Sequence {
    id: SeqId,
    kv_len: usize,
    buffer: Buffer,
    /// Keys or values of one layer.
    pieces: Vec<Piece>,
}

/// Layers that are wholly here, one after the other, of the current step.
#[derive(Clone, Copy, Debug)]
struct WholeLayers {
    first: LayerId,
    /// The one after the last.
    end: LayerId,
    mode: ActiveMode,
}

/// A partial sum that is not finished.
#[derive(Debug)]
struct Pending {
    slot: u32,
    /// The copy to the host is under way.
    is_coming: bool,
    is_zero: bool,
}

fn floats(n: usize) -> usize {
    4 * n
}

/// Vectors that lie one after the other.
fn rows(view: View<'_>, n: usize) -> Rows<'_> {
    Rows { view, stride: n }
}

fn dense(layers: &[Layer], layer: LayerId) -> &Dense {
    layers[layer.index()].dense.as_ref().expect("the layer's dense part is loaded on its home")
}

/// What a step's kernels find where.
struct Parts<'a> {
    spec: &'a ModelSpec,
    constants: &'a Constants,
    layers: &'a [Layer],
    scratch: &'a Scratch,
    fired: Option<&'a Fired>,
    kv_type: CudaKvType,
}

impl<'a> Parts<'a> {
    fn piece(&self, piece: Piece) -> View<'a> {
        self.scratch.buffer.piece(piece)
    }

    /// `n` vectors of the width of the model in a piece.
    fn vectors(&self, piece: Piece, n: usize) -> View<'a> {
        self.piece(piece).sub(0, floats(n * self.spec.n_embd))
    }

    fn norm(
        &self,
        device: &mut Device,
        buffer: &Buffer,
        norm: NormPieces,
        x: View<'_>,
        y: View<'_>,
        n: usize,
    ) {
        let (weight, bias) = (buffer.piece(norm.weight), norm.bias.map(|bias| buffer.piece(bias)));
        device.norm(self.spec.norm, weight, bias, x, y, [n, self.spec.n_embd]);
    }

    fn positions(&self, n: usize) -> View<'a> {
        self.piece(self.scratch.pieces.tables).sub(0, floats(n))
    }

    fn ids(&self, n: usize) -> View<'a> {
        self.piece(self.scratch.pieces.tables).sub(table_bytes(n), floats(n))
    }

    fn caches(&self, kv_layer: usize, n: usize) -> CacheTables<'a> {
        let one = cache_table_bytes(n);
        let at = 2 * table_bytes(n) + 2 * kv_layer * one;
        let tables = self.piece(self.scratch.pieces.tables);
        CacheTables {
            keys: tables.sub(at, one),
            values: tables.sub(at + one, one),
            positions: self.positions(n),
            is_f16: self.kv_type == CudaKvType::F16,
        }
    }

    fn bits(&self, n: usize, n_ff: usize) -> View<'a> {
        self.piece(self.scratch.pieces.bits).sub(0, n * n_ff.div_ceil(64) * 8)
    }

    /// The predictor that has its say in a layer.
    fn predictor(&self, layer: LayerId, mode: ActiveMode) -> Option<&'a Predictor> {
        self.layers[layer.index()].predictor.as_ref().filter(|_| mode == ActiveMode::Predictor)
    }

    /// `h += attention(norm(h))` of `n` rows over `n_spans` spans of positions.
    fn attend(&self, device: &mut Device, layer: LayerId, n: usize, n_spans: usize) {
        let spec = self.spec;
        let w = dense(self.layers, layer);
        let pieces = &self.scratch.pieces;
        let (h, x) = (self.vectors(pieces.h, n), self.vectors(pieces.x, n));
        self.norm(device, &w.buffer, w.attn_norm_2.unwrap_or(w.attn_norm), h, x, n);
        let (q_dim, kv_dim) = (spec.q_dim(), spec.kv_dim());
        let q = rows(self.piece(pieces.q), q_dim);
        let [k, v] = [pieces.k, pieces.v].map(|piece| rows(self.piece(piece), kv_dim));
        let product = |device: &mut Device, linear: LinearPieces, x, y, flags| {
            let bias = linear.bias.map(|bias| w.buffer.piece(bias));
            device.product(linear.weight.on(&w.buffer), x, bias, y, n, flags);
        };
        for (linear, y) in [(w.q, q), (w.k, k), (w.v, v)] {
            product(device, linear, rows(x, spec.n_embd), y, 0);
        }
        if let Some(rope) = &spec.rope {
            let freqs = self.constants.buffer.piece(self.constants.freqs);
            for (x, n_heads) in [(q, spec.n_head), (k, spec.n_head_kv)] {
                device.rotate(rope, freqs, x, self.positions(n), [n_heads, spec.head_dim, n]);
            }
        }
        let caches = self.caches(w.kv_layer, n);
        device.kv_append(caches, k, v, kv_dim, n);
        let mixed = rows(self.piece(pieces.mixed), q_dim);
        device.attention(caches, q, self.piece(pieces.attention), mixed, heads(spec), [n_spans, n]);
        product(device, w.output, mixed, rows(h, spec.n_embd), ACCUMULATE);
    }

    /// The FFN's normed input and, if a predictor has its say, the active sets.
    fn make_input(&self, device: &mut Device, layer: LayerId, mode: ActiveMode, n: usize) {
        let spec = self.spec;
        let w = dense(self.layers, layer);
        let pieces = &self.scratch.pieces;
        let (h, x) = (self.vectors(pieces.h, n), self.vectors(pieces.ffn_x, n));
        let norm = match spec.block {
            BlockKind::Parallel => w.attn_norm,
            BlockKind::Sequential => {
                w.ffn_norm.expect("a sequential block has a norm before its FFN, checked at load")
            }
        };
        self.norm(device, &w.buffer, norm, h, x, n);
        let bits = self.bits(n, spec.n_ff[layer.index()]);
        match self.predictor(layer, mode) {
            None => {}
            Some(Predictor::LowRank { buffer, fc1, fc2, threshold }) => {
                let inner = rows(self.piece(pieces.inner), fc1.n_rows);
                device.product(fc1.on(buffer), rows(h, spec.n_embd), None, inner, n, RECTIFY);
                device.predict(fc2.on(buffer), inner, bits, n, *threshold);
            }
            Some(Predictor::Copy { buffer, copy }) => {
                let input = CopyInput {
                    q: self.piece(pieces.copy_q),
                    apart: self.piece(pieces.copy_apart),
                    info: self.piece(pieces.copy_info),
                };
                let x = rows(x, spec.n_embd);
                device.predict_by_copy(copy.on(buffer), input, x, self.positions(n), bits, n);
            }
        }
    }

    /// The FFN on what is in its input; the sum goes to `sum`, or is added to the residual stream.
    fn run_ffn(&self, device: &mut Device, layer: LayerId, work: FfnWork) {
        let spec = self.spec;
        let FfnWork { mode, has_bits, n, to_h } = work;
        let w = self.layers[layer.index()].ffn.as_ref().expect("the layer's FFN is loaded");
        let pieces = &self.scratch.pieces;
        let n_owned = w.ids.len();
        let target = self.vectors(if to_h { pieces.h } else { pieces.sum }, n);
        let counters = self.constants.buffer.piece(self.constants.counters);
        let bank = layer.index() * COUNTER_BYTES + if n == 1 { 0 } else { BANK_BYTES };
        let skips = mode != ActiveMode::Dense;
        let down = match w.down {
            Down::ByNeuron(down) => down,
            // Not read as such.
            Down::ByOutput(_) => w.up,
        };
        let ffn = FfnView {
            gate: w.gate.map(|gate| gate.on(&w.buffer)),
            up: w.up.on(&w.buffer),
            up_bias: w.up_bias.map(|bias| w.buffer.piece(bias)),
            down: down.on(&w.buffer),
            owned: w.buffer.piece(w.owned),
            n_owned,
            n_ff: w.n_ff,
            n_embd: spec.n_embd,
            activation: spec.activation,
            gating: spec.gating,
            skips_up: skips && spec.activation.has_exact_zeros(),
            skips_down: skips,
            bits: has_bits.then(|| self.bits(n, w.n_ff)),
            x: self.vectors(pieces.ffn_x, n),
            hidden: self.piece(pieces.hidden),
            list: self.piece(pieces.list),
            counts: self.piece(pieces.counts),
            part: self.piece(pieces.part),
            chunk_rows: w.chunk_rows,
            marks: (n > 1).then(|| self.piece(pieces.marks)),
            counters: counters.sub(bank, BANK_BYTES),
            fired: self.fired.map(|fired| fired.buffer.piece(fired.layers[layer.index()])),
        };
        let is_list = w.is_list(n);
        if is_list {
            device.compact(&ffn, n);
            device.ffn_by_list(&ffn, n);
            device.reduce(&ffn, true, target, to_h, n);
        } else {
            if has_bits {
                // For the count of active neurons.
                for first in (0..n).step_by(LIST_ROWS) {
                    device.compact(&ffn.from(first), LIST_ROWS.min(n - first));
                }
            }
            device.hidden_by_tile(&ffn, n);
            match w.down {
                Down::ByNeuron(_) if n >= MATMUL_TOKENS => device.down_by_matmul(&ffn, target, to_h, n),
                Down::ByNeuron(_) => {
                    for first in (0..n).step_by(TILE) {
                        let (part, n_part) = (ffn.from(first), TILE.min(n - first));
                        device.down_by_tile(&part, n_part);
                        let target = target.from(floats(first * spec.n_embd));
                        device.reduce(&part, false, target, to_h, n_part);
                    }
                }
                Down::ByOutput(down) => {
                    let hidden = rows(ffn.hidden, n_owned);
                    let flags = if to_h { ACCUMULATE } else { 0 };
                    let target = rows(target, spec.n_embd);
                    device.product(down.on(&w.buffer), hidden, None, target, n, flags);
                }
            }
        }
        device.count_fired(&ffn, is_list, n);
        if ffn.marks.is_some() {
            device.count_marks(&ffn);
        }
    }

    /// `h = layer(h)` of a layer that is wholly here.
    fn whole_layer(&self, device: &mut Device, layer: LayerId, mode: ActiveMode, n: usize, n_spans: usize) {
        if self.spec.block == BlockKind::Parallel {
            self.make_input(device, layer, mode, n);
            self.attend(device, layer, n, n_spans);
        } else {
            self.attend(device, layer, n, n_spans);
            self.make_input(device, layer, mode, n);
        }
        let has_bits = self.predictor(layer, mode).is_some();
        self.run_ffn(device, layer, FfnWork { mode, has_bits, n, to_h: true });
        let w = dense(self.layers, layer);
        if let Some(bias) = w.down_bias {
            let h = self.vectors(self.scratch.pieces.h, n);
            device.add_rows(h, None, Some(w.buffer.piece(bias)), [n, self.spec.n_embd]);
        }
    }
}

/// What an FFN is run on.
#[derive(Clone, Copy, Debug)]
struct FfnWork {
    mode: ActiveMode,
    /// There are active sets; without them all neurons are active.
    has_bits: bool,
    n: usize,
    /// The sum is added to the residual stream.
    to_h: bool,
}

impl Ffn {
    /// Steps of `n` tokens take their neurons from lists.
    fn is_list(&self, n: usize) -> bool {
        n <= LIST_TOKENS && matches!(self.down, Down::ByNeuron(_))
    }
}

/// Fails with the numbers where a step has more rows than room.
fn expect_rows(scratch: Option<&Scratch>, n: usize) {
    let max_rows = scratch.map_or(0, |s| s.shape.max_rows);
    assert!(n <= max_rows, "a step of {n} rows, {max_rows} were reserved");
}

/// Adds floats that lie in bytes.
fn add(to: &mut [f32], bytes: &[u8]) {
    let (values, _) = bytes.as_chunks::<4>();
    assert_eq!(to.len(), values.len(), "lengths of a sum");
    for (to, &value) in to.iter_mut().zip(values) {
        *to += f32::from_ne_bytes(value);
    }
}

impl CudaBackend {
    /// Opens the device.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if there is no driver or no such device, or one of them is too old;
    /// [`BackendError::OutOfMemory`].
    pub fn new(spec: Arc<ModelSpec>, options: CudaOptions) -> Result<Self, BackendError> {
        let gpu = driver::open(options.device)?;
        Self::with_gpu(spec, gpu, options)
    }

    /// The same on any [`Gpu`].
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if it does not take the kernels, [`BackendError::OutOfMemory`].
    #[doc(hidden)]
    pub fn with_gpu(
        spec: Arc<ModelSpec>,
        mut gpu: Box<dyn Gpu>,
        options: CudaOptions,
    ) -> Result<Self, BackendError> {
        gpu.load_kernels(None)?;
        let mut device = Device::new(
            gpu,
            options.memory_limit,
            options.without_graphs.then(|| "it was told so".to_owned()),
        );
        let mut plan = Plan::default();
        let no_freqs = Vec::new();
        let frequencies = spec.rope.as_ref().map_or(&no_freqs, |rope| &rope.freqs);
        let freqs = plan.add(floats(frequencies.len()));
        let counters = plan.add(spec.n_layer * COUNTER_BYTES);
        let buffer = device.alloc(plan, "constants")?;
        device.gpu().write(buffer.piece(freqs), bytemuck::cast_slice(frequencies));
        device.zero(buffer.piece(counters));
        let host = device.gpu().alloc_host(spec.n_layer * COUNTER_BYTES)?;
        Ok(Self {
            kv_type: options.kv_type,
            device: RefCell::new(device),
            constants: Constants { buffer, freqs, counters, host },
            embedding: None,
            layers: (0..spec.n_layer).map(|_| Layer::default()).collect(),
            head: None,
            n_kv_layer: 0,
            sequences: Vec::new(),
            shape: ScratchShape::default(),
            scratch: None,
            entering: None,
            n_rows: 0,
            n_spans: 0,
            made: None,
            pending: None,
            waiting: Cell::new(None),
            next_slot: 0,
            has_counts: false,
            fired: None,
            cost: StepCost::default(),
            hidden_bytes: Cell::new(0),
            spec,
        })
    }

    /// Bytes of device memory in use.
    pub fn memory_used(&self) -> u64 {
        self.device.borrow().used()
    }

    /// Most bytes of device memory that were ever in use.
    pub fn memory_peak(&self) -> u64 {
        self.device.borrow().peak()
    }

    /// Bytes of device memory that the buffers in use take: each a multiple of the 2 MiB that the driver hands out. Small
    /// buffers may share such a page, so it can be less.
    pub fn memory_taken(&self) -> u64 {
        self.device.borrow().taken()
    }

    /// Seconds that a copy of `n_bytes` on the device takes, as a measure for kernels.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    #[doc(hidden)]
    pub fn copy_seconds(&mut self, n_bytes: usize) -> Result<f64, BackendError> {
        const N_COPIES: u32 = 10;
        let device = self.device.get_mut();
        let mut plan = Plan::default();
        let [from, to] = [plan.add(n_bytes), plan.add(n_bytes)];
        let buffer = device.alloc(plan, "a copy")?;
        device.gpu().copy(buffer.piece(from), buffer.piece(to));
        device.gpu().synchronize();
        let start = Instant::now();
        for _ in 0..N_COPIES {
            device.gpu().copy(buffer.piece(from), buffer.piece(to));
        }
        device.gpu().synchronize();
        let seconds = start.elapsed().as_secs_f64() / f64::from(N_COPIES);
        device.free(buffer);
        Ok(seconds)
    }

    /// Makes the scratch as large as what is loaded and reserved asks for.
    fn make_room(&mut self, max_rows: usize) -> Result<(), BackendError> {
        let longest = self.sequences.iter().map(|s| s.kv_len).max().unwrap_or(0);
        let mut shape = ScratchShape {
            max_rows: self.shape.max_rows.max(max_rows),
            max_spans: self.shape.max_spans.max(spans(longest)),
            n_kv_layer: self.n_kv_layer,
            has_tables: self.embedding.is_some(),
            has_head: self.head.is_some(),
            has_ffn: self.layers.iter().any(|l| l.ffn.is_some()),
            ..ScratchShape::default()
        };
        for predictor in self.layers.iter().filter_map(|l| l.predictor.as_ref()) {
            match predictor {
                Predictor::LowRank { fc1, .. } => shape.rank = shape.rank.max(fc1.n_rows),
                Predictor::Copy { copy, .. } => {
                    shape.copy_padded = shape.copy_padded.max(copy.n_padded);
                    shape.copy_outliers = shape.copy_outliers.max(copy.n_outliers);
                }
            }
        }
        if self.scratch.as_ref().is_some_and(|s| s.shape == shape) {
            return Ok(());
        }
        let device = self.device.get_mut();
        if let Some(old) = self.scratch.take() {
            old.free(device);
        }
        match Scratch::new(shape, &self.spec, device) {
            Ok(scratch) => self.scratch = Some(scratch),
            Err(error) => {
                // What was there fits again, unless somebody else was faster.
                if self.shape.max_rows > 0 {
                    self.scratch = Scratch::new(self.shape, &self.spec, device).ok();
                }
                return Err(error);
            }
        }
        self.shape = shape;
        (self.made, self.pending) = (None, None);
        Ok(())
    }

    /// Bytes of keys or of values of `n` positions in one layer.
    fn kv_bytes(&self, n: usize) -> usize {
        n.saturating_mul(self.spec.kv_dim() * self.kv_type.value_bytes())
    }

    /// Starts a step: positions, ids and the addresses of caches go to the device, when it is sure that the ids are in
    /// the vocabulary and the positions in the caches (TABLES-CHECKED).
    fn begin(&mut self, step: &Step<'_>) {
        self.launch_waiting();
        let n = step.rows.len();
        expect_rows(self.scratch.as_ref(), n);
        self.n_rows = n;
        self.made = None;
        let scratch = self.scratch.as_ref().expect("steps are reserved");
        let device = self.device.get_mut();
        let used = scratch.shape.tables_bytes(n);
        let bytes = &mut device.gpu().host(scratch.tables)[..used];
        let ids_at = table_bytes(n);
        let caches_at = 2 * ids_at;
        let one = cache_table_bytes(n);
        let mut last = 0;
        for (ix, row) in step.rows.iter().enumerate() {
            let token = row.token.index();
            assert!(token < self.spec.n_vocab, "token {token} of {}", self.spec.n_vocab);
            let position = row.pos as usize;
            last = last.max(position);
            bytes[ix * 4..][..4].copy_from_slice(&row.pos.to_le_bytes());
            bytes[ids_at + ix * 4..][..4].copy_from_slice(&row.token.0.to_le_bytes());
            if scratch.shape.n_kv_layer == 0 {
                continue;
            }
            let sequence = self.sequences.iter().find(|s| s.id == row.seq);
            let sequence = sequence.unwrap_or_else(|| panic!("sequence {} is not reserved", row.seq));
            assert!(position < sequence.kv_len, "position {position} of {} reserved", sequence.kv_len);
            for (place, &piece) in sequence.pieces.iter().enumerate() {
                let at = sequence.buffer.piece(piece).at();
                bytes[caches_at + place * one + ix * 8..][..8].copy_from_slice(&at.to_le_bytes());
            }
        }
        self.n_spans = last / SPAN + 1;
        let to = scratch.buffer.piece(scratch.pieces.tables).sub(0, used);
        device.gpu().upload(scratch.tables, 0..used, to);
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            spec: &self.spec,
            constants: &self.constants,
            layers: &self.layers,
            scratch: self.scratch.as_ref().expect("steps are reserved"),
            fired: self.fired.as_ref(),
            kv_type: self.kv_type,
        }
    }

    /// Launches the layers that wait.
    fn launch_waiting(&self) {
        let Some(WholeLayers { first, end, mode }) = self.waiting.take() else { return };
        let parts = self.parts();
        let n = self.n_rows;
        // More spans than positions change nothing, and few graphs serve a growing text.
        let n_spans = self.n_spans.next_power_of_two().min(parts.scratch.shape.max_spans);
        let key = GraphKey { layers: (first.0, end.0), mode, n_rows: n, n_spans };
        self.device.borrow_mut().run_as_graph(key, |device| {
            for layer in (first.0..end.0).map(LayerId) {
                parts.whole_layer(device, layer, mode, n, n_spans);
            }
        });
    }

    /// Notes what attention reads.
    fn count_attention(&mut self, layer: LayerId, step: &Step<'_>) {
        self.cost.weight_bytes += dense(&self.layers, layer).weight_bytes() as u64;
        let position_bytes = 2 * self.kv_bytes(1) as u64;
        self.cost.kv_bytes += step.rows.iter().map(|r| (u64::from(r.pos) + 1) * position_bytes).sum::<u64>();
    }

    /// Notes what a predictor reads; whether one has its say.
    fn count_predictor(&mut self, layer: LayerId, step: &Step<'_>) -> bool {
        let predictor = self.layers[layer.index()].predictor.as_ref();
        let Some(predictor) = predictor.filter(|_| step.mode == ActiveMode::Predictor) else { return false };
        let is_read = match predictor {
            Predictor::LowRank { .. } => true,
            Predictor::Copy { .. } => step.rows.iter().any(|row| row.pos != 0),
        };
        if is_read {
            self.cost.predictor_bytes += predictor.n_bytes() as u64;
            self.cost.weight_bytes += predictor.n_bytes() as u64;
        }
        true
    }

    /// Notes what an FFN reads and computes, but for what the device counts.
    fn count_ffn(&mut self, layer: LayerId, has_bits: bool, n: usize) {
        let w = self.layers[layer.index()].ffn.as_ref().expect("the layer's FFN is loaded");
        let n_pairs = (n * w.ids.len()) as u64;
        self.has_counts |= n_pairs > 0;
        self.cost.owned_neurons += n_pairs;
        if !w.is_list(n) && !has_bits {
            self.cost.active_neurons += n_pairs;
        }
        if let Down::ByOutput(down) = w.down {
            self.cost.down_rows += n_pairs;
            self.cost.weight_bytes += down.n_bytes() as u64;
        }
    }

    /// The FFN's input and, if a predictor has its say, the active sets, on the device; whether it had.
    fn make_input(&mut self, layer: LayerId, step: &Step<'_>) -> bool {
        self.parts().make_input(&mut self.device.borrow_mut(), layer, step.mode, self.n_rows);
        let has_bits = self.count_predictor(layer, step);
        self.made = Some((layer, has_bits));
        has_bits
    }

    /// Adds what is on the host, and the down bias, to the residual stream.
    fn add_to_hidden(&mut self, layer: LayerId, acc: &[f32], own_sum: bool) {
        self.launch_waiting();
        let n = self.n_rows;
        let n_embd = self.spec.n_embd;
        assert_eq!(acc.len(), n * n_embd, "sum of layer {layer}: [{n}, {n_embd}]");
        let p = self.parts();
        let device = &mut *self.device.borrow_mut();
        let w = dense(&self.layers, layer);
        let pieces = &p.scratch.pieces;
        let h = p.vectors(pieces.h, n);
        if own_sum {
            device.add_rows(h, Some(p.vectors(pieces.sum, n)), None, [n, n_embd]);
        }
        // The FFN's input is of no use any more.
        let x = p.vectors(pieces.ffn_x, n);
        let bytes = bytemuck::cast_slice(acc);
        device.gpu().host(p.scratch.inbox)[..bytes.len()].copy_from_slice(bytes);
        device.gpu().upload(p.scratch.inbox, 0..bytes.len(), x);
        let bias = w.down_bias.map(|bias| w.buffer.piece(bias));
        device.add_rows(h, Some(x), bias, [n, n_embd]);
        self.cost.bytes_in += bytes.len() as u64;
        self.made = None;
    }

    /// Takes a ticket, and says whether its sum is on its way.
    fn redeem(&mut self, ticket: &Ticket) -> Pending {
        let pending = self.pending.take();
        assert_eq!(
            pending.as_ref().map(|p| p.slot),
            Some(ticket.slot),
            "a ticket is finished once, where it was made"
        );
        pending.expect("just compared")
    }
}

fn unsupported(reason: String) -> BackendError {
    BackendError::Unavailable { backend: NAME.into(), reason }
}

impl HybridBackend for CudaBackend {
    fn info(&self) -> BackendInfo {
        let device = self.device.borrow();
        BackendInfo {
            name: NAME.into(),
            description: device.description(),
            memory_bytes: Some(device.memory_bytes()),
            asynchronous: true,
        }
    }

    fn load_dense(&mut self, part: DensePart) -> Result<(), BackendError> {
        self.launch_waiting();
        part.check(&self.spec)?;
        let spec = &*self.spec;
        let device = self.device.get_mut();
        match part {
            DensePart::Embedding(w) => {
                if let Some(old) = self.embedding.replace(Embedding::load(&w, device)?) {
                    device.free(old.buffer);
                }
            }
            DensePart::Layer(layer, w) => {
                if spec.block == BlockKind::Sequential && w.ffn_norm.is_none() {
                    return Err(BackendError::Shape(ShapeError::Shape {
                        tensor: format!("blk.{layer}.ffn_norm.weight"),
                        expected: vec![spec.n_embd],
                        got: vec![],
                    }));
                }
                if spec.head_dim > MAX_HEAD_DIM {
                    let got = spec.head_dim;
                    return Err(unsupported(format!(
                        "it attends with heads of up to {MAX_HEAD_DIM} values, the model's have {got}"
                    )));
                }
                let slot = &mut self.layers[layer.index()].dense;
                let kv_layer = slot.as_ref().map_or(self.n_kv_layer, |old| old.kv_layer);
                if let Some(old) = slot.replace(Dense::load(&w, kv_layer, device)?) {
                    device.free(old.buffer);
                }
                self.n_kv_layer = self.n_kv_layer.max(kv_layer + 1);
            }
            DensePart::Head(w) => {
                if let Some(old) = self.head.replace(Head::load(&w, device)?) {
                    device.free(old.buffer);
                }
            }
        }
        Ok(())
    }

    fn load_ffn(
        &mut self,
        layer: LayerId,
        weights: FfnWeights,
        owned: &NeuronSet,
    ) -> Result<(), BackendError> {
        self.launch_waiting();
        weights.check(&self.spec, layer)?;
        assert_eq!(owned.n_ff(), weights.n_ff(), "neurons of layer {layer}: owned set and weights");
        if !matches!(self.spec.activation, Activation::Relu | Activation::Silu | Activation::Gelu) {
            return Err(unsupported(format!("it has no {}", self.spec.activation.name())));
        }
        let device = self.device.get_mut();
        let ffn = Ffn::load(&self.spec, &weights, owned, device)?;
        if let Some(old) = self.layers[layer.index()].ffn.replace(ffn) {
            device.free(old.buffer);
        }
        Ok(())
    }

    fn swap_neurons(
        &mut self,
        layer: LayerId,
        weights: &FfnWeights,
        leave: &[NeuronId],
        enter: &[NeuronId],
    ) -> bool {
        self.launch_waiting();
        let device = self.device.get_mut();
        let Some(ffn) = self.layers[layer.index()].ffn.as_mut() else { return false };
        let Down::ByNeuron(down) = ffn.down else { return false };
        assert_eq!(leave.len(), enter.len(), "neurons that leave and enter layer {layer}");
        let is_turned = matches!(weights.down, DownWeights::ByOutput(_));
        let matrices: Vec<(Matrix, Option<&WeightMatrix>)> = ffn
            .gate
            .zip(weights.gate.as_ref())
            .map(|(to, from)| (to, Some(from)))
            .into_iter()
            .chain([(ffn.up, Some(&weights.up)), (down, (!is_turned).then(|| weights.down.matrix()))])
            .collect();
        let need: usize = matrices.iter().map(|(m, _)| m.row_bytes).sum::<usize>() + 8;
        let need = need * enter.len();
        let host = match self.entering {
            Some((host, n_bytes)) if n_bytes >= need => host,
            old => {
                if let Some((host, _)) = old {
                    device.gpu().free_host(host);
                }
                self.entering = None;
                let Ok(host) = device.gpu().alloc_host(need) else { return false };
                self.entering = Some((host, need));
                host
            }
        };
        let slots: Vec<usize> = leave
            .iter()
            .map(|id| ffn.ids.iter().position(|held| held == id))
            .map(|slot| slot.unwrap_or_else(|| panic!("{leave:?} are held in layer {layer}")))
            .collect();
        // Everything is put together before the first copy starts, since pinned memory is not written while one runs.
        let mut copies: Vec<(Range<usize>, View<'_>)> = Vec::new();
        let bytes = device.gpu().host(host);
        let mut at = 0;
        for (&slot, &id) in slots.iter().zip(enter) {
            assert!(!ffn.ids.contains(&id), "{enter:?} are not held in layer {layer}");
            let mut put = |piece: Piece, offset: usize, n: usize, fill: &mut dyn FnMut(&mut [u8])| {
                fill(&mut bytes[at..at + n]);
                copies.push((at..at + n, ffn.buffer.piece(piece).sub(offset, n)));
                at += n;
            };
            for &(to, from) in &matrices {
                put(to.piece, slot * to.row_bytes, to.row_bytes, &mut |out| match from {
                    Some(from) => out.copy_from_slice(from.row(id.index())),
                    None => {
                        // A column of the matrix by output.
                        let (m, size) = (weights.down.matrix(), to.ty.block_bytes());
                        for (row, out) in out.chunks_exact_mut(size).enumerate() {
                            out.copy_from_slice(&m.row(row)[id.index() * size..][..size]);
                        }
                    }
                });
            }
            if let (Some(to), Some(bias)) = (ffn.up_bias, &weights.up_bias) {
                put(to, slot * 4, 4, &mut |out| out.copy_from_slice(&bias[id.index()].to_ne_bytes()));
            }
            put(ffn.owned, slot * 4, 4, &mut |out| out.copy_from_slice(&id.0.to_ne_bytes()));
        }
        for (range, to) in copies {
            device.gpu().upload(host, range, to);
        }
        for (&slot, &id) in slots.iter().zip(enter) {
            ffn.ids[slot] = id;
        }
        let row_bytes: usize = matrices.iter().map(|(m, _)| m.row_bytes).sum();
        self.cost.swapped_bytes += (row_bytes * enter.len()) as u64;
        self.made = None;
        true
    }

    fn load_predictor(&mut self, layer: LayerId, weights: PredictorWeights) -> Result<(), BackendError> {
        self.launch_waiting();
        weights.check(&self.spec, layer)?;
        let device = self.device.get_mut();
        let predictor = match weights {
            PredictorWeights::LowRank(p) => Predictor::low_rank(&p, device)?,
            PredictorWeights::GateCopy(p) => Predictor::copy(&p, device)?,
        };
        if let Some(old) = self.layers[layer.index()].predictor.replace(predictor) {
            device.free(old.into_buffer());
        }
        Ok(())
    }

    fn reserve(&mut self, seq: SeqId, kv_len: usize, max_rows: usize) -> Result<(), BackendError> {
        self.launch_waiting();
        let n_pieces = 2 * self.n_kv_layer;
        let at = self.sequences.iter().position(|s| s.id == seq);
        let old_len = at.map_or(0, |at| self.sequences[at].kv_len);
        if at.is_none_or(|at| old_len < kv_len || self.sequences[at].pieces.len() < n_pieces) {
            let kv_len = kv_len.max(old_len);
            let mut plan = Plan::default();
            let pieces = (0..n_pieces).map(|_| plan.add(self.kv_bytes(kv_len))).collect();
            let device = self.device.get_mut();
            let buffer = device.alloc_cache(plan, &format!("keys and values of {kv_len} positions"))?;
            let new = Sequence { id: seq, kv_len, buffer, pieces };
            match at {
                None => self.sequences.push(new),
                Some(at) => {
                    let old = std::mem::replace(&mut self.sequences[at], new);
                    let new = &self.sequences[at];
                    for (&from, &to) in old.pieces.iter().zip(&new.pieces) {
                        let from = old.buffer.piece(from);
                        device.gpu().copy(from, new.buffer.piece(to).sub(0, from.n_bytes()));
                    }
                    device.free_cache(old.buffer);
                }
            }
        }
        let made = self.make_room(max_rows);
        if made.is_err() && at.is_none() {
            self.release(seq);
        }
        made
    }

    fn kv_copy(&mut self, from: SeqId, to: SeqId, range: Range<u32>) {
        self.launch_waiting();
        if from == to || range.is_empty() {
            return;
        }
        let (at, n) = (self.kv_bytes(range.start as usize), self.kv_bytes(range.len()));
        let find = |id| self.sequences.iter().find(|s| s.id == id);
        let (Some(from), Some(to)) = (find(from), find(to)) else {
            panic!("sequences {from} and {to} are reserved");
        };
        let device = self.device.get_mut();
        for (&a, &b) in from.pieces.iter().zip(&to.pieces) {
            device.gpu().copy(from.buffer.piece(a).sub(at, n), to.buffer.piece(b).sub(at, n));
        }
    }

    fn release(&mut self, seq: SeqId) {
        self.launch_waiting();
        if let Some(at) = self.sequences.iter().position(|s| s.id == seq) {
            let old = self.sequences.swap_remove(at);
            self.device.get_mut().free_cache(old.buffer);
        }
    }

    fn embed(&mut self, step: &Step<'_>) {
        self.begin(step);
        let n = self.n_rows;
        let p = self.parts();
        let device = &mut *self.device.borrow_mut();
        let tables = self.embedding.as_ref().expect("the embedding is loaded on home");
        let h = p.vectors(p.scratch.pieces.h, n);
        device.embed(tables.token.on(&tables.buffer), p.ids(n), h, n, 0, false);
        let mut row_bytes = tables.token.row_bytes;
        if let Some((table, first)) = tables.position {
            let last = step.rows.iter().map(|row| row.pos as usize).max().unwrap_or(0);
            assert!(last + first < table.n_rows, "position {last} of {} known", table.n_rows - first);
            device.embed(table.on(&tables.buffer), p.positions(n), h, n, first, true);
            row_bytes += table.row_bytes;
        }
        self.cost.weight_bytes += (n * row_bytes) as u64;
    }

    fn set_hidden(&mut self, step: &Step<'_>, h: &[f32]) {
        let n = step.rows.len();
        assert_eq!(h.len(), n * self.spec.n_embd, "residual stream of {n} rows");
        self.begin(step);
        let p = self.parts();
        let device = &mut *self.device.borrow_mut();
        let bytes = bytemuck::cast_slice(h);
        device.gpu().host(p.scratch.inbox)[..bytes.len()].copy_from_slice(bytes);
        device.gpu().upload(p.scratch.inbox, 0..bytes.len(), p.vectors(p.scratch.pieces.h, n));
        self.cost.bytes_in += bytes.len() as u64;
    }

    fn whole_layer(&mut self, layer: LayerId, step: &Step<'_>) -> bool {
        let w = &self.layers[layer.index()];
        let is_whole = w.ffn.as_ref().is_some_and(|ffn| ffn.ids.len() == ffn.n_ff);
        if w.dense.is_none() || !is_whole {
            return false;
        }
        let (n, mode) = (self.n_rows, step.mode);
        assert_eq!(step.rows.len(), n, "rows of the step");
        self.count_attention(layer, step);
        let has_bits = self.count_predictor(layer, step);
        self.count_ffn(layer, has_bits, n);
        self.made = None;
        if n > GRAPH_TOKENS {
            self.parts().whole_layer(&mut self.device.borrow_mut(), layer, mode, n, self.n_spans);
            return true;
        }
        // Nothing is launched before something else is asked for, so that the layers become one graph.
        let end = LayerId(layer.0 + 1);
        let next = match self.waiting.get() {
            Some(waiting) if waiting.end == layer && waiting.mode == mode => WholeLayers { end, ..waiting },
            _ => {
                self.launch_waiting();
                WholeLayers { first: layer, end, mode }
            }
        };
        self.waiting.set(Some(next));
        true
    }

    fn attend(&mut self, layer: LayerId, step: &Step<'_>) {
        self.launch_waiting();
        let n = self.n_rows;
        assert_eq!(step.rows.len(), n, "rows of the step");
        self.parts().attend(&mut self.device.borrow_mut(), layer, n, self.n_spans);
        self.count_attention(layer, step);
    }

    fn ffn_input(&mut self, layer: LayerId, step: &Step<'_>, out: &mut FfnInput) {
        self.launch_waiting();
        let has_bits = self.make_input(layer, step);
        let (n, n_embd, n_ff) = (self.n_rows, self.spec.n_embd, self.spec.n_ff[layer.index()]);
        let p = self.parts();
        let mut device = self.device.borrow_mut();
        let gpu = device.gpu();
        let outbox = p.scratch.outbox;
        let (x, bits) = (p.vectors(p.scratch.pieces.ffn_x, n), p.bits(n, n_ff));
        let bits_at = bits_offset(n, n_embd);
        gpu.download(x, outbox, 0);
        if has_bits {
            gpu.download(bits, outbox, bits_at);
        }
        out.mode = step.mode;
        out.x.resize(n * n_embd, 0.0);
        out.active.reset(n, n_ff);
        let bytes = gpu.host(outbox);
        bytemuck::cast_slice_mut::<f32, u8>(&mut out.x).copy_from_slice(&bytes[..x.n_bytes()]);
        let mut n_bytes = x.n_bytes();
        if has_bits {
            let words = bytemuck::cast_slice_mut::<u64, u8>(out.active.words_mut());
            words.copy_from_slice(&bytes[bits_at..][..bits.n_bytes()]);
            n_bytes += bits.n_bytes();
        } else {
            out.active.fill();
        }
        self.cost.bytes_out += n_bytes as u64;
    }

    fn ffn_start(&mut self, layer: LayerId, input: &FfnInput) -> Ticket {
        self.launch_waiting();
        let n = input.active.n_rows();
        let (n_embd, n_ff) = (self.spec.n_embd, self.spec.n_ff[layer.index()]);
        assert_eq!(input.x.len(), n * n_embd, "FFN input of layer {layer}: [{n}, {n_embd}]");
        assert_eq!(input.active.n_ff(), n_ff, "active set of layer {layer}");
        expect_rows(self.scratch.as_ref(), n);
        let w = &self.layers[layer.index()];
        let is_home = w.dense.is_some();
        let is_zero = w.ffn.as_ref().expect("the layer's FFN is loaded").ids.is_empty();
        let made = self.made.take().filter(|&(of, _)| of == layer && n == self.n_rows);
        if !is_zero {
            let has_bits = made.map_or(input.mode == ActiveMode::Predictor, |(_, has_bits)| has_bits);
            if made.is_none() {
                self.send_input(layer, input, has_bits);
            }
            let work = FfnWork { mode: input.mode, has_bits, n, to_h: false };
            self.parts().run_ffn(&mut self.device.borrow_mut(), layer, work);
            self.count_ffn(layer, has_bits, n);
        }
        // At home the sum most often stays.
        let is_coming = !is_home && !is_zero;
        if is_coming {
            self.bring_sum(n);
        }
        let slot = self.next_slot;
        self.next_slot = slot.wrapping_add(1);
        self.pending = Some(Pending { slot, is_coming, is_zero });
        Ticket { layer, n_rows: n, slot }
    }

    fn ffn_finish(&mut self, ticket: Ticket, acc: &mut [f32]) {
        let pending = self.redeem(&ticket);
        let n = ticket.n_rows;
        assert_eq!(acc.len(), n * self.spec.n_embd, "sum of layer {}: [{n}, n_embd]", ticket.layer);
        if pending.is_zero {
            return;
        }
        if !pending.is_coming {
            self.bring_sum(n);
        }
        let scratch = self.scratch.as_ref().expect("steps are reserved");
        add(acc, &self.device.get_mut().gpu().host(scratch.sum)[..floats(acc.len())]);
    }

    fn ffn_add(&mut self, layer: LayerId, acc: &[f32]) {
        self.add_to_hidden(layer, acc, false);
    }

    fn ffn_close(&mut self, ticket: Ticket, acc: &mut [f32]) {
        let pending = self.redeem(&ticket);
        self.add_to_hidden(ticket.layer, acc, !pending.is_zero);
    }

    fn head(&mut self, wanted: Range<usize>, logits: &mut [f32]) {
        self.launch_waiting();
        let spec = &*self.spec;
        let (n, n_vocab, n_embd) = (wanted.len(), spec.n_vocab, spec.n_embd);
        assert_eq!(logits.len(), n * n_vocab, "logits [{n}, {n_vocab}]");
        assert!(wanted.end <= self.n_rows, "rows {wanted:?} of {}", self.n_rows);
        if n == 0 {
            return;
        }
        let p = self.parts();
        let device = &mut *self.device.borrow_mut();
        let w = self.head.as_ref().expect("the head is loaded on home");
        let h = p.piece(p.scratch.pieces.h).sub(floats(wanted.start * n_embd), floats(n * n_embd));
        for (ix, out) in logits.chunks_mut(LOGIT_ROWS * n_vocab).enumerate() {
            let (first, n) = (ix * LOGIT_ROWS, out.len() / n_vocab);
            let x = p.vectors(p.scratch.pieces.x, n);
            let h = h.sub(floats(first * n_embd), floats(n * n_embd));
            p.norm(device, &w.buffer, w.norm, h, x, n);
            let on_device = p.piece(p.scratch.pieces.logits).sub(0, floats(out.len()));
            let y = rows(on_device, n_vocab);
            device.product(w.output.on(&w.buffer), rows(x, n_embd), None, y, n, 0);
            device.gpu().download(on_device, p.scratch.outbox, 0);
            let bytes = &device.gpu().host(p.scratch.outbox)[..floats(out.len())];
            bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(bytes);
        }
        self.cost.bytes_out += floats(logits.len()) as u64;
        self.cost.weight_bytes += w.output.n_bytes() as u64;
    }

    fn hidden(&self, out: &mut [f32]) {
        self.launch_waiting();
        let n = self.n_rows;
        assert_eq!(out.len(), n * self.spec.n_embd, "residual stream of {n} rows");
        let p = self.parts();
        let mut device = self.device.borrow_mut();
        let h = p.vectors(p.scratch.pieces.h, n);
        device.gpu().download(h, p.scratch.outbox, 0);
        let bytes = &device.gpu().host(p.scratch.outbox)[..h.n_bytes()];
        bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(bytes);
        self.hidden_bytes.set(self.hidden_bytes.get() + h.n_bytes() as u64);
    }

    fn record_fired(&mut self, on: bool) {
        self.launch_waiting();
        let device = self.device.get_mut();
        if !on && let Some(fired) = self.fired.take() {
            fired.free(device);
        }
        if on && self.fired.is_none() {
            // Without the memory nothing is counted, which `take_fired` says.
            self.fired = Fired::new(&self.spec, device).ok();
        }
        if let Some(fired) = &self.fired {
            fired.layers.iter().for_each(|&layer| device.zero(fired.buffer.piece(layer)));
        }
    }

    fn take_fired(&mut self, layer: LayerId, counts: &mut [u64]) -> bool {
        self.launch_waiting();
        let (Some(fired), Some(_)) = (&self.fired, &self.layers[layer.index()].ffn) else { return false };
        let n_ff = self.spec.n_ff[layer.index()];
        assert_eq!(counts.len(), n_ff, "counters of layer {layer}");
        let device = self.device.get_mut();
        let on_device = fired.buffer.piece(fired.layers[layer.index()]);
        device.gpu().download(on_device, fired.host, 0);
        device.zero(on_device);
        let (found, _) = device.gpu().host(fired.host)[..8 * n_ff].as_chunks::<8>();
        counts.iter_mut().zip(found).for_each(|(to, n)| *to += u64::from_le_bytes(*n));
        true
    }

    fn take_cost(&mut self) -> StepCost {
        self.launch_waiting();
        let mut cost = std::mem::take(&mut self.cost);
        cost.bytes_out += self.hidden_bytes.take();
        if std::mem::take(&mut self.has_counts) {
            let device = self.device.get_mut();
            let counters = self.constants.buffer.piece(self.constants.counters);
            device.gpu().download(counters, self.constants.host, 0);
            device.zero(counters);
            let bytes = &device.gpu().host(self.constants.host)[..counters.n_bytes()];
            for (layer, bytes) in self.layers.iter().zip(bytes.chunks_exact(COUNTER_BYTES)) {
                let Some(ffn) = &layer.ffn else { continue };
                for (bank, bytes) in bytes.chunks_exact(BANK_BYTES).enumerate() {
                    let mut n = [0u64; 8];
                    for (n, bytes) in n.iter_mut().zip(bytes.as_chunks::<8>().0) {
                        *n = u64::from_le_bytes(*bytes);
                    }
                    let [gate, up, down, fired, active, ..] = n;
                    cost.gate_rows += gate;
                    cost.up_rows += up;
                    cost.down_rows += down;
                    cost.fired_neurons += fired;
                    cost.active_neurons += active;
                    // One token reads each of its rows once.
                    let read = if bank == 0 { [gate, up, down] } else { [n[5], n[6], n[7]] };
                    let row_bytes = |m: Option<Matrix>| m.map_or(0, |m| m.row_bytes as u64);
                    let by_neuron = match ffn.down {
                        Down::ByNeuron(m) => Some(m),
                        Down::ByOutput(_) => None,
                    };
                    let matrices = [ffn.gate, Some(ffn.up), by_neuron];
                    let bytes = read.iter().zip(matrices).map(|(n, m)| n * row_bytes(m));
                    cost.weight_bytes += bytes.sum::<u64>();
                }
            }
        }
        cost
    }
}

impl CudaBackend {
    /// Starts the copy of an FFN's input, and of active sets, to the device.
    fn send_input(&mut self, layer: LayerId, input: &FfnInput, has_bits: bool) {
        let n = input.active.n_rows();
        let (n_embd, n_ff) = (self.spec.n_embd, self.spec.n_ff[layer.index()]);
        let p = self.parts();
        let mut device = self.device.borrow_mut();
        let gpu = device.gpu();
        let (x, bits) = (p.vectors(p.scratch.pieces.ffn_x, n), p.bits(n, n_ff));
        let bits_at = bits_offset(n, n_embd);
        let bytes = gpu.host(p.scratch.inbox);
        bytes[..x.n_bytes()].copy_from_slice(bytemuck::cast_slice(&input.x));
        if has_bits {
            let words = bytemuck::cast_slice(input.active.words());
            bytes[bits_at..][..words.len()].copy_from_slice(words);
        }
        gpu.upload(p.scratch.inbox, 0..x.n_bytes(), x);
        let mut n_bytes = x.n_bytes();
        if has_bits {
            gpu.upload(p.scratch.inbox, bits_at..bits_at + bits.n_bytes(), bits);
            n_bytes += bits.n_bytes();
        }
        self.cost.bytes_in += n_bytes as u64;
    }

    /// Starts the copy of the partial sum to the host.
    fn bring_sum(&mut self, n: usize) {
        let p = self.parts();
        let sum = p.vectors(p.scratch.pieces.sum, n);
        self.device.borrow_mut().gpu().download(sum, p.scratch.sum, 0);
        self.cost.bytes_out += sum.n_bytes() as u64;
    }
}
