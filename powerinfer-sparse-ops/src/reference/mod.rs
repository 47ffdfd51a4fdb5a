//! The reference backend: one thread, plain loops, sums in f64, meant to be read.
//!
//! Every fast backend is compared with this one. [`Rounding::Original`] switches on the rounding rules of the
//! original C++ engine (activations rounded to the partner type of the weights, attention in f16, the hidden
//! vector rounded in blocks of 32 neurons), which the stored logits of the golden models follow; they are
//! defined for one owner of all neurons in file order only.
//!
//! It keeps every contract of [`HybridBackend`] but C5: it allocates as it likes.

mod attention;
mod rounding;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

pub use rounding::Rounding;

use crate::{
    ActiveMode, BackendError, BackendInfo, BlockKind, DensePart, DownWeights, EmbeddingWeights, FfnInput,
    FfnWeights, Gating, HeadWeights, HybridBackend, LayerId, LayerWeights, Linear, ModelSpec, NeuronId,
    NeuronSet, NormKind, NormWeights, PredictorWeights, SeqId, Step, StepCost, Ticket, WeightMatrix,
};
use attention::KvCache;

/// Slow, readable, right. See the [module](self).
#[derive(Debug)]
pub struct ReferenceBackend {
    spec: Arc<ModelSpec>,
    rounding: Rounding,
    embedding: Option<EmbeddingWeights>,
    layers: Vec<Layer>,
    head: Option<HeadWeights>,
    caches: HashMap<SeqId, KvCache>,
    /// Residual stream, `[n_rows, n_embd]`.
    h: Vec<f32>,
    n_rows: usize,
    /// Partial sums between `ffn_start` and `ffn_finish`, by slot.
    pending: HashMap<u32, Vec<f32>>,
    next_slot: u32,
    /// For each layer, how often its neurons fired, `[n_ff]`; `None` while nobody counts.
    fired: Option<Vec<Vec<u64>>>,
    /// For each layer, how many neurons fired for each row of the last step, `[n_rows]`; empty while nobody counts.
    fired_by_row: Vec<Vec<u32>>,
    cost: StepCost,
}

#[derive(Debug, Default)]
struct Layer {
    dense: Option<Box<LayerWeights>>,
    ffn: Option<(FfnWeights, NeuronSet)>,
    predictor: Option<PredictorWeights>,
}

impl ReferenceBackend {
    /// A backend for models of this shape, holding nothing yet.
    pub fn new(spec: Arc<ModelSpec>, rounding: Rounding) -> Self {
        Self {
            layers: (0..spec.n_layer).map(|_| Layer::default()).collect(),
            spec,
            rounding,
            embedding: None,
            head: None,
            caches: HashMap::new(),
            h: Vec::new(),
            n_rows: 0,
            pending: HashMap::new(),
            next_slot: 0,
            fired: None,
            fired_by_row: Vec::new(),
            cost: StepCost::default(),
        }
    }

    fn dense(&self, layer: LayerId) -> &LayerWeights {
        self.layers[layer.index()].dense.as_ref().expect("the dense part of every layer is loaded on home")
    }

