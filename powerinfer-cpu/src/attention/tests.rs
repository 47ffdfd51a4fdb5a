use powerinfer_sparse_ops::TokenId;
use powerinfer_testing::tiny::{Random, TinyModel};

use super::*;

const TYPES: [KvType; 3] = [KvType::F16, KvType::F32, KvType::Q8_0];

fn spec(n_head: usize, n_head_kv: usize, head_dim: usize) -> ModelSpec {
    let tiny = TinyModel::new(Default::default()).spec.as_ref().clone();
    ModelSpec { n_layer: 2, n_head, n_head_kv, head_dim, n_embd: n_head * head_dim, ..tiny }
}

fn row(seq: u32, pos: usize) -> StepRow {
    StepRow { seq: SeqId(seq), pos: pos as u32, token: TokenId(0) }
}

/// `x` as a cache of type `ty` gives it back.
fn kept(ty: KvType, x: &[f32]) -> Vec<f32> {
    match ty {
        KvType::F32 => x.to_vec(),
        KvType::F16 => x.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        KvType::Q8_0 => {
            let mut blocks = vec![BlockQ8_0::zeroed(); x.len() / 32];
            quantize_q8_0(x, &mut blocks);
            blocks.iter().flat_map(|b| b.qs.map(|q| b.d.to_f32() * f32::from(q))).collect()
        }
    }
}

/// Caches filled in their last layer, and what they hold: `k, v [n_seqs][kv_len, kv_dim]`.
struct Filled {
    spec: ModelSpec,
    caches: KvCaches,
    kv: Vec<[Vec<f32>; 2]>,
    random: Random,
}

impl Filled {
    fn new(spec: ModelSpec, ty: KvType, lens: &[usize]) -> Self {
        let mut random = Random::new(7);
        let mut pool = Pool::try_new(2).unwrap();
        let mut caches = KvCaches::default();
        let mut kv = Vec::new();
        for (seq, &len) in (0..).zip(lens) {
            caches.insert(SeqId(seq), KvCache::new(&spec, ty, spec.n_layer, len));
            let new = [0; 2].map(|_| random.normals(len * spec.kv_dim(), 1.0));
            let rows: Vec<StepRow> = (0..len).map(|pos| row(seq, pos)).collect();
            // Some one by one and the rest at once.
            let few = len.min(3);
            for (i, row) in rows[..few].iter().enumerate() {
                let at = i * spec.kv_dim()..(i + 1) * spec.kv_dim();
                caches.write(&mut pool, &spec, 1, &[*row], &new[0][at.clone()], &new[1][at]);
            }
            let at = few * spec.kv_dim()..;
            caches.write(&mut pool, &spec, 1, &rows[few..], &new[0][at.clone()], &new[1][at]);
            kv.push(new.map(|x| kept(ty, &x)));
        }
        Self { spec, caches, kv, random }
    }

    fn queries(&mut self, n_rows: usize) -> Vec<f32> {
        self.random.normals(n_rows * self.spec.q_dim(), 1.5)
    }

    fn attend(&self, level: CpuLevel, threads: usize, rows: &[StepRow], q: &[f32]) -> Vec<f32> {
        let mut cpu = Cpu::new(Pool::try_new(threads).unwrap(), level);
        let mut scratch = AttentionScratch::default();
        scratch.reserve(&self.spec, threads, self.caches.max_len());
        let mut out = vec![f32::NAN; q.len()];
        let queries = Queries { spec: &self.spec, caches: &self.caches, layer: 1, rows, q };
        attention(&mut cpu, &mut scratch, queries, &mut out);
        out
    }

