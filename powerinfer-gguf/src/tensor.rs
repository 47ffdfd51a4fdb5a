//! The tensors of a file: their records are checked once, and read again where they lie.

use std::fmt;

use powerinfer_sparse_ops::{WeightBytes, block};

use crate::cursor::Cursor;
use crate::error::{GgufError, Name};
use crate::file::GgufFile;
use crate::metadata::{check_count, end};
use crate::names::NameTable;
use crate::shape::{MAX_DIMS, MAX_SIZE, ShapeFault, check_name, check_shape, pad};
use crate::{GgmlType, Magic};

/// Shortest record: name length, one byte of name, dimension count, one dimension, type, offset.
const MIN_RECORD_BYTES: usize = 33;

/// The record of a tensor, checked as far as it goes without the rest of the file.
struct Record<'a> {
    at: usize,
    name: &'a str,
    dims: [u64; MAX_DIMS],
    n_dims: usize,
    ty: GgmlType,
    /// From the start of the data section.
    offset: u64,
    /// At most [`MAX_SIZE`].
    n_bytes: u64,
}

impl<'a> Record<'a> {
    fn parse(cur: &mut Cursor<'a>, magic: Magic) -> Result<Self, GgufError> {
        let at = cur.at();
        let name = parse_name(cur)?;
        let tensor = || Name::new(name.as_bytes());
        let bad_shape = |fault| GgufError::BadShape { tensor: tensor(), at, fault };
        let n_dims = cur.u32().map_err(end("a dimension count"))?;
        let mut dims = [0; MAX_DIMS];
        let used = usize::try_from(n_dims).ok().and_then(|n| dims.get_mut(..n));
        let used = used.ok_or_else(|| bad_shape(ShapeFault::DimCount { n_dims: n_dims.into() }))?;
        for dim in used.iter_mut() {
            *dim = cur.u64().map_err(end("a dimension"))?;
        }
        let type_at = cur.at();
        let id = cur.u32().map_err(end("a tensor type"))?;
        let ty = GgmlType::from_id(id, magic).ok_or_else(|| GgufError::UnknownTensorType {
            tensor: tensor(),
            at: type_at,
            id,
            removed: GgmlType::removed_name(id),
        })?;
        let offset = cur.u64().map_err(end("a tensor offset"))?;
        let n_bytes = check_shape(used, ty).map_err(bad_shape)?;
        let n_dims = used.len();
        Ok(Self { at, name, dims, n_dims, ty, offset, n_bytes })
    }

    fn tensor(&self) -> Name {
        Name::new(self.name.as_bytes())
    }

    fn too_large(&self) -> GgufError {
        let dims = self.dims.get(..self.n_dims).unwrap_or_default().to_vec();
        let fault = ShapeFault::TooManyBytes { dims, ty: self.ty };
        GgufError::BadShape { tensor: self.tensor(), at: self.at, fault }
    }
}

fn parse_name<'a>(cur: &mut Cursor<'a>) -> Result<&'a str, GgufError> {
    let at = cur.at();
    let len = cur.u64().map_err(end("a tensor name length"))?;
    let seen = cur.rest();
    let n_bytes = usize::try_from(len).unwrap_or(usize::MAX);
    let bad = |rule| {
        let seen = seen.get(..n_bytes.min(seen.len())).unwrap_or_default();
        GgufError::BadTensorName { name: Name::new(seen), len, at, rule }
    };
    let name = cur.take(n_bytes).map_err(|_| bad("it exceeds the file"))?;
    check_name(name).map_err(bad)
}

/// Where the records of a file start, and a table to find them by name.
pub(crate) struct TensorIndex {
    starts: Vec<usize>,
    table: NameTable,
    /// Start of the data section.
    data_start: usize,
}

