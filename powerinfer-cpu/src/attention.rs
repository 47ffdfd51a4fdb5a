//! The KV cache, and attention over it.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use powerinfer_sparse_ops::{ModelSpec, SeqId, StepRow, WeightType};

use crate::kernel::{AXPY_ROWS, axpy, dot_f32};
use crate::level::CpuLevel;
use crate::matmul::Cpu;

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvType {
    /// Half the bytes, rounded to 11 bits.
    #[default]
    F16,
    /// As computed.
    F32,
}

impl KvType {
    /// Bytes of one element.
    pub fn n_bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Positions whose scores are made before their values are mixed; their largest score sets the scale, so fewer
/// would rescale more often, and these fit on the stack.
const POSITIONS: usize = 64;

#[derive(Clone, Debug)]
enum Values {
    F16(Vec<u16>),
    F32(Vec<f32>),
}

impl Values {
    /// `n` zeros; memory that the system hands out only when it is written.
    fn zeros(ty: KvType, n: usize) -> Self {
        match ty {
            KvType::F16 => Self::F16(vec![0; n]),
            KvType::F32 => Self::F32(vec![0.0; n]),
        }
    }

    fn part(&self, at: usize, n: usize) -> &[u8] {
        match self {
            Self::F16(v) => bytemuck::cast_slice(&v[at..at + n]),
            Self::F32(v) => bytemuck::cast_slice(&v[at..at + n]),
        }
    }

    fn ty(&self) -> WeightType {
        match self {
            Self::F16(_) => WeightType::F16,
            Self::F32(_) => WeightType::F32,
        }
    }

    fn write(&mut self, at: usize, values: &[f32]) {
        match self {
            Self::F16(v) => {
                let to: &mut [f16] = v[at..at + values.len()].reinterpret_cast_mut();
                to.convert_from_f32_slice(values);
            }
            Self::F32(v) => v[at..at + values.len()].copy_from_slice(values),
        }
    }

    fn copy(&mut self, at: usize, from: &Self, from_at: usize, n: usize) {
        match (self, from) {
            (Self::F16(to), Self::F16(from)) => {
                to[at..at + n].copy_from_slice(&from[from_at..from_at + n]);
            }
            (Self::F32(to), Self::F32(from)) => {
                to[at..at + n].copy_from_slice(&from[from_at..from_at + n]);
            }
            _ => unreachable!("all caches of a backend have one type"),
        }
    }
}

/// Keys and values of one sequence, each `[n_layer, kv_len, kv_dim]`.
#[derive(Clone, Debug)]
pub(crate) struct KvCache {
    kv_len: usize,
    k: Values,
    v: Values,
}

impl KvCache {
    /// Bytes that a cache takes, if they can be counted.
    pub(crate) fn n_bytes(spec: &ModelSpec, ty: KvType, kv_len: usize) -> Option<usize> {
        spec.n_layer.checked_mul(spec.kv_dim())?.checked_mul(2 * ty.n_bytes())?.checked_mul(kv_len)
    }

    pub(crate) fn new(spec: &ModelSpec, ty: KvType, kv_len: usize) -> Self {
        let n = spec.n_layer * kv_len * spec.kv_dim();
        Self { kv_len, k: Values::zeros(ty, n), v: Values::zeros(ty, n) }
    }

    pub(crate) fn kv_len(&self) -> usize {
        self.kv_len
    }

    /// Copies positions `positions` of every layer to the same positions here.
    pub(crate) fn copy_from(&mut self, spec: &ModelSpec, from: &Self, positions: std::ops::Range<usize>) {
        let kv_dim = spec.kv_dim();
        let n = positions.len() * kv_dim;
        for layer in 0..spec.n_layer {
            let to_at = (layer * self.kv_len + positions.start) * kv_dim;
            let from_at = (layer * from.kv_len + positions.start) * kv_dim;
            self.k.copy(to_at, &from.k, from_at, n);
            self.v.copy(to_at, &from.v, from_at, n);
        }
    }
}

/// The caches of all sequences.
#[derive(Debug, Default)]
pub(crate) struct KvCaches {
    // A handful at most, so a search is cheaper than a hash.
    caches: Vec<(SeqId, KvCache)>,
}

impl KvCaches {
    pub(crate) fn get(&self, seq: SeqId) -> Option<&KvCache> {
        self.caches.iter().find(|(id, _)| *id == seq).map(|(_, cache)| cache)
    }

    fn index(&self, seq: SeqId) -> usize {
        let found = self.caches.iter().position(|(id, _)| *id == seq);
        found.unwrap_or_else(|| panic!("sequence {seq} is not reserved"))
    }

    pub(crate) fn insert(&mut self, seq: SeqId, cache: KvCache) {
        self.remove(seq);
        self.caches.push((seq, cache));
    }

    pub(crate) fn remove(&mut self, seq: SeqId) {
        self.caches.retain(|(id, _)| *id != seq);
    }

    /// See [`HybridBackend::kv_copy`](powerinfer_sparse_ops::HybridBackend::kv_copy).
    pub(crate) fn copy(
        &mut self,
        spec: &ModelSpec,
        from: SeqId,
        to: SeqId,
        positions: std::ops::Range<usize>,
    ) {
        let (from, to) = (self.index(from), self.index(to));
        if let Ok([(_, from), (_, to)]) = self.caches.get_disjoint_mut([from, to]) {
            to.copy_from(spec, from, positions);
        }
    }

