//! Sessions: lengths, turns, rewinding, forking, cancelling, and what a step may not do.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use powerinfer_core::sampling::SamplingParams;
use powerinfer_core::{
    CancelToken, FinishReason, GenerateError, GenerateOptions, LoadOptions, Model, SessionError,
    SessionOptions,
};
use powerinfer_sparse_ops::{ActiveMode, TokenId};
use support::{N_VOCAB, TinyFile};

const MODES: [ActiveMode; 3] = [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor];

fn model() -> Model {
    TinyFile::sparse().load().unwrap()
}

fn prompt(len: usize) -> Vec<TokenId> {
    (0..len).map(|ix| TokenId(((ix * 37 + 3) % N_VOCAB) as u32)).collect()
}

fn options(n_ctx: usize) -> SessionOptions {
    SessionOptions { n_ctx: Some(n_ctx), mode: None }
}

/// Greedy and deaf to end-of-text, so that only lengths end it.
fn endless() -> GenerateOptions {
    GenerateOptions { sampling: SamplingParams::greedy(), ignore_end: true, ..GenerateOptions::default() }
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_before_any_work() {
    let model = model();
    let mut session = model.session(&options(64)).unwrap();
    for len in [65, 1000] {
        let error = session.generate(&prompt(len), endless()).err().unwrap();
        assert!(
            matches!(error, GenerateError::Session(SessionError::ContextFull { n_ctx: 64, used: 0, .. })),
            "{error}"
        );
        assert_eq!(session.stats().prefill.tokens, 0);
    }
    // k free places give k + 1 tokens.
    for (len, n_generated) in [(63, 2), (64, 1), (60, 5)] {
        session.rewind(0).unwrap();
        let mut generation = session.generate(&prompt(len), endless()).unwrap();
        let tokens = generation.by_ref().map(|piece| piece.unwrap()).filter(|p| p.token.is_some()).count();
        assert_eq!(tokens, n_generated, "prompt of {len}");
        assert_eq!(generation.finish_reason(), Some(&FinishReason::Length));
    }
}

#[test]
fn tokens_that_are_not_in_the_vocabulary_are_named_by_place() {
    let mut session = model().session(&options(64)).unwrap();
    let error = session.prefill(&[TokenId(1), TokenId(300)]).unwrap_err();
    assert!(
        matches!(error, SessionError::UnknownToken { place: 1, id: TokenId(300), n_vocab: 300 }),
        "{error}"
    );
    assert!(matches!(session.prefill(&[]), Err(SessionError::NoTokens)));
    assert!(matches!(session.rewind(1), Err(SessionError::Rewind { to: 1, len: 0 })));
    assert!(session.tokens().is_empty());
}

#[test]
fn one_by_one_in_chunks_and_whole_give_the_same_logits() {
    let ids = prompt(40);
    for mode in MODES {
        let run = |n_batch: usize, chunk: usize| {
            let options = LoadOptions { n_batch, ..LoadOptions::default() };
            let model = TinyFile::sparse().load_with(&options).unwrap();
            let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
            let mut session = model.session(&options).unwrap();
            for ids in ids.chunks(chunk) {
                session.prefill(ids).unwrap();
            }
            session.logits().to_vec()
        };
        let want = run(64, 1);
        for (n_batch, chunk) in [(64, 40), (64, 7), (3, 40), (16, 16), (1, 40)] {
            assert_eq!(run(n_batch, chunk), want, "batch {n_batch}, chunks of {chunk}, {mode:?}");
        }
    }
}

#[test]
fn evaluating_gives_the_logits_after_every_token() {
    let ids = prompt(40);
    let model = model();
    let mut singly = Vec::new();
    let mut session = model.session(&options(64)).unwrap();
    for &id in &ids {
        singly.push(session.decode(id).unwrap().to_vec());
    }
    let mut all = vec![Vec::new(); ids.len()];
    let mut session = model.session(&options(64)).unwrap();
    session.evaluate(&ids, |pos, logits| all[pos] = logits.to_vec()).unwrap();
    assert_eq!(all, singly);
    assert_eq!(session.logits(), singly.last().unwrap());
    assert_eq!(session.tokens(), ids);
}

#[test]
fn interleaved_sessions_do_not_touch_each_other() {
    let model = model();
    let alone = |ids: &[TokenId]| {
        let mut session = model.session(&options(64)).unwrap();
        ids.iter().map(|&id| session.decode(id).unwrap().to_vec()).collect::<Vec<_>>()
    };
    let (a, b) = (prompt(20), prompt(30)[10..].to_vec());
    let want = (alone(&a), alone(&b));
    let mut first = model.session(&options(64)).unwrap();
    let mut second = model.session(&options(32)).unwrap();
    for ix in 0..20 {
        assert_eq!(first.decode(a[ix]).unwrap(), want.0[ix], "first, {ix}");
        assert_eq!(second.decode(b[ix]).unwrap(), want.1[ix], "second, {ix}");
    }
}

#[test]
fn sessions_of_many_threads_share_the_weights() {
    let model = model();
    let ids = prompt(20);
    let want = model.session(&options(64)).unwrap().prefill(&ids).unwrap().to_vec();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut session = model.session(&options(64)).unwrap();
                assert_eq!(session.prefill(&ids).unwrap(), want);
            });
        }
    });
}

