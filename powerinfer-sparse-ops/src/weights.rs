//! Views of weights: matrices whose bytes somebody else owns, grouped by their role in the model.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::{GateCopy, LayerId, ModelSpec, WeightType, block};

/// Who keeps the bytes of weights alive: a mapped file, or a buffer.
pub trait WeightOwner: AsRef<[u8]> + Send + Sync {
    /// Says that the bytes `range` will hardly be read again, so that their memory may serve others. They stay
    /// readable, slower perhaps.
    fn release(&self, range: Range<usize>) {
        let _ = range;
    }
}

impl WeightOwner for Vec<u8> {}

/// A range of bytes kept alive by a shared owner.
#[derive(Clone)]
pub struct WeightBytes {
    owner: Arc<dyn WeightOwner>,
    range: Range<usize>,
}

impl WeightBytes {
    /// The bytes `range` of `owner`.
    ///
    /// # Panics
    /// If the range lies outside the owner.
    pub fn new(owner: Arc<dyn WeightOwner>, range: Range<usize>) -> Self {
        let len = (*owner).as_ref().len();
        assert!(range.start <= range.end && range.end <= len, "bytes {range:?} of {len}");
        Self { owner, range }
    }

    /// All bytes of an owned buffer.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { owner: Arc::new(bytes), range }
    }

    /// The bytes of a buffer of f32, native byte order.
    pub fn from_f32(values: Vec<f32>) -> Self {
        struct Floats(Vec<f32>);
        impl AsRef<[u8]> for Floats {
            fn as_ref(&self) -> &[u8] {
                bytemuck::cast_slice(&self.0)
            }
        }
        impl WeightOwner for Floats {}
        let range = 0..values.len() * 4;
        Self { owner: Arc::new(Floats(values)), range }
    }

    /// See [`WeightOwner::release`].
    pub fn release(&self) {
        self.owner.release(self.range.clone());
    }

    /// The bytes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// A part of these bytes.
    ///
    /// # Panics
    /// If the range lies outside.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "bytes {range:?} of {}", self.len());
        Self {
            owner: Arc::clone(&self.owner),
            range: self.range.start + range.start..self.range.start + range.end,
        }
    }
}

impl fmt::Debug for WeightBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightBytes({} bytes)", self.len())
    }
}

/// Weights that cannot form the matrix or the model they are said to form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// The row is not a whole number of blocks.
    #[error("`{tensor}` has rows of {n_cols} weights, which is no multiple of the {ty} block of {block_len}")]
    Row {
        /// Tensor name.
        tensor: String,
        /// Weight type.
        ty: WeightType,
        /// Row length.
        n_cols: usize,
        /// Block length of the type.
        block_len: usize,
    },
    /// The number of bytes is not what shape and type ask for.
    #[error("`{tensor}` needs {expected} bytes for its shape and type, got {got}")]
    Bytes {
        /// Tensor name.
        tensor: String,
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// The shape is not what the model asks for; ggml order, contiguous axis first.
    #[error("`{tensor}` should have the shape {expected:?}, got {got:?}")]
    Shape {
        /// Tensor name.
        tensor: String,
        /// Wanted shape.
        expected: Vec<usize>,
        /// Found shape.
        got: Vec<usize>,
    },
}

/// A matrix of `n_rows` rows, each `n_cols` weights stored one after the other.
///
/// ggml writes this shape as `[n_cols, n_rows]`. The bytes are aligned for their type (4 for F32, 2 for the
/// others), so block casts cannot fail.
#[derive(Clone)]
pub struct WeightMatrix {
    name: Arc<str>,
    ty: WeightType,
    n_rows: usize,
    n_cols: usize,
    row_bytes: usize,
    bytes: WeightBytes,
}

