//! A 2-bit copy of a gate: few bytes that tell which neurons will fire.
//!
//! ```text
//! score_i = scale_i · Σ_j (u_ij − 1.5) · (x_j − mean_j)  +  Σ_o w_io · (x_o − mean_o)
//! ```
//!
//! `j` runs over the columns, `o` over the few that are kept apart because they are much larger than the others and would
//! spoil the scale of every row. A neuron is computed unless its score is below its threshold, which is calibrated
//! and takes in the part of the gate that does not change from token to token.
//!
//! `x − mean` is rounded to 8 bits with one scale a token, so the first sum is one of integers and the same
//! on every machine; the few operations in f32 after it have a fixed order ([`GateCopy::score_from_dot`]).

use std::ops::Range;
use std::sync::Arc;

use half::f16;

use crate::{WeightBytes, WeightMatrix};

/// Columns whose codes share 64 bytes.
const GROUP: usize = 256;

/// Bytes of a whole group.
const GROUP_BYTES: usize = 64;

/// Widest input: integer sums of wider rows would not fit 32 bits.
const MAX_N_EMBD: usize = 1 << 21;

/// Parts that cannot form a [`GateCopy`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GateCopyError {
    /// A part has the wrong number of elements.
    #[error("the {part} of a gate copy should have {expected} elements, got {got}")]
    Length {
        /// Which part.
        part: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// The input is wider than sums of 32 bits allow.
    #[error("a gate copy takes inputs of at most {max} values, got {n_embd}")]
    TooWide {
        /// Input width.
        n_embd: usize,
        /// Largest width.
        max: usize,
    },
    /// The columns kept apart are not in ascending order, or one is no column.
    #[error(
        "the outlier columns of a gate copy should ascend and be below {n_embd}, number {at} is {column}"
    )]
    Outlier {
        /// Place in the list.
        at: usize,
        /// The column there.
        column: u32,
        /// Number of columns.
        n_embd: usize,
    },
    /// A number that is infinite or NaN where it must not be.
    #[error("number {at} of the {part} of a gate copy is {value}")]
    Number {
        /// Which part.
        part: &'static str,
        /// Place in the part.
        at: usize,
        /// The number.
        value: f32,
    },
    /// A weight of the gate that is infinite or NaN, or an outlier too large for F16.
    #[error("`{tensor}` has {value} in row {row}, column {column}, which cannot be copied")]
    Weight {
        /// Tensor name.
        tensor: String,
        /// Row.
        row: usize,
        /// Column.
        column: usize,
        /// The weight.
        value: f32,
    },
}

/// What [`GateCopy::try_new`] puts together.
#[derive(Clone, Debug)]
pub struct GateCopyParts {
    /// Number of neurons.
    pub n_ff: usize,
    /// Width of the input.
    pub n_embd: usize,
    /// [`GateCopy::codes_len`] bytes in the layout of [`GateCopy`]; fastest if they start on a multiple of 64.
    pub codes: WeightBytes,
    /// `[n_ff]`.
    pub scales: Vec<f32>,
    /// `[n_ff]`; −∞ for always, +∞ for never.
    pub thresholds: Vec<f32>,
    /// Columns kept apart, ascending.
    pub outliers: Vec<u32>,
    /// `[n_ff, n_outliers]`.
    pub outlier_weights: Vec<f16>,
    /// Mean of the FFN's normed input, `[n_embd]`.
    pub mean: Vec<f32>,
}

/// A 2-bit copy of a gate with a threshold for each neuron. See the formula in the module.
///
/// # Layout of the codes
/// Row by row. Columns are taken in groups of 256, the last one as wide as what is left. A group of `n` columns
/// takes `m = ceil(n / 4)` bytes; byte `b` holds the codes of the columns `b`, `b + m`, `b + 2m` and `b + 3m` of the
/// group, lowest bits first. Eight columns:
///
/// ```text
///            byte 0               byte 1
/// bits    7 6 5 4 3 2 1 0      7 6 5 4 3 2 1 0
/// column   6   4   2   0        7   5   3   1
/// ```
///
/// So 64 bytes, shifted by 0, 2, 4 and 6 bits, are the codes of 4 times 64 columns in their order. The input is
/// laid out to match ([`GateCopy::quantize`]): 256 values a group, of which the last group uses the first `m` of
/// each 64 and has zeros elsewhere. What is read past the end of a row is therefore multiplied by zero, and a few bytes
/// behind the last row make that read possible for it as well.
#[derive(Clone, Debug)]
pub struct GateCopy {
    parts: GateCopyParts,
    /// Bytes from row to row.
    row_bytes: usize,
}

