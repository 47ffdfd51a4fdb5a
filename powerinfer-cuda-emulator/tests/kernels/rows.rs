//! Norms, rotation, keys and values, attention, and the small kernels on rows.

use half::f16;
use powerinfer_cuda_emulator::Arg;
use powerinfer_sparse_ops::{Rope, RopeKind, RopeScaling};

use crate::device::*;

#[test]
fn norms_follow_the_formula() {
    if !can_run() {
        return;
    }
    let mut random = Random(1);
    for n in [1, 5, 64, 257, 700] {
        let n_rows = 3;
        let (x, w, b) = (random.floats(n * n_rows), random.floats(n), random.floats(n));
        for (kernel, with_bias) in [("rms_norm", false), ("layer_norm", true), ("layer_norm", false)] {
            let got: Vec<f32> = on_device(|d| {
                let (x, w) = (d.upload(&x), d.upload(&w));
                let b = if with_bias { d.upload(&b) } else { NONE };
                let y = d.alloc::<f32>(n * n_rows);
                let args = |y| [x, w, b, y, int(n), int(n_rows), Arg::F32(1e-5)];
                d.launch(kernel, [n_rows, 1, 1], 256, &args(y));
                let apart: Vec<f32> = d.download(y, n * n_rows);
                d.launch(kernel, [n_rows, 1, 1], 256, &args(x));
                assert_eq!(apart, d.download::<f32>(x, n * n_rows), "in place");
                apart
            });
            for (x, y) in x.chunks(n).zip(got.chunks(n)) {
                let mean =
                    |f: &dyn Fn(f64) -> f64| x.iter().map(|&v| f(f64::from(v))).sum::<f64>() / n as f64;
                let middle = if kernel == "rms_norm" { 0.0 } else { mean(&|v| v) };
                let scale = 1.0 / (mean(&|v| (v - middle).powi(2)) + 1e-5).sqrt();
                for i in 0..n {
                    let want = (f64::from(x[i]) - middle) * scale * f64::from(w[i])
                        + if with_bias { f64::from(b[i]) } else { 0.0 };
                    // Where all values are nearly the mean, the scale is large.
                    assert_close(y[i], want, 3.0 + scale, format!("{kernel} {n}"));
                }
            }
        }
    }
}

#[test]
fn rotation_turns_the_pairs_of_the_model() {
    if !can_run() {
        return;
    }
    let mut random = Random(2);
    for kind in [RopeKind::Interleaved, RopeKind::Halves] {
        for (n_heads, head_dim, n_rot) in [(1, 2, 2), (3, 16, 16), (2, 20, 12), (1, 192, 192)] {
            let mut rope = Rope::new(kind, n_rot, 10000.0, &RopeScaling::None, None);
            rope.magnitude = 1.25;
            let positions = [0u32, 7, 100, 2047];
            let stride = n_heads * head_dim + 5;
            let x = random.floats(4 * stride);
            let got: Vec<f32> = on_device(|d| {
                let (x, p, f) = (d.upload(&x), d.upload(&positions), d.upload(&rope.freqs));
                let args = [
                    x,
                    p,
                    f,
                    int(n_heads),
                    int(head_dim),
                    int(n_rot),
                    int(usize::from(kind == RopeKind::Halves)),
                    Arg::F32(rope.magnitude),
                    int(stride),
                    int(4),
                ];
                d.launch("rope", [n_heads, 4, 1], 64, &args);
                d.download(x, 4 * stride)
            });
            let mut want = x.clone();
            for (t, &pos) in positions.iter().enumerate() {
                for head in want[t * stride..][..n_heads * head_dim].chunks_exact_mut(head_dim) {
                    for (pair, &freq) in rope.freqs.iter().enumerate() {
                        let (sin, cos) = (pos as f32 * freq).sin_cos();
                        let (i, j) = rope.pair(pair);
                        let (a, b) = (head[i], head[j]);
                        head[i] = (a * cos - b * sin) * 1.25;
                        head[j] = (a * sin + b * cos) * 1.25;
                    }
                }
            }
            for (got, want) in got.iter().zip(want) {
                assert_close(*got, f64::from(want), 1.0, format!("{kind:?} {head_dim}"));
            }
        }
    }
}

/// Keys, values and queries of two sequences, as the kernels see them.
struct Attention {
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    /// Of each token, its sequence and position.
    rows: Vec<(usize, u32)>,
    /// By sequence, `[position][kv_dim]`.
    k: [Vec<f32>; 2],
    v: [Vec<f32>; 2],
    q: Vec<f32>,
}

