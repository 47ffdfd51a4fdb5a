//! Scanners: where a piece that begins at a position ends.
//!
//! Each is one published pattern, written out by hand. A pattern matcher with backtracking needs deep stacks or
//! quadratic time on a long run of one character; these look at each character a bounded number of times.

use super::class::Class;
use super::text::Point;

/// Which of `'s 't 're 've 'm 'll 'd` a pattern takes as pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contractions {
    No,
    Lower,
    AnyCase,
}

/// What may follow a run of punctuation in the same piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    Nothing,
    Newlines,
    NewlinesAndSlashes,
}

/// How a pattern takes letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Letters {
    /// `\p{L}+` after at most one character that is no letter, number or newline.
    Plain,
    /// As `Plain`, with marks counted as letters.
    WithMarks,
    /// Upper-case letters, then lower-case ones, each kind with the letters that have no case; a contraction at the
    /// end belongs to the piece if `true`.
    Cased(bool),
}

/// How a run of spaces without newlines is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spaces {
    /// `\s+(?!\S)|\s+`: all but the last, which may begin the next piece.
    AllButLast,
    /// As `AllButLast`, but in steps of 512, 256, … 4, then at most 2.
    Halving,
}

/// The family of patterns that began with GPT-4's.
#[derive(Clone, Copy, Debug)]
pub(super) struct WordRules {
    pub(super) contractions: Contractions,
    pub(super) letters: Letters,
    /// Most digits in a piece.
    pub(super) digits: usize,
    pub(super) tail: Tail,
    pub(super) spaces: Spaces,
}

/// The rest of a run of white space, kept so that a run is measured once however many pieces it becomes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SpaceRun {
    end: usize,
    /// One past the last newline in the run, or 0.
    newline_end: usize,
}

impl SpaceRun {
    fn at(&mut self, points: &[Point], pos: usize) -> Self {
        if pos >= self.end {
            self.end = run(points, pos, |p| p.class.is(Class::SPACE));
            self.newline_end =
                (pos..self.end).rev().find(|&ix| points[ix].class.is(Class::NEWLINE)).map_or(0, |ix| ix + 1);
        }
        *self
    }
}

/// End of the run of points that satisfy `keep`, from `pos` on.
pub(super) fn run(points: &[Point], pos: usize, keep: impl Fn(Point) -> bool) -> usize {
    points[pos..].iter().position(|&point| !keep(point)).map_or(points.len(), |n| pos + n)
}

fn has(points: &[Point], pos: usize, class: Class) -> bool {
    points.get(pos).is_some_and(|point| point.class.is(class))
}

fn code_at(points: &[Point], pos: usize) -> u32 {
    points.get(pos).map_or(u32::MAX, |point| point.code)
}

/// Length of a contraction at `pos`, 0 if there is none.
fn contraction(points: &[Point], pos: usize, which: Contractions) -> usize {
    if which == Contractions::No || code_at(points, pos) != u32::from('\'') {
        return 0;
    }
    let letter = |ix: usize| {
        let c = u8::try_from(code_at(points, ix)).unwrap_or(0);
        if which == Contractions::AnyCase { c.to_ascii_lowercase() } else { c }
    };
    match (letter(pos + 1), letter(pos + 2)) {
        (b's' | b't' | b'm' | b'd', _) => 2,
        (b'r' | b'v', b'e') | (b'l', b'l') => 3,
        _ => 0,
    }
}

const LETTER_OR_NUMBER: Class = Class::LETTER.or(Class::NUMBER);

/// GPT-2: `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
pub(super) fn gpt2(points: &[Point], pos: usize, spaces: &mut SpaceRun) -> Option<usize> {
    let short = contraction(points, pos, Contractions::Lower);
    if short > 0 {
        return Some(pos + short);
    }
    let begin = if points[pos].code == u32::from(' ') { pos + 1 } else { pos };
    if let Some(first) = points.get(begin)
        && !first.class.is(Class::SPACE)
    {
        let end = if first.class.is(Class::LETTER) {
            run(points, begin, |p| p.class.is(Class::LETTER))
        } else if first.class.is(Class::NUMBER) {
            run(points, begin, |p| p.class.is(Class::NUMBER))
        } else {
            run(points, begin, |p| !p.class.is(LETTER_OR_NUMBER.or(Class::SPACE)))
        };
        return Some(end);
    }
    Some(space(points, pos, spaces.at(points, pos).end))
}

/// `\s+(?!\S)|\s+` on the run of spaces `pos..end`.
fn space(points: &[Point], pos: usize, end: usize) -> usize {
    if end < points.len() && end - pos > 1 { end - 1 } else { end }
}

/// The pieces of [`Spaces::Halving`] on the run `pos..end`.
fn space_halving(points: &[Point], pos: usize, end: usize) -> usize {
    // A step of n must not end right before a character that is no space.
    let most = if end == points.len() { end - pos } else { end - pos - 1 };
    [512, 256, 128, 64, 32, 16, 8, 4, 2]
        .into_iter()
        .find(|&step| step <= most)
        .map_or(pos + 1, |step| pos + step)
}

/// The family of [`WordRules`].
pub(super) fn words(points: &[Point], pos: usize, rules: WordRules, spaces: &mut SpaceRun) -> Option<usize> {
    let short = contraction(points, pos, rules.contractions);
    if short > 0 {
        return Some(pos + short);
    }
    if let Some(end) = letters(points, pos, rules.letters) {
        return Some(end);
    }
    if has(points, pos, Class::NUMBER) {
        let limit = pos.saturating_add(rules.digits).min(points.len());
        return Some(run(&points[..limit], pos, |p| p.class.is(Class::NUMBER)));
    }
    let marks = if rules.letters == Letters::WithMarks { Class::MARK } else { Class::NEWLINE };
    let outside = LETTER_OR_NUMBER.or(Class::SPACE).or(marks);
    if let Some(end) = spaced_run(points, pos, |p| !p.class.is(outside)) {
        return Some(tail(points, end, rules.tail));
    }
    white(points, pos, rules.spaces, spaces)
}

