//! Rules for names and shapes of tensors, the same for reading and writing.

use crate::GgmlType;

/// Longest tensor name: ggml keeps 64 bytes with the closing NUL.
const MAX_NAME_BYTES: usize = 63;
/// Most dimensions.
pub(crate) const MAX_DIMS: usize = 4;
/// Largest count or size: other readers and system calls keep them in signed 64-bit numbers.
pub(crate) const MAX_SIZE: u64 = i64::MAX as u64;

/// A shape that no tensor can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeFault {
    /// No dimensions, or more than four.
    #[error("{n_dims} dimensions, allowed are 1 to 4")]
    DimCount {
        /// Their number.
        n_dims: u64,
    },
    /// A dimension of zero, or one that is negative as a signed number. Zero is allowed for a list of
    /// integers: PowerInfer's index files hold the empty list of neurons so.
    #[error("dimension {dim} on axis {axis}, allowed are 1 to 2^63 - 1")]
    BadDim {
        /// Which one; 0 is the contiguous one.
        axis: usize,
        /// Its value.
        dim: u64,
    },
    /// More elements than a signed 64-bit number counts.
    #[error("size overflow: the shape {dims:?} has more than 2^63 - 1 elements")]
    TooManyElements {
        /// The shape.
        dims: Vec<u64>,
    },
    /// More bytes, padding included, than a signed 64-bit number counts.
    #[error("size overflow: the shape {dims:?} of {ty} has more than 2^63 - 1 bytes")]
    TooManyBytes {
        /// The shape.
        dims: Vec<u64>,
        /// The type.
        ty: GgmlType,
    },
    /// Rows that are not whole blocks, though the whole tensor may be.
    #[error("a row of {n_cols} is not divisible by the {ty} block of {block_len}")]
    PartialBlock {
        /// The type.
        ty: GgmlType,
        /// Length of a row.
        n_cols: u64,
        /// Values in a block.
        block_len: usize,
    },
}

/// Checks a shape; returns the number of bytes of a tensor that has it.
pub(crate) fn check_shape(dims: &[u64], ty: GgmlType) -> Result<u64, ShapeFault> {
    let (Some(&n_cols), true) = (dims.first(), dims.len() <= MAX_DIMS) else {
        return Err(ShapeFault::DimCount { n_dims: dims.len() as u64 });
    };
    let may_be_empty = dims.len() == 1 && ty.is_integer();
    for (axis, &dim) in dims.iter().enumerate() {
        if dim > MAX_SIZE || (dim == 0 && !may_be_empty) {
            return Err(ShapeFault::BadDim { axis, dim });
        }
    }
    let fits = |&n: &u64| n <= MAX_SIZE;
    let elements = dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim).filter(fits));
    let elements = elements.ok_or_else(|| ShapeFault::TooManyElements { dims: dims.to_vec() })?;
    let block_len = ty.block_len() as u64;
    if !n_cols.is_multiple_of(block_len) {
        return Err(ShapeFault::PartialBlock { ty, n_cols, block_len: ty.block_len() });
    }
    let bytes = elements.checked_div(block_len).and_then(|n| n.checked_mul(ty.block_bytes() as u64));
    bytes.filter(fits).ok_or_else(|| ShapeFault::TooManyBytes { dims: dims.to_vec(), ty })
}

/// Checks a tensor name; returns the broken rule.
pub(crate) fn check_name(name: &[u8]) -> Result<&str, &'static str> {
    if name.is_empty() {
        return Err("names are not empty");
    }
    if name.len() > MAX_NAME_BYTES {
        return Err("names have at most 63 bytes");
    }
    if name.contains(&0) {
        return Err("names hold no NUL byte");
    }
    std::str::from_utf8(name).map_err(|_| "names are UTF-8")
}

/// `n` rounded up to a multiple of the alignment, a power of two.
pub(crate) fn pad(n: u64, alignment: u32) -> Option<u64> {
    n.checked_next_multiple_of(alignment.into()).filter(|&n| n <= MAX_SIZE)
}