impl Attention {
    /// Appends all keys by the kernel, then attends for the rows.
    fn on(&self, d: &mut Device, half: bool, extra_spans: usize) -> Vec<f32> {
        let (kv_dim, size) = (self.n_head_kv * self.head_dim, if half { 2 } else { 4 });
        let suffix = if half { "f16" } else { "f32" };
        let caches: Vec<[Arg; 2]> =
            self.k.iter().map(|k| [d.alloc::<u8>(k.len() * size), d.alloc::<u8>(k.len() * size)]).collect();
        let table = |d: &mut Device, seqs: &[usize], side: usize| {
            let at = |&s: &usize| if let Arg::Ptr(at) = caches[s][side] { at } else { 0 };
            d.upload(&seqs.iter().map(at).collect::<Vec<u64>>())
        };
        for seq in 0..2 {
            let n = self.k[seq].len() / kv_dim;
            // Backwards, so that positions matter.
            let positions: Vec<u32> = (0..n as u32).rev().collect();
            let turned = |x: &[f32]| x.chunks(kv_dim).rev().flatten().copied().collect::<Vec<f32>>();
            let (k, v) = (d.upload(&turned(&self.k[seq])), d.upload(&turned(&self.v[seq])));
            let seqs = vec![seq; n];
            let (kc, vc, p) = (table(d, &seqs, 0), table(d, &seqs, 1), d.upload(&positions));
            let args = [k, v, kc, vc, p, int(kv_dim), int(kv_dim), int(kv_dim), int(n)];
            d.launch(&format!("kv_append_{suffix}"), [n, 1, 1], 128, &args);
        }
        let n = self.rows.len();
        let seqs: Vec<usize> = self.rows.iter().map(|r| r.0).collect();
        let positions: Vec<u32> = self.rows.iter().map(|r| r.1).collect();
        let n_spans = *positions.iter().max().unwrap() as usize / 256 + 1 + extra_spans;
        let (q, kc, vc, p) =
            (d.upload(&self.q), table(d, &seqs, 0), table(d, &seqs, 1), d.upload(&positions));
        let part = d.alloc::<f32>(n * self.n_head * n_spans * (self.head_dim + 2));
        let y_stride = self.n_head * self.head_dim;
        let y = d.alloc::<f32>(n * y_stride);
        let (heads, kv_heads, dim) = (int(self.n_head), int(self.n_head_kv), int(self.head_dim));
        let scale = Arg::F32(1.0 / (self.head_dim as f32).sqrt());
        let groups = (self.n_head / self.n_head_kv).div_ceil(8);
        let args = [q, kc, vc, p, part, heads, kv_heads, dim, int(n_spans), int(y_stride), int(n), scale];
        d.launch(&format!("attention_{suffix}"), [self.n_head_kv * groups, n_spans, n], 128, &args);
        let args = [part, p, y, heads, dim, int(n_spans), int(y_stride), int(n)];
        d.launch("attention_merge", [self.n_head, n, 1], 128, &args);
        d.download(y, n * y_stride)
    }

    fn check(&self, half: bool, got: &[f32]) {
        let stored = |v: f32| f64::from(if half { f16::from_f32(v).to_f32() } else { v });
        let kv_dim = self.n_head_kv * self.head_dim;
        for (t, &(seq, pos)) in self.rows.iter().enumerate() {
            for head in 0..self.n_head {
                let at = head / (self.n_head / self.n_head_kv) * self.head_dim;
                let q = &self.q[(t * self.n_head + head) * self.head_dim..][..self.head_dim];
                let row = |x: &[f32], p: usize| -> Vec<f64> {
                    x[p * kv_dim + at..][..self.head_dim].iter().map(|&v| stored(v)).collect()
                };
                let score = |p: usize| {
                    let dot: f64 = row(&self.k[seq], p).iter().zip(q).map(|(k, &q)| k * f64::from(q)).sum();
                    dot / (self.head_dim as f64).sqrt()
                };
                let scores: Vec<f64> = (0..=pos as usize).map(score).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let exps: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = exps.iter().sum();
                let mut want = vec![0.0; self.head_dim];
                for (p, e) in exps.iter().enumerate() {
                    want.iter_mut().zip(row(&self.v[seq], p)).for_each(|(w, v)| *w += e / total * v);
                }
                let got = &got[(t * self.n_head + head) * self.head_dim..][..self.head_dim];
                for (got, want) in got.iter().zip(want) {
                    assert_close(*got, want, 4.0, format!("token {t}, head {head}, f16 {half}"));
                }
            }
        }
    }
}

#[test]
fn attention_is_the_softmax_over_earlier_positions() {
    if !can_run() {
        return;
    }
    let mut random = Random(3);
    let shapes =
        [(1, 1, 4, 20), (4, 2, 16, 300), (3, 1, 10, 40), (12, 1, 32, 60), (2, 2, 256, 600), (9, 1, 7, 20)];
    for (n_head, n_head_kv, head_dim, length) in shapes {
        let kv_dim = n_head_kv * head_dim;
        let mut kv = || random.floats(length * kv_dim).into_iter().map(|v| 3.0 * v).collect::<Vec<f32>>();
        let (k, v) = ([kv(), kv()], [kv(), kv()]);
        let last = length as u32 - 1;
        // The end of a span among them.
        let rows = vec![(0, 0), (1, last), (0, last), (1, 1), (0, last / 2), (1, last.min(255))];
        let q = random.floats(rows.len() * n_head * head_dim);
        let case = Attention { n_head, n_head_kv, head_dim, rows, k, v, q };
        for half in [true, false] {
            let got = on_device(|d| case.on(d, half, 0));
            case.check(half, &got);
            // More spans than there are positions change nothing, nor do other tokens.
            assert_eq!(got, on_device(|d| case.on(d, half, 2)));
            let one = Attention {
                rows: case.rows[1..2].to_vec(),
                q: case.q[n_head * head_dim..][..n_head * head_dim].to_vec(),
                k: case.k.clone(),
                v: case.v.clone(),
                ..case
            };
            assert_eq!(got[n_head * head_dim..][..n_head * head_dim], on_device(|d| one.on(d, half, 0)));
        }
    }
}

