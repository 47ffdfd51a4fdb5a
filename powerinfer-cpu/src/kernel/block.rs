//! Temporary copies of the block structs.
use bytemuck::{Pod, Zeroable};
use half::f16;

macro_rules! block { ($name:ident { $($f:ident : $t:ty),* }) => {
    #[derive(Clone, Copy, Debug, Pod, Zeroable)] #[repr(C)]
    pub(crate) struct $name { $(pub(crate) $f: $t),* }
} }
block!(BlockQ8_0 { d: f16, qs: [i8; 32] });
block!(BlockQ4_0 { d: f16, qs: [u8; 16] });
block!(BlockQ4_1 { d: f16, m: f16, qs: [u8; 16] });
block!(BlockQ5_0 { d: f16, qh: [u8; 4], qs: [u8; 16] });
block!(BlockQ5_1 { d: f16, m: f16, qh: [u8; 4], qs: [u8; 16] });
block!(BlockIQ4_NL { d: f16, qs: [u8; 16] });
block!(BlockQ4_K { d: f16, dmin: f16, scales: [u8; 12], qs: [u8; 128] });
block!(BlockQ5_K { d: f16, dmin: f16, scales: [u8; 12], qh: [u8; 32], qs: [u8; 128] });
block!(BlockQ6_K { ql: [u8; 128], qh: [u8; 64], scales: [i8; 16], d: f16 });

pub(crate) const IQ4_NL_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The eight 6-bit scales and the eight 6-bit offsets of a Q4_K or Q5_K block.
///
/// ```text
/// byte 0..4    scale 0..4 | high 2 bits of scale 4..8
/// byte 4..8    offset 0..4 | high 2 bits of offset 4..8
/// byte 8..12   low 4 bits of scale 4..8 | low 4 bits of offset 4..8
/// ```
#[inline]
pub(crate) fn k_scales(s: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let mut scales = [0; 8];
    let mut offsets = [0; 8];
    for i in 0..4 {
        scales[i] = s[i] & 63;
        offsets[i] = s[i + 4] & 63;
        scales[i + 4] = (s[i + 8] & 15) | (s[i] >> 6) << 4;
        offsets[i + 4] = s[i + 8] >> 4 | (s[i + 4] >> 6) << 4;
    }
    (scales, offsets)
}
