//! Each way in which a vocabulary can be wrong.

use super::{bpe_source, spm_source};
use crate::tokenizer::{
    Encode, PreTokenizer, Tokenizer, TokenizerError, TokenizerOptions, TokenizerWarning, VocabSource,
};
use powerinfer_sparse_ops::TokenId;

fn error(source: &VocabSource) -> TokenizerError {
    Tokenizer::new(source, TokenizerOptions::default()).expect_err("a bad vocabulary")
}

fn changed(mut source: VocabSource, change: impl FnOnce(&mut VocabSource)) -> TokenizerError {
    change(&mut source);
    error(&source)
}

#[test]
fn other_models_are_refused_by_name() {
    let error = changed(spm_source(), |s| s.model = "bert".into());
    assert!(matches!(&error, TokenizerError::UnsupportedModel { model } if model == "bert"));
    assert!(error.to_string().contains("`bert`"));
}

#[test]
fn unknown_pre_tokenizers_are_refused_unless_overridden() {
    let mut source = bpe_source();
    source.pre = Some("martian".into());
    let error = error(&source);
    assert!(matches!(&error, TokenizerError::UnknownPreTokenizer { pre } if pre == "martian"));
    assert!(error.to_string().contains("`martian`") && error.to_string().contains("`llama-bpe`"));
    let options = TokenizerOptions { pre_override: Some(PreTokenizer::Qwen2), ..TokenizerOptions::default() };
    let tokenizer = Tokenizer::new(&source, options).expect("the rule was given");
    assert_eq!(tokenizer.pre_tokenizer(), Some(PreTokenizer::Qwen2));
    assert!(tokenizer.warnings().is_empty());
}

#[test]
fn a_missing_pre_tokenizer_is_a_warning() {
    for pre in [None, Some(String::new())] {
        let source = VocabSource { pre, ..bpe_source() };
        let tokenizer = Tokenizer::new(&source, TokenizerOptions::default()).expect("a default exists");
        assert_eq!(tokenizer.pre_tokenizer(), Some(PreTokenizer::Default));
        assert_eq!(tokenizer.warnings(), [TokenizerWarning::MissingPreTokenizer]);
        assert!(tokenizer.warnings()[0].to_string().contains("tokenizer.ggml.pre"));
    }
}

#[test]
fn missing_scores_are_a_warning() {
    let source = VocabSource { scores: None, ..spm_source() };
    let tokenizer = Tokenizer::new(&source, TokenizerOptions::default()).expect("scores may be absent");
    assert_eq!(tokenizer.warnings(), [TokenizerWarning::MissingScores]);
    assert!(tokenizer.warnings()[0].to_string().contains("scores"));
}

#[test]
fn tokens_must_be_there() {
    assert!(matches!(changed(spm_source(), |s| s.tokens.clear()), TokenizerError::NoTokens));
}

#[test]
fn arrays_must_be_as_long_as_the_tokens() {
    let n = spm_source().tokens.len();
    let short = changed(spm_source(), |s| s.scores.as_mut().expect("scores").truncate(n - 1));
    assert!(
        matches!(short, TokenizerError::Length { array: "scores", expected, got } if expected == n && got == n - 1)
    );
    let long = changed(spm_source(), |s| s.token_types.as_mut().expect("types").push(1));
    assert!(matches!(long, TokenizerError::Length { array: "token_type", got, .. } if got == n + 1));
}

#[test]
fn scores_must_be_numbers() {
    let error = changed(spm_source(), |s| s.scores.as_mut().expect("scores")[4] = f32::NAN);
    assert!(matches!(error, TokenizerError::BadScore { id: 4 }));
}

#[test]
fn ids_must_be_in_the_vocabulary() {
    let n = spm_source().tokens.len();
    type Set = fn(&mut VocabSource, u32);
    let setters: [(&str, Set); 10] = [
        ("bos", |s, id| s.bos = Some(id)),
        ("eos", |s, id| s.eos = Some(id)),
        ("eot", |s, id| s.eot = Some(id)),
        ("eom", |s, id| s.eom = Some(id)),
        ("unk", |s, id| s.unk = Some(id)),
        ("pad", |s, id| s.pad = Some(id)),
        ("sep", |s, id| s.sep = Some(id)),
        ("mask", |s, id| s.mask = Some(id)),
        ("eog", |s, id| s.extra_eog.push(id)),
        ("strip", |s, id| s.rstrip.push(id)),
    ];
    for (expected, set) in setters {
        let error = changed(spm_source(), |s| set(s, n as u32));
        assert!(
            matches!(error, TokenizerError::IdOutOfRange { key, id, n_vocab }
                if key == expected && id as usize == n && n_vocab == n),
            "{expected}: {error}"
        );
        let mut source = spm_source();
        set(&mut source, n as u32 - 1);
        assert!(
            Tokenizer::new(&source, TokenizerOptions::default()).is_ok(),
            "the last id is fine for {expected}"
        );
    }
}

