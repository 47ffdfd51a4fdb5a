//! How one block of each type lies in memory, and what its bits mean.
//!
//! Every block has `quants`, the small integers in the order of the weights, and `decode`, the weights. Both
//! the dots and the decoders read the bits through `quants`. The diagrams show bytes from left to right, low
//! address first; `lo` and `hi` are the low and high four bits of a byte.

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{QK, QK_K};
use crate::WeightType;

/// The sixteen values of IQ4_NL: finer around zero, where weights are dense.
pub const IQ4_NL_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The sixteen values of the 4-bit float E2M1, doubled so that they are whole.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

const _: () = {
    assert!(size_of::<BlockQ4_0>() == WeightType::Q4_0.block_bytes());
    assert!(size_of::<BlockQ4_1>() == WeightType::Q4_1.block_bytes());
    assert!(size_of::<BlockQ5_0>() == WeightType::Q5_0.block_bytes());
    assert!(size_of::<BlockQ5_1>() == WeightType::Q5_1.block_bytes());
    assert!(size_of::<BlockQ8_0>() == WeightType::Q8_0.block_bytes());
    assert!(size_of::<BlockQ2K>() == WeightType::Q2_K.block_bytes());
    assert!(size_of::<BlockQ3K>() == WeightType::Q3_K.block_bytes());
    assert!(size_of::<BlockQ4K>() == WeightType::Q4_K.block_bytes());
    assert!(size_of::<BlockQ5K>() == WeightType::Q5_K.block_bytes());
    assert!(size_of::<BlockQ6K>() == WeightType::Q6_K.block_bytes());
    assert!(size_of::<BlockIq4Nl>() == WeightType::IQ4_NL.block_bytes());
    assert!(size_of::<BlockMxfp4>() == WeightType::MXFP4.block_bytes());
    // Weight bytes are aligned to 2, so a cast must not ask for more.
    assert!(align_of::<BlockQ4_0>() == 2 && align_of::<BlockQ6K>() == 2 && align_of::<BlockMxfp4>() == 1);
    assert!(QK == WeightType::Q4_0.block_len() && QK_K == WeightType::Q4_K.block_len());
};

/// 32 weights of 4 bits around zero, one scale.
///
/// ```text
/// byte  0    2                        18
///       | d  | qs[0] … qs[15]          |     lo of qs[j]: weight j, hi: weight j + 16
/// ```
/// `w = d · (q − 8)`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ4_0 {
    /// Scale.
    pub d: f16,
    /// Two weights a byte.
    pub qs: [u8; 16],
}

/// 32 weights of 4 bits above a minimum.
///
/// ```text
/// byte  0    2    4                        20
///       | d  | m  | qs[0] … qs[15]          |     lo of qs[j]: weight j, hi: weight j + 16
/// ```
/// `w = d · q + m`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ4_1 {
    /// Scale.
    pub d: f16,
    /// Minimum.
    pub m: f16,
    /// Two weights a byte.
    pub qs: [u8; 16],
}

/// 32 weights of 5 bits around zero, one scale.
///
/// ```text
/// byte  0    2         6                        22
///       | d  | qh      | qs[0] … qs[15]          |     lo of qs[j]: weight j, hi: weight j + 16
/// ```
/// Bit i of `qh`, a little-endian u32, is the fifth bit of weight i. `w = d · (q − 16)`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ5_0 {
    /// Scale.
    pub d: f16,
    /// Fifth bits.
    pub qh: [u8; 4],
    /// Low four bits, two weights a byte.
    pub qs: [u8; 16],
}

/// 32 weights of 5 bits above a minimum.
///
/// ```text
/// byte  0    2    4         8                        24
///       | d  | m  | qh      | qs[0] … qs[15]          |     lo of qs[j]: weight j, hi: weight j + 16
/// ```
/// Bit i of `qh`, a little-endian u32, is the fifth bit of weight i. `w = d · q + m`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ5_1 {
    /// Scale.
    pub d: f16,
    /// Minimum.
    pub m: f16,
    /// Fifth bits.
    pub qh: [u8; 4],
    /// Low four bits, two weights a byte.
    pub qs: [u8; 16],
}