#[test]
fn rewinding_and_forking_repeat_the_same_numbers() {
    let model = model();
    let ids = prompt(30);
    let mut session = model.session(&options(64)).unwrap();
    session.prefill(&ids[..20]).unwrap();
    let mut fork = session.fork().unwrap();
    let want = session.prefill(&ids[20..]).unwrap().to_vec();
    session.rewind(20).unwrap();
    session.prefill(&prompt(9)).unwrap();
    session.rewind(20).unwrap();
    assert_eq!(session.prefill(&ids[20..]).unwrap(), want, "after rewinding");
    drop(session);
    assert_eq!(fork.tokens(), &ids[..20]);
    assert_eq!(fork.prefill(&ids[20..]).unwrap(), want, "the fork");
}

#[test]
fn cancelling_stops_a_prompt_between_chunks_and_a_generation_between_tokens() {
    let options = LoadOptions { n_batch: 4, ..LoadOptions::default() };
    let model = TinyFile::sparse().load_with(&options).unwrap();
    let mut session = model.session(&self::options(64)).unwrap();
    let cancel = CancelToken::new();
    let stop = cancel.clone();
    let error = session
        .prefill_with(&prompt(40), &cancel, |done| {
            if done == 8 {
                stop.cancel();
            }
        })
        .unwrap_err();
    assert!(matches!(error, SessionError::Cancelled { done: 8, total: 40 }), "{error}");
    assert_eq!(session.tokens(), &prompt(40)[..8]);

    session.rewind(0).unwrap();
    let cancel = CancelToken::new();
    let mut generation =
        session.generate(&prompt(5), GenerateOptions { cancel: cancel.clone(), ..endless() }).unwrap();
    assert!(generation.next().is_some() && generation.next().is_some());
    cancel.cancel();
    let rest: Vec<_> = generation.by_ref().map(|piece| piece.unwrap().token).collect();
    assert!(rest.iter().all(Option::is_none), "only held-back text may follow: {rest:?}");
    assert_eq!(generation.finish_reason(), Some(&FinishReason::Cancelled));
    // The session goes on.
    assert!(session.decode(TokenId(5)).is_ok());
}

