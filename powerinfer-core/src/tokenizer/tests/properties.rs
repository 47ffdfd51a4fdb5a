//! What holds for any text, against slow versions of the same rules.

use super::{bpe_source, ids_of, spm_source};
use crate::tokenizer::merge::{Merge, Merger, Symbol};
use crate::tokenizer::special::SpecialTokens;
use crate::tokenizer::{Encode, Part, PreTokenizer, Tokenizer, TokenizerOptions, VocabSource};
use proptest::prelude::*;

fn tokenizer(source: &VocabSource) -> Tokenizer {
    Tokenizer::new(source, TokenizerOptions::default()).expect("a good vocabulary")
}

/// Text made of what splitters and vocabularies care about, with some of everything else.
fn text() -> impl Strategy<Value = String> {
    let bit = prop_oneof![
        4 => "(hello|hell|he|l|h|i| |  |\n|'s|12|!|<\\|end\\|>|<\\|user\\|>|</s>|<s>)",
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(bit, 0..24).prop_map(|bits| bits.concat())
}

/// Merges by looking at every pair before each step.
fn merge_slowly(mut symbols: Vec<Symbol>, pair: impl Fn(Symbol, Symbol) -> Option<Merge>) -> Vec<Symbol> {
    loop {
        let best = (1..symbols.len())
            .filter_map(|right| {
                pair(symbols[right - 1], symbols[right]).map(|merge| (merge.order, right, merge.id))
            })
            .min();
        let Some((_, right, id)) = best else { return symbols };
        let removed = symbols.remove(right);
        symbols[right - 1] = Symbol { id: Some(id), start: symbols[right - 1].start, end: removed.end };
    }
}

/// Takes the longest tokens first, each from left to right, wherever they still fit.
fn find_slowly(tokens: &[Vec<u8>], text: &[u8]) -> Vec<(usize, u32)> {
    let mut order: Vec<usize> = (0..tokens.len()).filter(|&ix| !tokens[ix].is_empty()).collect();
    order.sort_by_key(|&ix| std::cmp::Reverse(tokens[ix].len()));
    let mut taken = vec![false; text.len()];
    let mut found = Vec::new();
    let mut from = 0;
    while from < order.len() {
        let len = tokens[order[from]].len();
        let same: Vec<usize> =
            order[from..].iter().copied().take_while(|&ix| tokens[ix].len() == len).collect();
        for start in 0..(text.len() + 1).saturating_sub(len) {
            let hit = same.iter().find(|&&ix| text[start..start + len] == tokens[ix][..]);
            if let Some(&ix) = hit
                && !taken[start..start + len].contains(&true)
            {
                taken[start..start + len].fill(true);
                found.push((start, ix as u32));
            }
        }
        from += same.len();
    }
    found.sort_unstable();
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn text_comes_back(text in text()) {
        for source in [spm_source(), bpe_source(), VocabSource { pre: Some("gpt-4o".into()), ..bpe_source() }] {
            let t = tokenizer(&source);
            // SentencePiece writes a space as U+2581.
            let text = text.replace('\u{2581}', "_");
            for parse_special in [false, true] {
                let ids = t.encode(&text, Encode { add_special: true, parse_special }).expect("a short text");
                let mut ids = ids.as_slice();
                if t.adds_bos() {
                    prop_assert_eq!(ids.first().copied(), t.bos());
                    ids = &ids[1..];
                }
                let decoded = t.decode(ids, true).expect("known ids");
                prop_assert_eq!(String::from_utf8_lossy(&decoded), text.as_str());
            }
        }
    }

    #[test]
    fn any_bytes_are_encoded(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let spm = tokenizer(&spm_source());
        prop_assert!(spm.decode(&ids_of(&spm, &bytes), false).is_ok());
        for name in PreTokenizer::names() {
            let t = tokenizer(&VocabSource { pre: Some(name.into()), ..bpe_source() });
            prop_assert!(t.decode(&ids_of(&t, &bytes), false).is_ok());
        }
    }

    #[test]
    fn parts_without_control_tokens_are_one_text(pieces in prop::collection::vec(text(), 0..5)) {
        for source in [spm_source(), bpe_source()] {
            let t = tokenizer(&source);
            let plain = |text: &String| text.replace(['<', '>'], "");
            let whole: String = pieces.iter().map(plain).collect();
            let parts: Vec<Part> = (0..)
                .zip(&pieces)
                .map(|(ix, text)| if ix % 2 == 0 { Part::Content(plain(text)) } else { Part::Template(plain(text)) })
                .collect();
            prop_assert_eq!(t.encode_parts(&parts, false).expect("short"), ids_of(&t, &whole));
        }
    }

    #[test]
    fn merging_word_by_word_changes_nothing(text in text()) {
        // One token with a space inside, which is too bad to be merged, makes the whole text one list.
        let mut whole = spm_source();
        whole.tokens.push("q\u{2581}q".into());
        whole.scores.as_mut().expect("scores").push(-99.0);
        whole.token_types.as_mut().expect("types").push(1);
        let text = text.replace('q', "");
        prop_assert_eq!(ids_of(&tokenizer(&whole), &text), ids_of(&tokenizer(&spm_source()), &text));
    }

    #[test]
    fn merging_follows_the_slow_rule(ids in prop::collection::vec(0_u32..4, 0..40), orders in prop::collection::vec(0_u32..6, 64)) {
        // Which pairs merge, in which order and to what is drawn; two in six orders mean "does not merge".
        let pair = |a: Symbol, b: Symbol| {
            let (a_id, b_id) = (a.id? % 8, b.id? % 8);
            let order = orders[(a_id * 8 + b_id) as usize];
            let short = b.end - a.start <= 6;
            (order < 4 && short).then_some(Merge { order, id: (a_id * 3 + b_id + 1) % 8 })
        };
        let symbols: Vec<Symbol> =
            ids.iter().enumerate().map(|(ix, &id)| Symbol { id: Some(id), start: ix, end: ix + 1 }).collect();
        let mut merger = Merger::default();
        merger.symbols.extend_from_slice(&symbols);
        merger.run(pair);
        let merged: Vec<Symbol> = merger.symbols.iter().copied().filter(|s| s.start < s.end).collect();
        prop_assert_eq!(merged, merge_slowly(symbols, pair));
        prop_assert!(merger.n_queued <= 3 * ids.len());
    }

    #[test]
    fn special_tokens_follow_the_slow_rule(tokens in prop::collection::vec("[ab]{0,4}", 0..5), text in "[ab]{0,24}") {
        let mut tokens: Vec<Vec<u8>> = tokens.into_iter().map(String::into_bytes).collect();
        tokens.sort();
        tokens.dedup();
        let tree = SpecialTokens::new((0..).zip(tokens.iter().map(Vec::as_slice)));
        let found: Vec<(usize, u32)> =
            tree.find(text.as_bytes(), |_| true).into_iter().map(|f| (f.range.start, f.id)).collect();
        prop_assert_eq!(found, find_slowly(&tokens, text.as_bytes()));
    }
}
