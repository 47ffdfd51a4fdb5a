//! Files that must be refused, each with an error of its own kind. The numbers G1 to G36 are those of the
//! project's list of hostile inputs; what needs the meaning of a model is tested with the engine.
#![allow(clippy::unwrap_used, reason = "a failure of a helper fails its test")]

mod support;

use std::fs;
use std::path::Path;

use powerinfer_gguf::{
    FileHint, GgmlType, GgufError, GgufFile, GgufModel, GgufWriter, GpuIndex, GpuIndexError, Magic,
    ShapeFault, Value, ValueType,
};
use powerinfer_sparse_ops::{NeuronId, NeuronSet};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure};
use support::{ARRAY, BOOL, F32, I8, I32, Raw, STRING, U8, array, good, nested, string};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Parses and returns the error, after checking that little memory was used and that the text has the parts.
fn refused(bytes: Vec<u8>, parts: &[&str]) -> GgufError {
    let n_bytes = bytes.len() as u64;
    let (result, stats) = measure(|| GgufFile::from_bytes(bytes));
    let error = match result {
        Ok(file) => panic!("accepted: {file:?}"),
        Err(error) => error,
    };
    assert!(stats.peak_bytes <= 4 * n_bytes + (1 << 20), "{stats:?} for {n_bytes} bytes");
    assert_text(&error, parts);
    error
}

fn assert_text(error: &dyn std::error::Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "`{text}` does not say `{part}`");
    }
    assert!(!text.contains('\n') && text.len() < 1000, "{text}");
}

macro_rules! assert_refused {
    ($bytes:expr, $pattern:pat $(if $guard:expr)?, $($part:expr),+ $(,)?) => {
        let error = refused($bytes, &[$($part),+]);
        assert!(matches!(error, $pattern $(if $guard)?), "{error:?}");
    };
}

fn one_tensor(dims: &[u64], ty: u32) -> Raw {
    Raw::new().tensor("blk.0.ffn_up.weight", dims, ty, 0)
}

#[test]
fn the_good_file_is_accepted() {
    let file = GgufFile::from_bytes(good().build()).unwrap();
    assert_eq!((file.n_tensors(), file.metadata().len()), (2, 4));
    assert_eq!(file.tensor("b").unwrap().as_slice(), [0; 20]);
}

#[test]
fn g1_what_is_no_gguf_file() {
    assert_refused!(vec![], GgufError::TooShort { n_bytes: 0, .. }, "0 bytes");
    assert_refused!(b"GGU".to_vec(), GgufError::TooShort { n_bytes: 3, .. }, "3 bytes", "`GGU`");
    let page = b"\n<!DOCTYPE html><title>Not found</title>".to_vec();
    assert_refused!(
        page,
        GgufError::BadMagic { hint: Some(FileHint::WebPage), .. },
        "\\n<!DOCTYPE",
        "web page"
    );
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0".to_vec();
    assert_refused!(pointer, GgufError::BadMagic { hint: Some(FileHint::LfsPointer), .. }, "git lfs pull");
    let zip = b"PK\x03\x04abc".to_vec();
    assert_refused!(zip, GgufError::BadMagic { hint: Some(FileHint::Zip), .. }, "PK\\u{3}");

    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [("empty", &b""[..]), ("short", b"GG")] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        for result in [GgufFile::open(&path), GgufFile::read(&path)] {
            assert!(matches!(result, Err(GgufError::TooShort { .. })), "{name}: {result:?}");
        }
    }
    let absent = GgufFile::open(folder.path().join("absent")).unwrap_err();
    assert!(matches!(absent, GgufError::Io { .. }), "{absent:?}");
    assert_text(&absent, &["absent"]);
    assert!(matches!(GgufFile::open(folder.path()), Err(GgufError::Io { .. })));
}

#[test]
fn g2_another_magic() {
    for (magic, hint) in
        [(*b"FUGG", None), (*b"GGML", Some(FileHint::OldGgml)), (*b"tjgg", Some(FileHint::OldGgml))]
    {
        let error = refused(Raw { magic, ..good() }.build(), &[std::str::from_utf8(&magic).unwrap()]);
        assert!(matches!(error, GgufError::BadMagic { hint: found, .. } if found == hint), "{error:?}");
    }
    let pwri = GgufFile::from_bytes(Raw { magic: *b"PWRI", ..good() }.build()).unwrap();
    assert_eq!(pwri.magic(), Magic::Pwri);
    assert_eq!(GgufFile::from_bytes(good().build()).unwrap().magic(), Magic::Gguf);
}

#[test]
fn g3_other_versions() {
    for version in [0, 1, 4, 5, 0x0300_0001, u32::MAX] {
        let bytes = Raw { version, ..good() }.build();
        assert_refused!(bytes, GgufError::UnsupportedVersion { version: v } if v == version, "2 and 3");
    }
    for version in 1u32..=3 {
        let bytes = Raw { version: version.swap_bytes(), ..good() }.build();
        assert_refused!(bytes, GgufError::BigEndian { version: v } if v == version, "big-endian");
    }
    for version in [2, 3] {
        assert_eq!(GgufFile::from_bytes(Raw { version, ..good() }.build()).unwrap().version(), version);
    }
}

