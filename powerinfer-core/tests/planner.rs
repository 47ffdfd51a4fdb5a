//! The planner: budgets are kept to the byte, nothing wraps, more memory never holds less, and no placement is much better.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::sync::Arc;

use powerinfer_core::placement::{
    Accelerator, Bandwidth, Budget, Host, LayerShape, ModelShape, Plan, PlanOptions, PlanRequest, Rates,
    RatesError, Statistics, plan,
};
use powerinfer_core::{ActiveMode, Device, LoadError, LoadOptions, MakeBackend, SessionOptions, TokenId};
use powerinfer_predictor::ActivationCounts;
use powerinfer_sparse_ops::Gating;
use powerinfer_testing::mock::{Account, MockDevice, MockOptions};
use powerinfer_testing::tiny::Random;
use proptest::prelude::*;

use support::{N_CTX, N_FF, N_LAYER, TinyFile};

fn host() -> Host {
    Host { name: "host".to_owned(), bandwidth: Bandwidth { dense: 50e9, gather: 30e9 } }
}

fn device(budget: Budget) -> Accelerator {
    Accelerator {
        name: "device".to_owned(),
        free_bytes: 24 << 30,
        budget,
        bandwidth: Bandwidth { dense: 800e9, gather: 600e9 },
        link: 20e9,
        latency: 10e-6,
        granule: 256,
        kv_value_bytes: 2,
    }
}

/// Seven billion weights of 16 bits, gates, predictors.
fn seven_billion() -> ModelShape {
    ModelShape::uniform("7b", 32, 4096, 4096, 11008, 32000, Gating::Gate, 2.0, 30_000_000)
}

fn planned(shape: &ModelShape, rates: &Rates, mode: ActiveMode, devices: &[Accelerator]) -> Plan {
    let request =
        PlanRequest { shape, rates, mode, host: &host(), devices, n_ctx: 2048, n_batch: 256, n_seq: 1 };
    plan(&request)
}

#[test]
fn budgets_of_every_size_are_kept_and_say_what_is_missing() {
    let shape = seven_billion();
    let rates = Rates::skewed(&shape, 0.1, 0.26);
    let dense: u64 = shape.layers.iter().map(|l| l.dense_bytes + l.predictor_bytes).sum::<u64>();
    let mut last = 0;
    for bytes in [
        0,
        1,
        1 << 20,
        1 << 28,
        (1 << 31) + 1,
        (1 << 32) + 1,
        dense - 1,
        dense + 1,
        6 << 30,
        10 << 30,
        14 << 30,
        20 << 30,
        u64::MAX,
    ] {
        let plan = planned(&shape, &rates, ActiveMode::Predictor, &[device(Budget::Bytes(bytes))]);
        let on = &plan.devices[0];
        let total = on.bytes.total();
        assert!(total <= bytes.min(24 << 30), "budget {bytes}: {total} bytes");
        assert!(total >= last, "budget {bytes}: {total} bytes after {last}");
        assert!(plan.token_seconds <= plan.host_seconds * 1.000_001, "budget {bytes}: slower than the host");
        last = total;
        if total == 0 {
            assert_eq!(on.reasons.len(), 1, "budget {bytes}");
        }
        plan.assignment.layers.iter().for_each(|l| assert_eq!(l.owned[0].len() + l.owned[1].len(), 11008));
    }
    let all = planned(&shape, &rates, ActiveMode::Predictor, &[device(Budget::Bytes(u64::MAX))]);
    assert_eq!((all.devices[0].n_neurons, all.devices[0].n_homes), (32 * 11008, 32), "all of it fits");
    assert!(all.devices[0].has_head);

    let one = planned(&shape, &rates, ActiveMode::Predictor, &[device(Budget::Bytes(1))]);
    let reason = &one.devices[0].reasons[0];
    assert!(reason.contains("more than the 1 that may be used"), "{reason}");
    let poor = Accelerator { free_bytes: 100, ..device(Budget::Auto) };
    let poor = planned(&shape, &rates, ActiveMode::Predictor, &[poor]);
    assert_eq!(poor.devices[0].reasons, ["100 bytes are free, 536870912 of them are left to the driver"]);
    let zero = planned(&shape, &rates, ActiveMode::Predictor, &[device(Budget::Bytes(0))]);
    assert_eq!(zero.devices[0].reasons, ["the budget is 0"]);
    assert_eq!(zero.token_seconds, zero.host_seconds);
}