/// How the integers of [`GateCopy::quantize`] are to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GateInput {
    /// Half of what one step of the integers is worth; NaN if the input has a value that is infinite or NaN.
    pub half_step: f32,
    /// Sum of the integers.
    pub sum: i32,
}

impl GateCopy {
    /// Bytes of the codes of a gate, with those behind the last row.
    pub fn codes_len(n_ff: usize, n_embd: usize) -> usize {
        let overhang = n_embd.div_ceil(GROUP) * GROUP_BYTES - row_bytes(n_embd);
        n_ff * row_bytes(n_embd) + overhang
    }

    /// Checks that the parts fit together.
    ///
    /// # Errors
    /// [`GateCopyError`], naming the first part that does not fit.
    pub fn try_new(parts: GateCopyParts) -> Result<Self, GateCopyError> {
        let (n_ff, n_embd) = (parts.n_ff, parts.n_embd);
        check_width(n_embd)?;
        expect_len("codes", parts.codes.len(), Self::codes_len(n_ff, n_embd))?;
        expect_len("scales", parts.scales.len(), n_ff)?;
        expect_len("mean", parts.mean.len(), n_embd)?;
        expect_len("outlier weights", parts.outlier_weights.len(), n_ff * parts.outliers.len())?;
        check_outliers(&parts.outliers, n_embd)?;
        check_thresholds(&parts.thresholds, n_ff)?;
        check_finite("scales", parts.scales.iter().copied())?;
        check_finite("mean", parts.mean.iter().copied())?;
        check_finite("outlier weights", parts.outlier_weights.iter().map(|w| w.to_f32()))?;
        Ok(Self { row_bytes: row_bytes(n_embd), parts })
    }