#[test]
fn g4_counts_beyond_the_file() {
    for count in [u64::MAX, 500_000_000, 1 << 32, 5] {
        let bytes = Raw { n_tensors: Some(count), ..Raw::new() }.build();
        assert_refused!(
            bytes,
            GgufError::CountExceedsFile { what: "tensors", at: 8, count: c, .. }
                if c == count,
            "tensors"
        );
        let bytes = Raw { n_keys: Some(count), ..Raw::new() }.header();
        assert_eq!(bytes.len(), 24);
        assert_refused!(
            bytes,
            GgufError::CountExceedsFile { what: "keys", at: 16, limit: 0, .. },
            "keys",
            "offset 16"
        );
    }
    // One more than there is: whatever follows is read as an entry and refused.
    assert!(GgufFile::from_bytes(Raw { n_keys: Some(5), ..good() }.build()).is_err());
    assert!(GgufFile::from_bytes(Raw { n_tensors: Some(3), ..good() }.build()).is_err());
}

#[test]
fn g5_bad_key_lengths() {
    let entry = |len: u64| Raw::new().entry([&len.to_le_bytes()[..], &[b'k'; 70_000]].concat()).build();
    for len in [0, 65_536, 1 << 40, u64::MAX] {
        assert_refused!(entry(len), GgufError::BadKeyLength { at: 24, len: l, .. } if l == len, "offset 24");
    }
    let longest = "k".repeat(65_535);
    let file = GgufFile::from_bytes(Raw::new().key(&longest, U8, [3]).build()).unwrap();
    assert_eq!(file.metadata().require::<u8>(&longest).unwrap(), 3);
}

#[test]
fn g6_strings_longer_than_the_file() {
    for len in [1u64 << 63, 1 << 40, 17, u64::MAX] {
        let value = [&len.to_le_bytes()[..], &[b'x'; 16]].concat();
        let bytes = Raw::new().key("general.name", STRING, value).header();
        assert_refused!(
            bytes,
            GgufError::StringExceedsFile { len: l, have: 16, .. }
                if l == len,
            "`general.name`"
        );
        let value = array(STRING, 2, &[string(b"a"), len.to_le_bytes().to_vec(), vec![0; 16]].concat());
        let bytes = Raw::new().key("tokens", ARRAY, value).header();
        assert_refused!(bytes, GgufError::StringExceedsFile { len: l, .. } if l == len, "`tokens`");
    }
}

#[test]
fn g7_text_that_is_not_utf8() {
    let bytes = Raw::new().key(b"ke\xffy\n", U8, [0]).build();
    assert_refused!(bytes, GgufError::KeyNotUtf8 { at: 32, .. }, "`ke\\xffy\\n`");
    let bytes = Raw::new().tensor(b"t\xff", &[1], 0, 0).data(4).build();
    assert_refused!(bytes, GgufError::BadTensorName { rule: "names are UTF-8", .. }, "`t\\xff`");

    // Token texts are bytes.
    let file = GgufFile::from_bytes(good().build()).unwrap();
    assert_eq!(file.metadata().require::<Vec<&[u8]>>("tokens").unwrap(), [&b"a"[..], b"\xff\xfe"]);
    let error = file.metadata().require::<Vec<&str>>("tokens").unwrap_err();
    assert!(matches!(error, GgufError::WrongKeyType { .. }));
    assert_text(&error, &["`tokens`", "array of UTF-8 string", "array of 2 string"]);
}

#[test]
fn g8_unknown_value_types() {
    for id in [13, 14, 255, u32::MAX] {
        let bytes = Raw::new().key("k", id, [0; 16]).build();
        assert_refused!(
            bytes,
            GgufError::UnknownValueType { at: 33, id: i, .. }
                if i == id,
            "`k`", "offset 33"
        );
    }
}

#[test]
fn g9_bools_other_than_0_and_1() {
    assert_refused!(
        Raw::new().key("k", BOOL, [2]).build(),
        GgufError::BadBool { value: 2, at: 37, .. },
        "`k`"
    );
    let value = array(BOOL, 3, &[0, 1, 255]);
    assert_refused!(
        Raw::new().key("k", ARRAY, value).build(),
        GgufError::BadBool { value: 255, at: 51, .. },
        "`k`"
    );
}

#[test]
fn g10_arrays_longer_than_the_file() {
    // Times 8 the first wraps to 0; the last is one more than there is.
    for len in [1u64 << 61, u64::MAX, 1 << 58, 1 << 40, 3] {
        let bytes = Raw::new().key("k", ARRAY, array(10, len, &[0; 16])).header();
        assert_refused!(
            bytes,
            GgufError::ArrayExceedsFile { len: l, element: ValueType::U64, limit: 2, at: 41, .. }
                if l == len,
            "`k`"
        );
    }
    // An array of strings or of arrays needs at least its lengths.
    let bytes = Raw::new().key("k", ARRAY, array(STRING, 3, &[0; 16])).header();
    assert_refused!(bytes, GgufError::ArrayExceedsFile { limit: 2, .. }, "3 string");
    let bytes = Raw::new().key("k", ARRAY, array(ARRAY, 2, &[0; 16])).header();
    assert_refused!(bytes, GgufError::ArrayExceedsFile { limit: 1, .. }, "2 array");
}

