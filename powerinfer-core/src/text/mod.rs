//! From token bytes to streamed text: incomplete UTF-8 and stop strings.
//!
//! A token is a run of bytes, not of characters: one character may come in several tokens, and so may a
//! stop string. [`Utf8Stream`] lets out only whole characters, [`StopStrings`] only text that can no longer
//! be part of a stop string, and [`TextStream`] is the one behind the other. How the bytes are split into
//! tokens never changes the text that comes out in the end.
//!
//! Buffers are reused: once they have grown to the longest piece of text, a push does not allocate.

mod stop;
mod stream;
mod utf8;

pub use stop::{StopStrings, StreamEvent, TextError};
pub use stream::TextStream;
pub use utf8::Utf8Stream;
