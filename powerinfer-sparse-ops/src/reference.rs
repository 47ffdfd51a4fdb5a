//! The reference backend.