#[test]
fn g11_arrays_nested_too_deep() {
    for depth in [5, 17, 5_000, 200_000] {
        let bytes = Raw::new().key("k", ARRAY, nested(depth)).build();
        let (error, stats) = measure(|| refused(bytes, &["`k`", "nested"]));
        assert!(matches!(error, GgufError::ArrayTooDeep { limit: 4, .. }), "{error:?}");
        assert!(stats.peak_bytes < 1 << 20, "{stats:?}");
    }
    let file =
        GgufFile::from_bytes(Raw::new().key("k", ARRAY, nested(4)).key_u32("after", 9).build()).unwrap();
    assert_eq!(file.metadata().require::<Vec<Vec<Vec<Vec<u8>>>>>("k").unwrap(), [[[[7]]]]);
    assert_eq!(file.metadata().require::<u32>("after").unwrap(), 9);
}

#[test]
fn g12_arrays_of_an_unknown_type() {
    for id in [13, 200, u32::MAX] {
        for len in [0, 1] {
            let bytes = Raw::new().key("k", ARRAY, array(id, len, &[0; 16])).build();
            assert_refused!(bytes, GgufError::UnknownElementType { at: 37, id: i, .. } if i == id, "`k`");
        }
    }
}

#[test]
fn g13_a_key_twice() {
    let bytes = Raw::new().key_u32("a", 1).key_u32("b", 2).key_u32("a", 1).build();
    assert_refused!(bytes, GgufError::DuplicateKey { first_at: 24, at: 58, .. }, "`a`", "24", "58");
}

#[test]
fn g14_bad_alignments() {
    for alignment in [0, 3, 13, 48, 1 << 21, 1 << 31, u32::MAX] {
        let bytes = Raw::new().key_u32("general.alignment", alignment).build();
        assert_refused!(
            bytes,
            GgufError::BadAlignment { at: 24, alignment: a, .. }
                if a == alignment,
            "power of two"
        );
    }
    for (ty, value) in [
        (I32, &[32, 0, 0, 0][..]),
        (I32, &[0xff; 4]),
        (10, &[32, 0, 0, 0, 0, 0, 0, 0]),
        (U8, &[32]),
        (F32, &[0; 4]),
    ] {
        let bytes = Raw::new().key("general.alignment", ty, value).build();
        assert_refused!(bytes, GgufError::AlignmentType { at: 24, .. }, "u32");
    }
    for alignment in [1u32, 8, 64, 4096, 1 << 20] {
        let second = 3u64.next_multiple_of(alignment.into());
        let mut raw = Raw::new().key_u32("general.alignment", alignment);
        raw = raw.tensor("t", &[3], 24, 0).tensor("u", &[1], 24, second).data(second as usize + 1);
        raw.alignment = alignment as usize;
        let file = GgufFile::from_bytes(raw.build()).unwrap();
        assert_eq!(file.alignment(), alignment);
        assert_eq!(file.tensor("u").unwrap().offset() + 1, file.data_range().end);
    }
    assert_eq!(GgufFile::from_bytes(good().build()).unwrap().alignment(), 32);
}

#[test]
fn g15_bad_numbers_of_dimensions() {
    for n_dims in [0u32, 5, 9, u32::MAX] {
        let mut raw = one_tensor(&[1; 9], 0);
        let name = "blk.0.ffn_up.weight".len();
        raw.tensors[0][8 + name..12 + name].copy_from_slice(&n_dims.to_le_bytes());
        assert_refused!(
            raw.build(),
            GgufError::BadShape { at: 24, fault: ShapeFault::DimCount { n_dims: n }, .. }
                if n == n_dims.into(),
            "`blk.0.ffn_up.weight`", "1 to 4"
        );
    }
}

#[test]
fn g16_bad_dimensions() {
    for (dims, wanted) in [(&[32, 0][..], 1), (&[0], 0), (&[1 << 63], 0), (&[32, u64::MAX], 1)] {
        assert_refused!(
            one_tensor(dims, 0).build(),
            GgufError::BadShape { fault: ShapeFault::BadDim { axis, dim }, .. }
                if axis == wanted && dim == dims[axis],
            "`blk.0.ffn_up.weight`", "2^63"
        );
    }
    // Only a list of integers may be empty: the index files of PowerInfer need that.
    assert_refused!(one_tensor(&[0], 2).build(), GgufError::BadShape { .. }, "dimension 0");
    assert_refused!(one_tensor(&[0, 3], 26).build(), GgufError::BadShape { .. }, "dimension 0");
    let file = GgufFile::from_bytes(one_tensor(&[0], 26).build()).unwrap();
    assert_eq!(file.tensor("blk.0.ffn_up.weight").unwrap().i32_values().unwrap(), []);
}

