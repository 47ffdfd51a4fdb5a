//! Cutting text into the pieces within which byte-level BPE merges.
//!
//! A model was trained with one particular way of cutting, named by `tokenizer.ggml.pre`; with another one the ids
//! differ where words meet digits, apostrophes, spaces or newlines, and the model's output quietly degrades.
//! Each way is a list of stages, and each stage cuts the pieces of the one before.

mod class;
mod scan;
#[cfg(test)]
mod tests;
mod text;

use class::Class;
use scan::{Contractions, Letters, SpaceRun, Spaces, Tail, WordRules};
use std::ops::Range;
use text::{Point, Text};

/// A way to cut text into pieces before merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PreTokenizer {
    /// For files that name none: punctuation apart, then GPT-2's rule, then digits in groups of three.
    Default,
    /// GPT-2.
    Gpt2,
    /// Single digits, then GPT-2's rule.
    StarCoder,
    /// Punctuation apart, then GPT-2's rule, then ASCII digits in groups of three.
    Falcon,
    /// Llama 3: any-case contractions, up to three digits; a piece that is a token as a whole is not merged.
    Llama3,
    /// Llama 3's rule without that shortcut.
    Dbrx,
    /// Llama 3's rule with white space in powers of two.
    Jais2,
    /// MiniCPM 5: digits in groups of three first, then Llama 3's rule.
    MiniCpm5,
    /// As Llama 3, with single digits.
    Qwen2,
    /// As `Qwen2`, with marks counted as letters.
    Qwen35,
    /// As `Qwen2` without contractions.
    Ufakzeka,
    /// As `Qwen2`, but punctuation takes no newlines along.
    SeedCoder,
    /// As `Qwen2` on each line by itself.
    Laguna,
    /// GPT-4o: words cut where lower case turns to upper case, contractions at their end, up to three digits.
    ///
    /// This is the model's own pattern, in which every alphabet has case and marks belong to words; llama.cpp
    /// approximates it for letters beyond ASCII.
    Gpt4o,
    /// As `Gpt4o` without contractions, single digits.
    Tekken,
    /// DeepSeek LLM.
    DeepSeekLlm,
    /// DeepSeek Coder.
    DeepSeekCoder,
    /// DeepSeek V3.
    DeepSeek3,
    /// BLOOM and Poro: everything but white space and sentence punctuation.
    Bloom,
    /// As `Bloom`, then single digits.
    Viking,
}

use PreTokenizer as P;

/// Names in files and the rule each stands for.
const NAMES: &[(&str, PreTokenizer)] = &[
    ("default", P::Default),
    ("gpt-2", P::Gpt2),
    ("gpt2", P::Gpt2),
    ("phi-2", P::Gpt2),
    ("mpt", P::Gpt2),
    ("olmo", P::Gpt2),
    ("jais", P::Gpt2),
    ("trillion", P::Gpt2),
    ("granite-docling", P::Gpt2),
    ("gigachat", P::Gpt2),
    ("mellum", P::Gpt2),
    ("a.x-4.0", P::Gpt2),
    ("exaone4", P::Gpt2),
    ("modern-bert", P::Gpt2),
    ("starcoder", P::StarCoder),
    ("refact", P::StarCoder),
    ("command-r", P::StarCoder),
    ("smollm", P::StarCoder),
    ("codeshell", P::StarCoder),
    ("exaone", P::StarCoder),
    ("minerva-7b", P::StarCoder),
    ("mellum2", P::StarCoder),
    ("falcon", P::Falcon),
    ("llama-bpe", P::Llama3),
    ("llama3", P::Llama3),
    ("llama-v3", P::Llama3),
    ("falcon3", P::Llama3),
    ("falcon-h1", P::Llama3),
    ("pixtral", P::Llama3),
    ("midm-2.0", P::Llama3),
    ("lfm2", P::Llama3),
    ("dbrx", P::Dbrx),
    ("smaug-bpe", P::Dbrx),
    ("chatglm-bpe", P::Dbrx),
    ("glm4", P::Dbrx),
    ("jais-2", P::Jais2),
    ("minicpm5", P::MiniCpm5),
    ("qwen2", P::Qwen2),
    ("stablelm2", P::Qwen2),
    ("deepseek-r1-qwen", P::Qwen2),
    ("kormo", P::Qwen2),
    ("f2llmv2", P::Qwen2),
    ("megrez", P::Qwen2),
    ("hunyuan", P::Qwen2),
    ("solar-open", P::Qwen2),
    ("grok-2", P::Qwen2),
    ("bailingmoe", P::Qwen2),
    ("bailingmoe2", P::Qwen2),
    ("llada-moe", P::Qwen2),
    ("qwen35", P::Qwen35),
    ("ufakzeka", P::Ufakzeka),
    ("seed-coder", P::SeedCoder),
    ("laguna", P::Laguna),
    ("gpt-4o", P::Gpt4o),
    ("llama4", P::Gpt4o),
    ("kanana2", P::Gpt4o),
    ("talkie", P::Gpt4o),
    ("minimax-m2", P::Gpt4o),
    ("tekken", P::Tekken),
    ("deepseek-llm", P::DeepSeekLlm),
    ("deepseek-coder", P::DeepSeekCoder),
    ("deepseek-v3", P::DeepSeek3),
    ("hunyuan-dense", P::DeepSeek3),
    ("joyai-llm", P::DeepSeek3),
    ("hy_v4", P::DeepSeek3),
    ("bloom", P::Bloom),
    ("poro-chat", P::Bloom),
    ("gpt3-finnish", P::Bloom),
    ("viking", P::Viking),
];

