//! The keys and values of a file.

use std::fmt;

use crate::cursor::{Cursor, End};
use crate::error::{GgufError, Name};
use crate::names::NameTable;
use crate::value::{FromValue, ValueRef, ValueType};

/// Deepest nesting of arrays. No published file nests at all.
pub(crate) const MAX_ARRAY_DEPTH: usize = 4;
/// Longest key, from the format's description.
pub(crate) const MAX_KEY_BYTES: usize = 65_535;
/// Shortest entry: length, one byte of key, type, one byte of value.
const MIN_ENTRY_BYTES: usize = 14;

/// Where the entries of a file start, and a table to find them by key.
pub(crate) struct KeyIndex {
    starts: Vec<usize>,
    table: NameTable,
}

impl KeyIndex {
    /// Checks all entries and steps over them. `count_at` is where the file says how many there are.
    pub(crate) fn parse(
        bytes: &[u8],
        cur: &mut Cursor<'_>,
        count: u64,
        count_at: usize,
    ) -> Result<Self, GgufError> {
        let limit = cur.remaining() / MIN_ENTRY_BYTES;
        check_count("keys", count, count_at, limit)?;
        // Grown entry by entry: a count alone reserves nothing.
        let mut starts = Vec::new();
        for _ in 0..count {
            starts.push(cur.at());
            check_entry(cur)?;
        }
        let name = |entry: usize| entry_key(bytes, &starts, entry);
        let table = NameTable::build(starts.len(), name).map_err(|duplicate| {
            let place = |entry: usize| starts.get(entry).copied().unwrap_or_default();
            GgufError::DuplicateKey {
                key: Name::new(name(duplicate.first)),
                first_at: place(duplicate.first),
                at: place(duplicate.second),
            }
        })?;
        Ok(Self { starts, table })
    }
}

/// `limit` is the most the file could hold. Entries are numbered with 32 bits, so 2^31 are enough of them.
pub(crate) fn check_count(what: &'static str, count: u64, at: usize, limit: usize) -> Result<(), GgufError> {
    let limit = limit.min(u32::MAX as usize >> 1);
    match usize::try_from(count) {
        Ok(count) if count <= limit => Ok(()),
        _ => Err(GgufError::CountExceedsFile { what, at, count, limit }),
    }
}

fn entry_key<'a>(bytes: &'a [u8], starts: &[usize], entry: usize) -> &'a [u8] {
    let read = || {
        let mut cur = Cursor::new(bytes, *starts.get(entry)?);
        let len = usize::try_from(cur.u64().ok()?).ok()?;
        cur.take(len).ok()
    };
    read().unwrap_or_default()
}

pub(crate) fn end(what: &'static str) -> impl Fn(End) -> GgufError {
    move |end| GgufError::UnexpectedEnd { what, at: end.at, need: end.need, have: end.have }
}

fn check_entry(cur: &mut Cursor<'_>) -> Result<(), GgufError> {
    let at = cur.at();
    let len = cur.u64().map_err(end("a key length"))?;
    let limit = MAX_KEY_BYTES.min(cur.remaining());
    let n_bytes = usize::try_from(len).unwrap_or(usize::MAX);
    if n_bytes == 0 || n_bytes > limit {
        return Err(GgufError::BadKeyLength { at, len, limit });
    }
    let key_at = cur.at();
    let key = cur.take(n_bytes).map_err(end("a key"))?;
    if std::str::from_utf8(key).is_err() {
        return Err(GgufError::KeyNotUtf8 { key: Name::new(key), at: key_at });
    }
    let at = cur.at();
    let id = cur.u32().map_err(end("a value type"))?;
    let ty =
        ValueType::from_id(id).ok_or_else(|| GgufError::UnknownValueType { key: Name::new(key), at, id })?;
    check_value(cur, ty, key, 1)
}

fn check_value(cur: &mut Cursor<'_>, ty: ValueType, key: &[u8], depth: usize) -> Result<(), GgufError> {
    match ty {
        ValueType::Bool => {
            let at = cur.at();
            let value = cur.u8().map_err(end("a bool"))?;
            check_bools(&[value], at, key)
        }
        ValueType::String => check_string(cur, key),
        ValueType::Array => check_array(cur, key, depth),
        _ => cur.take(ty.min_bytes()).map(drop).map_err(end("a number")),
    }
}

fn check_bools(values: &[u8], at: usize, key: &[u8]) -> Result<(), GgufError> {
    match values.iter().enumerate().find(|&(_, &value)| value > 1) {
        Some((ix, &value)) => {
            Err(GgufError::BadBool { key: Name::new(key), at: at.saturating_add(ix), value })
        }
        None => Ok(()),
    }
}

fn check_string(cur: &mut Cursor<'_>, key: &[u8]) -> Result<(), GgufError> {
    let at = cur.at();
    let len = cur.u64().map_err(end("a string length"))?;
    let exceeds = |have| GgufError::StringExceedsFile { key: Name::new(key), at, len, have };
    let n_bytes = usize::try_from(len).map_err(|_| exceeds(cur.remaining()))?;
    cur.take(n_bytes).map(drop).map_err(|end| exceeds(end.have))
}

