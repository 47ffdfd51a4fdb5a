//! Stop strings, matched over the borders of tokens.

/// Why a set of stop strings was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// An empty stop string would stop before the first character.
    #[error("stop string {index} is empty, expected one character or more")]
    EmptyStop {
        /// Position in the list of stop strings.
        index: usize,
    },
}

/// What one push let out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamEvent<'a> {
    /// Text that can no longer be part of a stop string; may be empty.
    pub text: &'a str,
    /// The stop string that ended the text, by its position in the list. From then on `text` is empty.
    pub stopped: Option<usize>,
}

/// One stop string with its matcher (Knuth, Morris and Pratt).
#[derive(Clone, Debug)]
struct Stop {
    bytes: Vec<u8>,
    /// `border[k]`: length of the longest proper prefix of the stop that ends `bytes[..=k]`.
    border: Vec<usize>,
    /// How many bytes of the stop the text so far ends with.
    matched: usize,
}

impl Stop {
    fn new(text: String) -> Self {
        let bytes = text.into_bytes();
        let mut border = vec![0; bytes.len()];
        for k in 1..bytes.len() {
            let mut len = border[k - 1];
            while len > 0 && bytes[len] != bytes[k] {
                len = border[len - 1];
            }
            border[k] = len + usize::from(bytes[len] == bytes[k]);
        }
        Self { bytes, border, matched: 0 }
    }

    /// Takes one byte of text; true when the text now ends with the stop.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.border[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        // Nothing is stepped after a complete match, so `matched` stays an index above.
        self.matched == self.bytes.len()
    }
}

/// A set of stop strings, matched in text that comes in pieces.
///
/// The first stop string to be *complete* wins: generation ends with the token that completes it, and
/// never waits for a longer or overlapping one. Of several complete at the same character the longest
/// wins, of equal ones the one listed first. The text before the match comes out, the stop string and
/// what follows do not. The longest end of the text that may be the start of a stop string is held back.
///
/// ```
/// use powerinfer_core::text::StopStrings;
///
/// let mut stops = StopStrings::new(["</s>", "\n\n"])?;
/// assert_eq!(stops.push("Hi <").text, "Hi ");
/// assert_eq!(stops.push("b></").text, "<b>");
/// let event = stops.push("s> more");
/// assert_eq!((event.text, event.stopped), ("", Some(0)));
/// # Ok::<(), powerinfer_core::text::TextError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<Stop>,
    /// `released` bytes already handed out, then the held text.
    buffer: String,
    released: usize,
    stopped: Option<usize>,
}