    /// `W · x` for the given rows of `W`, each as (row, value).
    fn products<'a>(
        &'a self,
        w: &'a WeightMatrix,
        x: &[f32],
        rows: impl Iterator<Item = usize> + 'a,
    ) -> impl Iterator<Item = (usize, f32)> + 'a {
        assert_eq!(x.len(), w.n_cols(), "{w:?}: input length");
        let x = self.rounding.activations(w.ty(), x);
        let mut row_values = vec![0.0; w.n_cols()];
        rows.map(move |row| {
            w.decode_row(row, &mut row_values);
            let sum: f64 = row_values.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
            (row, sum as f32)
        })
    }

    fn linear(&self, linear: &Linear, x: &[f32]) -> Vec<f32> {
        let mut y = self.matrix(&linear.weight, x);
        if let Some(bias) = &linear.bias {
            add(&mut y, bias);
        }
        y
    }

    fn matrix(&self, w: &WeightMatrix, x: &[f32]) -> Vec<f32> {
        self.products(w, x, 0..w.n_rows()).map(|(_, y)| y).collect()
    }

    fn normed(&self, norm: &NormWeights, x: &[f32]) -> Vec<f32> {
        let mean_square = |values: &[f32]| {
            (values.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / values.len() as f64) as f32
        };
        let centered: Vec<f32> = match self.spec.norm.kind {
            NormKind::Rms => x.to_vec(),
            NormKind::Layer => {
                let mean = (x.iter().map(|&v| f64::from(v)).sum::<f64>() / x.len() as f64) as f32;
                x.iter().map(|v| v - mean).collect()
            }
        };
        let scale = 1.0 / (mean_square(&centered) + self.spec.norm.eps).sqrt();
        let mut y: Vec<f32> = centered.iter().zip(&norm.weight).map(|(v, w)| v * scale * w).collect();
        if let Some(bias) = &norm.bias {
            add(&mut y, bias);
        }
        y
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.h[row * self.spec.n_embd..(row + 1) * self.spec.n_embd]
    }

    /// The hidden value of each owned and active neuron for one token, with what was read on the way.
    fn hidden_values(&self, work: Work<'_>, x: &[f32], read: &mut RowsRead) -> Vec<f32> {
        let Work { ffn, owned, input, row } = work;
        let act = |v| self.rounding.activation(self.spec.activation, v);
        let skip = input.mode != ActiveMode::Dense && self.spec.activation.has_exact_zeros();
        let active: Vec<NeuronId> =
            owned.ids().iter().copied().filter(|&id| input.active.contains(row, id)).collect();
        read.cost.active_neurons += active.len() as u64;
        let mut hidden = vec![0.0; ffn.n_ff()];

        // Gate first: where it is zero, the up row is not needed.
        let mut wants_up = active.clone();
        let mut gate_values = vec![1.0; ffn.n_ff()];
        if let Some(gate) = &ffn.gate {
            for (j, g) in self.products(gate, x, active.iter().map(|id| id.index())) {
                gate_values[j] = act(g);
                read.gate(j);
            }
            if skip {
                wants_up.retain(|id| gate_values[id.index()] != 0.0);
            }
        }
        for (j, mut u) in self.products(&ffn.up, x, wants_up.iter().map(|id| id.index())) {
            read.up(j);
            if let Some(bias) = &ffn.up_bias {
                u += bias[j];
            }
            hidden[j] = match self.spec.gating {
                Gating::None => act(u),
                Gating::Gate => gate_values[j] * u,
                Gating::GateAndUp => gate_values[j] * act(u),
            };
        }
        hidden
    }

    fn down(&self, work: Work<'_>, hidden: &[f32], acc: &mut [f32], read: &mut RowsRead) {
        let Work { ffn, owned, input, row } = work;
        match &ffn.down {
            DownWeights::ByNeuron(w) => {
                let hidden = self.rounding.hidden(w.ty(), hidden, |j| {
                    // What the original holds in the place of a neuron that the predictor left out.
                    let off = !input.active.contains(row, NeuronId(j as u32));
                    off.then(|| ffn.up_bias.as_ref().map_or(0.0, |b| self.spec.activation.apply(b[j])))
                });
                let mut down_row = vec![0.0; w.n_cols()];
                let mut sum = vec![0f64; w.n_cols()];
                for &id in owned.ids().iter().filter(|&&id| input.active.contains(row, id)) {
                    let a = hidden[id.index()];
                    if a == 0.0 && input.mode != ActiveMode::Dense {
                        continue;
                    }
                    read.down(id.index());
                    w.decode_row(id.index(), &mut down_row);
                    for (s, &d) in sum.iter_mut().zip(&down_row) {
                        *s += f64::from(a) * f64::from(d);
                    }
                }
                for (a, s) in acc.iter_mut().zip(sum) {
                    *a += s as f32;
                }
            }
            DownWeights::ByOutput(w) => {
                read.down_whole = !owned.is_empty();
                read.cost.down_rows += owned.len() as u64;
                if !owned.is_empty() {
                    add(acc, &self.matrix(w, hidden));
                }
            }
        }
    }
}