impl WeightMatrix {
    /// Checks that the bytes hold such a matrix; copies them once if they are not aligned for the type.
    ///
    /// # Errors
    /// [`ShapeError::Row`] if a row is not a whole number of blocks, [`ShapeError::Bytes`] if the byte
    /// count is off.
    pub fn try_new(
        name: &str,
        ty: WeightType,
        n_rows: usize,
        n_cols: usize,
        bytes: WeightBytes,
    ) -> Result<Self, ShapeError> {
        let row_bytes = ty.row_bytes(n_cols).ok_or_else(|| ShapeError::Row {
            tensor: name.to_owned(),
            ty,
            n_cols,
            block_len: ty.block_len(),
        })?;
        let expected = row_bytes.saturating_mul(n_rows);
        if bytes.len() != expected {
            return Err(ShapeError::Bytes { tensor: name.to_owned(), expected, got: bytes.len() });
        }
        let align = if ty == WeightType::F32 { 4 } else { 2 };
        let bytes = if bytes.as_slice().as_ptr().addr().is_multiple_of(align) {
            bytes
        } else {
            aligned_copy(bytes.as_slice())
        };
        Ok(Self { name: name.into(), ty, n_rows, n_cols, row_bytes, bytes })
    }

    /// A matrix of f32, row by row.
    ///
    /// # Errors
    /// [`ShapeError::Bytes`] if `values` is not `n_rows · n_cols` long.
    pub fn from_f32(name: &str, n_rows: usize, n_cols: usize, values: Vec<f32>) -> Result<Self, ShapeError> {
        Self::try_new(name, WeightType::F32, n_rows, n_cols, WeightBytes::from_f32(values))
    }

    /// Tensor name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Weight type.
    pub fn ty(&self) -> WeightType {
        self.ty
    }

    /// Number of rows (outputs).
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Weights in a row (inputs).
    pub fn n_cols(&self) -> usize {
        self.n_cols
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of the whole matrix.
    pub fn n_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Says that the bytes will hardly be read again; see [`WeightOwner::release`].
    pub fn release(&self) {
        self.bytes.release();
    }

    /// All rows.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    /// One row.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row(&self, row: usize) -> &[u8] {
        &self.bytes()[row * self.row_bytes..(row + 1) * self.row_bytes]
    }

    /// One row as f32.
    ///
    /// # Shapes
    /// `out [n_cols]`.
    ///
    /// # Panics
    /// If there is no such row or `out` has another length.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.n_cols, "`{}`: row length", self.name);
        block::decode_row(self.ty, self.row(row), out);
    }

    /// The rows `rows` as a matrix of their own that shares the bytes.
    ///
    /// # Panics
    /// If the range lies outside.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.n_rows, "rows {rows:?} of {}", self.n_rows);
        Self {
            n_rows: rows.len(),
            bytes: self.bytes.slice(rows.start * self.row_bytes..rows.end * self.row_bytes),
            ..self.clone()
        }
    }

    /// The transposed matrix, for plain float types only: nothing is rounded.
    ///
    /// # Panics
    /// If the type is quantised.
    pub fn transposed(&self) -> Self {
        assert!(self.ty.is_float(), "`{}`: {} cannot be transposed without loss", self.name, self.ty);
        let size = self.ty.block_bytes();
        let source = self.bytes();
        // A Vec<u32> underneath keeps the alignment.
        let mut out = vec![0u32; source.len().div_ceil(4)];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
        // Square tiles: a tile's rows and columns stay in the cache while it is turned.
        const TILE: usize = 32;
        for row0 in (0..self.n_rows).step_by(TILE) {
            for col0 in (0..self.n_cols).step_by(TILE) {
                for row in row0..self.n_rows.min(row0 + TILE) {
                    for col in col0..self.n_cols.min(col0 + TILE) {
                        let from = (row * self.n_cols + col) * size;
                        let to = (col * self.n_rows + row) * size;
                        bytes[to..to + size].copy_from_slice(&source[from..from + size]);
                    }
                }
            }
        }
        Self {
            name: self.name.clone(),
            ty: self.ty,
            n_rows: self.n_cols,
            n_cols: self.n_rows,
            row_bytes: self.n_rows * size,
            bytes: words(out, source.len()),
        }
    }
}

impl fmt::Debug for WeightMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {} [{}, {}]", self.name, self.ty, self.n_cols, self.n_rows)
    }
}

