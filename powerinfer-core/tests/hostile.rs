//! Damaged files through the whole of loading and a step: a model, or a typed error, and never a panic.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use powerinfer_core::{
    Device, GgufFile, LoadOptions, Model, Rounding, SessionError, SessionOptions, TokenId,
};
use powerinfer_testing::tiny::Random;
use support::TinyFile;

/// Damaged copies of each file.
const N_COPIES: usize = 300;

#[derive(Debug, PartialEq)]
enum Outcome {
    Refused,
    Ran,
    NoNumber,
}

/// Changes one to three bytes, seven of eight in the header, where a byte decides most.
fn damage(bytes: &mut [u8], n_header: usize, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let end = if random.below(8) > 0 { n_header } else { bytes.len() };
        let byte = &mut bytes[random.below(end)];
        *byte = match random.below(4) {
            0 => random.next_u64() as u8,
            1 => 0,
            2 => 0xFF,
            _ => *byte ^ 1 << random.below(8),
        };
    }
}

/// Loads it and takes a step of a prompt and one of a single token.
fn outcome(bytes: Vec<u8>, device: Device) -> Outcome {
    // A file's own context length may ask for any amount of memory; the caller's does not.
    let options = LoadOptions { device, n_batch: 4, ..LoadOptions::default() };
    let Ok(model) = Model::from_bytes(bytes, &options) else { return Outcome::Refused };
    let mut session = match model.session(&SessionOptions { n_ctx: Some(4), mode: None }) {
        Ok(session) => session,
        Err(SessionError::ContextLength { .. } | SessionError::Backend(_)) => return Outcome::Refused,
        Err(error) => panic!("no error for a new session: {error}"),
    };
    let last = TokenId(model.spec().n_vocab as u32 - 1);
    // A prompt and a single token go different ways through a backend.
    match (judge(session.prefill(&[TokenId(0), last])), judge(session.decode(last))) {
        (Outcome::Ran, Outcome::Ran) => Outcome::Ran,
        _ => Outcome::NoNumber,
    }
}

fn judge(result: Result<&[f32], SessionError>) -> Outcome {
    match result {
        Ok(logits) => {
            assert!(logits.iter().all(|v| v.is_finite()), "a logit is no number");
            Outcome::Ran
        }
        Err(SessionError::NonFinite { .. }) => Outcome::NoNumber,
        Err(error) => panic!("no error for a step: {error}"),
    }
}

fn check(name: &str, file: &[u8]) {
    let n_header = GgufFile::from_bytes(file.to_vec()).unwrap().data_range().start;
    let mut random = Random::new(12);
    let mut n_refused = 0;
    for copy in 0..N_COPIES {
        let mut bytes = file.to_vec();
        // Half of the damage lies in the first keys, the rest mostly in vocabulary and shapes.
        let n_favored = if copy % 2 == 0 { n_header.min(900) } else { n_header };
        damage(&mut bytes, n_favored, &mut random);
        let device = if copy % 8 == 0 { Device::Reference(Rounding::None) } else { Device::default() };
        let result = catch_unwind(AssertUnwindSafe(|| outcome(bytes, device)));
        let outcome = result.unwrap_or_else(|_| panic!("{name}: damaged copy {copy} panics"));
        n_refused += usize::from(outcome == Outcome::Refused);
    }
    // Both ways were taken often.
    assert!(
        (N_COPIES / 10..N_COPIES * 9 / 10).contains(&n_refused),
        "{name}: {n_refused} copies were refused"
    );
}

#[test]
fn damaged_toy_files_never_panic() {
    check("dense", &TinyFile::dense().bytes());
    check("sparse", &TinyFile::sparse().bytes());
}

#[test]
fn damaged_files_of_other_families_never_panic() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    for name in ["golden/falcon40-q4_0.gguf", "transformers/llama-rope-yarn.gguf", "transformers/opt.gguf"] {
        check(name, &std::fs::read(folder.join(name)).unwrap());
    }
}

#[test]
fn weights_of_no_numbers_are_found_by_the_step() {
    let mut file = TinyFile::dense();
    let mut norm = file.values("output_norm.weight");
    norm[0] = f32::NAN;
    file.tensor("output_norm.weight", &[support::N_EMBD], norm);
    assert_eq!(outcome(file.bytes(), Device::default()), Outcome::NoNumber);
    assert_eq!(outcome(TinyFile::dense().bytes(), Device::default()), Outcome::Ran);
}