impl HybridBackend for ReferenceBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "reference".into(),
            description: format!("1 thread, plain loops, rounding {:?}", self.rounding),
            memory_bytes: None,
            asynchronous: false,
        }
    }

    fn load_dense(&mut self, part: DensePart) -> Result<(), BackendError> {
        part.check(&self.spec)?;
        match part {
            DensePart::Embedding(w) => self.embedding = Some(w),
            DensePart::Layer(layer, w) => self.layers[layer.index()].dense = Some(w),
            DensePart::Head(w) => self.head = Some(w),
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
        self.layers[layer.index()].ffn = Some((weights, owned.clone()));
        Ok(())
    }

    fn load_predictor(&mut self, layer: LayerId, weights: PredictorWeights) -> Result<(), BackendError> {
        weights.check(&self.spec, layer)?;
        self.layers[layer.index()].predictor = Some(weights);
        Ok(())
    }

    fn reserve(&mut self, seq: SeqId, kv_len: usize, _max_rows: usize) -> Result<(), BackendError> {
        let spec = &self.spec;
        let cache = self.caches.entry(seq).or_insert_with(|| KvCache::new(spec));
        let is_home = |layer: usize| self.layers[layer].dense.is_some();
        cache.grow(spec, kv_len, is_home).map_err(|()| BackendError::OutOfMemory {
            backend: "reference".into(),
            what: format!("keys and values of {kv_len} positions"),
            need_bytes: (kv_len as u64).saturating_mul((spec.n_layer * spec.kv_dim() * 8) as u64),
            have_bytes: 0,
        })
    }

    fn kv_copy(&mut self, from: SeqId, to: SeqId, range: Range<u32>) {
        let from = self.caches[&from].clone();
        self.caches
            .get_mut(&to)
            .expect("the target sequence is reserved")
            .copy_from(&self.spec, &from, range);
    }

    fn release(&mut self, seq: SeqId) {
        self.caches.remove(&seq);
    }

    fn embed(&mut self, step: &Step<'_>) {
        let n_embd = self.spec.n_embd;
        let tables = self.embedding.as_ref().expect("the embedding is loaded on home");
        self.n_rows = step.rows.len();
        self.h.clear();
        let mut values = vec![0.0; n_embd];
        for row in step.rows {
            tables.token.decode_row(row.token.index(), &mut values);
            self.h.extend_from_slice(&values);
            self.cost.weight_bytes += tables.token.row_bytes() as u64;
            if let Some((positions, first)) = &tables.position {
                positions.decode_row(row.pos as usize + first, &mut values);
                let at = self.h.len() - n_embd;
                add(&mut self.h[at..], &values);
                self.cost.weight_bytes += positions.row_bytes() as u64;
            }
        }
    }

    fn set_hidden(&mut self, step: &Step<'_>, h: &[f32]) {
        assert_eq!(
            h.len(),
            step.rows.len() * self.spec.n_embd,
            "residual stream of {} rows",
            step.rows.len()
        );
        self.n_rows = step.rows.len();
        self.h.clear();
        self.h.extend_from_slice(h);
    }

    fn attend(&mut self, layer: LayerId, step: &Step<'_>) {
        let n_embd = self.spec.n_embd;
        let mut caches = std::mem::take(&mut self.caches);
        let mut added = Vec::with_capacity(self.h.len());
        let w = self.dense(layer);
        for (i, row) in step.rows.iter().enumerate() {
            let x = self.normed(w.attn_norm_2.as_ref().unwrap_or(&w.attn_norm), self.row(i));
            let mut q = self.linear(&w.q, &x);
            let mut k = self.linear(&w.k, &x);
            let v = self.linear(&w.v, &x);
            if let Some(rope) = &self.spec.rope {
                attention::rotate(rope, self.spec.head_dim, row.pos, &mut q);
                attention::rotate(rope, self.spec.head_dim, row.pos, &mut k);
            }
            let cache = caches.get_mut(&row.seq).expect("the sequence is reserved");
            cache.write(&self.spec, layer, row.pos, self.rounding.stored(&k), self.rounding.stored(&v));
            let mixed = attention::attend(&self.spec, self.rounding, cache, layer, row.pos, &q);
            added.extend(self.linear(&w.output, &mixed));
        }
        let cost: usize = [&w.q, &w.k, &w.v, &w.output].iter().map(|l| l.weight.n_bytes()).sum();
        self.cost.weight_bytes += cost as u64;
        let kv_row_bytes = 2 * self.spec.kv_dim() as u64 * 4;
        self.cost.kv_bytes += step.rows.iter().map(|r| (u64::from(r.pos) + 1) * kv_row_bytes).sum::<u64>();
        self.caches = caches;
        debug_assert_eq!(added.len(), step.rows.len() * n_embd);
        add(&mut self.h, &added);
    }

    fn ffn_input(&mut self, layer: LayerId, step: &Step<'_>, out: &mut FfnInput) {
        let n_ff = self.spec.n_ff[layer.index()];
        let w = self.dense(layer);
        out.mode = step.mode;
        out.x.clear();
        out.active.reset(self.n_rows, n_ff);
        let norm = match self.spec.block {
            BlockKind::Parallel => &w.attn_norm,
            BlockKind::Sequential => {
                w.ffn_norm.as_ref().expect("a sequential block has a norm before its FFN, checked at load")
            }
        };
        for row in 0..self.n_rows {
            out.x.extend(self.normed(norm, self.row(row)));
        }
        let predictor = self.layers[layer.index()].predictor.as_ref();
        let Some(predictor) = predictor.filter(|_| step.mode == ActiveMode::Predictor) else {
            out.active.fill();
            return;
        };
        let mut is_read = false;
        for (row, step_row) in step.rows.iter().enumerate() {
            let scores = match predictor {
                // A parallel block comes here before attention, so the residual is what its predictor reads.
                PredictorWeights::LowRank(p) => {
                    let mut inner = self.matrix(&p.fc1, self.row(row));
                    inner.iter_mut().for_each(|v| *v = v.max(0.0));
                    let scores = self.products(&p.fc2, &inner, 0..n_ff);
                    scores.map(|(_, score)| (score, p.threshold)).collect::<Vec<_>>()
                }
                PredictorWeights::GateCopy(_) if step_row.pos == 0 => {
                    out.active.fill_row(row);
                    continue;
                }
                PredictorWeights::GateCopy(p) => {
                    let x = &out.x[row * self.spec.n_embd..][..self.spec.n_embd];
                    p.score(x).into_iter().zip(p.thresholds().iter().copied()).collect()
                }
            };
            is_read = true;
            for (j, (score, threshold)) in scores.into_iter().enumerate() {
                // Written so that NaN counts as active.
                let inactive = score < threshold;
                if !inactive {
                    out.active.insert(row, NeuronId(j as u32));
                }
            }
        }
        let bytes = if is_read { predictor.n_bytes() as u64 } else { 0 };
        self.cost.predictor_bytes += bytes;
        self.cost.weight_bytes += bytes;
    }

    fn ffn_start(&mut self, layer: LayerId, input: &FfnInput) -> Ticket {
        let n_embd = self.spec.n_embd;
        let n_rows = input.active.n_rows();
        assert_eq!(input.x.len(), n_rows * n_embd, "FFN input of layer {layer}: [{n_rows}, {n_embd}]");
        let mut fired = self.fired.take();
        let (ffn, owned) = self.layers[layer.index()].ffn.as_ref().expect("the layer's FFN is loaded");
        let mut read = RowsRead::new(ffn);
        let mut sums = vec![0.0; n_rows * n_embd];
        let mut by_row = vec![0; n_rows];
        for row in 0..n_rows {
            let x = &input.x[row * n_embd..(row + 1) * n_embd];
            let work = Work { ffn, owned, input, row };
            let hidden = self.hidden_values(work, x, &mut read);
            let n_fired = hidden.iter().filter(|&&v| v != 0.0).count();
            read.cost.fired_neurons += n_fired as u64;
            by_row[row] = n_fired as u32;
            let acc = &mut sums[row * n_embd..(row + 1) * n_embd];
            self.down(work, &hidden, acc, &mut read);
            if let Some(counts) = &mut fired {
                let counts = &mut counts[layer.index()];
                counts.iter_mut().zip(&hidden).for_each(|(n, &value)| *n += u64::from(value != 0.0));
            }
        }
        read.cost.owned_neurons = (n_rows * owned.len()) as u64;
        let cost = read.total(ffn);
        self.cost += cost;
        if fired.is_some() {
            self.fired_by_row[layer.index()] = by_row;
        }
        self.fired = fired;
        let slot = self.next_slot;
        self.next_slot = slot.wrapping_add(1);
        self.pending.insert(slot, sums);
        Ticket { layer, n_rows, slot }
    }

    fn ffn_finish(&mut self, ticket: Ticket, acc: &mut [f32]) {
        let sums = self.pending.remove(&ticket.slot).expect("a ticket is finished once, where it was made");
        assert_eq!(acc.len(), sums.len(), "partial sum of layer {}", ticket.layer);
        add(acc, &sums);
    }

    fn ffn_add(&mut self, layer: LayerId, acc: &[f32]) {
        add(&mut self.h, acc);
        let bias = self.dense(layer).ffn_down_bias.clone();
        if let Some(bias) = bias {
            self.h.chunks_exact_mut(self.spec.n_embd).for_each(|row| add(row, &bias));
        }
    }

    fn head(&mut self, rows: Range<usize>, logits: &mut [f32]) {
        let head = self.head.as_ref().expect("the head is loaded on home");
        let n_vocab = self.spec.n_vocab;
        assert_eq!(logits.len(), rows.len() * n_vocab, "logits [{}, {n_vocab}]", rows.len());
        for (row, out) in rows.zip(logits.chunks_exact_mut(n_vocab)) {
            out.copy_from_slice(&self.matrix(&head.output, &self.normed(&head.norm, self.row(row))));
        }
        self.cost.weight_bytes += head.output.n_bytes() as u64;
    }

    fn hidden(&self, out: &mut [f32]) {
        out.copy_from_slice(&self.h);
    }

    fn record_fired(&mut self, on: bool) {
        self.fired = on.then(|| self.spec.n_ff.iter().map(|&n_ff| vec![0; n_ff]).collect());
        self.fired_by_row = if on { vec![Vec::new(); self.spec.n_layer] } else { Vec::new() };
    }

    fn take_fired(&mut self, layer: LayerId, counts: &mut [u64]) -> bool {
        let Some(fired) = &mut self.fired else { return false };
        counts.iter_mut().zip(&mut fired[layer.index()]).for_each(|(to, n)| *to += std::mem::take(n));
        true
    }

    fn take_fired_by_row(&mut self, layer: LayerId, counts: &mut [u32]) -> bool {
        let Some(by_row) = self.fired_by_row.get(layer.index()) else { return false };
        assert_eq!(counts.len(), by_row.len(), "rows of the last step at layer {layer}");
        counts.iter_mut().zip(by_row).for_each(|(to, n)| *to += n);
        true
    }

    fn take_cost(&mut self) -> StepCost {
        std::mem::take(&mut self.cost)
    }
}

