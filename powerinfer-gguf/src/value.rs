//! Metadata values: as they lie in a file, and owned.

use std::fmt;

use crate::cursor::Cursor;

/// The type of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it; strings are a length and bytes, usually UTF-8")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    /// Every type, in the order of ids.
    pub const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// The type with this id.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// The id in files.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Bytes of a value, and for strings and arrays of the shortest one.
    pub(crate) fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        })
    }
}

/// A value that lies in a file.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum ValueRef<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Bytes, since token texts need not be UTF-8.
    String(&'a [u8]),
    Array(ArrayRef<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> ValueRef<'a> {
    /// The type.
    pub fn ty(self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// The value as a whole number, whatever its width; `None` for other types.
    pub fn as_integer(self) -> Option<i128> {
        Some(match self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// A copy that owns its bytes.
    pub fn to_value(self) -> Value {
        match self {
            Self::U8(v) => Value::U8(v),
            Self::I8(v) => Value::I8(v),
            Self::U16(v) => Value::U16(v),
            Self::I16(v) => Value::I16(v),
            Self::U32(v) => Value::U32(v),
            Self::I32(v) => Value::I32(v),
            Self::F32(v) => Value::F32(v),
            Self::Bool(v) => Value::Bool(v),
            Self::String(v) => Value::String(v.to_vec()),
            Self::Array(v) => Value::Array(v.element_type(), v.iter().map(ValueRef::to_value).collect()),
            Self::U64(v) => Value::U64(v),
            Self::I64(v) => Value::I64(v),
            Self::F64(v) => Value::F64(v),
        }
    }

    /// Type, and for numbers and bools the value, for messages.
    pub(crate) fn describe(self) -> String {
        match self {
            Self::F32(v) => format!("f32 {v}"),
            Self::F64(v) => format!("f64 {v}"),
            Self::Bool(v) => format!("bool {v}"),
            Self::Array(v) => format!("array of {} {}", v.len(), v.element_type()),
            Self::String(v) if std::str::from_utf8(v).is_err() => "string that is not UTF-8".to_owned(),
            other => match other.as_integer() {
                Some(v) => format!("{} {v}", other.ty()),
                None => other.ty().to_string(),
            },
        }
    }

    /// Reads a value whose lengths have been checked; steps over it. `None` if it is not complete.
    pub(crate) fn read(ty: ValueType, cur: &mut Cursor<'a>) -> Option<Self> {
        Some(match ty {
            ValueType::U8 => Self::U8(cur.u8().ok()?),
            ValueType::I8 => Self::I8(cur.u8().ok()?.cast_signed()),
            ValueType::U16 => Self::U16(cur.u16().ok()?),
            ValueType::I16 => Self::I16(cur.u16().ok()?.cast_signed()),
            ValueType::U32 => Self::U32(cur.u32().ok()?),
            ValueType::I32 => Self::I32(cur.u32().ok()?.cast_signed()),
            ValueType::F32 => Self::F32(f32::from_bits(cur.u32().ok()?)),
            ValueType::Bool => Self::Bool(cur.u8().ok()? != 0),
            ValueType::String => {
                let len = usize::try_from(cur.u64().ok()?).ok()?;
                Self::String(cur.take(len).ok()?)
            }
            ValueType::Array => {
                let array = ArrayRef::head(cur)?;
                array.step_over(cur)?;
                Self::Array(array)
            }
            ValueType::U64 => Self::U64(cur.u64().ok()?),
            ValueType::I64 => Self::I64(cur.u64().ok()?.cast_signed()),
            ValueType::F64 => Self::F64(f64::from_bits(cur.u64().ok()?)),
        })
    }

    /// As [`ValueRef::read`], but leaves the elements of an array unvisited, and the position where it is.
    pub(crate) fn peek(ty: ValueType, mut cur: Cursor<'a>) -> Option<Self> {
        match ty {
            ValueType::Array => ArrayRef::head(&mut cur).map(Self::Array),
            _ => Self::read(ty, &mut cur),
        }
    }
}

/// An array that lies in a file.
#[derive(Clone, Copy)]
pub struct ArrayRef<'a> {
    element: ValueType,
    len: usize,
    /// From the first element to the end of the file: where a list of strings ends is known after a walk.
    bytes: &'a [u8],
}

impl<'a> ArrayRef<'a> {
    fn head(cur: &mut Cursor<'a>) -> Option<Self> {
        let element = ValueType::from_id(cur.u32().ok()?)?;
        let len = usize::try_from(cur.u64().ok()?).ok()?;
        Some(Self { element, len, bytes: cur.rest() })
    }

    fn step_over(self, cur: &mut Cursor<'a>) -> Option<()> {
        match self.element {
            ValueType::String | ValueType::Array => {
                for _ in 0..self.len {
                    ValueRef::read(self.element, cur)?;
                }
            }
            fixed => {
                cur.take(self.len.checked_mul(fixed.min_bytes())?).ok()?;
            }
        }
        Some(())
    }

    /// The type of all elements.
    pub fn element_type(self) -> ValueType {
        self.element
    }

    /// Number of elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The elements in order.
    pub fn iter(self) -> ArrayIter<'a> {
        ArrayIter { element: self.element, left: self.len, cur: Cursor::new(self.bytes, 0) }
    }
}

impl fmt::Debug for ArrayRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "array of {} {}", self.len, self.element)
    }
}

