//! The embedded model: real text from a ReLU-sparse model in all modes, threads and levels.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use powerinfer_core::sampling::SamplingParams;
use powerinfer_core::tokenizer::Encode;
use powerinfer_core::{
    ActiveMode, CpuLevel, CpuOptions, Device, GenerateOptions, LoadOptions, Model, Rounding, SessionOptions,
    TokenId,
};
use powerinfer_testing::tolerance::{NMSE_8_BIT_DEMO_MODEL, assert_close};

const MODES: [ActiveMode; 3] = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];
const BEGINNINGS: [&str; 3] =
    ["Once upon a time, there was a little", "One day, Lily found a small", "The dog and the bird"];

fn model(device: Device) -> Model {
    let options = LoadOptions { device, ..LoadOptions::default() };
    Model::from_bytes(powerinfer_demo_model::MODEL, &options).unwrap()
}

fn cpu(threads: usize, level: CpuLevel) -> Model {
    model(Device::Cpu(CpuOptions { threads, level: Some(level), ..CpuOptions::default() }))
}

/// The text begins with the token that ended the one before it in training.
fn prompt(model: &Model, beginning: &str) -> Vec<TokenId> {
    let mut ids = vec![TokenId(0)];
    ids.extend(model.tokenizer().encode(beginning, Encode::default()).unwrap());
    ids
}

fn continuation(model: &Model, beginning: &str, mode: ActiveMode) -> (Vec<TokenId>, String) {
    let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
    let mut session = model.session(&options).unwrap();
    let options = GenerateOptions {
        sampling: SamplingParams::greedy(),
        max_tokens: Some(60),
        ..GenerateOptions::default()
    };
    let (mut ids, mut text) = (Vec::new(), String::new());
    for piece in session.generate(&prompt(model, beginning), options).unwrap() {
        let piece = piece.unwrap();
        ids.extend(piece.token);
        text.push_str(&piece.text);
    }
    (ids, text)
}

#[test]
fn exact_and_dense_write_the_same_story_token_for_token() {
    let model = model(Device::default());
    assert_eq!(model.default_mode(), ActiveMode::Predictor);
    for beginning in BEGINNINGS {
        let dense = continuation(&model, beginning, ActiveMode::Dense);
        assert_eq!(continuation(&model, beginning, ActiveMode::Exact), dense, "{beginning}");
    }
}

#[test]
fn every_mode_writes_words() {
    let model = model(Device::default());
    for beginning in BEGINNINGS {
        for mode in MODES {
            let (ids, text) = continuation(&model, beginning, mode);
            assert!(ids.len() > 20 && text.contains(" the "), "{mode:?}: {beginning}{text}");
            assert!(text.is_ascii() && !text.contains('\u{fffd}'), "{mode:?}: {text}");
        }
    }
}

#[test]
fn logits_are_bit_equal_for_1_2_3_and_8_threads_at_every_level() {
    for level in CpuLevel::available() {
        for mode in MODES {
            let bits = |threads| {
                let model = cpu(threads, level);
                let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
                let mut session = model.session(&options).unwrap();
                let mut bits = Vec::new();
                session
                    .evaluate(&prompt(&model, BEGINNINGS[0]), |_, row| {
                        bits.extend(row.iter().map(|v| v.to_bits()));
                    })
                    .unwrap();
                bits
            };
            let want = bits(1);
            for threads in [2, 3, 8] {
                assert!(bits(threads) == want, "{mode:?}, {level:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn the_cpu_backend_follows_the_reference_backend() {
    let reference = model(Device::Reference(Rounding::None));
    let ids = prompt(&reference, BEGINNINGS[1]);
    let logits = |model: &Model| {
        let options = SessionOptions { mode: Some(ActiveMode::Exact), ..SessionOptions::default() };
        model.session(&options).unwrap().prefill(&ids).unwrap().to_vec()
    };
    let want = logits(&reference);
    for level in CpuLevel::available() {
        assert_close(&format!("{level:?}"), &logits(&cpu(2, level)), &want, NMSE_8_BIT_DEMO_MODEL);
    }
}

#[test]
fn sparse_modes_read_less_and_say_how_much() {
    let model = model(Device::default());
    let [dense, exact, predictor] = MODES.map(|mode| {
        let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
        let mut session = model.session(&options).unwrap();
        for id in prompt(&model, BEGINNINGS[0]) {
            session.decode(id).unwrap();
        }
        session.stats().decode
    });
    assert_eq!(dense.cost.fired_neurons, exact.cost.fired_neurons);
    assert!(exact.bytes_per_token() < dense.bytes_per_token());
    assert!(predictor.active_share() < 0.5 && exact.active_share() == 1.0);
    assert!(predictor.fired_share() > 0.0 && predictor.fired_share() <= predictor.active_share());
    assert!(predictor.cost.predictor_bytes > 0 && exact.cost.predictor_bytes == 0);
}
