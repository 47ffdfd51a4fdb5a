//! What templates expect from the Python library that they were written for.

use super::nesting;
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
    env.add_filter(nesting::FILTER, nesting::check);
    env.set_unknown_method_callback(method);
}

fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        if let Some(found) = string_method(text, name, args) {
            return found;
        }
        if name == "format" {
            state.consume_fuel(format_width(text)? / 64)?;
        }
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

/// Largest width or precision in a format: far more than a prompt needs.
const MAX_FORMAT_WIDTH: u64 = 4096;

/// The sum of all widths and precisions that `str.format` is asked for, each within the limit.
///
/// A number counts if it stands behind the colon of a field, which is where the engine looks for both.
fn format_width(format: &str) -> Result<u64, Error> {
    let (mut in_field, mut in_spec, mut total) = (false, false, 0);
    let mut rest = format;
    while let Some(c) = rest.chars().next() {
        let tail = &rest[c.len_utf8()..];
        match c {
            '{' if !in_spec => in_field = !in_field,
            ':' if in_field && !in_spec => {
                in_spec = true;
                // Whatever stands before a sign of alignment is what to fill with, a brace or digit too.
                let mut chars = tail.chars();
                chars.next();
                if chars.as_str().starts_with(['<', '>', '^']) {
                    rest = &chars.as_str()[1..];
                    continue;
                }
            }
            '}' => (in_field, in_spec) = (false, false),
            '0'..='9' if in_spec => {
                let len = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
                let (digits, after) = rest.split_at(len);
                let width = digits.parse().unwrap_or(u64::MAX);
                if width > MAX_FORMAT_WIDTH {
                    let detail =
                        format!("width or precision {width} in a format, at most {MAX_FORMAT_WIDTH}");
                    return Err(Error::new(ErrorKind::InvalidOperation, detail));
                }
                total += width;
                rest = after;
                continue;
            }
            _ => {}
        }
        rest = tail;
    }
    Ok(total)
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

/// Most tokens in one tag. The engine's parser goes as deep as a tag is long, and 4000 levels took less than the 2 MiB
/// of stack that a thread has at least.
const MAX_TAG_TOKENS: usize = 1000;

/// Most `elif` tags in a template, each of which is a level deeper than the one before; 1000 took less than 2 MiB.
const MAX_ELIF_TAGS: usize = 256;

/// What a template has too much of.
#[derive(Debug)]
pub(super) struct TooComplex {
    pub(super) line: usize,
    pub(super) what: &'static str,
    pub(super) limit: usize,
}

/// Replaces `{% generation %}` and `{% endgeneration %}` by blocks that do nothing, lets [`nesting::check`] look at what
/// `set` stores, and refuses what would overflow the parser's stack.
///
/// The blocks tell a training library which text is the model's own. Lines keep their numbers.
pub(super) fn prepare(source: &str) -> Result<String, TooComplex> {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut n_elif = 0;
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let (len, n_tokens) = match tag.as_bytes().get(1) {
            Some(b'#') => (tag.find("#}").map_or(tag.len(), |end| end + 2), 0),
            Some(b'%') => measure(tag, "%}"),
            Some(b'{') => measure(tag, "}}"),
            _ => (1, 0),
        };
        let too_complex =
            |what, limit| TooComplex { line: out.bytes().filter(|&b| b == b'\n').count() + 1, what, limit };
        if n_tokens > MAX_TAG_TOKENS {
            return Err(too_complex("tokens in one tag", MAX_TAG_TOKENS));
        }
        let (tag, after) = tag.split_at(len);
        rest = after;
        let name = block_name(tag);
        n_elif += usize::from(name.is_some_and(|name| name.starts_with("elif")));
        if n_elif > MAX_ELIF_TAGS {
            return Err(too_complex("`elif` tags", MAX_ELIF_TAGS));
        }
        match nesting::checked(tag) {
            Some(checked) => out.push_str(&checked),
            None => out.push_str(&without_generation(tag)),
        }
        if name == Some("raw") {
            let len = raw_len(rest);
            out.push_str(&rest[..len]);
            rest = &rest[len..];
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// Length of a tag up to and with its end, which does not count inside strings and brackets, and its tokens.
fn measure(tag: &str, end: &str) -> (usize, usize) {
    let bytes = tag.as_bytes();
    let (mut quote, mut depth, mut n_tokens, mut in_word) = (None, 0_isize, 0, false);
    let mut at = 2;
    while at < bytes.len() {
        let byte = bytes[at];
        let is_word = byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii();
        match quote {
            Some(_) if byte == b'\\' => at += 1,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if depth == 0 && bytes[at..].starts_with(end.as_bytes()) => {
                return (at + end.len(), n_tokens);
            }
            None => {
                if matches!(byte, b'"' | b'\'') {
                    quote = Some(byte);
                }
                depth += isize::from(matches!(byte, b'(' | b'[' | b'{'));
                depth -= isize::from(matches!(byte, b')' | b']' | b'}'));
                let begins_token = if is_word { !in_word } else { !byte.is_ascii_whitespace() };
                n_tokens += usize::from(begins_token);
            }
        }
        in_word = is_word && quote.is_none();
        at += 1;
    }
    (tag.len(), n_tokens)
}

/// Length of the text of a raw block, in which tags mean nothing.
fn raw_len(text: &str) -> usize {
    let sign = |text: &str| text.strip_prefix(['-', '+']).unwrap_or(text).len();
    let ends = |at: usize| {
        let inner = &text[at + 2..];
        let name = inner[inner.len() - sign(inner)..].trim_start();
        name.strip_prefix("endraw")
            .map(str::trim_start)
            .is_some_and(|end| end[end.len() - sign(end)..].starts_with("%}"))
    };
    text.match_indices("{%").map(|(at, _)| at).find(|&at| ends(at)).unwrap_or(text.len())
}

/// What stands in a block tag, without marks for white space.
pub(super) fn block_name(tag: &str) -> Option<&str> {
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    Some(inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+'))
}

fn without_generation(tag: &str) -> std::borrow::Cow<'_, str> {
    match block_name(tag) {
        Some("generation") => tag.replacen("generation", "if true", 1).into(),
        Some("endgeneration") => tag.replacen("endgeneration", "endif", 1).into(),
        _ => tag.into(),
    }
}
