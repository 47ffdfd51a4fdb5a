//! The conformance suite: contracts C1 to C9 of [`HybridBackend`], run by every backend's own tests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{
    Activation, ActiveMode, BackendError, FfnInput, GateCopy, HybridBackend, LayerId, ModelSpec, NeuronId,
    NeuronSet, PredictorWeights, SeqId, StepCost, StepRow, Ticket, TokenId, WeightType,
};

use crate::drive::Drive;
use crate::tiny::{Family, Random, TinyModel, TinyOptions};
use crate::tolerance::{NMSE_F32, assert_close};

/// Makes an empty backend for a model.
pub type Make<'a> = dyn Fn(Arc<ModelSpec>) -> Box<dyn HybridBackend> + 'a;

/// Runs a call and counts its heap allocations.
pub type CountAllocations<'a> = dyn Fn(&mut dyn FnMut()) -> u64 + 'a;

/// How to make the backend under test, and what it promises.
pub struct Subject<'a> {
    /// Makes an empty backend for a model.
    pub make: &'a Make<'a>,
    /// Other ways to run it (thread counts) that must give the same bits (C6).
    pub same_bits: &'a [&'a Make<'a>],
    /// Counts heap allocations of a call; `None` for a backend that is exempt from C5.
    pub count_allocations: Option<&'a CountAllocations<'a>>,
    /// Limit of [`crate::tolerance::nmse`] against the reference with F32 weights.
    pub nmse_limit: f64,
    /// Bytes the backend keeps for one key or value in its cache.
    pub kv_value_bytes: u64,
}

impl std::fmt::Debug for Subject<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subject").field("nmse_limit", &self.nmse_limit).finish_non_exhaustive()
    }
}

const TOKENS: [u32; 9] = [1, 17, 40, 3, 95, 60, 2, 33, 8];
const MODES: [ActiveMode; 3] = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];

/// Runs every contract.
///
/// # Panics
/// If one is broken, naming it.
pub fn run(subject: &Subject<'_>) {
    whole_models_match_the_reference(subject);
    gate_copies_predict_as_the_reference_does(subject);
    position_0_is_not_predicted_by_gate_copies(subject);
    c1_finish_adds(subject);
    c2_only_owned_neurons_count(subject);
    c3_inputs_may_be_reused(subject);
    c4_a_ticket_is_finished_once(subject);
    c5_steps_do_not_allocate(subject);
    c6_bits_do_not_depend_on_threads(subject);
    c7_the_caller_owns_lengths(subject);
    c8_cost_is_exact(subject);
    c9_shapes_are_proven_at_load(subject);
}

fn reference(model: &TinyModel) -> ReferenceBackend {
    let mut backend = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
    model.load_all(&mut backend);
    backend
}

fn loaded(subject: &Subject<'_>, model: &TinyModel) -> Box<dyn HybridBackend> {
    let mut backend = (subject.make)(Arc::clone(&model.spec));
    model.load_all(backend.as_mut());
    backend
}

/// Families × layouts × modes, one token at a time and as one batch.
pub fn whole_models_match_the_reference(subject: &Subject<'_>) {
    for family in Family::ALL {
        for (down_by_neuron, activation) in
            [(true, Activation::Relu), (false, Activation::Relu), (false, Activation::Silu)]
        {
            let model =
                TinyModel::new(TinyOptions { family, down_by_neuron, activation, ..TinyOptions::default() });
            for mode in MODES {
                let what = format!("{family:?}, down by neuron {down_by_neuron}, {activation:?}, {mode:?}");
                let mut slow = reference(&model);
                let mut slow = Drive::new(&model.spec, vec![&mut slow], TOKENS.len());
                let want = slow.step(0, &TOKENS, mode).to_vec();

                let mut fast = loaded(subject, &model);
                let mut fast = Drive::new(&model.spec, vec![fast.as_mut()], TOKENS.len());
                let got = fast.step(0, &TOKENS, mode).to_vec();
                assert_close(&format!("{what}, one batch"), &got, &want, subject.nmse_limit);

                let mut singly = Vec::new();
                for (pos, token) in (0..).zip(TOKENS) {
                    singly.extend_from_slice(fast.step(pos, &[token], mode));
                }
                assert_close(&format!("{what}, one by one"), &singly, &got, NMSE_F32);
            }
        }
    }
}

