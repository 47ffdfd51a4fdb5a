//! Keeps the values of a template shallow.
//!
//! The engine prints, compares and drops values by recursion. A loop that wraps a value in a list again and again, or a
//! namespace put into itself, would overflow any stack; an overflow ends the process. What survives one turn of a loop
//! is stored by `set`, so every `set` passes what it stores through a filter that looks at it.
//!
//! Between two `set`s a value can only grow by what one tag writes, once for each level of blocks and macros. Both are
//! bounded (by `MAX_TAG_TOKENS` and by the engine's limit of recursion), and [`STACK_BYTES`] has room for that.

use super::python::block_name;
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Name of the filter.
pub(super) const FILTER: &str = "powerinfer_check_nesting";

/// Deepest value that `set` stores. JSON from outside is at most 128 levels deep.
const MAX_DEPTH: usize = 256;

/// Levels of macros (four each), blocks and loops that a template may be in.
pub(super) const MAX_RECURSION: usize = 200;

/// Stack of a rendering; only what is used of it becomes memory.
pub(super) const STACK_BYTES: usize = 256 << 20;

/// The tag with the filter around what it stores; `None` if it is no `set` or stores plain text.
pub(super) fn checked(tag: &str) -> Option<String> {
    let name = block_name(tag)?;
    if !name.strip_prefix("set")?.starts_with(|c: char| !c.is_alphanumeric() && c != '_') {
        return None;
    }
    // The name is a part of the tag without its ends.
    let start = name.as_ptr() as usize - tag.as_ptr() as usize;
    let (head, tail) = (&tag[..start], &tag[start + name.len()..]);
    let (equals, pipe) = top_level(name)?;
    let is_dotted = |target: &str| target.contains('.');
    if let Some(at) = equals {
        let (target, value) = (&name[..at], &name[at + 1..]);
        let dotted = is_dotted(target);
        // The engine says what is wrong with a missing value.
        return (!value.trim().is_empty())
            .then(|| format!("{head}{target}=({value})|{FILTER}({dotted}){tail}"));
    }
    // The text of a block is no danger, but a filter may make anything of it.
    let dotted = is_dotted(&name[..pipe?]);
    Some(format!("{head}{name}|{FILTER}({dotted}){tail}"))
}

/// Where the first `=` and the first `|` stand outside strings and brackets. `None` if brackets do not pair: the engine
/// refuses such a tag, and nothing may be written into it.
fn top_level(text: &str) -> Option<(Option<usize>, Option<usize>)> {
    let (mut equals, mut pipe, mut quote, mut depth) = (None, None, None, 0_usize);
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match (quote, byte) {
            (Some(_), b'\\') => {
                bytes.next();
            }
            (Some(open), _) if byte == open => quote = None,
            (Some(_), _) => {}
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') => depth = depth.checked_sub(1)?,
            (None, b'=') if depth == 0 => equals = equals.or(Some(at)),
            (None, b'|') if depth == 0 => pipe = pipe.or(Some(at)),
            (None, _) => {}
        }
    }
    (depth == 0 && quote.is_none()).then_some((equals, pipe))
}

/// The value itself, unless it is nested too deeply or, in an attribute of a namespace, could hold that namespace.
///
/// Costs one unit of fuel for 4 values inside it.
pub(super) fn check(state: &State<'_, '_>, value: Value, in_namespace: bool) -> Result<Value, Error> {
    let refused = |detail: String| Err(Error::new(ErrorKind::InvalidOperation, detail));
    let mut pending = vec![(value.clone(), 0)];
    let mut n_seen = 0_u64;
    while let Some((value, depth)) = pending.pop() {
        match kind_of(&value) {
            Kind::Plain => continue,
            Kind::Namespace if in_namespace || depth > 0 => {
                return refused("a namespace cannot be stored inside another value".to_owned());
            }
            Kind::Engine if in_namespace => {
                return refused(format!("a {} cannot be stored in a namespace", value.kind()));
            }
            Kind::Engine => continue,
            Kind::Namespace | Kind::Container => {}
        }
        if depth == MAX_DEPTH {
            return refused(format!("a value is nested more than {MAX_DEPTH} levels deep"));
        }
        let Ok(items) = value.try_iter() else { continue };
        let is_map = value.kind() == ValueKind::Map;
        for item in items {
            n_seen += 1;
            if n_seen.is_multiple_of(4) {
                state.consume_fuel(1)?;
            }
            let inner = if is_map { value.get_item(&item)? } else { item.clone() };
            let keep = |value: Value, pending: &mut Vec<_>| {
                if !matches!(kind_of(&value), Kind::Plain) {
                    pending.push((value, depth + 1));
                }
            };
            keep(inner, &mut pending);
            if is_map {
                keep(item, &mut pending);
            }
        }
    }
    Ok(value)
}

enum Kind {
    /// Holds no other value.
    Plain,
    Container,
    Namespace,
    /// Something of the engine's own that may hold values out of sight: a loop, macro or module.
    Engine,
}

fn kind_of(value: &Value) -> Kind {
    let Some(object) = value.as_object() else { return Kind::Plain };
    let ty = object.type_name();
    if ty.ends_with("::Namespace") {
        return Kind::Namespace;
    }
    match value.kind() {
        _ if ty.contains("::vm::") => Kind::Engine,
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => Kind::Container,
        _ => Kind::Engine,
    }
}