    /// Softmax attention as it is written, in f64.
    fn reference(&self, rows: &[StepRow], q: &[f32]) -> Vec<f64> {
        let (n, per_kv, kv_dim) = (self.spec.head_dim, per_kv(&self.spec), self.spec.kv_dim());
        let mut out = Vec::new();
        for (row, q) in rows.iter().zip(q.chunks_exact(self.spec.q_dim())) {
            let [k, v] = &self.kv[row.seq.0 as usize];
            for (head, q) in q.chunks_exact(n).enumerate() {
                let part = |x: &[f32], pos: usize| -> Vec<f64> {
                    let at = pos * kv_dim + head / per_kv * n;
                    x[at..at + n].iter().map(|&x| f64::from(x)).collect()
                };
                let scores: Vec<f64> = (0..=row.pos as usize)
                    .map(|pos| {
                        let dot: f64 = part(k, pos).iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum();
                        dot * f64::from(self.spec.attn_scale())
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let shares: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let total: f64 = shares.iter().sum();
                let mut mixed = vec![0.0; n];
                for (pos, share) in shares.iter().enumerate() {
                    mixed.iter_mut().zip(part(v, pos)).for_each(|(m, v)| *m += share / total * v);
                }
                out.extend(mixed);
            }
        }
        out
    }

    /// Against the reference, at every level.
    fn check(&mut self, what: &str, rows: &[StepRow]) {
        let q = self.queries(rows.len());
        let want = self.reference(rows, &q);
        for level in CpuLevel::available() {
            let got = self.attend(level, 2, rows, &q);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                // Scores of up to ten, each off by some 2^-24 of that and of the products it was summed from; values
                // of up to four.
                let error = (f64::from(*got) - want).abs();
                assert!(error <= 1e-5, "{what}, {}, at {i}: got {got}, want {want}", level.name());
            }
        }
    }
}

#[test]
fn every_type_and_head_matches_softmax_in_f64() {
    for ty in TYPES {
        for head_dim in (8..=160).step_by(8).chain([5, 20]).filter(|n| n % ty.block_len() == 0) {
            for (n_head, n_head_kv) in [(2, 2), (4, 2), (3, 1), (8, 2), (8, 1)] {
                let mut filled = Filled::new(spec(n_head, n_head_kv, head_dim), ty, &[71, 40]);
                let what = format!("{ty:?}, {n_head} heads on {n_head_kv} of {head_dim}");
                filled.check(&what, &[row(0, 0), row(1, 31), row(0, 70), row(0, 32)]);
                let rows: Vec<StepRow> = (23..40).map(|pos| row(1, pos)).collect();
                filled.check(&what, &rows);
            }
        }
    }
}

#[test]
fn every_number_of_positions_matches_softmax_in_f64() {
    for ty in TYPES {
        let mut filled = Filled::new(spec(6, 2, 32), ty, &[70, 1100]);
        let rows: Vec<StepRow> = (0..70).map(|pos| row(0, pos)).collect();
        filled.check(&format!("{ty:?}, a prompt"), &rows);
        for first in [0, 3, 62] {
            filled.check(&format!("{ty:?}, from {first} on"), &rows[first..]);
        }
        for pos in 0..70 {
            filled.check(&format!("{ty:?}, position {pos}"), &[row(0, pos)]);
        }
        for pos in [254, 255, 256, 1000, 1023, 1024, 1099] {
            filled.check(&format!("{ty:?}, position {pos}"), &[row(1, pos)]);
        }
        let rows: Vec<StepRow> = (1015..1030).map(|pos| row(1, pos)).collect();
        filled.check(&format!("{ty:?}, late rows"), &rows);
    }
}

#[test]
fn a_row_gives_the_same_bits_alone_and_beside_others_and_with_any_threads() {
    for ty in TYPES {
        for (n_head, n_head_kv) in [(2, 2), (6, 2), (9, 1)] {
            let mut filled = Filled::new(spec(n_head, n_head_kv, 32), ty, &[600, 90]);
            // A prompt, one that goes on behind the first span, single rows among each other.
            let prompts = (0..90).map(|pos| row(1, pos)).chain((500..600).map(|pos| row(0, pos)));
            let mixed = (0..40).flat_map(|i| [row(0, 230 + i), row(1, 20 + i)]);
            for rows in [prompts.collect::<Vec<_>>(), mixed.collect(), vec![row(0, 400), row(0, 401)]] {
                let q = filled.queries(rows.len());
                for level in CpuLevel::available() {
                    let what = format!("{ty:?}, {n_head} heads on {n_head_kv}, {}", level.name());
                    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                    let together = bits(filled.attend(level, 1, &rows, &q));
                    // The last number makes few pieces of what are many for the others.
                    for threads in [2, 3, 17] {
                        let got = bits(filled.attend(level, threads, &rows, &q));
                        assert!(got == together, "{what}, {threads} threads");
                    }
                    let n = filled.spec.q_dim();
                    for i in (0..rows.len()).step_by(7) {
                        let alone = bits(filled.attend(level, 1, &rows[i..=i], &q[i * n..(i + 1) * n]));
                        assert!(alone == together[i * n..(i + 1) * n], "{what}, row {i} alone");
                    }
                }
            }
        }
    }
}

#[test]
fn later_positions_are_not_read_even_if_they_are_not_numbers() {
    for ty in TYPES {
        let mut filled = Filled::new(spec(4, 2, 32), ty, &[100]);
        let q = filled.queries(10);
        let rows: Vec<StepRow> = (28..38).map(|pos| row(0, pos)).collect();
        for level in CpuLevel::available() {
            let before = filled.attend(level, 1, &rows, &q);
            let mut spoilt = Filled::new(spec(4, 2, 32), ty, &[100]);
            let bad = vec![f32::NAN; spoilt.spec.kv_dim()];
            let mut pool = Pool::try_new(1).unwrap();
            for pos in [34, 50] {
                spoilt.caches.write(&mut pool, &spoilt.spec, 1, &[row(0, pos)], &bad, &bad);
            }
            let after = spoilt.attend(level, 1, &rows, &q);
            let n = 6 * spoilt.spec.q_dim();
            assert_eq!(before[..n], after[..n], "{ty:?}, {}", level.name());
            if ty != KvType::Q8_0 {
                assert!(after[n..].iter().all(|x| x.is_nan()), "{ty:?}, {}", level.name());
            }
        }
    }
}

#[test]
fn runs_end_where_rows_do_not_follow() {
    let rows = [row(0, 0), row(0, 1), row(0, 3), row(1, 4), row(1, 5), row(1, 6)];
    assert_eq!(runs(&rows, 2).collect::<Vec<_>>(), [0..2, 2..3, 3..5, 5..6]);
    assert_eq!(runs(&rows, usize::MAX).collect::<Vec<_>>(), [0..2, 2..3, 3..6]);
    assert_eq!(runs(&[], 2).count(), 0);
}

#[test]
fn copying_leaves_other_positions_and_layers_alone() {
    for ty in TYPES {
        let spec = spec(2, 2, 32);
        let kv_dim = spec.kv_dim();
        let mut pool = Pool::try_new(1).unwrap();
        let mut caches = KvCaches::default();
        for (id, len) in [(0, 35), (1, 69)] {
            caches.insert(SeqId(id), KvCache::new(&spec, ty, spec.n_layer, len));
        }
        let rows: Vec<StepRow> = (0..35).map(|pos| row(0, pos)).collect();
        let k: Vec<f32> = (0..35 * kv_dim).map(|i| (1 + i / kv_dim) as f32).collect();
        let v: Vec<f32> = k.iter().map(|k| -k).collect();
        caches.write(&mut pool, &spec, 1, &rows, &k, &v);
        caches.copy(SeqId(0), SeqId(1), 2..34);
        let to = caches.get(SeqId(1)).unwrap();
        // Keys and values of the first dimension of a head at a position.
        let values = |layer: usize, head_kv: usize, pos: usize| {
            let tile = to.tile(layer, head_kv, pos / POSITIONS);
            let (mut k, mut v) = ([Line::ZERO; 64], [Line::ZERO; 64]);
            widen(CpuLevel::Scalar, to.head.keys(&to.k[tile.clone()]), POSITIONS, &mut k);
            widen(CpuLevel::Scalar, to.head.values(&to.v[tile]), 32, &mut v);
            let (k, v) = (bytemuck::cast_slice::<Line, f32>(&k), bytemuck::cast_slice::<Line, f32>(&v));
            (k[pos % POSITIONS], v[pos % POSITIONS * 32])
        };
        for head_kv in 0..2 {
            for pos in 0..69 {
                let want = if (2..34).contains(&pos) { (1 + pos) as f32 } else { 0.0 };
                let (k, v) = values(1, head_kv, pos);
                assert!(
                    (k - want).abs() <= want * 1e-3 && (v + want).abs() <= want * 1e-3,
                    "{ty:?}, {pos}: {k}, {v}"
                );
                assert_eq!(values(0, head_kv, pos), (0.0, 0.0));
            }
        }
        caches.copy(SeqId(1), SeqId(1), 0..3);
    }
}

#[test]
#[should_panic(expected = "position 5 of sequence 0 with room for 5")]
fn a_position_beyond_the_reserved_length_panics() {
    let spec = spec(2, 2, 32);
    let mut caches = KvCaches::default();
    caches.insert(SeqId(0), KvCache::new(&spec, KvType::F32, spec.n_layer, 5));
    let k = vec![0.0; spec.kv_dim()];
    caches.write(&mut Pool::try_new(1).unwrap(), &spec, 0, &[row(0, 5)], &k, &k);
}