/// Gate copies for predictors: results, cost, threads and allocations.
pub fn gate_copies_predict_as_the_reference_does(subject: &Subject<'_>) {
    let mode = ActiveMode::Predictor;
    for family in Family::ALL {
        let options = TinyOptions { family, n_embd: 288, n_ff: 150, ..TinyOptions::default() };
        let model = TinyModel::new(options).with_gate_copies();
        let mut slow = reference(&model);
        let mut slow = Drive::new(&model.spec, vec![&mut slow], TOKENS.len());
        let want = slow.step(0, &TOKENS, mode).to_vec();
        slow.backends()[0].take_cost();
        slow.step(0, &TOKENS[..4], mode);
        let want_cost = slow.backends()[0].take_cost();
        assert!(want_cost.active_neurons * 10 < want_cost.owned_neurons * 8, "{family:?}: {want_cost:?}");

        let mut fast = loaded(subject, &model);
        let mut fast = Drive::new(&model.spec, vec![fast.as_mut()], TOKENS.len());
        let got = fast.step(0, &TOKENS, mode).to_vec();
        assert_close(&format!("{family:?}, gate copies"), &got, &want, subject.nmse_limit);
        fast.backends()[0].take_cost();
        fast.step(0, &TOKENS[..4], mode);
        let cost = fast.backends()[0].take_cost();
        let kv_bytes = cost.kv_bytes / subject.kv_value_bytes * 4;
        assert_eq!(StepCost { kv_bytes, ..cost }, want_cost, "C8: {family:?}, gate copies");
        if let Some(count) = subject.count_allocations {
            fast.step(0, &TOKENS, mode);
            let n = count(&mut || {
                fast.step(0, &TOKENS, mode);
                fast.step(9, &TOKENS[..1], mode);
            });
            assert_eq!(n, 0, "C5: heap allocations of a step, {family:?}, gate copies");
        }
        for make in subject.same_bits {
            let mut other = make(Arc::clone(&model.spec));
            model.load_all(other.as_mut());
            let mut other = Drive::new(&model.spec, vec![other.as_mut()], TOKENS.len());
            assert!(other.step(0, &TOKENS, mode) == got, "C6: bits differ, {family:?}, gate copies");
        }
    }
}

