//! Chat templates from model files.
//!
//! A model is trained on conversations written out in one particular way, and its file says how in a Jinja template.
//! [`ChatTemplate::render`] gives the prompt as text; [`ChatTemplate::render_parts`] also says which stretches were
//! written by the participants, so that control tokens forged in them stay plain text:
//! `Tokenizer::encode_parts` takes its result.
//!
//! A template is a program from a stranger. It sees nothing but the conversation, loads nothing, and stops when it has
//! used up its fuel or written too much.
//!
//! Beside plain Jinja there are: Python's methods of strings, lists and dictionaries; `break` and `continue`;
//! `{% generation %}` blocks; `raise_exception`, `strftime_now` (in UTC) and `namespace`; `tojson` as Python's
//! `json.dumps` writes it. Blocks swallow the newline behind them and the blanks before them. Not there: `%` formatting
//! of strings, `include`, `import`, and strftime's locale-dependent forms.
//!
//! ```
//! use powerinfer_core::chat::{ChatInput, ChatTemplate, Message};
//!
//! let template = ChatTemplate::parse("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}")?;
//! let messages = [Message::new("user", " Hello ")];
//! let input = ChatInput { messages: &messages, ..ChatInput::default() };
//! assert_eq!(template.render(&input)?, "<user>Hello");
//! # Ok::<(), powerinfer_core::chat::ChatError>(())
//! ```

mod date;
mod nesting;
mod parts;
mod python;
#[cfg(test)]
mod tests;

