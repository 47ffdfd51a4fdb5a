//! Rotation, the KV cache and attention, one token at a time.

use std::ops::Range;

use super::Rounding;
use crate::{LayerId, ModelSpec, Rope};

/// Keys and values of one sequence, each `[n_layer, kv_len, kv_dim]`.
#[derive(Clone, Debug)]
pub(super) struct KvCache {
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

impl KvCache {
    pub(super) fn new(spec: &ModelSpec) -> Self {
        Self { k: vec![Vec::new(); spec.n_layer], v: vec![Vec::new(); spec.n_layer] }
    }

    /// Makes room for `kv_len` positions of the layers that are at home here; fails if there is no memory for them.
    pub(super) fn grow(
        &mut self,
        spec: &ModelSpec,
        kv_len: usize,
        is_home: impl Fn(usize) -> bool,
    ) -> Result<(), ()> {
        let len = kv_len.checked_mul(spec.kv_dim()).ok_or(())?;
        let layers = self.k.iter_mut().zip(&mut self.v).enumerate().filter(|(layer, _)| is_home(*layer));
        for rows in layers.flat_map(|(_, (k, v))| [k, v]) {
            rows.try_reserve_exact(len.saturating_sub(rows.len())).map_err(drop)?;
            rows.resize(rows.len().max(len), 0.0);
        }
        Ok(())
    }

    pub(super) fn copy_from(&mut self, spec: &ModelSpec, from: &Self, positions: Range<u32>) {
        let range = positions.start as usize * spec.kv_dim()..positions.end as usize * spec.kv_dim();
        let layers = self.k.iter_mut().zip(&from.k).chain(self.v.iter_mut().zip(&from.v));
        for (to, from) in layers.filter(|(_, from)| !from.is_empty()) {
            to[range.clone()].copy_from_slice(&from[range.clone()]);
        }
    }

    pub(super) fn write(&mut self, spec: &ModelSpec, layer: LayerId, pos: u32, k: Vec<f32>, v: Vec<f32>) {
        let at = pos as usize * spec.kv_dim();
        self.k[layer.index()][at..at + k.len()].copy_from_slice(&k);
        self.v[layer.index()][at..at + v.len()].copy_from_slice(&v);
    }
}

/// Rotates each head of `x [n_heads, head_dim]` to position `pos`.
pub(super) fn rotate(rope: &Rope, head_dim: usize, pos: u32, x: &mut [f32]) {
    for head in x.chunks_exact_mut(head_dim) {
        for (pair, &freq) in rope.freqs.iter().enumerate() {
            let (sin, cos) = (pos as f32 * freq).sin_cos();
            let (sin, cos) = (sin * rope.magnitude, cos * rope.magnitude);
            let (a, b) = rope.pair(pair);
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
        }
    }
}

/// Softmax over positions `0..=pos` of `q · k`, applied to the values; all heads of one token.
///
/// # Shapes
/// `q [n_head, head_dim]`, result the same.
pub(super) fn attend(
    spec: &ModelSpec,
    rounding: Rounding,
    cache: &KvCache,
    layer: LayerId,
    pos: u32,
    q: &[f32],
) -> Vec<f32> {
    let (head_dim, kv_dim) = (spec.head_dim, spec.kv_dim());
    let heads_per_kv = spec.n_head / spec.n_head_kv;
    let (k, v) = (&cache.k[layer.index()], &cache.v[layer.index()]);
    let mut out = Vec::with_capacity(q.len());
    for (head, q) in q.chunks_exact(head_dim).enumerate() {
        let q = rounding.stored(q);
        let part = |p: usize| {
            let at = p * kv_dim + head / heads_per_kv * head_dim;
            at..at + head_dim
        };
        let scores: Vec<f32> = (0..=pos as usize)
            .map(|p| {
                let dot: f64 = k[part(p)].iter().zip(&q).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum();
                dot as f32 * spec.attn_scale()
            })
            .collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exps: Vec<f32> = scores.iter().map(|s| rounding.f16(rounding.f16(s - max).exp())).collect();
        let total: f64 = exps.iter().map(|&e| f64::from(e)).sum();
        let mut mixed = vec![0f64; head_dim];
        for (p, e) in exps.iter().enumerate() {
            let share = rounding.f16((f64::from(*e) / total) as f32);
            for (m, &v) in mixed.iter_mut().zip(&v[part(p)]) {
                *m += f64::from(share) * f64::from(v);
            }
        }
        out.extend(mixed.iter().map(|&m| m as f32));
    }
    out
}
