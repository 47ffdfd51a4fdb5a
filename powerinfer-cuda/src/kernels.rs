//! A function for each kernel: the shape of its launch, and how many bytes it reads and writes under its arguments. What
//! the kernels compute is in `kernels/README.md`.

use powerinfer_sparse_ops::{Activation, Gating, Norm, NormKind, Rope, RopeKind, WeightType};

use crate::gpu::Param::{Float, Int, Memory};
use crate::gpu::{Buffer, Device, Kernel, OfType, Param, Piece, Plain, View};

/// Positions that a block of attention takes.
pub(crate) const SPAN: usize = 256;

/// From this many tokens on, products read a weight once for 64 tokens.
pub(crate) const MATMUL_TOKENS: usize = 32;

/// Heads that share a block of attention.
const HEADS_PER_BLOCK: usize = 8;

/// Bytes of a float, an `unsigned` or an `int`.
const WORD: usize = 4;

/// Add the product to what is there.
pub(crate) const ACCUMULATE: usize = 1;

/// Negative results become zero.
pub(crate) const RECTIFY: usize = 2;

/// Where a matrix lies in a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) piece: Piece,
    pub(crate) ty: WeightType,
    pub(crate) n_rows: usize,
    pub(crate) n_cols: usize,
    pub(crate) row_bytes: usize,
}

impl Matrix {
    pub(crate) fn on(self, buffer: &Buffer) -> MatrixView<'_> {
        MatrixView { view: buffer.piece(self.piece), matrix: self }
    }

    pub(crate) fn n_bytes(self) -> usize {
        self.row_bytes * self.n_rows
    }
}

/// A matrix on the device, row after row as in the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixView<'a> {
    view: View<'a>,
    matrix: Matrix,
}

impl<'a> MatrixView<'a> {
    fn param(self) -> Param<'a> {
        Memory(self.view, self.matrix.n_bytes())
    }

    fn kernel(self, kernel: OfType) -> Kernel {
        Kernel::Typed(kernel, self.matrix.ty)
    }

    pub(crate) fn ty(self) -> WeightType {
        self.matrix.ty
    }
}

/// Bytes of `n_rows` rows of `n` words, `stride` words apart.
fn strided(n_rows: usize, n: usize, stride: usize) -> usize {
    if n_rows == 0 { 0 } else { ((n_rows - 1) * stride + n) * WORD }
}

/// Vectors of floats, `stride` floats apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) view: View<'a>,
    pub(crate) stride: usize,
}

impl<'a> Rows<'a> {
    fn param(self, n_rows: usize, n: usize) -> Param<'a> {
        Memory(self.view, strided(n_rows, n, self.stride))
    }

    /// The rows from `row` on.
    pub(crate) fn from(self, row: usize) -> Self {
        Self { view: self.view.from(row * self.stride * WORD), stride: self.stride }
    }
}

/// Keys and values of the rows of a step in one layer: tables of addresses, each of a cache that has room for the
/// row's position, which whoever writes the tables checks (TABLES-CHECKED).
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheTables<'a> {
    pub(crate) keys: View<'a>,
    pub(crate) values: View<'a>,
    pub(crate) positions: View<'a>,
    /// Keys and values are f16, not f32.
    pub(crate) is_f16: bool,
}

impl<'a> CacheTables<'a> {
    fn from(self, row: usize) -> Self {
        Self {
            keys: self.keys.from(row * 8),
            values: self.values.from(row * 8),
            positions: self.positions.from(row * WORD),
            is_f16: self.is_f16,
        }
    }

    fn caches(self, n_tokens: usize) -> [Param<'a>; 2] {
        [Memory(self.keys, n_tokens * 8), Memory(self.values, n_tokens * 8)]
    }

    fn positions(self, n_tokens: usize) -> Param<'a> {
        Memory(self.positions, n_tokens * WORD)
    }
}

/// Shape of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) n_head: usize,
    pub(crate) n_head_kv: usize,
    pub(crate) head_dim: usize,
}

