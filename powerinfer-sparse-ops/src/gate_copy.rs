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

use crate::{WeightBytes, WeightMatrix, WeightOwner};

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
            let scale = row_scale(&row, outliers.len());
            pack_row(&row, scale, &mut code_bytes[neuron * row_bytes..][..row_bytes]);
            scales.push(scale);
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
            let (range_max, range_fault) = max_abs(&x[range.clone()], &mean[range]);
            max = max.max(range_max);
            fault += range_fault;
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

    /// [`GateCopy::score_from_dot`] for some neurons, in loops that vectorise.
    ///
    /// # Shapes
    /// `dots [neurons.len()]`, `apart [n_outliers]`, `scores [neurons.len()]`.
    ///
    /// # Panics
    /// If there is no such neuron.
    #[inline(always)]
    pub fn scores_from_dots(
        &self,
        neurons: Range<usize>,
        dots: &[i32],
        input: GateInput,
        apart: &[f32],
        scores: &mut [f32],
    ) {
        let scales = &self.parts.scales[neurons.clone()];
        for ((score, &dot), &scale) in scores.iter_mut().zip(dots).zip(scales) {
            *score = (2 * dot - 3 * input.sum) as f32 * (scale * input.half_step);
        }
        let n = self.parts.outliers.len();
        let weights = &self.parts.outlier_weights[neurons.start * n..neurons.end * n];
        for (o, &x) in apart.iter().enumerate() {
            if n == 1 {
                for (score, &w) in scores.iter_mut().zip(weights) {
                    *score = finite_to_f32(w).mul_add(x, *score);
                }
            } else {
                for (score, row) in scores.iter_mut().zip(weights.chunks_exact(n)) {
                    *score = finite_to_f32(row[o]).mul_add(x, *score);
                }
            }
        }
    }

    /// Whether a neuron with this score is to be computed. NaN is.
    ///
    /// # Panics
    /// If there is no such neuron.
    #[inline(always)]
    pub fn is_active(&self, neuron: usize, score: f32) -> bool {
        let inactive = score < self.parts.thresholds[neuron];
        !inactive
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
    outlier_columns(gate, 0..gate.n_rows())
}

/// As [`find_outlier_columns`], by `n_rows` rows at even distances, or all if there are fewer.
pub fn sample_outlier_columns(gate: &WeightMatrix, n_rows: usize) -> Vec<u32> {
    let n = n_rows.min(gate.n_rows());
    outlier_columns(gate, (0..n).map(|i| i * gate.n_rows() / n))
}

