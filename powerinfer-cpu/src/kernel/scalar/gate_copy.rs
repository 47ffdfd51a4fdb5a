//! The 2-bit copy of a gate, one code after the other.

use std::ops::Range;

use powerinfer_sparse_ops::GateCopy;

use crate::kernel::gate_copy::{CodeRows, GateToken, active_bits};

pub(in crate::kernel) fn word<const T: usize>(
    p: &GateCopy,
    rows: CodeRows<'_>,
    neurons: Range<usize>,
    tokens: [GateToken<'_>; T],
) -> [u64; T] {
    let mut dots = [[0; 64]; T];
    for (dots, token) in dots.iter_mut().zip(&tokens) {
        for (neuron, dot) in neurons.clone().zip(dots) {
            *dot = rows.row(neuron).iter().zip(token.q).map(|(codes, q)| group_dot(codes, q)).sum();
        }
    }
    active_bits(p, neurons, &dots, tokens)
}

fn group_dot(codes: &[u8; 64], q: &[i8; 256]) -> i32 {
    let mut dot = 0;
    for (k, q) in q.as_chunks::<64>().0.iter().enumerate() {
        for (&code, &q) in codes.iter().zip(q) {
            dot += i32::from(code >> (2 * k) & 3) * i32::from(q);
        }
    }
    dot
}
