//! Activation counts as the original PowerInfer has them: for each layer a file of PyTorch, `activation_N.pt`.
//!
//! Such a file is a zip archive whose entries are not compressed:
//!
//! ```text
//! NAME/data.pkl    pickle: _rebuild_tensor_v2(('storage', LongStorage, '0', 'cpu', n), offset, (n_ff,), (stride,), …)
//! NAME/byteorder   "little"; older files lack it
//! NAME/data/0      the numbers, n of them
//! NAME/version     "3"
//! ```
//!
//! The pickle is taken apart by candle's reader. It trusts what it reads, so only pickles that cannot hurt it get there:
//! short ones, of few steps, whose lengths lie inside of them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};

use candle_core::pickle::{Object, Stack};
use half::{bf16, f16};
use powerinfer_sparse_ops::LayerId;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use crate::counts::ActivationCounts;
use crate::error::{PredictorError, shortened};
use crate::file::{StagedFile, check_layers, layer_number};

/// Most bytes of a file: a layer of 2^22 neurons, in numbers of 8 bytes, has room twice.
const MAX_FILE_BYTES: u64 = 1 << 26;
/// Most bytes of a pickle; that of a tensor has 150 to 200.
const MAX_PICKLE_BYTES: u64 = 4096;
/// Most steps of a pickle; that of a tensor has 30 to 50.
const MAX_PICKLE_STEPS: usize = 256;
/// Most copies that a pickle may ask for, each of which may double what there is; that of a tensor asks for one at most.
const MAX_PICKLE_COPIES: usize = 4;
/// Most entries of an archive; that of a tensor has 7.
const MAX_ENTRIES: usize = 64;
const EXPECTED: &str = "`activation_N.pt` for each layer N";
/// PyTorch maps the numbers into memory at multiples of this.
const ALIGN: u16 = 64;

