//! What the writer accepts, the reader returns; what it refuses leaves nothing behind.
#![allow(clippy::unwrap_used, reason = "a failure of a helper fails its test")]

use std::fs;
use std::io::{self, Write};

use powerinfer_gguf::{
    GgmlType, GgufFile, GgufWriter, Magic, ShapeFault, TensorSource, Value, ValueRef, ValueType, WriteError,
};
use proptest::prelude::*;

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        any::<Vec<u8>>().prop_map(Value::String),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f64>().prop_map(Value::F64),
    ]
}

/// Values of all types, with arrays up to four deep; the elements of an array are copies of one type.
fn value() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(4, 40, 5, |inner| {
        prop::collection::vec(inner, 1..5).prop_map(|mut values| {
            let ty = values[0].ty();
            values.retain(|value| value.ty() == ty);
            Value::Array(ty, values)
        })
    })
}

type TestTensor = (GgmlType, Vec<usize>);

fn tensor() -> impl Strategy<Value = TestTensor> {
    let ty = prop::sample::select(GgmlType::ALL.to_vec());
    (ty, 1usize..3, prop::collection::vec(1usize..4, 0..4)).prop_map(|(ty, n_blocks, rest)| {
        let dims = std::iter::once(n_blocks * ty.block_len()).chain(rest).collect();
        (ty, dims)
    })
}

fn n_bytes((ty, dims): &TestTensor) -> usize {
    dims.iter().product::<usize>() / ty.block_len() * ty.block_bytes()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn write_then_parse_returns_the_same(
        values in prop::collection::vec(("[a-z]{1,8}\\.\\PC{0,8}", value()), 0..8),
        tensors in prop::collection::vec(tensor(), 0..8),
        alignment in prop::option::of(0u32..13),
        pwri in any::<bool>(),
        streamed in any::<bool>(),
    ) {
        let magic = if pwri { Magic::Pwri } else { Magic::Gguf };
        let keys: Vec<(String, Value)> =
            values.into_iter().enumerate().map(|(ix, (key, value))| (format!("{ix}{key}"), value)).collect();
        let tensors: Vec<_> = tensors.into_iter().filter(|(ty, _)| ty.id(magic).is_some()).collect();
        let data: Vec<Vec<u8>> = tensors.iter().enumerate()
            .map(|(ix, tensor)| (0..n_bytes(tensor)).map(|byte| (byte * 7 + ix) as u8).collect()).collect();
        let mut writer = GgufWriter::new(magic);
        for (key, value) in &keys {
            writer.key(key, value.clone()).unwrap();
        }
        if let Some(log) = alignment {
            writer.key("general.alignment", 1u32 << log).unwrap();
        }
        for (ix, ((ty, dims), bytes)) in tensors.iter().zip(&data).enumerate() {
            let source = if streamed {
                TensorSource::stream(move |out| bytes.chunks(5).try_for_each(|chunk| out.write_all(chunk)))
            } else {
                bytes.as_slice().into()
            };
            writer.tensor(&format!("t{ix}"), dims, *ty, source).unwrap();
        }

        let file = GgufFile::from_bytes(writer.into_bytes().unwrap()).unwrap();
        prop_assert_eq!((file.magic(), file.version()), (magic, 3));
        prop_assert_eq!(file.alignment(), alignment.map_or(32, |log| 1 << log));
        let found: Vec<(String, Value)> = file.metadata().iter()
            .filter(|(key, _)| *key != "general.alignment")
            .map(|(key, value)| (key.to_owned(), value.to_value())).collect();
        // NaN differs from itself, so numbers are compared as text.
        prop_assert_eq!(format!("{found:?}"), format!("{keys:?}"));
        prop_assert_eq!(file.n_tensors(), tensors.len());
        for (ix, (tensor, bytes)) in tensors.iter().zip(&data).enumerate() {
            let found = file.tensor(&format!("t{ix}")).unwrap();
            prop_assert_eq!((found.ty(), found.dims()), (tensor.0, &tensor.1[..]));
            prop_assert_eq!(found.as_slice(), &bytes[..]);
            prop_assert!(found.offset().is_multiple_of(file.alignment() as usize));
            let in_data = found.offset() - file.data_range().start;
            prop_assert!(in_data.is_multiple_of(file.alignment() as usize));
        }
    }
}

