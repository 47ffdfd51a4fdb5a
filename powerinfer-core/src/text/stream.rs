//! Both stages in one: bytes in, text out until a stop string.

use super::{StopStrings, StreamEvent, TextError, Utf8Stream};

/// The text of one generation: whole characters, cut at the first stop string.
///
/// ```
/// use powerinfer_core::text::TextStream;
///
/// let mut stream = TextStream::new(["END"])?;
/// assert_eq!(stream.push(b"caf\xc3").text, "caf");
/// assert_eq!(stream.push(b"\xa9 E").text, "é ");
/// assert_eq!(stream.push(b"ND").stopped, Some(0));
/// # Ok::<(), powerinfer_core::text::TextError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    utf8: Utf8Stream,
    stops: StopStrings,
}

impl TextStream {
    /// A stream that ends at any of these stop strings; the list may be empty.
    ///
    /// # Errors
    ///
    /// [`TextError::EmptyStop`] with the position of the first empty string.
    pub fn new<I>(stops: I) -> Result<Self, TextError>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        Ok(Self { utf8: Utf8Stream::new(), stops: StopStrings::new(stops)? })
    }

    /// Takes the bytes of the next token and returns the text that is certain now.
    pub fn push(&mut self, bytes: &[u8]) -> StreamEvent<'_> {
        self.stops.push(self.utf8.push(bytes))
    }

    /// Ends the text and lets out all that is held, half a character as U+FFFD. A stop found before
    /// stays reported.
    pub fn finish(&mut self) -> StreamEvent<'_> {
        self.stops.advance(self.utf8.finish(), true)
    }

    /// Which stop string ended the text, if one did.
    pub fn stopped(&self) -> Option<usize> {
        self.stops.stopped()
    }

    /// Starts a new text with the same stop strings.
    pub fn reset(&mut self) {
        self.utf8.reset();
        self.stops.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_string_split_inside_a_character() {
        let mut stream = TextStream::new(["né"]).unwrap();
        assert_eq!(stream.push(b"fi n\xc3").text, "fi ");
        let event = stream.push(b"\xa9 x");
        assert_eq!((event.text, event.stopped), ("", Some(0)));
        assert_eq!(stream.finish(), StreamEvent { text: "", stopped: Some(0) });
    }

    #[test]
    fn finish_lets_out_both_kinds_of_held_text_in_order() {
        let mut stream = TextStream::new(["STOP"]).unwrap();
        assert_eq!(stream.push(b"a ST\xf0\x9f").text, "a ");
        assert_eq!(stream.finish(), StreamEvent { text: "ST\u{fffd}", stopped: None });
    }

    #[test]
    fn reset_forgets_both_stages() {
        let mut stream = TextStream::new(["ab"]).unwrap();
        stream.push(b"a\xc3");
        stream.reset();
        assert_eq!(stream.push(b"b").text, "b");
        assert_eq!(stream.push(b"ab").stopped, Some(0));
        stream.reset();
        assert_eq!(stream.stopped(), None);
        assert_eq!(stream.push(b"c").text, "c");
    }
}