/// The first token of a sequence is computed exactly and reads no predictor, whatever else the step has; a sparse
/// file's own predictor is used there as everywhere.
pub fn position_0_is_not_predicted_by_gate_copies(subject: &Subject<'_>) {
    let mut model = TinyModel::new(TinyOptions::default());
    let low_rank = model.predictors.clone();
    model = model.with_gate_copies();
    for predictor in &mut model.predictors {
        if let PredictorWeights::GateCopy(copy) = predictor {
            let never = vec![f32::INFINITY; copy.n_ff()];
            let copy = GateCopy::clone(copy).with_thresholds(never).expect("one a neuron");
            *predictor = PredictorWeights::GateCopy(Arc::new(copy));
        }
    }
    let (mode, n_vocab) = (ActiveMode::Predictor, model.spec.n_vocab);
    let mut backend = loaded(subject, &model);
    let mut drive = Drive::new(&model.spec, vec![backend.as_mut()], TOKENS.len());
    let exact = drive.step(0, &TOKENS, ActiveMode::Exact).to_vec();
    drive.backends()[0].take_cost();
    let together = drive.step(0, &TOKENS, mode).to_vec();
    let cost = drive.backends()[0].take_cost();
    let n_neurons: usize = model.spec.n_ff.iter().sum();
    assert_eq!(cost.active_neurons, n_neurons as u64, "position 0 alone has active neurons");
    let n_bytes: usize = model.predictors.iter().map(PredictorWeights::n_bytes).sum();
    assert_eq!(cost.predictor_bytes, n_bytes as u64, "a predictor is read once a step");
    assert_eq!(together[..n_vocab], exact[..n_vocab], "position 0 in a prompt");
    assert_ne!(together[n_vocab..], exact[n_vocab..], "later positions are predicted");

    assert_eq!(drive.step(0, &TOKENS[..1], mode), &exact[..n_vocab], "position 0 alone");
    assert_eq!(drive.backends()[0].take_cost().predictor_bytes, 0, "nothing is predicted at position 0");
    assert_close("the rest", drive.step(1, &TOKENS[1..], mode), &together[n_vocab..], NMSE_F32);

    let other = SeqId(3);
    drive.backends()[0].reserve(other, 64, TOKENS.len()).expect("64 positions fit");
    let row = |seq, pos, ix: usize| StepRow { seq, pos, token: TokenId(TOKENS[ix]) };
    let mixed = drive.rows(&[row(SeqId(0), 9, 3), row(other, 0, 0), row(other, 1, 1)], mode);
    assert_eq!(mixed[n_vocab..2 * n_vocab], exact[..n_vocab], "position 0 beside another sequence");

    model.predictors = low_rank;
    let mut backend = loaded(subject, &model);
    let mut drive = Drive::new(&model.spec, vec![backend.as_mut()], TOKENS.len());
    drive.step(0, &TOKENS[..1], mode);
    let cost = drive.backends()[0].take_cost();
    assert!(cost.active_neurons < cost.owned_neurons && cost.predictor_bytes > 0, "{cost:?}");
}

/// A layer's FFN of the subject alone, with random input.
struct Bench {
    model: TinyModel,
    input: FfnInput,
}

const LAYER: LayerId = LayerId(1);

impl Bench {
    fn new(down_by_neuron: bool) -> Self {
        let model = TinyModel::new(TinyOptions { down_by_neuron, ..TinyOptions::default() });
        let mut random = Random::new(7);
        let (n_rows, n_embd, n_ff) = (3, model.spec.n_embd, model.spec.n_ff[1]);
        let mut input = FfnInput::with_capacity(n_rows, n_embd, n_ff);
        input.x = random.normals(n_rows * n_embd, 1.0);
        input.mode = ActiveMode::Predictor;
        input.active.reset(n_rows, n_ff);
        for row in 0..n_rows {
            for j in (0..n_ff as u32).filter(|_| random.below(3) == 0) {
                input.active.insert(row, NeuronId(j));
            }
        }
        Self { model, input }
    }

    fn run(&self, backend: &mut dyn HybridBackend, owned: &NeuronSet, acc: &mut [f32]) {
        self.model.load_ffn(backend, |_| owned.clone());
        backend.reserve(SeqId(0), 8, 3).expect("8 positions fit");
        let ticket = backend.ffn_start(LAYER, &self.input);
        backend.ffn_finish(ticket, acc);
    }

    fn sums(&self, backend: &mut dyn HybridBackend, owned: &NeuronSet) -> Vec<f32> {
        let mut acc = vec![0.0; self.input.x.len()];
        self.run(backend, owned, &mut acc);
        acc
    }

    fn want(&self, owned: &NeuronSet) -> Vec<f32> {
        self.sums(&mut ReferenceBackend::new(Arc::clone(&self.model.spec), Rounding::None), owned)
    }

    fn all(&self) -> NeuronSet {
        NeuronSet::all(self.model.spec.n_ff[1])
    }

    fn make(&self, subject: &Subject<'_>) -> Box<dyn HybridBackend> {
        (subject.make)(Arc::clone(&self.model.spec))
    }
}