#[test]
fn between_the_first_neuron_and_the_last_the_card_is_filled() {
    let shape = seven_billion();
    let rates = Rates::skewed(&shape, 0.1, 0.26);
    let neuron = shape.layers[0].neuron_bytes(1);
    for gib in 5..12 {
        let budget = (gib << 30) + 12_345_678;
        let plan = planned(&shape, &rates, ActiveMode::Predictor, &[device(Budget::Bytes(budget))]);
        let slack = budget - plan.devices[0].bytes.total();
        // A neuron of each layer, and the rounding of its allocations.
        assert!(slack <= 32 * (neuron + 5 * 256), "{gib} GiB: {slack} bytes are left");
        assert!(plan.gap < 0.015, "{gib} GiB: gap {}", plan.gap);
    }
}

#[test]
fn the_reason_for_an_empty_device_is_the_true_one() {
    let shape = ModelShape::uniform("m", 6, 1024, 1024, 4096, 32000, Gating::Gate, 2.0, 1_000_000);
    let rates = Rates::skewed(&shape, 0.15, 0.3);
    let on = |bytes: u64, latency: f64| {
        let device = Accelerator { latency, ..device(Budget::Bytes(bytes)) };
        planned(&shape, &rates, ActiveMode::Predictor, &[device]).devices.remove(0)
    };
    let step = on(u64::MAX, 0.0).bytes.steps;
    let neuron = shape.layers[0].neuron_bytes(1);
    let tight = on(step + neuron - 1, 0.0);
    assert_eq!(
        tight.reasons,
        [format!(
            "the smallest part needs {neuron} bytes, 1 more than the {} that are left beside a step",
            neuron - 1
        )]
    );
    for more in [neuron, 1 << 20, 1 << 26, 1 << 30] {
        let dear = on(step + more, 1.0);
        assert_eq!(
            dear.reasons,
            ["nothing that fits saves as much as its exchange with the host costs"],
            "{more}"
        );
    }
}

#[test]
fn a_model_that_fits_is_placed_as_well_as_the_bound() {
    let shape = ModelShape::uniform("m", 6, 256, 256, 1024, 4000, Gating::Gate, 2.0, 100_000);
    let rates = Rates::skewed(&shape, 0.15, 0.3);
    // One transfer takes longer than all that is read.
    let slow = Accelerator { latency: 1e-4, ..device(Budget::Bytes(1 << 30)) };
    let plan = planned(&shape, &rates, ActiveMode::Predictor, &[slow]);
    assert!(plan.gap < 0.001, "gap {}", plan.gap);
}

#[test]
fn buffers_take_whole_pages_of_the_driver() {
    let shape = seven_billion();
    let rates = Rates::skewed(&shape, 0.1, 0.26);
    let paged = Accelerator { granule: Accelerator::CUDA_GRANULE, ..device(Budget::Bytes(9 << 30)) };
    let plan = planned(&shape, &rates, ActiveMode::Predictor, &[paged]);
    let bytes = plan.devices[0].bytes;
    for part in [bytes.dense, bytes.head, bytes.kv, bytes.predictors, bytes.neurons, bytes.steps] {
        assert_eq!(part % Accelerator::CUDA_GRANULE, 0, "{bytes:?}");
    }
    assert!(bytes.total() <= 9 << 30 && bytes.total() > (9 << 30) - (64 << 20), "{bytes:?}");
    assert!(plan.gap < 0.015, "gap {}", plan.gap);
}

#[test]
fn a_link_that_costs_more_than_it_saves_keeps_neurons_at_home() {
    let shape = seven_billion();
    let rates = Rates::skewed(&shape, 0.1, 0.26);
    let slow = Accelerator { latency: 1.0, ..device(Budget::Bytes(4 << 30)) };
    let plan = planned(&shape, &rates, ActiveMode::Predictor, &[slow]);
    // Whole layers would need no exchange, but do not pay their hand-over either.
    for layer in &plan.assignment.layers {
        assert!(layer.owned[1].is_empty() || layer.owned[1].is_all() && layer.home == 1);
    }
    assert!(plan.token_seconds <= plan.host_seconds);
}

#[test]
fn two_devices_share_a_model_and_each_keeps_its_budget() {
    let shape = seven_billion();
    let rates = Rates::skewed(&shape, 0.1, 0.26);
    let devices = [device(Budget::Bytes(5 << 30)), device(Budget::Bytes(3 << 30))];
    let two = planned(&shape, &rates, ActiveMode::Predictor, &devices);
    let one = planned(&shape, &rates, ActiveMode::Predictor, &devices[..1]);
    for (on, device) in two.devices.iter().zip(&devices) {
        assert!(on.bytes.total() <= device.usable_bytes() && on.n_neurons > 0, "{on:?}");
    }
    assert!(two.token_seconds < one.token_seconds);
    for layer in &two.assignment.layers {
        assert_eq!(layer.owned.iter().map(|set| set.len()).sum::<usize>(), 11008);
    }
}

