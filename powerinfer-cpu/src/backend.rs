//! [`CpuBackend`]: the operators of the trait, on the pool.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use powerinfer_sparse_ops::{
    ActiveMode, BackendError, BackendInfo, BlockKind, DensePart, DownWeights, EmbeddingWeights, FfnInput,
    FfnWeights, HybridBackend, LayerId, LayerWeights, ModelSpec, NeuronSet, NormWeights, PredictorWeights,
    SeqId, ShapeError, Step, StepCost, Ticket, WeightMatrix, WeightType,
};

use crate::attention::{AttentionScratch, KvCache, KvCaches, KvType, Queries, attention};
use crate::certificate::Certificate;
use crate::cores::default_threads;
use crate::ffn::{FfnScratch, LayerFfn, PlannedFfn, ffn};
use crate::input::{Forms, InputBuffers};
use crate::kernel::AXPY_TYPES;
use crate::level::CpuLevel;
use crate::matmul::{Cpu, matmul, matvecs};
use crate::memory::{Memory, anonymous, open_cache, write_cache};
use crate::ops::{add, add_batch, norm, rope_table, rotate};
use crate::pool::Pool;
use crate::predict::{PredictScratch, Predictor, predict};
use crate::rows::{Planned, Planner, Rows, Source};

/// Name in messages and summaries.
const NAME: &str = "cpu";

/// How a [`CpuBackend`] is to run.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Threads that compute, the caller included; 0 for [`default_threads`].
    pub threads: usize,
    /// Keep each worker on a core of its own; off by default, since it gains nothing on a quiet machine and loses on a
    /// busy one. See [`Pool::try_pinned`].
    pub pin: bool,
    /// Instruction set; `None` for the best of this CPU.
    pub level: Option<CpuLevel>,
    /// How keys and values are kept.
    pub kv_type: KvType,
    /// Where weights live.
    pub home: WeightHome,
    /// Whether gates get an 8-bit copy that shows which of their rows need not be read.
    pub certified: Certified,
}

/// Whether a [`CpuBackend`] makes 8-bit copies of the gates of ReLU models in F16, BF16 or F32, a little over 8 bits a
/// weight. When one token wants all neurons of a layer, as in mode `exact`, such a copy is read first; it proves of
/// most silent neurons that they are silent, and only the other rows of the gate are read. No bit of a result changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Certified {
    /// For gates of F16 and BF16 with rows of at least 1024 weights, in layers without a predictor, on CPUs with AVX-512,
    /// if there is memory for it.
    #[default]
    Auto,
    /// For all gates for which it is possible.
    On,
    /// For none.
    Off,
}

/// Where the weights of a [`CpuBackend`] live. They are always laid out anew for the kernels, without a change of any
/// weight, and the pages of a mapped file that they came from are given back, so there is one copy of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightHome {
    /// Memory of this process, in huge pages where the system has them.
    #[default]
    HugePages,
    /// Memory of this process, in pages of the usual size.
    SmallPages,
    /// A file that holds the weights as they are laid out. If it is there and was made from these weights it is
    /// mapped, and shared with other processes that do the same; otherwise weights go to huge pages and the file is
    /// written for the next time. Nobody may change or shorten it while it is used.
    CacheFile(PathBuf),
}

/// Computes on the CPU, on weights that [`HybridBackend::load_done`] brought into memory of its own ([`WeightHome`]). A
/// Q8_0 down projection of a ReLU model that lies by output is turned to by neuron there, with the same weights, so
/// that silent neurons can be skipped. The token embedding, of which a step reads one row, stays where it is.
///
/// Dot products with F32, F16 and BF16 weights take the f32 vector as it is. For the others it is rounded to 8 bits, in
/// blocks of 256 for the K types and of 32 for the rest, by the rules of
/// [`block`](powerinfer_sparse_ops::block). Hidden values that meet a down projection by neuron are never rounded.
///
/// The bits of a result depend on the [`CpuLevel`], the weights and the inputs of that row; neither on the number of
/// threads nor on the other rows of a step.
#[derive(Debug)]
pub struct CpuBackend {
    spec: Arc<ModelSpec>,
    cpu: Cpu,
    kv_type: KvType,
    home: WeightHome,
    certified: Certified,
    /// Where weights are, for people.
    home_used: Option<String>,
    embedding: Option<EmbeddingWeights>,
    layers: Vec<Layer>,
    head: Option<Head>,
    /// What has been taken since the last `load_done`, and where it goes.
    planner: Planner,
    pending: Vec<Pending>,
    weight_bytes: usize,
    /// Of these, bytes of certificates.
    certified_bytes: usize,
    has_relaid: bool,
    /// Layers whose dense part is here.
    n_kv_layer: usize,
    caches: KvCaches,
    max_rows: usize,
    /// Rows of the current step.
    n_rows: usize,
    scratch: Scratch,
    next_slot: u32,
    cost: StepCost,
}

