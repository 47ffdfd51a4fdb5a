//! Writing files.

use std::borrow::Cow;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use crate::error::Name;
use crate::file::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAX_ALIGNMENT, alignment_is_legal};
use crate::metadata::{MAX_ARRAY_DEPTH, MAX_KEY_BYTES};
use crate::shape::{ShapeFault, check_name, check_shape, pad};
use crate::value::{Value, ValueType};
use crate::{GgmlType, Magic};

/// A file that cannot be written, or should not be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// An operation on the file failed. The place where it should be is as it was before.
    #[error("cannot write `{}`", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Writing to a sink that is no file failed.
    #[error("cannot write")]
    Sink {
        /// What the sink said.
        source: io::Error,
    },
    /// The source of a tensor's data failed.
    #[error("cannot produce the data of tensor `{tensor}`")]
    Source {
        /// The tensor.
        tensor: Name,
        /// What it said.
        source: io::Error,
    },
    /// A key that is empty or too long.
    #[error("key `{key}` has {n_bytes} bytes, allowed are 1 to {MAX_KEY_BYTES}")]
    KeyLength {
        /// The key.
        key: Name,
        /// Its length.
        n_bytes: usize,
    },
    /// The same key twice.
    #[error("key `{key}` is there already")]
    DuplicateKey {
        /// The key.
        key: Name,
    },
    /// An array with elements of different types.
    #[error("key `{key}` has an array of {expected} with a {found} in it")]
    MixedArray {
        /// The key.
        key: Name,
        /// The type of the array's elements.
        expected: ValueType,
        /// The type of the one that differs.
        found: ValueType,
    },
    /// Arrays nested deeper than readers accept.
    #[error("key `{key}` has arrays nested more than {MAX_ARRAY_DEPTH} deep")]
    ArrayTooDeep {
        /// The key.
        key: Name,
    },
    /// An alignment that is no u32 power of two, or too large.
    #[error("`general.alignment` must be an u32 power of two from 1 to {MAX_ALIGNMENT}")]
    BadAlignment,
    /// A tensor name that is empty, too long or holds a NUL byte.
    #[error("bad tensor name `{tensor}`: {rule}")]
    BadTensorName {
        /// The name.
        tensor: Name,
        /// The rule that is broken.
        rule: &'static str,
    },
    /// The same tensor name twice.
    #[error("tensor `{tensor}` is there already")]
    DuplicateTensor {
        /// The name.
        tensor: Name,
    },
    /// A shape that no tensor can have.
    #[error("tensor `{tensor}`: {fault}")]
    BadShape {
        /// The tensor.
        tensor: Name,
        /// What is wrong with the shape.
        fault: ShapeFault,
    },
    /// A type that has no id in PWRI files.
    #[error("tensor `{tensor}` has the type {ty}, which PWRI files cannot hold")]
    NoTypeId {
        /// The tensor.
        tensor: Name,
        /// The type.
        ty: GgmlType,
    },
    /// A tensor whose data is shorter or longer than its shape asks for.
    #[error("tensor `{tensor}` needs {expected} bytes for its shape and type, got {got}")]
    DataLength {
        /// The tensor.
        tensor: Name,
        /// Bytes needed.
        expected: u64,
        /// Bytes given, as far as they were counted.
        got: u64,
    },
}

type Stream<'a> = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + 'a>;

/// Where the data of a tensor comes from.
pub enum TensorSource<'a> {
    /// Bytes that are there.
    Bytes(Cow<'a, [u8]>),
    /// A function that writes the bytes when their turn comes, so that not all need to be in memory at once.
    Stream(Stream<'a>),
}

impl<'a> TensorSource<'a> {
    /// A function that writes the bytes when their turn comes.
    pub fn stream(write: impl FnOnce(&mut dyn Write) -> io::Result<()> + 'a) -> Self {
        Self::Stream(Box::new(write))
    }
}

impl<'a> From<&'a [u8]> for TensorSource<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl From<Vec<u8>> for TensorSource<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl fmt::Debug for TensorSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{} bytes", bytes.len()),
            Self::Stream(_) => f.write_str("stream"),
        }
    }
}

