//! Counting which neurons fire: fast paths against plain loops, and over two owners.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use powerinfer_core::placement::{AdaptiveOptions, Assignment, LayerAssignment};
use powerinfer_core::profile::{ProfileError, ProfileOptions, profile};
use powerinfer_core::{
    Activation, ActiveMode, CancelToken, CpuOptions, Device, KvType, LayerId, LoadOptions, MakeBackend,
    Model, Rounding, SessionError, SessionOptions, TokenId,
};
use powerinfer_predictor::{ActivationCounts, ShareHistogram};
use powerinfer_sparse_ops::reference::ReferenceBackend;
use powerinfer_sparse_ops::{NeuronId, NeuronSet};
use powerinfer_testing::mock::{Account, MockDevice, MockOptions};
use powerinfer_testing::null::NullBackend;
use powerinfer_testing::tiny::Random;

use support::split::random_assignment;
use support::{N_EMBD, N_FF, N_LAYER, TinyFile};

fn texts() -> Vec<Vec<TokenId>> {
    vec![(0..150).map(|i| TokenId(i * 7 % 300)).collect(), (0..40).map(|i| TokenId(i * 11 % 300)).collect()]
}

fn counted(model: &Model) -> ActivationCounts {
    let options = ProfileOptions { n_tokens: 170, sequence_len: 48, bos: Some(TokenId(1)) };
    let mut last = 0;
    let counts = profile(model, &texts(), &options, &CancelToken::new(), &mut |done, total| {
        assert!(done > last && total == 170);
        last = done;
    });
    counts.unwrap()
}

fn cpu(n_batch: usize) -> LoadOptions {
    let options = CpuOptions { threads: 2, kv_type: KvType::F32, ..CpuOptions::default() };
    LoadOptions { device: Device::Cpu(options), n_batch, ..LoadOptions::default() }
}

#[test]
fn every_path_counts_what_plain_loops_count() {
    let reference = LoadOptions { device: Device::Reference(Rounding::None), ..LoadOptions::default() };
    for file in [TinyFile::dense(), TinyFile::sparse()] {
        let want = counted(&file.load_with(&reference).unwrap());
        assert_eq!((want.n_tokens(), want.n_layer()), (170, N_LAYER));
        let share = want.active_share(LayerId(0)).unwrap();
        assert!(share > 0.2 && share < 0.8, "{share}: a test of nothing");
        // One token at a time, tiles of rows, and all neurons for all rows.
        for n_batch in [1, 5, 48] {
            assert_eq!(counted(&file.load_with(&cpu(n_batch)).unwrap()), want, "batches of {n_batch}");
        }
    }
}

/// Gate and up of every neuron for every token, from loops over the values of the file that share nothing with the
/// backends: `[n_layer][n_tokens][n_ff]` of `(gate, up)`.
fn plain_loops(file: &TinyFile, tokens: &[TokenId]) -> Vec<Vec<Vec<(f32, f32)>>> {
    const N_HEAD: usize = 4;
    const N_HEAD_KV: usize = 2;
    const HEAD_DIM: usize = N_EMBD / N_HEAD;
    let product = |w: &[f32], x: &[f32]| -> Vec<f32> {
        w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    };
    let normed = |x: &[f32], w: &[f32]| -> Vec<f32> {
        let mean = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
        x.iter().zip(w).map(|(x, w)| x / (mean + 1e-5).sqrt() * w).collect()
    };
    // Neighbors are turned together, the first pair fastest.
    let turned = |x: &[f32], pos: usize| -> Vec<f32> {
        let turn = |(i, pair): (usize, &[f32])| {
            let base = 10000f64.powf(-2.0 * (i % (HEAD_DIM / 2)) as f64 / HEAD_DIM as f64);
            let (sin, cos) = (pos as f64 * base).sin_cos();
            let [a, b] = [f64::from(pair[0]), f64::from(pair[1])];
            [(a * cos - b * sin) as f32, (a * sin + b * cos) as f32]
        };
        x.chunks(2).enumerate().flat_map(turn).collect()
    };
    let embeddings = file.values("token_embd.weight");
    let mut h: Vec<Vec<f32>> =
        tokens.iter().map(|t| embeddings[t.index() * N_EMBD..][..N_EMBD].to_vec()).collect();
    let mut hidden = Vec::new();
    for layer in 0..N_LAYER {
        let w = |part: &str| file.values(&format!("blk.{layer}.{part}.weight"));
        let x: Vec<_> = h.iter().map(|h| normed(h, &w("attn_norm"))).collect();
        let all = |part: &str| x.iter().map(|x| product(&w(part), x)).collect::<Vec<_>>();
        let turn =
            |rows: Vec<Vec<f32>>| rows.iter().enumerate().map(|(i, x)| turned(x, i)).collect::<Vec<_>>();
        let (q, k, v) = (turn(all("attn_q")), turn(all("attn_k")), all("attn_v"));
        for (i, h) in h.iter_mut().enumerate() {
            let mut mixed = vec![0.0; N_EMBD];
            for head in 0..N_HEAD {
                let own = head * HEAD_DIM..(head + 1) * HEAD_DIM;
                let shared = head / (N_HEAD / N_HEAD_KV) * HEAD_DIM;
                let scores = (0..=i).map(|j| {
                    let dot: f32 = q[i][own.clone()].iter().zip(&k[j][shared..]).map(|(q, k)| q * k).sum();
                    (dot / (HEAD_DIM as f32).sqrt()).exp()
                });
                let scores: Vec<f32> = scores.collect();
                let sum: f32 = scores.iter().sum();
                for (score, v) in scores.iter().zip(&v) {
                    let values = &v[shared..shared + HEAD_DIM];
                    mixed[own.clone()].iter_mut().zip(values).for_each(|(to, v)| *to += score / sum * v);
                }
            }
            h.iter_mut().zip(product(&w("attn_output"), &mixed)).for_each(|(h, y)| *h += y);
        }
        let mut of_layer = Vec::new();
        for h in &mut h {
            let x = normed(h, &w("ffn_norm"));
            let pairs: Vec<(f32, f32)> =
                product(&w("ffn_gate"), &x).into_iter().zip(product(&w("ffn_up"), &x)).collect();
            let values: Vec<f32> = pairs.iter().map(|(gate, up)| gate.max(0.0) * up).collect();
            h.iter_mut().zip(product(&w("ffn_down"), &values)).for_each(|(h, y)| *h += y);
            of_layer.push(pairs);
        }
        hidden.push(of_layer);
    }
    hidden
}