/// C1: what was in the accumulator stays in the sum.
pub fn c1_finish_adds(subject: &Subject<'_>) {
    for down_by_neuron in [true, false] {
        let bench = Bench::new(down_by_neuron);
        let want: Vec<f32> = bench.want(&bench.all()).iter().map(|v| v + 2.0).collect();
        let mut acc = vec![2.0; want.len()];
        bench.run(bench.make(subject).as_mut(), &bench.all(), &mut acc);
        assert_close("C1: accumulator of 2 plus the sum", &acc, &want, subject.nmse_limit);
    }
}

/// C2: any partition of the neurons adds up to the whole; owning none adds zero.
pub fn c2_only_owned_neurons_count(subject: &Subject<'_>) {
    for down_by_neuron in [true, false] {
        let bench = Bench::new(down_by_neuron);
        let n_ff = bench.model.spec.n_ff[1];
        let mut random = Random::new(11);
        for keep_one_in in [2, 3, 10] {
            let part = NeuronSet::from_ids(
                n_ff,
                (0..n_ff as u32).filter(|_| random.below(keep_one_in) == 0).map(NeuronId),
            );
            let got = bench.sums(bench.make(subject).as_mut(), &part);
            assert_close("C2: part", &got, &bench.want(&part), subject.nmse_limit);
            let mut acc = got;
            bench.run(bench.make(subject).as_mut(), &part.complement(), &mut acc);
            assert_close("C2: both parts", &acc, &bench.want(&bench.all()), subject.nmse_limit);
        }
        let nothing = bench.sums(bench.make(subject).as_mut(), &NeuronSet::none(n_ff));
        assert!(nothing.iter().all(|&v| v == 0.0), "C2: owning none adds zero");
    }
}

/// C3: the input is overwritten between start and finish.
pub fn c3_inputs_may_be_reused(subject: &Subject<'_>) {
    let mut bench = Bench::new(true);
    let want = bench.want(&bench.all());
    let mut backend = bench.make(subject);
    let all = bench.all();
    bench.model.load_ffn(backend.as_mut(), |_| all.clone());
    backend.reserve(SeqId(0), 8, 3).expect("8 positions fit");
    let ticket = backend.ffn_start(LAYER, &bench.input);
    bench.input.x.fill(f32::NAN);
    bench.input.active.words_mut().fill(0);
    let mut acc = vec![0.0; want.len()];
    backend.ffn_finish(ticket, &mut acc);
    assert_close("C3: result after the input was overwritten", &acc, &want, subject.nmse_limit);
}

/// C4: a second ticket for the same work is refused.
pub fn c4_a_ticket_is_finished_once(subject: &Subject<'_>) {
    let bench = Bench::new(true);
    let mut backend = bench.make(subject);
    bench.model.load_ffn(backend.as_mut(), |_| bench.all());
    backend.reserve(SeqId(0), 8, 3).expect("8 positions fit");
    let ticket = backend.ffn_start(LAYER, &bench.input);
    let copy = Ticket { layer: ticket.layer, n_rows: ticket.n_rows, slot: ticket.slot };
    let mut acc = vec![0.0; bench.input.x.len()];
    backend.ffn_finish(ticket, &mut acc);
    let again = catch_unwind(AssertUnwindSafe(|| backend.ffn_finish(copy, &mut acc)));
    assert!(again.is_err(), "C4: finishing twice was accepted");
}

