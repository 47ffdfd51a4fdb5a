//! Kernels for AVX-512 with BW, DQ, VL and VNNI. What has no kernel here runs the one of AVX2.
//!
//! As in `avx2`, what is unsafe is one call from each safe entry, proven by the [`Avx512`](crate::Avx512) value
//! (LEVEL-DETECTED).

pub(super) mod attention;
pub(super) mod axpy;
pub(super) mod float;
pub(super) mod gate_copy;
pub(super) mod int8;
pub(super) mod kquant;
mod load;
pub(super) mod scaled;
