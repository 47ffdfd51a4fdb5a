//! Chat templates from model files.
