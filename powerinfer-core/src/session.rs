//! Sessions: one text each, over shared weights.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use powerinfer_sparse_ops::{
    ActiveMode, BackendError, FfnInput, LayerId, ModelSpec, SeqId, Step, StepCost, StepRow, TokenId,
};

use crate::forward::{Forward, Probe, Watch};
use crate::model::Shared;
use crate::profile::Fired;
use crate::stats::SessionStats;

/// Why a session cannot go on. The session stays usable after each of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The tokens do not fit; nothing was computed.
    #[error("{n_tokens} more tokens do not fit: the context holds {n_ctx}, {used} are used")]
    ContextFull {
        /// Tokens that were to be added.
        n_tokens: usize,
        /// Tokens in the context.
        used: usize,
        /// Context length.
        n_ctx: usize,
    },
    /// A context longer than the model's table of learned positions, or of no position at all.
    #[error("a context of {n_ctx} is not possible: the model has {limit} positions")]
    ContextLength {
        /// Asked for.
        n_ctx: usize,
        /// What the model has.
        limit: usize,
    },
    /// A token id that the vocabulary does not have; nothing was computed.
    #[error("token {id} at place {place} is not in the vocabulary of {n_vocab}")]
    UnknownToken {
        /// Place in the given tokens.
        place: usize,
        /// The id.
        id: TokenId,
        /// Vocabulary size.
        n_vocab: usize,
    },
    /// No token was given where logits are asked for.
    #[error("an empty prompt has no next token: give at least one, such as the beginning-of-text id")]
    NoTokens,
    /// The cancel token was set; the first `done` tokens are in the context.
    #[error("cancelled after {done} of {total} tokens")]
    Cancelled {
        /// Tokens that went through.
        done: usize,
        /// Tokens that were given.
        total: usize,
    },
    /// The model computed a value that is no number.
    #[error("logit {id} at position {position} is {value}; the weights or the context are broken")]
    NonFinite {
        /// Position whose logits are broken.
        position: usize,
        /// First broken logit.
        id: TokenId,
        /// Its value.
        value: f32,
    },
    /// A rewind to a length the session never had.
    #[error("cannot rewind to {to} tokens, the context has {len}")]
    Rewind {
        /// Wanted length.
        to: usize,
        /// Length.
        len: usize,
    },
    /// Mode `predictor` for a model without predictors.
    #[error("mode predictor needs a model with predictors")]
    NoPredictors,
    /// A backend has no room for the sequence.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Stops work from another thread: between tokens of a generation, between chunks of a prompt.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the work to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether [`CancelToken::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// How a session is set up.
#[derive(Clone, Debug, Default)]
pub struct SessionOptions {
    /// Context length in tokens; `None` is the model's own, at most 4096.
    pub n_ctx: Option<usize>,
    /// Which neurons are computed; `None` is the model's default (see [`crate::Model::default_mode`]).
    pub mode: Option<ActiveMode>,
}

/// Context length of a session that asks for none.
pub(crate) fn default_context(spec: &ModelSpec) -> usize {
    spec.n_ctx_train.min(4096)
}

/// What the sessions of a model share and take turns with.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) forward: Forward,
    next_seq: u32,
    rows: Vec<StepRow>,
    max_rows: usize,
}

impl Engine {
    pub(crate) fn new(forward: Forward, max_rows: usize) -> Self {
        Self { forward, next_seq: 0, rows: Vec::with_capacity(max_rows), max_rows }
    }

    fn new_sequence(&mut self, n_ctx: usize) -> Result<SeqId, BackendError> {
        let seq = SeqId(self.next_seq);
        for backend in self.forward.used() {
            backend.reserve(seq, n_ctx, self.max_rows)?;
        }
        self.next_seq += 1;
        Ok(seq)
    }

    fn release(&mut self, seq: SeqId) {
        for backend in self.forward.used() {
            backend.release(seq);
        }
    }
}

