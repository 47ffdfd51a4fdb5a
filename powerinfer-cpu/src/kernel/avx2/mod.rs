//! Kernels for AVX2 with FMA and F16C.
//!
//! Arithmetic intrinsics are safe inside a function with the right target features, and bytes become
//! vectors by value through bytemuck; what is left unsafe is one call from each safe entry, proven by the
//! [`Avx2`](crate::Avx2) value (LEVEL-DETECTED).

pub(super) mod attention;
pub(super) mod axpy;
pub(super) mod dot;
pub(super) mod gate_copy;
mod load;
