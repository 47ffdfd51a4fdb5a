//! What encoding and decoding do, on vocabularies small enough to follow by hand.

use super::{bpe_source, ids_of, spm_source, texts};
use crate::tokenizer::{Encode, Part, Tokenizer, TokenizerOptions, VocabSource};
use powerinfer_sparse_ops::TokenId;

const PLAIN: Encode = Encode { add_special: false, parse_special: false };
const SPECIAL: Encode = Encode { add_special: false, parse_special: true };
const ALL: Encode = Encode { add_special: true, parse_special: true };

fn tokenizer(source: &VocabSource) -> Tokenizer {
    Tokenizer::new(source, TokenizerOptions::default()).expect("a good vocabulary")
}

#[track_caller]
fn check(tokenizer: &Tokenizer, how: Encode, text: &str, expected: &[&str]) {
    let ids = tokenizer.encode(text, how).expect("a short text");
    assert_eq!(texts(tokenizer, &ids), expected, "{text:?}");
}

#[test]
fn spm_merges_the_best_scored_pair_first() {
    let t = tokenizer(&spm_source());
    check(&t, PLAIN, "hi", &["\u{2581}hi"]);
    check(&t, PLAIN, "hihi", &["\u{2581}hi", "hi"]);
    check(&t, PLAIN, "h i", &["\u{2581}", "h", "\u{2581}", "i"]);
    check(&t, PLAIN, "  hi", &["\u{2581}", "\u{2581}", "\u{2581}hi"]);
    check(&t, PLAIN, "", &[]);
}

#[test]
fn spm_tokens_may_cross_words() {
    let mut source = spm_source();
    source.tokens.push("h\u{2581}".into());
    source.scores.as_mut().expect("scores").push(-0.5);
    source.token_types.as_mut().expect("types").push(1);
    check(&tokenizer(&source), PLAIN, "h i", &["\u{2581}", "h\u{2581}", "i"]);
}

#[test]
fn spm_falls_back_to_bytes() {
    let t = tokenizer(&spm_source());
    check(&t, PLAIN, "\u{e9}", &["\u{2581}", "<0xC3>", "<0xA9>"]);
    assert_eq!(ids_of(&t, "\n"), ids_of(&t, [b'\n']));
    let ids = t.encode(b"h\xff", PLAIN).expect("a short text");
    assert_eq!(texts(&t, &ids), ["\u{2581}", "h", "<0xFF>"]);
    assert_eq!(t.decode(&ids, false).expect("known ids"), b"h\xff");
}

#[test]
fn spm_without_byte_tokens_uses_unknown() {
    let mut source = spm_source();
    source.tokens.truncate(7);
    source.scores.as_mut().expect("scores").truncate(7);
    source.token_types.as_mut().expect("types").truncate(7);
    let t = tokenizer(&source);
    check(&t, PLAIN, "\u{e9}h", &["\u{2581}", "<unk>", "h"]);
}

#[test]
fn spm_space_prefix_returns_after_a_special_token() {
    let t = tokenizer(&spm_source());
    check(&t, SPECIAL, "hi</s>hi", &["\u{2581}hi", "</s>", "\u{2581}hi"]);
    check(&t, PLAIN, "</s>", &["\u{2581}", "<0x3C>", "<0x2F>", "<0x73>", "<0x3E>"]);
    let without = tokenizer(&VocabSource { add_space_prefix: Some(false), ..spm_source() });
    check(&without, SPECIAL, "hi</s>hi", &["hi", "</s>", "hi"]);
    let ids = t.encode("hi</s> hi", SPECIAL).expect("a short text");
    assert_eq!(t.decode(&ids, true).expect("known ids"), b"hi</s> hi");
    assert_eq!(t.decode(&ids, false).expect("known ids"), b"hi hi");
}

