//! Matrices of floats in safetensors files.

use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::error::PredictorError;

/// A type that weights are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatType {
    /// 32 bits.
    F32,
    /// 16 bits, IEEE half.
    F16,
    /// 16 bits, the upper half of an f32.
    BF16,
}

impl FloatType {
    /// The name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
        }
    }

    pub(crate) const fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::BF16 => Dtype::BF16,
        }
    }

    fn from_dtype(dtype: Dtype) -> Option<Self> {
        [Self::F32, Self::F16, Self::BF16].into_iter().find(|ty| ty.dtype() == dtype)
    }

    /// Little-endian bytes to numbers.
    pub(crate) fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Self::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Self::BF16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        }
    }

    /// Numbers to little-endian bytes, rounded to nearest even; the position of the first one that leaves the
    /// range, otherwise.
    pub(crate) fn encode(self, values: &[f32]) -> Result<Vec<u8>, usize> {
        let rounded: Vec<f32> = match self {
            Self::F32 => values.to_vec(),
            Self::F16 => values.iter().map(|&v| f16::from_f32(v).to_f32()).collect(),
            Self::BF16 => values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect(),
        };
        if let Some(position) = rounded.iter().position(|v| !v.is_finite()) {
            return Err(position);
        }
        Ok(match self {
            Self::F32 => rounded.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Self::F16 => rounded.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            Self::BF16 => rounded.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        })
    }
}

/// A matrix of finite numbers, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    n_rows: usize,
    n_cols: usize,
    values: Vec<f32>,
}

impl Matrix {
    /// Checks numbers that are in memory. `name` is for messages.
    ///
    /// # Shapes
    /// `values [n_rows, n_cols]`, neither of them zero.
    ///
    /// # Errors
    /// [`PredictorError::Shape`] if the number of values is another, [`PredictorError::NotFinite`].
    pub fn new(name: &str, n_rows: usize, n_cols: usize, values: Vec<f32>) -> Result<Self, PredictorError> {
        if values.is_empty() || n_rows.checked_mul(n_cols) != Some(values.len()) {
            return Err(PredictorError::Shape {
                tensor: name.to_owned(),
                expected: format!("{} values in rows and columns, at least one of each", values.len()),
                got: vec![n_rows, n_cols],
            });
        }
        match values.iter().position(|v| !v.is_finite()) {
            Some(at) => Err(PredictorError::NotFinite {
                tensor: name.to_owned(),
                row: at / n_cols,
                column: at % n_cols,
                value: values[at],
            }),
            None => Ok(Self { n_rows, n_cols, values }),
        }
    }

    /// Number of rows, at least 1.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Length of a row, at least 1.
    pub fn n_cols(&self) -> usize {
        self.n_cols
    }

    /// The numbers, row by row.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The rows in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.n_cols)
    }

    /// The matrix with rows and columns exchanged.
    pub fn transposed(&self) -> Self {
        let mut values = Vec::with_capacity(self.values.len());
        for column in 0..self.n_cols {
            values.extend(self.values.iter().skip(column).step_by(self.n_cols));
        }
        Self { n_rows: self.n_cols, n_cols: self.n_rows, values }
    }

    pub(crate) fn shape(&self) -> Vec<usize> {
        vec![self.n_rows, self.n_cols]
    }
}

/// Reads a matrix, whatever its type.
///
/// The reader of the format has checked that type, shape and bytes agree, so that the numbers take at most
/// twice the memory of the file.
pub(crate) fn matrix(name: &str, view: &TensorView<'_>) -> Result<Matrix, PredictorError> {
    let ty = FloatType::from_dtype(view.dtype()).ok_or_else(|| PredictorError::Type {
        tensor: name.to_owned(),
        expected: "F32, F16 or BF16",
        got: format!("{:?}", view.dtype()),
    })?;
    let &[n_rows, n_cols] = view.shape() else {
        return Err(PredictorError::Shape {
            tensor: name.to_owned(),
            expected: "two dimensions".to_owned(),
            got: view.shape().to_vec(),
        });
    };
    Matrix::new(name, n_rows, n_cols, ty.decode(view.data()))
}

