//! Checked reader and writer for GGUF and PowerInfer (`PWRI`) model files.
//!
//! A model file is a header of keys, values and tensor records, and then the weights. [`GgufFile`] maps it
//! into memory, checks the header from the first byte to the last, and hands out views that borrow from the
//! map: after [`GgufFile::open`] every key is unique, every length lies in the file, and every tensor has a
//! known type, a shape of whole blocks and bytes that exist and are no other tensor's. What cannot be
//! trusted is an error ([`GgufError`]) that names the key or tensor and the byte offset. Weights are not
//! read before they are used.
//!
//! ```
//! use powerinfer_gguf::{GgmlType, GgufFile, GgufWriter, Magic};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut writer = GgufWriter::new(Magic::Gguf);
//! writer.key("general.architecture", "llama")?.key("llama.block_count", 2u32)?;
//! let weights: Vec<u8> = [0.5f32, -1.0].iter().flat_map(|w| w.to_le_bytes()).collect();
//! writer.tensor("output_norm.weight", &[2], GgmlType::F32, weights)?;
//! let bytes = writer.into_bytes()?; // or `writer.write("model.gguf")?`
//!
//! let file = GgufFile::from_bytes(bytes)?; // or `GgufFile::open("model.gguf")?`
//! let n_layer: u32 = file.metadata().require("llama.block_count")?;
//! let eps: Option<f32> = file.metadata().find("llama.attention.layer_norm_rms_epsilon")?;
//! assert_eq!((n_layer, eps), (2, None));
//! let norm = file.tensor("output_norm.weight").expect("written above");
//! assert_eq!(norm.decode()?, [0.5, -1.0]);
//! # Ok(())
//! # }
//! ```
//!
//! # What is where
//!
//! - [`GgufFile`] is one file, [`GgufModel`] one model, in one file or in the shards of llama.cpp's split
//!   tool.
//! - [`Metadata`] looks keys up and converts values: [`Metadata::require`], [`Metadata::find`],
//!   [`FromValue`].
//! - [`Tensor`] is a record with its data: shared ([`Tensor::bytes`]), borrowed, or decoded to f32.
//! - [`GgmlType`] lists what files may hold; [`GgmlType::weight_type`] what of that is computed with.
//! - [`GgufWriter`] writes a file in one go, tensor by tensor, and puts it in place when it is complete.
//! - [`GpuIndex`] is PowerInfer's index file, which says what neurons belong on the accelerator.
//!
//! # Rules for files
//!
//! GGUF versions 2 and 3, little-endian. `PWRI` files have the same layout; in them the tensor type ids 16,
//! 17 and 18 are the integers I8, I16 and I32. Keys have 1 to 65 535 bytes of UTF-8, tensor names 1 to 63.
//! Strings are bytes, as token texts need not be UTF-8. Arrays nest at most four deep. The alignment is a
//! power of two up to 1 MiB. Tensors have one to four dimensions, none of them zero (but for empty lists of
//! integers, which index files need), and follow each other in the order of their records with nothing but
//! padding between them, as llama.cpp asks too. Only the padding behind the last tensor may be absent.
//!
//! Parsing takes time linear in the length of the header and at most four times the length of the file in
//! memory, plus 1 MiB; a count or length in a file never reserves memory by itself.
//!
//! # What is not here
//!
//! This crate does not know what a layer, a head or a token is: which keys and tensors a model needs, and
//! whether their shapes fit each other, is checked where models are loaded. It does not compute: block
//! layouts and decoding are those of `powerinfer_sparse_ops::block`. It neither downloads nor converts.
//!
//! A mapped file must not change while it is open; see [`GgufFile::open`].
#![deny(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

mod cursor;
mod error;
mod file;
mod ggml_type;
mod gpu_index;
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
pub use gpu_index::{GpuIndex, GpuIndexError};
pub use metadata::Metadata;
pub use shape::ShapeFault;
pub use shards::GgufModel;
pub use tensor::Tensor;
pub use value::{ArrayIter, ArrayRef, FromValue, Value, ValueRef, ValueType};
pub use writer::{GgufWriter, TensorSource, WriteError};