fn outlier_columns(gate: &WeightMatrix, neurons: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut squares = vec![0f64; gate.n_cols()];
    let mut row = vec![0.0; gate.n_cols()];
    for neuron in neurons {
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

/// The scale of a row, by turns: levels for the scale, then the scale for the levels, until nothing changes. `n_apart` of
/// the weights are kept apart and zero here; they do not count.
fn row_scale(row: &[f32], n_apart: usize) -> f32 {
    // Rows of 576 and of 4096 normally distributed weights settle in 1 to 8 rounds.
    const MAX_ROUNDS: usize = 16;
    let n = (row.len() - n_apart) as f64;
    if n == 0.0 {
        return 0.0;
    }
    let [squares, magnitude] = sums(row, |w| [w * w, w.abs()]);
    let mut scale = (squares / n).sqrt() as f32;
    for _ in 0..MAX_ROUNDS {
        // Levels are ±0.5 or, for weights beyond the scale, ±1.5.
        let [n_outer, outer] = sums(row, |w| if w.abs() > scale { [1.0, w.abs()] } else { [0.0; 2] });
        let next = ((0.5 * magnitude + outer) / (0.25 * n + 2.0 * n_outer)) as f32;
        if next == scale {
            break;
        }
        scale = next;
    }
    scale
}

/// `Σ f(w)` for two functions at once, each in 16 sums so that the loop vectorises.
fn sums(row: &[f32], f: impl Fn(f32) -> [f32; 2]) -> [f64; 2] {
    let (chunks, rest) = row.as_chunks::<16>();
    let mut lanes = [[0f32; 16]; 2];
    for chunk in chunks {
        for i in 0..16 {
            let [a, b] = f(chunk[i]);
            lanes[0][i] += a;
            lanes[1][i] += b;
        }
    }
    for &w in rest {
        let [a, b] = f(w);
        lanes[0][0] += a;
        lanes[1][0] += b;
    }
    lanes.map(|lanes| lanes.iter().map(|&s| f64::from(s)).sum())
}

/// Writes the code of each weight: 0 to 3 for −1.5, −0.5, 0.5 and 1.5 times the scale.
fn pack_row(row: &[f32], scale: f32, bytes: &mut [u8]) {
    for (row, bytes) in row.chunks(GROUP).zip(bytes.chunks_mut(GROUP_BYTES)) {
        bytes.fill(0);
        for (k, weights) in row.chunks(bytes.len()).enumerate() {
            for (byte, &w) in bytes.iter_mut().zip(weights) {
                let outer = u8::from(w.abs() > scale);
                *byte |= (if w < 0.0 { 1 - outer } else { 2 + outer }) << (2 * k);
            }
        }
    }
}

/// The largest `|x − mean|`, and a number that is 0 unless some difference is infinite or NaN. In lanes, so that the
/// loop vectorises; neither result depends on the order.
fn max_abs(x: &[f32], mean: &[f32]) -> (f32, f32) {
    let (x8, x_rest) = x.as_chunks::<8>();
    let (mean8, mean_rest) = mean.as_chunks::<8>();
    let (mut max, mut fault) = ([0f32; 8], [0f32; 8]);
    let mut take = |lane: usize, difference: f32| {
        let a = difference.abs();
        max[lane] = if a > max[lane] { a } else { max[lane] };
        fault[lane] += a * 0.0;
    };
    for (x, mean) in x8.iter().zip(mean8) {
        for lane in 0..8 {
            take(lane, x[lane] - mean[lane]);
        }
    }
    x_rest.iter().zip(mean_rest).for_each(|(x, mean)| take(0, x - mean));
    (max.into_iter().fold(0.0, f32::max), fault.into_iter().sum())
}

/// Nearest integer, ties to even, for `|x| ≤ 127`; anything for NaN.
#[inline]
fn round(x: f32) -> i8 {
    // 1.5 · 2^23: the sum has no bits for a fraction, and the integer in its lowest ones.
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT).to_bits() as i8
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

impl WeightOwner for Lines {}

impl AsRef<[u8]> for Lines {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WeightType;

    /// Roughly normal numbers.
    fn normals(seed: &mut u64, n: usize) -> Vec<f32> {
        let mut uniform = || {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..n).map(|_| uniform() + uniform() + uniform()).collect()
    }

    fn gate(seed: &mut u64, n_ff: usize, n_embd: usize, outliers: &[u32]) -> WeightMatrix {
        let mut values = normals(seed, n_ff * n_embd);
        for row in values.chunks_exact_mut(n_embd) {
            outliers.iter().for_each(|&o| row[o as usize] *= 30.0);
        }
        WeightMatrix::from_f32("gate", n_ff, n_embd, values).unwrap()
    }

    fn code(p: &GateCopy, neuron: usize, column: usize) -> u8 {
        let group = column / GROUP;
        let stride = (p.n_embd() - group * GROUP).min(GROUP).div_ceil(4);
        let i = column % GROUP;
        p.row_groups(neuron)[group][i % stride] >> (i / stride * 2) & 3
    }

    #[test]
    fn a_score_is_the_formula_of_the_module_up_to_the_rounding_of_the_input() {
        let mut seed = 1;
        for n_embd in [1, 2, 7, 32, 96, 255, 256, 257, 576, 800] {
            for outliers in [vec![], vec![0], vec![0, n_embd as u32 - 1]] {
                let outliers = if n_embd == 1 { vec![] } else { outliers };
                let gate = gate(&mut seed, 5, n_embd, &outliers);
                let mean = normals(&mut seed, n_embd);
                let p = GateCopy::from_gate(&gate, mean.clone(), outliers.clone()).unwrap();
                let x = normals(&mut seed, n_embd);
                let kept = |j: &usize| !outliers.contains(&(*j as u32));
                let max = (0..n_embd).filter(kept).map(|j| (x[j] - mean[j]).abs()).fold(0.0, f32::max);
                let mut row = vec![0.0; n_embd];
                for (neuron, score) in p.score(&x).into_iter().enumerate() {
                    gate.decode_row(neuron, &mut row);
                    let scale = p.scales()[neuron];
                    let (mut want, mut slack) = (0.0, 1e-4);
                    for j in 0..n_embd {
                        let x = f64::from(x[j] - mean[j]);
                        if kept(&j) {
                            let level = f64::from(code(&p, neuron, j)) - 1.5;
                            let nearest = if row[j].abs() > scale { 1.5 } else { 0.5 };
                            assert_eq!(level, nearest * f64::from(row[j].signum()), "{row:?}");
                            want += f64::from(scale) * level * x;
                            slack += f64::from(scale * level.abs() as f32 * max / 127.0 * 0.5);
                        } else {
                            want += f64::from(f16::from_f32(row[j]).to_f32()) * x;
                        }
                    }
                    assert!((f64::from(score) - want).abs() <= slack, "{n_embd}: {score} for {want}");
                }
            }
        }
    }

    #[test]
    fn scores_from_sums_are_the_same_one_by_one_and_together() {
        let mut seed = 2;
        for outliers in [vec![], vec![3], vec![3, 9, 31]] {
            let gate = gate(&mut seed, 11, 32, &outliers);
            let p = GateCopy::from_gate(&gate, normals(&mut seed, 32), outliers.clone()).unwrap();
            let apart = normals(&mut seed, outliers.len());
            let input = GateInput { half_step: 0.01, sum: 77 };
            let dots: Vec<i32> = (0..8).map(|i| i * 321 - 999).collect();
            let mut scores = [0.0; 8];
            p.scores_from_dots(2..10, &dots, input, &apart, &mut scores);
            for i in 0..8 {
                assert_eq!(scores[i], p.score_from_dot(2 + i, dots[i], input, &apart));
            }
        }
    }

    #[test]
    fn no_other_scale_is_much_better() {
        let mut seed = 3;
        for n in [1, 2, 16, 100, 576] {
            let row = normals(&mut seed, n);
            let error = |scale: f32| {
                let distance = |w: f32| {
                    let levels = [-1.5, -0.5, 0.5, 1.5].map(|l: f32| f64::from(w - l * scale).powi(2));
                    levels.into_iter().fold(f64::INFINITY, f64::min)
                };
                row.iter().map(|&w| distance(w)).sum::<f64>()
            };
            let scale = row_scale(&row, 0);
            let best = (1..400).map(|i| error(i as f32 * 0.01)).fold(f64::INFINITY, f64::min);
            // Alternating finds a local optimum; for long rows the difference is small.
            let slack = if n < 100 { 2.5 } else { 1.02 };
            assert!(error(scale) <= best * slack + 1e-9, "{n}: {} at {scale}, best {best}", error(scale));
        }
        assert_eq!(row_scale(&[0.0; 3], 0), 0.0);
        assert_eq!(row_scale(&[0.0; 3], 3), 0.0);
    }

    #[test]
    fn inputs_are_rounded_ties_to_even_and_lie_as_the_codes_do() {
        let gate = WeightMatrix::from_f32("gate", 1, 6, vec![1.0; 6]).unwrap();
        let p = GateCopy::from_gate(&gate, vec![1.0; 6], vec![2]).unwrap();
        let mut q = vec![9; 256];
        let mut apart = [0.0];
        let input = p.quantize(&[128.0, 1.5, 1001.0, 3.5, -1.5, 0.5], &mut q, &mut apart);
        // Groups of 6 columns take 2 bytes: columns 0, 2, 4 in the first byte, 1, 3, 5 in the second.
        assert_eq!(
            (q[..2].to_vec(), q[64..66].to_vec(), q[128..130].to_vec()),
            (vec![127, 0], vec![0, 2], vec![-2, 0])
        );
        assert_eq!(q.iter().filter(|&&q| q != 0).count(), 3);
        assert_eq!((input, apart), (GateInput { half_step: 0.5, sum: 127 }, [1000.0]));
        let tiny = p.quantize(&[1.0; 6], &mut q, &mut apart);
        assert_eq!(tiny, GateInput { half_step: 0.0, sum: 0 });
    }

    #[test]
    fn a_score_of_nan_is_active() {
        let mut seed = 4;
        let gate = gate(&mut seed, 3, 40, &[5]);
        let p = GateCopy::from_gate(&gate, vec![0.0; 40], vec![5]).unwrap();
        let p = p.with_thresholds(vec![f32::INFINITY; 3]).unwrap();
        for (at, value) in [(5, f32::NAN), (6, f32::NAN), (6, f32::INFINITY), (39, f32::NEG_INFINITY)] {
            let mut x = normals(&mut seed, 40);
            assert!((0..3).all(|i| !p.is_active(i, p.score(&x)[i])));
            x[at] = value;
            for (neuron, score) in p.score(&x).into_iter().enumerate() {
                assert!(score.is_nan() && p.is_active(neuron, score), "{value} at {at}: {score}");
            }
        }
    }

    #[test]
    fn columns_far_above_the_median_are_found() {
        let mut seed = 5;
        assert_eq!(find_outlier_columns(&gate(&mut seed, 64, 96, &[])), [0u32; 0]);
        assert_eq!(find_outlier_columns(&gate(&mut seed, 64, 96, &[7, 95])), [7, 95]);
        let empty = WeightMatrix::from_f32("gate", 0, 0, vec![]).unwrap();
        assert_eq!(find_outlier_columns(&empty), [0u32; 0]);
        let gate = gate(&mut seed, 500, 96, &[0, 33]);
        for n_rows in [100, 500, 501] {
            assert_eq!(sample_outlier_columns(&gate, n_rows), [0, 33], "by {n_rows} rows");
        }
        assert_eq!(sample_outlier_columns(&gate, 0), [0u32; 0]);
        assert_eq!(sample_outlier_columns(&empty, 3), [0u32; 0]);
    }

    #[test]
    fn every_finite_f16_becomes_the_same_f32() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            if x.is_finite() {
                assert_eq!(finite_to_f32(x).to_bits(), x.to_f32().to_bits(), "{bits:#x}");
            }
        }
    }

    #[test]
    fn bytes_are_counted_and_copies_come_back_from_their_parts() {
        let mut seed = 6;
        let gate = gate(&mut seed, 10, 576, &[1]);
        let p = GateCopy::from_gate(&gate, normals(&mut seed, 576), vec![1]).unwrap();
        assert_eq!((p.row_bytes(), p.codes().len()), (144, 10 * 144 + 48));
        assert_eq!(p.n_bytes(), 10 * (144 + 4 + 4 + 2) + 4 * 577);
        assert!(p.codes().as_slice().as_ptr().addr().is_multiple_of(64));
        let again = GateCopy::try_new(p.parts.clone()).unwrap();
        let x = normals(&mut seed, 576);
        assert_eq!(again.score(&x), p.score(&x));
    }

    #[test]
    fn parts_that_do_not_fit_are_refused_by_name() {
        let mut seed = 7;
        let gate = gate(&mut seed, 4, 32, &[]);
        let good = GateCopy::from_gate(&gate, vec![0.0; 32], vec![3, 8]).unwrap().parts;
        let refused = |change: &dyn Fn(&mut GateCopyParts)| {
            let mut parts = good.clone();
            change(&mut parts);
            GateCopy::try_new(parts).unwrap_err()
        };
        let length = |part, expected, got| GateCopyError::Length { part, expected, got };
        assert_eq!(refused(&|p| p.codes = WeightBytes::from_vec(vec![0; 32])), length("codes", 88, 32));
        assert_eq!(refused(&|p| p.n_ff = 3), length("codes", 80, 88));
        assert_eq!(refused(&|p| p.scales.push(1.0)), length("scales", 4, 5));
        assert_eq!(refused(&|p| p.thresholds.clear()), length("thresholds", 4, 0));
        assert_eq!(refused(&|p| p.mean.clear()), length("mean", 32, 0));
        assert_eq!(refused(&|p| p.outliers.truncate(1)), length("outlier weights", 4, 8));
        let outlier = |at, column| GateCopyError::Outlier { at, column, n_embd: 32 };
        assert_eq!(refused(&|p| p.outliers = vec![3, 3]), outlier(1, 3));
        assert_eq!(refused(&|p| p.outliers = vec![3, 32]), outlier(1, 32));
        let number = |error| match error {
            GateCopyError::Number { part, at, .. } => (part, at),
            error => panic!("{error}"),
        };
        assert_eq!(number(refused(&|p| p.scales[1] = f32::NAN)), ("scales", 1));
        assert_eq!(number(refused(&|p| p.mean[31] = f32::INFINITY)), ("mean", 31));
        assert_eq!(number(refused(&|p| p.thresholds[2] = f32::NAN)), ("thresholds", 2));
        assert_eq!(number(refused(&|p| p.outlier_weights[7] = f16::INFINITY)), ("outlier weights", 7));
        let error = refused(&|p| p.n_embd = MAX_N_EMBD + 1);
        assert_eq!(error, GateCopyError::TooWide { n_embd: MAX_N_EMBD + 1, max: MAX_N_EMBD });

        let copy = |values: Vec<f32>, outliers| {
            let gate = WeightMatrix::from_f32("blk.0.ffn_gate", 2, 2, values).unwrap();
            GateCopy::from_gate(&gate, vec![0.0; 2], outliers).map(|_| ()).unwrap_err().to_string()
        };
        let says = "has inf in row 1, column 0, which cannot be copied";
        assert_eq!(copy(vec![1.0, 2.0, f32::INFINITY, 3.0], vec![]), format!("`blk.0.ffn_gate` {says}"));
        assert!(copy(vec![1.0, 2.0, 3.0, 1e5], vec![1]).contains("100000 in row 1, column 1"));
        assert!(copy(vec![0.0; 4], vec![2]).contains("number 0 is 2"));
        let quantised =
            WeightMatrix::try_new("g", WeightType::Q8_0, 1, 32, WeightBytes::from_vec(vec![0; 34]));
        assert!(GateCopy::from_gate(&quantised.unwrap(), vec![0.0; 31], vec![]).is_err());
    }
}