    /// Copies a gate: four levels a weight, `±0.5 s` and `±1.5 s`, with the scale `s` of each row chosen for the least
    /// squared error over the columns that are not kept apart. Every threshold is −∞: all neurons are active until
    /// [`GateCopy::with_thresholds`].
    ///
    /// # Shapes
    /// `gate [n_ff, n_embd]`, `mean [n_embd]`.
    ///
    /// # Errors
    /// [`GateCopyError`] if a part does not fit the gate, or a weight is infinite or NaN.
    pub fn from_gate(gate: &WeightMatrix, mean: Vec<f32>, outliers: Vec<u32>) -> Result<Self, GateCopyError> {
        let (n_ff, n_embd) = (gate.n_rows(), gate.n_cols());
        check_width(n_embd)?;
        check_outliers(&outliers, n_embd)?;
        let row_bytes = row_bytes(n_embd);
        let mut codes = vec![Line([0; 64]); Self::codes_len(n_ff, n_embd).div_ceil(64)];
        let code_bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut codes);
        let mut scales = Vec::with_capacity(n_ff);
        let mut outlier_weights = Vec::with_capacity(n_ff * outliers.len());
        let mut row = vec![0.0; n_embd];
        let mut levels = vec![0u8; n_embd];
        for neuron in 0..n_ff {
            gate.decode_row(neuron, &mut row);
            let bad = |column: usize, value| GateCopyError::Weight {
                tensor: gate.name().to_owned(),
                row: neuron,
                column,
                value,
            };
            if let Some(column) = row.iter().position(|w| !w.is_finite()) {
                return Err(bad(column, row[column]));
            }
            for &column in &outliers {
                let weight = std::mem::take(&mut row[column as usize]);
                let rounded = f16::from_f32(weight);
                if !rounded.is_finite() {
                    return Err(bad(column as usize, weight));
                }
                outlier_weights.push(rounded);
            }
            scales.push(quantize_row(&row, outliers.len(), &mut levels));
            pack_row(&levels, &mut code_bytes[neuron * row_bytes..][..row_bytes]);
        }
        let thresholds = vec![f32::NEG_INFINITY; n_ff];
        let codes = WeightBytes::new(Arc::new(Lines(codes)), 0..Self::codes_len(n_ff, n_embd));
        Self::try_new(GateCopyParts {
            n_ff,
            n_embd,
            codes,
            scales,
            thresholds,
            outliers,
            outlier_weights,
            mean,
        })
    }

    /// The same copy with other thresholds.
    ///
    /// # Shapes
    /// `thresholds [n_ff]`.
    ///
    /// # Errors
    /// [`GateCopyError`] if there are too many or too few, or one is NaN.
    pub fn with_thresholds(mut self, thresholds: Vec<f32>) -> Result<Self, GateCopyError> {
        check_thresholds(&thresholds, self.parts.n_ff)?;
        self.parts.thresholds = thresholds;
        Ok(self)
    }

    /// Number of neurons.
    pub fn n_ff(&self) -> usize {
        self.parts.n_ff
    }

    /// Width of the input.
    pub fn n_embd(&self) -> usize {
        self.parts.n_embd
    }

    /// Width of the input as [`GateCopy::quantize`] lays it out: a multiple of 256.
    pub fn n_padded(&self) -> usize {
        self.parts.n_embd.div_ceil(GROUP) * GROUP
    }

    /// Number of columns kept apart.
    pub fn n_outliers(&self) -> usize {
        self.parts.outliers.len()
    }

    /// Columns kept apart, ascending.
    pub fn outliers(&self) -> &[u32] {
        &self.parts.outliers
    }

    /// Scale of each row, `[n_ff]`.
    pub fn scales(&self) -> &[f32] {
        &self.parts.scales
    }

    /// Threshold of each neuron, `[n_ff]`.
    pub fn thresholds(&self) -> &[f32] {
        &self.parts.thresholds
    }

    /// Weights of the columns kept apart, `[n_ff, n_outliers]`.
    pub fn outlier_weights(&self) -> &[f16] {
        &self.parts.outlier_weights
    }

    /// Mean that is taken off the input, `[n_embd]`.
    pub fn mean(&self) -> &[f32] {
        &self.parts.mean
    }

    /// The codes, with the bytes behind the last row.
    pub fn codes(&self) -> &WeightBytes {
        &self.parts.codes
    }

    /// Bytes from one row of codes to the next: `ceil(n_embd / 4)` but for a last group that is not a multiple of 4.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The codes of a neuron in groups of 64 bytes; the last one may run into the next row, where the input is zero.
    ///
    /// # Panics
    /// If there is no such neuron.
    #[inline]
    pub fn row_groups(&self, neuron: usize) -> &[[u8; GROUP_BYTES]] {
        let n = self.parts.n_embd.div_ceil(GROUP) * GROUP_BYTES;
        self.parts.codes.as_slice()[neuron * self.row_bytes..][..n].as_chunks().0
    }

    /// Bytes that scoring all neurons reads.
    pub fn n_bytes(&self) -> usize {
        let p = &self.parts;
        let numbers = p.scales.len() + p.thresholds.len() + p.outliers.len() + p.mean.len();
        p.n_ff * self.row_bytes + numbers * size_of::<f32>() + p.outlier_weights.len() * size_of::<f16>()
    }

    /// Rounds `x − mean` to 8 bits: `q = round((x − mean) · 127 / max)`, ties to even, where `max` is the largest
    /// magnitude outside the columns kept apart; those get 0 here and their difference in `apart`.
    ///
    /// An infinite or NaN difference makes the step NaN, so that every score is NaN and every neuron active. A largest
    /// magnitude below 4e-37 counts as zero.
    ///
    /// # Shapes
    /// `x [n_embd]`, `q [n_padded]` in the order of the codes, `apart [n_outliers]`.
    ///
    /// # Panics
    /// If a length is another.
    pub fn quantize(&self, x: &[f32], q: &mut [i8], apart: &mut [f32]) -> GateInput {
        let n_embd = self.parts.n_embd;
        assert_eq!(x.len(), n_embd, "input of a gate copy");
        assert_eq!(q.len(), self.n_padded(), "8-bit input of a gate copy");
        assert_eq!(apart.len(), self.n_outliers(), "input of the columns kept apart");
        let mean = &self.parts.mean[..];
        let (mut max, mut fault) = (0f32, 0f32);
        for range in self.inner_ranges() {
            for (x, mean) in x[range.clone()].iter().zip(&mean[range]) {
                let a = (x - mean).abs();
                max = if a > max { a } else { max };
                fault += a * 0.0;
            }
        }
        let inverse = if (127.0 / max).is_finite() { 127.0 / max } else { 0.0 };
        q.fill(0);
        let mut sum = 0;
        for range in self.inner_ranges() {
            let inputs = x[range.clone()].iter().zip(&mean[range.clone()]);
            for ((x, mean), q) in inputs.zip(&mut q[range]) {
                *q = round((x - mean) * inverse);
                sum += i32::from(*q);
            }
        }
        // The last group: its values lie as its codes do.
        let whole = n_embd / GROUP * GROUP;
        let mut last = [0; GROUP];
        let n_last = n_embd - whole;
        let (stride, last) = (n_last.div_ceil(4), &mut last[..n_last]);
        last.copy_from_slice(&q[whole..n_embd]);
        q[whole..].fill(0);
        for (i, &value) in last.iter().enumerate() {
            q[whole + i / stride * GROUP_BYTES + i % stride] = value;
        }
        for (apart, &column) in apart.iter_mut().zip(&self.parts.outliers) {
            *apart = x[column as usize] - mean[column as usize];
        }
        GateInput { half_step: max / 127.0 * 0.5 + fault, sum }
    }

    /// The score of a neuron from the integer sum `dot = Σ_j u_ij · q_j`:
    ///
    /// ```text
    /// s = f32(2 · dot − 3 · sum) · (scale_i · half_step)
    /// s = fma(w_io, apart_o, s)                             for each column kept apart, in order
    /// ```
    ///
    /// # Shapes
    /// `apart [n_outliers]`.
    ///
    /// # Panics
    /// If there is no such neuron.
    #[inline(always)]
    pub fn score_from_dot(&self, neuron: usize, dot: i32, input: GateInput, apart: &[f32]) -> f32 {
        let n = self.parts.outliers.len();
        let weights = &self.parts.outlier_weights[neuron * n..][..n];
        let score = (2 * dot - 3 * input.sum) as f32 * (self.parts.scales[neuron] * input.half_step);
        weights.iter().zip(apart).fold(score, |score, (&w, &x)| finite_to_f32(w).mul_add(x, score))
    }

    /// Whether a neuron with this score is to be computed. NaN is.
    ///
    /// # Panics
    /// If there is no such neuron.
    #[inline(always)]
    #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "NaN is active")]
    pub fn is_active(&self, neuron: usize, score: f32) -> bool {
        !(score < self.parts.thresholds[neuron])
    }

    /// The scores of all neurons, slowly: what every fast form is compared with, bit for bit.
    ///
    /// # Shapes
    /// `x [n_embd]`; the result `[n_ff]`.
    ///
    /// # Panics
    /// If `x` has another length.
    pub fn score(&self, x: &[f32]) -> Vec<f32> {
        let mut q = vec![0; self.n_padded()];
        let mut apart = vec![0.0; self.n_outliers()];
        let input = self.quantize(x, &mut q, &mut apart);
        (0..self.parts.n_ff)
            .map(|neuron| {
                let mut dot = 0;
                for (bytes, q) in self.row_groups(neuron).iter().zip(q.as_chunks::<GROUP>().0) {
                    for (i, &q) in q.iter().enumerate() {
                        let u = bytes[i % GROUP_BYTES] >> (i / GROUP_BYTES * 2) & 3;
                        dot += i32::from(u) * i32::from(q);
                    }
                }
                self.score_from_dot(neuron, dot, input, &apart)
            })
            .collect()
    }

    /// The columns between those kept apart.
    fn inner_ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let outliers = self.parts.outliers.iter().map(|&o| o as usize);
        let starts = std::iter::once(0).chain(outliers.clone().map(|o| o + 1));
        starts.zip(outliers.chain([self.parts.n_embd])).map(|(start, end)| start..end)
    }
}