#[derive(Debug, Default)]
struct Layer {
    dense: Option<Dense>,
    ffn: Option<LayerFfn>,
    predictor: Option<Predictor>,
}

/// Attention and norms of a layer.
#[derive(Debug)]
struct Dense {
    /// Place among the layers of a KV cache, which has only those that are at home here.
    kv_layer: usize,
    /// Norms and biases.
    weights: Box<LayerWeights>,
    q: Rows,
    k: Rows,
    v: Rows,
    output: Rows,
}

#[derive(Debug)]
struct Head {
    norm: NormWeights,
    output: Rows,
}

/// Weights that are planned but not in memory.
#[derive(Debug)]
enum Pending {
    Dense(LayerId, Box<LayerWeights>, [Planned; 4]),
    Head(NormWeights, Planned),
    Ffn(LayerId, Box<PlannedFfn>),
    LowRank(LayerId, [Planned; 2], f32),
}

/// Buffers of a step, for `max_rows` rows.
#[derive(Debug, Default)]
struct Scratch {
    /// Residual stream, `[n_rows, n_embd]`.
    h: Vec<f32>,
    /// Normed copy of it, or what is added to it, `[n_rows, n_embd]`.
    x: Vec<f32>,
    /// Queries `[n_rows, q_dim]`, then keys and values `[n_rows, kv_dim]`.
    qkv: Vec<f32>,
    /// Mixed values, `[n_rows, q_dim]`.
    mixed: Vec<f32>,
    /// Rotation of each row, `[n_rows, n_rot / 2]`.
    rope: Vec<(f32, f32)>,
    /// One row of a position table, `[n_embd]`.
    position: Vec<f32>,
    attention: AttentionScratch,
    predict: PredictScratch,
    inputs: InputBuffers,
    ffn: FfnScratch,
    /// What the FFN gets of a layer of which only some neurons are held.
    local: FfnInput,
    /// Partial sums between start and finish; two, so that the next layer may start before the last is finished.
    partial: [Partial; 2],
}

/// A partial sum and the ticket it waits for.
#[derive(Debug, Default)]
struct Partial {
    slot: Option<u32>,
    /// `[n_rows, n_embd]`.
    sum: Vec<f32>,
}

impl CpuBackend {
    /// A backend for models of this shape, holding nothing yet.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if there are to be more than 1024 threads, or the system refuses them;
    /// [`BackendError::KvBlocks`] if a head is not whole blocks of the type that keys and values are kept in.
    pub fn new(spec: Arc<ModelSpec>, options: CpuOptions) -> Result<Self, BackendError> {
        const MAX_THREADS: usize = 1024;
        if !spec.head_dim.is_multiple_of(options.kv_type.block_len()) {
            return Err(BackendError::KvBlocks {
                backend: NAME.into(),
                kv_type: options.kv_type.name(),
                block_len: options.kv_type.block_len(),
                head_dim: spec.head_dim,
            });
        }
        let threads = if options.threads == 0 { default_threads() } else { options.threads };
        if threads > MAX_THREADS {
            return Err(BackendError::Unavailable {
                backend: NAME.into(),
                reason: format!("{threads} threads are asked for, at most {MAX_THREADS} are made"),
            });
        }
        let pool = if options.pin { Pool::try_pinned(threads) } else { Pool::try_new(threads) };
        let pool = pool.map_err(|error| BackendError::Unavailable {
            backend: NAME.into(),
            reason: format!("{threads} threads could not be started: {error}"),
        })?;
        Ok(Self {
            cpu: Cpu::new(pool, options.level.unwrap_or_else(CpuLevel::detect)),
            kv_type: options.kv_type,
            home: options.home,
            certified: options.certified,
            home_used: None,
            embedding: None,
            layers: (0..spec.n_layer).map(|_| Layer::default()).collect(),
            head: None,
            planner: Planner::default(),
            pending: Vec::new(),
            weight_bytes: 0,
            certified_bytes: 0,
            has_relaid: false,
            n_kv_layer: 0,
            caches: KvCaches::default(),
            max_rows: 0,
            n_rows: 0,
            scratch: Scratch::default(),
            next_slot: 0,
            cost: StepCost::default(),
            spec,
        })
    }

