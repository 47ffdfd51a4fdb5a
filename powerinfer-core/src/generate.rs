//! From a prompt to streamed text.

use powerinfer_sparse_ops::TokenId;

use crate::sampling::{Sampler, SamplingError, SamplingParams};
use crate::session::{CancelToken, Session, SessionError};
use crate::text::{TextError, TextStream};

/// What to generate and when to stop.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// How a token is chosen.
    pub sampling: SamplingParams,
    /// Tokens to generate at most; `None` is until the context is full.
    pub max_tokens: Option<usize>,
    /// Texts that end the generation and are not part of the result.
    pub stop: Vec<String>,
    /// Go on after end-of-generation tokens.
    pub ignore_end: bool,
    /// Print the text of control tokens instead of nothing.
    pub show_special: bool,
    /// Stops the generation from another thread.
    pub cancel: CancelToken,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its text with this token.
    EndOfGeneration(TokenId),
    /// A stop string appeared.
    Stop(String),
    /// `max_tokens` or the context length was reached.
    Length,
    /// The cancel token was set.
    Cancelled,
    /// An error was returned in the place of a piece.
    Failed,
}

/// Why a generation cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The session refused the tokens.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Bad parameters, or logits nothing can be chosen from.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// An empty stop string.
    #[error(transparent)]
    Stop(#[from] TextError),
}

/// A piece of generated text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The token it came with; `None` for text that was held back until the end.
    pub token: Option<TokenId>,
    /// Complete characters only; empty while a character or a possible stop string is incomplete.
    pub text: String,
}

/// A running generation: an iterator over pieces of text. Between two calls of `next` nothing runs.
///
/// The last chosen token is given out but not added to the session's context, since nothing follows it.
#[derive(Debug)]
pub struct Generation<'s> {
    session: &'s mut Session,
    sampler: Sampler,
    text: TextStream,
    options: GenerateOptions,
    /// Chosen, but not yet in the context.
    next: Option<TokenId>,
    n_generated: usize,
    finish: Option<FinishReason>,
}

impl Session {
    /// Feeds `prompt` and generates from there. Penalties count the prompt's tokens as well.
    ///
    /// With `k` free places left after the prompt at most `k + 1` tokens come out, since the last one needs no
    /// place; then the reason is [`FinishReason::Length`].
    ///
    /// # Errors
    /// Before any work: bad sampling parameters, an empty stop string, a prompt that is empty or does not fit.
    pub fn generate(
        &mut self,
        prompt: &[TokenId],
        options: GenerateOptions,
    ) -> Result<Generation<'_>, GenerateError> {
        let model = self.model();
        // Rows of the embedding beyond the vocabulary are padding, for prompts as well.
        let n_vocab = model.tokenizer().n_vocab();
        for tokens in [self.tokens(), prompt] {
            if let Some(place) = tokens.iter().position(|t| t.index() >= n_vocab) {
                return Err(SessionError::UnknownToken { place, id: tokens[place], n_vocab }.into());
            }
        }
        let mut sampler = Sampler::new(options.sampling.clone(), model.tokenizer().n_vocab())?;
        let text = TextStream::new(options.stop.iter().cloned())?;
        self.prefill_with(prompt, &options.cancel, |_| ())?;
        for &token in self.tokens() {
            sampler.accept(token)?;
        }
        Ok(Generation { session: self, sampler, text, options, next: None, n_generated: 0, finish: None })
    }
}

impl Generation<'_> {
    /// Why the generation ended; `None` while it has not.
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.finish.as_ref()
    }

    /// Tokens generated so far, an end-of-generation token not counted.
    pub fn n_generated(&self) -> usize {
        self.n_generated
    }

    /// The seed of the random numbers, whoever chose it.
    pub fn seed(&self) -> u64 {
        self.sampler.seed()
    }

    /// The session, to look at.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// Collects the rest of the text.
    ///
    /// # Errors
    /// The first error of the generation.
    pub fn into_text(mut self) -> Result<String, GenerateError> {
        let mut text = String::new();
        for piece in &mut self {
            text.push_str(&piece?.text);
        }
        Ok(text)
    }

    fn end(&mut self, reason: FinishReason, token: Option<TokenId>, mut text: String) -> Option<Piece> {
        // Held-back text is part of the result now; after a stop string there is none.
        text.push_str(self.text.finish().text);
        self.finish = Some(reason);
        (token.is_some() || !text.is_empty()).then_some(Piece { token, text })
    }

    fn advance(&mut self) -> Result<Option<Piece>, GenerateError> {
        if self.options.cancel.is_cancelled() {
            return Ok(self.end(FinishReason::Cancelled, None, String::new()));
        }
        if self.options.max_tokens == Some(self.n_generated) {
            return Ok(self.end(FinishReason::Length, None, String::new()));
        }
        if let Some(token) = self.next.take() {
            self.session.decode(token)?;
        }
        let model = self.session.model();
        let tokenizer = model.tokenizer();
        // Rows of the embedding beyond the vocabulary are padding and never chosen.
        let token = self.sampler.sample(&self.session.logits()[..tokenizer.n_vocab()])?;
        if tokenizer.is_end_of_generation(token) && !self.options.ignore_end {
            return Ok(self.end(FinishReason::EndOfGeneration(token), None, String::new()));
        }
        self.sampler.accept(token)?;
        self.n_generated += 1;
        let event =
            self.text.push(tokenizer.token_bytes(token, self.options.show_special).unwrap_or_default());
        let (text, stopped) = (event.text.to_owned(), event.stopped);
        if let Some(stop) = stopped {
            return Ok(self.end(FinishReason::Stop(self.options.stop[stop].clone()), Some(token), text));
        }
        let full = self.session.tokens().len() == self.session.n_ctx();
        if full || self.options.max_tokens == Some(self.n_generated) {
            return Ok(self.end(FinishReason::Length, Some(token), text));
        }
        self.next = Some(token);
        Ok(Some(Piece { token: Some(token), text }))
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Piece, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finish.is_some() {
            return None;
        }
        let result = self.advance();
        if result.is_err() {
            self.finish = Some(FinishReason::Failed);
        }
        result.transpose()
    }
}
