//! Sums with a factor for each column.

use std::arch::x86_64::*;

use crate::level::Avx512;

/// `sum = fma(scale, part, sum)`, column by column.
pub(in crate::kernel) fn add_scaled<const N: usize>(
    _: Avx512,
    scale: &[f32; N],
    part: &[f32; N],
    sum: &mut [f32; N],
) {
    // SAFETY: LEVEL-DETECTED.
    unsafe { add_scaled_inner(scale, part, sum) }
}

#[target_feature(enable = "avx512f,fma")]
fn add_scaled_inner<const N: usize>(scale: &[f32; N], part: &[f32; N], sum: &mut [f32; N]) {
    const { assert!(N.is_multiple_of(16), "whole registers") };
    let (scale, part) = (scale.as_chunks::<16>().0, part.as_chunks::<16>().0);
    for (i, sum) in sum.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let [scale, part, old]: [__m512; 3] = [scale[i], part[i], *sum].map(bytemuck::cast);
        *sum = bytemuck::cast(_mm512_fmadd_ps(scale, part, old));
    }
}
