//! One file: opening and finding things in it.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use powerinfer_sparse_ops::{WeightBytes, WeightOwner};

use crate::cursor::Cursor;
use crate::error::{FileHint, GgufError, Name};
use crate::metadata::{KeyIndex, Metadata, end};
use crate::tensor::{Tensor, TensorIndex};
use crate::value::ValueRef;

/// The first four bytes of a file. They decide nothing but the ids of integer tensor types here; PowerInfer
/// takes `PWRI` to mean a model with predictors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Magic {
    /// `GGUF`.
    Gguf,
    /// `PWRI`.
    Pwri,
}

impl Magic {
    /// The four bytes.
    pub const fn bytes(self) -> [u8; 4] {
        match self {
            Self::Gguf => *b"GGUF",
            Self::Pwri => *b"PWRI",
        }
    }
}

impl fmt::Display for Magic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gguf => "GGUF",
            Self::Pwri => "PWRI",
        })
    }
}

/// Key of the alignment.
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
/// Alignment of files without the key.
pub(crate) const DEFAULT_ALIGNMENT: u32 = 32;
/// Largest alignment: 1 MiB, far above any page or cache line that data may want.
pub(crate) const MAX_ALIGNMENT: u32 = 1 << 20;

/// Whether an alignment may stand in a file.
pub(crate) fn alignment_is_legal(alignment: u32) -> bool {
    alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT
}

type Owner = Arc<dyn WeightOwner>;

/// Bytes that the caller gave.
struct Given<T>(T);

impl<T: AsRef<[u8]>> AsRef<[u8]> for Given<T> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

impl<T: AsRef<[u8]> + Send + Sync> WeightOwner for Given<T> {}

/// An open file whose header has been checked from the first byte to the last, and whose tensors are known to
/// lie inside it without overlap. Tensor data has not been read.
pub struct GgufFile {
    owner: Owner,
    magic: Magic,
    version: u32,
    alignment: u32,
    keys: KeyIndex,
    tensors: TensorIndex,
}

impl GgufFile {
    /// Maps a file into memory and checks its header. Without the feature `mmap` this is [`GgufFile::read`].
    ///
    /// The file must not change while it is mapped: if another program shortens it, the next access to the
    /// missing part ends this program with a signal. Where files may change, use [`GgufFile::read`].
    ///
    /// # Errors
    /// [`GgufError::Io`] if the file cannot be opened or is a directory, device or pipe, and any other variant if its
    /// content is at fault.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        #[cfg(feature = "mmap")]
        {
            let path = path.as_ref();
            // What is no file is opened without complaint, or waits for a writer, and fails to be mapped with a
            // message about devices.
            let map = check_regular(path)
                .and_then(|()| crate::map::map(path))
                .map_err(|source| GgufError::Io { path: path.to_owned(), source })?;
            Self::from_owner(Arc::new(map))
        }
        #[cfg(not(feature = "mmap"))]
        Self::read(path)
    }

    /// Reads a whole file into memory and checks its header.
    ///
    /// # Errors
    /// [`GgufError::Io`] if the file cannot be read, and any other variant if its content is at fault.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| GgufError::Io { path: path.to_owned(), source })?;
        Self::from_bytes(bytes)
    }

    /// Takes the bytes of a file, as a `Vec<u8>`, an `Arc<[u8]>`, a `&'static [u8]` or another buffer, and
    /// checks its header. The bytes are not copied.
    ///
    /// # Errors
    /// Any variant but [`GgufError::Io`] if the content is at fault.
    pub fn from_bytes(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<Self, GgufError> {
        Self::from_owner(Arc::new(Given(bytes)))
    }

    fn from_owner(owner: Owner) -> Result<Self, GgufError> {
        let bytes = (*owner).as_ref();
        let mut cur = Cursor::new(bytes, 0);
        let magic = parse_magic(&mut cur)?;
        let version = parse_version(&mut cur)?;
        let n_tensors_at = cur.at();
        let n_tensors = cur.u64().map_err(end("the tensor count"))?;
        let n_keys_at = cur.at();
        let n_keys = cur.u64().map_err(end("the key count"))?;
        let keys = KeyIndex::parse(bytes, &mut cur, n_keys, n_keys_at)?;
        let alignment = parse_alignment(Metadata { bytes, index: &keys })?;
        let tensors = TensorIndex::parse(bytes, &mut cur, (n_tensors, n_tensors_at), magic, alignment)?;
        Ok(Self { magic, version, alignment, keys, tensors, owner })
    }

    /// The first four bytes.
    pub fn magic(&self) -> Magic {
        self.magic
    }

    /// The format version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Tensors start at multiples of this.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Keys and values.
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata { bytes: self.bytes(), index: &self.keys }
    }

    /// Number of tensors.
    pub fn n_tensors(&self) -> usize {
        self.tensors.len()
    }

    /// The tensors in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        (0..self.n_tensors()).map(|ix| self.tensor_at(ix).expect("the index is below the count"))
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.tensor_at(self.tensors.find(self.bytes(), name)?)
    }

    /// The tensor at this place in file order.
    pub fn tensor_at(&self, ix: usize) -> Option<Tensor<'_>> {
        self.tensors.tensor(self, ix)
    }

    /// The part of the file behind the header.
    pub fn data_range(&self) -> Range<usize> {
        self.tensors.data_start()..self.bytes().len()
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        (*self.owner).as_ref()
    }

    pub(crate) fn weight_bytes(&self, range: Range<usize>) -> WeightBytes {
        WeightBytes::new(Arc::clone(&self.owner), range)
    }

    /// Reads all weights and looks for NaN and infinity; see [`Tensor::check_finite`].
    ///
    /// # Errors
    /// [`GgufError::NotFinite`] with the first place where one is found.
    pub fn check_finite(&self) -> Result<(), GgufError> {
        self.tensors().try_for_each(|tensor| tensor.check_finite())
    }
}