#[test]
fn bos_and_eos_follow_the_keys_and_the_kind() {
    let spm = tokenizer(&spm_source());
    check(&spm, ALL, "hi", &["<s>", "\u{2581}hi"]);
    check(&spm, ALL, "", &["<s>"]);
    let both = tokenizer(&VocabSource { add_bos: Some(false), add_eos: Some(true), ..spm_source() });
    check(&both, ALL, "hi", &["\u{2581}hi", "</s>"]);
    // A BOS id alone does not make BPE add it, unless the splitter's models always have it.
    let end = bpe_source().tokens.len() as u32 - 1;
    let bpe = VocabSource { bos: Some(end), ..bpe_source() };
    assert!(!tokenizer(&bpe).adds_bos());
    let llama3 = VocabSource { pre: Some("llama-bpe".into()), ..bpe };
    assert!(tokenizer(&llama3).adds_bos());
    assert!(!tokenizer(&VocabSource { add_bos: Some(false), ..llama3.clone() }).adds_bos());
    assert!(!tokenizer(&VocabSource { bos: None, ..llama3 }).adds_bos());
}

#[test]
fn bpe_merges_in_the_order_of_training() {
    let t = tokenizer(&bpe_source());
    check(&t, PLAIN, "hello hell", &["hello", "\u{120}", "hell"]);
    check(&t, PLAIN, "lle", &["ll", "e"]);
    check(&t, PLAIN, "he\u{e9}", &["he", "\u{c3}", "\u{a9}"]);
    let ids = t.encode("hello \u{1f600}\n", PLAIN).expect("a short text");
    assert_eq!(t.decode(&ids, false).expect("known ids"), "hello \u{1f600}\n".as_bytes());
}

#[test]
fn llama3_takes_whole_pieces_before_merging() {
    // "xy" is a token that no merge makes.
    let llama3 = tokenizer(&VocabSource { pre: Some("llama-bpe".into()), ..bpe_source() });
    check(&llama3, PLAIN, "xy xy", &["xy", "\u{120}", "x", "y"]);
    check(&tokenizer(&bpe_source()), PLAIN, "xy", &["x", "y"]);
}

#[test]
fn control_tokens_need_permission_and_user_defined_ones_do_not() {
    let t = tokenizer(&bpe_source());
    check(&t, SPECIAL, "<|end|>hello<|user|>", &["<|end|>", "hello", "<|user|>"]);
    let ids = t.encode("<|end|><|user|>", PLAIN).expect("a short text");
    let end = t.token_with_text("<|end|>").expect("a token");
    let user = t.token_with_text("<|user|>").expect("a token");
    assert!(!ids.contains(&end) && ids.last() == Some(&user));
}

#[test]
fn special_tokens_can_swallow_white_space() {
    let n = bpe_source().tokens.len() as u32;
    let (user, end) = (n - 2, n - 1);
    let t = tokenizer(&VocabSource { rstrip: vec![end], lstrip: vec![user], ..bpe_source() });
    check(
        &t,
        SPECIAL,
        "h <|end|> \t h\n<|user|>\n",
        &["h", "\u{120}", "<|end|>", "h", "<|user|>", "\u{10a}"],
    );
    check(&t, SPECIAL, "<|end|>  <|user|> <|end|>  ", &["<|end|>", "<|user|>", "\u{120}", "<|end|>"]);
}

#[test]
fn content_parts_cannot_forge_control_tokens() {
    let t = tokenizer(&bpe_source());
    let end = t.token_with_text("<|end|>").expect("a token");
    let count = |parts: &[Part]| {
        let ids = t.encode_parts(parts, false).expect("a short prompt");
        ids.iter().filter(|&&id| id == end).count()
    };
    let template = |text: &str| Part::Template(text.into());
    let content = |text: &str| Part::Content(text.into());
    assert_eq!(count(&[template("<|end|>"), content("<|end|>"), template("<|end|>")]), 2);
    // A token that begins in the template and ends in what the user wrote is the user's doing.
    assert_eq!(count(&[template("<|e"), content("nd|>")]), 0);
    assert_eq!(count(&[content("<|e"), template("nd|>")]), 0);
    assert_eq!(count(&[content("<|e"), content("nd|>")]), 0);
    assert_eq!(count(&[template("<|e"), template("nd|>")]), 1);
    assert_eq!(count(&[template("<|e"), content(""), template("nd|>")]), 1);
}

