//! The alphabet of byte-level BPE: each byte as one printable character.
//!
//! Printable bytes of Latin-1 stand for themselves, the others follow in order from U+0100 on.

/// The character that stands for a byte.
pub(super) fn byte_to_char(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        0x00..=0x20 => shifted(u32::from(byte)),
        0x7f..=0xa0 => shifted(u32::from(byte) - 0x7f + 0x21),
        0xad => shifted(0x43),
    }
}

fn shifted(position: u32) -> char {
    char::from_u32(0x100 + position).expect("U+0100 to U+0143 are characters")
}

/// The byte that a character stands for.
pub(super) fn char_to_byte(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The bytes that a token's text stands for, if all of its characters belong to the alphabet.
pub(super) fn decode(text: &[u8]) -> Option<Vec<u8>> {
    std::str::from_utf8(text).ok()?.chars().map(char_to_byte).collect()
}

/// The text that stands for some bytes.
pub(super) fn encode(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| byte_to_char(byte)).collect()
}

#[cfg(test)]
mod tests {
    use super::{byte_to_char, char_to_byte, decode, encode};

    #[test]
    fn every_byte_has_its_own_character() {
        let chars: std::collections::BTreeSet<char> = (0..=255).map(byte_to_char).collect();
        assert_eq!(chars.len(), 256);
        for byte in 0..=255 {
            assert_eq!(char_to_byte(byte_to_char(byte)), Some(byte));
        }
    }

    #[test]
    fn known_characters() {
        assert_eq!(encode(b" a\n\t\x7f\xad\xff"), "ĠaĊĉġŃÿ");
        assert_eq!(decode("ĠaĊ".as_bytes()).as_deref(), Some(b" a\n".as_slice()));
        assert_eq!(decode("a b".as_bytes()), None);
    }
}