impl Heads {
    /// Bytes of the partial sums of a token that attends over `n_spans` spans.
    pub(crate) fn part_bytes(self, n_spans: usize) -> usize {
        self.n_head * n_spans * (self.head_dim + 2) * WORD
    }
}

/// A 2-bit gate copy on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyView<'a> {
    pub(crate) codes: View<'a>,
    pub(crate) scales: View<'a>,
    pub(crate) thresholds: View<'a>,
    pub(crate) outliers: View<'a>,
    pub(crate) outlier_weights: View<'a>,
    pub(crate) mean: View<'a>,
    pub(crate) n_ff: usize,
    pub(crate) n_embd: usize,
    pub(crate) n_padded: usize,
    pub(crate) n_outliers: usize,
    pub(crate) codes_len: usize,
}

/// An input of a gate copy, rounded to 8 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyInput<'a> {
    pub(crate) q: View<'a>,
    pub(crate) apart: View<'a>,
    pub(crate) info: View<'a>,
}

/// Neurons of a layer on the device, and what a step does with them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FfnView<'a> {
    pub(crate) gate: Option<MatrixView<'a>>,
    pub(crate) up: MatrixView<'a>,
    pub(crate) up_bias: Option<View<'a>>,
    /// Rows by neuron.
    pub(crate) down: MatrixView<'a>,
    pub(crate) owned: View<'a>,
    pub(crate) n_owned: usize,
    pub(crate) n_ff: usize,
    pub(crate) n_embd: usize,
    pub(crate) activation: Activation,
    pub(crate) gating: Gating,
    /// Up rows whose gate is zero are not read.
    pub(crate) skips_up: bool,
    /// Down rows whose neuron is zero are not read.
    pub(crate) skips_down: bool,
    /// Bits of the active sets; `None` for all neurons.
    pub(crate) bits: Option<View<'a>>,
    pub(crate) x: View<'a>,
    pub(crate) hidden: View<'a>,
    pub(crate) list: View<'a>,
    pub(crate) counts: View<'a>,
    pub(crate) part: View<'a>,
    pub(crate) chunk_rows: usize,
    pub(crate) marks: Option<View<'a>>,
    pub(crate) counters: View<'a>,
    /// How often each neuron fired, `u64 [n_ff]`, where that is counted.
    pub(crate) fired: Option<View<'a>>,
}

impl<'a> FfnView<'a> {
    pub(crate) fn n_chunks(&self) -> usize {
        self.n_owned.div_ceil(self.chunk_rows)
    }

    fn words(&self) -> usize {
        self.n_ff.div_ceil(64)
    }

    fn bits(&self, n_tokens: usize) -> Param<'a> {
        Param::optional(self.bits, n_tokens * self.words() * 8)
    }

    fn owned(&self) -> Param<'a> {
        Memory(self.owned, self.n_owned * WORD)
    }

    fn x(&self, n_tokens: usize) -> Param<'a> {
        Memory(self.x, n_tokens * self.n_embd * WORD)
    }

    /// Lists and hidden values are `n_owned` apart.
    fn hidden(&self, n_tokens: usize) -> Param<'a> {
        Memory(self.hidden, n_tokens * self.n_owned * WORD)
    }

    fn list(&self, n_tokens: usize) -> [Param<'a>; 2] {
        [Memory(self.list, n_tokens * self.n_owned * WORD), Memory(self.counts, n_tokens * WORD)]
    }

    fn marks(&self) -> Param<'a> {
        Param::optional(self.marks, self.n_owned * WORD)
    }

    fn counters(&self) -> Param<'a> {
        Memory(self.counters, 64)
    }

    fn part(&self, n_tokens: usize) -> Param<'a> {
        Memory(self.part, n_tokens * self.n_chunks() * self.n_embd * WORD)
    }

    fn activation(&self) -> Param<'a> {
        Int(match self.activation {
            Activation::Relu => 0,
            Activation::Silu => 1,
            Activation::Gelu => 2,
            other => unreachable!("{other:?} is refused at load"),
        })
    }

    fn gating(&self) -> Param<'a> {
        Int(match self.gating {
            Gating::None => 0,
            Gating::Gate => 1,
            Gating::GateAndUp => 2,
        })
    }

    /// The gate, if it is of the type of up, so that one kernel reads both.
    fn fused_gate(&self) -> Option<MatrixView<'a>> {
        self.gate.filter(|gate| gate.ty() == self.up.ty())
    }

    /// The same from token `token` on.
    pub(crate) fn from(&self, token: usize) -> Self {
        Self {
            bits: self.bits.map(|bits| bits.from(token * self.words() * 8)),
            x: self.x.from(token * self.n_embd * WORD),
            hidden: self.hidden.from(token * self.n_owned * WORD),
            ..*self
        }
    }
}