#[test]
fn g17_shapes_with_too_many_elements() {
    let i8 = GgmlType::I8.id(Magic::Gguf).unwrap();
    for (dims, ty) in [
        (&[1 << 33, 1 << 33][..], 0),
        (&[(1 << 63) - 1, 2], i8),
        (&[1 << 32, 1 << 32], i8),
        (&[1 << 62, 4], i8),
        (&[(1 << 63) - 1, (1 << 63) - 1, (1 << 63) - 1, 1], i8),
    ] {
        assert_refused!(
            one_tensor(dims, ty).build(),
            GgufError::BadShape { fault: ShapeFault::TooManyElements { .. }, .. },
            "size overflow",
            "`blk.0.ffn_up.weight`"
        );
    }
}

#[test]
fn g18_sizes_that_wrap() {
    let i8 = GgmlType::I8.id(Magic::Gguf).unwrap();
    let too_many_bytes = |bytes, name: &str| {
        assert_refused!(
            bytes,
            GgufError::BadShape { fault: ShapeFault::TooManyBytes { .. }, .. },
            "size overflow",
            name
        );
    };
    // 2^62 - 4 elements of 4 bytes: 16 bytes short of 2^64, and over it when padded.
    too_many_bytes(one_tensor(&[4, (1 << 30) - 1, (1 << 30) + 1], 0).build(), "`blk.0.ffn_up.weight`");
    // Fits by itself, not when padded.
    too_many_bytes(one_tensor(&[(1 << 63) - 1], i8).build(), "`blk.0.ffn_up.weight`");
    // Each fits, both do not.
    let size = (1 << 63) - 64;
    let both = Raw::new().tensor("first", &[size], i8, 0).tensor("second", &[size], i8, size);
    let error = refused(both.build(), &["size overflow"]);
    assert!(matches!(error, GgufError::BadShape { .. }), "{error:?}");
    // A block type whose product wraps only with the bytes of a block.
    too_many_bytes(one_tensor(&[1 << 40, 1 << 22], 0).build(), "`blk.0.ffn_up.weight`");
}

#[test]
fn g19_rows_of_partial_blocks() {
    for (dims, ty, wanted, len) in
        [(&[48, 64][..], 2, GgmlType::Q4_0, 32), (&[896, 2], 12, GgmlType::Q4_K, 256)]
    {
        assert_refused!(
            one_tensor(dims, ty).data(4096).build(),
            GgufError::BadShape { fault: ShapeFault::PartialBlock { ty, n_cols, block_len }, .. }
                if ty == wanted && n_cols == dims[0] && block_len == len,
            "row", &dims[0].to_string(), &len.to_string(), "`blk.0.ffn_up.weight`"
        );
    }
}

#[test]
fn g20_unknown_tensor_types() {
    for (id, name) in [
        (4, Some("Q4_2")),
        (5, Some("Q4_3")),
        (31, Some("Q4_0_4_4")),
        (36, Some("IQ4_NL_4_4")),
        (42, None),
        (1 << 31, None),
    ] {
        assert_refused!(
            one_tensor(&[32], id).build(),
            GgufError::UnknownTensorType { id: i, removed, .. } if i == id && removed == name,
            "`blk.0.ffn_up.weight`", &id.to_string(), name.unwrap_or("unknown"), "Q4_K", "MXFP4"
        );
    }
    // Known to files, not to the decoders: the error is made where the values are wanted.
    let file = GgufFile::from_bytes(one_tensor(&[256], 16).data(66).build()).unwrap();
    let error = file.tensor("blk.0.ffn_up.weight").unwrap().decode().unwrap_err();
    assert!(matches!(error, GgufError::NotDecodable { ty: GgmlType::IQ2_XXS, .. }), "{error:?}");
    // The same id is an integer type in PWRI files.
    let raw = Raw { magic: *b"PWRI", ..one_tensor(&[256], 16).data(256) };
    let file = GgufFile::from_bytes(raw.build()).unwrap();
    assert_eq!(file.tensors().next().unwrap().ty(), GgmlType::I8);
    let error = file.tensors().next().unwrap().i32_values().unwrap_err();
    assert!(matches!(error, GgufError::NotI32 { ty: GgmlType::I8, .. }), "{error:?}");
}