#[derive(Debug)]
struct TensorEntry<'a> {
    name: String,
    dims: Vec<u64>,
    ty: GgmlType,
    type_id: u32,
    n_bytes: u64,
    source: TensorSource<'a>,
}

impl TensorEntry<'_> {
    fn tensor(&self) -> Name {
        Name::new(self.name.as_bytes())
    }
}

/// Collects keys and tensors, then writes a version 3 file.
///
/// What it accepts, [`GgufFile`](crate::GgufFile) reads. Keys and tensors are written in the order in which
/// they were given.
#[derive(Debug)]
pub struct GgufWriter<'a> {
    magic: Magic,
    alignment: u32,
    keys: Vec<(String, Value)>,
    key_names: HashSet<String>,
    tensors: Vec<TensorEntry<'a>>,
    tensor_names: HashSet<String>,
}

impl<'a> GgufWriter<'a> {
    /// An empty file with this magic and the usual alignment of 32 bytes.
    pub fn new(magic: Magic) -> Self {
        Self {
            magic,
            alignment: DEFAULT_ALIGNMENT,
            keys: Vec::new(),
            key_names: HashSet::new(),
            tensors: Vec::new(),
            tensor_names: HashSet::new(),
        }
    }

    /// Adds a key. `general.alignment` also sets the alignment of the file.
    ///
    /// # Errors
    /// [`WriteError::KeyLength`], [`WriteError::DuplicateKey`], [`WriteError::MixedArray`],
    /// [`WriteError::ArrayTooDeep`] or [`WriteError::BadAlignment`]; the writer is then as before.
    pub fn key(&mut self, key: &str, value: impl Into<Value>) -> Result<&mut Self, WriteError> {
        let value = value.into();
        let name = || Name::new(key.as_bytes());
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(WriteError::KeyLength { key: name(), n_bytes: key.len() });
        }
        if self.key_names.contains(key) {
            return Err(WriteError::DuplicateKey { key: name() });
        }
        check_value(key, &value, 0)?;
        if key == ALIGNMENT_KEY {
            self.set_alignment(&value)?;
        }
        self.key_names.insert(key.to_owned());
        self.keys.push((key.to_owned(), value));
        Ok(self)
    }

    /// Adds a tensor. `dims` are in ggml's order, the contiguous axis first.
    ///
    /// # Errors
    /// [`WriteError::BadTensorName`], [`WriteError::DuplicateTensor`], [`WriteError::BadShape`],
    /// [`WriteError::NoTypeId`], or [`WriteError::DataLength`] if the bytes are there and too few or too
    /// many; the writer is then as before.
    pub fn tensor(
        &mut self,
        name: &str,
        dims: &[usize],
        ty: GgmlType,
        source: impl Into<TensorSource<'a>>,
    ) -> Result<&mut Self, WriteError> {
        let tensor = || Name::new(name.as_bytes());
        check_name(name.as_bytes()).map_err(|rule| WriteError::BadTensorName { tensor: tensor(), rule })?;
        if self.tensor_names.contains(name) {
            return Err(WriteError::DuplicateTensor { tensor: tensor() });
        }
        let dims: Vec<u64> = dims.iter().map(|&dim| dim as u64).collect();
        let bad_shape = |fault| WriteError::BadShape { tensor: tensor(), fault };
        let n_bytes = check_shape(&dims, ty).map_err(bad_shape)?;
        let type_id = ty.id(self.magic).ok_or_else(|| WriteError::NoTypeId { tensor: tensor(), ty })?;
        let source = source.into();
        if let TensorSource::Bytes(bytes) = &source
            && bytes.len() as u64 != n_bytes
        {
            let got = bytes.len() as u64;
            return Err(WriteError::DataLength { tensor: tensor(), expected: n_bytes, got });
        }
        self.tensor_names.insert(name.to_owned());
        self.tensors.push(TensorEntry { name: name.to_owned(), dims, ty, type_id, n_bytes, source });
        Ok(self)
    }

    /// Writes the file `path`: first under a temporary name in the same folder, which takes the place of
    /// `path` when all bytes have reached the disk. On an error `path` is as it was before, and nothing else
    /// stays behind.
    ///
    /// # Errors
    /// [`WriteError::Io`], [`WriteError::Source`], [`WriteError::DataLength`] if a stream wrote too few or
    /// too many bytes, and [`WriteError::BadShape`] if the tensors together are too large for any file.
    pub fn write(self, path: impl AsRef<Path>) -> Result<(), WriteError> {
        let path = path.as_ref();
        let failed = |source| WriteError::Io { path: path.to_owned(), source };
        let (temporary, file) = Temporary::create(path).map_err(failed)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        self.write_to(&mut out).map_err(|error| match error {
            WriteError::Sink { source } => failed(source),
            other => other,
        })?;
        let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)?;
        drop(file);
        temporary.rename(path).map_err(failed)
    }

    /// The file as bytes in memory.
    ///
    /// # Errors
    /// Those of [`GgufWriter::write`] but [`WriteError::Io`].
    pub fn into_bytes(self) -> Result<Vec<u8>, WriteError> {
        let mut out = Vec::new();
        self.write_to(&mut out)?;
        Ok(out)
    }

    /// Writes the file to a sink, from its current position.
    ///
    /// # Errors
    /// Those of [`GgufWriter::write`], with [`WriteError::Sink`] in place of [`WriteError::Io`].
    pub fn write_to(self, mut sink: impl Write) -> Result<(), WriteError> {
        let offsets = self.offsets()?;
        let header = self.header(&offsets);
        let alignment = self.alignment;
        let out = &mut Sink { inner: &mut sink, failed: false };
        let sink_error = |source| WriteError::Sink { source };
        out.write_all(&header).map_err(sink_error)?;
        write_padding(out, header.len() as u64, alignment).map_err(sink_error)?;
        for tensor in self.tensors {
            let n_bytes = tensor.n_bytes;
            write_tensor(out, tensor)?;
            write_padding(out, n_bytes, alignment).map_err(sink_error)?;
        }
        out.flush().map_err(sink_error)
    }

    /// Where each tensor starts in the data section.
    fn offsets(&self) -> Result<Vec<u64>, WriteError> {
        let mut end = Some(0u64);
        let mut offsets = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            offsets.extend(end);
            end = end.and_then(|end| pad(end.checked_add(tensor.n_bytes)?, self.alignment));
            if end.is_none() {
                let fault = ShapeFault::TooManyBytes { dims: tensor.dims.clone(), ty: tensor.ty };
                return Err(WriteError::BadShape { tensor: tensor.tensor(), fault });
            }
        }
        Ok(offsets)
    }

    fn header(&self, offsets: &[u64]) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(self.magic.bytes());
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            put_string(&mut out, key.as_bytes());
            out.extend(value.ty().id().to_le_bytes());
            put_value(&mut out, value);
        }
        for (tensor, offset) in self.tensors.iter().zip(offsets) {
            put_string(&mut out, tensor.name.as_bytes());
            // At most four.
            out.extend(u32::try_from(tensor.dims.len()).unwrap_or(u32::MAX).to_le_bytes());
            for dim in &tensor.dims {
                out.extend(dim.to_le_bytes());
            }
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out
    }

    fn set_alignment(&mut self, value: &Value) -> Result<(), WriteError> {
        let &Value::U32(alignment) = value else { return Err(WriteError::BadAlignment) };
        if !alignment_is_legal(alignment) {
            return Err(WriteError::BadAlignment);
        }
        self.alignment = alignment;
        Ok(())
    }
}

