//! Element-wise parts of the forward pass in plain Rust, each with one fixed order of sums.

use powerinfer_sparse_ops::{Norm, NormKind, NormWeights, Rope, StepRow};

use crate::pool::Pool;

/// Norms of each row of `x [n_rows, n_embd]`, sums in f64.
///
/// # Shapes
/// `out [n_rows, n_embd]`.
pub(crate) fn norm(pool: &mut Pool, norm: Norm, w: &NormWeights, x: &[f32], out: &mut [f32]) {
    let n_embd = w.weight.len();
    pool.run_pieces(out, n_embd, |row, out| norm_row(norm, w, &x[row * n_embd..][..n_embd], out));
}

fn norm_row(norm: Norm, w: &NormWeights, x: &[f32], out: &mut [f32]) {
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => (sum(x, f64::from) / x.len() as f64) as f32,
    };
    let mean_square = sum(x, |v| f64::from(v - mean) * f64::from(v - mean)) / x.len() as f64;
    let scale = 1.0 / (mean_square as f32 + norm.eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(&w.weight) {
        *out = (x - mean) * scale * w;
    }
    if let Some(bias) = &w.bias {
        add(out, bias);
    }
}

/// `Σ f(x)` in four partial sums, element `i` in sum `i % 4`.
fn sum(x: &[f32], f: impl Fn(f32) -> f64) -> f64 {
    let (x4, rest) = x.as_chunks::<4>();
    let mut sums = [0f64; 4];
    for x in x4 {
        for lane in 0..4 {
            sums[lane] += f(x[lane]);
        }
    }
    (sums[0] + sums[2]) + (sums[1] + sums[3]) + rest.iter().map(|&x| f(x)).sum::<f64>()
}

/// `to += values`.
pub(crate) fn add(to: &mut [f32], values: &[f32]) {
    assert_eq!(to.len(), values.len(), "lengths of a sum");
    for (to, v) in to.iter_mut().zip(values) {
        *to += v;
    }
}

/// `to += values`, shared out.
pub(crate) fn add_batch(pool: &mut Pool, to: &mut [f32], values: &[f32]) {
    // Four rows of 4096 wide models; less is not worth waking a thread for.
    const PIECE: usize = 1 << 14;
    assert_eq!(to.len(), values.len(), "lengths of a sum");
    pool.run_pieces(to, PIECE, |piece, to| add(to, &values[piece * PIECE..][..to.len()]));
}

/// Cosine and sine of every pair for each row of a step, magnitude included: once a step, for all layers and
/// heads.
///
/// # Shapes
/// `table [n_rows, n_rot / 2]`.
pub(crate) fn rope_table(rope: &Rope, rows: &[StepRow], table: &mut [(f32, f32)]) {
    for (row, out) in rows.iter().zip(table.chunks_exact_mut(rope.freqs.len().max(1))) {
        for (out, freq) in out.iter_mut().zip(&rope.freqs) {
            let (sin, cos) = (row.pos as f32 * freq).sin_cos();
            *out = (cos * rope.magnitude, sin * rope.magnitude);
        }
    }
}

/// Rotates every head of every row of `x [n_rows, n_heads · head_dim]` by its row of the table.
pub(crate) fn rotate(
    pool: &mut Pool,
    rope: &Rope,
    head_dim: usize,
    table: &[(f32, f32)],
    x: &mut [f32],
    row_len: usize,
) {
    let n_pairs = rope.freqs.len();
    pool.run_pieces(x, row_len, |row, x| rotate_row(rope, head_dim, &table[row * n_pairs..][..n_pairs], x));
}

fn rotate_row(rope: &Rope, head_dim: usize, table: &[(f32, f32)], x: &mut [f32]) {
    for head in x.chunks_exact_mut(head_dim) {
        for (pair, &(cos, sin)) in table.iter().enumerate() {
            let (a, b) = rope.pair(pair);
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_sparse_ops::{RopeKind, RopeScaling, SeqId, TokenId};

    use super::*;

    fn weights(bias: bool) -> NormWeights {
        NormWeights { weight: vec![2.0; 6], bias: bias.then(|| vec![1.0; 6]) }
    }

    #[test]
    fn norms_of_known_vectors() {
        let mut pool = Pool::try_new(2).unwrap();
        let x = [3.0, -3.0, 3.0, -3.0, 3.0, -3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0];
        let mut out = [0.0; 12];
        norm(&mut pool, Norm { kind: NormKind::Rms, eps: 0.0 }, &weights(false), &x, &mut out);
        assert_eq!(out[..4], [2.0, -2.0, 2.0, -2.0]);
        norm(&mut pool, Norm { kind: NormKind::Layer, eps: 0.0 }, &weights(true), &x, &mut out);
        assert_eq!(out[6..], [-1.0, 3.0, -1.0, 3.0, -1.0, 3.0]);
    }

    #[test]
    fn rotation_keeps_lengths_and_turns_by_position() {
        let rope = Rope::new(RopeKind::Halves, 4, 1.0, &RopeScaling::None, None);
        let rows = [0, 2].map(|pos| StepRow { seq: SeqId(0), pos, token: TokenId(0) });
        let mut table = [(0.0, 0.0); 4];
        rope_table(&rope, &rows, &mut table);
        let x = [1.0, 0.0, 0.0, 0.0, 7.0];
        let mut x = [x, x].concat();
        rotate(&mut Pool::try_new(2).unwrap(), &rope, 5, &table, &mut x, 5);
        assert_eq!(x[..5], [1.0, 0.0, 0.0, 0.0, 7.0]);
        assert_eq!(x[5..], [2f32.cos(), 0.0, 2f32.sin(), 0.0, 7.0]);
    }
}
