//! Character classes of the splitters, as bit sets over general categories.

use unicode_general_category::{GeneralCategory as Category, get_general_category};

/// A set of character properties; a character of the text carries all that apply to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class(u16);

impl Class {
    /// `\p{Lu}` and `\p{Lt}`.
    pub(super) const UPPER: Self = Self(1);
    /// `\p{Ll}`.
    pub(super) const LOWER: Self = Self(1 << 1);
    /// `\p{Lm}` and `\p{Lo}`.
    pub(super) const CASELESS: Self = Self(1 << 2);
    /// `\p{M}`.
    pub(super) const MARK: Self = Self(1 << 3);
    /// `\p{N}`.
    pub(super) const NUMBER: Self = Self(1 << 4);
    /// `\p{P}`.
    pub(super) const PUNCTUATION: Self = Self(1 << 5);
    /// `\p{S}`.
    pub(super) const SYMBOL: Self = Self(1 << 6);
    /// `\s`: the property `White_Space`.
    pub(super) const SPACE: Self = Self(1 << 7);
    /// Carriage return and line feed.
    pub(super) const NEWLINE: Self = Self(1 << 8);

    /// `\p{L}`.
    pub(super) const LETTER: Self = Self::UPPER.or(Self::LOWER).or(Self::CASELESS);

    /// The union of two sets.
    pub(super) const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether a property is in both.
    pub(super) const fn is(self, any_of: Self) -> bool {
        self.0 & any_of.0 != 0
    }

    /// The properties of one code point; surrogates have none.
    pub(super) fn of(code: u32) -> Self {
        let Some(c) = char::from_u32(code) else {
            return Self(0);
        };
        let mut class = match get_general_category(c) {
            Category::UppercaseLetter | Category::TitlecaseLetter => Self::UPPER,
            Category::LowercaseLetter => Self::LOWER,
            Category::ModifierLetter | Category::OtherLetter => Self::CASELESS,
            Category::NonspacingMark | Category::SpacingMark | Category::EnclosingMark => Self::MARK,
            Category::DecimalNumber | Category::LetterNumber | Category::OtherNumber => Self::NUMBER,
            Category::ConnectorPunctuation
            | Category::DashPunctuation
            | Category::OpenPunctuation
            | Category::ClosePunctuation
            | Category::InitialPunctuation
            | Category::FinalPunctuation
            | Category::OtherPunctuation => Self::PUNCTUATION,
            Category::MathSymbol
            | Category::CurrencySymbol
            | Category::ModifierSymbol
            | Category::OtherSymbol => Self::SYMBOL,
            _ => Self(0),
        };
        if c.is_whitespace() {
            class = class.or(Self::SPACE);
        }
        if matches!(c, '\r' | '\n') {
            class = class.or(Self::NEWLINE);
        }
        class
    }
}

#[cfg(test)]
mod tests {
    use super::Class;

    #[test]
    fn categories_that_splitters_depend_on() {
        let cases = [
            ('A', Class::UPPER),
            ('a', Class::LOWER),
            ('ǅ', Class::UPPER),
            ('中', Class::CASELESS),
            ('ʰ', Class::CASELESS),
            ('\u{301}', Class::MARK),
            ('7', Class::NUMBER),
            ('²', Class::NUMBER),
            ('½', Class::NUMBER),
            ('_', Class::PUNCTUATION),
            ('~', Class::SYMBOL),
            ('😀', Class::SYMBOL),
            (' ', Class::SPACE),
            ('\u{a0}', Class::SPACE),
            ('\u{85}', Class::SPACE),
            ('\n', Class::SPACE.or(Class::NEWLINE)),
            ('\u{200b}', Class(0)),
            ('\0', Class(0)),
        ];
        for (c, expected) in cases {
            assert_eq!(Class::of(u32::from(c)), expected, "{c:?}");
        }
        assert_eq!(Class::of(0xd800), Class(0));
    }
}
