//! What templates expect from the Python library that they were written for.

use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io::{self, Write};

/// Marks an error as the template's own.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// Adds functions, filters and methods.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.add_function("raise_exception", |message: &str| -> Result<Value, Error> {
        let error = Error::new(ErrorKind::InvalidOperation, "the template raised an exception");
        Err(error.with_source(Raised(message.to_owned())))
    });
    env.add_filter("tojson", to_json);
    env.set_unknown_method_callback(method);
}

fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(found) = string_method(text, name, args)
    {
        return found;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// Methods of strings that the compatibility layer lacks.
fn string_method(text: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let first = args.first().and_then(Value::as_str);
    let three = |a: &str, b: &str, c: &str| Value::from_iter([a, b, c].map(Value::from));
    Some(Ok(match (name, first) {
        ("removeprefix", Some(prefix)) => Value::from(text.strip_prefix(prefix).unwrap_or(text)),
        ("removesuffix", Some(suffix)) => Value::from(text.strip_suffix(suffix).unwrap_or(text)),
        ("partition", Some(sep)) if !sep.is_empty() => match text.split_once(sep) {
            Some((before, after)) => three(before, sep, after),
            None => three(text, "", ""),
        },
        ("rpartition", Some(sep)) if !sep.is_empty() => match text.rsplit_once(sep) {
            Some((before, after)) => three(before, sep, after),
            None => three("", "", text),
        },
        ("rsplit", Some(sep)) if !sep.is_empty() => {
            let limit = args.get(1).and_then(|n| usize::try_from(n.clone()).ok());
            let mut pieces: Vec<&str> = match limit {
                Some(n) => text.rsplitn(n.saturating_add(1), sep).collect(),
                None => text.rsplit(sep).collect(),
            };
            pieces.reverse();
            Value::from_iter(pieces.into_iter().map(Value::from))
        }
        _ => return None,
    }))
}

/// JSON as `json.dumps(value, ensure_ascii=False)` writes it, without escapes for HTML.
fn to_json(
    state: &State<'_, '_>,
    value: &Value,
    indent: Option<Value>,
    rest: Rest<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = indent.filter(|indent| !indent.is_none()).map(usize::try_from).transpose()?;
    // Templates pass `ensure_ascii=False` and the like, which is what they get.
    for name in ["ensure_ascii", "separators", "sort_keys"] {
        options.get::<Option<Value>>(name)?;
    }
    options.assert_all_used()?;
    if !rest.is_empty() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut out = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = b" ".repeat(width.min(16));
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&spaces)))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
    };
    written.map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "cannot write as JSON").with_source(error)
    })?;
    state.consume_fuel(out.len() as u64 / 64)?;
    Ok(String::from_utf8(out).expect("JSON is written as UTF-8"))
}

/// One line, with a space after each comma and colon.
#[derive(Debug)]
struct Spaced;

impl Spaced {
    fn separate<W: ?Sized + Write>(writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
}

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Replaces `{% generation %}` and `{% endgeneration %}` by blocks that do nothing.
///
/// They tell a training library which text is the model's own. Lines keep their numbers.
pub(super) fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let len = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'%') => tag_len(tag, "%}"),
            Some(b'{') => tag_len(tag, "}}"),
            _ => 1,
        };
        let (tag, after) = tag.split_at(len);
        out.push_str(&without_generation(tag));
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Length of a tag up to and with its end, which does not count inside a quoted string.
fn tag_len(tag: &str, end: &str) -> usize {
    let bytes = tag.as_bytes();
    let mut quote = None;
    let mut at = 2;
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(open), byte) if byte == open => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(end.as_bytes()) => return at + end.len(),
            _ => {}
        }
        at += 1;
    }
    tag.len()
}

fn without_generation(tag: &str) -> std::borrow::Cow<'_, str> {
    let name = tag.strip_prefix("{%").and_then(|inner| inner.strip_suffix("%}"));
    match name.map(|inner| inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+')) {
        Some("generation") => tag.replacen("generation", "if true", 1).into(),
        Some("endgeneration") => tag.replacen("endgeneration", "endif", 1).into(),
        _ => tag.into(),
    }
}