    /// The instruction set in use.
    pub fn level(&self) -> CpuLevel {
        self.cpu.level
    }

    /// Makes every buffer large enough for steps of `max_rows` and for what has been loaded.
    fn make_room(&mut self, max_rows: usize) {
        let spec = &*self.spec;
        self.max_rows = self.max_rows.max(max_rows);
        let rows = self.max_rows;
        self.layers.iter_mut().filter_map(|l| l.ffn.as_mut()).for_each(|ffn| ffn.make_room(rows));
        let ffns = || self.layers.iter().filter_map(|l| l.ffn.as_ref());
        let by_output = ffns().any(LayerFfn::is_by_output);
        let by_neuron = ffns().any(|f| !f.is_by_output());
        let predictors = || self.layers.iter().filter_map(|l| l.predictor.as_ref());
        let rank = predictors().map(Predictor::rank).max().unwrap_or(0);
        let hidden = if by_output { spec.max_n_ff() } else { 0 };
        let s = &mut self.scratch;
        let grow = |v: &mut Vec<f32>, n: usize| v.resize(v.len().max(n), 0.0);
        grow(&mut s.h, rows * spec.n_embd);
        grow(&mut s.x, rows * spec.n_embd);
        grow(&mut s.qkv, rows * (spec.q_dim() + 2 * spec.kv_dim()));
        grow(&mut s.mixed, rows * spec.q_dim());
        grow(&mut s.position, spec.n_embd);
        s.partial.iter_mut().for_each(|p| grow(&mut p.sum, rows * spec.n_embd));
        let n_pairs = spec.rope.as_ref().map_or(0, |r| r.freqs.len());
        s.rope.resize(s.rope.len().max(rows * n_pairs), (1.0, 0.0));
        let width = spec.n_embd.max(spec.q_dim()).max(rank).max(hidden);
        s.inputs.reserve(rows, width);
        self.cpu.reserve(rows, width);
        s.attention.reserve(spec, self.cpu.pool.n_threads(), self.caches.max_len());
        s.predict.reserve(predictors(), rows);
        s.ffn.reserve(spec, rows, by_neuron, by_output);
        if self.layers.iter().filter_map(|l| l.ffn.as_ref()).any(|ffn| ffn.gathered().is_some()) {
            let old = &s.local.x;
            if old.capacity() < rows * spec.n_embd {
                s.local = FfnInput::with_capacity(rows, spec.n_embd, spec.max_n_ff());
            }
        }
    }

    /// For calls without a fitting `reserve`: they work, and allocate.
    fn expect_rows(&mut self, n_rows: usize) {
        if n_rows > self.max_rows {
            self.make_room(n_rows);
        }
    }