/// One cut of every piece so far: matches become pieces, and so does what lies between two matches.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// `[…]+`
    Runs(fn(Point) -> bool),
    /// `[…]{1,n}`
    UpTo(usize, fn(Point) -> bool),
    /// `[…]{n}`
    Exactly(usize, fn(Point) -> bool),
    /// `\s?[…]+`
    SpacedRuns(fn(Point) -> bool),
    /// ` ?[…]+`
    BlankRuns(fn(Point) -> bool),
    /// `\s+$`
    TrailingSpace,
    Gpt2,
    Words(WordRules),
    DeepSeek3,
}

const LLAMA3: WordRules = WordRules {
    contractions: Contractions::AnyCase,
    letters: Letters::Plain,
    digits: 3,
    tail: Tail::Newlines,
    spaces: Spaces::AllButLast,
};
const QWEN2: WordRules = WordRules { digits: 1, ..LLAMA3 };
const GPT4O: WordRules = WordRules {
    contractions: Contractions::No,
    letters: Letters::Cased(true),
    digits: 3,
    tail: Tail::NewlinesAndSlashes,
    spaces: Spaces::AllButLast,
};

impl PreTokenizer {
    /// The rule that a file's `tokenizer.ggml.pre` names.
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|&(_, rule)| rule)
    }

    /// All names that [`PreTokenizer::from_name`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.iter().map(|&(name, _)| name)
    }

    /// The names as one line, for messages.
    pub(super) fn known_names() -> String {
        Self::names().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    }

    /// Whether a piece that is a token as a whole becomes that token, whatever the merges say.
    pub(super) fn ignores_merges(self) -> bool {
        matches!(self, Self::Llama3 | Self::MiniCpm5 | Self::Tekken)
    }

    /// Whether a file that does not say so still means a BOS in front of every text.
    pub(super) fn adds_bos(self) -> bool {
        matches!(self, Self::Llama3 | Self::Tekken)
    }

    fn stages(self) -> &'static [Stage] {
        use Stage::{BlankRuns, Exactly, Runs, SpacedRuns, TrailingSpace, UpTo, Words};
        match self {
            Self::Default => &[Runs(default_punctuation), Stage::Gpt2, Runs(number), Exactly(3, ascii_digit)],
            Self::Gpt2 => &[Stage::Gpt2],
            Self::StarCoder => &[UpTo(1, number), Stage::Gpt2],
            Self::Falcon => &[Runs(falcon_punctuation), Stage::Gpt2, Exactly(3, ascii_digit)],
            Self::Llama3 | Self::Dbrx => &[Words(LLAMA3)],
            Self::Jais2 => &[Words(WordRules { spaces: Spaces::Halving, ..LLAMA3 })],
            Self::MiniCpm5 => &[UpTo(3, number), Words(WordRules { digits: usize::MAX, ..LLAMA3 })],
            Self::Qwen2 => &[Words(QWEN2)],
            Self::Qwen35 => &[Words(WordRules { letters: Letters::WithMarks, ..QWEN2 })],
            Self::Ufakzeka => &[Words(WordRules { contractions: Contractions::No, ..QWEN2 })],
            Self::SeedCoder => &[Words(WordRules { tail: Tail::Nothing, ..QWEN2 })],
            Self::Laguna => &[Runs(line_feed), Words(QWEN2)],
            Self::Gpt4o => &[Words(GPT4O)],
            Self::Tekken => &[Words(WordRules { letters: Letters::Cased(false), digits: 1, ..GPT4O })],
            Self::DeepSeekLlm => &[
                UpTo(1, newline),
                SpacedRuns(cased_letter),
                SpacedRuns(deepseek_punctuation),
                TrailingSpace,
                Runs(deepseek_cjk),
                Runs(number),
            ],
            Self::DeepSeekCoder => &[
                UpTo(1, newline),
                SpacedRuns(letter),
                SpacedRuns(punctuation),
                Runs(deepseek_cjk),
                UpTo(1, number),
            ],
            Self::DeepSeek3 => &[UpTo(3, number), Runs(han_or_kana), Stage::DeepSeek3],
            Self::Bloom => &[BlankRuns(not_sentence_punctuation)],
            Self::Viking => &[BlankRuns(not_sentence_punctuation), UpTo(1, number)],
        }
    }

    /// Cuts a text and hands each piece on, in order. Bytes that are not UTF-8 arrive as U+FFFD.
    ///
    /// Time and memory are linear in the text.
    pub(super) fn split(self, text: &[u8], mut piece: impl FnMut(&[u8])) {
        let text = Text::decode(text);
        let whole = 0..text.points.len();
        let mut pieces = vec![whole];
        for &stage in self.stages() {
            let mut next = Vec::with_capacity(pieces.len());
            for range in pieces {
                stage.cut(&text.points, range, &mut next);
            }
            pieces = next;
        }
        for range in pieces {
            piece(text.slice(range));
        }
    }
}

