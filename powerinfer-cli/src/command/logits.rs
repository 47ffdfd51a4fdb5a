//! `powerinfer logits`: the logits after each token, as JSON.

use std::io::{self, Write};

use powerinfer_core::{SessionOptions, TokenId};

use crate::args::LogitsArgs;
use crate::error::CliError;
use crate::options::{self, Loaded};
use crate::output::write_file;

pub(crate) fn run(args: &LogitsArgs) -> Result<(), CliError> {
    let loaded = Loaded::new(&args.model, args.mode.map(options::mode), None)?;
    let ids: Vec<TokenId> = args.tokens.iter().map(|&id| TokenId(id)).collect();
    let mut session =
        loaded.model.session(&SessionOptions { n_ctx: Some(ids.len()), ..SessionOptions::default() })?;
    write_file(&args.out, |sink| {
        let failed = |source| CliError::Write { path: args.out.clone(), source };
        let name = json(&loaded.source.name());
        let tokens = json(&args.tokens);
        let mode = json(session.mode().name());
        let n_vocab = loaded.model.spec().n_vocab;
        write!(
            sink,
            "{{\"model\":{name},\"tokens\":{tokens},\"mode\":{mode},\"n_vocab\":{n_vocab},\"logits\":["
        )
        .map_err(failed)?;
        let mut written = Ok(());
        session.evaluate(&ids, |position, row| {
            if written.is_ok() {
                written = write_row(sink, position, row);
            }
        })?;
        written.and_then(|()| sink.write_all(b"\n]}\n")).map_err(failed)
    })
}

/// One line of the array, with the shortest digits that read back as the same floats.
fn write_row(sink: &mut dyn Write, position: usize, row: &[f32]) -> io::Result<()> {
    sink.write_all(if position == 0 { b"\n" } else { b",\n" })?;
    serde_json::to_writer(sink, row).map_err(io::Error::from)
}

fn json(value: &(impl serde::Serialize + ?Sized)) -> String {
    serde_json::to_string(value).expect("texts and numbers are JSON")
}