#[test]
fn values_of_every_type_come_back_bit_for_bit() {
    let mut writer = GgufWriter::new(Magic::Gguf);
    let nan = f32::from_bits(0x7fc0_1234);
    writer.key("nan", nan).unwrap().key("texts", vec!["a", "ß"]).unwrap();
    writer.key("empty", Value::Array(ValueType::String, vec![])).unwrap();
    writer.key("scores", vec![0.5f32, -1.0]).unwrap().key("flags", vec![true, false]).unwrap();
    let file = GgufFile::from_bytes(writer.into_bytes().unwrap()).unwrap();
    let keys = file.metadata();
    assert_eq!(keys.require::<f32>("nan").unwrap().to_bits(), nan.to_bits());
    assert_eq!(keys.require::<Vec<&str>>("texts").unwrap(), ["a", "ß"]);
    assert_eq!(keys.require::<Vec<String>>("empty").unwrap(), Vec::<String>::new());
    assert_eq!(keys.require::<Vec<f32>>("scores").unwrap(), [0.5, -1.0]);
    assert_eq!(keys.require::<Vec<bool>>("flags").unwrap(), [true, false]);
    assert_eq!(
        keys.iter().map(|(key, _)| key).collect::<Vec<_>>(),
        ["nan", "texts", "empty", "scores", "flags"]
    );
    let texts = keys.get("texts").unwrap();
    assert_eq!(texts, texts);
    assert_ne!(Some(texts), keys.get("empty"));
    let ValueRef::Array(array) = texts else { panic!("{texts:?}") };
    assert_eq!((array.element_type(), array.len(), array.is_empty()), (ValueType::String, 2, false));
}

#[test]
fn values_are_decoded_row_by_row() {
    let mut writer = GgufWriter::new(Magic::Gguf);
    let floats: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    writer.tensor("f", &[2, 3], GgmlType::F32, floats).unwrap();
    // One block: scale 0.5 as f16, then the bytes 0 to 31.
    let q8: Vec<u8> = [0x00, 0x38].into_iter().chain(0..32).collect();
    writer.tensor("q", &[32], GgmlType::Q8_0, q8).unwrap();
    let file = GgufFile::from_bytes(writer.into_bytes().unwrap()).unwrap();
    let f = file.tensor("f").unwrap();
    assert_eq!((f.n_cols(), f.n_rows()), (2, 3));
    assert_eq!(f.decode().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let q = file.tensor("q").unwrap().decode().unwrap();
    assert_eq!(q, (0..32u8).map(|v| f32::from(v) * 0.5).collect::<Vec<_>>());
}

#[test]
fn bad_keys_and_tensors_are_refused_and_the_writer_goes_on() {
    let mut writer = GgufWriter::new(Magic::Pwri);
    writer.key("a", 1u32).unwrap();
    writer.tensor("t", &[1], GgmlType::F32, vec![0; 4]).unwrap();

    macro_rules! assert_refused {
        ($result:expr, $pattern:pat, $part:literal) => {
            let error = $result.map(drop).unwrap_err();
            assert!(matches!(error, $pattern), "{error:?}");
            assert!(error.to_string().contains($part), "{error}");
        };
    }
    assert_refused!(writer.key("", 1u32), WriteError::KeyLength { n_bytes: 0, .. }, "1 to 65535");
    assert_refused!(
        writer.key(&"k".repeat(65_536), 1u32),
        WriteError::KeyLength { n_bytes: 65_536, .. },
        "…"
    );
    assert_refused!(writer.key("a", 2u32), WriteError::DuplicateKey { .. }, "`a`");
    let mixed = Value::Array(ValueType::U8, vec![Value::U8(1), Value::I8(1)]);
    assert_refused!(
        writer.key("m", mixed),
        WriteError::MixedArray { expected: ValueType::U8, found: ValueType::I8, .. },
        "`m`"
    );
    let deep = (0..5).fold(Value::U8(1), |inner, _| Value::Array(inner.ty(), vec![inner]));
    assert_refused!(writer.key("d", deep), WriteError::ArrayTooDeep { .. }, "`d`");
    for bad in [Value::U32(0), Value::U32(3), Value::U32(1 << 21), Value::U64(32), Value::from("32")] {
        assert_refused!(writer.key("general.alignment", bad), WriteError::BadAlignment, "power of two");
    }

    let four = || vec![0u8; 4];
    assert_refused!(
        writer.tensor("", &[1], GgmlType::F32, four()),
        WriteError::BadTensorName { .. },
        "not empty"
    );
    assert_refused!(
        writer.tensor(&"n".repeat(64), &[1], GgmlType::F32, four()),
        WriteError::BadTensorName { .. },
        "63"
    );
    assert_refused!(
        writer.tensor("a\0", &[1], GgmlType::F32, four()),
        WriteError::BadTensorName { .. },
        "NUL"
    );
    assert_refused!(
        writer.tensor("t", &[1], GgmlType::F32, four()),
        WriteError::DuplicateTensor { .. },
        "`t`"
    );
    assert_refused!(
        writer.tensor("u", &[], GgmlType::F32, four()),
        WriteError::BadShape { fault: ShapeFault::DimCount { n_dims: 0 }, .. },
        "`u`"
    );
    assert_refused!(
        writer.tensor("u", &[1; 5], GgmlType::F32, four()),
        WriteError::BadShape { fault: ShapeFault::DimCount { n_dims: 5 }, .. },
        "`u`"
    );
    assert_refused!(
        writer.tensor("u", &[1, 0], GgmlType::F32, four()),
        WriteError::BadShape { fault: ShapeFault::BadDim { axis: 1, .. }, .. },
        "`u`"
    );
    assert_refused!(
        writer.tensor("u", &[48], GgmlType::Q4_0, four()),
        WriteError::BadShape { fault: ShapeFault::PartialBlock { .. }, .. },
        "48"
    );
    assert_refused!(
        writer.tensor("u", &[1 << 40, 1 << 40], GgmlType::F32, four()),
        WriteError::BadShape { fault: ShapeFault::TooManyElements { .. }, .. },
        "overflow"
    );
    assert_refused!(
        writer.tensor("u", &[1 << 62], GgmlType::F32, four()),
        WriteError::BadShape { fault: ShapeFault::TooManyBytes { .. }, .. },
        "overflow"
    );
    assert_refused!(
        writer.tensor("u", &[256], GgmlType::IQ2_XS, four()),
        WriteError::NoTypeId { ty: GgmlType::IQ2_XS, .. },
        "PWRI"
    );
    assert_refused!(
        writer.tensor("u", &[2], GgmlType::F32, four()),
        WriteError::DataLength { expected: 8, got: 4, .. },
        "`u`"
    );

    writer.key("b", 2u32).unwrap();
    writer.tensor("u", &[1], GgmlType::I32, four()).unwrap();
    let file = GgufFile::from_bytes(writer.into_bytes().unwrap()).unwrap();
    assert_eq!(file.metadata().iter().map(|(key, _)| key).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(file.tensors().map(|tensor| tensor.ty()).collect::<Vec<_>>(), [GgmlType::F32, GgmlType::I32]);
    assert_eq!(file.alignment(), 32);
}

#[test]
fn tensors_that_together_are_too_large_for_a_file_are_refused() {
    let mut writer = GgufWriter::new(Magic::Gguf);
    for name in ["a", "b"] {
        writer
            .tensor(name, &[(1 << 63) - 64], GgmlType::I8, TensorSource::stream(|_| panic!("not asked")))
            .unwrap();
    }
    let error = writer.into_bytes().unwrap_err();
    assert!(
        matches!(error, WriteError::BadShape { fault: ShapeFault::TooManyBytes { .. }, .. }),
        "{error:?}"
    );
}

fn one_stream<'a>(write: impl FnOnce(&mut dyn Write) -> io::Result<()> + 'a) -> GgufWriter<'a> {
    let mut writer = GgufWriter::new(Magic::Gguf);
    writer.tensor("first", &[4], GgmlType::I8, vec![1; 4]).unwrap();
    writer.tensor("streamed", &[8], GgmlType::I8, TensorSource::stream(write)).unwrap();
    writer
}