impl Device {
    /// `y[t] = table[ids[t] + row_offset]`, or added to it.
    pub(crate) fn embed(
        &mut self,
        table: MatrixView<'_>,
        ids: View<'_>,
        y: View<'_>,
        n_tokens: usize,
        row_offset: usize,
        accumulate: bool,
    ) {
        let n_embd = table.matrix.n_cols;
        let params = [
            table.param(),
            Memory(ids, n_tokens * WORD),
            Memory(y, n_tokens * n_embd * WORD),
            Int(n_embd),
            Int(n_tokens),
            Int(row_offset),
            Int(usize::from(accumulate)),
        ];
        self.launch(table.kernel(OfType::Embed), [n_tokens, 1, 1], 128, &params);
    }

    /// Rows lie one after the other.
    pub(crate) fn norm(
        &mut self,
        norm: Norm,
        weight: View<'_>,
        bias: Option<View<'_>>,
        x: View<'_>,
        y: View<'_>,
        [n_rows, n]: [usize; 2],
    ) {
        let kernel = match norm.kind {
            NormKind::Rms => Plain::RmsNorm,
            NormKind::Layer => Plain::LayerNorm,
        };
        let params = [
            Memory(x, n_rows * n * WORD),
            Memory(weight, n * WORD),
            Param::optional(bias, n * WORD),
            Memory(y, n_rows * n * WORD),
            Int(n),
            Int(n_rows),
            Float(norm.eps),
        ];
        self.launch(Kernel::Plain(kernel), [n_rows, 1, 1], 256, &params);
    }

    /// `y = W x + bias` for each token, with [`ACCUMULATE`] and [`RECTIFY`].
    pub(crate) fn product(
        &mut self,
        w: MatrixView<'_>,
        x: Rows<'_>,
        bias: Option<View<'_>>,
        y: Rows<'_>,
        n_tokens: usize,
        flags: usize,
    ) {
        let (n_out, n_in) = (w.matrix.n_rows, w.matrix.n_cols);
        let (kernel, grid, n_threads) = match n_tokens {
            1 => (OfType::MatvecOne, [n_out.div_ceil(8), 1, 1], 128),
            n if n >= MATMUL_TOKENS => (OfType::Matmul, [n_out.div_ceil(64), n.div_ceil(64), 1], 256),
            n => (OfType::Matvec, [n_out.div_ceil(8), n.div_ceil(8), 1], 128),
        };
        let params = [
            w.param(),
            x.param(n_tokens, n_in),
            Param::optional(bias, n_out * WORD),
            y.param(n_tokens, n_out),
            Int(n_out),
            Int(n_in),
            Int(n_tokens),
            Int(x.stride),
            Int(y.stride),
            Int(flags),
        ];
        self.launch(w.kernel(kernel), grid, n_threads, &params);
    }