    /// Writes the keys and values of a step.
    ///
    /// # Shapes
    /// `k, v [n_rows, kv_dim]`.
    pub(crate) fn write(&mut self, spec: &ModelSpec, layer: usize, rows: &[StepRow], k: &[f32], v: &[f32]) {
        let kv_dim = spec.kv_dim();
        for (i, row) in rows.iter().enumerate() {
            let at = self.index(row.seq);
            let cache = &mut self.caches[at].1;
            let pos = row.pos as usize;
            assert!(
                pos < cache.kv_len,
                "position {pos} of sequence {} with room for {}",
                row.seq,
                cache.kv_len
            );
            let at = (layer * cache.kv_len + pos) * kv_dim;
            cache.k.write(at, &k[i * kv_dim..][..kv_dim]);
            cache.v.write(at, &v[i * kv_dim..][..kv_dim]);
        }
    }
}

/// Attention of each row over its sequence up to its position.
///
/// Scores of [`POSITIONS`] positions at a time, with the running maximum and sum of the softmax; the order is that
/// of positions whatever the batch.
///
/// # Shapes
/// `q, out [n_rows, n_head, head_dim]`.
pub(crate) fn attention(
    cpu: &mut Cpu,
    spec: &ModelSpec,
    caches: &KvCaches,
    layer: usize,
    rows: &[StepRow],
    q: &[f32],
    out: &mut [f32],
) {
    let head_dim = spec.head_dim;
    let per_kv = spec.n_head / spec.n_head_kv;
    let level = cpu.level;
    cpu.pool.run_pieces(out, head_dim, |piece, out| {
        let (row, head) = (piece / spec.n_head, piece % spec.n_head);
        let cache = &caches.caches[caches.index(rows[row].seq)].1;
        let q = &q[piece * head_dim..][..head_dim];
        let start = layer * cache.kv_len * spec.kv_dim() + head / per_kv * head_dim;
        let at = |pos: usize| start + pos * spec.kv_dim();
        attend_head(level, cache, at, rows[row].pos as usize + 1, q, spec.attn_scale(), out);
    });
}

/// One head of one row over the `n` positions whose parts of keys and values start at `at(position)`.
fn attend_head(
    level: CpuLevel,
    cache: &KvCache,
    at: impl Fn(usize) -> usize,
    n: usize,
    q: &[f32],
    scale: f32,
    out: &mut [f32],
) {
    let mut scores = [0f32; POSITIONS];
    let (mut max, mut total) = (f32::NEG_INFINITY, 0f32);
    out.fill(0.0);
    for first in (0..n).step_by(POSITIONS) {
        let scores = &mut scores[..POSITIONS.min(n - first)];
        let mut new_max = max;
        for (i, score) in scores.iter_mut().enumerate() {
            *score = dot_f32(level, cache.k.ty(), cache.k.part(at(first + i), q.len()), q) * scale;
            new_max = new_max.max(*score);
        }
        // At first exp(−∞) = 0, of sums that are 0.
        let shrink = (max - new_max).exp();
        if shrink != 1.0 {
            total *= shrink;
            out.iter_mut().for_each(|o| *o *= shrink);
        }
        max = new_max;
        for score in scores.iter_mut() {
            *score = (*score - max).exp();
            total += *score;
        }
        let value = |i: usize| cache.v.part(at(first + i), q.len());
        let (groups, rest) = scores.as_chunks::<AXPY_ROWS>();
        for (i, shares) in groups.iter().enumerate() {
            let values = std::array::from_fn(|j| value(i * AXPY_ROWS + j));
            axpy(level, cache.v.ty(), *shares, values, out);
        }
        for (i, &share) in rest.iter().enumerate() {
            axpy(level, cache.v.ty(), [share], [value(groups.len() * AXPY_ROWS + i)], out);
        }
    }
    out.iter_mut().for_each(|o| *o /= total);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> ModelSpec {
        powerinfer_testing::tiny::TinyModel::new(Default::default()).spec.as_ref().clone()
    }

    #[test]
    fn copying_leaves_other_positions_and_layers_alone() {
        let spec = spec();
        let kv_dim = spec.kv_dim();
        let mut caches = KvCaches::default();
        for (id, len) in [(0, 5), (1, 9)] {
            caches.insert(SeqId(id), KvCache::new(&spec, KvType::F16, len));
        }
        let row = |seq, pos| StepRow { seq: SeqId(seq), pos, token: powerinfer_sparse_ops::TokenId(0) };
        let (k, v) = (vec![1.0; 2 * kv_dim], vec![2.0; 2 * kv_dim]);
        caches.write(&spec, 1, &[row(0, 2), row(0, 3)], &k, &v);
        caches.copy(&spec, SeqId(0), SeqId(1), 0..3);
        let to = caches.get(SeqId(1)).unwrap();
        let value = |values: &Values, layer: usize, pos: usize| {
            let bytes = values.part((layer * 9 + pos) * kv_dim, 1);
            f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
        };
        assert_eq!((value(&to.k, 1, 2), value(&to.v, 1, 2)), (1.0, 2.0));
        assert_eq!((value(&to.k, 1, 3), value(&to.k, 0, 2)), (0.0, 0.0));
        caches.copy(&spec, SeqId(1), SeqId(1), 0..3);
    }

    #[test]
    #[should_panic(expected = "position 5 of sequence 0 with room for 5")]
    fn a_position_beyond_the_reserved_length_panics() {
        let spec = spec();
        let mut caches = KvCaches::default();
        caches.insert(SeqId(0), KvCache::new(&spec, KvType::F32, 5));
        let row = StepRow { seq: SeqId(0), pos: 5, token: powerinfer_sparse_ops::TokenId(0) };
        let k = vec![0.0; spec.kv_dim()];
        caches.write(&spec, 0, &[row], &k, &k);
    }
}
