//! Whole characters out of bytes that come in pieces.

/// Turns bytes that come in pieces into text that comes in whole characters.
///
/// An incomplete character at the end is held until the bytes that complete it arrive, or until
/// [`finish`](Self::finish). Bytes that can never be UTF-8 become U+FFFD. All text that comes out, put
/// together, is [`String::from_utf8_lossy`] of all bytes that went in.
///
/// ```
/// use powerinfer_core::text::Utf8Stream;
///
/// let mut stream = Utf8Stream::new();
/// assert_eq!(stream.push(b"caf\xc3"), "caf");
/// assert_eq!(stream.push(b"\xa9!"), "é!");
/// assert_eq!(stream.finish(), "");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    /// Bytes not yet let out: between calls at most 3, the start of one character.
    pending: Vec<u8>,
    /// The text of the latest call.
    out: String,
}

impl Utf8Stream {
    /// A stream that holds nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes and returns the text that is now complete, which may be empty.
    pub fn push(&mut self, bytes: &[u8]) -> &str {
        self.out.clear();
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        let held = loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.out.push_str(text);
                    break 0;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    self.out.push_str(std::str::from_utf8(valid).expect("valid up to here"));
                    let Some(n_bad) = error.error_len() else { break after.len() };
                    self.out.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[n_bad..];
                }
            }
        };
        self.pending.drain(..self.pending.len() - held);
        &self.out
    }

    /// Ends the text: a held incomplete character becomes one U+FFFD. The stream can then start anew.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        if !self.pending.is_empty() {
            self.pending.clear();
            self.out.push(char::REPLACEMENT_CHARACTER);
        }
        &self.out
    }

    /// The number of bytes held back, 0 to 3.
    pub fn held_bytes(&self) -> usize {
        self.pending.len()
    }

    /// Forgets what is held.
    pub fn reset(&mut self) {
        self.pending.clear();
        self.out.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn holds_a_character_until_its_last_byte() {
        let mut stream = Utf8Stream::new();
        let mut seen = Vec::new();
        for byte in "a🦀b".as_bytes() {
            seen.push((stream.push(&[*byte]).to_owned(), stream.held_bytes()));
        }
        let expected = [("a", 0), ("", 1), ("", 2), ("", 3), ("🦀", 0), ("b", 0)];
        assert_eq!(seen, expected.map(|(text, held)| (text.to_owned(), held)));
    }

    #[test]
    fn flushes_half_a_character_as_one_replacement() {
        let mut stream = Utf8Stream::new();
        assert_eq!(stream.push(b"x\xf0\x9f\xa6"), "x");
        assert_eq!(stream.finish(), "\u{fffd}");
        assert_eq!(stream.finish(), "", "nothing is flushed twice");
        assert_eq!(stream.push(b"y"), "y");
    }

    #[test]
    fn lets_out_what_follows_a_broken_character() {
        let mut stream = Utf8Stream::new();
        assert_eq!(stream.push(b"\xf0\x9f"), "");
        assert_eq!(stream.push(b"ok"), "\u{fffd}ok");
    }

    #[test]
    fn reset_forgets_the_tail() {
        let mut stream = Utf8Stream::new();
        stream.push(b"\xc3");
        stream.reset();
        assert_eq!(stream.push(b"\xa9"), "\u{fffd}");
    }

    /// Bytes with many starts, tails and broken forms of characters among plain text.
    fn messy_bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            any::<char>().prop_map(|c| c.to_string().into_bytes()[..1].to_vec()),
            prop::collection::vec(0x80u8..=0xff, 1..3),
            prop::sample::select(vec![&b"\xed\xa0\x80"[..], b"\xc0\x80", b"\xf4\x90", b"\xf0\x9f\xa6", b"a"])
                .prop_map(<[u8]>::to_vec),
        ];
        prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            rng_seed: proptest::test_runner::RngSeed::Fixed(2),
            ..ProptestConfig::with_cases(512)
        })]

        #[test]
        fn any_split_gives_the_lossy_text_of_all_bytes(
            bytes in messy_bytes(),
            cuts in prop::collection::vec(0usize..5, 1..20),
        ) {
            let mut stream = Utf8Stream::new();
            let mut text = String::new();
            let (mut rest, mut cuts) = (bytes.as_slice(), cuts.into_iter().cycle());
            // A piece of length 0 is a token without bytes; the single byte after each makes progress.
            while !rest.is_empty() {
                let n = cuts.next().unwrap().min(rest.len());
                text.push_str(stream.push(&rest[..n]));
                rest = &rest[n..];
                let n = rest.len().min(1);
                text.push_str(stream.push(&rest[..n]));
                rest = &rest[n..];
                prop_assert!(stream.held_bytes() <= 3);
            }
            text.push_str(stream.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