/// The least seconds of a token over every choice of homes and of numbers of neurons, hottest first, of a tiny model, with
/// the terms of the plan's objective written out again. `rates [n_layer][n_ff]` descend; a step works in `step` bytes.
fn best_of_all(shape: &ModelShape, rates: &[Vec<f32>], device: &Accelerator, step: u64) -> f64 {
    let host = host();
    let budget = device.usable_bytes().saturating_sub(step);
    let sum = |rates: &[f32]| rates.iter().map(|&rate| f64::from(rate)).sum::<f64>();
    let exchange = 2.0 * device.latency + (8 * shape.n_embd + shape.layers[0].n_ff / 8) as f64 / device.link;
    let kv = 2 * (2 * 16 * shape.kv_dim as u64).next_multiple_of(256);
    let hand_over = device.latency + (4 * shape.n_embd) as f64 / device.link;
    // For each layer: bytes, seconds and home of each choice.
    let choices: Vec<Vec<(u64, f64, bool)>> = (0..shape.layers.len())
        .map(|l| {
            let layer = &shape.layers[l];
            let row = (layer.gate_row_bytes + layer.up_row_bytes + layer.down_row_bytes) as f64;
            let mut all = Vec::new();
            for home in [false, true] {
                for n in 0..=layer.n_ff {
                    let hot = sum(&rates[l][..n]);
                    let cold = sum(&rates[l][n..]);
                    let read = (layer.dense_bytes + layer.predictor_bytes + kv / 2) as f64;
                    let dense = read / if home { device.bandwidth.dense } else { host.bandwidth.dense };
                    let both = (hot * row / device.bandwidth.gather).max(cold * row / host.bandwidth.gather);
                    let away = if home { n < layer.n_ff } else { n > 0 };
                    let seconds = dense + both + if away { exchange } else { 0.0 };
                    let home_bytes = layer.dense_bytes + layer.predictor_bytes + kv;
                    all.push((layer.neuron_bytes(n) + if home { home_bytes } else { 0 }, seconds, home));
                }
            }
            all
        })
        .collect();
    // From where the residual stream is; it comes from the host and ends there.
    fn search(choices: &[Vec<(u64, f64, bool)>], left: u64, at: bool, hand_over: f64) -> f64 {
        let moved = |to: bool| if to == at { 0.0 } else { hand_over };
        let Some((first, rest)) = choices.split_first() else { return moved(false) };
        let fits = first.iter().filter(|(bytes, ..)| *bytes <= left);
        fits.map(|&(bytes, seconds, home)| {
            seconds + moved(home) + search(rest, left - bytes, home, hand_over)
        })
        .fold(f64::INFINITY, f64::min)
    }
    search(&choices, budget, false, hand_over)
}

#[test]
fn no_placement_of_a_small_model_is_better_than_the_gap_says_and_few_are_a_hundredth_better() {
    let mut random = Random::new(9);
    let (mut worst, mut n_close) = (1f64, 0);
    for case in 0..40 {
        let layer = |random: &mut Random| LayerShape {
            n_ff: 12,
            dense_bytes: 20_480 + 2_560 * random.below(4) as u64,
            predictor_bytes: 2_560,
            gate_row_bytes: 2048,
            up_row_bytes: 2048,
            down_row_bytes: 2048,
            has_bias: false,
            stays: None,
        };
        let shape = ModelShape {
            name: "tiny".to_owned(),
            n_embd: 64,
            n_head: 4,
            q_dim: 64,
            kv_dim: 64,
            n_vocab: 16,
            head_bytes: 0,
            predictor_step_bytes: 16,
            counter_bytes: 0,
            layers: (0..3).map(|_| layer(&mut random)).collect(),
        };
        let by_layer: Vec<Vec<f32>> = (0..3)
            .map(|_| {
                let mut r: Vec<f32> = (0..12).map(|_| random.below(100) as f32 / 100.0).collect();
                r.sort_by(|a, b| b.total_cmp(a));
                r
            })
            .collect();
        let rates = Rates::new(by_layer.clone());
        let budget = Budget::Bytes(10_000 + 5_000 * random.below(60) as u64);
        let device = Accelerator { latency: [0.0, 2e-8, 2e-7][case % 3], ..device(budget) };
        let request = PlanRequest {
            shape: &shape,
            rates: &rates,
            mode: ActiveMode::Predictor,
            host: &host(),
            devices: std::slice::from_ref(&device),
            n_ctx: 16,
            n_batch: 1,
            n_seq: 1,
        };
        let got = plan(&request);
        let all = Accelerator { budget: Budget::Bytes(u64::MAX), ..device.clone() };
        let step =
            plan(&PlanRequest { devices: std::slice::from_ref(&all), ..request }).devices[0].bytes.steps;
        let best = best_of_all(&shape, &by_layer, &device, step);
        assert!(
            got.token_seconds <= best * (1.0 + got.gap) * 1.000_001,
            "case {case}: the bound is above {best}: {} and gap {}",
            got.token_seconds,
            got.gap
        );
        worst = worst.max(got.token_seconds / best);
        n_close += usize::from(got.token_seconds <= 1.01 * best);
        assert!(best <= got.token_seconds * 1.000_001, "case {case}: the search missed the plan");
    }
    // In models of three layers and 36 neurons a part is large; where a step fits only just, the order by what a byte saves
    // can miss a better set.
    assert!(n_close >= 36 && worst < 1.15, "{n_close} of 40 within a hundredth, the worst {worst}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn more_memory_never_holds_fewer_bytes(a in 0u64..16 << 30, more in 0u64..4 << 30, exact: bool) {
        let shape = ModelShape::uniform("m", 6, 1024, 1024, 4096, 32000, Gating::Gate, 0.5625, 1_000_000);
        let rates = Rates::skewed(&shape, 0.15, 0.3);
        let mode = if exact { ActiveMode::Exact } else { ActiveMode::Predictor };
        let bytes = |n: u64| {
            planned(&shape, &rates, mode, &[device(Budget::Bytes(n >> 6))]).devices[0].bytes.total()
        };
        prop_assert!(bytes(a) <= bytes(a + more));
    }
}

