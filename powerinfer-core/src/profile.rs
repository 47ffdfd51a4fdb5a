//! How often the neurons of a model fire on some text.

use powerinfer_predictor::{ActivationCounts, PredictorError, ShareHistogram};
use powerinfer_sparse_ops::{ActiveMode, LayerId, ModelSpec, TokenId};

use crate::forward::Forward;
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
    /// Neurons of the model move while it runs, by the same counts.
    #[error(
        "neurons of this model move by how often they fire: load it without adaptive placement to profile it"
    )]
    Adaptive,
    /// Counts that cannot be stored.
    #[error(transparent)]
    Counts(#[from] PredictorError),
}

/// What fired in the steps of one session.
#[derive(Debug)]
pub(crate) struct Fired {
    /// For how many tokens each neuron, `[n_layer][n_ff]`.
    by_neuron: Vec<Vec<u64>>,
    /// For how many tokens which share of a layer, `[n_layer]`; `None` if a backend only knows sums over tokens.
    histograms: Option<Vec<ShareHistogram>>,
    /// The backend that counts nothing, if there is one.
    silent: Option<String>,
    /// How many neurons fired for each token of a step.
    by_row: Vec<u32>,
}

impl Fired {
    pub(crate) fn new(spec: &ModelSpec) -> Self {
        Self {
            by_neuron: spec.n_ff.iter().map(|&n_ff| vec![0; n_ff]).collect(),
            histograms: Some(vec![ShareHistogram::new(); spec.n_layer]),
            silent: None,
            by_row: Vec::new(),
        }
    }

    /// Adds what the owners of neurons counted in a step of `n_rows` tokens.
    pub(crate) fn add_step(&mut self, forward: &mut Forward, n_rows: usize) {
        for (layer, counts) in (0..).map(LayerId).zip(&mut self.by_neuron) {
            self.by_row.clear();
            self.by_row.resize(n_rows, 0);
            let mut knows_rows = true;
            for backend in forward.owners(layer) {
                if !backend.take_fired(layer, counts) {
                    self.silent = Some(backend.info().name);
                }
                knows_rows &= backend.take_fired_by_row(layer, &mut self.by_row);
            }
            match &mut self.histograms {
                Some(histograms) if knows_rows => {
                    let histogram = &mut histograms[layer.index()];
                    self.by_row.iter().for_each(|&n_fired| histogram.add(n_fired as usize, counts.len()));
                }
                _ => self.histograms = None,
            }
        }
    }
}

/// Runs texts through the model in mode `exact` and counts for how many tokens each neuron had a hidden value other than
/// zero, and for how many tokens which share of a layer had. Texts are cut into sequences, which are taken from all of
/// them in turn. `progress` gets the tokens done and the tokens in all.
///
/// Only what this call computes is counted: other sessions of the model may go on meanwhile, in any mode, and several
/// profiles may be made at once. Where a backend knows only sums over tokens, there are no histograms.
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
    if model.is_adaptive() {
        return Err(ProfileError::Adaptive);
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
    session.count_fired();
    let mut done = 0;
    sequences.iter().try_for_each(|tokens| {
        session.rewind(0)?;
        session.prefill_with(tokens, cancel, |n| progress(done + n, total))?;
        done += tokens.len();
        Ok::<(), SessionError>(())
    })?;
    let fired = session.take_fired().expect("counting began above");
    if let Some(backend) = fired.silent {
        return Err(ProfileError::NotCounted { backend });
    }
    let counts = ActivationCounts::new(total as u64, fired.by_neuron)?;
    Ok(match fired.histograms {
        Some(histograms) => counts.with_histograms(histograms)?,
        None => counts,
    })
}