fn check_array(cur: &mut Cursor<'_>, key: &[u8], depth: usize) -> Result<(), GgufError> {
    let at = cur.at();
    if depth > MAX_ARRAY_DEPTH {
        return Err(GgufError::ArrayTooDeep { key: Name::new(key), at, limit: MAX_ARRAY_DEPTH });
    }
    let id = cur.u32().map_err(end("an array element type"))?;
    let element = ValueType::from_id(id).ok_or_else(|| GgufError::UnknownElementType {
        key: Name::new(key),
        at,
        id,
    })?;
    let at = cur.at();
    let len = cur.u64().map_err(end("an array length"))?;
    let limit = cur.remaining().checked_div(element.min_bytes()).unwrap_or_default();
    let n = usize::try_from(len).unwrap_or(usize::MAX);
    if n > limit {
        return Err(GgufError::ArrayExceedsFile { key: Name::new(key), at, len, element, limit });
    }
    match element {
        ValueType::String => (0..n).try_for_each(|_| check_string(cur, key)),
        ValueType::Array => (0..n).try_for_each(|_| check_array(cur, key, depth.saturating_add(1))),
        fixed => {
            let at = cur.at();
            let values = cur.take(n.saturating_mul(fixed.min_bytes())).map_err(end("an array"))?;
            if fixed == ValueType::Bool { check_bools(values, at, key) } else { Ok(()) }
        }
    }
}

/// The keys and values of a file, in file order, read where they lie.
#[derive(Clone, Copy)]
pub struct Metadata<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) index: &'a KeyIndex,
}

impl<'a> Metadata<'a> {
    /// Number of keys.
    pub fn len(self) -> usize {
        self.index.starts.len()
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.index.starts.is_empty()
    }

    /// The value of `key`.
    pub fn get(self, key: &str) -> Option<ValueRef<'a>> {
        Some(self.entry(self.position(key)?).1)
    }

    /// Where the entry of `key` starts in the file.
    pub fn offset(self, key: &str) -> Option<usize> {
        self.index.starts.get(self.position(key)?).copied()
    }

    /// Keys and values in file order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = (&'a str, ValueRef<'a>)> {
        (0..self.len()).map(move |entry| self.entry(entry))
    }

    /// The value of a key that may be absent, as `T`.
    ///
    /// # Errors
    /// [`GgufError::WrongKeyType`] if the key is there and its value is no `T`.
    pub fn find<T: FromValue<'a>>(self, key: &str) -> Result<Option<T>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => {
                T::from_value(value).map(Some).ok_or_else(|| self.wrong_type(key, value, T::wanted()))
            }
        }
    }

    /// The value of a key that must be there, as `T`: `u32`, `f32`, `bool`, `&str`, `Vec<&str>`,
    /// `Vec<&[u8]>`, `Vec<f32>`, `Vec<i32>`, … (see [`FromValue`]).
    ///
    /// # Errors
    /// [`GgufError::MissingKey`] if it is absent, [`GgufError::WrongKeyType`] if its value is no `T`.
    pub fn require<T: FromValue<'a>>(self, key: &str) -> Result<T, GgufError> {
        self.find(key)?
            .ok_or_else(|| GgufError::MissingKey { key: Name::new(key.as_bytes()), wanted: T::wanted() })
    }

    /// The value of a key that holds one number for all layers, or an array with one for each. One number
    /// gives a list of one.
    ///
    /// # Errors
    /// [`GgufError::WrongKeyType`] if the key is there and holds something else.
    pub fn u32_or_array(self, key: &str) -> Result<Option<Vec<u32>>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers = match value {
            ValueRef::Array(_) => Vec::from_value(value),
            scalar => u32::from_value(scalar).map(|number| vec![number]),
        };
        numbers.map(Some).ok_or_else(|| self.wrong_type(key, value, "u32 or array of u32".to_owned()))
    }

    fn wrong_type(self, key: &str, value: ValueRef<'a>, wanted: String) -> GgufError {
        GgufError::WrongKeyType {
            key: Name::new(key.as_bytes()),
            at: self.offset(key).unwrap_or_default(),
            wanted,
            found: value.describe(),
        }
    }

    fn position(self, key: &str) -> Option<usize> {
        let name = |entry: usize| entry_key(self.bytes, &self.index.starts, entry);
        self.index.table.find(key.as_bytes(), name)
    }

    fn entry(self, entry: usize) -> (&'a str, ValueRef<'a>) {
        let read = || {
            let mut cur = Cursor::new(self.bytes, *self.index.starts.get(entry)?);
            let len = usize::try_from(cur.u64().ok()?).ok()?;
            let key = std::str::from_utf8(cur.take(len).ok()?).ok()?;
            let ty = ValueType::from_id(cur.u32().ok()?)?;
            Some((key, ValueRef::peek(ty, cur)?))
        };
        read().expect("every entry was checked when the file was opened")
    }
}

impl fmt::Debug for Metadata<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}