#[test]
fn g21_bad_tensor_names() {
    let long = "n".repeat(64);
    for (name, rule) in [(&b""[..], "not empty"), (long.as_bytes(), "63 bytes"), (b"a\0b", "NUL")] {
        let bytes = Raw::new().tensor(name, &[1], 0, 0).data(4).build();
        assert_refused!(bytes, GgufError::BadTensorName { at: 24, .. }, rule, "offset 24");
    }
    let mut raw = Raw::new().tensor("t", &[1], 0, 0).data(4);
    raw.tensors[0][..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_refused!(raw.build(), GgufError::BadTensorName { len: u64::MAX, .. }, "exceeds the file");
    assert!(GgufFile::from_bytes(Raw::new().tensor("n".repeat(63), &[1], 0, 0).data(4).build()).is_ok());
}

#[test]
fn g22_a_tensor_twice() {
    let bytes = Raw::new().tensor("a", &[1], 0, 0).tensor("a", &[1], 0, 32).data(36).build();
    assert_refused!(bytes, GgufError::DuplicateTensor { first_at: 24, at: 57, .. }, "`a`", "24", "57");
}

#[test]
fn g23_bad_offsets() {
    let second = |offset| Raw::new().tensor("a", &[16], 0, 0).tensor("b", &[1], 0, offset).data(256).build();
    assert!(GgufFile::from_bytes(second(64)).is_ok());
    for offset in [1, 65, 68, u64::MAX] {
        assert_refused!(
            second(offset),
            GgufError::TensorMisaligned { offset: o, .. }
                if o == offset,
            "`b`", "32"
        );
    }
    for offset in [0, 32] {
        assert_refused!(second(offset), GgufError::TensorOverlap { expected: 64, .. }, "`b`", "overlaps");
    }
    for offset in [96, 128] {
        assert_refused!(second(offset), GgufError::TensorGap { expected: 64, .. }, "`b`", "bad offset");
    }
    let bytes = Raw::new().tensor("a", &[1], 0, 32).data(64).build();
    assert_refused!(bytes, GgufError::TensorGap { expected: 0, .. }, "`a`");
}

#[test]
fn g24_data_outside_the_file() {
    let second = |offset, dims: &[u64]| {
        Raw::new().tensor("a", &[16], 0, 0).tensor("b", dims, 24, offset).data(128).build()
    };
    for (offset, dims) in [
        (128, &[1][..]),
        (96, &[33]),
        (u64::MAX - 31, &[64]),
        (u64::MAX - 31, &[32]),
        (1 << 63, &[1]),
        (0, &[129]),
    ] {
        let bytes = second(offset, dims);
        let file_bytes = bytes.len().to_string();
        assert_refused!(
            bytes,
            GgufError::TensorOutsideFile { offset: o, data_bytes: 128, .. } if o == offset,
            "`b`", &offset.to_string(), &file_bytes
        );
    }
}

#[test]
fn g25_a_file_cut_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let whole = good().build();
    // The data ends with 20 bytes of `b`; what follows is padding, which nobody misses.
    let used = whole.len() - 12;
    for len in 0..used {
        let cut = whole[..len].to_vec();
        let path = folder.path().join("cut.gguf");
        fs::write(&path, &cut).unwrap();
        let mapped = GgufFile::open(&path).unwrap_err();
        let error = refused(cut, &[]);
        assert_eq!(mapped.to_string(), error.to_string());
        if len >= good().header().len() {
            let GgufError::Truncated { need, have, .. } = error else { panic!("{len}: {error:?}") };
            assert_eq!((need, have), (used as u64, len as u64));
            assert_text(&error, &["truncated", &used.to_string(), &len.to_string()]);
        }
    }
    for len in used..=whole.len() {
        assert!(GgufFile::from_bytes(whole[..len].to_vec()).is_ok(), "{len}");
    }
    // Cut inside the first tensor, the first tensor is named.
    let cut = whole[..good().header().len().next_multiple_of(32) + 3].to_vec();
    assert_refused!(cut, GgufError::Truncated { .. }, "`a`");
    assert_refused!(
        b"GGUF\x03\0".to_vec(),
        GgufError::UnexpectedEnd { at: 4, need: 4, have: 2, .. },
        "truncated",
        "version"
    );
}

#[test]
fn g26_a_file_read_into_memory_may_change_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, good().build()).unwrap();
    let file = GgufFile::read(&path).unwrap();
    fs::write(&path, b"").unwrap();
    assert_eq!(file.tensor("b").unwrap().bytes().as_slice(), [0; 20]);
}