#[test]
fn asked_for_special_tokens_must_exist() {
    let error = changed(bpe_source(), |s| s.add_bos = Some(true));
    assert!(matches!(error, TokenizerError::MissingSpecial { which: "bos" }), "{error}");
    let error = changed(bpe_source(), |s| s.add_eos = Some(true));
    assert!(matches!(error, TokenizerError::MissingSpecial { which: "eos" }), "{error}");
}

#[test]
fn byte_tokens_must_name_a_byte() {
    for text in ["<0x-1>", "<0xZZ>", "<0x100>", "<0x1>", "<0x>", "0x41", "", "<0x+1>"] {
        let source = VocabSource {
            tokens: vec![b"a".to_vec(), text.as_bytes().to_vec()],
            token_types: Some(vec![1, 6]),
            scores: None,
            ..spm_source()
        };
        let found = error(&source);
        assert!(
            matches!(&found, TokenizerError::BadByteToken { id: 1, text: t } if t == text),
            "{text}: {found}"
        );
        // The same text is harmless as an ordinary token.
        let plain = VocabSource { token_types: None, ..source };
        assert!(Tokenizer::new(&plain, TokenizerOptions::default()).is_ok(), "{text}");
    }
}

#[test]
fn special_tokens_must_be_short() {
    let with_last = |len_bytes: usize, ty: i32| {
        let mut source = bpe_source();
        source.tokens.push(vec![b'a'; len_bytes]);
        source.token_types.as_mut().expect("types").push(ty);
        source
    };
    let last = bpe_source().tokens.len() as u32;
    for ty in [3, 4] {
        let found = error(&with_last(257, ty));
        assert!(
            matches!(found, TokenizerError::SpecialTokenTooLong { id, len_bytes: 257, limit_bytes: 256 } if id == last),
            "{found}"
        );
        assert!(found.to_string().contains(&format!("special token {last} is 257 bytes")), "{found}");
        // A text made to take long is still done with: without the limit the steps grow with its square.
        let tokenizer =
            Tokenizer::new(&with_last(256, ty), TokenizerOptions::default()).expect("short enough");
        let how = Encode { parse_special: true, ..Encode::default() };
        let ids = tokenizer.encode(vec![b'a'; 64 << 10], how).expect("within the limit");
        assert_eq!(ids, vec![TokenId(last); 256]);
    }
    // An ordinary token may be as long as it likes.
    assert!(Tokenizer::new(&with_last(100_000, 1), TokenizerOptions::default()).is_ok());
}

#[test]
fn merges_must_name_two_known_pieces() {
    assert!(matches!(changed(bpe_source(), |s| s.merges = None), TokenizerError::MissingMerges));
    for line in ["ab", "", " ", "a ", " b"] {
        let error = changed(bpe_source(), |s| s.merges.as_mut().expect("merges").push(line.into()));
        let index = bpe_source().merges.expect("merges").len();
        assert!(
            matches!(&error, TokenizerError::MergeWithoutSpace { index: i, line: l } if *i == index && l == line),
            "{line:?}: {error}"
        );
    }
    for (line, unknown) in [("h q\u{1}", "q\u{1}"), ("q\u{1} h", "q\u{1}"), ("h h", "hh")] {
        let error = changed(bpe_source(), |s| s.merges = Some(vec![line.into()]));
        assert!(
            matches!(&error, TokenizerError::MergeOfUnknownPiece { index: 0, piece, .. } if piece == unknown),
            "{line:?}: {error}"
        );
    }
}

#[test]
fn long_texts_are_refused_before_work() {
    let options = TokenizerOptions { max_text_bytes: 4, ..TokenizerOptions::default() };
    let tokenizer = Tokenizer::new(&spm_source(), options).expect("a good vocabulary");
    assert!(tokenizer.encode("hihi", Encode::default()).is_ok());
    let error = tokenizer.encode("hihi ", Encode::default()).expect_err("five bytes");
    assert!(matches!(error, TokenizerError::TextTooLong { len_bytes: 5, limit_bytes: 4 }));
    let parts = ["hi", "hi", "h"].map(|text| crate::tokenizer::Part::Content(text.into()));
    let error = tokenizer.encode_parts(&parts, false).expect_err("five bytes");
    assert!(matches!(error, TokenizerError::TextTooLong { len_bytes: 5, limit_bytes: 4 }));
}

#[test]
fn unknown_ids_are_named_with_their_position() {
    let tokenizer = Tokenizer::new(&spm_source(), TokenizerOptions::default()).expect("a good vocabulary");
    let n = tokenizer.n_vocab() as u32;
    let error = tokenizer.decode(&[TokenId(0), TokenId(n)], false).expect_err("n is no id");
    assert!(matches!(error, TokenizerError::UnknownId { id, position: 1, .. } if id == n));
    assert_eq!(tokenizer.token_bytes(TokenId(n), true), None);
    assert_eq!(tokenizer.token_text(TokenId(u32::MAX)), None);
    assert_eq!(tokenizer.token_kind(TokenId(n)), None);
    assert!(!tokenizer.is_control(TokenId(n)) && !tokenizer.is_end_of_generation(TokenId(n)));
}
