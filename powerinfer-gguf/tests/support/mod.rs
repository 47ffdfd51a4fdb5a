//! A builder of GGUF files that may be wrong in any place.
#![allow(dead_code, reason = "each test file uses its own part of it")]

/// Value type ids.
pub(crate) const U8: u32 = 0;
pub(crate) const I8: u32 = 1;
pub(crate) const U32: u32 = 4;
pub(crate) const I32: u32 = 5;
pub(crate) const F32: u32 = 6;
pub(crate) const BOOL: u32 = 7;
pub(crate) const STRING: u32 = 8;
pub(crate) const ARRAY: u32 = 9;

/// What a file is made of. `build` writes counts and padding as they should be unless told otherwise.
#[derive(Clone)]
pub(crate) struct Raw {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) n_tensors: Option<u64>,
    pub(crate) n_keys: Option<u64>,
    pub(crate) alignment: usize,
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) tensors: Vec<Vec<u8>>,
    pub(crate) data: Vec<u8>,
}

impl Raw {
    pub(crate) fn new() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            n_tensors: None,
            n_keys: None,
            alignment: 32,
            keys: Vec::new(),
            tensors: Vec::new(),
            data: Vec::new(),
        }
    }

    /// Bytes in place of a whole entry.
    pub(crate) fn entry(mut self, bytes: Vec<u8>) -> Self {
        self.keys.push(bytes);
        self
    }

    /// An entry with a value type id and the bytes of the value.
    pub(crate) fn key(self, key: impl AsRef<[u8]>, ty: u32, value: impl AsRef<[u8]>) -> Self {
        let entry = [&string(key.as_ref()), &ty.to_le_bytes()[..], value.as_ref()].concat();
        self.entry(entry)
    }

    pub(crate) fn key_u32(self, key: &str, value: u32) -> Self {
        self.key(key, U32, value.to_le_bytes())
    }

    pub(crate) fn key_str(self, key: &str, value: &str) -> Self {
        self.key(key, STRING, string(value.as_bytes()))
    }

    /// A tensor record.
    pub(crate) fn tensor(mut self, name: impl AsRef<[u8]>, dims: &[u64], ty: u32, offset: u64) -> Self {
        let mut record = string(name.as_ref());
        record.extend((dims.len() as u32).to_le_bytes());
        record.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        record.extend(ty.to_le_bytes());
        record.extend(offset.to_le_bytes());
        self.tensors.push(record);
        self
    }

    /// Bytes of the data section.
    pub(crate) fn data(mut self, n: usize) -> Self {
        self.data = vec![0; n];
        self
    }

    /// The file up to and without the padding before the data.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.n_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        out.extend(self.keys.concat());
        out.extend(self.tensors.concat());
        out
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut out = self.header();
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// A length and bytes.
pub(crate) fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// The head of an array and the bytes of its elements.
pub(crate) fn array(element: u32, len: u64, elements: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &len.to_le_bytes(), elements].concat()
}

/// An array in an array in an array, `depth` of them; the innermost holds one byte.
pub(crate) fn nested(depth: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 1..depth {
        out.extend(array(ARRAY, 1, &[]));
    }
    out.extend(array(U8, 1, &[7]));
    out
}

/// A small file with keys of several types and two tensors.
pub(crate) fn good() -> Raw {
    Raw::new()
        .key_str("general.architecture", "llama")
        .key_u32("llama.block_count", 2)
        .key("flag", BOOL, [1])
        .key("tokens", ARRAY, array(STRING, 2, &[string(b"a"), string(b"\xff\xfe")].concat()))
        .tensor("a", &[32, 2], 2, 0)
        .tensor("b", &[5], 0, 64)
        .data(96)
}