    pub(crate) fn rotate(
        &mut self,
        rope: &Rope,
        freqs: View<'_>,
        x: Rows<'_>,
        positions: View<'_>,
        [n_heads, head_dim, n_tokens]: [usize; 3],
    ) {
        let params = [
            x.param(n_tokens, n_heads * head_dim),
            Memory(positions, n_tokens * WORD),
            Memory(freqs, rope.n_rot / 2 * WORD),
            Int(n_heads),
            Int(head_dim),
            Int(rope.n_rot),
            Int(match rope.kind {
                RopeKind::Interleaved => 0,
                RopeKind::Halves => 1,
            }),
            Float(rope.magnitude),
            Int(x.stride),
            Int(n_tokens),
        ];
        self.launch(Kernel::Plain(Plain::Rope), [n_heads, n_tokens, 1], 64, &params);
    }

    /// Writes keys and values of the rows to their positions.
    pub(crate) fn kv_append(
        &mut self,
        tables: CacheTables<'_>,
        k: Rows<'_>,
        v: Rows<'_>,
        kv_dim: usize,
        n_tokens: usize,
    ) {
        let kernel = if tables.is_f16 { Plain::KvAppendF16 } else { Plain::KvAppendF32 };
        let [keys, values] = tables.caches(n_tokens);
        let params = [
            k.param(n_tokens, kv_dim),
            v.param(n_tokens, kv_dim),
            keys,
            values,
            tables.positions(n_tokens),
            Int(kv_dim),
            Int(k.stride),
            Int(v.stride),
            Int(n_tokens),
        ];
        self.launch(Kernel::Plain(kernel), [n_tokens, 1, 1], 128, &params);
    }

    /// Attention of the rows of a step, in as many launches as `part` asks for; no position is beyond `n_spans` spans.
    pub(crate) fn attention(
        &mut self,
        tables: CacheTables<'_>,
        q: Rows<'_>,
        part: View<'_>,
        y: Rows<'_>,
        heads: Heads,
        [n_spans, n_tokens]: [usize; 2],
    ) {
        let Heads { n_head, n_head_kv, head_dim } = heads;
        let at_once = part.n_bytes() / heads.part_bytes(n_spans);
        assert!(at_once > 0, "attention over {n_spans} spans was not reserved");
        let kernel = if tables.is_f16 { Plain::AttentionF16 } else { Plain::AttentionF32 };
        for first in (0..n_tokens).step_by(at_once) {
            let n = at_once.min(n_tokens - first);
            let (tables, q, y) = (tables.from(first), q.from(first), y.from(first));
            let [keys, values] = tables.caches(n);
            let part = Memory(part, n * heads.part_bytes(n_spans));
            let params = [
                q.param(n, n_head * head_dim),
                keys,
                values,
                tables.positions(n),
                part,
                Int(n_head),
                Int(n_head_kv),
                Int(head_dim),
                Int(n_spans),
                Int(q.stride),
                Int(n),
                Float(1.0 / (head_dim as f32).sqrt()),
            ];
            let groups = n_head_kv * (n_head / n_head_kv).div_ceil(HEADS_PER_BLOCK);
            self.launch(Kernel::Plain(kernel), [groups, n_spans, n], 128, &params);
            let params = [
                part,
                tables.positions(n),
                y.param(n, n_head * head_dim),
                Int(n_head),
                Int(head_dim),
                Int(n_spans),
                Int(y.stride),
                Int(n),
            ];
            self.launch(Kernel::Plain(Plain::AttentionMerge), [n_head, n, 1], 128, &params);
        }
    }

    /// Active sets of a low-rank predictor whose inner vectors are `inner [n_tokens, rank]`.
    pub(crate) fn predict(
        &mut self,
        fc2: MatrixView<'_>,
        inner: Rows<'_>,
        bits: View<'_>,
        n_tokens: usize,
        threshold: f32,
    ) {
        let (n_ff, rank) = (fc2.matrix.n_rows, fc2.matrix.n_cols);
        let params = [
            fc2.param(),
            inner.param(n_tokens, rank),
            Memory(bits, n_tokens * n_ff.div_ceil(64) * 8),
            Int(n_ff),
            Int(rank),
            Int(n_tokens),
            Int(inner.stride),
            Float(threshold),
        ];
        let grid = [n_ff.div_ceil(64), n_tokens.div_ceil(8), 1];
        self.launch(fc2.kernel(OfType::Predict), grid, 128, &params);
    }

