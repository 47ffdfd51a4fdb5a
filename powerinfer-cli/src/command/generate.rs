//! `powerinfer generate`: continues a prompt, streaming.

use powerinfer_core::chat::{ChatInput, Message};
use powerinfer_core::tokenizer::Tokenizer;
use powerinfer_core::{
    CancelToken, FinishReason, GenerateError, GenerateOptions, PhaseStats, SessionError, SessionOptions,
    SessionStats, TokenId,
};

use crate::args::GenerateArgs;
use crate::error::CliError;
use crate::options::{self, Loaded, Source};
use crate::output::{bytes, percent, print, say};

const DEMO_PROMPT: &str = "Once upon a time, there was a little";

pub(crate) fn run(args: &GenerateArgs) -> Result<(), CliError> {
    let text = prompt_text(args)?;
    let sampling = options::sampling(&args.sampling);
    // Ranges first: a wrong number need not wait for a large model.
    sampling.validate(u32::MAX as usize).map_err(CliError::Sampling)?;
    let n_ctx = args.ctx_size.map(|n| n as usize);
    let loaded = Loaded::new(&args.model, args.mode.map(options::mode), n_ctx)?;
    let model = &loaded.model;
    sampling.validate(model.tokenizer().n_vocab()).map_err(CliError::Sampling)?;
    let prompt = prompt_ids(args, &loaded, &text)?;
    if !args.quiet {
        loaded.say_notes();
    }
    let mut session = model.session(&SessionOptions { n_ctx, ..SessionOptions::default() })?;
    let cancel = cancel_on_ctrl_c()?;
    let max_tokens = usize::try_from(args.n_predict).ok();
    let options = GenerateOptions {
        sampling,
        max_tokens,
        stop: args.stop.clone(),
        ignore_end: args.ignore_eos,
        cancel,
        ..GenerateOptions::default()
    };
    if !args.no_display_prompt && !args.chat {
        print(&text)?;
    }
    let mut generation = match session.generate(&prompt, options) {
        Err(GenerateError::Session(SessionError::Cancelled { done, total })) => {
            say(&format!("ended: interrupted after {done} of {total} tokens of the prompt"));
            return Err(CliError::Interrupted);
        }
        other => other?,
    };
    let mut ends_in_newline = text.ends_with('\n');
    for piece in &mut generation {
        let piece = piece?;
        if !piece.text.is_empty() {
            ends_in_newline = piece.text.ends_with('\n');
            print(&piece.text)?;
        }
    }
    if !ends_in_newline {
        print("\n")?;
    }
    let reason = generation.finish_reason().cloned().unwrap_or(FinishReason::Failed);
    if !args.quiet {
        let seed = (args.sampling.temp > 0.0).then(|| generation.seed());
        let n_generated = generation.n_generated();
        say_summary(generation.session().stats(), seed);
        say(&format!("ended: {}", describe(&reason, n_generated, max_tokens, model.tokenizer())));
    }
    if reason == FinishReason::Cancelled { Err(CliError::Interrupted) } else { Ok(()) }
}

fn prompt_text(args: &GenerateArgs) -> Result<String, CliError> {
    if let Some(path) = &args.file {
        return options::read_text(path);
    }
    match &args.prompt {
        Some(text) => Ok(text.clone()),
        None if Source::of(args.model.model.as_ref()).is_demo() => Ok(DEMO_PROMPT.to_owned()),
        None => Err(CliError::NoPrompt),
    }
}

fn prompt_ids(args: &GenerateArgs, loaded: &Loaded, text: &str) -> Result<Vec<TokenId>, CliError> {
    let tokenizer = loaded.model.tokenizer();
    if !args.chat {
        // As llama.cpp does: whoever types a raw prompt may type control tokens.
        return Ok(options::encode(tokenizer, text, true, loaded.source.is_demo())?);
    }
    let template = match loaded.model.chat_template() {
        None => return Err(CliError::NoChatTemplate),
        Some(Err(error)) => return Err(CliError::BrokenChatTemplate { reason: error.to_string() }),
        Some(Ok(template)) => template,
    };
    let mut messages = Vec::new();
    messages.extend(args.system.as_ref().map(|text| Message::new("system", text)));
    messages.push(Message::new("user", text));
    let token_text = |id: Option<TokenId>| {
        let bytes = id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    let prompt = template.render_parts(&ChatInput {
        messages: &messages,
        add_generation_prompt: true,
        bos_token: &token_text(tokenizer.bos()),
        eos_token: &token_text(tokenizer.eos()),
        ..ChatInput::default()
    })?;
    Ok(tokenizer.encode_parts(&prompt.parts, true)?)
}

/// A token that the first Ctrl-C sets; the second one ends the program.
pub(crate) fn cancel_on_ctrl_c() -> Result<CancelToken, CliError> {
    let cancel = CancelToken::new();
    let pressed = cancel.clone();
    ctrlc::set_handler(move || {
        if pressed.is_cancelled() {
            std::process::exit(i32::from(CliError::Interrupted.exit_code()));
        }
        pressed.cancel();
    })
    .map_err(CliError::Signal)?;
    Ok(cancel)
}

fn say_summary(stats: SessionStats, seed: Option<u64>) {
    let speed = |name: &str, phase: &PhaseStats| {
        format!("{name}: {} tokens, {:.1} tok/s", phase.tokens, phase.tok_s())
    };
    say("");
    say(&speed("prefill", &stats.prefill));
    if stats.decode.tokens > 0 {
        let phase = &stats.decode;
        say(&format!(
            "{}, {} per token, neurons active {}, fired {}",
            speed("decode", phase),
            bytes(phase.bytes_per_token()),
            percent(phase.active_share()),
            percent(phase.fired_share())
        ));
    }
    if let Some(seed) = seed {
        say(&format!("seed: {seed}"));
    }
}

fn describe(
    reason: &FinishReason,
    n_generated: usize,
    max_tokens: Option<usize>,
    tokenizer: &Tokenizer,
) -> String {
    match reason {
        FinishReason::EndOfGeneration(id) => {
            let text = tokenizer.token_text(*id).unwrap_or_default();
            format!("end-of-text token {id} `{}` after {n_generated} tokens", String::from_utf8_lossy(text))
        }
        FinishReason::Stop(text) => format!("stop text {text:?} after {n_generated} tokens"),
        FinishReason::Length if max_tokens == Some(n_generated) => {
            format!("{n_generated} tokens, as asked for")
        }
        FinishReason::Length => format!("the context is full after {n_generated} tokens"),
        FinishReason::Cancelled => format!("interrupted after {n_generated} tokens"),
        FinishReason::Failed => format!("failed after {n_generated} tokens"),
    }
}
