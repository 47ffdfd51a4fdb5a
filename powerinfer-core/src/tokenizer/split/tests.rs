//! What each rule makes of text that tells them apart.

use super::PreTokenizer;

fn pieces(rule: PreTokenizer, text: &str) -> Vec<String> {
    let mut out = Vec::new();
    rule.split(text.as_bytes(), |piece| {
        out.push(String::from_utf8(piece.to_vec()).expect("UTF-8 in, UTF-8 out"))
    });
    out
}

/// Checks cases of the form "text, then its pieces with `|` between".
#[track_caller]
fn check(rule: PreTokenizer, cases: &[(&str, &str)]) {
    for &(text, expected) in cases {
        let expected: Vec<&str> =
            if expected.is_empty() { Vec::new() } else { expected.split('|').collect() };
        assert_eq!(pieces(rule, text), expected, "{rule:?} on {text:?}");
    }
}

#[test]
fn every_name_has_a_rule_and_stands_once() {
    let names: Vec<&str> = PreTokenizer::names().collect();
    for name in &names {
        assert!(PreTokenizer::from_name(name).is_some());
        assert_eq!(names.iter().filter(|other| *other == name).count(), 1, "{name}");
    }
    assert_eq!(PreTokenizer::from_name("nonsense"), None);
}

#[test]
fn gpt2() {
    check(
        PreTokenizer::Gpt2,
        &[
            ("", ""),
            ("Hello world", "Hello| world"),
            ("  Hello   world  ", " | Hello|  | world|  "),
            ("I'm we've he'll DON'T 's", "I|'m| we|'ve| he|'ll| DON|'|T| '|s"),
            ("'x 'sun", "'|x| '|sun"),
            ("a's", "a|'s"),
            ("12345 3.14", "12345| 3|.|14"),
            ("x=1;  y\n\n z\t\tw", "x|=|1|;| | y|\n\n| z|\t|\t|w"),
            ("a\u{a0}b", "a|\u{a0}|b"),
            ("caf\u{e9} cafe\u{301}", "caf\u{e9}| cafe|\u{301}"),
            ("\u{4f60}\u{597d}\u{ff0c}\u{4e16}", "\u{4f60}\u{597d}|\u{ff0c}|\u{4e16}"),
            (" \u{1f600}\u{1f600} ", " \u{1f600}\u{1f600}| "),
            (" \n", " \n"),
            ("\r\na", "\r|\n|a"),
        ],
    );
}

#[test]
fn single_digits_before_gpt2() {
    check(
        PreTokenizer::StarCoder,
        &[
            ("v12 345", "v|1|2| |3|4|5"),
            ("it's x2's", "it|'s| x|2|'s"),
            ("\u{661}\u{662}", "\u{661}|\u{662}"),
        ],
    );
}

#[test]
fn punctuation_before_gpt2() {
    check(
        PreTokenizer::Default,
        &[
            ("Hello, world!", "Hello|,| world|!"),
            ("I'm", "I|'|m"),
            ("a ==> `b`", "a| |==>| `|b|`"),
            ("1234567 x", "123|456|7| x"),
            (" 12 345", " |12| |345"),
            ("\u{661}\u{662}\u{663}\u{664}", "\u{661}\u{662}\u{663}\u{664}"),
        ],
    );
    check(
        PreTokenizer::Falcon,
        &[
            ("a `b` $5", "a| |`|b|`| |$|5"),
            ("1234567", "123|456|7"),
            (" 1234", " |123|4"),
            ("it's", "it|'|s"),
        ],
    );
}

#[test]
fn llama3() {
    for rule in [PreTokenizer::Llama3, PreTokenizer::Dbrx] {
        check(
            rule,
            &[
                ("Hello world", "Hello| world"),
                ("DON'T i'LL 'Ve", "DON|'T| i|'LL| '|Ve"),
                ("'tis 'x", "'t|is| '|x"),
                ("12345678", "123|456|78"),
                (" 123", " |123"),
                ("(a) (b)", "(a|)| (|b|)"),
                ("x\n\n  y", "x|\n\n| | y"),
                ("x  \n \n  y", "x|  \n \n| | y"),
                ("a!\n\nb", "a|!\n\n|b"),
                ("a !\r\n b", "a| !\r\n| b"),
                ("\ta\t\tb", "\ta|\t|\tb"),
                ("\u{a0}nbsp", "\u{a0}nbsp"),
                ("cafe\u{301} x", "cafe|\u{301}| x"),
                ("   ", "   "),
                ("1 2", "1| |2"),
            ],
        );
    }
}

#[test]
fn relatives_of_llama3() {
    check(PreTokenizer::Qwen2, &[("x123 'S", "x|1|2|3| '|S"), ("a'S", "a|'S")]);
    check(
        PreTokenizer::Qwen35,
        &[("cafe\u{301}s", "cafe\u{301}s"), ("\u{301}a !\u{301}", "\u{301}a| !|\u{301}")],
    );
    check(PreTokenizer::Ufakzeka, &[("Ankara'da don't", "Ankara|'da| don|'t")]);
    check(PreTokenizer::SeedCoder, &[("a;\n\nb", "a|;|\n\n|b")]);
    check(PreTokenizer::Laguna, &[("a;\n\nb  \n c", "a|;|\n\n|b|  |\n| c")]);
    check(PreTokenizer::MiniCpm5, &[("a1234", "a|123|4"), ("it's", "it|'s")]);
}