#[test]
fn counts_are_those_of_loops_that_share_nothing_with_the_backends() {
    // What `counted` makes of its texts: a beginning and 47 tokens of each in turn, until there are 170.
    let texts = texts();
    let cuts = [&texts[0][..47], &texts[1][..], &texts[0][47..94], &texts[0][94..126]];
    let sequences = cuts.map(|cut| [&[TokenId(1)], cut].concat());
    assert_eq!(sequences.iter().map(Vec::len).sum::<usize>(), 170);
    let file = TinyFile::dense();
    let got = counted(&file.load_with(&cpu(5)).unwrap());

    // Rounding may turn the sign of a gate that is so close to zero, and nothing else; gates are about 1.
    const TIE: f32 = 1e-4;
    let mut fewest = vec![vec![0; N_FF]; N_LAYER];
    let mut ties = vec![vec![0; N_FF]; N_LAYER];
    // For each layer and token, between which numbers of neurons fired.
    let mut bins = vec![[0i64; ShareHistogram::BINS]; N_LAYER];
    let mut unsure = [0; N_LAYER];
    for sequence in &sequences {
        for (layer, tokens) in plain_loops(&file, sequence).iter().enumerate() {
            for pairs in tokens {
                let mut n_fired = 0;
                let mut n_ties = 0;
                for (j, &(gate, up)) in pairs.iter().enumerate() {
                    let is_tie = gate.abs() < TIE || up.abs() < f32::MIN_POSITIVE;
                    fewest[layer][j] += u64::from(gate > 0.0 && !is_tie);
                    ties[layer][j] += u64::from(is_tie);
                    n_fired += usize::from(gate > 0.0);
                    n_ties += usize::from(is_tie);
                }
                bins[layer][n_fired * ShareHistogram::BINS / N_FF] += 1;
                unsure[layer] += n_ties as i64;
            }
        }
    }
    for layer in (0..N_LAYER as u32).map(LayerId) {
        let counts = got.layer(layer).unwrap();
        for (j, &count) in counts.iter().enumerate() {
            let (low, ties) = (fewest[layer.index()][j], ties[layer.index()][j]);
            assert!(
                (low..=low + ties).contains(&count),
                "layer {layer}, neuron {j}: {low} to {}",
                low + ties
            );
        }
        let histogram = got.histogram(layer).unwrap().bins();
        let moved: i64 = histogram.iter().zip(&bins[layer.index()]).map(|(&n, m)| (n as i64 - m).abs()).sum();
        assert!(moved <= 2 * unsure[layer.index()], "layer {layer}: {moved} tokens in other bins");
    }
    let n_ties: u64 = ties.iter().flatten().sum();
    assert!(n_ties < 100, "{n_ties} of {} gates are ties: a test of little", N_LAYER * N_FF * 170);
}

#[test]
fn each_owner_counts_its_own_neurons() {
    let want = counted(&TinyFile::sparse().load_with(&cpu(8)).unwrap());
    let hot = NeuronSet::from_ids(N_FF, (0..N_FF as u32).step_by(3).map(NeuronId));
    let layer = LayerAssignment { home: 0, owned: vec![hot.complement(), hot] };
    let options = LoadOptions {
        accelerators: vec![Device::Other(MakeBackend::new(|spec| {
            Ok(Box::new(ReferenceBackend::new(Arc::clone(&spec), Rounding::None)))
        }))],
        assignment: Some(Assignment { embed: 0, head: 0, layers: vec![layer; N_LAYER] }),
        ..cpu(8)
    };
    assert_eq!(counted(&TinyFile::sparse().load_with(&options).unwrap()), want);
}