/// 32 weights of 8 bits, one scale. Also what activations become before they meet most 32-weight types.
///
/// ```text
/// byte  0    2                        34
///       | d  | qs[0] … qs[31]          |     one signed byte a weight
/// ```
/// `w = d · q`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ8_0 {
    /// Scale.
    pub d: f16,
    /// One weight a byte.
    pub qs: [i8; 32],
}

/// 256 weights of 2 bits in 16 groups, each with a 4-bit scale and a 4-bit minimum.
///
/// ```text
/// byte  0                 16                    80   82     84
///       | scales[0 … 15]  | qs[0] … qs[63]      | d  | dmin |
/// ```
/// `scales[g]`: lo is the scale, hi the minimum of group g (weights 16g to 16g + 15). Weight `128a + 32b + c`
/// (b < 4, c < 32) is bits 2b and 2b + 1 of `qs[32a + c]`. `w = (d · scale) · q − dmin · min`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ2K {
    /// Scale and minimum of each group.
    pub scales: [u8; 16],
    /// Four weights a byte.
    pub qs: [u8; 64],
    /// Scale of the scales.
    pub d: f16,
    /// Scale of the minima.
    pub dmin: f16,
}

/// 256 weights of 3 bits around zero in 16 groups, each with a 6-bit scale.
///
/// ```text
/// byte  0                 32                    96              108  110
///       | hmask[0 … 31]   | qs[0] … qs[63]      | scales[0…11]  | d  |
/// ```
/// Weight `128a + 32b + c` has its low bits at 2b and 2b + 1 of `qs[32a + c]` and its third at bit 4a + b of
/// `hmask[c]`. The scale of group g has its low four bits in `scales[g % 8]` (lo for g < 8, else hi) and its high
/// two at bit 2·(g / 4) of `scales[8 + g % 4]`. `w = (d · (scale − 32)) · (q − 4)`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ3K {
    /// Third bits.
    pub hmask: [u8; 32],
    /// Low two bits, four weights a byte.
    pub qs: [u8; 64],
    /// Sixteen 6-bit scales.
    pub scales: [u8; 12],
    /// Scale of the scales.
    pub d: f16,
}

/// 256 weights of 4 bits in 8 groups of 32, each with a 6-bit scale and a 6-bit minimum.
///
/// ```text
/// byte  0    2      4               16                      144
///       | d  | dmin | scales[0…11]  | qs[0] … qs[127]        |
///
/// scales[j],     j < 4    bits 0–5: scale j       bits 6–7: high bits of scale j + 4
/// scales[4 + j], j < 4    bits 0–5: minimum j     bits 6–7: high bits of minimum j + 4
/// scales[8 + j], j < 4    lo: low bits of scale j + 4     hi: low bits of minimum j + 4
/// ```
/// Weight `64a + c` (c < 32) is lo of `qs[32a + c]`, weight `64a + 32 + c` is hi. `w = (d · scale) · q − dmin · min`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ4K {
    /// Scale of the scales.
    pub d: f16,
    /// Scale of the minima.
    pub dmin: f16,
    /// Eight 6-bit scales and eight 6-bit minima.
    pub scales: [u8; 12],
    /// Two weights a byte.
    pub qs: [u8; 128],
}

