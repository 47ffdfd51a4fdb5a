//! Counting which neurons fire: fast paths against plain loops, and over two owners.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::sync::Arc;

use powerinfer_core::placement::{Assignment, LayerAssignment};
use powerinfer_core::profile::{ProfileError, ProfileOptions, profile};
use powerinfer_core::{
    Activation, CancelToken, CpuOptions, Device, KvType, LayerId, LoadOptions, MakeBackend, Model, Rounding,
    SessionError, TokenId,
};
use powerinfer_predictor::ActivationCounts;
use powerinfer_sparse_ops::reference::ReferenceBackend;
use powerinfer_sparse_ops::{NeuronId, NeuronSet};

use support::{N_FF, N_LAYER, TinyFile};

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
}
