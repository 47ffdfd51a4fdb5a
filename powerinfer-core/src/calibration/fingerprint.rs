//! What tells one model file from another.

use powerinfer_gguf::{GgufModel, Tensor};
use sha2::{Digest, Sha256};

/// Pieces of a tensor that are looked at, and their length in bytes.
const N_PIECES: usize = 16;
const PIECE_BYTES: usize = 256;

/// A hash over the header of a model's files (every key, and the name, type, shape and place of every tensor) and
/// a sample of the gate of each layer (of its up projection where there is no gate). Reads a few kilobytes a layer.
pub fn fingerprint(file: &GgufModel) -> String {
    let mut hash = Sha256::new();
    for file in file.files() {
        hash.update(&file.bytes()[..file.data_range().start]);
    }
    for layer in 0u32.. {
        let tensor = |part: &str| file.tensor(&format!("blk.{layer}.{part}.weight"));
        let Some(gate) = tensor("ffn_gate").or_else(|| tensor("ffn_up")) else { break };
        sample(&gate, &mut hash);
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn sample(tensor: &Tensor<'_>, hash: &mut Sha256) {
    let bytes = tensor.as_slice();
    let len = bytes.len().min(PIECE_BYTES);
    for piece in 0..N_PIECES {
        let first = (bytes.len() - len) / (N_PIECES - 1) * piece;
        hash.update(&bytes[first..first + len]);
    }
}