impl Stage {
    fn cut(self, all: &[Point], range: Range<usize>, out: &mut Vec<Range<usize>>) {
        let points = &all[range.clone()];
        let offset = range.start;
        let mut push = |from: usize, to: usize| {
            if from < to {
                out.push(offset + from..offset + to);
            }
        };
        if let Self::TrailingSpace = self {
            let spaces = points.iter().rev().take_while(|p| p.class.is(Class::SPACE)).count();
            push(0, points.len() - spaces);
            push(points.len() - spaces, points.len());
            return;
        }
        let mut run = SpaceRun::default();
        let (mut gap, mut pos) = (0, 0);
        while pos < points.len() {
            match self.match_at(points, pos, &mut run) {
                Some(end) => {
                    push(gap, pos);
                    push(pos, end);
                    (gap, pos) = (end, end);
                }
                None => pos += 1,
            }
        }
        push(gap, pos);
    }

    /// End of the match that begins at `pos`, which is in the text.
    fn match_at(self, points: &[Point], pos: usize, spaces: &mut SpaceRun) -> Option<usize> {
        match self {
            Self::Runs(keep) => keep(points[pos]).then(|| scan::run(points, pos, keep)),
            Self::UpTo(n, keep) => {
                let limit = points.len().min(pos + n);
                keep(points[pos]).then(|| scan::run(&points[..limit], pos, keep))
            }
            Self::Exactly(n, keep) => {
                let group = points.get(pos..pos + n)?;
                group.iter().all(|&point| keep(point)).then_some(pos + n)
            }
            Self::SpacedRuns(keep) => scan::any_spaced_run(points, pos, keep),
            Self::BlankRuns(keep) => scan::one_spaced_run(points, pos, keep),
            Self::TrailingSpace => None,
            Self::Gpt2 => scan::gpt2(points, pos, spaces),
            Self::Words(rules) => scan::words(points, pos, rules, spaces),
            Self::DeepSeek3 => scan::deepseek3(points, pos, spaces),
        }
    }
}

fn is_one_of(point: Point, set: &str) -> bool {
    set.chars().any(|c| u32::from(c) == point.code)
}

fn in_ranges(point: Point, ranges: &[(char, char)]) -> bool {
    ranges.iter().any(|&(from, to)| (u32::from(from)..=u32::from(to)).contains(&point.code))
}

fn number(point: Point) -> bool {
    point.class.is(Class::NUMBER)
}

fn letter(point: Point) -> bool {
    point.class.is(Class::LETTER)
}

fn punctuation(point: Point) -> bool {
    point.class.is(Class::PUNCTUATION)
}

fn newline(point: Point) -> bool {
    point.class.is(Class::NEWLINE)
}

fn line_feed(point: Point) -> bool {
    point.code == u32::from('\n')
}

fn ascii_digit(point: Point) -> bool {
    in_ranges(point, &[('0', '9')])
}

fn default_punctuation(point: Point) -> bool {
    punctuation(point) || is_one_of(point, "$+<=>^~|")
}

fn falcon_punctuation(point: Point) -> bool {
    default_punctuation(point) || is_one_of(point, "`")
}

/// DeepSeek LLM lists letters that have case one by one, and these are missing from its list.
const UNLISTED: [(char, char); 11] = [
    ('\u{560}', '\u{588}'),
    ('\u{10c7}', '\u{10ff}'),
    ('\u{1c80}', '\u{1c8f}'),
    ('\u{2d00}', '\u{2d2f}'),
    ('\u{a790}', '\u{a7ff}'),
    ('\u{ab30}', '\u{ab6f}'),
    ('\u{10570}', '\u{105bf}'),
    ('\u{10d50}', '\u{10d8f}'),
    ('\u{16e40}', '\u{16eff}'),
    ('\u{1d400}', '\u{1d7ff}'),
    ('\u{1df00}', '\u{1dfff}'),
];

fn cased_letter(point: Point) -> bool {
    point.class.is(Class::UPPER.or(Class::LOWER)) && !in_ranges(point, &UNLISTED)
}

fn deepseek_punctuation(point: Point) -> bool {
    in_ranges(point, &[('!', '/'), (':', '~'), ('！', '／'), ('：', '～'), ('‘', '‟'), ('\u{3000}', '。')])
}

/// The range is as wide as in the model's own file, which reaches far beyond Chinese.
fn deepseek_cjk(point: Point) -> bool {
    in_ranges(point, &[('一', '龥'), ('\u{800}', '一'), ('가', '\u{d7ff}')])
}

fn han_or_kana(point: Point) -> bool {
    in_ranges(point, &[('一', '龥'), ('\u{3040}', '\u{309f}'), ('\u{30a0}', '\u{30ff}')])
}

fn not_sentence_punctuation(point: Point) -> bool {
    !point.class.is(Class::SPACE) && !is_one_of(point, "(|.,!?…。，、।۔،)")
}