/// A safetensors file of which single matrices are wanted, such as the unquantised weights of a model.
///
/// The whole file is held in memory; matrices are turned to f32 one at a time.
///
/// # Examples
///
/// ```no_run
/// let weights = powerinfer_predictor::WeightFile::open("model.safetensors")?;
/// let down = weights.matrix("model.layers.0.mlp.down_proj.weight")?;
/// println!("{} x {}", down.n_rows(), down.n_cols());
/// # Ok::<(), powerinfer_predictor::PredictorError>(())
/// ```
#[derive(Clone)]
pub struct WeightFile {
    bytes: Vec<u8>,
}

impl WeightFile {
    /// Reads a file and checks its header.
    ///
    /// # Errors
    /// [`PredictorError::Read`], or [`PredictorError::InFile`] with [`PredictorError::Format`] in it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, PredictorError> {
        let path = path.as_ref();
        Self::from_bytes(read(path)?).map_err(|error| error.in_file(path))
    }

    /// Takes the bytes of a file and checks its header.
    ///
    /// # Errors
    /// [`PredictorError::Format`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, PredictorError> {
        SafeTensors::deserialize(&bytes)?;
        Ok(Self { bytes })
    }

    /// The matrix with this name.
    ///
    /// # Errors
    /// [`PredictorError::MissingTensor`], [`PredictorError::Type`], [`PredictorError::Shape`] or
    /// [`PredictorError::NotFinite`].
    pub fn matrix(&self, name: &str) -> Result<Matrix, PredictorError> {
        let file = SafeTensors::deserialize(&self.bytes)?;
        let view =
            file.tensor(name).map_err(|_| PredictorError::MissingTensor { tensor: name.to_owned() })?;
        matrix(name, &view)
    }
}

impl std::fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WeightFile").field("n_bytes", &self.bytes.len()).finish()
    }
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, PredictorError> {
    std::fs::read(path).map_err(|source| PredictorError::Read { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_type_keeps_what_it_can_hold() {
        let values = [0.0, -0.0, 1.0, -2.5, 0.125, 65504.0];
        for ty in [FloatType::F32, FloatType::F16] {
            let bytes = ty.encode(&values).unwrap();
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&ty.decode(&bytes)), bits(&values), "{ty:?}");
        }
        let bytes = FloatType::BF16.encode(&[1.0, 1.003_906_3, -3e38]).unwrap();
        assert_eq!(FloatType::BF16.decode(&bytes)[..2], [1.0, 1.0]);
        assert_eq!(FloatType::F16.encode(&[1.0, 65520.0]), Err(1));
        assert_eq!(FloatType::BF16.encode(&[f32::MAX]), Err(0));
    }

    #[test]
    fn transposing_moves_rows_to_columns() {
        let m = Matrix::new("m", 2, 3, vec![1., 2., 3., 4., 5., 6.]).unwrap();
        let t = m.transposed();
        assert_eq!((t.n_rows(), t.n_cols()), (3, 2));
        assert_eq!(t.values(), [1., 4., 2., 5., 3., 6.]);
        assert_eq!(t.transposed(), m);
    }

    #[test]
    fn a_matrix_refuses_other_counts_and_says_where_a_nan_is() {
        for (n_rows, n_cols, n) in [(2, 2, 3), (0, 4, 0), (usize::MAX, 2, 4)] {
            let err = Matrix::new("m", n_rows, n_cols, vec![0.0; n]).unwrap_err();
            assert!(matches!(err, PredictorError::Shape { .. }), "{err}");
        }
        let err = Matrix::new("m", 2, 2, vec![0., 1., 2., f32::NAN]).unwrap_err();
        assert!(matches!(err, PredictorError::NotFinite { row: 1, column: 1, .. }), "{err}");
    }
}