    /// Plans certificates for the gates that are to have one.
    fn certify(&mut self, planner: &mut Planner, pending: &mut [Pending]) {
        let mut predicted: Vec<bool> = self.layers.iter().map(|layer| layer.predictor.is_some()).collect();
        for pending in &*pending {
            if let Pending::LowRank(layer, ..) = pending {
                predicted[layer.index()] = true;
            }
        }
        let certified = self.certified;
        let level = self.cpu.level;
        let wanted = |layer: LayerId, gate: &Source| match certified {
            Certified::On => true,
            Certified::Auto => !predicted[layer.index()] && Certificate::pays_for(gate.matrix(), level),
            Certified::Off => false,
        };
        let without = planner.n_bytes();
        let mut ffns: Vec<&mut Box<PlannedFfn>> = pending
            .iter_mut()
            .filter_map(|pending| match pending {
                Pending::Ffn(layer, ffn) => {
                    ffn.certifiable().is_some_and(|gate| wanted(*layer, gate)).then_some(ffn)
                }
                _ => None,
            })
            .collect();
        let n_bytes: usize =
            ffns.iter().filter_map(|ffn| ffn.certifiable()).map(Certificate::n_bytes_for).sum();
        // Mapped memory need not be free, and what is in a cache file should not depend on it.
        let is_mapped = matches!(self.home, WeightHome::CacheFile(_));
        let fits =
            is_mapped || memory_available().is_none_or(|available| (without + n_bytes) as u64 <= available);
        if certified == Certified::On || fits {
            ffns.iter_mut().for_each(|ffn| ffn.certify(planner));
        }
        self.certified_bytes += planner.n_bytes() - without;
    }

    /// Makes memory for the planned weights and writes them there, or maps the file that they were written to.
    fn bring_in(&mut self, planner: &Planner, progress: &mut dyn FnMut(u64, u64)) -> io::Result<Memory> {
        let n_bytes = planner.n_bytes();
        let cache = match &self.home {
            WeightHome::CacheFile(path) => Some((path, planner.fingerprint())),
            WeightHome::HugePages | WeightHome::SmallPages => None,
        };
        if let Some((path, fingerprint)) = &cache
            && let Some(memory) = open_cache(path, fingerprint, n_bytes)
        {
            self.home_used = Some(format!("the cache file {}", path.display()));
            return Ok(memory);
        }
        if memory_available().is_some_and(|available| available < n_bytes as u64) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let huge = self.home != WeightHome::SmallPages;
        let mut memory = anonymous(n_bytes, huge)?;
        let weights = &mut memory[..n_bytes];
        planner.fill(&mut self.cpu.pool, weights, &mut |done| progress(done as u64, n_bytes as u64));
        let mut home_used = if huge { "huge pages" } else { "small pages" }.to_owned();
        if let Some((path, fingerprint)) = &cache {
            home_used += &match write_cache(path, fingerprint, weights) {
                Ok(()) => format!(", written to {} for the next start", path.display()),
                Err(error) => format!("; {} could not be written: {error}", path.display()),
            };
        }
        self.home_used = Some(home_used);
        Ok(Memory::Anonymous(memory.make_read_only()?))
    }

    fn check_type(
        m: &WeightMatrix,
        role: &'static str,
        supported: &[WeightType],
    ) -> Result<(), BackendError> {
        BackendError::check_type(NAME, m, role, supported)
    }
}

fn dense(layers: &[Layer], layer: LayerId) -> &Dense {
    layers[layer.index()].dense.as_ref().expect("the dense part of every layer is loaded on home")
}

/// The queries, keys and values of `n_rows` rows.
fn split_qkv<'a>(spec: &ModelSpec, n_rows: usize, qkv: &'a mut [f32]) -> [&'a mut [f32]; 3] {
    let (q, kv) = qkv.split_at_mut(n_rows * spec.q_dim());
    let (k, v) = kv.split_at_mut(n_rows * spec.kv_dim());
    [q, k, v]
}

impl HybridBackend for CpuBackend {
    fn info(&self) -> BackendInfo {
        let kv = self.kv_type.name();
        let mut description =
            format!("{}, {} threads, {kv} cache", self.cpu.level.name(), self.cpu.pool.n_threads());
        let mib = self.weight_bytes as f64 / (1 << 20) as f64;
        if let Some(home) = &self.home_used {
            description += &format!("; {mib:.1} MiB of weights in {home}");
        }
        if self.certified_bytes > 0 {
            let mib = self.certified_bytes as f64 / (1 << 20) as f64;
            description += &format!(", {mib:.1} MiB of them 8-bit copies of gates for certain skips");
        }
        if self.has_relaid {
            description += ", Q8_0 down projections laid out by neuron without loss";
        }
        BackendInfo { name: NAME.into(), description, memory_bytes: None, asynchronous: false }
    }

