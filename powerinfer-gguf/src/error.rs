//! What can be wrong with a file.

use std::fmt::{self, Write as _};
use std::io;
use std::path::PathBuf;

use crate::{GgmlType, ShapeFault, ValueType};

/// A key or tensor name as error messages show it: escaped, and cut to 64 characters.
#[derive(Clone, PartialEq, Eq)]
pub struct Name(Box<str>);

impl Name {
    const MAX_CHARS: usize = 64;

    pub(crate) fn new(bytes: &[u8]) -> Self {
        // A character has at most four bytes: this holds 65 of them, one more than is shown.
        let head = bytes.get(..Self::MAX_CHARS.saturating_add(1).saturating_mul(4)).unwrap_or(bytes);
        let mut escaped = String::new();
        for chunk in head.utf8_chunks() {
            escaped.extend(chunk.valid().chars().flat_map(char::escape_debug));
            for byte in chunk.invalid() {
                // Writing to a string does not fail.
                let _ = write!(escaped, "\\x{byte:02x}");
            }
        }
        if escaped.chars().count() > Self::MAX_CHARS {
            escaped = escaped.chars().take(Self::MAX_CHARS.saturating_sub(1)).collect();
            escaped.push('…');
        }
        Self(escaped.into())
    }

    /// The escaped and shortened text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.0)
    }
}

/// What a file that is no GGUF file probably is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileHint {
    /// A web page, for example the error page of a download.
    WebPage,
    /// The pointer that git-lfs leaves in place of a large file.
    LfsPointer,
    /// A model in a format from before GGUF.
    OldGgml,
    /// A zip archive, as PyTorch writes them.
    Zip,
}

impl fmt::Display for FileHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WebPage => "; it looks like a web page: download the file itself",
            Self::LfsPointer => "; it is a git-lfs pointer: run `git lfs pull` to fetch the file itself",
            Self::OldGgml => "; it is a ggml file from before GGUF: convert the model again",
            Self::Zip => "; it is a zip archive, perhaps a PyTorch checkpoint: convert it first",
        })
    }
}