/// Why a file of PyTorch is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PtError {
    /// Larger than any file of counts.
    #[error("{n_bytes} bytes are more than a layer's counts can have, which is {limit}")]
    TooLarge {
        /// Its size.
        n_bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A file name that says no layer, or a layer that should not be there.
    #[error("file `{name}` is unexpected; expected are {expected}")]
    Name {
        /// The name, shortened.
        name: String,
        /// The names that have a meaning.
        expected: &'static str,
    },
    /// Not an archive, or a broken one. PyTorch before 1.6 wrote no archives.
    #[error("not a whole zip archive, as torch.save writes since PyTorch 1.6: {reason}")]
    Archive {
        /// What the reader of archives says.
        reason: String,
    },
    /// Part of the archive is missing, compressed or shorter than said.
    #[error("entry `{entry}` of the archive {problem}")]
    Entry {
        /// Its name, shortened.
        entry: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// Numbers of a machine with another order of bytes.
    #[error("byte order is {got}, expected little")]
    ByteOrder {
        /// The order, shortened.
        got: String,
    },
    /// A pickle that is broken, or does more than one of a tensor has to.
    #[error("the pickle cannot be read: {reason}")]
    Pickle {
        /// What is wrong.
        reason: String,
    },
    /// Something other than a tensor was saved.
    #[error("what was saved is {got}, expected one tensor")]
    NotTensor {
        /// What it is.
        got: String,
    },
    /// Fewer numbers than the tensor refers to.
    #[error("the tensor refers to {need} numbers, there are {have}")]
    Storage {
        /// Numbers that it refers to.
        need: u64,
        /// Numbers in the file.
        have: u64,
    },
    /// A number that counts nothing.
    #[error("neuron {neuron} fired {value} times; expected a whole number from 0 up")]
    Count {
        /// The neuron.
        neuron: usize,
        /// The number.
        value: f64,
    },
}

impl ActivationCounts {
    /// Reads the files `activation_N.pt` of a folder, one for each layer, as the original PowerInfer has them; other files
    /// in it are left alone.
    ///
    /// Tensors of one dimension with whole numbers are taken, in any type of integers or floats that PyTorch has had
    /// since its beginning. The number of tokens is not in such files: it is taken to be the highest count, which no neuron
    /// can exceed, so that shares are upper bounds and their proportions exact.
    ///
    /// # Errors
    /// [`PredictorError::Read`], those of [`ActivationCounts::from_pt_files`].
    pub fn open_pt(folder: impl AsRef<Path>) -> Result<Self, PredictorError> {
        let folder = folder.as_ref();
        Self::from_pt_files(pt_files(folder)?).map_err(|error| error.in_file(folder))
    }

    /// Reads files `activation_N.pt` in any order and from any folders; see [`ActivationCounts::open_pt`].
    ///
    /// # Errors
    /// [`PredictorError::Read`]; [`PredictorError::InFile`] with what is wrong with one; a missing layer or one that comes
    /// twice; [`PredictorError::NoTokens`] if all counts are zero.
    pub fn from_pt_files(
        paths: impl IntoIterator<Item = impl Into<PathBuf>>,
    ) -> Result<Self, PredictorError> {
        let mut by_layer = BTreeMap::new();
        for path in paths.into_iter().map(Into::into) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let layer = layer_of(&name)
                .ok_or_else(|| PtError::Name { name: shortened(&name), expected: EXPECTED })?;
            if by_layer.insert(layer, path).is_some() {
                return Err(PredictorError::RepeatedLayer { layer });
            }
        }
        check_layers(by_layer.keys().copied(), "activation_0.pt")?;
        let read = |path: &PathBuf| counts_of(&read_file(path)?).map_err(|error| error.in_file(path));
        let layers = by_layer.values().map(read).collect::<Result<Vec<_>, _>>()?;
        let n_tokens = layers.iter().flatten().copied().max().unwrap_or(0);
        Self::new(n_tokens, layers)
    }

    /// Writes a file `activation_N.pt` for each layer into a folder, which is made if it is not there. PyTorch reads them
    /// as tensors of int64, `[n_ff]`, also with `weights_only=True`. Number of tokens, fingerprint and histograms have no
    /// place in them.
    ///
    /// # Errors
    /// [`PredictorError::Write`]; [`PtError::Name`] in it if the folder has files of layers that there are none of.
    pub fn write_pt(&self, folder: impl AsRef<Path>) -> Result<(), PredictorError> {
        let folder = folder.as_ref();
        let failed = |source| PredictorError::Write { path: folder.to_owned(), source };
        fs::create_dir_all(folder).map_err(failed)?;
        let has_layer = |layer: LayerId| layer.index() < self.n_layer();
        for path in pt_files(folder)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !layer_of(&name).is_some_and(has_layer) {
                let expected = "files of the layers that are written";
                let error = PtError::Name { name: shortened(&name), expected };
                return Err(PredictorError::from(error).in_file(folder));
            }
        }
        let mut staged = Vec::with_capacity(self.n_layer());
        for layer in (0..).map(LayerId).take_while(|&layer| has_layer(layer)) {
            let path = folder.join(format!("activation_{layer}.pt"));
            let counts = self.layer(layer).unwrap_or_default();
            let bytes = archive(&format!("activation_{layer}"), counts)
                .map_err(|source| PredictorError::Write { path: path.clone(), source })?;
            staged.push(StagedFile::new(&path, &bytes)?);
        }
        // All are complete before the first takes the place of another.
        staged.into_iter().try_for_each(StagedFile::rename)
    }
}

fn layer_of(name: &str) -> Option<LayerId> {
    layer_number(name.strip_prefix("activation_")?.strip_suffix(".pt")?)
}

/// Files of a folder whose name begins and ends as those of counts do.
fn pt_files(folder: &Path) -> Result<Vec<PathBuf>, PredictorError> {
    let failed = |source| PredictorError::Read { path: folder.to_owned(), source };
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("activation_") && name.ends_with(".pt") {
            paths.push(entry.path());
        }
    }
    Ok(paths)
}