    /// Active sets of a gate copy; tokens at position 0 have all neurons.
    pub(crate) fn predict_by_copy(
        &mut self,
        copy: CopyView<'_>,
        input: CopyInput<'_>,
        x: Rows<'_>,
        positions: View<'_>,
        bits: View<'_>,
        n_tokens: usize,
    ) {
        let (n_ff, n_embd, n_outliers) = (copy.n_ff, copy.n_embd, copy.n_outliers);
        let [q, apart, info] = [
            Memory(input.q, n_tokens * copy.n_padded),
            Memory(input.apart, n_tokens * n_outliers * WORD),
            Memory(input.info, n_tokens * 2 * WORD),
        ];
        let params = [
            x.param(n_tokens, n_embd),
            Memory(copy.mean, n_embd * WORD),
            Memory(copy.outliers, n_outliers * WORD),
            q,
            apart,
            info,
            Int(n_embd),
            Int(n_outliers),
            Int(n_tokens),
            Int(x.stride),
        ];
        self.launch(Kernel::Plain(Plain::GateCopyQuantize), [n_tokens, 1, 1], 256, &params);
        let params = [
            Memory(copy.codes, copy.codes_len),
            Memory(copy.scales, n_ff * WORD),
            Memory(copy.thresholds, n_ff * WORD),
            Memory(copy.outlier_weights, n_ff * n_outliers * 2),
            q,
            apart,
            info,
            Memory(positions, n_tokens * WORD),
            Memory(bits, n_tokens * n_ff.div_ceil(64) * 8),
            Int(n_ff),
            Int(n_embd),
            Int(n_outliers),
            Int(n_tokens),
        ];
        self.launch(Kernel::Plain(Plain::GateCopyBits), [n_ff.div_ceil(64), n_tokens, 1], 128, &params);
    }

    /// Lists of the active neurons of each token, and their number to the counters.
    pub(crate) fn compact(&mut self, ffn: &FfnView<'_>, n_tokens: usize) {
        let [list, counts] = ffn.list(n_tokens);
        let params = [
            ffn.bits(n_tokens),
            ffn.owned(),
            list,
            counts,
            ffn.counters(),
            Int(ffn.n_owned),
            Int(ffn.n_ff),
            Int(ffn.n_owned),
            Int(n_tokens),
        ];
        self.launch(Kernel::Plain(Plain::Compact), [n_tokens, 1, 1], 256, &params);
    }

    /// Hidden values of the listed neurons, then the chunks of their sum.
    pub(crate) fn ffn_by_list(&mut self, ffn: &FfnView<'_>, n_tokens: usize) {
        let n_embd = ffn.n_embd;
        let grid = [ffn.n_owned.div_ceil(8), n_tokens, 1];
        let [list, counts] = ffn.list(n_tokens);
        let hidden = ffn.hidden(n_tokens);
        let fused = ffn.fused_gate();
        if let (Some(gate), None) = (ffn.gate, fused) {
            let params = [
                gate.param(),
                ffn.x(n_tokens),
                list,
                counts,
                hidden,
                ffn.marks(),
                ffn.counters(),
                Int(n_embd),
                Int(ffn.n_owned),
                Int(n_embd),
                ffn.activation(),
                Int(n_tokens),
            ];
            self.launch(gate.kernel(OfType::FfnGateList), grid, 128, &params);
        }
        let params = [
            fused.map_or(Param::Absent, MatrixView::param),
            ffn.up.param(),
            Param::optional(ffn.up_bias, ffn.n_owned * WORD),
            ffn.x(n_tokens),
            if fused.is_some() { Param::Absent } else { hidden },
            list,
            counts,
            hidden,
            ffn.marks(),
            ffn.counters(),
            Int(n_embd),
            Int(ffn.n_owned),
            Int(n_embd),
            ffn.activation(),
            ffn.gating(),
            Int(usize::from(ffn.skips_up)),
            Int(n_tokens),
        ];
        self.launch(ffn.up.kernel(OfType::FfnList), grid, 128, &params);
        let params = [
            ffn.down.param(),
            hidden,
            list,
            counts,
            ffn.part(n_tokens),
            ffn.marks(),
            ffn.counters(),
            Int(n_embd),
            Int(ffn.n_owned),
            Int(ffn.chunk_rows),
            Int(ffn.n_chunks()),
            Int(usize::from(ffn.skips_down)),
            Int(n_tokens),
        ];
        let grid = [n_embd.div_ceil(1024), ffn.n_chunks(), n_tokens];
        self.launch(ffn.down.kernel(OfType::DownList), grid, 128, &params);
    }

