//! The demo model: a small Llama with a ReLU FFN that tells children's stories, with its predictors.
//!
//! It is there so that examples, tests and the command line have something real to run without a download:
//! 2.7 million parameters, 5 layers, 192 wide, 640 neurons a layer, 2048 tokens of vocabulary; on average 8
//! of 100 neurons are active for a token. The file is a `PWRI` file in Q8_0 and carries the tokenizer. Where
//! it comes from, and what was measured, is told in the README of this crate.
//!
//! What it is not: a useful language model. It knows the words of simple stories and nothing of the world.
//!
//! # Example
//!
//! ```
//! use powerinfer_gguf::{GgufFile, Magic};
//!
//! let file = GgufFile::from_bytes(powerinfer_demo_model::MODEL)?;
//! assert_eq!(file.magic(), Magic::Pwri);
//! assert_eq!(file.metadata().require::<u32>("llama.block_count")?, 5);
//! # Ok::<(), powerinfer_gguf::GgufError>(())
//! ```
//!
//! With powerinfer-core, `Model::from_bytes(powerinfer_demo_model::MODEL, &LoadOptions::default())` loads it;
//! no byte of the weights is copied.
#![forbid(unsafe_code)]

/// Puts the bytes behind it at an address that is a multiple of 64.
#[repr(align(64))]
struct Aligned<T: ?Sized>(T);

static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!("../tiny-stories-relu.gguf"));

/// The bytes of the model file.
///
/// They start at a multiple of 64 bytes in memory, so that tensors, which start at multiples of 32 in the
/// file, are aligned for every type and can be used where they lie.
pub static MODEL: &[u8] = &ALIGNED.0;

#[cfg(test)]
mod tests {
    use powerinfer_gguf::{GgmlType, GgufFile, Magic};

    use super::*;

    #[test]
    fn tensors_are_aligned_in_memory() {
        assert!(MODEL.as_ptr().addr().is_multiple_of(64));
        let file = GgufFile::from_bytes(MODEL).unwrap();
        for tensor in file.tensors() {
            assert!(tensor.as_slice().as_ptr().addr().is_multiple_of(32), "{tensor:?}");
        }
    }

    #[test]
    fn the_file_is_a_whole_sparse_relu_model() {
        let file = GgufFile::from_bytes(MODEL).unwrap();
        assert_eq!(file.magic(), Magic::Pwri);
        assert_eq!(file.metadata().require::<&str>("llama.hidden_act").unwrap(), "relu");
        assert_eq!(file.metadata().require::<f32>("powerinfer.sparse_threshold").unwrap(), 0.0);
        let dims = |name: String| file.tensor(&name).map(|t| (t.dims().to_vec(), t.ty()));
        for layer in 0..5 {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            assert_eq!(dims(name("ffn_down_t")), Some((vec![192, 640], GgmlType::Q8_0)));
            assert_eq!(dims(name("fc1")), Some((vec![192, 48], GgmlType::F16)));
            assert_eq!(dims(name("fc2")), Some((vec![48, 640], GgmlType::F16)));
        }
        file.check_finite().unwrap();
    }
}