/// Columns of a gate whose norm is more than 4 times that of the median column. They come from norm weights near
/// zero and spoil every format in which they share a scale with others.
pub fn find_outlier_columns(gate: &WeightMatrix) -> Vec<u32> {
    let mut squares = vec![0f64; gate.n_cols()];
    let mut row = vec![0.0; gate.n_cols()];
    for neuron in 0..gate.n_rows() {
        gate.decode_row(neuron, &mut row);
        squares.iter_mut().zip(&row).for_each(|(sum, &w)| *sum += f64::from(w) * f64::from(w));
    }
    let mut sorted = squares.clone();
    sorted.sort_unstable_by(f64::total_cmp);
    let Some(&median) = sorted.get(sorted.len() / 2) else { return Vec::new() };
    (0..).zip(&squares).filter(|&(_, &sum)| sum > 16.0 * median).map(|(column, _)| column).collect()
}

/// Bytes of a row of codes.
fn row_bytes(n_embd: usize) -> usize {
    n_embd / GROUP * GROUP_BYTES + (n_embd % GROUP).div_ceil(4)
}

/// The scale of a row and the code of each weight, by turns: codes for the scale, then the scale for the codes, until
/// nothing changes. `n_apart` of the weights are kept apart and zero here; they do not count.
fn quantize_row(row: &[f32], n_apart: usize, codes: &mut [u8]) -> f32 {
    // Converges in 3 to 5 rounds on normally distributed weights.
    const MAX_ROUNDS: usize = 16;
    let n = (row.len() - n_apart) as f64;
    let magnitude = sums(row, |w| w.abs());
    let mut scale = if n > 0.0 { (sums(row, |w| w * w) / n).sqrt() as f32 } else { 0.0 };
    for _ in 0..MAX_ROUNDS {
        // Levels are ±0.5 or, for weights beyond the scale, ±1.5.
        let outer = sums(row, |w| if w.abs() > scale { 1.0 } else { 0.0 });
        let outer_magnitude = sums(row, |w| if w.abs() > scale { w.abs() } else { 0.0 });
        let products = 0.5 * magnitude + outer_magnitude;
        let squares = 0.25 * n + 2.0 * outer;
        let next = if squares > 0.0 { (products / squares) as f32 } else { 0.0 };
        if next == scale {
            break;
        }
        scale = next;
    }
    for (code, &w) in codes.iter_mut().zip(row) {
        let outer = u8::from(w.abs() > scale);
        *code = if w < 0.0 { 1 - outer } else { 2 + outer };
    }
    scale
}