impl StopStrings {
    /// A matcher for these stop strings, none of which may be empty; the list may be.
    ///
    /// # Errors
    ///
    /// [`TextError::EmptyStop`] with the position of the first empty string.
    pub fn new<I>(stops: I) -> Result<Self, TextError>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let compile = |(index, stop): (usize, I::Item)| {
            let stop: String = stop.into();
            if stop.is_empty() { Err(TextError::EmptyStop { index }) } else { Ok(Stop::new(stop)) }
        };
        let stops = stops.into_iter().enumerate().map(compile).collect::<Result<_, _>>()?;
        Ok(Self { stops, ..Self::default() })
    }

    /// Takes the next piece of text. After a stop it takes nothing more.
    pub fn push(&mut self, text: &str) -> StreamEvent<'_> {
        self.advance(text, false)
    }

    /// Ends the text and lets out what is held. The matcher stays stopped if it was;
    /// [`reset`](Self::reset) starts it anew.
    pub fn finish(&mut self) -> StreamEvent<'_> {
        self.advance("", true)
    }

    /// Takes a piece of text, and with `last` holds nothing back.
    pub(super) fn advance(&mut self, text: &str, last: bool) -> StreamEvent<'_> {
        self.buffer.drain(..self.released);
        self.released = 0;
        if self.stopped.is_none() {
            let start = self.buffer.len();
            self.buffer.push_str(text);
            self.released = match self.first_match(start) {
                Some((index, at)) => {
                    self.stopped = Some(index);
                    self.buffer.truncate(at);
                    at
                }
                None if last => {
                    self.rewind();
                    self.buffer.len()
                }
                None => self.buffer.len() - self.held_bytes(),
            };
        }
        StreamEvent { text: &self.buffer[..self.released], stopped: self.stopped }
    }

    /// Feeds the buffer from `start` on to the matchers; the winning stop and where it begins.
    fn first_match(&mut self, start: usize) -> Option<(usize, usize)> {
        for (at, &byte) in self.buffer.as_bytes().iter().enumerate().skip(start) {
            let mut winner: Option<(usize, usize)> = None;
            for (index, stop) in self.stops.iter_mut().enumerate() {
                let len = stop.bytes.len();
                if stop.step(byte) && winner.is_none_or(|(_, longest)| len > longest) {
                    winner = Some((index, len));
                }
            }
            if let Some((index, len)) = winner {
                return Some((index, at + 1 - len));
            }
        }
        None
    }

    /// Length of the text held back, in bytes: less than the longest stop string.
    pub fn held_bytes(&self) -> usize {
        self.stops.iter().map(|stop| stop.matched).max().filter(|_| self.stopped.is_none()).unwrap_or(0)
    }

    /// Which stop string ended the text, if one did.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Forgets all text and any stop; keeps the stop strings.
    pub fn reset(&mut self) {
        self.rewind();
        self.buffer.clear();
        self.released = 0;
        self.stopped = None;
    }

    fn rewind(&mut self) {
        for stop in &mut self.stops {
            stop.matched = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut stops = StopStrings::new(stops.iter().copied()).unwrap();
        let mut out: Vec<_> = pieces.iter().map(|piece| stops.push(piece).text.to_owned()).collect();
        let end = stops.finish();
        out.push(end.text.to_owned());
        let stopped = end.stopped;
        assert_eq!(stopped, stops.stopped());
        (out, stopped)
    }

    #[test]
    fn empty_stop_is_refused_by_position() {
        assert_eq!(StopStrings::new(["a", ""]).unwrap_err(), TextError::EmptyStop { index: 1 });
    }

    #[test]
    fn without_stops_text_passes_at_once() {
        assert_eq!(run(&[], &["a", "", "b"]), (vec!["a".into(), "".into(), "b".into(), "".into()], None));
    }

    #[test]
    fn holds_a_possible_start_and_releases_it() {
        assert_eq!(
            run(&["STOP"], &["a ST", "A", "S", "TO"]),
            (vec!["a ".into(), "STA".into(), "".into(), "".into(), "STO".into()], None)
        );
    }

    #[test]
    fn match_over_three_pieces_gives_the_text_before() {
        assert_eq!(
            run(&["STOP"], &["a S", "TO", "P b", "c"]),
            (vec!["a ".into(), "".into(), "".into(), "".into(), "".into()], Some(0))
        );
    }

    #[test]
    fn overlapping_start_falls_back_to_the_border() {
        assert_eq!(
            run(&["aab"], &["aa", "a", "b"]),
            (vec!["".into(), "a".into(), "".into(), "".into()], Some(0))
        );
    }

    #[test]
    fn first_complete_wins_then_longest_then_first_listed() {
        assert_eq!(run(&["abcd", "bc"], &["abcd"]), (vec!["a".into(), "".into()], Some(1)));
        assert_eq!(run(&["c", "abc", "bc"], &["xabc"]), (vec!["x".into(), "".into()], Some(1)));
        assert_eq!(run(&["no", "c", "c"], &["abc"]), (vec!["ab".into(), "".into()], Some(1)));
    }

    #[test]
    fn stops_of_many_bytes_per_character() {
        assert_eq!(
            run(&["é🦀"], &["xé", "é", "🦀y"]),
            (vec!["x".into(), "é".into(), "".into(), "".into()], Some(0))
        );
    }

    #[test]
    fn reset_starts_anew_and_finish_forgets_a_half_match() {
        let mut stops = StopStrings::new(["ab"]).unwrap();
        assert_eq!(stops.push("xab").stopped, Some(0));
        assert_eq!(stops.push("more"), StreamEvent { text: "", stopped: Some(0) });
        stops.reset();
        assert_eq!(stops.push("xa"), StreamEvent { text: "x", stopped: None });
        assert_eq!(stops.held_bytes(), 1);
        assert_eq!(stops.finish().text, "a");
        assert_eq!(stops.push("b"), StreamEvent { text: "b", stopped: None });
    }

    /// The rule, on the whole text: the smallest end at which a stop ends, there the longest.
    fn naive(stops: &[String], text: &str) -> (String, Option<usize>) {
        for end in 0..=text.len() {
            let mut winner: Option<usize> = None;
            for (index, stop) in stops.iter().enumerate() {
                let ends = text.as_bytes()[..end].ends_with(stop.as_bytes());
                if ends && winner.is_none_or(|w| stop.len() > stops[w].len()) {
                    winner = Some(index);
                }
            }
            if let Some(index) = winner {
                return (text[..end - stops[index].len()].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    /// Length of the longest end of the text that starts some stop string.
    fn longest_start(stops: &[String], text: &str) -> usize {
        let starts =
            |n: &usize| stops.iter().any(|s| s.as_bytes().starts_with(&text.as_bytes()[text.len() - n..]));
        (0..=text.len()).rev().find(starts).unwrap_or(0)
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            rng_seed: proptest::test_runner::RngSeed::Fixed(2),
            ..ProptestConfig::with_cases(1024)
        })]

        #[test]
        fn any_split_agrees_with_a_search_of_the_whole(
            stops in prop::collection::vec("[abé]{1,5}", 0..4),
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        ) {
            let mut matcher = StopStrings::new(stops.clone()).unwrap();
            let (mut out, mut seen) = (String::new(), String::new());
            for piece in &pieces {
                seen.push_str(piece);
                let event = matcher.push(piece);
                out.push_str(event.text);
                if event.stopped.is_some() {
                    break;
                }
                // Holds exactly what it must: no leak, and no text kept waiting.
                prop_assert_eq!(seen.len() - out.len(), longest_start(&stops, &seen));
            }
            let event = matcher.finish();
            out.push_str(event.text);
            prop_assert_eq!((out, event.stopped), naive(&stops, &pieces.concat()));
        }
    }
}