fn read_file(path: &Path) -> Result<Vec<u8>, PredictorError> {
    let failed = |source| PredictorError::Read { path: path.to_owned(), source };
    let file = fs::File::open(path).map_err(failed)?;
    let n_bytes = file.metadata().map_err(failed)?.len();
    if n_bytes > MAX_FILE_BYTES {
        let error = PtError::TooLarge { n_bytes, limit: MAX_FILE_BYTES };
        return Err(PredictorError::from(error).in_file(path));
    }
    let mut bytes = Vec::new();
    // A file that grows meanwhile, or a device, does not end where it said.
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// The counts in the bytes of a file.
fn counts_of(bytes: &[u8]) -> Result<Vec<u64>, PredictorError> {
    let broken = |error: zip::result::ZipError| PtError::Archive { reason: error.to_string() };
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(broken)?;
    if archive.len() > MAX_ENTRIES {
        let reason = format!("{} entries, at most {MAX_ENTRIES} are expected", archive.len());
        return Err(PtError::Archive { reason }.into());
    }
    let pickle = archive.file_names().filter_map(Result::ok).find(|name| name.ends_with("/data.pkl"));
    let Some(pickle) = pickle.map(|name| name.into_owned()) else {
        return Err(PtError::Entry { entry: "data.pkl".to_owned(), problem: "is missing" }.into());
    };
    let folder = pickle.trim_end_matches("data.pkl").to_owned();
    if let Some(order) = entry(&mut archive, &format!("{folder}byteorder"), 64)?
        && order != b"little"
    {
        return Err(PtError::ByteOrder { got: shortened(&String::from_utf8_lossy(&order)) }.into());
    }
    let pickle = required(&mut archive, &pickle, MAX_PICKLE_BYTES)?;
    let tensor = Tensor::of(unpickled(&pickle)?)?;
    let data = required(&mut archive, &format!("{folder}data/{}", tensor.key), bytes.len() as u64)?;
    tensor.counts(&data)
}

/// The bytes of an entry, at most `limit` of them; `None` if there is none of that name.
fn entry(
    archive: &mut ZipArchive<Cursor<&[u8]>>,
    name: &str,
    limit: u64,
) -> Result<Option<Vec<u8>>, PtError> {
    let wrong = |problem| PtError::Entry { entry: shortened(name), problem };
    let file = match archive.by_name(name) {
        Ok(file) => file,
        Err(zip::result::ZipError::FileNotFound) => return Ok(None),
        Err(error) => return Err(PtError::Archive { reason: error.to_string() }),
    };
    if file.compression() != CompressionMethod::Stored {
        return Err(wrong("is compressed"));
    }
    let size = file.size();
    if size > limit {
        return Err(wrong("is larger than it can be"));
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|_| wrong("is cut off or its checksum is wrong"))?;
    if bytes.len() as u64 != size {
        return Err(wrong("has another length than it says"));
    }
    Ok(Some(bytes))
}

fn required(archive: &mut ZipArchive<Cursor<&[u8]>>, name: &str, limit: u64) -> Result<Vec<u8>, PtError> {
    let missing = || PtError::Entry { entry: shortened(name), problem: "is missing" };
    entry(archive, name, limit)?.ok_or_else(missing)
}

fn unpickled(bytes: &[u8]) -> Result<Object, PtError> {
    check_steps(bytes).map_err(|reason| PtError::Pickle { reason: reason.to_owned() })?;
    let failed = |error: candle_core::Error| PtError::Pickle { reason: shortened(&error.to_string()) };
    let mut stack = Stack::empty();
    stack.read_loop(&mut &bytes[..]).map_err(failed)?;
    stack.finalize().map_err(failed)
}

/// Goes through the steps of a pickle without taking them, and refuses what candle's reader would ask too much memory or
/// too large a shift for.
fn check_steps(bytes: &[u8]) -> Result<(), &'static str> {
    const CUT: &str = "it is cut off";
    let mut rest = bytes;
    let mut copies = 0;
    for _ in 0..MAX_PICKLE_STEPS {
        let (&step, after) = rest.split_first().ok_or(CUT)?;
        rest = after;
        let n_operand_bytes = match step {
            b'.' => return Ok(()),
            // A class: two lines.
            b'c' => {
                let mut lines = rest.split_inclusive(|&byte| byte == b'\n');
                lines.by_ref().take(2).map(<[u8]>::len).sum()
            }
            b'h' | b'j' => {
                copies += 1;
                if step == b'h' { 1 } else { 4 }
            }
            0x80 | b'q' | b'K' => 1,
            b'M' => 2,
            b'r' | b'J' => 4,
            b'G' => 8,
            // A text: its length and as many bytes.
            b'X' => 4 + u32::from_le_bytes(*rest.first_chunk().ok_or(CUT)?) as usize,
            // An integer of up to 8 bytes.
            0x8a => match rest.first() {
                Some(&n) if n <= 8 => 1 + usize::from(n),
                _ => return Err("it has an integer of more than 8 bytes"),
            },
            _ => 0,
        };
        if copies > MAX_PICKLE_COPIES {
            return Err("it copies more than that of a tensor");
        }
        rest = rest.get(n_operand_bytes..).ok_or(CUT)?;
    }
    Err("it has more steps than that of a tensor")
}

