//! Telling what a participant wrote from what the template wrote.
//!
//! Content is rendered between two marks, characters that occur nowhere else. If the prompt without the marks is the
//! prompt rendered without marking, the marks show exactly where content went, also where the template trims it or
//! writes it as JSON. If not, the template looks *into* the content; then each message is tried by itself, and what
//! still fails is searched for.

use super::{ChatError, ChatInput, ChatTemplate, Message};
use crate::tokenizer::Part;
use serde_json::{Map, Value};
use std::ops::Range;
use std::time::SystemTime;

/// A prompt that remembers who wrote what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The prompt in order, without empty stretches.
    pub parts: Vec<Part>,
    /// Whether all content was found. If not, some of it may stand in [`Part::Template`] stretches, where control
    /// tokens are recognized: a careful caller then refuses content that contains any.
    pub exact: bool,
}

impl Prompt {
    /// The whole prompt.
    pub fn text(&self) -> String {
        self.parts.iter().map(Part::text).collect()
    }
}

/// Messages tried one by one at most; each costs one more rendering.
const MAX_TRIED_ALONE: usize = 64;

/// Places in one string at which a head or tail is cut when it is searched for.
const MAX_SEARCHED_PIECES: usize = 64;

/// What control tokens begin with.
const BRACKETS: [char; 2] = ['<', '['];

/// Longest tag that is kept whole.
const MAX_TAG_CHARS: usize = 64;

/// What models write around their own thinking. Templates look for these, so in an assistant's message they are not
/// marked.
const THINKING: [&str; 2] = ["<think>", "</think>"];

impl ChatTemplate {
    /// The prompt for a conversation, in parts for `Tokenizer::encode_parts`.
    ///
    /// Content is every string in the messages except ordinary roles, types, ids and keys; variables in
    /// [`ChatInput::extra`] are the caller's own and count as the template's. `<think>` and `</think>` in an
    /// assistant's message count as the template's too.
    ///
    /// # Errors
    ///
    /// As [`ChatTemplate::render`].
    pub fn render_parts(&self, input: &ChatInput<'_>) -> Result<Prompt, ChatError> {
        // Every rendering must tell the same time.
        let now = Some(input.now.unwrap_or_else(SystemTime::now));
        let input = ChatInput { now, ..input.clone() };
        let plain = self.render(&input)?;
        let Some(marks) = Marks::unused_in(&plain, input.messages) else {
            return Ok(Prompt { parts: vec![Part::Content(plain)], exact: false });
        };
        if let Some(ranges) = self.content_ranges(&input, &plain, marks, |_| true) {
            return Ok(Prompt { parts: cut(&plain, &ranges), exact: true });
        }
        let (ranges, exact) = self.ranges_one_by_one(&input, &plain, marks);
        Ok(Prompt { parts: cut(&plain, &ranges), exact })
    }

    /// Where the content of the chosen messages stands in the prompt, if marking does not change it.
    fn content_ranges(
        &self,
        input: &ChatInput<'_>,
        plain: &str,
        marks: Marks,
        chosen: impl Fn(usize) -> bool,
    ) -> Option<Vec<Range<usize>>> {
        let mark = |(ix, message): (usize, &Message)| {
            if chosen(ix) { marks.mark_message(message) } else { message.clone() }
        };
        let messages: Vec<Message> = input.messages.iter().enumerate().map(mark).collect();
        let marked = self.render(&ChatInput { messages: &messages, ..input.clone() }).ok()?;
        marks.ranges(&marked, plain)
    }

    fn ranges_one_by_one(
        &self,
        input: &ChatInput<'_>,
        plain: &str,
        marks: Marks,
    ) -> (Vec<Range<usize>>, bool) {
        let alone = |ix: usize| {
            let tried = ix < MAX_TRIED_ALONE;
            tried.then(|| self.content_ranges(input, plain, marks, |other| other == ix)).flatten()
        };
        let found: Vec<Option<Vec<Range<usize>>>> = (0..input.messages.len()).map(alone).collect();
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut searched_from = 0;
        for (ix, (message, in_message)) in input.messages.iter().zip(&found).enumerate() {
            match in_message {
                Some(in_message) => ranges.extend_from_slice(in_message),
                None => {
                    let later = found[ix + 1..].iter().flatten().flatten();
                    let until = later.map(|range| range.start).min().unwrap_or(plain.len());
                    ranges.extend(search(plain, searched_from..until.max(searched_from), message));
                }
            }
            searched_from = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        }
        ranges.sort_by_key(|range| (range.start, range.end));
        (ranges, found.iter().all(Option::is_some))
    }
}

/// Where in a stretch of the prompt the longest head or tail of a message's strings stands, if it holds a bracket.
///
/// Text without brackets cannot be taken for a control token, and short text stands everywhere.
fn search(plain: &str, within: Range<usize>, message: &Message) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut from = within.start;
    each_string(&mut message.clone(), &mut |text| {
        let pieces: Vec<&str> = segments(text).take(MAX_SEARCHED_PIECES).collect();
        let cuts: Vec<usize> = pieces
            .iter()
            .scan(0, |at, piece| {
                *at += piece.len();
                Some(*at)
            })
            .collect();
        let heads = cuts.iter().rev().map(|&cut| &text[..cut]);
        let tails = std::iter::once(&0).chain(&cuts).map(|&cut| &text[cut..]);
        let mut candidates: Vec<&str> =
            tails.chain(heads).map(str::trim).filter(|text| has_bracket(text)).collect();
        candidates.sort_by_key(|text| std::cmp::Reverse(text.len()));
        let found = candidates
            .iter()
            .find_map(|text| plain[from..within.end].find(text).map(|at| from + at..from + at + text.len()));
        if let Some(range) = found {
            from = range.end;
            ranges.push(range);
        }
        None
    });
    ranges
}

