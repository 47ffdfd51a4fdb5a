//! Models that lie in one file or in several.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::{GgufError, Name};
use crate::file::{GgufFile, Magic};
use crate::metadata::Metadata;
use crate::names::NameTable;
use crate::tensor::Tensor;

const COUNT_KEY: &str = "split.count";
const NO_KEY: &str = "split.no";
const TENSORS_KEY: &str = "split.tensors.count";

/// A model: one file, or the files that llama.cpp's split tool makes of it (`NAME-00001-of-00003.gguf`, …).
/// Keys are those of the first file, tensors those of all.
pub struct GgufModel {
    files: Vec<GgufFile>,
    /// Number of tensors in the files before each file.
    firsts: Vec<usize>,
    /// Tensors of all files by name; `None` for one file, which has its own table.
    table: Option<NameTable>,
}

impl GgufModel {
    /// Maps the file `path`, and if it is the first of a set, the others; see [`GgufFile::open`].
    ///
    /// # Errors
    /// The errors of [`GgufFile::open`], and those whose names say `Shard` if the set is not complete.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        Self::open_with(path.as_ref(), |path| GgufFile::open(path))
    }

    /// As [`GgufModel::open`], but reads the files into memory; see [`GgufFile::read`].
    ///
    /// # Errors
    /// Those of [`GgufModel::open`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        Self::open_with(path.as_ref(), |path| GgufFile::read(path))
    }

    fn open_with(
        path: &Path,
        open: impl Fn(&Path) -> Result<GgufFile, GgufError>,
    ) -> Result<Self, GgufError> {
        let first = open(path)?;
        let count = first.metadata().find::<u64>(COUNT_KEY)?.unwrap_or(1);
        if count <= 1 {
            return Ok(Self::from(first));
        }
        let set = ShardSet::of(path, count, first.metadata().require(NO_KEY)?)?;
        let mut files = vec![first];
        for ix in 1..count {
            let path = set.path(ix);
            if !path.exists() {
                return Err(GgufError::ShardMissing { file: set.file(ix), count });
            }
            let in_shard = |source| GgufError::InShard { file: set.file(ix), source: Box::new(source) };
            let file = open(&path).map_err(in_shard)?;
            set.check(ix, &file, files.first().map_or(file.magic(), GgufFile::magic), in_shard)?;
            files.push(file);
        }
        Self::from_shards(files, &set)
    }

    fn from_shards(files: Vec<GgufFile>, set: &ShardSet) -> Result<Self, GgufError> {
        let mut n_tensors = 0usize;
        let mut firsts = Vec::with_capacity(files.len());
        for file in &files {
            firsts.push(n_tensors);
            n_tensors = n_tensors.saturating_add(file.n_tensors());
        }
        let mut model = Self { files, firsts, table: None };
        if let Some(expected) = model.metadata().find::<u64>(TENSORS_KEY)?
            && expected != n_tensors as u64
        {
            return Err(GgufError::ShardTensorCount { found: n_tensors as u64, expected });
        }
        let table = NameTable::build(n_tensors, |ix| model.name_at(ix)).map_err(|duplicate| {
            let file = |ix| model.place(ix).map_or_else(String::new, |(shard, _)| set.file(shard as u64));
            GgufError::DuplicateTensorInShards {
                tensor: Name::new(model.name_at(duplicate.first)),
                first_file: file(duplicate.first),
                file: file(duplicate.second),
            }
        })?;
        model.table = Some(table);
        Ok(model)
    }

    /// The magic of all files.
    pub fn magic(&self) -> Magic {
        self.first().magic()
    }

    /// Keys and values of the first file.
    pub fn metadata(&self) -> Metadata<'_> {
        self.first().metadata()
    }

    /// The files in order.
    pub fn files(&self) -> &[GgufFile] {
        &self.files
    }

    /// Number of tensors in all files.
    pub fn n_tensors(&self) -> usize {
        self.files.iter().map(GgufFile::n_tensors).sum()
    }

    /// The tensors of all files in order.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.files.iter().flat_map(GgufFile::tensors)
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        match &self.table {
            None => self.first().tensor(name),
            Some(table) => self.tensor_at(table.find(name.as_bytes(), |ix| self.name_at(ix))?),
        }
    }

    /// Reads all weights and looks for NaN and infinity; see [`Tensor::check_finite`].
    ///
    /// # Errors
    /// [`GgufError::NotFinite`] with the first place where one is found.
    pub fn check_finite(&self) -> Result<(), GgufError> {
        self.files.iter().try_for_each(GgufFile::check_finite)
    }

    fn first(&self) -> &GgufFile {
        self.files.first().expect("a model has at least one file")
    }

    /// File and place in it of the tensor number `ix` of the model.
    fn place(&self, ix: usize) -> Option<(usize, usize)> {
        let file = self.firsts.partition_point(|&first| first <= ix).checked_sub(1)?;
        Some((file, ix.checked_sub(*self.firsts.get(file)?)?))
    }

    fn tensor_at(&self, ix: usize) -> Option<Tensor<'_>> {
        let (file, ix) = self.place(ix)?;
        self.files.get(file)?.tensor_at(ix)
    }

    fn name_at(&self, ix: usize) -> &[u8] {
        self.tensor_at(ix).map(|tensor| tensor.name().as_bytes()).unwrap_or_default()
    }
}

impl From<GgufFile> for GgufModel {
    /// A model of one file, whatever its keys say about others.
    fn from(file: GgufFile) -> Self {
        Self { files: vec![file], firsts: vec![0], table: None }
    }
}

impl fmt::Debug for GgufModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufModel").field("files", &self.files).finish_non_exhaustive()
    }
}

/// The names of the files of a set.
struct ShardSet {
    folder: PathBuf,
    stem: String,
    count: u64,
}

impl ShardSet {
    /// Takes the name of the file number `no`, from 0, apart.
    fn of(path: &Path, count: u64, no: u64) -> Result<Self, GgufError> {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let human = no.saturating_add(1);
        let suffix = suffix(no, count);
        let Some(stem) = file.strip_suffix(&suffix) else {
            return Err(GgufError::ShardFileName { file, count, expected: suffix });
        };
        let set = Self { folder: path.with_file_name(""), stem: stem.to_owned(), count };
        if no != 0 {
            return Err(GgufError::NotFirstShard { first: set.file(0), file, no: human, count });
        }
        Ok(set)
    }

    fn file(&self, ix: u64) -> String {
        format!("{}{}", self.stem, suffix(ix, self.count))
    }

    fn path(&self, ix: u64) -> PathBuf {
        self.folder.join(self.file(ix))
    }

    fn check(
        &self,
        ix: u64,
        file: &GgufFile,
        magic: Magic,
        in_shard: impl Fn(GgufError) -> GgufError,
    ) -> Result<(), GgufError> {
        for (key, expected) in [(COUNT_KEY, self.count), (NO_KEY, ix)] {
            let found = file.metadata().require::<u64>(key).map_err(&in_shard)?;
            if found != expected {
                return Err(GgufError::ShardDisagrees { file: self.file(ix), key, found, expected });
            }
        }
        if file.magic() != magic {
            return Err(GgufError::ShardMagic { file: self.file(ix) });
        }
        Ok(())
    }
}

fn suffix(ix: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", ix.saturating_add(1))
}
