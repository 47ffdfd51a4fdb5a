//! The reference backend keeps its own contracts, and the null backend counts exact traffic.

use std::sync::Arc;

use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{ActiveMode, HybridBackend, LayerId, NeuronId, NeuronSet};
use powerinfer_testing::conformance::{self, Subject};
use powerinfer_testing::drive::Drive;
use powerinfer_testing::null::NullBackend;
use powerinfer_testing::tiny::{Family, Random, TinyModel, TinyOptions};
use powerinfer_testing::tolerance::{NMSE_F32, assert_close};

#[test]
fn the_reference_backend_conforms() {
    conformance::run(&Subject {
        make: &|spec| Box::new(ReferenceBackend::new(spec, Rounding::None)),
        same_bits: &[&|spec| Box::new(ReferenceBackend::new(spec, Rounding::None))],
        count_allocations: None,
        nmse_limit: NMSE_F32,
        kv_value_bytes: 4,
    });
}

#[test]
fn any_split_over_two_or_three_owners_gives_the_same_logits() {
    let mut random = Random::new(3);
    for family in Family::ALL {
        let model = TinyModel::new(TinyOptions { family, ..TinyOptions::default() });
        let mut whole = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
        model.load_all(&mut whole);
        for mode in [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor] {
            let want = Drive::new(&model.spec, vec![&mut whole], 8).step(0, &[5, 60, 9, 31], mode).to_vec();
            for n_owners in [2, 3] {
                // Each neuron of each layer goes to an owner at random.
                let owner: Vec<Vec<usize>> = model
                    .spec
                    .n_ff
                    .iter()
                    .map(|&n| (0..n).map(|_| random.below(n_owners)).collect())
                    .collect();
                let mut backends: Vec<ReferenceBackend> = (0..n_owners)
                    .map(|_| ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None))
                    .collect();
                model.load_home(&mut backends[0]);
                for (ix, backend) in backends.iter_mut().enumerate() {
                    model.load_ffn(backend, |layer| {
                        let of = &owner[layer.index()];
                        NeuronSet::from_ids(
                            of.len(),
                            (0..of.len()).filter(|&j| of[j] == ix).map(|j| NeuronId(j as u32)),
                        )
                    });
                }
                let backends = backends.iter_mut().map(|b| b as &mut dyn HybridBackend).collect();
                let got = Drive::new(&model.spec, backends, 8).step(0, &[5, 60, 9, 31], mode).to_vec();
                assert_close(&format!("{family:?} {mode:?} over {n_owners}"), &got, &want, NMSE_F32);
            }
        }
    }
}

#[test]
fn a_split_layer_moves_x_and_bits_one_way_and_one_sum_back() {
    let model = TinyModel::new(TinyOptions::default());
    let (n_embd, n_ff) = (model.spec.n_embd as u64, model.spec.n_ff[0]);
    let mut home = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
    let mut other = NullBackend::new(Arc::clone(&model.spec));
    model.load_home(&mut home);
    // Layer 1 is split, the others lie wholly at home.
    let part = |layer: LayerId| match layer {
        LayerId(1) => NeuronSet::from_ids(n_ff, (0..10).map(NeuronId)),
        _ => NeuronSet::none(n_ff),
    };
    model.load_ffn(&mut other, part);
    model.load_ffn(&mut home, |layer| part(layer).complement());
    let mut drive = Drive::new(&model.spec, vec![&mut home, &mut other], 4);
    drive.step(0, &[1, 2, 3], ActiveMode::Exact);
    let cost = drive.backends()[1].take_cost();
    assert_eq!(cost.bytes_in, 3 * (4 * n_embd + 8 * n_ff.div_ceil(64) as u64));
    assert_eq!(cost.bytes_out, 3 * 4 * n_embd);
    assert_eq!(cost.owned_neurons, 30);
}
