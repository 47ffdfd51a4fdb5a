//! From text to tokens and back.