/// C5: no step after the first allocates, alone or in a batch, whatever the types.
pub fn c5_steps_do_not_allocate(subject: &Subject<'_>) {
    let Some(count) = subject.count_allocations else { return };
    let types = [
        (WeightType::F32, WeightType::F32),
        (WeightType::F16, WeightType::F16),
        (WeightType::Q8_0, WeightType::Q8_0),
        (WeightType::Q4_0, WeightType::Q4_0),
        // Activations of the FFN and of attention are rounded in different ways.
        (WeightType::Q8_0, WeightType::F16),
        (WeightType::F32, WeightType::Q4_0),
    ];
    let layouts = [(true, Activation::Relu), (false, Activation::Relu), (false, Activation::Silu)];
    for ((ffn_type, dense_type), (down_by_neuron, activation)) in
        types.into_iter().flat_map(|types| layouts.map(|layout| (types, layout)))
    {
        let options =
            TinyOptions { ffn_type, dense_type, down_by_neuron, activation, ..TinyOptions::default() };
        let model = TinyModel::new(options);
        let mut backend = loaded(subject, &model);
        let mut drive = Drive::new(&model.spec, vec![backend.as_mut()], 8);
        for mode in MODES {
            drive.step(0, &TOKENS[..8], mode);
            let n = count(&mut || {
                drive.step(8, &TOKENS[8..], mode);
                drive.step(9, &TOKENS[..8], mode);
                drive.backends()[0].take_cost();
            });
            assert_eq!(n, 0, "C5: heap allocations of a step, {mode:?}, {options:?}");
        }
    }
}

/// C6: the same bits however it is run, several times.
pub fn c6_bits_do_not_depend_on_threads(subject: &Subject<'_>) {
    for (family, ffn_type, down_by_neuron) in [
        (Family::Llama, WeightType::F32, true),
        (Family::Llama, WeightType::Q8_0, false),
        (Family::Falcon(true), WeightType::Q4_0, true),
        (Family::Opt, WeightType::F16, true),
    ] {
        let model = TinyModel::new(TinyOptions {
            family,
            ffn_type,
            dense_type: WeightType::Q8_0,
            down_by_neuron,
            n_ff: 1376,
            ..TinyOptions::default()
        });
        for mode in MODES {
            let bits = |make: &Make<'_>| {
                let mut backend = make(Arc::clone(&model.spec));
                model.load_all(backend.as_mut());
                let mut drive = Drive::new(&model.spec, vec![backend.as_mut()], TOKENS.len());
                let mut logits = drive.step(0, &TOKENS, mode).to_vec();
                logits.extend_from_slice(drive.step(9, &TOKENS[..1], mode));
                logits.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let want = bits(subject.make);
            for make in subject.same_bits {
                for _ in 0..3 {
                    assert!(bits(make) == want, "C6: bits differ, {family:?} {ffn_type} {mode:?}");
                }
            }
        }
    }
}

/// C7: going back overwrites, forking copies, releasing forgets, sequences do not touch each other.
pub fn c7_the_caller_owns_lengths(subject: &Subject<'_>) {
    let model = TinyModel::new(TinyOptions::default());
    let mut backend = loaded(subject, &model);
    let mut drive = Drive::new(&model.spec, vec![backend.as_mut()], 8);
    let mode = ActiveMode::Exact;
    drive.step(0, &TOKENS[..5], mode);
    let want = drive.step(5, &TOKENS[5..8], mode).to_vec();
    drive.step(3, &[9, 9, 9, 9], mode);
    drive.step(3, &TOKENS[3..5], mode);
    assert_eq!(drive.step(5, &TOKENS[5..8], mode), want, "C7: after going back");

    let fork = SeqId(5);
    drive.backends()[0].reserve(fork, 64, 8).expect("64 positions fit");
    drive.backends()[0].kv_copy(SeqId(0), fork, 0..5);
    let row = |seq, pos: u32| StepRow { seq, pos, token: TokenId(TOKENS[pos as usize]) };
    // The other sequence goes its own way in the same step.
    let other = |pos| StepRow { seq: SeqId(0), pos, token: TokenId(70) };
    let mixed = [row(fork, 5), row(fork, 6), other(5), row(fork, 7)];
    let logits = drive.rows(&mixed, mode).to_vec();
    let n = model.spec.n_vocab;
    assert_eq!(logits[..2 * n], want[..2 * n], "C7: a fork beside another sequence");
    assert_eq!(logits[3 * n..], want[2 * n..], "C7: a fork beside another sequence");
    drive.backends()[0].release(fork);
}

