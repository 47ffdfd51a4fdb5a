//! Kernels for NEON with the dot product instructions of 64-bit Arm.
//!
//! Arithmetic intrinsics are safe inside a function with the right target features, and bytes become vectors by value
//! through bytemuck; what is left unsafe is one call from each safe entry and one instruction that has no stable
//! intrinsic, all proven by the [`Neon`](crate::Neon) value (LEVEL-DETECTED).

pub(super) mod attention;
pub(super) mod axpy;
pub(super) mod dot;
pub(super) mod gate_copy;
mod load;