impl TensorIndex {
    /// Checks all records and where they place the data.
    pub(crate) fn parse(
        bytes: &[u8],
        cur: &mut Cursor<'_>,
        (count, count_at): (u64, usize),
        magic: Magic,
        alignment: u32,
    ) -> Result<Self, GgufError> {
        let limit = cur.remaining() / MIN_RECORD_BYTES;
        check_count("tensors", count, count_at, limit)?;
        // Grown record by record: a count alone reserves nothing.
        let mut starts = Vec::new();
        for _ in 0..count {
            starts.push(cur.at());
            Record::parse(cur, magic)?;
        }
        let name = |ix: usize| starts.get(ix).and_then(|&at| record_name(bytes, at)).unwrap_or_default();
        let table = NameTable::build(starts.len(), name).map_err(|duplicate| {
            let place = |ix: usize| starts.get(ix).copied().unwrap_or_default();
            GgufError::DuplicateTensor {
                tensor: Name::new(name(duplicate.first)),
                first_at: place(duplicate.first),
                at: place(duplicate.second),
            }
        })?;
        let data_start = check_layout(bytes, cur.at(), &starts, magic, alignment)?;
        Ok(Self { starts, table, data_start })
    }

    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }

    pub(crate) fn data_start(&self) -> usize {
        self.data_start
    }

    pub(crate) fn find(&self, bytes: &[u8], wanted: &str) -> Option<usize> {
        let name = |ix: usize| self.starts.get(ix).and_then(|&at| record_name(bytes, at)).unwrap_or_default();
        self.table.find(wanted.as_bytes(), name)
    }

    /// The tensor number `ix`.
    pub(crate) fn tensor<'a>(&self, file: &'a GgufFile, ix: usize) -> Option<Tensor<'a>> {
        let at = *self.starts.get(ix)?;
        let tensor = || {
            let record = Record::parse(&mut Cursor::new(file.bytes(), at), file.magic()).ok()?;
            let mut dims = [0; MAX_DIMS];
            for (to, from) in dims.iter_mut().zip(record.dims) {
                *to = usize::try_from(from).ok()?;
            }
            Some(Tensor {
                file,
                name: record.name,
                dims,
                n_dims: record.n_dims,
                ty: record.ty,
                offset: self.data_start.checked_add(usize::try_from(record.offset).ok()?)?,
                n_bytes: usize::try_from(record.n_bytes).ok()?,
            })
        };
        Some(tensor().expect("every tensor was checked when the file was opened"))
    }
}

fn record_name(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let mut cur = Cursor::new(bytes, at);
    let len = usize::try_from(cur.u64().ok()?).ok()?;
    cur.take(len).ok()
}

/// Checks that the tensors follow each other with nothing but padding between them, and lie in the file.
/// Returns where the data starts. The padding behind the last tensor may be absent: nothing is lost with it.
fn check_layout(
    bytes: &[u8],
    header_end: usize,
    starts: &[usize],
    magic: Magic,
    alignment: u32,
) -> Result<usize, GgufError> {
    let file_bytes = bytes.len() as u64;
    let unpadded = header_end as u64;
    let data_start = pad(unpadded, alignment).unwrap_or(MAX_SIZE);
    let data_bytes = file_bytes.saturating_sub(data_start);
    let mut expected = 0u64;
    let mut need = data_start;
    let mut first_cut = None;
    for &at in starts {
        let record = Record::parse(&mut Cursor::new(bytes, at), magic)?;
        check_offset(&record, expected, data_bytes, file_bytes, alignment)?;
        let end = record.offset.checked_add(record.n_bytes).filter(|&end| end <= MAX_SIZE);
        let end = end.ok_or_else(|| record.too_large())?;
        need = data_start.checked_add(end).filter(|&n| n <= MAX_SIZE).ok_or_else(|| record.too_large())?;
        if need > file_bytes && first_cut.is_none() {
            first_cut = Some(record.tensor());
        }
        expected = pad(end, alignment).ok_or_else(|| record.too_large())?;
    }
    match first_cut {
        Some(tensor) => Err(GgufError::Truncated { tensor, need, have: file_bytes }),
        // Without tensors the data section is empty and may start anywhere up to the padding.
        None => Ok(usize::try_from(data_start.min(file_bytes)).unwrap_or(bytes.len())),
    }
}

fn check_offset(
    record: &Record<'_>,
    expected: u64,
    data_bytes: u64,
    file_bytes: u64,
    alignment: u32,
) -> Result<(), GgufError> {
    let &Record { at, offset, n_bytes, .. } = record;
    if !offset.is_multiple_of(alignment.into()) {
        return Err(GgufError::TensorMisaligned { tensor: record.tensor(), at, offset, alignment });
    }
    if offset == expected {
        return Ok(());
    }
    // Compared by subtraction, so that no offset wraps back into the file.
    if offset > data_bytes || n_bytes > data_bytes.saturating_sub(offset) {
        let tensor = record.tensor();
        return Err(GgufError::TensorOutsideFile { tensor, at, offset, n_bytes, data_bytes, file_bytes });
    }
    if offset < expected {
        return Err(GgufError::TensorOverlap { tensor: record.tensor(), at, offset, expected });
    }
    Err(GgufError::TensorGap { tensor: record.tensor(), at, offset, expected })
}

