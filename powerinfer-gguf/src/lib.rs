//! Checked reader and writer for GGUF and PowerInfer (`PWRI`) model files.
#![deny(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

mod cursor;
mod error;
mod file;
mod ggml_type;
#[cfg(feature = "mmap")]
mod map;
mod metadata;
mod names;
mod shape;
mod shards;
mod tensor;
mod value;
mod writer;

pub use error::{FileHint, GgufError, Name};
pub use file::{GgufFile, Magic};
pub use ggml_type::GgmlType;
pub use metadata::Metadata;
pub use shape::ShapeFault;
pub use shards::GgufModel;
pub use tensor::Tensor;
pub use value::{ArrayIter, ArrayRef, FromValue, Value, ValueRef, ValueType};
pub use writer::{GgufWriter, TensorSource, WriteError};