/// C8: the cost of a small step is that of the reference, which counts row by row. In a large one a backend may read
/// and compute neurons that no row wants, and says so.
pub fn c8_cost_is_exact(subject: &Subject<'_>) {
    for family in Family::ALL {
        for down_by_neuron in [true, false] {
            let model = TinyModel::new(TinyOptions { family, down_by_neuron, ..TinyOptions::default() });
            for mode in MODES {
                let cost = |backend: &mut dyn HybridBackend, value_bytes: u64, n: usize| {
                    let mut drive = Drive::new(&model.spec, vec![backend], TOKENS.len());
                    for (at, tokens) in (0..).step_by(n).zip(TOKENS.chunks(n)) {
                        drive.step(at, tokens, mode);
                    }
                    let cost = drive.backends()[0].take_cost();
                    assert_eq!(drive.backends()[0].take_cost(), StepCost::default(), "C8: taken once");
                    StepCost { kv_bytes: cost.kv_bytes / value_bytes, ..cost }
                };
                let what = format!("C8: {family:?}, {mode:?}, down by neuron {down_by_neuron}");
                for n in [1, 4] {
                    let want = cost(&mut reference(&model), 4, n);
                    let got = cost(loaded(subject, &model).as_mut(), subject.kv_value_bytes, n);
                    assert_eq!(got, want, "{what}, steps of {n}");
                }
                let least = cost(&mut reference(&model), 4, TOKENS.len());
                let got = cost(loaded(subject, &model).as_mut(), subject.kv_value_bytes, TOKENS.len());
                let of_model = |c: StepCost| (c.active_neurons, c.fired_neurons, c.owned_neurons, c.kv_bytes);
                assert_eq!(of_model(got), of_model(least), "{what}, one step");
                let of_backend = |c: StepCost| [c.weight_bytes, c.gate_rows, c.up_rows, c.down_rows];
                let mut pairs = of_backend(got).into_iter().zip(of_backend(least));
                assert!(pairs.all(|(got, least)| got >= least), "{what}: {got:?} below {least:?}");
            }
        }
    }
}

/// C9: a wrong shape is an error at load and a panic in a step.
pub fn c9_shapes_are_proven_at_load(subject: &Subject<'_>) {
    let model = TinyModel::new(TinyOptions::default());
    let other = TinyModel::new(TinyOptions { n_ff: 128, ..TinyOptions::default() });
    let mut backend = (subject.make)(Arc::clone(&model.spec));
    let result = backend.load_ffn(LayerId(0), other.ffn[0].clone(), &NeuronSet::all(96));
    assert!(matches!(result, Err(BackendError::Shape(_))), "C9: FFN of another width: {result:?}");
    let result = backend.load_predictor(LayerId(0), other.predictors[0].clone());
    assert!(matches!(result, Err(BackendError::Shape(_))), "C9: predictor of another width: {result:?}");
    let wide = TinyModel::new(TinyOptions { n_embd: 128, ..TinyOptions::default() });
    for part in wide.dense {
        let result = backend.load_dense(part);
        assert!(matches!(result, Err(BackendError::Shape(_))), "C9: dense part of another width: {result:?}");
    }

    let bench = Bench::new(true);
    let mut backend = bench.make(subject);
    bench.model.load_ffn(backend.as_mut(), |_| bench.all());
    backend.reserve(SeqId(0), 8, 3).expect("8 positions fit");
    let mut short = bench.input.clone();
    short.x.pop();
    let result = catch_unwind(AssertUnwindSafe(|| backend.ffn_start(LAYER, &short)));
    assert!(result.is_err(), "C9: an input that is too short was accepted");
}