#[test]
fn spaces_in_powers_of_two() {
    let lengths = |n: usize, after: &str| -> Vec<usize> {
        pieces(PreTokenizer::Jais2, &format!("{}{after}", " ".repeat(n))).iter().map(String::len).collect()
    };
    assert_eq!(lengths(7, ""), [4, 2, 1]);
    assert_eq!(lengths(1030, ""), [512, 512, 4, 2]);
    assert_eq!(lengths(1, "x"), [2]);
    assert_eq!(lengths(3, "x"), [2, 2]);
    assert_eq!(lengths(2, "1"), [1, 1, 1]);
    check(PreTokenizer::Jais2, &[("a\n   b", "a|\n|  | b")]);
}

#[test]
fn words_cut_at_case() {
    check(
        PreTokenizer::Gpt4o,
        &[
            ("CamelCaseIdentifier HTTPServer", "Camel|Case|Identifier| HTTPServer"),
            ("snake_case", "snake|_case"),
            ("don't DON'T", "don't| DON'T"),
            ("x'y", "x|'y"),
            ("1234 a/b//\n", "123|4| a|/b|//\n"),
            ("\u{41f}\u{440}\u{438}\u{412}\u{435}\u{442}", "\u{41f}\u{440}\u{438}|\u{412}\u{435}\u{442}"),
            ("cafe\u{301}s", "cafe\u{301}s"),
            // A letter without case ends the lower-case part if only upper-case ones follow.
            ("\u{4e2d}ABC", "\u{4e2d}|ABC"),
            ("ABC\u{4e2d}", "ABC\u{4e2d}"),
            ("a  b\n c", "a| | b|\n| c"),
        ],
    );
    check(PreTokenizer::Tekken, &[("don't 123", "don|'t| |1|2|3"), ("iPhone", "i|Phone")]);
}

#[test]
fn deepseek() {
    check(
        PreTokenizer::DeepSeekLlm,
        &[
            ("Hi there\n\nx", "Hi| there|\n|\n|x"),
            ("a, b!", "a|,| b|!"),
            ("12 34", "12| |34"),
            ("\u{4f60}\u{597d}a", "\u{4f60}\u{597d}|a"),
            ("a  ", "a|  "),
            (" x\u{3000}", " x|\u{3000}"),
            // The second list of the published rule is a range over ASCII letters too.
            ("\u{436}x \u{561}", "\u{436}|x| \u{561}"),
            ("x\u{561}y", "x|\u{561}|y"),
        ],
    );
    check(
        PreTokenizer::DeepSeekCoder,
        &[("def f(x):\n", "def| f|(|x|):|\n"), ("a1 23", "a|1| |2|3"), ("\t\tif", "\t|\tif")],
    );
    check(
        PreTokenizer::DeepSeek3,
        &[
            ("12345", "123|45"),
            ("a.b .c !d", "a|.b| .|c| !|d"),
            ("it's \u{65e5}\u{672c}\u{8a9e}\u{306e}x", "it|'s| |\u{65e5}\u{672c}\u{8a9e}\u{306e}|x"),
            ("a;\n\n  b", "a|;\n\n| | b"),
            ("cafe\u{301}", "cafe\u{301}"),
        ],
    );
}

#[test]
fn bloom() {
    check(
        PreTokenizer::Bloom,
        &[
            ("Hello, world. x1", "Hello|,| world|.| x1"),
            ("a  b", "a| | b"),
            ("a(b)c", "a|(|b|)|c"),
            ("12", "12"),
        ],
    );
    check(PreTokenizer::Viking, &[("a12 b", "a|1|2| b")]);
}

#[test]
fn pieces_always_make_up_the_text() {
    let texts = [
        "def f(x):\n    return x ** 2\n",
        "\u{feff}\u{1f468}\u{200d}\u{1f469} \u{4f60}\u{597d} don't 3.14 \u{301}\u{301} A\u{4e2d}B",
        " \t \n \t \r\n  ...!!??--==>> (((",
        "\0a\0\u{85}\u{2028}x",
    ];
    for name in PreTokenizer::names() {
        let rule = PreTokenizer::from_name(name).expect("a known name");
        for text in texts {
            assert_eq!(pieces(rule, text).concat(), text, "{name}");
        }
    }
}

/// A long run of one character once overflowed the stack or took quadratic time in other engines. A quadratic scan
/// of these would not finish in hours.
#[test]
fn a_long_run_of_one_character_is_cheap() {
    let rules: std::collections::HashSet<PreTokenizer> =
        PreTokenizer::names().filter_map(PreTokenizer::from_name).collect();
    for unit in
        ["a", "A", " ", "\n", "1", "'", "!", "\u{1f600}", "\u{4e2d}", "\u{301}", "A\u{4e2d}", " \n", "\t "]
    {
        let len_bytes = if ["a", " ", "\u{1f600}"].contains(&unit) { 1 << 20 } else { 1 << 16 };
        let text = unit.repeat(len_bytes / unit.len());
        for &rule in &rules {
            let mut len = 0;
            rule.split(text.as_bytes(), |piece| len += piece.len());
            assert_eq!(len, text.len(), "{rule:?} on {unit:?}");
        }
    }
}