fn words(buffer: Vec<u32>, n_bytes: usize) -> WeightBytes {
    struct Words(Vec<u32>);
    impl AsRef<[u8]> for Words {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }
    }
    impl WeightOwner for Words {}
    WeightBytes::new(Arc::new(Words(buffer)), 0..n_bytes)
}

fn aligned_copy(bytes: &[u8]) -> WeightBytes {
    let mut buffer = vec![0u32; bytes.len().div_ceil(4)];
    bytemuck::cast_slice_mut::<u32, u8>(&mut buffer)[..bytes.len()].copy_from_slice(bytes);
    words(buffer, bytes.len())
}

/// `y = W · x + b`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `W [n_out, n_in]`: one row an output.
    pub weight: WeightMatrix,
    /// `b [n_out]`.
    pub bias: Option<Vec<f32>>,
}

/// Scale and shift of a norm.
#[derive(Clone, Debug)]
pub struct NormWeights {
    /// `[n_embd]`.
    pub weight: Vec<f32>,
    /// `[n_embd]`; layer norms only.
    pub bias: Option<Vec<f32>>,
}

/// Tables that turn tokens and positions into the residual stream.
#[derive(Clone, Debug)]
pub struct EmbeddingWeights {
    /// `[n_vocab, n_embd]`, a row a token.
    pub token: WeightMatrix,
    /// Learned positions, a row a position, and the row of position 0 (opt: 2).
    pub position: Option<(WeightMatrix, usize)>,
}

/// Attention and norms of one layer: what home holds besides neurons.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// Before attention; with a parallel block and no `attn_norm_2`, before the FFN as well.
    pub attn_norm: NormWeights,
    /// Falcon-40B: attention reads this norm, the FFN reads `attn_norm`.
    pub attn_norm_2: Option<NormWeights>,
    /// `[q_dim, n_embd]`.
    pub q: Linear,
    /// `[kv_dim, n_embd]`.
    pub k: Linear,
    /// `[kv_dim, n_embd]`.
    pub v: Linear,
    /// `[n_embd, q_dim]`.
    pub output: Linear,
    /// Before the FFN; `None` in parallel blocks.
    pub ffn_norm: Option<NormWeights>,
    /// Added once to the FFN's sum, `[n_embd]` (opt).
    pub ffn_down_bias: Option<Vec<f32>>,
}

/// From the residual stream to logits.
#[derive(Clone, Debug)]
pub struct HeadWeights {
    /// Last norm.
    pub norm: NormWeights,
    /// `[n_vocab, n_embd]`; the token embedding itself where the output is tied.
    pub output: WeightMatrix,
}

/// One loadable piece of the dense parts.
#[derive(Clone, Debug)]
pub enum DensePart {
    /// Token and position tables.
    Embedding(EmbeddingWeights),
    /// Attention and norms of a layer.
    Layer(LayerId, Box<LayerWeights>),
    /// Last norm and output matrix.
    Head(HeadWeights),
}

impl DensePart {
    /// Its matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &WeightMatrix> {
        match self {
            Self::Embedding(w) => [Some(&w.token), w.position.as_ref().map(|(table, _)| table), None, None],
            Self::Layer(_, w) => [&w.q, &w.k, &w.v, &w.output].map(|linear| Some(&linear.weight)),
            Self::Head(w) => [Some(&w.output), None, None, None],
        }
        .into_iter()
        .flatten()
    }

    /// Checks every shape against the model.
    ///
    /// # Errors
    /// [`ShapeError::Shape`] naming the first tensor that differs; vectors are named by their place.
    pub fn check(&self, spec: &ModelSpec) -> Result<(), ShapeError> {
        let (n_embd, n_vocab) = (spec.n_embd, spec.n_vocab);
        match self {
            Self::Embedding(w) => {
                expect_shape(&w.token, n_vocab, n_embd)?;
                match &w.position {
                    Some((table, first)) => expect_shape(table, spec.n_ctx_train + first, n_embd),
                    None => Ok(()),
                }
            }
            Self::Layer(layer, w) => {
                let norms = [Some(&w.attn_norm), w.attn_norm_2.as_ref(), w.ffn_norm.as_ref()];
                norms.into_iter().flatten().try_for_each(|norm| norm.check(*layer, n_embd))?;
                w.q.check(spec.q_dim(), n_embd)?;
                w.k.check(spec.kv_dim(), n_embd)?;
                w.v.check(spec.kv_dim(), n_embd)?;
                w.output.check(n_embd, spec.q_dim())?;
                w.ffn_down_bias
                    .as_ref()
                    .map_or(Ok(()), |b| expect_len(&format!("blk.{layer} ffn down bias"), b.len(), n_embd))
            }
            Self::Head(w) => {
                expect_len("output_norm", w.norm.weight.len(), n_embd)?;
                expect_shape(&w.output, n_vocab, n_embd)
            }
        }
    }
}