/// ` ?[…]+`
fn spaced_run(points: &[Point], pos: usize, keep: impl Fn(Point) -> bool) -> Option<usize> {
    let begin = if points[pos].code == u32::from(' ') { pos + 1 } else { pos };
    let end = if begin < points.len() { run(points, begin, keep) } else { begin };
    (end > begin).then_some(end)
}

fn tail(points: &[Point], pos: usize, tail: Tail) -> usize {
    match tail {
        Tail::Nothing => pos,
        Tail::Newlines => run(points, pos, |p| p.class.is(Class::NEWLINE)),
        Tail::NewlinesAndSlashes => {
            run(points, pos, |p| p.class.is(Class::NEWLINE) || p.code == u32::from('/'))
        }
    }
}

/// `\s*[\r\n]+`, then the rule for other spaces.
fn white(points: &[Point], pos: usize, rule: Spaces, spaces: &mut SpaceRun) -> Option<usize> {
    if !has(points, pos, Class::SPACE) {
        return None;
    }
    let run = spaces.at(points, pos);
    if run.newline_end > pos {
        return Some(run.newline_end);
    }
    Some(match rule {
        Spaces::AllButLast => space(points, pos, run.end),
        Spaces::Halving => space_halving(points, pos, run.end),
    })
}

fn letters(points: &[Point], pos: usize, rule: Letters) -> Option<usize> {
    let prefixed = !has(points, pos, LETTER_OR_NUMBER.or(Class::NEWLINE));
    let plain = |class: Class| {
        let begin = if prefixed && has(points, pos + 1, class) { pos + 1 } else { pos };
        has(points, begin, class).then(|| run(points, begin, |p| p.class.is(class)))
    };
    match rule {
        Letters::Plain => plain(Class::LETTER),
        Letters::WithMarks => plain(Class::LETTER.or(Class::MARK)),
        Letters::Cased(with_contraction) => {
            let after_prefix = if prefixed { cased(points, pos + 1, Case::EndsLower) } else { None };
            let end = after_prefix
                .or_else(|| cased(points, pos, Case::EndsLower))
                .or_else(|| if prefixed { cased(points, pos + 1, Case::BeginsUpper) } else { None })
                .or_else(|| cased(points, pos, Case::BeginsUpper))?;
            let short = if with_contraction { contraction(points, end, Contractions::AnyCase) } else { 0 };
            Some(end + short)
        }
    }
}

/// The two word forms of [`Letters::Cased`].
#[derive(Clone, Copy, Debug)]
enum Case {
    /// `U*W+` with `U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]` and `W = [\p{Ll}\p{Lm}\p{Lo}\p{M}]`.
    EndsLower,
    /// `U+W*`.
    BeginsUpper,
}

fn cased(points: &[Point], pos: usize, case: Case) -> Option<usize> {
    let either = Class::CASELESS.or(Class::MARK);
    let (upper, lower) = (Class::UPPER.or(either), Class::LOWER.or(either));
    if pos >= points.len() {
        return None;
    }
    let mid = run(points, pos, |p| p.class.is(upper));
    let end = run(points, mid, |p| p.class.is(lower));
    match case {
        Case::BeginsUpper => (mid > pos).then_some(end),
        Case::EndsLower if end > mid => Some(end),
        // Upper-case letters give back until one of them can also stand for a lower-case one.
        Case::EndsLower => (pos..mid).rev().find(|&ix| points[ix].class.is(lower)).map(|ix| ix + 1),
    }
}

/// DeepSeek-V3's last pattern: ASCII punctuation with ASCII letters, letters and marks, punctuation and symbols with
/// newlines, white space.
pub(super) fn deepseek3(points: &[Point], pos: usize, spaces: &mut SpaceRun) -> Option<usize> {
    let ascii = |p: Point| u8::try_from(p.code).unwrap_or(0);
    let letter = |p: Point| ascii(p).is_ascii_alphabetic();
    if ascii(points[pos]).is_ascii_punctuation() && points.get(pos + 1).is_some_and(|&p| letter(p)) {
        return Some(run(points, pos + 1, letter));
    }
    let word = Class::LETTER.or(Class::MARK);
    let outside = Class::LETTER.or(Class::PUNCTUATION).or(Class::SYMBOL).or(Class::NEWLINE);
    let begin = if !has(points, pos, outside) && has(points, pos + 1, word) { pos + 1 } else { pos };
    if has(points, begin, word) {
        return Some(run(points, begin, |p| p.class.is(word)));
    }
    if let Some(end) = spaced_run(points, pos, |p| p.class.is(Class::PUNCTUATION.or(Class::SYMBOL))) {
        return Some(tail(points, end, Tail::Newlines));
    }
    white(points, pos, Spaces::AllButLast, spaces)
}

/// `\s?[…]+`; the space may itself be one of the set.
pub(super) fn any_spaced_run(points: &[Point], pos: usize, keep: impl Fn(Point) -> bool) -> Option<usize> {
    let next_fits = points.get(pos + 1).is_some_and(|&point| keep(point));
    if (has(points, pos, Class::SPACE) && next_fits) || keep(points[pos]) {
        return Some(run(points, pos + 1, keep));
    }
    None
}

/// ` ?[…]+` as [`any_spaced_run`], for U+0020 only.
pub(super) fn one_spaced_run(points: &[Point], pos: usize, keep: impl Fn(Point) -> bool) -> Option<usize> {
    spaced_run(points, pos, keep)
}