impl fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufFile")
            .field("magic", &self.magic)
            .field("version", &self.version)
            .field("alignment", &self.alignment)
            .field("n_keys", &self.metadata().len())
            .field("n_tensors", &self.n_tensors())
            .finish_non_exhaustive()
    }
}

#[cfg(feature = "mmap")]
fn check_regular(path: &Path) -> std::io::Result<()> {
    let ty = std::fs::metadata(path)?.file_type();
    if ty.is_dir() {
        return Err(std::io::Error::new(std::io::ErrorKind::IsADirectory, "it is a directory, not a file"));
    }
    if !ty.is_file() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    Ok(())
}

fn parse_magic(cur: &mut Cursor<'_>) -> Result<Magic, GgufError> {
    let start = cur.rest();
    let shown = |n| Name::new(start.get(..n).unwrap_or(start));
    let Ok(magic) = cur.take(4) else {
        return Err(GgufError::TooShort { n_bytes: start.len(), first: shown(4) });
    };
    [Magic::Gguf, Magic::Pwri]
        .into_iter()
        .find(|candidate| candidate.bytes() == magic)
        .ok_or_else(|| GgufError::BadMagic { first: shown(16), hint: hint(start) })
}

fn hint(start: &[u8]) -> Option<FileHint> {
    let text = start.trim_ascii_start();
    let tag =
        |name: &str| text.get(..name.len()).is_some_and(|head| head.eq_ignore_ascii_case(name.as_bytes()));
    if tag("<!doctype") || tag("<html") || tag("<head") || tag("<?xml") {
        return Some(FileHint::WebPage);
    }
    if start.starts_with(b"version https://git-lfs") {
        return Some(FileHint::LfsPointer);
    }
    let old: [&[u8]; 5] = [b"lmgg", b"GGML", b"fmgg", b"tjgg", b"algg"];
    if old.iter().any(|magic| start.starts_with(magic)) {
        return Some(FileHint::OldGgml);
    }
    start.starts_with(b"PK\x03\x04").then_some(FileHint::Zip)
}

fn parse_version(cur: &mut Cursor<'_>) -> Result<u32, GgufError> {
    let version = cur.u32().map_err(end("the version"))?;
    match version {
        2 | 3 => Ok(version),
        _ if matches!(version.swap_bytes(), 1..=3) => {
            Err(GgufError::BigEndian { version: version.swap_bytes() })
        }
        _ => Err(GgufError::UnsupportedVersion { version }),
    }
}

fn parse_alignment(metadata: Metadata<'_>) -> Result<u32, GgufError> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let at = metadata.offset(ALIGNMENT_KEY).unwrap_or_default();
    match value {
        ValueRef::U32(alignment) if alignment_is_legal(alignment) => Ok(alignment),
        ValueRef::U32(alignment) => Err(GgufError::BadAlignment { at, alignment, limit: MAX_ALIGNMENT }),
        other => Err(GgufError::AlignmentType { at, found: other.ty() }),
    }
}