/// Types of PyTorch that can hold counts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum NumberType {
    I8,
    U8,
    I16,
    I32,
    I64,
    F16,
    Bf16,
    F32,
    F64,
}

impl NumberType {
    fn of(storage: &str) -> Result<Self, PredictorError> {
        Ok(match storage {
            "CharStorage" => Self::I8,
            "ByteStorage" => Self::U8,
            "ShortStorage" => Self::I16,
            "IntStorage" => Self::I32,
            "LongStorage" => Self::I64,
            "HalfStorage" => Self::F16,
            "BFloat16Storage" => Self::Bf16,
            "FloatStorage" => Self::F32,
            "DoubleStorage" => Self::F64,
            other => {
                return Err(PredictorError::Type {
                    tensor: "counts".to_owned(),
                    expected: "integers or floats of PyTorch, such as LongStorage or FloatStorage",
                    got: shortened(other),
                });
            }
        })
    }

    fn n_bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// A number of that many bytes; if it is no count, its value.
    fn count(self, bytes: &[u8]) -> Result<u64, f64> {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(word);
        // Signs are carried on by shifting up and down again.
        let unused = 64 - 8 * bytes.len();
        let integer = (bits << unused).cast_signed() >> unused;
        let float = match self {
            Self::U8 => return Ok(bits),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => {
                return u64::try_from(integer).map_err(|_| integer as f64);
            }
            Self::F16 => f16::from_bits(bits as u16).to_f64(),
            Self::Bf16 => bf16::from_bits(bits as u16).to_f64(),
            Self::F32 => f64::from(f32::from_bits(bits as u32)),
            Self::F64 => f64::from_bits(bits),
        };
        // Above 2^63 there is no number in the files of this crate.
        if float.fract() == 0.0 && (0.0..9.2e18).contains(&float) { Ok(float as u64) } else { Err(float) }
    }
}

/// Where the numbers of a tensor of one dimension are.
#[derive(Debug)]
struct Tensor {
    ty: NumberType,
    /// Name of the storage.
    key: String,
    /// Numbers before the first.
    offset: u64,
    n: u64,
    /// From one number to the next.
    stride: u64,
}

