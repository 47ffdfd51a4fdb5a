//! What the timing model shows of the engine's order of calls: device and host work side by side.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::sync::Arc;

use powerinfer_core::placement::{Assignment, LayerAssignment};
use powerinfer_core::{ActiveMode, Device, LoadOptions, MakeBackend, Rounding, SessionOptions, TokenId};
use powerinfer_sparse_ops::reference::ReferenceBackend;
use powerinfer_sparse_ops::{NeuronId, NeuronSet};
use powerinfer_testing::mock::{Account, Clock, MockDevice, MockOptions, Speed, Timed};

use support::{N_EMBD, N_FF, N_LAYER, TinyFile};

const HOST: Speed = Speed { memory: 1.0, link: 1.0, latency_ns: 0, asynchronous: false };

/// Nanoseconds of one decoded token with `n_hot` neurons of each layer on a device of this speed.
fn token_ns(n_hot: usize, device: Speed) -> u64 {
    let clock = Clock::default();
    let (host_clock, device_clock) = (clock.clone(), clock.clone());
    let hot = NeuronSet::from_ids(N_FF, (0..n_hot as u32).map(NeuronId));
    let layer = LayerAssignment { home: 0, owned: vec![hot.complement(), hot] };
    let options = LoadOptions {
        device: Device::Other(MakeBackend::new(move |spec| {
            let inner = Box::new(ReferenceBackend::new(Arc::clone(&spec), Rounding::None));
            Ok(Box::new(Timed::new(inner, &spec, HOST, host_clock.clone())))
        })),
        accelerators: vec![Device::Other(MakeBackend::new(move |spec| {
            let options = MockOptions::default();
            let inner = MockDevice::new(Arc::clone(&spec), options, Arc::new(Account::default()));
            Ok(Box::new(Timed::new(Box::new(inner), &spec, device, device_clock.clone())))
        }))],
        assignment: Some(Assignment { embed: 0, head: 0, layers: vec![layer; N_LAYER] }),
        ..LoadOptions::default()
    };
    let model = TinyFile::sparse().load_with(&options).unwrap();
    let options = SessionOptions { mode: Some(ActiveMode::Dense), ..SessionOptions::default() };
    let mut session = model.session(&options).unwrap();
    let before = clock.now();
    session.decode(TokenId(1)).unwrap();
    clock.now() - before
}

#[test]
fn a_split_layer_takes_the_longer_side_and_the_exchange_rather_than_the_sum() {
    const N_HOT: usize = N_FF / 2;
    let side = (N_HOT * 3 * 4 * N_EMBD * N_LAYER) as u64;
    let free = Speed { memory: f64::INFINITY, link: f64::INFINITY, latency_ns: 0, asynchronous: true };
    let dense = token_ns(N_FF, free);
    let cold = token_ns(N_HOT, free);
    assert_eq!(cold - dense, side, "the host's neurons, at a byte a nanosecond");

    let latency_ns = 100;
    let exchange_in = N_LAYER as u64 * latency_ns;
    let exchange_out = exchange_in;
    // The device is faster: its work and the way there hide behind the host's, the sum's way back does not.
    let fast = Speed { memory: 4.0, latency_ns, ..free };
    assert_eq!(token_ns(N_HOT, fast), dense + side + exchange_out);
    // The device is slower: the host's work hides behind it and the way there.
    let slow = Speed { memory: 0.5, latency_ns, ..free };
    assert_eq!(token_ns(N_HOT, slow), dense + exchange_in + 2 * side + exchange_out);
    // A device that makes the caller wait would take the sum.
    let waiting = Speed { asynchronous: false, ..slow };
    assert_eq!(token_ns(N_HOT, waiting), dense + side + 2 * side);
}