    /// Hidden values of all held neurons, 0 where not active; a row of weights is read once for 8 tokens, of many once for 64.
    pub(crate) fn hidden_by_tile(&mut self, ffn: &FfnView<'_>, n_tokens: usize) {
        let n_embd = ffn.n_embd;
        let grid = [ffn.n_owned.div_ceil(8), n_tokens.div_ceil(8), 1];
        let hidden = ffn.hidden(n_tokens);
        let fused = ffn.fused_gate();
        if let (Some(gate), None) = (ffn.gate, fused) {
            let params = [
                gate.param(),
                ffn.x(n_tokens),
                ffn.bits(n_tokens),
                ffn.owned(),
                hidden,
                ffn.marks(),
                ffn.counters(),
                Int(n_embd),
                Int(ffn.n_owned),
                Int(ffn.n_ff),
                Int(n_embd),
                ffn.activation(),
                Int(n_tokens),
            ];
            self.launch(gate.kernel(OfType::FfnGateTile), grid, 128, &params);
        }
        let params = [
            fused.map_or(Param::Absent, MatrixView::param),
            ffn.up.param(),
            Param::optional(ffn.up_bias, ffn.n_owned * WORD),
            ffn.x(n_tokens),
            if fused.is_some() { Param::Absent } else { hidden },
            ffn.bits(n_tokens),
            ffn.owned(),
            hidden,
            ffn.marks(),
            ffn.counters(),
            Int(n_embd),
            Int(ffn.n_owned),
            Int(ffn.n_ff),
            Int(n_embd),
            ffn.activation(),
            ffn.gating(),
            Int(usize::from(ffn.skips_up)),
            Int(n_tokens),
        ];
        if n_tokens >= MATMUL_TOKENS {
            let grid = [ffn.n_owned.div_ceil(64), n_tokens.div_ceil(64), 1];
            self.launch(ffn.up.kernel(OfType::FfnMatmul), grid, 256, &params);
        } else {
            self.launch(ffn.up.kernel(OfType::FfnTile), grid, 128, &params);
        }
    }

    /// `y = sum over what [`Device::hidden_by_tile`] has written`, or added to it, for [`MATMUL_TOKENS`] or more.
    pub(crate) fn down_by_matmul(
        &mut self,
        ffn: &FfnView<'_>,
        y: View<'_>,
        accumulate: bool,
        n_tokens: usize,
    ) {
        let params = [
            ffn.down.param(),
            ffn.hidden(n_tokens),
            ffn.bits(n_tokens),
            ffn.owned(),
            Memory(y, n_tokens * ffn.n_embd * WORD),
            ffn.marks(),
            ffn.counters(),
            Int(ffn.n_embd),
            Int(ffn.n_owned),
            Int(ffn.n_ff),
            Int(usize::from(accumulate)),
            Int(usize::from(ffn.skips_down)),
            Int(n_tokens),
        ];
        let grid = [ffn.n_embd.div_ceil(64), n_tokens.div_ceil(64), 1];
        self.launch(ffn.down.kernel(OfType::DownMatmul), grid, 256, &params);
    }