/// Calls `change` on every string of a message that a participant may have written.
///
/// Templates compare roles and types and look up keys, so these are left alone unless they hold a bracket: then no
/// template knows them, and they may hold a forged control token.
fn each_string(message: &mut Message, change: &mut impl FnMut(&str) -> Option<String>) {
    if has_bracket(&message.role) {
        replace(&mut message.role, change);
    }
    walk(&mut message.content, change);
    walk_map(&mut message.extra, change);
}

fn walk(value: &mut Value, change: &mut impl FnMut(&str) -> Option<String>) {
    match value {
        Value::String(text) => replace(text, change),
        Value::Array(values) => values.iter_mut().for_each(|value| walk(value, change)),
        Value::Object(map) => walk_map(map, change),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn walk_map(map: &mut Map<String, Value>, change: &mut impl FnMut(&str) -> Option<String>) {
    for (mut key, mut value) in std::mem::take(map) {
        let is_structure = matches!(key.as_str(), "role" | "type" | "id" | "tool_call_id");
        if !is_structure || value.as_str().is_none_or(has_bracket) {
            walk(&mut value, change);
        }
        if has_bracket(&key) {
            replace(&mut key, change);
        }
        map.insert(key, value);
    }
}

fn replace(text: &mut String, change: &mut impl FnMut(&str) -> Option<String>) {
    if let Some(changed) = change(text) {
        *text = changed;
    }
}

fn has_bracket(text: &str) -> bool {
    text.contains(BRACKETS)
}

/// The text in pieces that a template may want to find whole: tags, and lines between them.
fn segments(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n').flat_map(|line| {
        let mut rest = line;
        std::iter::from_fn(move || {
            // A tag is short; looking further for its end would take quadratic time on a run of brackets.
            let close = |c: char| {
                rest.char_indices().take(MAX_TAG_CHARS).find(|&(_, d)| d == c).map(|(at, _)| at + 1)
            };
            let end = match rest.chars().next()? {
                '<' => close('>').unwrap_or(1),
                '[' => close(']').unwrap_or(1),
                _ => rest.find(BRACKETS).unwrap_or(rest.len()),
            };
            let (piece, after) = rest.split_at(end);
            rest = after;
            Some(piece)
        })
    })
}

/// The two characters around content.
#[derive(Clone, Copy, Debug)]
struct Marks {
    open: char,
    close: char,
}

impl Marks {
    /// Two private characters that stand neither in the prompt nor in a message.
    fn unused_in(plain: &str, messages: &[Message]) -> Option<Self> {
        let mut used: std::collections::HashSet<char> = plain.chars().filter(is_private).collect();
        for message in messages {
            each_string(&mut message.clone(), &mut |text| {
                used.extend(text.chars().filter(is_private));
                None
            });
        }
        let mut free = ('\u{e000}'..='\u{f8ff}').filter(|c| !used.contains(c));
        Some(Self { open: free.next()?, close: free.next()? })
    }

    fn mark_message(self, message: &Message) -> Message {
        let mut marked = message.clone();
        let own_tags: &[&str] = if message.role == "assistant" { &THINKING } else { &[] };
        each_string(&mut marked, &mut |text| Some(self.mark(text, own_tags)));
        marked
    }

    /// Puts marks inside the white space of each segment, so that trimming works as ever.
    fn mark(self, text: &str, bare: &[&str]) -> String {
        let mut out = String::with_capacity(text.len() + 16);
        for segment in segments(text) {
            let core = segment.trim();
            if core.is_empty() || bare.contains(&core) {
                out.push_str(segment);
                continue;
            }
            let start = segment.len() - segment.trim_start().len();
            out.push_str(&segment[..start]);
            out.push(self.open);
            out.push_str(core);
            out.push(self.close);
            out.push_str(&segment[start + core.len()..]);
        }
        out
    }

    /// Ranges of marked text in the prompt without marks; `None` if that is not `plain` or the marks do not pair.
    fn ranges(self, marked: &str, plain: &str) -> Option<Vec<Range<usize>>> {
        let mut bare = String::with_capacity(plain.len());
        let mut ranges = Vec::new();
        let mut open = None;
        for c in marked.chars() {
            if c == self.open {
                if open.replace(bare.len()).is_some() {
                    return None;
                }
            } else if c == self.close {
                ranges.push(open.take()?..bare.len());
            } else {
                bare.push(c);
            }
        }
        (open.is_none() && bare == plain).then_some(ranges)
    }
}

fn is_private(c: &char) -> bool {
    ('\u{e000}'..='\u{f8ff}').contains(c)
}

/// Cuts the prompt at ranges sorted by their beginning; ranges that touch or overlap become one.
fn cut(plain: &str, ranges: &[Range<usize>]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut push = |content: bool, text: &str| {
        if !text.is_empty() {
            let text = text.to_owned();
            parts.push(if content { Part::Content(text) } else { Part::Template(text) });
        }
    };
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range.clone()),
        }
    }
    let mut at = 0;
    for range in merged {
        push(false, &plain[at..range.start]);
        push(true, &plain[range.clone()]);
        at = range.end;
    }
    push(false, &plain[at..]);
    parts
}