impl Tensor {
    fn of(object: Object) -> Result<Self, PredictorError> {
        let other = |object: &Object| PtError::NotTensor { got: kind(object) };
        let Object::Reduce { callable, args } = object else { return Err(other(&object).into()) };
        let (Object::Class { module_name, class_name }, Object::Tuple(mut args)) = (*callable, *args) else {
            return Err(PtError::NotTensor { got: "a call of no class".to_owned() }.into());
        };
        let strange = || PtError::NotTensor { got: format!("a strange call of {}", shortened(&class_name)) };
        match (module_name.as_str(), class_name.as_str()) {
            // A parameter is a tensor with a flag.
            ("torch._utils", "_rebuild_parameter") if !args.is_empty() => {
                let inner = args.swap_remove(0);
                // Once: a parameter of a parameter is none.
                return match &inner {
                    Object::Reduce { callable, .. } if is_rebuild_tensor(callable) => Self::of(inner),
                    _ => Err(strange().into()),
                };
            }
            ("torch._utils", "_rebuild_tensor_v2") => {}
            _ => {
                let got = shortened(&format!("{module_name}.{class_name}"));
                return Err(PtError::NotTensor { got }.into());
            }
        }
        let [Object::PersistentLoad(storage), offset, Object::Tuple(size), Object::Tuple(stride), ..] =
            &args[..]
        else {
            return Err(strange().into());
        };
        let Object::Tuple(storage) = &**storage else { return Err(strange().into()) };
        let [Object::Unicode(_), Object::Class { class_name: ty, .. }, Object::Unicode(key), ..] =
            &storage[..]
        else {
            return Err(strange().into());
        };
        let sizes = size.iter().map(natural).collect::<Option<Vec<u64>>>().ok_or_else(strange)?;
        let (&[n], [stride]) = (&sizes[..], &stride[..]) else {
            return Err(PredictorError::Shape {
                tensor: "counts".to_owned(),
                expected: "one dimension, not empty".to_owned(),
                got: sizes.iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX)).collect(),
            });
        };
        Ok(Self {
            ty: NumberType::of(ty)?,
            key: key.clone(),
            offset: natural(offset).ok_or_else(strange)?,
            n,
            stride: natural(stride).ok_or_else(strange)?,
        })
    }

    fn counts(&self, data: &[u8]) -> Result<Vec<u64>, PredictorError> {
        let n_bytes = self.ty.n_bytes();
        let have = (data.len() / n_bytes) as u64;
        let last = self.n.checked_sub(1).and_then(|n| n.checked_mul(self.stride));
        let need = last.and_then(|last| last.checked_add(self.offset)?.checked_add(1)).unwrap_or(u64::MAX);
        // One number many times is no count, and could be more than there is memory for.
        if self.n == 0 || (self.stride == 0 && self.n > 1) {
            return Err(PredictorError::Shape {
                tensor: "counts".to_owned(),
                expected: "one dimension, not empty, of numbers of its own".to_owned(),
                got: vec![usize::try_from(self.n).unwrap_or(usize::MAX)],
            });
        }
        if need > have {
            return Err(PtError::Storage { need, have }.into());
        }
        let numbers = data.chunks_exact(n_bytes).skip(self.offset as usize);
        let numbers = numbers.step_by((self.stride as usize).max(1)).take(self.n as usize).enumerate();
        numbers
            .map(|(neuron, bytes)| {
                self.ty.count(bytes).map_err(|value| PtError::Count { neuron, value }.into())
            })
            .collect()
    }
}

fn is_rebuild_tensor(object: &Object) -> bool {
    matches!(object, Object::Class { class_name, .. } if class_name == "_rebuild_tensor_v2")
}

fn natural(object: &Object) -> Option<u64> {
    match object {
        Object::Int(n) => u64::try_from(*n).ok(),
        Object::Long(n) => u64::try_from(*n).ok(),
        _ => None,
    }
}

fn kind(object: &Object) -> String {
    let kind = match object {
        Object::Dict(_) => "a dictionary",
        Object::List(_) => "a list",
        Object::Tuple(_) => "a tuple",
        Object::Int(_) | Object::Long(_) | Object::Float(_) | Object::Bool(_) => "a number",
        Object::Unicode(_) => "a text",
        _ => "an object",
    };
    kind.to_owned()
}

/// An archive that PyTorch reads as a tensor of int64.
fn archive(name: &str, counts: &[u64]) -> std::io::Result<Vec<u8>> {
    let options =
        SimpleFileOptions::default().compression_method(CompressionMethod::Stored).with_alignment(ALIGN);
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let numbers: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
    // PyTorch takes the name of the archive from the entry that comes first.
    let entries: [(&str, &[u8]); 4] = [
        ("data.pkl", &pickle(counts.len() as u64)),
        ("byteorder", b"little"),
        ("data/0", &numbers),
        ("version", b"3\n"),
    ];
    for (entry, bytes) in entries {
        zip.start_file(format!("{name}/{entry}"), options)?;
        zip.write_all(bytes)?;
    }
    Ok(zip.finish()?.into_inner())
}