fn check_value(key: &str, value: &Value, depth: usize) -> Result<(), WriteError> {
    let Value::Array(expected, elements) = value else { return Ok(()) };
    if depth >= MAX_ARRAY_DEPTH {
        return Err(WriteError::ArrayTooDeep { key: Name::new(key.as_bytes()) });
    }
    for element in elements {
        if element.ty() != *expected {
            let (expected, found) = (*expected, element.ty());
            return Err(WriteError::MixedArray { key: Name::new(key.as_bytes()), expected, found });
        }
        check_value(key, element, depth.saturating_add(1))?;
    }
    Ok(())
}

fn put_string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push((*v).into()),
        Value::String(v) => put_string(out, v),
        Value::Array(ty, elements) => {
            out.extend(ty.id().to_le_bytes());
            out.extend((elements.len() as u64).to_le_bytes());
            for element in elements {
                put_value(out, element);
            }
        }
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
}

/// Remembers whether it failed, since its errors come back through the source of a tensor.
struct Sink<'w> {
    inner: &'w mut dyn Write,
    failed: bool,
}

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let result = self.inner.write(bytes);
        self.failed |= result.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::Interrupted);
        result
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Passes on as many bytes as a tensor has, and counts what comes.
struct Counted<'w, 'i> {
    sink: &'w mut Sink<'i>,
    expected: u64,
    got: u64,
}