/// A file that cannot be used. Offsets count bytes from the start of the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file could not be opened, read or mapped.
    #[error("cannot read `{}`", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Fewer than four bytes.
    #[error("not a GGUF or PWRI file: it has only {n_bytes} bytes (`{first}`)")]
    TooShort {
        /// Length of the file.
        n_bytes: usize,
        /// What there is.
        first: Name,
    },
    /// The first four bytes are neither `GGUF` nor `PWRI`.
    #[error(
        "not a GGUF or PWRI file: it starts with `{first}`{}",
        hint.map(|hint| hint.to_string()).unwrap_or_default()
    )]
    BadMagic {
        /// The first bytes.
        first: Name,
        /// What the file may be instead.
        hint: Option<FileHint>,
    },
    /// A version other than 2 and 3.
    #[error("unsupported GGUF version {version}, versions 2 and 3 are read")]
    UnsupportedVersion {
        /// The version in the file.
        version: u32,
    },
    /// The version number makes sense only with its bytes swapped.
    #[error("big-endian GGUF file (version {version}), only little-endian files are read")]
    BigEndian {
        /// The version after swapping.
        version: u32,
    },
    /// The file ends inside the header.
    #[error("truncated: {what} at offset {at} needs {need} bytes, the file has {have} left")]
    UnexpectedEnd {
        /// What was being read.
        what: &'static str,
        /// Where it starts.
        at: usize,
        /// Its length.
        need: usize,
        /// Bytes left in the file.
        have: usize,
    },
    /// More keys or tensors announced than the file can hold.
    #[error("{count} {what} announced at offset {at}, the rest of the file holds at most {limit}")]
    CountExceedsFile {
        /// `keys` or `tensors`.
        what: &'static str,
        /// Where the count is.
        at: usize,
        /// The count.
        count: u64,
        /// The most that the remaining bytes could hold.
        limit: usize,
    },
    /// A key that is empty, longer than the format allows or longer than the file.
    #[error("key length {len} at offset {at}, allowed are 1 to {limit}")]
    BadKeyLength {
        /// Where the length is.
        at: usize,
        /// The length.
        len: u64,
        /// The most allowed here.
        limit: usize,
    },
    /// A key that is no UTF-8.
    #[error("key `{key}` at offset {at} is not UTF-8")]
    KeyNotUtf8 {
        /// The key.
        key: Name,
        /// Where its bytes start.
        at: usize,
    },
    /// A string longer than the file.
    #[error("string of {len} bytes in key `{key}` at offset {at} exceeds the file, which has {have} left")]
    StringExceedsFile {
        /// The key.
        key: Name,
        /// Where the length is.
        at: usize,
        /// The length.
        len: u64,
        /// Bytes left in the file.
        have: usize,
    },
    /// A value type id that does not exist.
    #[error("key `{key}` has the unknown value type {id} at offset {at}, known are 0 to 12")]
    UnknownValueType {
        /// The key.
        key: Name,
        /// Where the id is.
        at: usize,
        /// The id.
        id: u32,
    },
    /// An array element type id that does not exist.
    #[error("key `{key}` has an array of the unknown element type {id} at offset {at}, known are 0 to 12")]
    UnknownElementType {
        /// The key.
        key: Name,
        /// Where the id is.
        at: usize,
        /// The id.
        id: u32,
    },
    /// A bool that is neither 0 nor 1.
    #[error("key `{key}` has the bool {value} at offset {at}, allowed are 0 and 1")]
    BadBool {
        /// The key.
        key: Name,
        /// Where the byte is.
        at: usize,
        /// The byte.
        value: u8,
    },
    /// An array with more elements than the file can hold.
    #[error(
        "array of {len} {element} in key `{key}` at offset {at} exceeds the file, which holds at most {limit}"
    )]
    ArrayExceedsFile {
        /// The key.
        key: Name,
        /// Where the length is.
        at: usize,
        /// The length.
        len: u64,
        /// The element type.
        element: ValueType,
        /// The most that the remaining bytes could hold.
        limit: usize,
    },
    /// Arrays in arrays in arrays.
    #[error("arrays in key `{key}` are nested more than {limit} deep at offset {at}")]
    ArrayTooDeep {
        /// The key.
        key: Name,
        /// Where the array that is too deep starts.
        at: usize,
        /// The deepest allowed.
        limit: usize,
    },
    /// The same key twice.
    #[error("key `{key}` stands at offset {first_at} and again at offset {at}")]
    DuplicateKey {
        /// The key.
        key: Name,
        /// The first place.
        first_at: usize,
        /// The second place.
        at: usize,
    },
    /// `general.alignment` is not an u32.
    #[error("`general.alignment` at offset {at} must be u32, found {found}")]
    AlignmentType {
        /// Where the entry is.
        at: usize,
        /// The type found.
        found: ValueType,
    },
    /// `general.alignment` is no power of two, or too large.
    #[error("`general.alignment` at offset {at} must be a power of two from 1 to {limit}, found {alignment}")]
    BadAlignment {
        /// Where the entry is.
        at: usize,
        /// The value.
        alignment: u32,
        /// The largest allowed.
        limit: u32,
    },
    /// A tensor name that is empty, too long, not UTF-8 or holds a NUL byte.
    #[error("bad tensor name `{name}` of {len} bytes at offset {at}: {rule}")]
    BadTensorName {
        /// As much of the name as there is.
        name: Name,
        /// Its length in the file.
        len: u64,
        /// Where the length is.
        at: usize,
        /// The rule that is broken.
        rule: &'static str,
    },
    /// The same tensor name twice.
    #[error("tensor `{tensor}` stands at offset {first_at} and again at offset {at}")]
    DuplicateTensor {
        /// The name.
        tensor: Name,
        /// The first place.
        first_at: usize,
        /// The second place.
        at: usize,
    },
    /// A shape that no tensor can have.
    #[error("tensor `{tensor}` at offset {at}: {fault}")]
    BadShape {
        /// The tensor.
        tensor: Name,
        /// Where its record starts.
        at: usize,
        /// What is wrong with the shape.
        fault: ShapeFault,
    },
    /// A tensor type id that does not exist, or no longer.
    #[error(
        "tensor `{tensor}` has the {} type {id} at offset {at}, known are {}",
        match removed { Some(name) => format!("removed {name}"), None => "unknown".to_owned() },
        TypeList
    )]
    UnknownTensorType {
        /// The tensor.
        tensor: Name,
        /// Where the id is.
        at: usize,
        /// The id.
        id: u32,
        /// The name it had, if ggml removed it.
        removed: Option<&'static str>,
    },
    /// A tensor that does not start at a multiple of the alignment.
    #[error(
        "bad offset: tensor `{tensor}` at offset {at} has its data at {offset}, no multiple of {alignment}"
    )]
    TensorMisaligned {
        /// The tensor.
        tensor: Name,
        /// Where its record starts.
        at: usize,
        /// Data offset, from the start of the data section.
        offset: u64,
        /// Alignment of the file.
        alignment: u32,
    },
    /// A tensor that starts before the end of the one before it.
    #[error(
        "bad offset: tensor `{tensor}` at offset {at} has its data at {offset} and overlaps the one before, \
         which ends at {expected}"
    )]
    TensorOverlap {
        /// The tensor.
        tensor: Name,
        /// Where its record starts.
        at: usize,
        /// Data offset, from the start of the data section.
        offset: u64,
        /// Where the tensors before it end.
        expected: u64,
    },
    /// A tensor that starts later than the sum of those before it.
    #[error(
        "bad offset: tensor `{tensor}` at offset {at} has its data at {offset}, \
         the ones before end at {expected}"
    )]
    TensorGap {
        /// The tensor.
        tensor: Name,
        /// Where its record starts.
        at: usize,
        /// Data offset, from the start of the data section.
        offset: u64,
        /// Where the tensors before it end.
        expected: u64,
    },
    /// A tensor that lies elsewhere than in the file.
    #[error(
        "tensor data outside the file: `{tensor}` at offset {at} has {n_bytes} bytes at data offset \
         {offset}, the data section has {data_bytes} of the file's {file_bytes}"
    )]
    TensorOutsideFile {
        /// The tensor.
        tensor: Name,
        /// Where its record starts.
        at: usize,
        /// Data offset, from the start of the data section.
        offset: u64,
        /// Bytes of the tensor.
        n_bytes: u64,
        /// Bytes of the data section.
        data_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// The tensors are laid out well, but the file ends too early.
    #[error("truncated: the file has {have} bytes, its tensors need {need}; the first one cut is `{tensor}`")]
    Truncated {
        /// The first tensor that is not complete.
        tensor: Name,
        /// Length that the file should have at least.
        need: u64,
        /// Length of the file.
        have: u64,
    },
    /// A key that is needed and absent.
    #[error("key `{key}` is missing, wanted {wanted}")]
    MissingKey {
        /// The key.
        key: Name,
        /// What it should hold.
        wanted: String,
    },
    /// A key whose value is of another type, or out of range.
    #[error("key `{key}` at offset {at} should be {wanted}, found {found}")]
    WrongKeyType {
        /// The key.
        key: Name,
        /// Where its entry starts.
        at: usize,
        /// What it should hold.
        wanted: String,
        /// What it holds.
        found: String,
    },
    /// A tensor type that cannot be turned into f32.
    #[error("tensor `{tensor}` has the type {ty}, which cannot be decoded to f32")]
    NotDecodable {
        /// The tensor.
        tensor: Name,
        /// Its type.
        ty: GgmlType,
    },
    /// A tensor that should hold 32-bit integers.
    #[error("tensor `{tensor}` has the type {ty}, wanted I32")]
    NotI32 {
        /// The tensor.
        tensor: Name,
        /// Its type.
        ty: GgmlType,
    },
    /// A NaN or an infinity among the weights.
    #[error("tensor `{tensor}` has a value that is not finite in row {row}, column {column}")]
    NotFinite {
        /// The tensor.
        tensor: Name,
        /// The row.
        row: usize,
        /// The column.
        column: usize,
    },
    /// An error in one of the files of a sharded model.
    #[error("in shard `{file}`")]
    InShard {
        /// File name of the shard.
        file: String,
        /// What is wrong there.
        source: Box<Self>,
    },
    /// The file given is not the first of its set.
    #[error("`{file}` is shard {no} of {count}, open the first one, `{first}`")]
    NotFirstShard {
        /// The file given.
        file: String,
        /// Its number, from 1.
        no: u64,
        /// How many there are.
        count: u64,
        /// Name of the first one.
        first: String,
    },
    /// A sharded model whose file name does not follow the pattern, so the others cannot be found.
    #[error("`{file}` is one of {count} shards, so its name should end in `{expected}`")]
    ShardFileName {
        /// The file given.
        file: String,
        /// How many there are.
        count: u64,
        /// How the name should end.
        expected: String,
    },
    /// A file of the set is not there.
    #[error("shard set incomplete: `{file}` is missing, {count} files belong to the model")]
    ShardMissing {
        /// The file.
        file: String,
        /// How many there are.
        count: u64,
    },
    /// A file says another number of shards, or another position, than its place in the set.
    #[error("shard `{file}` has `{key}` = {found}, expected {expected}")]
    ShardDisagrees {
        /// The file.
        file: String,
        /// The key.
        key: &'static str,
        /// Its value.
        found: u64,
        /// The value that fits.
        expected: u64,
    },
    /// A PWRI shard in a GGUF set, or the reverse.
    #[error("shard `{file}` has another magic than the first shard")]
    ShardMagic {
        /// The file.
        file: String,
    },
    /// The shards together hold another number of tensors than the first one says.
    #[error("shard set incomplete: the shards hold {found} tensors, `split.tensors.count` says {expected}")]
    ShardTensorCount {
        /// Tensors in all files.
        found: u64,
        /// What the first file says.
        expected: u64,
    },
    /// The same tensor in two shards.
    #[error("tensor `{tensor}` is in `{first_file}` and again in `{file}`")]
    DuplicateTensorInShards {
        /// The name.
        tensor: Name,
        /// The first file.
        first_file: String,
        /// The second file.
        file: String,
    },
}

/// Prints the names of all tensor types.
struct TypeList;

impl fmt::Display for TypeList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (ix, ty) in GgmlType::ALL.iter().enumerate() {
            if ix > 0 {
                f.write_str(" ")?;
            }
            f.write_str(ty.name())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_and_cut() {
        assert_eq!(Name::new(b"blk.0.ffn_up").as_str(), "blk.0.ffn_up");
        assert_eq!(Name::new(b"a\n\0\xff\"").as_str(), "a\\n\\0\\xff\\\"");
        let long = Name::new(&[b'x'; 100_000]);
        assert_eq!(long.as_str().chars().count(), 64);
        assert!(long.as_str().ends_with('…'));
        assert_eq!(Name::new(&[0xff; 100]).as_str().chars().count(), 64);
    }
}