/// One text: its tokens, its KV cache, its statistics. Cheap next to the weights, which sessions share. Steps
/// of different sessions run one at a time, in no promised order.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
    seq: SeqId,
    n_ctx: usize,
    mode: ActiveMode,
    tokens: Vec<TokenId>,
    logits: Vec<f32>,
    stats: SessionStats,
    /// What fired in the steps of this session; `None` unless that is counted.
    fired: Option<Box<Fired>>,
}

impl Session {
    pub(crate) fn new(shared: Arc<Shared>, options: &SessionOptions) -> Result<Self, SessionError> {
        let n_ctx = options.n_ctx.unwrap_or_else(|| default_context(&shared.spec));
        let limit = if shared.spec.rope.is_some() { u32::MAX as usize } else { shared.spec.n_ctx_train };
        if n_ctx == 0 || n_ctx > limit {
            return Err(SessionError::ContextLength { n_ctx, limit });
        }
        let seq = shared.engine().new_sequence(n_ctx)?;
        let tokens = match room_for(n_ctx) {
            Ok(tokens) => tokens,
            Err(error) => {
                shared.engine().release(seq);
                return Err(error);
            }
        };
        Ok(Self {
            seq,
            n_ctx,
            mode: options.mode.unwrap_or(shared.default_mode),
            tokens,
            logits: vec![0.0; shared.spec.n_vocab],
            stats: SessionStats::default(),
            fired: None,
            shared,
        })
    }

    /// The tokens in the context.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Context length in tokens.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Which neurons are computed.
    pub fn mode(&self) -> ActiveMode {
        self.mode
    }

    /// Logits after the last token, `[n_vocab]`. Of no meaning before the first token, after
    /// [`Session::rewind`], and after an error, until the next token is added; a fork begins with those of
    /// the session it came from.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// What this session has cost so far.
    pub fn stats(&self) -> SessionStats {
        self.stats
    }

    /// The model this session runs.
    pub fn model(&self) -> crate::Model {
        crate::Model::from_shared(Arc::clone(&self.shared))
    }

    /// Adds tokens to the context, many at a time, and returns the logits after the last.
    ///
    /// # Shapes
    /// The result is `[n_vocab]`.
    ///
    /// # Errors
    /// Before any work: [`SessionError::ContextFull`], [`SessionError::UnknownToken`],
    /// [`SessionError::NoTokens`]. While working: [`SessionError::NonFinite`], after which the context is as
    /// it was.
    pub fn prefill(&mut self, tokens: &[TokenId]) -> Result<&[f32], SessionError> {
        self.prefill_with(tokens, &CancelToken::new(), |_| ())
    }

    /// As [`Session::prefill`], calling `progress` with the number of tokens done after each chunk, and
    /// stopping between chunks when `cancel` is set.
    ///
    /// # Errors
    /// Those of [`Session::prefill`], and [`SessionError::Cancelled`].
    pub fn prefill_with(
        &mut self,
        tokens: &[TokenId],
        cancel: &CancelToken,
        mut progress: impl FnMut(usize),
    ) -> Result<&[f32], SessionError> {
        self.check(tokens)?;
        let before = self.tokens.len();
        for chunk in tokens.chunks(self.shared.n_batch) {
            let done = self.tokens.len() - before;
            if cancel.is_cancelled() {
                return Err(SessionError::Cancelled { done, total: tokens.len() });
            }
            let last = done + chunk.len() == tokens.len();
            let wanted = if last { chunk.len() - 1..chunk.len() } else { 0..0 };
            let (elapsed, cost) = self.step(chunk, wanted, None);
            self.stats.prefill.add(chunk.len(), elapsed, cost);
            progress(done + chunk.len());
        }
        if let Err(error) = self.check_logits() {
            self.tokens.truncate(before);
            return Err(error);
        }
        Ok(&self.logits)
    }

    /// Adds one token and returns the logits after it. Allocates nothing.
    ///
    /// # Errors
    /// Those of [`Session::prefill`].
    pub fn decode(&mut self, token: TokenId) -> Result<&[f32], SessionError> {
        self.check(&[token])?;
        let (elapsed, cost) = self.step(&[token], 0..1, None);
        self.stats.decode.add(1, elapsed, cost);
        if let Err(error) = self.check_logits() {
            self.tokens.pop();
            return Err(error);
        }
        Ok(&self.logits)
    }