pub use crate::tokenizer::Part;
pub use parts::Prompt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};
use serde::{Deserialize, Serialize};
use std::error::Error as _;
use std::io::{self, Write};
use std::thread;
use std::time::SystemTime;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks, for example `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What is said: text, a list of parts, or null where there are only tool calls.
    #[serde(default)]
    pub content: serde_json::Value,
    /// Whatever else the template may look at: `name`, `tool_calls`, `reasoning_content` and so on.
    #[serde(flatten)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into().into(), extra: serde_json::Map::new() }
    }
}

/// What a template is rendered with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatInput<'a> {
    /// The conversation so far.
    pub messages: &'a [Message],
    /// Whether the answer comes next, so that the prompt ends with its beginning.
    pub add_generation_prompt: bool,
    /// Text of the token that begins a prompt, empty if there is none.
    pub bos_token: &'a str,
    /// Text of the token that ends a message, empty if there is none.
    pub eos_token: &'a str,
    /// More variables: `tools`, `documents`, `enable_thinking` and so on. They override the ones above.
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// The time that `strftime_now` tells; the present if `None`.
    pub now: Option<SystemTime>,
}

/// Bounds on what a template may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatLimits {
    /// Work: one for each instruction and for each 64 bytes of text made on the way.
    pub fuel: u64,
    /// Longest prompt.
    pub max_output_bytes: usize,
}

impl Default for ChatLimits {
    /// Room for a prompt of 16 MiB and some thousand messages; well under a second of work.
    fn default() -> Self {
        Self { fuel: 5_000_000, max_output_bytes: 16 << 20 }
    }
}

/// Why a template cannot be used, or a conversation not be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template is not well-formed.
    #[error("chat template, line {line}: {detail}")]
    Syntax {
        /// Line of the template, from 1.
        line: usize,
        /// What is wrong.
        detail: String,
        /// The template engine's error.
        source: minijinja::Error,
    },
    /// The template is nested so deeply that parsing it could overflow the stack.
    #[error("chat template, line {line}: more than {limit} {what}")]
    TooComplex {
        /// Line of the template, from 1.
        line: usize,
        /// What there is too much of.
        what: &'static str,
        /// The most that is accepted.
        limit: usize,
    },
    /// The template uses a filter, test or function that does not exist here.
    #[error("chat template, line {line}: not supported: {detail}")]
    Unsupported {
        /// Line of the template, from 1.
        line: usize,
        /// What is missing.
        detail: String,
        /// The template engine's error.
        source: minijinja::Error,
    },
    /// The template refused the conversation by `raise_exception`.
    #[error("the chat template refuses this conversation: {message}")]
    Raised {
        /// The template's own words.
        message: String,
    },
    /// The template did more work than allowed.
    #[error("the chat template used up its {fuel} units of work")]
    OutOfFuel {
        /// The limit.
        fuel: u64,
    },
    /// The prompt became longer than allowed.
    #[error("the chat template wrote more than {limit_bytes} bytes")]
    OutputTooLong {
        /// The limit.
        limit_bytes: usize,
    },
    /// The thread that a template is rendered on cannot be started.
    #[error("cannot start a thread to render the chat template")]
    Thread(#[source] io::Error),
    /// The template failed on this conversation.
    #[error("chat template, line {line}: {detail}")]
    Render {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// What went wrong.
        detail: String,
        /// The template engine's error.
        source: minijinja::Error,
    },
}

const NAME: &str = "chat";

/// Work of the trial at load. The longest published templates take about a hundredth of it for one message.
const TRIAL_FUEL: u64 = 50_000;

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    limits: ChatLimits,
}

impl ChatTemplate {
    /// Parses a template, with the default limits.
    ///
    /// # Errors
    ///
    /// See [`ChatTemplate::parse_with`].
    pub fn parse(source: &str) -> Result<Self, ChatError> {
        Self::parse_with(source, ChatLimits::default())
    }

    /// Parses a template and tries it on a small conversation, so that what is missing shows at load.
    ///
    /// # Errors
    ///
    /// [`ChatError::Syntax`], [`ChatError::TooComplex`] and [`ChatError::Unsupported`], with the line. A template may hide a call of something
    /// unsupported where the small conversation does not reach; rendering then gives the same error.
    pub fn parse_with(source: &str, limits: ChatLimits) -> Result<Self, ChatError> {
        let mut env = Environment::new();
        env.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .expect("the usual delimiters are fine"),
        );
        env.set_undefined_behavior(UndefinedBehavior::Lenient);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_fuel(Some(limits.fuel));
        env.set_recursion_limit(nesting::MAX_RECURSION);
        // Otherwise errors keep the template's values and drop them on the caller's stack.
        env.set_debug(false);
        python::add_to(&mut env);
        let source = python::prepare(source).map_err(|python::TooComplex { line, what, limit }| {
            ChatError::TooComplex { line, what, limit }
        })?;
        env.add_template_owned(NAME, source).map_err(|error| ChatError::Syntax {
            line: error.line().unwrap_or(1),
            detail: detail(&error),
            source: error,
        })?;
        let template = Self { env, limits };
        let trial = ChatInput {
            messages: &[Message::new("user", "Hello")],
            add_generation_prompt: true,
            ..ChatInput::default()
        };
        match template.render_with(&trial, limits.fuel.min(TRIAL_FUEL)) {
            Err(error @ (ChatError::Unsupported { .. } | ChatError::Thread(_))) => Err(error),
            // A template may well refuse or fail on a conversation that it was not made for.
            _ => Ok(template),
        }
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    ///
    /// [`ChatError::Raised`] if the template refuses the conversation, other [`ChatError`]s if it fails.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, ChatError> {
        self.render_with(input, self.limits.fuel)
    }

    /// Renders on a stack that holds the deepest value that a template can build; see [`nesting`].
    fn render_with(&self, input: &ChatInput<'_>, fuel: u64) -> Result<String, ChatError> {
        let thread = thread::Builder::new().name("chat-template".to_owned()).stack_size(nesting::STACK_BYTES);
        thread::scope(|scope| {
            let rendering =
                thread.spawn_scoped(scope, || self.render_here(input, fuel)).map_err(ChatError::Thread)?;
            rendering.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn render_here(&self, input: &ChatInput<'_>, fuel: u64) -> Result<String, ChatError> {
        let mut env = self.env.clone();
        env.set_fuel(Some(fuel));
        let now = input.now.unwrap_or_else(SystemTime::now);
        env.add_function("strftime_now", move |format: &str| date::strftime(format, now));
        let template = env.get_template(NAME).expect("the template was added when it was parsed");
        let mut out = Capped { bytes: Vec::new(), limit: self.limits.max_output_bytes, exceeded: false };
        let rendered = template.render_captured_to(context(input), &mut out).map(drop);
        match rendered {
            Ok(()) => Ok(String::from_utf8(out.bytes).expect("templates write UTF-8")),
            Err(_) if out.exceeded => Err(ChatError::OutputTooLong { limit_bytes: out.limit }),
            Err(error) => Err(render_error(error, fuel)),
        }
    }
}

fn render_error(error: minijinja::Error, fuel: u64) -> ChatError {
    let mut cause = Some(&error as &(dyn std::error::Error + 'static));
    while let Some(current) = cause {
        if let Some(python::Raised(message)) = current.downcast_ref() {
            return ChatError::Raised { message: message.clone() };
        }
        cause = current.source();
    }
    let root = root_cause(&error);
    let line = root.line().or_else(|| error.line()).unwrap_or(0);
    match root.kind() {
        ErrorKind::OutOfFuel => ChatError::OutOfFuel { fuel },
        ErrorKind::UnknownFilter | ErrorKind::UnknownTest | ErrorKind::UnknownFunction => {
            ChatError::Unsupported { line, detail: detail(root), source: error }
        }
        _ => ChatError::Render { line, detail: detail(root), source: error },
    }
}

/// The innermost error of the template engine.
fn root_cause(error: &minijinja::Error) -> &minijinja::Error {
    let mut root = error;
    while let Some(inner) = root.source().and_then(|source| source.downcast_ref()) {
        root = inner;
    }
    root
}

fn detail(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// The variables that the Python library passes to every template, and the caller's own.
fn context(input: &ChatInput<'_>) -> Value {
    let fixed = [
        ("messages", Value::from(Serde(input.messages))),
        ("add_generation_prompt", Value::from(input.add_generation_prompt)),
        ("bos_token", Value::from(input.bos_token)),
        ("eos_token", Value::from(input.eos_token)),
        ("tools", Value::from(())),
        ("documents", Value::from(())),
    ];
    let extra = input.extra.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
    Value::from_pairs(fixed.into_iter().chain(extra))
}

/// Output that ends with an error at its limit.
struct Capped {
    bytes: Vec<u8>,
    limit: usize,
    exceeded: bool,
}

impl Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.bytes.len() {
            self.exceeded = true;
            return Err(io::Error::other("the output is at its limit"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
