//! The 2-bit copy of a gate: 64 codes in 16 bytes, products by fours in 32 bits.

use std::arch::aarch64::*;
use std::ops::Range;

use powerinfer_sparse_ops::GateCopy;

use super::load::{dot_4, first, load_i8x16, load_u8x16};
use crate::kernel::gate_copy::{CodeRows, GateToken, active_bits};
use crate::level::Neon;

pub(in crate::kernel) fn word<const T: usize>(
    _: Neon,
    p: &GateCopy,
    rows: CodeRows<'_>,
    neurons: Range<usize>,
    tokens: [GateToken<'_>; T],
) -> [u64; T] {
    // SAFETY: LEVEL-DETECTED.
    unsafe { word_inner(p, rows, neurons, tokens) }
}

#[target_feature(enable = "neon,dotprod")]
fn word_inner<const T: usize>(
    p: &GateCopy,
    rows: CodeRows<'_>,
    neurons: Range<usize>,
    tokens: [GateToken<'_>; T],
) -> [u64; T] {
    let mut inputs: [&[[i8; 256]]; T] = [&[]; T];
    for t in 0..T {
        inputs[t] = tokens[t].q;
    }
    let mut dots = [[0; 64]; T];
    for (i, neuron) in neurons.clone().enumerate() {
        let sums = row_dots(rows.row(neuron), inputs);
        for t in 0..T {
            dots[t][i] = sums[t];
        }
    }
    active_bits(p, neurons, &dots, tokens)
}

#[target_feature(enable = "neon,dotprod")]
#[inline]
fn row_dots<const T: usize>(row: &[[u8; 64]], inputs: [&[[i8; 256]]; T]) -> [i32; T] {
    let inputs = first(inputs, row.len());
    let three = vdupq_n_u8(3);
    let mut sums = [vdupq_n_s32(0); T];
    for (g, group) in row.iter().enumerate() {
        for (quarter, codes) in group.as_chunks::<16>().0.iter().enumerate() {
            let codes = load_u8x16(codes);
            let u = [
                vreinterpretq_s8_u8(vandq_u8(codes, three)),
                vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8::<2>(codes), three)),
                vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8::<4>(codes), three)),
                vreinterpretq_s8_u8(vshrq_n_u8::<6>(codes)),
            ];
            for t in 0..T {
                let q = inputs[t][g].as_chunks::<16>().0;
                for k in 0..4 {
                    sums[t] = dot_4(sums[t], u[k], load_i8x16(&q[4 * k + quarter]));
                }
            }
        }
    }
    let mut dots = [0; T];
    for t in 0..T {
        dots[t] = vaddvq_s32(sums[t]);
    }
    dots
}