impl Linear {
    fn check(&self, n_out: usize, n_in: usize) -> Result<(), ShapeError> {
        expect_shape(&self.weight, n_out, n_in)?;
        let bias = self.bias.as_ref();
        bias.map_or(Ok(()), |b| expect_len(&format!("bias of `{}`", self.weight.name()), b.len(), n_out))
    }
}

impl NormWeights {
    fn check(&self, layer: LayerId, n_embd: usize) -> Result<(), ShapeError> {
        expect_len(&format!("blk.{layer} norm weight"), self.weight.len(), n_embd)?;
        let bias = self.bias.as_ref();
        bias.map_or(Ok(()), |b| expect_len(&format!("blk.{layer} norm bias"), b.len(), n_embd))
    }
}

/// The down projection in one of its two layouts.
#[derive(Clone, Debug)]
pub enum DownWeights {
    /// `[n_ff, n_embd]`: one row a neuron, so that skipping a neuron skips its bytes.
    ByNeuron(WeightMatrix),
    /// `[n_embd, n_ff]`: one row an output, as dense files have it. Blocks run over neurons, so the hidden
    /// vector must be complete before it is used, and the bytes are read whole.
    ByOutput(WeightMatrix),
}

impl DownWeights {
    /// The matrix, whichever way it lies.
    pub fn matrix(&self) -> &WeightMatrix {
        match self {
            Self::ByNeuron(m) | Self::ByOutput(m) => m,
        }
    }
}

/// The FFN of one layer.
#[derive(Clone, Debug)]
pub struct FfnWeights {
    /// `[n_ff, n_embd]`; `None` without gating.
    pub gate: Option<WeightMatrix>,
    /// `[n_ff, n_embd]`.
    pub up: WeightMatrix,
    /// `[n_ff]`, added to `up · x` of computed neurons (opt).
    pub up_bias: Option<Vec<f32>>,
    /// Down projection.
    pub down: DownWeights,
}

impl FfnWeights {
    /// Number of neurons.
    pub fn n_ff(&self) -> usize {
        self.up.n_rows()
    }

    /// Its matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &WeightMatrix> {
        self.gate.iter().chain([&self.up, self.down.matrix()])
    }

    /// Checks every shape against the model.
    ///
    /// # Errors
    /// [`ShapeError::Shape`] naming the first tensor that differs.
    pub fn check(&self, spec: &ModelSpec, layer: LayerId) -> Result<(), ShapeError> {
        let (n_ff, n_embd) = (spec.n_ff[layer.index()], spec.n_embd);
        if let Some(gate) = &self.gate {
            expect_shape(gate, n_ff, n_embd)?;
        }
        expect_shape(&self.up, n_ff, n_embd)?;
        match &self.down {
            DownWeights::ByNeuron(m) => expect_shape(m, n_ff, n_embd),
            DownWeights::ByOutput(m) => expect_shape(m, n_embd, n_ff),
        }
    }
}

/// What names the neurons of a layer that are worth computing.
#[derive(Clone, Debug)]
pub enum PredictorWeights {
    /// The one of a sparse file. It reads the residual stream.
    LowRank(LowRank),
    /// A 2-bit copy of the gate with calibrated thresholds. It reads the FFN's normed input; rows at absolute position 0
    /// are not predicted, all their neurons are active.
    GateCopy(Arc<GateCopy>),
}

