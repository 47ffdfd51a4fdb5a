//! Kernels for AVX-512 with BW, DQ, VL and VNNI. What has no kernel here runs the one of AVX2.
//!
//! As in `avx2`, what is unsafe is one call from each safe entry, proven by the [`Avx512`](crate::Avx512) value
//! (LEVEL-DETECTED).

#[cfg_attr(not(test), expect(dead_code, reason = "matrix products do not use it yet"))]
pub(super) mod int8;
pub(super) mod kquant;