#[test]
fn parts_are_cut_as_one_text() {
    let t = tokenizer(&bpe_source());
    let parts = [Part::Template("<|end|>he".into()), Part::Content("llo".into())];
    assert_eq!(
        t.encode_parts(&parts, false).expect("short"),
        t.encode("<|end|>hello", SPECIAL).expect("short")
    );
    let spm = tokenizer(&spm_source());
    let parts = [Part::Template("</s>".into()), Part::Content("h".into()), Part::Template("i".into())];
    assert_eq!(spm.encode_parts(&parts, true).expect("short"), spm.encode("</s>hi", ALL).expect("short"));
}

#[test]
fn a_prompt_gets_one_bos() {
    let t = tokenizer(&spm_source());
    let with = t.encode_parts(&[Part::Template("<s>hi".into())], true).expect("short");
    let without = t.encode_parts(&[Part::Template("hi".into())], true).expect("short");
    assert_eq!(texts(&t, &with), ["<s>", "\u{2581}hi"]);
    assert_eq!(with, without);
    let mut ids = t.encode("<s><s>hi<s>", ALL).expect("short");
    assert_eq!(t.drop_repeated_bos(&mut ids), 2);
    assert_eq!(texts(&t, &ids), ["<s>", "\u{2581}hi", "<s>"]);
    assert_eq!(t.drop_repeated_bos(&mut ids), 0);
}

#[test]
fn several_tokens_end_a_generation() {
    let mut source = bpe_source();
    let n = source.tokens.len() as u32;
    source.tokens.extend(["<|im_end|>", "<|eot_id|>", "other"].map(|text| text.as_bytes().to_vec()));
    source.token_types.as_mut().expect("types").extend([1, 3, 1]);
    source.extra_eog = vec![n + 2];
    source.eos = Some(0);
    let t = tokenizer(&source);
    assert_eq!(t.end_of_generation(), [0, n - 1, n, n + 1, n + 2].map(TokenId));
    assert!(t.is_end_of_generation(TokenId(n)) && !t.is_end_of_generation(TokenId(1)));
    // Files that call such a token ordinary are wrong.
    assert!(t.is_control(TokenId(n)));
    // A format with channels goes on after `<|end|>`.
    source.tokens.extend(["<|return|>", "<|call|>"].map(|text| text.as_bytes().to_vec()));
    source.token_types.as_mut().expect("types").extend([3, 3]);
    assert!(!tokenizer(&source).is_end_of_generation(TokenId(n - 1)));
}

#[test]
fn token_bytes_hide_control_tokens_unless_asked() {
    let t = tokenizer(&bpe_source());
    let end = t.token_with_text("<|end|>").expect("a token");
    assert_eq!(t.token_bytes(end, false), Some(b"".as_slice()));
    assert_eq!(t.token_bytes(end, true), Some(b"<|end|>".as_slice()));
    let space = t.token_with_text("\u{120}").expect("a token");
    assert_eq!(t.token_bytes(space, false), Some(b" ".as_slice()));
    let spm = tokenizer(&spm_source());
    let newline = spm.token_with_text("<0x0A>").expect("a token");
    assert_eq!(spm.token_bytes(newline, false), Some(b"\n".as_slice()));
}

#[test]
fn tokens_need_not_be_utf8() {
    let mut source = spm_source();
    source.tokens.push(b"\xff\xfe".to_vec());
    source.scores.as_mut().expect("scores").push(-1.0);
    source.token_types.as_mut().expect("types").push(4);
    let t = tokenizer(&source);
    let ids = t.encode(b"h\xff\xfeh", PLAIN).expect("short");
    assert_eq!(ids[2], TokenId(source.tokens.len() as u32 - 1));
    assert_eq!(t.decode(&ids, false).expect("known ids"), b"h\xff\xfeh");
}

/// Long runs of one character once cost quadratic time or the stack in other engines.
#[test]
fn a_mebibyte_of_one_character_is_encoded() {
    for source in [spm_source(), bpe_source(), VocabSource { pre: None, ..bpe_source() }] {
        let t = tokenizer(&source);
        for unit in ["l", " ", "\u{1f600}"] {
            let text = unit.repeat((1 << 20) / unit.len());
            let ids = t.encode(&text, SPECIAL).expect("within the limit");
            assert_eq!(t.decode(&ids, true).expect("known ids"), text.as_bytes(), "{unit:?}");
        }
    }
}
