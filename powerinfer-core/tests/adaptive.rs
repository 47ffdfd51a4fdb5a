//! Neurons that move between host and device: the text stays, a good placement is not made worse, a bad one gets better.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::sync::Arc;

use powerinfer_core::placement::{AdaptiveOptions, Assignment, LayerAssignment};
use powerinfer_core::profile::{ProfileOptions, profile};
use powerinfer_core::{
    ActiveMode, CancelToken, Device, LoadOptions, MakeBackend, Model, Rounding, SessionOptions, TokenId,
};
use powerinfer_sparse_ops::reference::ReferenceBackend;
use powerinfer_sparse_ops::{LayerId, NeuronId, NeuronSet};
use powerinfer_testing::mock::{Account, Clock, MockDevice, MockOptions, Speed, Timed};
use powerinfer_testing::tiny::Random;
use powerinfer_testing::tolerance::{NMSE_F32, assert_close};

use support::{N_CTX, N_EMBD, N_FF, N_LAYER, N_VOCAB, TinyFile};

/// Of each layer.
const N_HOT: usize = N_FF / 4;
const N_TOKENS: usize = 700;

struct Run {
    /// How often each neuron of each layer was active on the device.
    asked: Vec<Vec<u64>>,
    logits: Vec<f32>,
    ns: u64,
    swapped_bytes: u64,
}

/// Device four times as fast as the host, over a link a third as fast as the host's memory.
fn devices(clock: &Clock, account: &Arc<Account>) -> (Device, Device) {
    let host = Speed { memory: 1.0, link: 1.0, latency_ns: 0, asynchronous: false };
    let device = Speed { memory: 4.0, link: 0.3, latency_ns: 50, asynchronous: true };
    let (host_clock, device_clock, account) = (clock.clone(), clock.clone(), Arc::clone(account));
    let host = MakeBackend::new(move |spec| {
        let inner = Box::new(ReferenceBackend::new(Arc::clone(&spec), Rounding::None));
        Ok(Box::new(Timed::new(inner, &spec, host, host_clock.clone())))
    });
    let device = MakeBackend::new(move |spec| {
        let inner = MockDevice::new(Arc::clone(&spec), MockOptions::default(), Arc::clone(&account));
        Ok(Box::new(Timed::new(Box::new(inner), &spec, device, device_clock.clone())))
    });
    (Device::Other(host), Device::Other(device))
}

fn tokens() -> Vec<TokenId> {
    let mut random = Random::new(31);
    (0..N_TOKENS).map(|_| TokenId(random.below(N_VOCAB) as u32)).collect()
}

/// The toy model with these neurons of each layer on the device and all else on the host.
fn model(
    mode: ActiveMode,
    hot: &[NeuronSet],
    adaptive: Option<AdaptiveOptions>,
    (host, device): (Device, Device),
) -> Model {
    let layers =
        hot.iter().map(|hot| LayerAssignment { home: 0, owned: vec![hot.complement(), hot.clone()] });
    let options = LoadOptions {
        device: host,
        accelerators: vec![device],
        assignment: Some(Assignment { embed: 0, head: 0, layers: layers.collect() }),
        adaptive,
        ..LoadOptions::default()
    };
    file(mode).load_with(&options).unwrap()
}

/// Decodes all tokens in short texts and keeps the logits of every 50th.
fn run(mode: ActiveMode, hot: &[NeuronSet], adaptive: Option<AdaptiveOptions>) -> Run {
    let clock = Clock::default();
    let account = Arc::new(Account::default());
    let model = model(mode, hot, adaptive, devices(&clock, &account));
    let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
    let mut session = model.session(&options).unwrap();
    let before = clock.now();
    let mut logits = Vec::new();
    for (i, token) in tokens().into_iter().enumerate() {
        if session.tokens().len() == N_CTX {
            session.rewind(0).unwrap();
        }
        let last = session.decode(token).unwrap();
        if i % 50 == 0 {
            logits.extend_from_slice(last);
        }
    }
    let swapped_bytes = session.stats().decode.cost.swapped_bytes;
    let asked = (0..N_LAYER as u32).map(|layer| account.asked(LayerId(layer))).collect();
    Run { asked, logits, ns: clock.now() - before, swapped_bytes }
}

/// The neurons of each layer that were active most often, or least.
fn ranked(asked: &[Vec<u64>], hottest: bool) -> Vec<NeuronSet> {
    let set = |asked: &Vec<u64>| {
        let mut order: Vec<u32> = (0..N_FF as u32).collect();
        order.sort_by_key(|&j| asked[j as usize]);
        if hottest {
            order.reverse();
        }
        NeuronSet::from_ids(N_FF, order.into_iter().take(N_HOT).map(NeuronId))
    };
    asked.iter().map(set).collect()
}

