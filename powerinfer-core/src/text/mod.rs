//! From token bytes to streamed text: incomplete UTF-8 and stop strings.