    /// Chunks of the sum over what [`Device::hidden_by_tile`] has written.
    pub(crate) fn down_by_tile(&mut self, ffn: &FfnView<'_>, n_tokens: usize) {
        let params = [
            ffn.down.param(),
            ffn.hidden(n_tokens),
            ffn.bits(n_tokens),
            ffn.owned(),
            ffn.part(n_tokens),
            ffn.marks(),
            ffn.counters(),
            Int(ffn.n_embd),
            Int(ffn.n_owned),
            Int(ffn.n_ff),
            Int(ffn.chunk_rows),
            Int(ffn.n_chunks()),
            Int(usize::from(ffn.skips_down)),
            Int(n_tokens),
        ];
        let grid = [ffn.n_embd.div_ceil(1024), ffn.n_chunks(), n_tokens.div_ceil(8)];
        self.launch(ffn.down.kernel(OfType::DownTile), grid, 128, &params);
    }

    /// `y = sum of the chunks`, or added to it.
    pub(crate) fn reduce(
        &mut self,
        ffn: &FfnView<'_>,
        is_list: bool,
        y: View<'_>,
        accumulate: bool,
        n_tokens: usize,
    ) {
        let params = [
            ffn.part(n_tokens),
            if is_list { ffn.list(n_tokens)[1] } else { Param::Absent },
            Memory(y, n_tokens * ffn.n_embd * WORD),
            Int(ffn.n_embd),
            Int(ffn.chunk_rows),
            Int(ffn.n_chunks()),
            Int(usize::from(accumulate)),
            Int(n_tokens),
        ];
        let grid = [ffn.n_embd.div_ceil(128), n_tokens, 1];
        self.launch(Kernel::Plain(Plain::DownReduce), grid, 128, &params);
    }

    /// Counts the rows that any token of the step has read, and forgets which they were.
    pub(crate) fn count_marks(&mut self, ffn: &FfnView<'_>) {
        let params = [ffn.marks(), ffn.counters(), Int(ffn.n_owned)];
        self.launch(Kernel::Plain(Plain::CountMarks), [ffn.n_owned.div_ceil(128), 1, 1], 128, &params);
    }

    /// Counts the neurons whose hidden values are not zero, if that is asked for.
    pub(crate) fn count_fired(&mut self, ffn: &FfnView<'_>, is_list: bool, n_tokens: usize) {
        let Some(fired) = ffn.fired else { return };
        let [list, counts] = if is_list { ffn.list(n_tokens) } else { [Param::Absent; 2] };
        let params = [
            ffn.hidden(n_tokens),
            list,
            counts,
            ffn.owned(),
            Memory(fired, ffn.n_ff * 8),
            Int(ffn.n_owned),
            Int(n_tokens),
        ];
        let grid = [ffn.n_owned.div_ceil(128), n_tokens, 1];
        self.launch(Kernel::Plain(Plain::CountFired), grid, 128, &params);
    }

    /// `y += x + bias`; rows lie one after the other.
    pub(crate) fn add_rows(
        &mut self,
        y: View<'_>,
        x: Option<View<'_>>,
        bias: Option<View<'_>>,
        [n_rows, n]: [usize; 2],
    ) {
        let params = [
            Memory(y, n_rows * n * WORD),
            Param::optional(x, n_rows * n * WORD),
            Param::optional(bias, n * WORD),
            Int(n),
            Int(n_rows),
            Int(n),
            Int(n),
        ];
        self.launch(Kernel::Plain(Plain::AddRows), [n.div_ceil(128), n_rows, 1], 128, &params);
    }

    /// Fills memory with zeros.
    pub(crate) fn zero(&mut self, p: View<'_>) {
        let n = p.n_bytes() / WORD;
        let params = [Memory(p, n * WORD), Int(0), Int(n)];
        self.launch(Kernel::Plain(Plain::FillU32), [n.div_ceil(128), 1, 1], 128, &params);
    }
}
