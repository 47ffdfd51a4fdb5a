//! How often the neurons of a model fire on some text.

use powerinfer_predictor::{ActivationCounts, PredictorError};
use powerinfer_sparse_ops::{ActiveMode, TokenId};

use crate::model::Model;
use crate::session::{CancelToken, SessionError, SessionOptions};

/// What of a text is counted.
#[derive(Clone, Copy, Debug)]
pub struct ProfileOptions {
    /// Tokens that go through the model, at most.
    pub n_tokens: usize,
    /// Tokens of a sequence, each of which begins anew; less if the model or the text is shorter.
    pub sequence_len: usize,
    /// Begins each sequence and counts as one of its tokens.
    pub bos: Option<TokenId>,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self { n_tokens: 4096, sequence_len: 512, bos: None }
    }
}

/// Why a profile failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A session cannot go on.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Nothing is exactly zero, so every neuron fires for every token.
    #[error("activation {activation} has no exact zeros: every neuron fires for every token")]
    NoZeros {
        /// The activation.
        activation: &'static str,
    },
    /// No token of text.
    #[error("the text has no tokens")]
    NoText,
    /// The model runs on something that does not count.
    #[error("{backend} does not count which neurons fire")]
    NotCounted {
        /// Its name.
        backend: String,
    },
    /// Counts that cannot be stored.
    #[error(transparent)]
    Counts(#[from] PredictorError),
}

/// Runs texts through the model in mode `exact` and counts for how many tokens each neuron had a hidden value other than
/// zero. Texts are cut into sequences, which are taken from all of them in turn. `progress` gets the tokens done and the
/// tokens in all. Other sessions of the model must rest meanwhile: what they compute would be counted as well.
///
/// # Errors
/// [`ProfileError`]; [`SessionError::Cancelled`] in it when `cancel` is set.
pub fn profile(
    model: &Model,
    texts: &[Vec<TokenId>],
    options: &ProfileOptions,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<ActivationCounts, ProfileError> {
    let spec = model.spec();
    if !spec.activation.has_exact_zeros() {
        return Err(ProfileError::NoZeros { activation: spec.activation.name() });
    }
    let n_bos = usize::from(options.bos.is_some());
    let len = options.sequence_len.min(spec.n_ctx_train).max(1 + n_bos);
    let pieces: Vec<_> = texts.iter().map(|text| text.chunks(len - n_bos).collect::<Vec<_>>()).collect();
    let longest = pieces.iter().map(Vec::len).max().unwrap_or(0);
    let mut left = options.n_tokens;
    let mut sequences: Vec<Vec<TokenId>> = Vec::new();
    for piece in (0..longest).flat_map(|i| pieces.iter().filter_map(move |text| text.get(i))) {
        let mut tokens: Vec<TokenId> = options.bos.into_iter().chain(piece.iter().copied()).collect();
        tokens.truncate(left);
        left -= tokens.len();
        if tokens.len() > n_bos {
            sequences.push(tokens);
        }
    }
    let total: usize = sequences.iter().map(Vec::len).sum();
    if total == 0 {
        return Err(ProfileError::NoText);
    }
    let options = SessionOptions { n_ctx: Some(len), mode: Some(ActiveMode::Exact) };
    let mut session = model.session(&options)?;
    model.record_fired(true);
    let mut done = 0;
    let run = sequences.iter().try_for_each(|tokens| {
        session.rewind(0)?;
        session.prefill_with(tokens, cancel, |n| progress(done + n, total))?;
        done += tokens.len();
        Ok::<(), SessionError>(())
    });
    let counts = model.take_fired();
    model.record_fired(false);
    run?;
    let counts = counts.map_err(|backend| ProfileError::NotCounted { backend })?;
    Ok(ActivationCounts::new(total as u64, counts)?)
}