fn counts() -> ActivationCounts {
    let mut random = Random::new(3);
    let counts = (0..N_LAYER).map(|_| (0..N_FF).map(|_| random.below(100) as u64).collect()).collect();
    ActivationCounts::new(100, counts).unwrap()
}

/// A device to which everything moves at no cost.
fn quick(bytes: u64) -> Accelerator {
    Accelerator { latency: 0.0, link: 1e15, ..device(Budget::Bytes(bytes)) }
}

fn plan_options(devices: Vec<Accelerator>) -> PlanOptions {
    PlanOptions::new(host(), devices, Statistics::Counts(Box::new(counts())))
}

#[test]
fn what_is_planned_is_never_less_than_what_a_device_allocates() {
    for (i, bytes) in [0, 1, 300_000, 400_000, 600_000, 1_000_000, 2_000_000].into_iter().enumerate() {
        let account = Arc::new(Account::default());
        let of_device = Arc::clone(&account);
        let options = LoadOptions {
            accelerators: vec![Device::Other(MakeBackend::new(move |spec| {
                let options = MockOptions { memory_bytes: Some(bytes), late: true };
                Ok(Box::new(MockDevice::new(spec, options, Arc::clone(&of_device))))
            }))],
            plan: Some(PlanOptions { n_ctx: Some(N_CTX), ..plan_options(vec![quick(bytes)]) }),
            n_batch: 8,
            ..LoadOptions::default()
        };
        let model = TinyFile::sparse().load_with(&options).unwrap();
        let plan = model.placement().unwrap();
        let planned = plan.devices[0].bytes.total();
        assert!(account.used() <= planned && planned <= bytes, "{} of {planned} of {bytes}", account.used());
        let mut session = model.session(&SessionOptions::default()).unwrap();
        session.prefill(&[TokenId(1), TokenId(2), TokenId(3)]).unwrap();
        session.decode(TokenId(4)).unwrap();
        assert!(account.peak() <= planned, "{} of {planned} bytes", account.peak());
        if i >= 3 {
            assert!(plan.devices[0].n_neurons > 0, "{bytes} bytes hold nothing: {:?}", plan.devices[0]);
        }
    }
}

#[test]
fn statistics_of_another_model_are_refused() {
    let load = |counts: ActivationCounts| {
        let options = LoadOptions {
            plan: Some(PlanOptions::new(host(), vec![], Statistics::Counts(Box::new(counts)))),
            ..LoadOptions::default()
        };
        match TinyFile::sparse().load_with(&options) {
            Err(LoadError::Rates(error)) => error,
            other => panic!("{other:?}"),
        }
    };
    let short = ActivationCounts::new(1, vec![vec![0; N_FF]; 3]).unwrap();
    assert_eq!(load(short), RatesError::Layers { expected: N_LAYER, got: 3 });
    let narrow = ActivationCounts::new(1, vec![vec![0; 7]; N_LAYER]).unwrap();
    assert_eq!(load(narrow).to_string(), "layer 0: the statistics have 7 neurons, the model 96");
}