#[test]
fn g28_values_of_the_wrong_type() {
    let bytes = Raw::new()
        .key_u32("count", 7)
        .key("negative", I8, [0xff])
        .key("list", ARRAY, array(I32, 2, &[4, 0, 0, 0, 8, 0, 0, 0]))
        .key_str("name", "llama")
        .key("eps", F32, 1e-5f32.to_le_bytes())
        .build();
    let file = GgufFile::from_bytes(bytes).unwrap();
    let keys = file.metadata();

    let missing = keys.require::<u32>("absent").unwrap_err();
    assert!(matches!(missing, GgufError::MissingKey { .. }));
    assert_text(&missing, &["`absent`", "u32"]);
    assert_eq!(keys.find::<u32>("absent").unwrap(), None);

    let wrong = |error: GgufError, parts: &[&str]| {
        assert!(matches!(error, GgufError::WrongKeyType { .. }), "{error:?}");
        assert_text(&error, parts);
    };
    wrong(keys.require::<u32>("list").unwrap_err(), &["`list`", "u32", "array of 2 i32", "offset"]);
    wrong(keys.require::<u32>("negative").unwrap_err(), &["`negative`", "u32", "i8 -1"]);
    wrong(keys.require::<u32>("name").unwrap_err(), &["`name`", "u32", "string"]);
    wrong(keys.find::<f32>("count").unwrap_err(), &["`count`", "f32", "u32 7"]);
    wrong(keys.find::<bool>("count").unwrap_err(), &["bool", "u32 7"]);
    wrong(keys.find::<&str>("eps").unwrap_err(), &["string", "f32 0.00001"]);
    wrong(keys.find::<Vec<f32>>("list").unwrap_err(), &["array of f32", "array of 2 i32"]);
    wrong(keys.find::<Vec<u32>>("count").unwrap_err(), &["array of u32", "u32 7"]);
    wrong(keys.u32_or_array("name").unwrap_err(), &["u32 or array of u32", "string"]);

    // Widths convert where the value fits, and one number may stand for all layers.
    assert_eq!(keys.require::<u64>("count").unwrap(), 7);
    assert_eq!(keys.require::<i64>("negative").unwrap(), -1);
    assert_eq!(keys.require::<Vec<u64>>("list").unwrap(), [4, 8]);
    assert_eq!(keys.u32_or_array("list").unwrap().unwrap(), [4, 8]);
    assert_eq!(keys.u32_or_array("count").unwrap().unwrap(), [7]);
    assert_eq!(keys.u32_or_array("absent").unwrap(), None);
}

/// Writes shard `no` of `count` with one tensor.
fn write_shard(folder: &Path, file: &str, magic: Magic, keys: [(&str, u64); 3], tensor: &str) {
    let mut writer = GgufWriter::new(magic);
    for (key, value) in keys {
        writer.key(key, value).unwrap();
    }
    writer.tensor(tensor, &[1], GgmlType::F32, vec![0; 4]).unwrap();
    writer.write(folder.join(file)).unwrap();
}

const SHARDS: [&str; 3] = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"];

fn write_set(folder: &Path) {
    for (ix, (file, tensor)) in SHARDS.into_iter().zip(["a", "b", "c"]).enumerate() {
        write_shard(folder, file, Magic::Gguf, split(ix as u64, 3, 3), tensor);
    }
}