impl PredictorWeights {
    /// Checks every shape against the model.
    ///
    /// # Errors
    /// [`ShapeError::Shape`] naming the first tensor that differs.
    pub fn check(&self, spec: &ModelSpec, layer: LayerId) -> Result<(), ShapeError> {
        let (n_ff, n_embd) = (spec.n_ff[layer.index()], spec.n_embd);
        match self {
            Self::LowRank(p) => {
                expect_shape(&p.fc1, p.fc1.n_rows(), n_embd)?;
                expect_shape(&p.fc2, n_ff, p.fc1.n_rows())
            }
            Self::GateCopy(p) if (p.n_ff(), p.n_embd()) == (n_ff, n_embd) => Ok(()),
            Self::GateCopy(p) => Err(ShapeError::Shape {
                tensor: format!("blk.{layer} gate copy"),
                expected: vec![n_embd, n_ff],
                got: vec![p.n_embd(), p.n_ff()],
            }),
        }
    }

    /// Bytes that scoring all neurons reads.
    pub fn n_bytes(&self) -> usize {
        match self {
            Self::LowRank(p) => p.fc1.n_bytes() + p.fc2.n_bytes(),
            Self::GateCopy(p) => p.n_bytes(),
        }
    }
}

/// The low-rank predictor of a sparse file: `score = fc2 · relu(fc1 · h)` of the residual stream `h`, active if not
/// `score < threshold` (so equality and NaN count as active).
#[derive(Clone, Debug)]
pub struct LowRank {
    /// `[rank, n_embd]`.
    pub fc1: WeightMatrix,
    /// `[n_ff, rank]`.
    pub fc2: WeightMatrix,
    /// Compared with the raw score.
    pub threshold: f32,
}

fn expect_len(tensor: &str, got: usize, expected: usize) -> Result<(), ShapeError> {
    if got == expected {
        return Ok(());
    }
    Err(ShapeError::Shape { tensor: tensor.to_owned(), expected: vec![expected], got: vec![got] })
}

fn expect_shape(m: &WeightMatrix, n_rows: usize, n_cols: usize) -> Result<(), ShapeError> {
    if m.n_rows() == n_rows && m.n_cols() == n_cols {
        return Ok(());
    }
    Err(ShapeError::Shape {
        tensor: m.name().to_owned(),
        expected: vec![n_cols, n_rows],
        got: vec![m.n_cols(), m.n_rows()],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_refuses_partial_blocks_and_a_wrong_byte_count() {
        let bytes = || WeightBytes::from_vec(vec![0; 54]);
        let err = WeightMatrix::try_new("t", WeightType::Q4_0, 2, 48, bytes()).unwrap_err();
        assert!(matches!(err, ShapeError::Row { n_cols: 48, block_len: 32, .. }), "{err}");
        let err = WeightMatrix::try_new("t", WeightType::Q4_0, 2, 32, bytes()).unwrap_err();
        assert!(matches!(err, ShapeError::Bytes { expected: 36, got: 54, .. }), "{err}");
    }

    #[test]
    fn rows_share_bytes_and_transposing_twice_is_the_identity() {
        let m = WeightMatrix::from_f32("t", 3, 2, vec![0., 1., 2., 3., 4., 5.]).unwrap();
        let mut row = [0.0; 2];
        let last = m.rows(2..3);
        assert_eq!(last.bytes(), m.row(2));
        last.decode_row(0, &mut row);
        let t = m.transposed();
        assert_eq!((t.n_rows(), t.n_cols()), (2, 3));
        assert_eq!(bytemuck::cast_slice::<u8, f32>(t.bytes()), [0., 2., 4., 1., 3., 5.]);
        assert_eq!(t.transposed().bytes(), m.bytes());
    }

    #[test]
    fn unaligned_bytes_are_copied() {
        let mut raw = vec![0u8; 9];
        let odd = usize::from(raw.as_ptr().addr().is_multiple_of(4));
        raw[odd..odd + 4].copy_from_slice(&1.5f32.to_ne_bytes());
        let bytes = WeightBytes::new(Arc::new(raw), odd..odd + 4);
        let m = WeightMatrix::try_new("t", WeightType::F32, 1, 1, bytes).unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, f32>(m.bytes()), [1.5]);
    }
}
