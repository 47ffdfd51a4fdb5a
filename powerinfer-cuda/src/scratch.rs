//! Memory that a step works in.

use powerinfer_sparse_ops::{BackendError, ModelSpec};

use crate::gpu::{ALIGN, Buffer, Device, Gpu, HostId, Piece, Plan};
use crate::kernels::{Heads, SPAN};
use crate::load::{CHUNK_ROWS, TILE, chunk_limit};

/// Rows whose logits are computed together.
pub(crate) const LOGIT_ROWS: usize = 16;

/// Tokens whose lists of active neurons are made together.
pub(crate) const LIST_ROWS: usize = 32;

/// Most bytes of partial sums of attention, unless one token needs more.
const ATTENTION_BYTES: usize = 16 << 20;

/// What the size of the scratch depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScratchShape {
    /// Most tokens of a step.
    pub(crate) max_rows: usize,
    /// Most spans of positions of a sequence.
    pub(crate) max_spans: usize,
    /// Layers whose dense part is here.
    pub(crate) n_kv_layer: usize,
    pub(crate) has_tables: bool,
    pub(crate) has_head: bool,
    /// Neurons are held.
    pub(crate) has_ffn: bool,
    /// Largest rank of a low-rank predictor.
    pub(crate) rank: usize,
    /// Widest input of a gate copy, and most columns kept apart.
    pub(crate) copy_padded: usize,
    pub(crate) copy_outliers: usize,
}

/// The pieces of the scratch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScratchPieces {
    /// Positions, token ids, then for each layer the addresses of keys and of values; see `StepTables`.
    pub(crate) tables: Piece,
    pub(crate) h: Piece,
    pub(crate) x: Piece,
    pub(crate) q: Piece,
    pub(crate) k: Piece,
    pub(crate) v: Piece,
    pub(crate) mixed: Piece,
    pub(crate) attention: Piece,
    pub(crate) inner: Piece,
    pub(crate) copy_q: Piece,
    pub(crate) copy_apart: Piece,
    pub(crate) copy_info: Piece,
    pub(crate) logits: Piece,
    /// Input of the FFN; later what is added to `h`.
    pub(crate) ffn_x: Piece,
    pub(crate) bits: Piece,
    pub(crate) hidden: Piece,
    pub(crate) list: Piece,
    pub(crate) counts: Piece,
    pub(crate) part: Piece,
    pub(crate) marks: Piece,
    pub(crate) sum: Piece,
}

impl ScratchShape {
    /// Whether it makes inputs of FFNs and has a residual stream.
    fn is_home(&self) -> bool {
        self.n_kv_layer > 0 || self.has_tables || self.has_head
    }

    pub(crate) fn tables_bytes(&self, n_rows: usize) -> usize {
        2 * table_bytes(n_rows) + self.n_kv_layer * 2 * cache_table_bytes(n_rows)
    }

    /// Pieces and their sum; every piece is a multiple of 256 bytes.
    pub(crate) fn plan(&self, spec: &ModelSpec) -> (Plan, ScratchPieces) {
        let rows = self.max_rows;
        let floats = |n: usize| rows * n * 4;
        let mut plan = Plan::default();
        let mut p = ScratchPieces::default();
        if self.is_home() {
            p.tables = plan.add(self.tables_bytes(rows));
            p.h = plan.add(floats(spec.n_embd));
            p.x = plan.add(floats(spec.n_embd));
        }
        if self.n_kv_layer > 0 {
            p.q = plan.add(floats(spec.q_dim()));
            p.k = plan.add(floats(spec.kv_dim()));
            p.v = plan.add(floats(spec.kv_dim()));
            p.mixed = plan.add(floats(spec.q_dim()));
            let one = heads(spec).part_bytes(self.max_spans);
            p.attention = plan.add(one.max((rows * one).min(ATTENTION_BYTES)));
            p.inner = plan.add(floats(self.rank));
            p.copy_q = plan.add(rows * self.copy_padded);
            p.copy_apart = plan.add(floats(self.copy_outliers));
            p.copy_info = plan.add(if self.copy_padded > 0 { floats(2) } else { 0 });
        }
        if self.has_head {
            p.logits = plan.add(rows.min(LOGIT_ROWS) * spec.n_vocab * 4);
        }
        if self.n_kv_layer > 0 || self.has_ffn {
            p.ffn_x = plan.add(floats(spec.n_embd));
            p.bits = plan.add(rows * spec.max_n_ff().div_ceil(64) * 8);
        }
        if self.has_ffn {
            let n_ff = spec.max_n_ff();
            p.hidden = plan.add(floats(n_ff));
            p.list = plan.add(rows.min(LIST_ROWS) * n_ff * 4);
            p.counts = plan.add(rows.min(LIST_ROWS) * 4);
            p.part = plan.add(rows.min(TILE) * most_chunks(spec) * spec.n_embd * 4);
            p.marks = plan.add(n_ff * 4);
            p.sum = plan.add(floats(spec.n_embd));
        }
        (plan, p)
    }
}