/// 256 weights of 5 bits in 8 groups of 32; scales as in [`BlockQ4K`].
///
/// ```text
/// byte  0    2      4               16               48                      176
///       | d  | dmin | scales[0…11]  | qh[0 … 31]     | qs[0] … qs[127]        |
/// ```
/// Low bits as in [`BlockQ4K`]; the fifth bit of weight `32g + c` is bit g of `qh[c]`.
/// `w = (d · scale) · q − dmin · min`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ5K {
    /// Scale of the scales.
    pub d: f16,
    /// Scale of the minima.
    pub dmin: f16,
    /// Eight 6-bit scales and eight 6-bit minima.
    pub scales: [u8; 12],
    /// Fifth bits.
    pub qh: [u8; 32],
    /// Low four bits, two weights a byte.
    pub qs: [u8; 128],
}

/// 256 weights of 6 bits around zero in 16 groups, each with an 8-bit scale.
///
/// ```text
/// byte  0                      128                 192              208  210
///       | ql[0] … ql[127]       | qh[0] … qh[63]   | scales[0…15]   | d  |
/// ```
/// Weight `128a + 32b + c` (b < 4, c < 32): low bits in `ql[64a + 32·(b % 2) + c]` (lo for b < 2, else hi), high
/// bits at 2b and 2b + 1 of `qh[32a + c]`. `w = (d · scale) · (q − 32)`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockQ6K {
    /// Low four bits, two weights a byte.
    pub ql: [u8; 128],
    /// High two bits, four weights a byte.
    pub qh: [u8; 64],
    /// Scale of each group.
    pub scales: [i8; 16],
    /// Scale of the scales.
    pub d: f16,
}

/// 32 weights of 4 bits that index [`IQ4_NL_VALUES`], one scale.
///
/// ```text
/// byte  0    2                        18
///       | d  | qs[0] … qs[15]          |     lo of qs[j]: weight j, hi: weight j + 16
/// ```
/// `w = d · IQ4_NL_VALUES[q]`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockIq4Nl {
    /// Scale.
    pub d: f16,
    /// Two weights a byte.
    pub qs: [u8; 16],
}

/// 32 weights that are 4-bit floats (E2M1), one power of two as scale.
///
/// ```text
/// byte  0    1                        17
///       | e  | qs[0] … qs[15]          |     lo of qs[j]: weight j, hi: weight j + 16
/// ```
/// `w = 2^(e − 128) · MXFP4_VALUES[q]`; the values are doubled, the scale is halved.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct BlockMxfp4 {
    /// Exponent of the scale, biased by 127.
    pub e: u8,
    /// Two weights a byte.
    pub qs: [u8; 16],
}

/// The 4-bit numbers of a 32-weight block: all low halves, then all high ones.
#[inline]
fn nibbles(qs: &[u8; 16]) -> [u8; QK] {
    let mut q = [0; QK];
    for j in 0..16 {
        q[j] = qs[j] & 15;
        q[j + 16] = qs[j] >> 4;
    }
    q
}

/// The 5-bit numbers of a 32-weight block.
#[inline]
fn nibbles_and_bit(qs: &[u8; 16], qh: [u8; 4]) -> [u8; QK] {
    let high = u32::from_le_bytes(qh);
    let mut q = nibbles(qs);
    for i in 0..QK {
        q[i] |= ((high >> i) as u8 & 1) << 4;
    }
    q
}

/// The eight scales and eight minima that [`BlockQ4K`] and [`BlockQ5K`] pack into twelve bytes.
#[inline]
fn unpack_scales_mins(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for j in 0..4 {
        let (s, m, low) = (packed[j], packed[j + 4], packed[j + 8]);
        scales[j] = s & 63;
        mins[j] = m & 63;
        scales[j + 4] = low & 15 | s >> 6 << 4;
        mins[j + 4] = low >> 4 | m >> 6 << 4;
    }
    (scales, mins)
}

impl BlockQ4_0 {
    /// The integers −8 to 7, so that `w = d · q`.
    #[inline]
    pub fn quants(&self) -> [i8; QK] {
        nibbles(&self.qs).map(|q| q as i8 - 8)
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK]) {
        let d = self.d.to_f32();
        *out = self.quants().map(|q| f32::from(q) * d);
    }
}