fn split(no: u64, count: u64, n_tensors: u64) -> [(&'static str, u64); 3] {
    [("split.no", no), ("split.count", count), ("split.tensors.count", n_tensors)]
}

#[test]
fn g34_shard_sets_that_are_not_complete() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let first = folder.join(SHARDS[0]);
    let open = || GgufModel::open(&first).map(drop).unwrap_err();
    write_set(folder);
    for model in [GgufModel::open(&first).unwrap(), GgufModel::read(&first).unwrap()] {
        assert_eq!(model.n_tensors(), 3);
        assert_eq!(model.tensors().map(|t| t.name().to_owned()).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(model.tensor("c").unwrap().name(), "c");
        assert!(model.tensor("d").is_none());
        assert_eq!(model.files().len(), 3);
    }

    let error = GgufModel::open(folder.join(SHARDS[1])).unwrap_err();
    assert!(matches!(error, GgufError::NotFirstShard { no: 2, count: 3, .. }), "{error:?}");
    assert_text(&error, &[SHARDS[0], SHARDS[1]]);

    fs::rename(folder.join(SHARDS[1]), folder.join("aside")).unwrap();
    let error = open();
    assert!(matches!(error, GgufError::ShardMissing { count: 3, .. }), "{error:?}");
    assert_text(&error, &[SHARDS[1], "missing"]);

    fs::write(folder.join(SHARDS[1]), b"GGUF").unwrap();
    let error = open();
    let GgufError::InShard { file, source } = &error else { panic!("{error:?}") };
    assert_eq!(file, SHARDS[1]);
    assert!(matches!(**source, GgufError::UnexpectedEnd { .. }), "{source:?}");

    for (keys, key) in [(split(1, 4, 3), "split.count"), (split(2, 3, 3), "split.no")] {
        write_shard(folder, SHARDS[1], Magic::Gguf, keys, "b");
        let error = open();
        assert!(matches!(error, GgufError::ShardDisagrees { key: k, .. } if k == key), "{error:?}");
        assert_text(&error, &[SHARDS[1], key, "expected"]);
    }

    write_shard(folder, SHARDS[1], Magic::Pwri, split(1, 3, 3), "b");
    let error = open();
    assert!(matches!(error, GgufError::ShardMagic { .. }), "{error:?}");
    assert_text(&error, &[SHARDS[1]]);

    // G22 across files.
    write_shard(folder, SHARDS[1], Magic::Gguf, split(1, 3, 3), "a");
    let error = open();
    assert!(matches!(error, GgufError::DuplicateTensorInShards { .. }), "{error:?}");
    assert_text(&error, &["`a`", SHARDS[0], SHARDS[1]]);

    write_set(folder);
    write_shard(folder, SHARDS[0], Magic::Gguf, split(0, 3, 4), "a");
    let error = open();
    assert!(matches!(error, GgufError::ShardTensorCount { found: 3, expected: 4 }), "{error:?}");
    assert_text(&error, &["3", "4"]);

    fs::rename(&first, folder.join("renamed.gguf")).unwrap();
    let error = GgufModel::open(folder.join("renamed.gguf")).unwrap_err();
    assert!(matches!(error, GgufError::ShardFileName { count: 3, .. }), "{error:?}");
    assert_text(&error, &["renamed.gguf", "-00001-of-00003.gguf"]);
}

fn i32s(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// An index file of two layers with four neurons, the second layer as given.
fn index(n_layer: u32, flags: &[i32], bucket: &[i32]) -> Result<GpuIndex, GpuIndexError> {
    let mut writer = GgufWriter::new(Magic::Pwri);
    writer.key("general.architecture", "generic.gpu_index").unwrap();
    writer.key("generic.gpu_index.block_count", n_layer).unwrap();
    writer.key("split.vram_capacity", 1u64 << 33).unwrap();
    for (layer, flags, bucket) in [(0, &[0, 0, 0, 0][..], &[][..]), (1, flags, bucket)] {
        writer.tensor(&format!("blk.{layer}.gpu_idx"), &[flags.len()], GgmlType::I32, i32s(flags)).unwrap();
        writer
            .tensor(&format!("blk.{layer}.gpu_bucket"), &[bucket.len()], GgmlType::I32, i32s(bucket))
            .unwrap();
    }
    GpuIndex::parse(&GgufFile::from_bytes(writer.into_bytes().unwrap()).unwrap())
}

#[test]
fn g35_index_files_that_contradict_themselves() {
    let good = index(2, &[0, 1, 0, 1], &[1, 3]).unwrap();
    let sets = vec![NeuronSet::none(4), NeuronSet::from_ids(4, [NeuronId(1), NeuronId(3)])];
    assert_eq!(good, GpuIndex { vram_capacity_bytes: 1 << 33, layers: sets });
    let again = GgufFile::from_bytes(good.to_writer().unwrap().into_bytes().unwrap()).unwrap();
    assert_eq!(GpuIndex::parse(&again).unwrap(), good);

    macro_rules! assert_index_refused {
        ($index:expr, $pattern:pat, $($part:expr),+) => {
            let error = $index.unwrap_err();
            assert!(matches!(error, $pattern), "{error:?}");
            assert_text(&error, &[$($part),+]);
        };
    }
    assert_index_refused!(
        index(3, &[1], &[0]),
        GpuIndexError::TensorCount { n_layer: 3, n_tensors: 4, expected: 6 },
        "3 layers"
    );
    assert_index_refused!(index(u32::MAX, &[1], &[0]), GpuIndexError::TensorCount { .. }, "4 tensors");
    assert_index_refused!(
        index(2, &[0, 2], &[0]),
        GpuIndexError::Flag { neuron: 1, value: 2, .. },
        "layer 1"
    );
    assert_index_refused!(
        index(2, &[0, 1], &[2]),
        GpuIndexError::OutOfRange { neuron: 2, n_ff: 2, .. },
        "layer 1"
    );
    assert_index_refused!(index(2, &[0, 1], &[-1]), GpuIndexError::OutOfRange { neuron: -1, .. }, "layer 1");
    assert_index_refused!(
        index(2, &[1, 1], &[1, 0]),
        GpuIndexError::NotAscending { place: 1, .. },
        "layer 1"
    );
    assert_index_refused!(
        index(2, &[1, 1], &[1, 1]),
        GpuIndexError::NotAscending { place: 1, .. },
        "layer 1"
    );
    assert_index_refused!(index(2, &[1, 1], &[1]), GpuIndexError::Disagree { neuron: 0, .. }, "layer 1");
    assert_index_refused!(index(2, &[0, 0], &[1]), GpuIndexError::Disagree { neuron: 1, .. }, "layer 1");

    let parse = |writer: GgufWriter<'_>| {
        GpuIndex::parse(&GgufFile::from_bytes(writer.into_bytes().unwrap()).unwrap())
    };
    let with = |keys: &[(&str, Value)], tensors: &[(&str, &[usize], GgmlType)]| {
        let mut writer = GgufWriter::new(Magic::Pwri);
        for (key, value) in keys {
            writer.key(key, value.clone()).unwrap();
        }
        for &(name, dims, ty) in tensors {
            writer.tensor(name, dims, ty, vec![0; dims.iter().product::<usize>() * 4]).unwrap();
        }
        parse(writer)
    };
    let architecture = ("general.architecture", Value::from("generic.gpu_index"));
    let count = ("generic.gpu_index.block_count", Value::U32(1));
    let capacity = ("split.vram_capacity", Value::U64(0));
    let keys = [architecture.clone(), count.clone(), capacity];
    assert_index_refused!(
        with(&[("general.architecture", "llama".into())], &[]),
        GpuIndexError::Architecture { .. },
        "`llama`"
    );
    assert_index_refused!(
        with(&[architecture], &[]),
        GpuIndexError::Gguf(GgufError::MissingKey { .. }),
        "block_count"
    );
    let flags = ("blk.0.gpu_idx", &[4][..], GgmlType::I32);
    assert_index_refused!(
        with(&keys, &[flags, ("blk.1.gpu_bucket", &[4], GgmlType::I32)]),
        GpuIndexError::TensorMissing { part: "gpu_bucket", .. },
        "blk.0.gpu_bucket"
    );
    assert_index_refused!(
        with(&keys, &[flags, ("blk.0.gpu_bucket", &[2, 2], GgmlType::I32)]),
        GpuIndexError::NotAList { n_dims: 2, .. },
        "layer 0"
    );
    assert_index_refused!(
        with(&keys, &[flags, ("blk.0.gpu_bucket", &[4], GgmlType::F32)]),
        GpuIndexError::Gguf(GgufError::NotI32 { .. }),
        "F32"
    );
}

#[test]
fn g36_weights_that_are_not_finite() {
    let file = |values: [f32; 6]| {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut writer = GgufWriter::new(Magic::Gguf);
        writer.tensor("good", &[2], GgmlType::F32, vec![0; 8]).unwrap();
        writer.tensor("ids", &[1], GgmlType::I32, vec![0xff; 4]).unwrap();
        writer.tensor("weights", &[2, 3], GgmlType::F32, bytes).unwrap();
        GgufModel::from(GgufFile::from_bytes(writer.into_bytes().unwrap()).unwrap())
    };
    file([0.0, 1.0, -1.0, f32::MAX, 0.5, -0.0]).check_finite().unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = file([0.0, 1.0, 2.0, bad, 4.0, 5.0]).check_finite().unwrap_err();
        assert!(matches!(error, GgufError::NotFinite { row: 1, column: 1, .. }), "{error:?}");
        assert_text(&error, &["`weights`", "row 1"]);
    }
    // The scale of the second block of a quantised row.
    let mut blocks = vec![0u8; 4 * 18];
    blocks[54..56].copy_from_slice(&[0x00, 0x7e]);
    let mut writer = GgufWriter::new(Magic::Gguf);
    writer.tensor("q", &[64, 2], GgmlType::Q4_0, blocks).unwrap();
    let error = GgufFile::from_bytes(writer.into_bytes().unwrap()).unwrap().check_finite().unwrap_err();
    assert!(matches!(error, GgufError::NotFinite { row: 1, column: 32, .. }), "{error:?}");
}