impl Write for Counted<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let got = self.got.saturating_add(bytes.len() as u64);
        if got > self.expected {
            self.got = got;
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "more bytes than the tensor has"));
        }
        let n = self.sink.write(bytes)?;
        self.got = self.got.saturating_add(n as u64);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_tensor(sink: &mut Sink<'_>, tensor: TensorEntry<'_>) -> Result<(), WriteError> {
    let name = tensor.tensor();
    let write = match tensor.source {
        TensorSource::Bytes(bytes) => {
            return sink.write_all(&bytes).map_err(|source| WriteError::Sink { source });
        }
        TensorSource::Stream(write) => write,
    };
    let mut counted = Counted { sink, expected: tensor.n_bytes, got: 0 };
    let result = write(&mut counted);
    let Counted { sink, expected, got } = counted;
    match result {
        _ if got > expected => Err(WriteError::DataLength { tensor: name, expected, got }),
        Err(source) if sink.failed => Err(WriteError::Sink { source }),
        Err(source) => Err(WriteError::Source { tensor: name, source }),
        Ok(()) if got < expected => Err(WriteError::DataLength { tensor: name, expected, got }),
        Ok(()) => Ok(()),
    }
}

/// Zeros from `written` to the next multiple of the alignment.
fn write_padding(sink: &mut Sink<'_>, written: u64, alignment: u32) -> io::Result<()> {
    let n = pad(written, alignment).unwrap_or(written).saturating_sub(written);
    io::copy(&mut io::repeat(0).take(n), sink).map(drop)
}

/// A file under a temporary name, removed unless it is renamed.
struct Temporary {
    path: PathBuf,
    renamed: bool,
}

impl Temporary {
    /// Most names tried: another program would have to leave this many files of one process number behind.
    const MAX_TRIES: u32 = 1000;

    fn create(target: &Path) -> io::Result<(Self, File)> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut tried = 0u32;
        loop {
            let mut temporary = OsString::from(".");
            temporary.push(name);
            temporary.push(format!(".{}-{tried}.partial", std::process::id()));
            let path = target.with_file_name(temporary);
            match File::create_new(&path) {
                Ok(file) => return Ok((Self { path, renamed: false }, file)),
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists || tried >= Self::MAX_TRIES => {
                    return Err(error);
                }
                Err(_) => tried = tried.saturating_add(1),
            }
        }
    }

    fn rename(mut self, target: &Path) -> io::Result<()> {
        fs::rename(&self.path, target)?;
        self.renamed = true;
        // The file is in place; that its folder reaches the disk too is not possible on every system, and no
        // reason to report a failure.
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Ok(folder) = File::open(folder.unwrap_or(Path::new("."))) {
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // The first error is the one to report.
            let _ = fs::remove_file(&self.path);
        }
    }
}