    /// Adds tokens and gives the logits after each of them to `each`, with the position of the token.
    ///
    /// # Errors
    /// Those of [`Session::prefill`].
    pub fn evaluate(
        &mut self,
        tokens: &[TokenId],
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), SessionError> {
        self.check(tokens)?;
        // Logits are wide: a few rows at a time bound the buffer, and the head reads its weights once for them.
        const ROWS: usize = 32;
        let n_vocab = self.shared.spec.n_vocab;
        self.logits.resize(ROWS.min(tokens.len()) * n_vocab, 0.0);
        let before = self.tokens.len();
        let mut result = Ok(());
        for chunk in tokens.chunks(ROWS.min(self.shared.n_batch)) {
            let first = self.tokens.len();
            let (elapsed, cost) = self.step(chunk, 0..chunk.len(), None);
            self.stats.prefill.add(chunk.len(), elapsed, cost);
            for (i, row) in self.logits.chunks_exact(n_vocab).take(chunk.len()).enumerate() {
                result = result.and_then(|()| finite(row, first + i));
                if result.is_ok() {
                    each(first + i, row);
                }
            }
            let last = (chunk.len() - 1) * n_vocab;
            self.logits.copy_within(last..last + n_vocab, 0);
            if result.is_err() {
                self.tokens.truncate(before);
                break;
            }
        }
        self.logits.truncate(n_vocab);
        result
    }

    /// As [`Session::prefill`] for at most one chunk of tokens; then shows `probe` the residual stream as it was
    /// after every layer.
    ///
    /// # Errors
    /// Those of [`Session::prefill`].
    ///
    /// # Panics
    /// If there are more tokens than [`crate::Model::n_batch`].
    pub fn trace(&mut self, tokens: &[TokenId], probe: &mut dyn Probe) -> Result<&[f32], SessionError> {
        self.check(tokens)?;
        assert!(tokens.len() <= self.shared.n_batch, "a trace is one step of at most n_batch tokens");
        // Recorded first: foreign code must not run while other sessions wait for the engine.
        let mut record = Record(Vec::with_capacity(self.shared.spec.n_layer));
        let (elapsed, cost) = self.step(tokens, tokens.len() - 1..tokens.len(), Some(&mut record));
        self.stats.prefill.add(tokens.len(), elapsed, cost);
        for (layer, h) in self.shared.spec.layers().zip(&record.0) {
            probe.after_layer(layer, h);
        }
        if let Err(error) = self.check_logits() {
            self.tokens.truncate(self.tokens.len() - tokens.len());
            return Err(error);
        }
        Ok(&self.logits)
    }

    /// Drops the tokens after the first `len`; costs nothing. [`Session::logits`] has no meaning until the
    /// next token is added.
    ///
    /// # Errors
    /// [`SessionError::Rewind`] if there are fewer.
    pub fn rewind(&mut self, len: usize) -> Result<(), SessionError> {
        if len > self.tokens.len() {
            return Err(SessionError::Rewind { to: len, len: self.tokens.len() });
        }
        self.tokens.truncate(len);
        Ok(())
    }

    /// A second session with the same tokens, which goes its own way from here.
    ///
    /// # Errors
    /// [`SessionError::Backend`] if there is no memory for another KV cache.
    pub fn fork(&self) -> Result<Self, SessionError> {
        let mut tokens = room_for(self.n_ctx)?;
        let seq = {
            let mut engine = self.shared.engine();
            let seq = engine.new_sequence(self.n_ctx)?;
            for backend in engine.forward.used() {
                backend.kv_copy(self.seq, seq, 0..self.tokens.len() as u32);
            }
            seq
        };
        tokens.extend_from_slice(&self.tokens);
        Ok(Self {
            shared: Arc::clone(&self.shared),
            seq,
            n_ctx: self.n_ctx,
            mode: self.mode,
            tokens,
            logits: self.logits.clone(),
            stats: SessionStats::default(),
            fired: None,
        })
    }