/// A tensor of an open file.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    file: &'a GgufFile,
    name: &'a str,
    dims: [usize; MAX_DIMS],
    n_dims: usize,
    ty: GgmlType,
    offset: usize,
    n_bytes: usize,
}

impl<'a> Tensor<'a> {
    /// The name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The shape in ggml's order: the contiguous axis first.
    pub fn dims(&self) -> &[usize] {
        self.dims.get(..self.n_dims).unwrap_or_default()
    }

    /// Length of a row: the first dimension.
    pub fn n_cols(&self) -> usize {
        self.dims().first().copied().unwrap_or_default()
    }

    /// Number of rows: the product of the other dimensions.
    pub fn n_rows(&self) -> usize {
        // The product of all dimensions was checked.
        self.dims().iter().skip(1).fold(1, |product, &dim| product.saturating_mul(dim))
    }

    /// The type.
    pub fn ty(&self) -> GgmlType {
        self.ty
    }

    /// Where the data starts, from the start of the file.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes of data.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// The data, shared with the file.
    pub fn bytes(&self) -> WeightBytes {
        self.file.weight_bytes(self.offset..self.offset.saturating_add(self.n_bytes))
    }

    /// The data, borrowed from the file.
    pub fn as_slice(&self) -> &'a [u8] {
        self.file.bytes().get(self.offset..self.offset.saturating_add(self.n_bytes)).unwrap_or_default()
    }

    /// All values as f32, row by row.
    ///
    /// # Errors
    /// [`GgufError::NotDecodable`] if there is no decoder for the type.
    pub fn decode(&self) -> Result<Vec<f32>, GgufError> {
        let mut out = vec![0.0; self.n_cols().saturating_mul(self.n_rows())];
        self.decode_rows(|row, values| {
            let start = row.saturating_mul(values.len());
            if let Some(to) = out.get_mut(start..start.saturating_add(values.len())) {
                to.copy_from_slice(values);
            }
            Ok(())
        })?;
        Ok(out)
    }

    /// The values of an I32 tensor.
    ///
    /// # Errors
    /// [`GgufError::NotI32`] if it has another type.
    pub fn i32_values(&self) -> Result<Vec<i32>, GgufError> {
        if self.ty != GgmlType::I32 {
            return Err(GgufError::NotI32 { tensor: Name::new(self.name.as_bytes()), ty: self.ty });
        }
        Ok(self.as_slice().as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect())
    }

    /// Reads every value and looks for NaN and infinity. Types without a decoder are passed over.
    ///
    /// # Errors
    /// [`GgufError::NotFinite`] with the first place where one is found.
    pub fn check_finite(&self) -> Result<(), GgufError> {
        if self.ty.weight_type().is_none() {
            return Ok(());
        }
        self.decode_rows(|row, values| match values.iter().position(|value| !value.is_finite()) {
            Some(column) => {
                Err(GgufError::NotFinite { tensor: Name::new(self.name.as_bytes()), row, column })
            }
            None => Ok(()),
        })
    }

    fn decode_rows(
        &self,
        mut each: impl FnMut(usize, &[f32]) -> Result<(), GgufError>,
    ) -> Result<(), GgufError> {
        let name = || Name::new(self.name.as_bytes());
        let not_decodable = || GgufError::NotDecodable { tensor: name(), ty: self.ty };
        let ty = self.ty.weight_type().ok_or_else(not_decodable)?;
        let row_bytes = ty.row_bytes(self.n_cols()).ok_or_else(not_decodable)?;
        let mut values = vec![0.0; self.n_cols()];
        for (row, bytes) in self.as_slice().chunks_exact(row_bytes).enumerate() {
            block::decode_row(ty, bytes, &mut values);
            each(row, &values)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {} {:?} at {}", self.name, self.ty, self.dims(), self.offset)
    }
}
