//! Any bytes give a file or an error, and a file that was accepted can be read in full.
#![no_main]

use powerinfer_gguf::{GgufFile, GpuIndex};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(file) = GgufFile::from_bytes(bytes.to_vec()) {
        let keys = file.metadata();
        keys.iter().for_each(|(key, value)| drop((value.to_value(), keys.require::<Vec<&str>>(key))));
        file.tensors().for_each(|tensor| drop((tensor.decode(), tensor.i32_values())));
        drop(GpuIndex::parse(&file));
    }
});