impl PartialEq for ArrayRef<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.element == other.element && self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<'a> IntoIterator for ArrayRef<'a> {
    type Item = ValueRef<'a>;
    type IntoIter = ArrayIter<'a>;

    fn into_iter(self) -> ArrayIter<'a> {
        self.iter()
    }
}

/// Iterator over the elements of an [`ArrayRef`].
#[derive(Clone)]
pub struct ArrayIter<'a> {
    element: ValueType,
    left: usize,
    cur: Cursor<'a>,
}

impl<'a> Iterator for ArrayIter<'a> {
    type Item = ValueRef<'a>;

    fn next(&mut self) -> Option<ValueRef<'a>> {
        self.left = self.left.checked_sub(1)?;
        ValueRef::read(self.element, &mut self.cur)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for ArrayIter<'_> {}

impl fmt::Debug for ArrayIter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "iterator over {} {}", self.left, self.element)
    }
}

/// A value that owns its bytes, for writing.
///
/// Most are made with `From`: `Value::from(3u32)`, `Value::from("text")`, `Value::from(vec![0.5f32])`.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Bytes, since token texts need not be UTF-8.
    String(Vec<u8>),
    /// Element type and elements, all of that type.
    Array(ValueType, Vec<Self>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// The type.
    pub fn ty(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(..) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }
}

macro_rules! value_from {
    ($($rust:ty => $variant:ident),* $(,)?) => {
        $(
            impl From<$rust> for Value {
                fn from(value: $rust) -> Self {
                    Self::$variant(value.into())
                }
            }

            impl From<Vec<$rust>> for Value {
                fn from(values: Vec<$rust>) -> Self {
                    Self::Array(ValueType::$variant, values.into_iter().map(Self::from).collect())
                }
            }
        )*
    };
}

value_from! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, bool => Bool,
    u64 => U64, i64 => I64, f64 => F64, &str => String, String => String,
}

/// A Rust type that a metadata value can be asked for; see [`Metadata::require`](crate::Metadata::require).
///
/// Whole numbers convert between widths as long as the value fits, `f64` rounds to `f32`, and nothing else
/// converts. `&str` wants UTF-8, `&[u8]` takes any string.
pub trait FromValue<'a>: Sized {
    /// Name of the wanted type, for messages.
    fn wanted() -> String;

    /// The value as this type, `None` if it is another one or out of range.
    fn from_value(value: ValueRef<'a>) -> Option<Self>;
}

macro_rules! from_value_integer {
    ($($rust:ident),*) => {
        $(
            impl<'a> FromValue<'a> for $rust {
                fn wanted() -> String {
                    stringify!($rust).to_owned()
                }

                fn from_value(value: ValueRef<'a>) -> Option<Self> {
                    value.as_integer()?.try_into().ok()
                }
            }
        )*
    };
}

from_value_integer!(u8, i8, u16, i16, u32, i32, u64, i64, usize);

macro_rules! from_value {
    ($($rust:ty, $wanted:literal, $pattern:pat => $result:expr;)*) => {
        $(
            impl<'a> FromValue<'a> for $rust {
                fn wanted() -> String {
                    $wanted.to_owned()
                }

                fn from_value(value: ValueRef<'a>) -> Option<Self> {
                    match value {
                        $pattern => $result,
                        _ => None,
                    }
                }
            }
        )*
    };
}

from_value! {
    bool, "bool", ValueRef::Bool(v) => Some(v);
    &'a [u8], "string", ValueRef::String(v) => Some(v);
    &'a str, "UTF-8 string", ValueRef::String(v) => std::str::from_utf8(v).ok();
    String, "UTF-8 string", ValueRef::String(v) => std::str::from_utf8(v).ok().map(str::to_owned);
    ArrayRef<'a>, "array", ValueRef::Array(v) => Some(v);
}

impl<'a> FromValue<'a> for f64 {
    fn wanted() -> String {
        "f64".to_owned()
    }

    fn from_value(value: ValueRef<'a>) -> Option<Self> {
        match value {
            ValueRef::F32(v) => Some(v.into()),
            ValueRef::F64(v) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for f32 {
    fn wanted() -> String {
        "f32".to_owned()
    }

    fn from_value(value: ValueRef<'a>) -> Option<Self> {
        match value {
            ValueRef::F32(v) => Some(v),
            #[expect(clippy::cast_possible_truncation, reason = "rounding is what is documented")]
            ValueRef::F64(v) => Some(v as Self),
            _ => None,
        }
    }
}

impl<'a, T: FromValue<'a>> FromValue<'a> for Vec<T> {
    fn wanted() -> String {
        format!("array of {}", T::wanted())
    }

    fn from_value(value: ValueRef<'a>) -> Option<Self> {
        match value {
            ValueRef::Array(array) => array.iter().map(T::from_value).collect(),
            _ => None,
        }
    }
}