/// One token at one layer's FFN.
#[derive(Clone, Copy)]
struct Work<'a> {
    ffn: &'a FfnWeights,
    owned: &'a NeuronSet,
    input: &'a FfnInput,
    row: usize,
}

/// Which rows of a layer's FFN a step has read: each counts once for its bytes, once a token for its products.
struct RowsRead {
    gate: Vec<bool>,
    up: Vec<bool>,
    down: Vec<bool>,
    down_whole: bool,
    cost: StepCost,
}

impl RowsRead {
    fn new(ffn: &FfnWeights) -> Self {
        let none = || vec![false; ffn.n_ff()];
        Self { gate: none(), up: none(), down: none(), down_whole: false, cost: StepCost::default() }
    }

    fn gate(&mut self, j: usize) {
        self.gate[j] = true;
        self.cost.gate_rows += 1;
    }

    fn up(&mut self, j: usize) {
        self.up[j] = true;
        self.cost.up_rows += 1;
    }

    fn down(&mut self, j: usize) {
        self.down[j] = true;
        self.cost.down_rows += 1;
    }

    fn total(self, ffn: &FfnWeights) -> StepCost {
        let rows = |read: &[bool]| read.iter().filter(|&&r| r).count();
        let mut bytes = rows(&self.gate) * ffn.gate.as_ref().map_or(0, WeightMatrix::row_bytes)
            + rows(&self.up) * ffn.up.row_bytes();
        bytes += match &ffn.down {
            DownWeights::ByNeuron(w) => rows(&self.down) * w.row_bytes(),
            DownWeights::ByOutput(w) => usize::from(self.down_whole) * w.n_bytes(),
        };
        StepCost { weight_bytes: bytes as u64, ..self.cost }
    }
}

fn add(to: &mut [f32], values: &[f32]) {
    assert_eq!(to.len(), values.len(), "lengths of a sum");
    for (t, v) in to.iter_mut().zip(values) {
        *t += v;
    }
}