/// The toy model of a mode. Its own embedding has no direction that all tokens share, so that its neurons fire about
/// equally often; with one, the gates that point along it fire more often.
fn file(mode: ActiveMode) -> TinyFile {
    let mut file = TinyFile::sparse();
    if mode == ActiveMode::Exact {
        let embedding = file.values("token_embd.weight").into_iter().map(|v| v + 0.3).collect();
        file.tensor("token_embd.weight", &[N_EMBD, N_VOCAB], embedding);
    }
    file
}

/// How often each neuron of each layer fires.
fn fired() -> Vec<Vec<u64>> {
    let model = file(ActiveMode::Exact).load_with(&LoadOptions::default()).unwrap();
    let options = ProfileOptions { n_tokens: N_TOKENS, sequence_len: N_CTX, bos: None };
    let counts = profile(&model, &[tokens()], &options, &CancelToken::new(), &mut |_, _| ()).unwrap();
    (0..N_LAYER as u32).map(|layer| counts.layer(LayerId(layer)).unwrap().to_vec()).collect()
}

/// Placements that are good and bad for a mode, and what moving makes of them.
fn mends_bad_splits_alone(mode: ActiveMode) {
    let any = vec![NeuronSet::from_ids(N_FF, (0..N_HOT as u32).map(NeuronId)); N_LAYER];
    let first = run(mode, &any, None);
    let wanted = if mode == ActiveMode::Exact { fired() } else { first.asked };
    let (best, worst) = (ranked(&wanted, true), ranked(&wanted, false));
    // A neuron of the toy takes 768 bytes, a token reads about 200 KB.
    let adaptive = AdaptiveOptions { half_life: 128.0, hysteresis: 24.0, bytes_per_token: 2 * 768 };

    let good = run(mode, &best, None);
    let good_adaptive = run(mode, &best, Some(adaptive));
    assert_close("a good split", &good_adaptive.logits, &good.logits, NMSE_F32);
    assert!(
        good_adaptive.ns as f64 <= 1.02 * good.ns as f64,
        "adaptive {} ns, static {} ns",
        good_adaptive.ns,
        good.ns
    );

    let bad = run(mode, &worst, None);
    let mended = run(mode, &worst, Some(adaptive));
    assert_close("a bad split", &mended.logits, &good.logits, NMSE_F32);
    assert!(mended.swapped_bytes > 0 && mended.swapped_bytes <= (N_TOKENS * 2 * 768) as u64);
    let (worst_ns, mended_ns, best_ns) = (bad.ns as f64, mended.ns as f64, good.ns as f64);
    assert!(
        worst_ns - mended_ns > 0.5 * (worst_ns - best_ns),
        "worst {worst_ns} ns, mended {mended_ns}, best {best_ns}"
    );
}

#[test]
fn adaptive_placement_keeps_the_logits_leaves_a_good_split_alone_and_mends_a_bad_one() {
    mends_bad_splits_alone(ActiveMode::Predictor);
}

#[test]
fn without_predictors_the_firings_that_backends_count_move_neurons() {
    mends_bad_splits_alone(ActiveMode::Exact);
}

#[test]
fn where_everything_is_read_nothing_moves() {
    let any = vec![NeuronSet::from_ids(N_FF, (0..N_HOT as u32).map(NeuronId)); N_LAYER];
    let adaptive = AdaptiveOptions { half_life: 8.0, hysteresis: 0.1, bytes_per_token: 4 * 768 };
    assert_eq!(run(ActiveMode::Dense, &any, Some(adaptive)).swapped_bytes, 0);
}

#[test]
fn a_budget_below_one_neuron_moves_nothing() {
    let any = vec![NeuronSet::from_ids(N_FF, (0..N_HOT as u32).map(NeuronId)); N_LAYER];
    let adaptive = AdaptiveOptions { half_life: 8.0, hysteresis: 0.1, bytes_per_token: 767 };
    assert_eq!(run(ActiveMode::Predictor, &any, Some(adaptive)).swapped_bytes, 0);
}

#[test]
fn long_prompts_and_other_modes_do_not_make_neurons_look_hotter_than_they_are() {
    // Rates differ by less than 1, so what an exchange saves within the half-life of 8 tokens is less than 8 reads: with
    // this hysteresis nothing pays, however long the steps are and whatever was counted in other modes.
    let any = vec![NeuronSet::from_ids(N_FF, (0..N_HOT as u32).map(NeuronId)); N_LAYER];
    let adaptive = AdaptiveOptions { half_life: 8.0, hysteresis: 8.1, bytes_per_token: 1 << 20 };
    let devices = devices(&Clock::default(), &Arc::new(Account::default()));
    let model = model(ActiveMode::Exact, &any, Some(adaptive), devices);
    let tokens = tokens();
    for mode in [ActiveMode::Exact, ActiveMode::Predictor, ActiveMode::Dense, ActiveMode::Exact] {
        let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
        let mut session = model.session(&options).unwrap();
        for _ in 0..2 * N_LAYER {
            session.rewind(0).unwrap();
            session.prefill(&tokens[..N_CTX]).unwrap();
        }
        let cost = session.stats().prefill.cost;
        assert_eq!(cost.swapped_bytes, 0, "{mode:?}");
    }
}