/// The pickle (protocol 2) of a tensor of `n` numbers in storage `0`.
fn pickle(n: u64) -> Vec<u8> {
    let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let long = |n: u64| [&[0x8a, 8], &n.to_le_bytes()[..]].concat();
    [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
        text("storage"),
        b"ctorch\nLongStorage\n".to_vec(),
        text("0"),
        text("cpu"),
        // Storage, which is loaded by its name; offset.
        long(n),
        b"tQK\x00".to_vec(),
        // Shape and strides.
        long(n),
        b"\x85K\x01\x85".to_vec(),
        // No gradient, no hooks.
        b"\x89ccollections\nOrderedDict\n)RtR.".to_vec(),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn data(name: &str) -> Vec<u8> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/pt");
        fs::read(folder.join(name)).unwrap()
    }

    /// As in `tools/check_activation_pt.py`.
    fn counts(layer: u64) -> Vec<u64> {
        std::iter::once(layer).chain((1..7).map(|j| (3 * layer + 5 * j) % 17)).collect()
    }

    /// An archive of these entries.
    fn zip_of(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        for (name, bytes) in entries {
            zip.start_file(*name, options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap().into_inner()
    }

    fn error(bytes: &[u8]) -> PredictorError {
        counts_of(bytes).unwrap_err()
    }

    #[test]
    fn every_type_and_view_that_pytorch_saves_is_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/pt");
        let mut n = 0;
        for entry in fs::read_dir(folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.starts_with("good_") {
                assert_eq!(counts_of(&data(&name)).unwrap(), counts(1), "{name}");
                n += 1;
            }
        }
        assert_eq!(n, 13);
    }

    #[test]
    fn layers_come_by_number_and_the_highest_count_stands_for_the_tokens() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/pt/twelve");
        for read in [ActivationCounts::open_pt(&folder), ActivationCounts::open(&folder)] {
            let read = read.unwrap();
            assert_eq!((read.n_layer(), read.n_tokens(), read.fingerprint()), (12, 16, None));
            for layer in 0..12 {
                assert_eq!(read.layer(LayerId(layer)).unwrap(), counts(u64::from(layer)), "layer {layer}");
            }
        }
    }

    #[test]
    fn what_is_written_is_read_back_and_stands_beside_other_files() {
        let layers = (0..12).map(counts).collect();
        let counts = ActivationCounts::new(16, layers).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("new/activation");
        counts.write_pt(&to).unwrap();
        fs::write(to.join("notes.txt"), "not ours").unwrap();
        counts.write_pt(&to).unwrap();
        assert_eq!(ActivationCounts::open(&to).unwrap(), counts);
        assert_eq!(fs::read_dir(&to).unwrap().count(), 13);
        // Of fewer layers: what is left over would be read as part of it.
        let fewer = ActivationCounts::new(1, vec![vec![1]]).unwrap();
        assert!(matches!(fewer.write_pt(&to).unwrap_err(), PredictorError::InFile { .. }));
        assert_eq!(ActivationCounts::open(&to).unwrap(), counts);
        let blocked = to.join("notes.txt").join("below");
        assert!(matches!(fewer.write_pt(blocked).unwrap_err(), PredictorError::Write { .. }));
    }

    #[test]
    fn numbers_are_where_pytorch_maps_them() {
        let bytes = archive("activation_0", &[0x0102_0304_0506_0708]).unwrap();
        let at = bytes.windows(8).position(|w| w == [8, 7, 6, 5, 4, 3, 2, 1]).unwrap();
        assert_eq!(at % usize::from(ALIGN), 0);
    }

    #[test]
    fn missing_repeated_and_strange_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let open = || match ActivationCounts::open_pt(folder.path()).unwrap_err() {
            PredictorError::InFile { path, source } => {
                assert!(path.starts_with(folder.path()), "{}", path.display());
                *source
            }
            other => other,
        };
        assert!(matches!(open(), PredictorError::NoLayers { .. }));
        let file = |name: &str, from: &str| fs::write(folder.path().join(name), data(from)).unwrap();
        file("activation_10.pt", "good_int64.pt");
        file("activation_0.pt", "good_int64.pt");
        assert!(matches!(open(), PredictorError::MissingLayer { layer: LayerId(1), last: LayerId(10), .. }));
        fs::remove_file(folder.path().join("activation_10.pt")).unwrap();
        file("activation_00.pt", "good_int64.pt");
        assert!(
            matches!(open(), PredictorError::Pt(PtError::Name { name, .. }) if name == "activation_00.pt")
        );
        fs::remove_file(folder.path().join("activation_00.pt")).unwrap();
        fs::create_dir(folder.path().join("activation_1.pt")).unwrap();
        assert!(matches!(open(), PredictorError::Read { .. }));

        let file = folder.path().join("activation_0.pt");
        let twice = ActivationCounts::from_pt_files([&file, &file]).unwrap_err();
        assert!(matches!(twice, PredictorError::RepeatedLayer { layer: LayerId(0) }), "{twice}");
        assert_eq!(ActivationCounts::open(&file).unwrap().n_layer(), 1);
        let error = ActivationCounts::open(folder.path().join("x.pt")).unwrap_err();
        assert!(matches!(error, PredictorError::Pt(PtError::Name { .. })), "{error}");
        fs::write(&file, archive("x", &[0, 0]).unwrap()).unwrap();
        let error = ActivationCounts::open(&file).unwrap_err();
        assert!(matches!(error, PredictorError::NoTokens { .. }), "{error}");
    }

    #[test]
    fn files_that_pytorch_saves_of_other_things_are_refused_for_what_they_are() {
        for (name, expected) in [
            ("dict", "what was saved is a dictionary, expected one tensor"),
            ("list", "what was saved is a list, expected one tensor"),
            ("number", "what was saved is a number, expected one tensor"),
            ("sparse", "the pickle cannot be read: it copies more than that of a tensor"),
            ("uint32", "what was saved is torch._utils._rebuild_tensor_v3, expected one tensor"),
            ("bool", "tensor `counts` is BoolStorage, expected integers or floats"),
            ("complex", "tensor `counts` is ComplexFloatStorage, expected integers or floats"),
            ("two_dimensions", "tensor `counts` has the shape [1, 7], expected one dimension"),
            ("scalar", "tensor `counts` has the shape [], expected one dimension"),
            ("empty", "tensor `counts` has the shape [0], expected one dimension"),
            ("repeated", "tensor `counts` has the shape [7], expected one dimension"),
            ("negative", "neuron 0 fired -1 times"),
            ("half", "neuron 0 fired 1.5 times"),
            ("nan", "neuron 1 fired NaN times"),
            ("infinite", "neuron 1 fired inf times"),
            ("huge", "neuron 1 fired 1000000015047466200000000000000 times"),
            ("legacy", "not a whole zip archive, as torch.save writes since PyTorch 1.6"),
        ] {
            let error = error(&data(&format!("bad_{name}.pt"))).to_string();
            assert!(error.starts_with(expected), "{name}: {error}");
        }
    }

    #[test]
    fn archives_that_cannot_be_are_refused() {
        let pickle = pickle(2);
        let numbers = [3; 16];
        let archive = |parts: &[(&str, &[u8])]| error(&zip_of(parts)).to_string();
        let pkl = ("a/data.pkl", &pickle[..]);
        assert_eq!(archive(&[("a/data/0", &numbers)]), "entry `data.pkl` of the archive is missing");
        assert_eq!(archive(&[pkl]), "entry `a/data/0` of the archive is missing");
        let few = [pkl, ("a/data/0", &numbers[..15])];
        assert_eq!(archive(&few), "the tensor refers to 2 numbers, there are 1");
        let big = [pkl, ("a/data/0", &numbers), ("a/byteorder", b"big")];
        assert_eq!(archive(&big), "byte order is big, expected little");
        let long = [0; 5000];
        assert_eq!(
            archive(&[("a/data.pkl", &long)]),
            "entry `a/data.pkl` of the archive is larger than it can be"
        );
        let names: Vec<String> = (0..65).map(|i| format!("a/{i}")).collect();
        let many: Vec<(&str, &[u8])> = names.iter().map(|name| (&name[..], &[][..])).collect();
        assert!(archive(&many).contains("65 entries"));
        assert!(counts_of(&zip_of(&[pkl, ("a/data/0", &numbers)])).is_ok());
    }

    #[test]
    fn sizes_that_are_only_said_ask_for_no_memory() {
        // As many numbers as can be named, over a storage of two.
        for n in [3, 1 << 31, 1 << 40, i64::MAX as u64] {
            let bytes = zip_of(&[("a/data.pkl", &pickle(n)), ("a/data/0", &[0; 16])]);
            let error = error(&bytes);
            assert!(
                matches!(error, PredictorError::Pt(PtError::Storage { need, have: 2 }) if need == n),
                "{error}"
            );
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("activation_0.pt");
        fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let PredictorError::InFile { source, .. } = ActivationCounts::open(&path).unwrap_err() else {
            panic!()
        };
        assert!(matches!(*source, PredictorError::Pt(PtError::TooLarge { .. })), "{source}");
    }

    #[test]
    fn pickles_that_would_hurt_the_reader_do_not_reach_it() {
        let bomb = [&b"]q\x00"[..], &b"h\x00h\x00\x86q\x00".repeat(30), b"."].concat();
        let nested = [&b")"[..], &[0x85; 300], b"."].concat();
        for (pickle, reason) in [
            (&b"X\xff\xff\xff\xff"[..], "it is cut off"),
            (b"X\x01\x00\x00", "it is cut off"),
            (b"\x8a\xff\x01\x02", "it has an integer of more than 8 bytes"),
            (&bomb, "it copies more than that of a tensor"),
            (&nested, "it has more steps than that of a tensor"),
            (b"ctorch", "it is cut off"),
            (b"", "it is cut off"),
        ] {
            // A class may end with the file for the check; the reader then finds no more steps.
            let PtError::Pickle { reason: got } = unpickled(pickle).unwrap_err() else { panic!("{reason}") };
            assert_eq!(got, reason);
        }
        // What the reader finds out itself.
        for pickle in [&b"."[..], b"t.", b"Ia.", b"h\x07.", b"K\x01K\x02e."] {
            assert!(matches!(unpickled(pickle).unwrap_err(), PtError::Pickle { .. }), "{pickle:?}");
        }
        // What is left over from it, of the wrong shape.
        for pickle in [
            &b"ctorch._utils\n_rebuild_tensor_v2\n)R."[..],
            b"ctorch._utils\n_rebuild_parameter\n)R.",
            b"ctorch._utils\n_rebuild_parameter\nctorch._utils\n_rebuild_parameter\n)R\x85R.",
            b"ctorch._utils\n_rebuild_tensor_v2\n((tQK\x00)))tR.",
            b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01QK\x00))tR.",
            b"K\x01K\x02R.",
            b"N.",
        ] {
            let error = Tensor::of(unpickled(pickle).unwrap()).unwrap_err();
            assert!(matches!(error, PredictorError::Pt(PtError::NotTensor { .. })), "{error}");
        }
    }

    #[test]
    fn every_cut_is_refused() {
        for bytes in [data("good_int64.pt"), archive("a", &counts(1)).unwrap()] {
            assert_eq!(counts_of(&bytes).unwrap(), counts(1));
            for n in 0..bytes.len() {
                assert!(counts_of(&bytes[..n]).is_err(), "{n} of {} bytes", bytes.len());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// No panic, and no memory that the file does not have.
        #[test]
        fn changed_bytes_give_an_error_or_counts(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
            let mut bytes = data("good_float32.pt");
            for (at, byte) in changes {
                bytes[at.index(149 + 60)] = byte;
            }
            if let Ok(counts) = counts_of(&bytes) {
                prop_assert!(counts.len() <= bytes.len());
            }
        }

        /// The same for any byte, which most often breaks the directory of the archive.
        #[test]
        fn changed_archives_give_an_error_or_counts(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
            let mut bytes = archive("a", &counts(1)).unwrap();
            for (at, byte) in changes {
                *at.get_mut(&mut bytes) = byte;
            }
            if let Ok(counts) = counts_of(&bytes) {
                prop_assert!(counts.len() <= bytes.len());
            }
        }

        /// The same for the pickle alone, which no checksum guards then.
        #[test]
        fn changed_pickles_give_an_error_or_counts(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
            let mut pickle = pickle(2);
            for (at, byte) in changes {
                *at.get_mut(&mut pickle) = byte;
            }
            if let Ok(counts) = counts_of(&zip_of(&[("a/data.pkl", &pickle), ("a/data/0", &[1; 16])])) {
                prop_assert!(counts.len() <= 2);
            }
        }

        #[test]
        fn counts_of_any_size_are_read_back(counts in prop::collection::vec(0..=i64::MAX as u64, 1..200)) {
            prop_assert_eq!(counts_of(&archive("a", &counts).unwrap()).unwrap(), counts);
        }
    }
}