/// `Σ f(w)`, in 16 sums so that the loop vectorises.
fn sums(row: &[f32], f: impl Fn(f32) -> f32) -> f64 {
    let (chunks, rest) = row.as_chunks::<16>();
    let mut lanes = [0f32; 16];
    for chunk in chunks {
        for (lane, &w) in lanes.iter_mut().zip(chunk) {
            *lane += f(w);
        }
    }
    lanes.iter().map(|&s| f64::from(s)).sum::<f64>() + rest.iter().map(|&w| f64::from(f(w))).sum::<f64>()
}

fn pack_row(codes: &[u8], bytes: &mut [u8]) {
    for (codes, bytes) in codes.chunks(GROUP).zip(bytes.chunks_mut(GROUP_BYTES)) {
        let stride = bytes.len();
        bytes.fill(0);
        for (i, &code) in codes.iter().enumerate() {
            bytes[i % stride] |= code << (i / stride * 2);
        }
    }
}

/// Nearest integer, ties to even, for `|x| ≤ 127` and NaN, which becomes 0.
#[inline]
fn round(x: f32) -> i8 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2^23: the sum leaves no bits for a fraction.
    ((x + SHIFT) - SHIFT) as i8
}

/// A finite f16 as f32, without asking the CPU for its features as `half` does each time.
#[inline(always)]
fn finite_to_f32(x: f16) -> f32 {
    // The exponents differ by 2^112 in their bias; the product is exact, subnormal numbers included.
    const BIAS: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(x.to_bits());
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * BIAS;
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

fn expect_len(part: &'static str, got: usize, expected: usize) -> Result<(), GateCopyError> {
    if got == expected { Ok(()) } else { Err(GateCopyError::Length { part, expected, got }) }
}

fn check_width(n_embd: usize) -> Result<(), GateCopyError> {
    if n_embd <= MAX_N_EMBD { Ok(()) } else { Err(GateCopyError::TooWide { n_embd, max: MAX_N_EMBD }) }
}

fn check_outliers(outliers: &[u32], n_embd: usize) -> Result<(), GateCopyError> {
    for (at, &column) in outliers.iter().enumerate() {
        if column as usize >= n_embd || at > 0 && outliers[at - 1] >= column {
            return Err(GateCopyError::Outlier { at, column, n_embd });
        }
    }
    Ok(())
}

fn check_thresholds(thresholds: &[f32], n_ff: usize) -> Result<(), GateCopyError> {
    expect_len("thresholds", thresholds.len(), n_ff)?;
    match thresholds.iter().position(|t| t.is_nan()) {
        Some(at) => Err(GateCopyError::Number { part: "thresholds", at, value: thresholds[at] }),
        None => Ok(()),
    }
}

fn check_finite(
    part: &'static str,
    mut numbers: impl Iterator<Item = f32> + Clone,
) -> Result<(), GateCopyError> {
    match numbers.clone().position(|v| !v.is_finite()) {
        Some(at) => {
            let value = numbers.nth(at).unwrap_or(f32::NAN);
            Err(GateCopyError::Number { part, at, value })
        }
        None => Ok(()),
    }
}

/// 64 bytes that start on a multiple of 64.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u8; 64]);

struct Lines(Vec<Line>);

impl AsRef<[u8]> for Lines {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}
