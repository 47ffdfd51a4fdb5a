//! Block formats of quantised weights: layout, scalar decoding and encoding, activation rounding, integer dots.
//!
//! A quantised row is a sequence of blocks, each a few scales and 32 or 256 small integers. This module is the
//! one definition of them, shared by the reader, the writers and the kernels:
//!
//! - the layouts, [`BlockQ4_0`] and its siblings, which bytes are cast to with bytemuck;
//! - [`decode_row`] and [`encode_row`], between bytes of any type and f32;
//! - the rounding that vectors go through before they meet quantised weights ([`quantize_q8_0`],
//!   [`quantize_q8_1`], [`quantize_q8_k`], [`round_f16`]), and which of them belongs to which type
//!   ([`ActivationType`]);
//! - one readable dot product per type ([`dot_q4_0_q8_0`] and its siblings), the slow twin of the fast kernels.
//!
//! Nothing here allocates. Files are little-endian, and so are the hosts that this crate supports.

mod activation;
mod convert;
mod dot;
mod layout;

pub use activation::{
    ActivationType, BlockQ8_1, BlockQ8K, quantize_q8_0, quantize_q8_1, quantize_q8_k, round_f16,
};
pub use convert::{EncodeError, decode_row, encode_row};
pub use dot::{
    dot_iq4_nl_q8_0, dot_mxfp4_q8_0, dot_q2_k_q8_k, dot_q3_k_q8_k, dot_q4_0_q8_0, dot_q4_1_q8_1,
    dot_q4_k_q8_k, dot_q5_0_q8_0, dot_q5_1_q8_1, dot_q5_k_q8_k, dot_q6_k_q8_k, dot_q8_0_q8_0,
};
pub use layout::{
    BlockIq4Nl, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1,
    BlockQ5K, BlockQ6K, BlockQ8_0, IQ4_NL_VALUES, MXFP4_VALUES,
};

/// Weights in one block of the types that end in `_0`, `_1`, of IQ4_NL and of MXFP4.
pub const QK: usize = 32;

/// Weights in one block of the K types.
pub const QK_K: usize = 256;

#[cfg(target_endian = "big")]
compile_error!("blocks are cast from little-endian files without swapping bytes");