#[test]
fn long_names_are_cut_in_messages() {
    let key = "k\u{1b}".repeat(30_000);
    let bytes = Raw::new().key(&key, 99, [0]).build();
    assert_refused!(bytes, GgufError::UnknownValueType { .. }, "k\\u{1b}k\\u{1b}", "…");
}

#[test]
fn bombs_of_a_few_bytes_allocate_almost_nothing() {
    let keys = Raw { n_keys: Some(500_000_000), ..Raw::new() }.header();
    let text = Raw::new().key("a", STRING, (1u64 << 40).to_le_bytes()).header();
    let list = Raw::new().key("a", ARRAY, array(STRING, 1 << 58, &[])).header();
    assert_eq!(keys.len(), 24);
    for bytes in [keys, text, list] {
        assert!(bytes.len() < 64);
        let (result, stats) = measure(|| GgufFile::from_bytes(bytes));
        assert!(result.is_err());
        assert!(stats.peak_bytes < 4096, "{stats:?}");
    }
}

#[test]
fn many_keys_take_linear_time_and_little_memory() {
    // The shortest entries there are, so that the index is largest in comparison, and some long keys that
    // differ at the end only.
    let n = 150_000u32;
    let mut raw = Raw::new();
    for ix in 0..n {
        let key: Vec<u8> = (0..)
            .scan(ix + 1, |left, _| {
                let digit = (*left > 0).then_some(b'!' + (*left % 90) as u8);
                *left /= 90;
                digit
            })
            .collect();
        raw = raw.key(key, U8, [0]);
    }
    for ix in 0..60u32 {
        raw = raw.key(format!("{}{ix}", "k".repeat(60_000)), U8, [0]);
    }
    let bytes = raw.build();
    let n_bytes = bytes.len() as u64;
    let start = std::time::Instant::now();
    let (file, stats) = measure(|| GgufFile::from_bytes(bytes).unwrap());
    // Milliseconds are usual; comparing each key with each other takes minutes.
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
    assert_eq!(file.metadata().len(), n as usize + 60);
    assert!(stats.peak_bytes <= 4 * n_bytes, "{stats:?} for {n_bytes}");
    assert_eq!(file.metadata().find::<u32>("nothing").unwrap(), None);
    assert_eq!(file.metadata().require::<u8>("\"").unwrap(), 0);
}