impl BlockQ4_1 {
    /// The integers 0 to 15, so that `w = d · q + m`.
    #[inline]
    pub fn quants(&self) -> [i8; QK] {
        nibbles(&self.qs).map(|q| q as i8)
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        *out = self.quants().map(|q| f32::from(q) * d + m);
    }
}

impl BlockQ5_0 {
    /// The integers −16 to 15, so that `w = d · q`.
    #[inline]
    pub fn quants(&self) -> [i8; QK] {
        nibbles_and_bit(&self.qs, self.qh).map(|q| q as i8 - 16)
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK]) {
        let d = self.d.to_f32();
        *out = self.quants().map(|q| f32::from(q) * d);
    }
}

impl BlockQ5_1 {
    /// The integers 0 to 31, so that `w = d · q + m`.
    #[inline]
    pub fn quants(&self) -> [i8; QK] {
        nibbles_and_bit(&self.qs, self.qh).map(|q| q as i8)
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        *out = self.quants().map(|q| f32::from(q) * d + m);
    }
}

impl BlockQ8_0 {
    /// The integers −128 to 127, so that `w = d · q`.
    #[inline]
    pub fn quants(&self) -> [i8; QK] {
        self.qs
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK]) {
        let d = self.d.to_f32();
        *out = self.qs.map(|q| f32::from(q) * d);
    }
}

impl BlockQ2K {
    /// The integers 0 to 3.
    #[inline]
    pub fn quants(&self) -> [i8; QK_K] {
        std::array::from_fn(|i| {
            let (a, b, c) = (i / 128, i / 32 % 4, i % 32);
            (self.qs[32 * a + c] >> (2 * b) & 3) as i8
        })
    }

    /// Scales and minima of the 16 groups, 0 to 15 each.
    #[inline]
    pub fn scales_mins(&self) -> ([u8; 16], [u8; 16]) {
        (self.scales.map(|s| s & 15), self.scales.map(|s| s >> 4))
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK_K]) {
        let (d, dmin, q) = (self.d.to_f32(), self.dmin.to_f32(), self.quants());
        let (scales, mins) = self.scales_mins();
        for g in 0..16 {
            let (scale, min) = (d * f32::from(scales[g]), dmin * f32::from(mins[g]));
            for i in 16 * g..16 * g + 16 {
                out[i] = scale * f32::from(q[i]) - min;
            }
        }
    }
}

impl BlockQ3K {
    /// The integers −4 to 3.
    #[inline]
    pub fn quants(&self) -> [i8; QK_K] {
        std::array::from_fn(|i| {
            let (a, b, c) = (i / 128, i / 32 % 4, i % 32);
            let low = self.qs[32 * a + c] >> (2 * b) & 3;
            let high = self.hmask[c] >> (4 * a + b) & 1;
            (low | high << 2) as i8 - 4
        })
    }

    /// Scales of the 16 groups, −32 to 31.
    #[inline]
    pub fn group_scales(&self) -> [i8; 16] {
        std::array::from_fn(|g| {
            let low = self.scales[g % 8] >> (4 * (g / 8)) & 15;
            let high = self.scales[8 + g % 4] >> (2 * (g / 4)) & 3;
            (low | high << 4) as i8 - 32
        })
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK_K]) {
        decode_groups(self.d, &self.group_scales(), &self.quants(), out);
    }
}

impl BlockQ4K {
    /// The integers 0 to 15.
    #[inline]
    pub fn quants(&self) -> [i8; QK_K] {
        std::array::from_fn(|i| {
            let (a, b, c) = (i / 64, i / 32 % 2, i % 32);
            (self.qs[32 * a + c] >> (4 * b) & 15) as i8
        })
    }

    /// Scales and minima of the 8 groups, 0 to 63 each.
    #[inline]
    pub fn scales_mins(&self) -> ([u8; 8], [u8; 8]) {
        unpack_scales_mins(&self.scales)
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK_K]) {
        decode_groups_with_min(self.d, self.dmin, self.scales_mins(), &self.quants(), out);
    }
}