#[test]
fn keys_are_rounded_to_f16_as_everywhere() {
    if !can_run() {
        return;
    }
    let mut random = Random(4);
    let mut k: Vec<f32> = (0..2000)
        .map(|_| f32::from_bits(random.next() as u32))
        .filter(|v| !v.is_nan())
        .chain((0..4000).map(|i| f16::from_bits(i * 16).to_f32()).filter(|v| !v.is_nan()))
        .collect();
    // Ties, and the ends of the range.
    k.extend([65504.0, 65519.99, 65520.0, f32::INFINITY, -0.0, 5.9e-8, 2.98e-8, 2.9802322e-8, 3e-8, 6.1e-5]);
    k.extend((0..1000).map(|i| f32::from_bits(0x3f80_0000 + i * 0x1000)));
    let n = k.len();
    let got: Vec<u16> = on_device(|d| {
        let (x, c) = (d.upload(&k), d.alloc::<u16>(n));
        let Arg::Ptr(at) = c else { unreachable!() };
        let (table, p) = (d.upload(&[at]), d.upload(&[0u32]));
        d.launch("kv_append_f16", [1, 1, 1], 128, &[x, x, table, table, p, int(n), int(n), int(n), int(1)]);
        d.download(c, n)
    });
    for (k, got) in k.iter().zip(got) {
        assert_eq!(got, f16::from_f32(*k).to_bits(), "{k:e}");
    }
}

#[test]
fn rows_are_added_filled_and_rounded() {
    if !can_run() {
        return;
    }
    let mut random = Random(5);
    let (n, n_rows, strides) = (150, 3, [160, 150]);
    let (y, x, b) = (random.floats(n_rows * 160), random.floats(n_rows * n), random.floats(n));
    for (with_x, with_bias) in [(true, true), (true, false), (false, true)] {
        let got: Vec<f32> = on_device(|d| {
            let to = d.upload(&y);
            let x = if with_x { d.upload(&x) } else { NONE };
            let b = if with_bias { d.upload(&b) } else { NONE };
            let args = [to, x, b, int(n), int(n_rows), int(strides[0]), int(strides[1])];
            d.launch("add_rows", [n.div_ceil(128), n_rows, 1], 128, &args);
            d.download(to, y.len())
        });
        for (i, (&got, &was)) in got.iter().zip(&y).enumerate() {
            let (row, at) = (i / 160, i % 160);
            let mut want = was;
            if at < n {
                want += if with_x { x[row * n + at] } else { 0.0 };
                want += if with_bias { b[at] } else { 0.0 };
            }
            assert_eq!(got, want);
        }
    }
    let got: Vec<u32> = on_device(|d| {
        let p = d.alloc::<u32>(200);
        d.launch("fill_u32", [2, 1, 1], 128, &[p, Arg::I32(-3), int(190)]);
        d.download(p, 200)
    });
    assert!(got.iter().enumerate().all(|(i, &v)| v == if i < 190 { u32::MAX - 2 } else { u32::MAX }));
}

#[test]
fn the_largest_logit_is_found_with_the_lowest_index() {
    if !can_run() {
        return;
    }
    let mut random = Random(6);
    for (n, n_parts) in [(1, 1), (300, 1), (1000, 3), (7, 4), (5000, 16)] {
        let (stride, n_rows) = (n + 2, 6);
        let mut logits = random.floats(stride * n_rows);
        logits[random.below(n)] = 5.0;
        for _ in 0..4 {
            logits[stride + random.below(n)] = 7.0;
            logits[2 * stride + random.below(n)] = f32::NAN;
        }
        logits[3 * stride..4 * stride].fill(f32::NAN);
        logits[4 * stride..5 * stride].fill(f32::NEG_INFINITY);
        let got: Vec<u32> = on_device(|d| {
            let l = d.upload(&logits);
            let (v, i, out) =
                (d.alloc::<f32>(n_parts * n_rows), d.alloc::<u32>(n_parts * n_rows), d.alloc::<u32>(n_rows));
            let args = [l, v, i, int(n), int(n_parts), int(stride), int(n_rows)];
            d.launch("argmax_part", [n_parts, n_rows, 1], 256, &args);
            d.launch("argmax_merge", [n_rows, 1, 1], 32, &[v, i, out, int(n_parts), int(n_rows)]);
            d.download(out, n_rows)
        });
        for row in 0..n_rows {
            let mut best = 0;
            let values = &logits[row * stride..][..n];
            for (i, &v) in values.iter().enumerate() {
                if v > values[best] || values[best].is_nan() && !v.is_nan() {
                    best = i;
                }
            }
            assert_eq!(got[row] as usize, best, "{n} logits, row {row}");
        }
    }
}