#[test]
fn weights_that_are_no_numbers_are_an_error_and_the_session_goes_back() {
    let mut file = TinyFile::sparse();
    let mut embedding = file.values("token_embd.weight");
    embedding[64 * 50] = f32::NAN;
    file.tensor("token_embd.weight", &[64, N_VOCAB], embedding);
    let mut session = file.load().unwrap().session(&options(64)).unwrap();
    session.prefill(&[TokenId(3)]).unwrap();
    let error = session.decode(TokenId(50)).unwrap_err();
    assert!(matches!(error, SessionError::NonFinite { position: 1, .. }), "{error}");
    assert_eq!(session.tokens(), [TokenId(3)]);
    assert!(session.decode(TokenId(4)).is_ok());

    // The same of every way to add tokens.
    struct Nothing;
    impl powerinfer_core::Probe for Nothing {
        fn after_layer(&mut self, _: powerinfer_core::LayerId, _: &[f32]) {}
    }
    let bad = [4, 50, 5].map(TokenId);
    assert!(session.evaluate(&bad, |_, _| ()).is_err());
    assert_eq!(session.tokens(), [3, 4].map(TokenId), "after evaluate");
    assert!(session.trace(&bad, &mut Nothing).is_err());
    assert_eq!(session.tokens(), [3, 4].map(TokenId), "after trace");
    assert!(session.prefill(&bad).is_err());
    assert_eq!(session.tokens(), [3, 4].map(TokenId), "after prefill");
    assert!(session.decode(TokenId(5)).is_ok());
}

#[test]
fn padded_rows_of_the_embedding_are_never_chosen() {
    let mut file = TinyFile::sparse();
    for name in ["token_embd.weight", "output.weight"] {
        let mut values = file.values(name);
        // Twenty rows that would win every time.
        values.extend(std::iter::repeat_n(50.0, 20 * 64));
        file.tensor(name, &[64, N_VOCAB + 20], values);
    }
    let model = file.load().unwrap();
    let mut session = model.session(&options(64)).unwrap();
    let sampling = SamplingParams { temperature: 5.0, seed: Some(1), ..SamplingParams::unfiltered() };
    let error = session.generate(&[TokenId(310)], endless()).err().unwrap();
    assert!(
        matches!(error, GenerateError::Session(SessionError::UnknownToken { n_vocab: 300, .. })),
        "{error}"
    );
    assert!(session.tokens().is_empty());
    let generation = session.generate(&prompt(4), GenerateOptions { sampling, ..endless() }).unwrap();
    for piece in generation {
        assert!(piece.unwrap().token.is_none_or(|t| t.index() < N_VOCAB));
    }
}

#[test]
fn the_same_seed_gives_the_same_text_alone_or_beside_another() {
    let model = model();
    let options_of = |seed| GenerateOptions {
        sampling: SamplingParams::default().seed(seed),
        max_tokens: Some(12),
        ignore_end: true,
        ..GenerateOptions::default()
    };
    let alone: Vec<_> = {
        let mut session = model.session(&options(64)).unwrap();
        session.generate(&prompt(5), options_of(9)).unwrap().map(|p| p.unwrap()).collect()
    };
    let mut first = model.session(&options(64)).unwrap();
    let mut second = model.session(&options(64)).unwrap();
    let mut other = second.generate(&prompt(7), options_of(10)).unwrap();
    let mut beside = Vec::new();
    for piece in first.generate(&prompt(5), options_of(9)).unwrap() {
        other.next();
        beside.push(piece.unwrap());
    }
    assert_eq!(beside, alone);
}

#[cfg(feature = "cpu")]
#[test]
fn logits_are_bit_equal_for_any_number_of_threads() {
    use powerinfer_core::{CpuOptions, Device};
    let ids = prompt(24);
    for mode in MODES {
        let run = |threads| {
            let device = Device::Cpu(CpuOptions { threads, ..CpuOptions::default() });
            let options = LoadOptions { device, ..LoadOptions::default() };
            let model = TinyFile::sparse().load_with(&options).unwrap();
            let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
            let mut session = model.session(&options).unwrap();
            let mut bits = Vec::new();
            session.evaluate(&ids, |_, row| bits.extend(row.iter().map(|v| v.to_bits()))).unwrap();
            bits
        };
        let want = run(1);
        for threads in [2, 3, 8] {
            assert!(run(threads) == want, "{mode:?} with {threads} threads");
        }
    }
}

#[test]
fn handles_go_where_a_server_needs_them() {
    fn shared<T: Send + Sync + 'static>() {}
    fn moved<T: Send + 'static>() {}
    shared::<Model>();
    shared::<CancelToken>();
    moved::<powerinfer_core::Session>();
}