impl BlockQ5K {
    /// The integers 0 to 31.
    #[inline]
    pub fn quants(&self) -> [i8; QK_K] {
        std::array::from_fn(|i| {
            let (a, b, c) = (i / 64, i / 32 % 2, i % 32);
            let low = self.qs[32 * a + c] >> (4 * b) & 15;
            let high = self.qh[c] >> (2 * a + b) & 1;
            (low | high << 4) as i8
        })
    }

    /// Scales and minima of the 8 groups, 0 to 63 each.
    #[inline]
    pub fn scales_mins(&self) -> ([u8; 8], [u8; 8]) {
        unpack_scales_mins(&self.scales)
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK_K]) {
        decode_groups_with_min(self.d, self.dmin, self.scales_mins(), &self.quants(), out);
    }
}

impl BlockQ6K {
    /// The integers −32 to 31.
    #[inline]
    pub fn quants(&self) -> [i8; QK_K] {
        std::array::from_fn(|i| {
            let (a, b, c) = (i / 128, i / 32 % 4, i % 32);
            let low = self.ql[64 * a + 32 * (b % 2) + c] >> (4 * (b / 2)) & 15;
            let high = self.qh[32 * a + c] >> (2 * b) & 3;
            (low | high << 4) as i8 - 32
        })
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK_K]) {
        decode_groups(self.d, &self.scales, &self.quants(), out);
    }
}

impl BlockIq4Nl {
    /// The integers −127 to 113, so that `w = d · q`.
    #[inline]
    pub fn quants(&self) -> [i8; QK] {
        nibbles(&self.qs).map(|q| IQ4_NL_VALUES[usize::from(q)])
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK]) {
        let d = self.d.to_f32();
        *out = self.quants().map(|q| f32::from(q) * d);
    }
}

impl BlockMxfp4 {
    /// The integers −12 to 12, so that `w = scale · q`.
    #[inline]
    pub fn quants(&self) -> [i8; QK] {
        nibbles(&self.qs).map(|q| MXFP4_VALUES[usize::from(q)])
    }

    /// `2^(e − 128)`.
    ///
    /// The two smallest exponents give subnormal numbers. 255, which the standard calls not a number, is
    /// 2^127 here as in ggml.
    #[inline]
    pub fn scale(&self) -> f32 {
        f32::from_bits(match self.e {
            e @ 0..2 => 0x0020_0000 << e,
            e => u32::from(e - 1) << 23,
        })
    }

    /// The weights.
    #[inline]
    pub fn decode(&self, out: &mut [f32; QK]) {
        let d = self.scale();
        *out = self.quants().map(|q| f32::from(q) * d);
    }
}

/// `w = (d · scale) · q` in 16 groups.
#[inline]
fn decode_groups(d: f16, scales: &[i8; 16], q: &[i8; QK_K], out: &mut [f32; QK_K]) {
    let d = d.to_f32();
    for g in 0..16 {
        let scale = d * f32::from(scales[g]);
        for i in 16 * g..16 * g + 16 {
            out[i] = scale * f32::from(q[i]);
        }
    }
}

/// `w = (d · scale) · q − dmin · min` in 8 groups.
#[inline]
fn decode_groups_with_min(
    d: f16,
    dmin: f16,
    (scales, mins): ([u8; 8], [u8; 8]),
    q: &[i8; QK_K],
    out: &mut [f32; QK_K],
) {
    let (d, dmin) = (d.to_f32(), dmin.to_f32());
    for g in 0..8 {
        let (scale, min) = (d * f32::from(scales[g]), dmin * f32::from(mins[g]));
        for i in 32 * g..32 * g + 32 {
            out[i] = scale * f32::from(q[i]) - min;
        }
    }
}
