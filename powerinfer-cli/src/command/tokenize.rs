//! `powerinfer tokenize`: text to token ids.

use std::fmt::Write as _;

use powerinfer_core::TokenId;
use powerinfer_core::tokenizer::{Encode, Tokenizer};

use crate::args::TokenizeArgs;
use crate::error::CliError;
use crate::options::{self, Source};
use crate::output::print;

pub(crate) fn run(args: &TokenizeArgs) -> Result<(), CliError> {
    let texts = match (&args.prompt, &args.file) {
        (_, Some(path)) => {
            let text = options::read_text(path)?;
            serde_json::from_str(&text).map_err(|source| CliError::Json { path: path.clone(), source })?
        }
        (Some(text), None) => vec![text.clone()],
        (None, None) => vec![],
    };
    let source = Source::of(args.model.as_ref());
    let tokenizer = powerinfer_core::read_tokenizer(&source.open()?, args.pre)
        .map_err(|error| source.load_error(error))?;
    let encode = |text: &String| {
        if args.no_bos {
            let how = Encode { add_special: false, parse_special: args.parse_special };
            tokenizer.encode(text, how)
        } else {
            options::encode(&tokenizer, text, args.parse_special, source.is_demo())
        }
    };
    let ids = texts.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
    if args.json { print_json(&ids, args.file.is_some()) } else { print_pieces(&ids, &tokenizer) }
}

fn print_json(ids: &[Vec<TokenId>], many: bool) -> Result<(), CliError> {
    let mut ids: Vec<Vec<u32>> = ids.iter().map(|ids| ids.iter().map(|id| id.0).collect()).collect();
    let text = if many {
        serde_json::to_string(&ids)
    } else {
        serde_json::to_string(&ids.pop().expect("without a file there is one text"))
    };
    print(&format!("{}\n", text.expect("arrays of numbers are JSON")))
}

/// A line with id and piece for each token, an empty line between texts.
fn print_pieces(texts: &[Vec<TokenId>], tokenizer: &Tokenizer) -> Result<(), CliError> {
    let mut out = String::new();
    for (i, ids) in texts.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        for &id in ids {
            let piece = tokenizer.token_bytes(id, true).unwrap_or_default();
            // Writing to a string does not fail.
            let _ = writeln!(out, "{id:>7}  {}", quoted(piece));
        }
    }
    print(&out)
}

/// A piece in quotes; bytes that are no characters as `\xNN`.
fn quoted(piece: &[u8]) -> String {
    let mut text = String::from("\"");
    for chunk in piece.utf8_chunks() {
        text.extend(chunk.valid().chars().flat_map(char::escape_debug));
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_show_line_breaks_quotes_and_stray_bytes() {
        assert_eq!(quoted(b" a\n\"\xff\xc3\xa9"), "\" a\\n\\\"\\xffé\"");
    }
}