#[test]
fn devices_count_wherever_they_are_home() {
    let want = counted(&TinyFile::sparse().load_with(&cpu(8)).unwrap());
    let mut random = Random::new(11);
    for late in [false, true, false, true] {
        let device = MakeBackend::new(move |spec| {
            let options = MockOptions { memory_bytes: None, late };
            Ok(Box::new(MockDevice::new(spec, options, Arc::new(Account::default()))))
        });
        let options = LoadOptions {
            accelerators: vec![Device::Other(device)],
            assignment: Some(random_assignment(&mut random, 2)),
            ..cpu(8)
        };
        assert_eq!(counted(&TinyFile::sparse().load_with(&options).unwrap()), want, "late {late}");
    }
}

#[test]
fn what_other_sessions_compute_is_not_counted() {
    let model = TinyFile::sparse().load_with(&cpu(8)).unwrap();
    let want = counted(&model);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut n_steps = 0u64;
            // At least once round, even if the profiles are faster.
            while n_steps == 0 || !done.load(Ordering::Relaxed) {
                for mode in [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor] {
                    let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
                    let mut session = model.session(&options).unwrap();
                    session.prefill(&texts()[1]).unwrap();
                    session.decode(TokenId(3)).unwrap();
                    n_steps += 2;
                }
            }
            n_steps
        });
        let profiles: Vec<_> = (0..2).map(|_| scope.spawn(|| counted(&model))).collect();
        for profile in profiles {
            assert_eq!(profile.join().unwrap(), want);
        }
        done.store(true, Ordering::Relaxed);
        assert!(other.join().unwrap() > 0);
    });
    // Nor is anything left over from a profile that was cancelled.
    let cancel = CancelToken::new();
    let options = ProfileOptions { n_tokens: 170, sequence_len: 48, bos: None };
    let error = profile(&model, &texts(), &options, &cancel, &mut |_, _| cancel.cancel()).unwrap_err();
    assert!(matches!(error, ProfileError::Session(SessionError::Cancelled { .. })), "{error}");
    assert_eq!(counted(&model), want);
}

#[test]
fn a_backend_that_counts_less_is_not_filled_up_with_guesses() {
    let load = |make| {
        let options = LoadOptions { device: Device::Other(make), ..LoadOptions::default() };
        TinyFile::dense().load_with(&options).unwrap()
    };
    let want = counted(&TinyFile::dense().load_with(&cpu(8)).unwrap());
    let sums = counted(&load(MakeBackend::new(|spec| {
        let device = MockDevice::new(spec, MockOptions::default(), Arc::new(Account::default()));
        Ok(Box::new(device.with_only_sums()))
    })));
    for layer in (0..N_LAYER as u32).map(LayerId) {
        assert_eq!(sums.layer(layer), want.layer(layer));
        assert!(sums.histogram(layer).is_none() && want.histogram(layer).is_some());
    }
    let null = load(MakeBackend::new(|spec| Ok(Box::new(NullBackend::new(spec)))));
    let options = ProfileOptions::default();
    let error = profile(&null, &texts(), &options, &CancelToken::new(), &mut |_, _| ()).unwrap_err();
    assert!(matches!(&error, ProfileError::NotCounted { backend } if backend == "null"), "{error}");
}

#[test]
fn what_cannot_be_counted_is_an_error() {
    let options = ProfileOptions::default();
    let count = |model: &Model, texts: &[Vec<TokenId>], cancel: &CancelToken| {
        profile(model, texts, &options, cancel, &mut |_, _| ()).unwrap_err()
    };
    let model = TinyFile::dense().load_with(&cpu(8)).unwrap();
    assert!(matches!(count(&model, &[vec![]], &CancelToken::new()), ProfileError::NoText));
    let cancel = CancelToken::new();
    cancel.cancel();
    let error = count(&model, &texts(), &cancel);
    assert!(matches!(error, ProfileError::Session(SessionError::Cancelled { .. })), "{error}");
    let silu = LoadOptions { activation: Some(Activation::Silu), ..cpu(8) };
    let model = TinyFile::dense().load_with(&silu).unwrap();
    assert!(matches!(count(&model, &texts(), &CancelToken::new()), ProfileError::NoZeros { .. }));
    let moving = |hot: NeuronSet| {
        let layer = LayerAssignment { home: 0, owned: vec![hot.complement(), hot] };
        let options = LoadOptions {
            accelerators: vec![Device::Reference(Rounding::None)],
            assignment: Some(Assignment { embed: 0, head: 0, layers: vec![layer; N_LAYER] }),
            adaptive: Some(AdaptiveOptions::default()),
            ..cpu(8)
        };
        TinyFile::dense().load_with(&options).unwrap()
    };
    let some = NeuronSet::from_ids(N_FF, [NeuronId(3)]);
    assert!(matches!(count(&moving(some), &texts(), &CancelToken::new()), ProfileError::Adaptive));
    // Where one has all neurons of each layer, none can move.
    counted(&moving(NeuronSet::none(N_FF)));
}