#[test]
fn a_failed_write_leaves_the_old_file_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let names = || {
        let entries = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        entries.collect::<Vec<_>>()
    };
    one_stream(|out| out.write_all(&[2; 8])).write(&path).unwrap();
    let old = fs::read(&path).unwrap();
    assert_eq!(names(), ["model.gguf"]);

    let short = one_stream(|out| out.write_all(&[3; 7])).write(&path).unwrap_err();
    assert!(matches!(short, WriteError::DataLength { expected: 8, got: 7, .. }), "{short:?}");
    let long = one_stream(|out| out.write_all(&[3; 9])).write(&path).unwrap_err();
    assert!(matches!(long, WriteError::DataLength { expected: 8, got: 9, .. }), "{long:?}");
    // Even if the source does not care.
    let long = one_stream(|out| {
        let _ = out.write_all(&[3; 9]);
        out.write_all(&[3; 8])
    });
    let long = long.write(&path).unwrap_err();
    assert!(matches!(long, WriteError::DataLength { .. }), "{long:?}");
    let failed = one_stream(|_| Err(io::Error::other("no more"))).write(&path).unwrap_err();
    assert!(matches!(failed, WriteError::Source { .. }), "{failed:?}");
    assert!(failed.to_string().contains("`streamed`"));
    let panicked = std::panic::catch_unwind(|| one_stream(|_| panic!("in the source")).write(&path));
    assert!(panicked.is_err());

    assert_eq!(names(), ["model.gguf"]);
    assert_eq!(fs::read(&path).unwrap(), old);
    one_stream(|out| {
        // The temporary file is in the same folder while the old one is still whole.
        assert_eq!(names().len(), 2);
        assert_eq!(fs::read(&path)?, old);
        out.write_all(&[4; 8])
    })
    .write(&path)
    .unwrap();
    assert_eq!(names(), ["model.gguf"]);
    assert_eq!(GgufFile::open(&path).unwrap().tensor("streamed").unwrap().as_slice(), [4; 8]);

    let absent =
        one_stream(|out| out.write_all(&[2; 8])).write(folder.path().join("no/model.gguf")).unwrap_err();
    assert!(matches!(absent, WriteError::Io { .. }), "{absent:?}");
    assert!(absent.to_string().contains("model.gguf"));
}

#[test]
fn an_error_of_the_sink_is_told_from_one_of_the_source() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if bytes == [9; 8] { Err(io::ErrorKind::StorageFull.into()) } else { Ok(bytes.len()) }
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let error = one_stream(|out| out.write_all(&[9; 8])).write_to(Full).unwrap_err();
    assert!(
        matches!(&error, WriteError::Sink { source } if source.kind() == io::ErrorKind::StorageFull),
        "{error:?}"
    );
    one_stream(|out| out.write_all(&[8; 8])).write_to(Full).unwrap();
}