/// Bytes of a table of `u32`, padded so that what follows is aligned.
pub(crate) fn table_bytes(n_rows: usize) -> usize {
    (n_rows * 4).next_multiple_of(16)
}

/// Bytes of a table of addresses.
pub(crate) fn cache_table_bytes(n_rows: usize) -> usize {
    (n_rows * 8).next_multiple_of(16)
}

/// Most chunks that the down projection of any number of neurons has.
fn most_chunks(spec: &ModelSpec) -> usize {
    spec.max_n_ff().div_ceil(CHUNK_ROWS).min(chunk_limit(spec.n_embd))
}

pub(crate) fn heads(spec: &ModelSpec) -> Heads {
    Heads { n_head: spec.n_head, n_head_kv: spec.n_head_kv, head_dim: spec.head_dim }
}

pub(crate) fn spans(kv_len: usize) -> usize {
    kv_len.div_ceil(SPAN).max(1)
}

/// Memory of a step, on the device and pinned.
#[derive(Debug)]
pub(crate) struct Scratch {
    pub(crate) shape: ScratchShape,
    pub(crate) buffer: Buffer,
    pub(crate) pieces: ScratchPieces,
    /// Tables of a step.
    pub(crate) tables: HostId,
    /// What goes to the device: a vector a row, then active bits.
    pub(crate) inbox: HostId,
    /// What comes from the device: the same, or logits.
    pub(crate) outbox: HostId,
    /// The partial sum.
    pub(crate) sum: HostId,
}

impl Scratch {
    pub(crate) fn new(
        shape: ScratchShape,
        spec: &ModelSpec,
        device: &mut Device,
    ) -> Result<Self, BackendError> {
        let (plan, pieces) = shape.plan(spec);
        let buffer = device.alloc(plan, "steps")?;
        device.zero(buffer.piece(pieces.marks));
        let rows = shape.max_rows;
        let vectors = rows * spec.n_embd * 4;
        let exchange = bits_offset(rows, spec.n_embd) + rows * spec.max_n_ff().div_ceil(64) * 8;
        let logits = if shape.has_head { rows.min(LOGIT_ROWS) * spec.n_vocab * 4 } else { 0 };
        let pinned = |gpu: &mut dyn Gpu| -> Result<[HostId; 4], BackendError> {
            Ok([
                gpu.alloc_host(shape.tables_bytes(rows))?,
                gpu.alloc_host(exchange)?,
                gpu.alloc_host(exchange.max(logits))?,
                gpu.alloc_host(vectors)?,
            ])
        };
        match pinned(device.gpu()) {
            Ok([tables, inbox, outbox, sum]) => {
                Ok(Self { shape, buffer, pieces, tables, inbox, outbox, sum })
            }
            Err(error) => {
                device.free(buffer);
                Err(error)
            }
        }
    }

    pub(crate) fn free(self, device: &mut Device) {
        for id in [self.tables, self.inbox, self.outbox, self.sum] {
            device.gpu().free_host(id);
        }
        device.free(self.buffer);
    }
}

/// Where active bits lie in pinned memory, behind a vector a row.
pub(crate) fn bits_offset(n_rows: usize, n_embd: usize) -> usize {
    (n_rows * n_embd * 4).next_multiple_of(ALIGN)
}