    fn load_dense(&mut self, part: DensePart) -> Result<(), BackendError> {
        part.check(&self.spec)?;
        let check = |m: &WeightMatrix, role| Self::check_type(m, role, &WeightType::ALL);
        match part {
            DensePart::Embedding(w) => {
                check(&w.token, "token embedding")?;
                if let Some((table, _)) = &w.position {
                    check(table, "position embedding")?;
                }
                self.embedding = Some(w);
            }
            DensePart::Layer(layer, w) => {
                for l in [&w.q, &w.k, &w.v, &w.output] {
                    check(&l.weight, "attention weight")?;
                }
                if self.spec.block == BlockKind::Sequential && w.ffn_norm.is_none() {
                    return Err(BackendError::Shape(ShapeError::Shape {
                        tensor: format!("blk.{layer}.ffn_norm.weight"),
                        expected: vec![self.spec.n_embd],
                        got: vec![],
                    }));
                }
                let planned = [&w.q, &w.k, &w.v, &w.output].map(|linear| self.planner.matrix(&linear.weight));
                self.pending.push(Pending::Dense(layer, w, planned));
            }
            DensePart::Head(w) => {
                check(&w.output, "output matrix")?;
                let planned = self.planner.matrix(&w.output);
                self.pending.push(Pending::Head(w.norm, planned));
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
        weights.check(&self.spec, layer)?;
        assert_eq!(owned.n_ff(), weights.n_ff(), "neurons of layer {layer}: owned set and weights");
        if let Some(gate) = &weights.gate {
            Self::check_type(gate, "FFN gate", &WeightType::ALL)?;
        }
        Self::check_type(&weights.up, "FFN up", &WeightType::ALL)?;
        match &weights.down {
            DownWeights::ByNeuron(m) => Self::check_type(m, "FFN down by neuron", &AXPY_TYPES)?,
            DownWeights::ByOutput(m) => Self::check_type(m, "FFN down by output", &WeightType::ALL)?,
        }
        let ffn = PlannedFfn::new(&mut self.planner, &self.spec, weights, owned.clone());
        self.has_relaid |= ffn.is_relaid();
        self.pending.push(Pending::Ffn(layer, Box::new(ffn)));
        Ok(())
    }

    fn load_predictor(&mut self, layer: LayerId, weights: PredictorWeights) -> Result<(), BackendError> {
        weights.check(&self.spec, layer)?;
        match weights {
            PredictorWeights::LowRank(p) => {
                Self::check_type(&p.fc1, "predictor", &WeightType::ALL)?;
                Self::check_type(&p.fc2, "predictor", &WeightType::ALL)?;
                let planned = [&p.fc1, &p.fc2].map(|matrix| self.planner.matrix(matrix));
                self.pending.push(Pending::LowRank(layer, planned, p.threshold));
            }
            PredictorWeights::GateCopy(copy) => {
                self.layers[layer.index()].predictor = Some(Predictor::GateCopy(copy));
                self.make_room(0);
            }
        }
        Ok(())
    }

    fn load_done(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), BackendError> {
        let mut planner = std::mem::take(&mut self.planner);
        let mut pending = std::mem::take(&mut self.pending);
        if pending.is_empty() {
            return Ok(());
        }
        self.certify(&mut planner, &mut pending);
        let n_bytes = planner.n_bytes();
        self.weight_bytes += n_bytes;
        let memory = self.bring_in(&planner, progress).map_err(|_| BackendError::OutOfMemory {
            backend: NAME.into(),
            what: "weights".into(),
            need_bytes: n_bytes as u64,
            have_bytes: memory_available().unwrap_or(0),
        })?;
        let filled = planner.filled(memory);
        for pending in pending {
            match pending {
                Pending::Dense(layer, weights, planned) => {
                    let [q, k, v, output] = planned.map(|p| filled.rows(p));
                    let dense = &mut self.layers[layer.index()].dense;
                    let kv_layer = dense.as_ref().map_or(self.n_kv_layer, |old| old.kv_layer);
                    self.n_kv_layer = self.n_kv_layer.max(kv_layer + 1);
                    *dense = Some(Dense { kv_layer, weights, q, k, v, output });
                }
                Pending::Head(norm, output) => {
                    self.head = Some(Head { norm, output: filled.rows(output) });
                }
                Pending::Ffn(layer, ffn) => self.layers[layer.index()].ffn = Some(ffn.filled(&filled)),
                Pending::LowRank(layer, planned, threshold) => {
                    let [fc1, fc2] = planned.map(|p| filled.rows(p));
                    self.layers[layer.index()].predictor = Some(Predictor::LowRank { fc1, fc2, threshold });
                }
            }
        }
        self.make_room(0);
        Ok(())
    }

    fn reserve(&mut self, seq: SeqId, kv_len: usize, max_rows: usize) -> Result<(), BackendError> {
        self.load_done(&mut |_, _| {})?;
        let spec = &*self.spec;
        let old = self.caches.get(seq);
        if old.is_none_or(|old| old.kv_len() < kv_len || old.n_layer() < self.n_kv_layer) {
            let n_bytes = KvCache::n_bytes(spec, self.kv_type, self.n_kv_layer, kv_len);
            expect_memory(n_bytes, || format!("keys and values of {kv_len} positions"))?;
            let mut cache = KvCache::new(spec, self.kv_type, self.n_kv_layer, kv_len);
            if let Some(old) = old {
                cache.copy_from(old, 0..old.kv_len());
            }
            self.caches.insert(seq, cache);
        }
        if max_rows > self.max_rows {
            // The buffers of a row are its vectors, of which none is wider than these together, a dozen times at most.
            let width = 12 * (spec.n_embd + spec.q_dim() + spec.max_n_ff()) * size_of::<f32>();
            expect_memory(max_rows.checked_mul(width), || format!("steps of {max_rows} tokens"))?;
        }
        self.make_room(max_rows);
        Ok(())
    }

    fn kv_copy(&mut self, from: SeqId, to: SeqId, range: Range<u32>) {
        self.caches.copy(from, to, range.start as usize..range.end as usize);
    }

    fn release(&mut self, seq: SeqId) {
        self.caches.remove(seq);
    }

    fn embed(&mut self, step: &Step<'_>) {
        self.expect_rows(step.rows.len());
        self.n_rows = step.rows.len();
        let tables = self.embedding.as_ref().expect("the embedding is loaded on home");
        let Scratch { h, rope, position, .. } = &mut self.scratch;
        for (row, h) in step.rows.iter().zip(h.chunks_exact_mut(self.spec.n_embd)) {
            tables.token.decode_row(row.token.index(), h);
            self.cost.weight_bytes += tables.token.row_bytes() as u64;
            if let Some((table, first)) = &tables.position {
                table.decode_row(row.pos as usize + first, position);
                add(h, position);
                self.cost.weight_bytes += table.row_bytes() as u64;
            }
        }
        if let Some(rotation) = &self.spec.rope {
            rope_table(rotation, step.rows, rope);
        }
    }

    fn set_hidden(&mut self, step: &Step<'_>, h: &[f32]) {
        let n = step.rows.len();
        assert_eq!(h.len(), n * self.spec.n_embd, "residual stream of {n} rows");
        self.expect_rows(n);
        self.n_rows = n;
        self.scratch.h[..h.len()].copy_from_slice(h);
        if let Some(rotation) = &self.spec.rope {
            rope_table(rotation, step.rows, &mut self.scratch.rope);
        }
    }

    fn attend(&mut self, layer: LayerId, step: &Step<'_>) {
        let (spec, cpu, n) = (&*self.spec, &mut self.cpu, step.rows.len());
        assert_eq!(n, self.n_rows, "rows of the step");
        let w = dense(&self.layers, layer);
        let s = &mut self.scratch;
        let h = &mut s.h[..n * spec.n_embd];
        let x = &mut s.x[..n * spec.n_embd];
        let qkv_out = &mut s.qkv[..n * (spec.q_dim() + 2 * spec.kv_dim())];
        let biases = &w.weights;
        norm(&mut cpu.pool, spec.norm, biases.attn_norm_2.as_ref().unwrap_or(&biases.attn_norm), h, x);
        let forms =
            [&w.q, &w.k, &w.v].map(|w| Forms::of(w.ty())).into_iter().fold(Forms::default(), Forms::and);
        let input = s.inputs.prepare(&mut cpu.pool, x, spec.n_embd, forms);
        let qkv = [(&w.q, &biases.q), (&w.k, &biases.k), (&w.v, &biases.v)]
            .map(|(w, linear)| (w, linear.bias.as_deref()));
        if n == 1 {
            matvecs(cpu, qkv, &input, qkv_out);
        } else {
            let outs = split_qkv(spec, n, qkv_out);
            for ((w, bias), out) in qkv.into_iter().zip(outs) {
                matmul(cpu, w, &input, bias, out);
            }
        }
        let [q, k, v] = split_qkv(spec, n, qkv_out);
        if let Some(rope) = &spec.rope {
            rotate(&mut cpu.pool, rope, spec.head_dim, &s.rope, q, spec.q_dim());
            rotate(&mut cpu.pool, rope, spec.head_dim, &s.rope, k, spec.kv_dim());
        }
        self.caches.write(&mut cpu.pool, spec, w.kv_layer, step.rows, k, v);
        let mixed = &mut s.mixed[..n * spec.q_dim()];
        let queries = Queries { spec, caches: &self.caches, layer: w.kv_layer, rows: step.rows, q };
        attention(cpu, &mut s.attention, queries, mixed);
        let input = s.inputs.prepare(&mut cpu.pool, mixed, spec.q_dim(), Forms::of(w.output.ty()));
        matmul(cpu, &w.output, &input, biases.output.bias.as_deref(), x);
        add_batch(&mut cpu.pool, h, x);

        let weight_bytes: usize = [&w.q, &w.k, &w.v, &w.output].map(Rows::n_bytes).into_iter().sum();
        self.cost.weight_bytes += weight_bytes as u64;
        let position_bytes = 2 * self.kv_type.n_bytes(spec.kv_dim()) as u64;
        self.cost.kv_bytes += step.rows.iter().map(|r| (u64::from(r.pos) + 1) * position_bytes).sum::<u64>();
    }

    fn ffn_input(&mut self, layer: LayerId, step: &Step<'_>, out: &mut FfnInput) {
        let (spec, cpu, n) = (&*self.spec, &mut self.cpu, self.n_rows);
        let n_ff = spec.n_ff[layer.index()];
        let h = &self.scratch.h[..n * spec.n_embd];
        let w = &dense(&self.layers, layer).weights;
        let ffn_norm = match spec.block {
            BlockKind::Parallel => &w.attn_norm,
            BlockKind::Sequential => {
                w.ffn_norm.as_ref().expect("a sequential block has a norm before its FFN, checked at load")
            }
        };
        out.mode = step.mode;
        out.x.resize(n * spec.n_embd, 0.0);
        norm(&mut cpu.pool, spec.norm, ffn_norm, h, &mut out.x);
        out.active.reset(n, n_ff);
        let predictor = self.layers[layer.index()].predictor.as_ref();
        let Some(p) = predictor.filter(|_| step.mode == ActiveMode::Predictor) else {
            out.active.fill();
            return;
        };
        let (inputs, scratch) = (&mut self.scratch.inputs, &mut self.scratch.predict);
        let bytes = predict(cpu, p, step, h, inputs, scratch, out);
        self.cost.predictor_bytes += bytes;
        self.cost.weight_bytes += bytes;
    }

    fn ffn_start(&mut self, layer: LayerId, input: &FfnInput) -> Ticket {
        let n_rows = input.active.n_rows();
        let (n_embd, n_ff) = (self.spec.n_embd, self.spec.n_ff[layer.index()]);
        assert_eq!(input.x.len(), n_rows * n_embd, "FFN input of layer {layer}: [{n_rows}, {n_embd}]");
        assert_eq!(input.active.n_ff(), n_ff, "active set of layer {layer}");
        self.expect_rows(n_rows);
        let weights = self.layers[layer.index()].ffn.as_ref().expect("the layer's FFN is loaded");
        let slot = self.next_slot;
        self.next_slot = slot.wrapping_add(1);
        let s = &mut self.scratch;
        let input = match weights.gathered() {
            None => input,
            Some(of) => {
                s.local.mode = input.mode;
                s.local.x.clear();
                s.local.x.extend_from_slice(&input.x);
                input.active.select(of, &mut s.local.active);
                &s.local
            }
        };
        let partial = &mut s.partial[slot as usize % 2];
        partial.slot = Some(slot);
        let out = &mut partial.sum[..n_rows * n_embd];
        self.cost += ffn(&mut self.cpu, &self.spec, weights, input, &mut s.ffn, &mut s.inputs, out);
        Ticket { layer, n_rows, slot }
    }

    fn ffn_finish(&mut self, ticket: Ticket, acc: &mut [f32]) {
        let partial = &mut self.scratch.partial[ticket.slot as usize % 2];
        assert_eq!(partial.slot.take(), Some(ticket.slot), "a ticket is finished once, where it was made");
        add_batch(&mut self.cpu.pool, acc, &partial.sum[..ticket.n_rows * self.spec.n_embd]);
    }

    fn ffn_add(&mut self, layer: LayerId, acc: &[f32]) {
        let n_embd = self.spec.n_embd;
        let h = &mut self.scratch.h[..self.n_rows * n_embd];
        add_batch(&mut self.cpu.pool, h, acc);
        if let Some(bias) = &dense(&self.layers, layer).weights.ffn_down_bias {
            h.chunks_exact_mut(n_embd).for_each(|row| add(row, bias));
        }
    }

    fn head(&mut self, rows: Range<usize>, logits: &mut [f32]) {
        let (spec, n) = (&*self.spec, rows.len());
        assert_eq!(logits.len(), n * spec.n_vocab, "logits [{n}, {}]", spec.n_vocab);
        if n == 0 {
            return;
        }
        let w = self.head.as_ref().expect("the head is loaded on home");
        let s = &mut self.scratch;
        let x = &mut s.x[..n * spec.n_embd];
        norm(
            &mut self.cpu.pool,
            spec.norm,
            &w.norm,
            &s.h[rows.start * spec.n_embd..rows.end * spec.n_embd],
            x,
        );
        let input = s.inputs.prepare(&mut self.cpu.pool, x, spec.n_embd, Forms::of(w.output.ty()));
        matmul(&mut self.cpu, &w.output, &input, None, logits);
        self.cost.weight_bytes += w.output.n_bytes() as u64;
    }

    fn hidden(&self, out: &mut [f32]) {
        out.copy_from_slice(&self.scratch.h[..self.n_rows * self.spec.n_embd]);
    }

    fn record_fired(&mut self, on: bool) {
        let max_rows = self.max_rows;
        let ffns = self.layers.iter_mut().filter_map(|layer| layer.ffn.as_mut());
        ffns.for_each(|ffn| ffn.record_fired(on, max_rows));
    }

    fn take_fired(&mut self, layer: LayerId, counts: &mut [u64]) -> bool {
        self.layers[layer.index()].ffn.as_mut().is_some_and(|ffn| ffn.take_fired(counts))
    }

    fn take_fired_by_row(&mut self, layer: LayerId, counts: &mut [u32]) -> bool {
        self.layers[layer.index()].ffn.as_mut().is_some_and(|ffn| ffn.take_fired_by_row(counts))
    }

    fn take_cost(&mut self) -> StepCost {
        std::mem::take(&mut self.cost)
    }
}

/// Asks the system for so many bytes, and gives them back.
fn expect_memory(n_bytes: Option<usize>, what: impl FnOnce() -> String) -> Result<(), BackendError> {
    if n_bytes.is_some_and(|n| Vec::<u8>::new().try_reserve_exact(n).is_ok()) {
        return Ok(());
    }
    Err(BackendError::OutOfMemory {
        backend: NAME.into(),
        what: what(),
        need_bytes: n_bytes.map_or(u64::MAX, |n| n as u64),
        have_bytes: memory_available().unwrap_or(0),
    })
}

/// Free memory of the machine, where the system tells.
fn memory_available() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}
