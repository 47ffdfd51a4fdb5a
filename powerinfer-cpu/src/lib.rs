//! Placeholder text until the crate is written.
