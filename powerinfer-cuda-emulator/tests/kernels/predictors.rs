//! Predictors and the lists of rows they lead to.

use half::f16;
use powerinfer_cuda_emulator::Arg;
use powerinfer_sparse_ops::{ActiveBatch, GateCopy, NeuronId, NeuronSet, WeightMatrix};

use crate::device::*;

#[test]
fn low_rank_scores_are_compared_with_the_threshold() {
    if !can_run() {
        return;
    }
    let mut random = Random(1);
    for ty in TYPES {
        for (n_ff, n_tokens) in [(1, 1), (70, 3), (130, 9), (64, 8)] {
            let rank = if ty.block_len() == 1 { 40 + n_tokens } else { ty.block_len() };
            let fc2 = random.matrix(ty, n_ff, rank);
            let rows = decode(&fc2);
            let mut inner = random.floats(n_tokens * rank);
            if n_tokens > 2 {
                inner[rank + 1] = f32::NAN;
            }
            let threshold = 0.3;
            let n_words = n_ff.div_ceil(64);
            let got: Vec<u64> = on_device(|d| {
                let (w, x, bits) =
                    (d.upload(fc2.bytes()), d.upload(&inner), d.alloc::<u64>(n_tokens * n_words));
                let args = [w, x, bits, int(n_ff), int(rank), int(n_tokens), int(rank), Arg::F32(threshold)];
                d.launch(&format!("predict_{}", name(ty)), [n_words, n_tokens.div_ceil(8), 1], 128, &args);
                d.download(bits, n_tokens * n_words)
            });
            for t in 0..n_tokens {
                for j in 0..n_words * 64 {
                    let bit = got[t * n_words + j / 64] >> (j % 64) & 1 == 1;
                    let Some(row) = rows.get(j) else {
                        assert!(!bit, "a bit past the last neuron");
                        continue;
                    };
                    let (score, magnitude) = dot(row, &inner[t * rank..][..rank]);
                    if (score - f64::from(threshold)).abs() > magnitude * 2e-6 || score.is_nan() {
                        let inactive = score < f64::from(threshold);
                        assert_eq!(bit, !inactive, "{ty}: neuron {j} of token {t}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_gate_copy_has_the_bits_of_the_scalar_code() {
    if !can_run() {
        return;
    }
    let mut random = Random(2);
    for (n_embd, n_ff, outliers) in [
        (1, 3, vec![]),
        (7, 70, vec![2]),
        (96, 64, vec![]),
        (257, 65, vec![0, 256]),
        (576, 130, vec![5, 9, 300]),
    ] {
        let mut values = random.floats(n_ff * n_embd);
        for row in values.chunks_exact_mut(n_embd) {
            outliers.iter().for_each(|&o: &u32| row[o as usize] *= 40.0);
        }
        let gate = WeightMatrix::from_f32("gate", n_ff, n_embd, values).unwrap();
        let copy = GateCopy::from_gate(&gate, random.floats(n_embd), outliers).unwrap();
        let n_tokens = 5;
        let mut x = random.floats(n_tokens * n_embd);
        x[2 * n_embd] = f32::NAN;
        x[3 * n_embd..4 * n_embd].copy_from_slice(copy.mean());
        let scores: Vec<Vec<f32>> = x.chunks(n_embd).map(|x| copy.score(x)).collect();
        // Thresholds that are some token's score exactly, which is active.
        let thresholds = (0..n_ff).map(|j| if j % 3 == 0 { scores[j % 2][j] } else { 0.1 }).collect();
        let copy = copy.with_thresholds(thresholds).unwrap();
        let positions = [4u32, 5, 6, 7, 0];
        let (n_words, n_out) = (n_ff.div_ceil(64), copy.n_outliers());
        for with_positions in [true, false] {
            let got: Vec<u64> = on_device(|d| {
                let (x, mean, o) = (d.upload(&x), d.upload(copy.mean()), d.upload(copy.outliers()));
                let q = d.alloc::<i8>(n_tokens * copy.n_padded());
                let (apart, info) = (d.alloc::<f32>(n_tokens * n_out), d.alloc::<[u32; 2]>(n_tokens));
                let shape = [int(n_embd), int(n_out), int(n_tokens)];
                let args = [x, mean, o, q, apart, info, shape[0], shape[1], shape[2], int(n_embd)];
                d.launch("gate_copy_quantize", [n_tokens, 1, 1], 256, &args);
                let codes = d.upload(copy.codes().as_slice());
                let (scales, thresholds) = (d.upload(copy.scales()), d.upload(copy.thresholds()));
                let weights: Vec<u16> = copy.outlier_weights().iter().map(|w| f16::to_bits(*w)).collect();
                let weights = d.upload(&weights);
                let p = if with_positions { d.upload(&positions) } else { NONE };
                let bits = d.alloc::<u64>(n_tokens * n_words);
                let tables = [codes, scales, thresholds, weights, q, apart, info, p, bits];
                let args: Vec<Arg> = tables.into_iter().chain([int(n_ff)]).chain(shape).collect();
                d.launch("gate_copy_bits", [n_words, n_tokens, 1], 128, &args);
                d.download(bits, n_tokens * n_words)
            });
            for t in 0..n_tokens {
                for j in 0..n_words * 64 {
                    let bit = got[t * n_words + j / 64] >> (j % 64) & 1 == 1;
                    let all = with_positions && positions[t] == 0;
                    let want = j < n_ff && (all || copy.is_active(j, scores[t][j]));
                    assert_eq!(bit, want, "{n_embd}: neuron {j} of token {t}");
                }
            }
        }
    }
}

#[test]
fn lists_are_the_owned_neurons_that_are_active() {
    if !can_run() {
        return;
    }
    let mut random = Random(3);
    for (n_ff, threads) in [(1, 32), (64, 256), (130, 64), (700, 256), (700, 1024)] {
        let n_tokens = 3;
        let owned = NeuronSet::from_ids(n_ff, (0..n_ff as u32).filter(|_| random.below(3) > 0).map(NeuronId));
        let ids: Vec<u32> = owned.ids().iter().map(|id| id.0).collect();
        let mut active = ActiveBatch::with_capacity(n_tokens, n_ff);
        active.reset(n_tokens, n_ff);
        for row in 1..n_tokens {
            (0..n_ff as u32).filter(|_| random.below(2) == 0).for_each(|j| active.insert(row, NeuronId(j)));
        }
        let stride = ids.len() + 1;
        for with_bits in [true, false] {
            let got: Vec<u32> = on_device(|d| {
                let bits = if with_bits { d.upload(active.words()) } else { NONE };
                let (own, list) = (d.upload(&ids), d.alloc::<u32>(n_tokens * stride));
                let (counts, counters) = (d.alloc::<u32>(n_tokens), d.upload(&[1u64; 8]));
                let args = [
                    bits,
                    own,
                    list,
                    counts,
                    counters,
                    int(ids.len()),
                    int(n_ff),
                    int(stride),
                    int(n_tokens),
                ];
                d.launch("compact", [n_tokens, 1, 1], threads, &args);
                let mut all: Vec<u32> = d.download(list, n_tokens * stride);
                let counts: Vec<u32> = d.download(counts, n_tokens);
                let total = u64::from(counts.iter().sum::<u32>());
                assert_eq!(d.download::<u64>(counters, 8), [1, 1, 1, 1, 1 + total, 1, 1, 1]);
                all.extend(counts);
                all
            });
            for t in 0..n_tokens {
                let is_active = |r: &u32| !with_bits || active.contains(t, owned.ids()[*r as usize]);
                let want: Vec<u32> = (0..ids.len() as u32).filter(is_active).collect();
                assert_eq!(got[n_tokens * stride + t] as usize, want.len());
                assert_eq!(got[t * stride..][..want.len()], want, "{n_ff}: token {t}");
                assert!(got[t * stride + want.len()..(t + 1) * stride].iter().all(|&v| v == u32::MAX));
            }
        }
    }
}