    /// Everything that can be known before work starts.
    fn check(&self, tokens: &[TokenId]) -> Result<(), SessionError> {
        if tokens.is_empty() {
            return Err(SessionError::NoTokens);
        }
        let n_vocab = self.shared.spec.n_vocab;
        if let Some(place) = tokens.iter().position(|t| t.index() >= n_vocab) {
            return Err(SessionError::UnknownToken { place, id: tokens[place], n_vocab });
        }
        if tokens.len() > self.n_ctx - self.tokens.len() {
            return Err(SessionError::ContextFull {
                n_tokens: tokens.len(),
                used: self.tokens.len(),
                n_ctx: self.n_ctx,
            });
        }
        Ok(())
    }

    /// Begins to count which neurons fire in the steps of this session, and of no other.
    pub(crate) fn count_fired(&mut self) {
        self.fired = Some(Box::new(Fired::new(&self.shared.spec)));
    }

    /// What was counted since the last call of [`Session::count_fired`], and ends counting.
    pub(crate) fn take_fired(&mut self) -> Option<Fired> {
        self.fired.take().map(|fired| *fired)
    }

    /// Adds at most one chunk of tokens with `watch` inside the step, and computes no logits: what is broken in
    /// the model, the watcher must notice.
    ///
    /// # Errors
    /// [`SessionError::ContextFull`], [`SessionError::UnknownToken`], [`SessionError::NoTokens`].
    pub(crate) fn watched(&mut self, tokens: &[TokenId], watch: &mut dyn Watch) -> Result<(), SessionError> {
        self.check(tokens)?;
        assert!(tokens.len() <= self.shared.n_batch, "a watched step has at most n_batch tokens");
        self.step(tokens, 0..0, Some(watch));
        Ok(())
    }

    /// One step of the engine with these tokens; the caller has checked them.
    fn step(
        &mut self,
        tokens: &[TokenId],
        wanted: Range<usize>,
        watch: Option<&mut dyn Watch>,
    ) -> (Duration, StepCost) {
        let n_logits = wanted.len() * self.shared.spec.n_vocab;
        let mut guard = self.shared.engine();
        let engine = &mut *guard;
        let start = Instant::now();
        engine.rows.clear();
        let first = self.tokens.len() as u32;
        engine.rows.extend(tokens.iter().zip(first..).map(|(&token, pos)| StepRow {
            seq: self.seq,
            pos,
            token,
        }));
        let step = Step { rows: &engine.rows, mode: self.mode };
        // Counting begins and ends with each step: those of other sessions, which may come between, are not counted.
        if self.fired.is_some() {
            engine.forward.used().for_each(|backend| backend.record_fired(true));
        }
        engine.forward.run(&step, wanted, &mut self.logits[..n_logits], watch);
        if let Some(fired) = &mut self.fired {
            fired.add_step(&mut engine.forward, tokens.len());
            engine.forward.used().for_each(|backend| backend.record_fired(false));
        }
        let cost = engine.forward.take_cost();
        self.tokens.extend_from_slice(tokens);
        (start.elapsed(), cost)
    }

    fn check_logits(&self) -> Result<(), SessionError> {
        finite(&self.logits, self.tokens.len() - 1)
    }
}

/// An empty list with room for a whole context, so that no step allocates.
fn room_for(n_ctx: usize) -> Result<Vec<TokenId>, SessionError> {
    let mut tokens = Vec::new();
    tokens.try_reserve_exact(n_ctx).map_err(|_| BackendError::OutOfMemory {
        backend: "host".into(),
        what: format!("the ids of {n_ctx} tokens"),
        need_bytes: 4 * n_ctx as u64,
        have_bytes: 0,
    })?;
    Ok(tokens)
}

/// Keeps what a step shows.
struct Record(Vec<Vec<f32>>);

impl Watch for Record {
    fn ffn_input(&mut self, _: LayerId, _: &FfnInput) {}

    fn after_layer(&mut self, _: LayerId, h: &[f32]) {
        self.0.push(h.to_vec());
    }
}

fn finite(logits: &[f32], position: usize) -> Result<(), SessionError> {
    match logits.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(ix) => Err(SessionError::NonFinite { position, id: TokenId(ix as u32), value: logits[ix] }),
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.engine_for_release().release(self.seq);
    }
}
