//! The text as the splitters see it: code points with their classes.

use super::class::Class;
use std::ops::Range;

/// One code point of the text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) code: u32,
    pub(super) class: Class,
    /// Where its bytes begin.
    offset: usize,
}

/// Decoded text, and the bytes that the pieces are cut from.
#[derive(Debug, Default)]
pub(super) struct Text {
    pub(super) points: Vec<Point>,
    bytes: Vec<u8>,
}

/// Code point that stands for a byte that is not UTF-8.
const REPLACEMENT: u32 = 0xfffd;

impl Text {
    /// Decodes the bytes.
    ///
    /// A byte that belongs to no UTF-8 sequence becomes U+FFFD. Overlong forms and surrogates are taken for what
    /// they say, as llama.cpp does, so that ids agree on hostile input too.
    pub(super) fn decode(bytes: &[u8]) -> Self {
        let mut ascii = [Class::of(0); 128];
        for (code, class) in (0..).zip(ascii.iter_mut()) {
            *class = Class::of(code);
        }
        let mut text =
            Self { points: Vec::with_capacity(bytes.len()), bytes: Vec::with_capacity(bytes.len()) };
        let mut at = 0;
        while at < bytes.len() {
            let (code, len) = decode_one(&bytes[at..]).unwrap_or((REPLACEMENT, 1));
            let class = ascii.get(code as usize).copied().unwrap_or_else(|| Class::of(code));
            text.points.push(Point { code, class, offset: text.bytes.len() });
            push_code(code, &mut text.bytes);
            at += len;
        }
        text
    }

    /// The bytes of a range of code points.
    pub(super) fn slice(&self, range: Range<usize>) -> &[u8] {
        let offset = |ix: usize| self.points.get(ix).map_or(self.bytes.len(), |point| point.offset);
        &self.bytes[offset(range.start)..offset(range.end)]
    }
}

/// The first code point and its length in bytes, if the bytes begin with one.
fn decode_one(bytes: &[u8]) -> Option<(u32, usize)> {
    let lead = *bytes.first()?;
    let (len, bits) = match lead {
        0x00..=0x7f => return Some((u32::from(lead), 1)),
        0xc0..=0xdf => (2, lead & 0x1f),
        0xe0..=0xef => (3, lead & 0x0f),
        0xf0..=0xf7 => (4, lead & 0x07),
        _ => return None,
    };
    let mut code = u32::from(bits);
    for &next in bytes.get(1..len)? {
        if next & 0xc0 != 0x80 {
            return None;
        }
        code = code << 6 | u32::from(next & 0x3f);
    }
    (code <= 0x10_ffff).then_some((code, len))
}

/// Appends the shortest form of a code point; surrogates get the three bytes that their number asks for.
fn push_code(code: u32, out: &mut Vec<u8>) {
    match char::from_u32(code) {
        Some(c) => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        None => out.extend([code >> 12 | 0xe0, code >> 6 & 0x3f | 0x80, code & 0x3f | 0x80].map(|b| b as u8)),
    }
}

#[cfg(test)]
mod tests {
    use super::Text;

    fn codes(bytes: &[u8]) -> Vec<u32> {
        Text::decode(bytes).points.iter().map(|point| point.code).collect()
    }

    #[test]
    fn valid_text_is_kept() {
        let text = "a é 中 😀\u{301}";
        assert_eq!(codes(text.as_bytes()), text.chars().map(u32::from).collect::<Vec<_>>());
        let decoded = Text::decode(text.as_bytes());
        assert_eq!(decoded.slice(0..decoded.points.len()), text.as_bytes());
        assert_eq!(decoded.slice(2..3), "é".as_bytes());
    }

    #[test]
    fn each_stray_byte_is_one_replacement() {
        assert_eq!(codes(b"\xff"), [0xfffd]);
        assert_eq!(codes(b"\x80a"), [0xfffd, 0x61]);
        assert_eq!(codes(b"\xe4\xbd"), [0xfffd, 0xfffd]);
        assert_eq!(codes(b"\xf7\xbf\xbf\xbf"), [0xfffd; 4]);
    }

    #[test]
    fn overlong_forms_are_shortened_and_surrogates_kept() {
        assert_eq!(Text::decode(b"\xc0\xaf").slice(0..1), b"/");
        assert_eq!(Text::decode(b"\xed\xa0\x80").slice(0..1), b"\xed\xa0\x80");
    }
}
