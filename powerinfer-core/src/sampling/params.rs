//! The settings of a sampler.

use powerinfer_sparse_ops::TokenId;
use serde::{Deserialize, Serialize};

use super::SamplingError;

/// Longest penalty window, in tokens: past any context we run, and 4 MiB of ids at most.
pub const MAX_REPEAT_LAST_N: usize = 1 << 20;

/// Which version of mirostat replaces the cuts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mirostat {
    /// No mirostat: the ordinary chain of cuts.
    #[default]
    Off,
    /// The paper's first algorithm: estimate a Zipf exponent, derive k, keep the k most probable.
    V1,
    /// The simpler second one: drop every token whose surprise exceeds the running limit.
    V2,
}

/// How a token is picked from logits. A plain value: build it, keep it, send it as JSON.
///
/// A default value samples; [`SamplingParams::greedy`] never does. Nothing is checked until
/// [`validate`](Self::validate) or [`Sampler::new`](super::Sampler::new).
///
/// ```
/// use powerinfer_core::sampling::{Sampler, SamplingParams};
///
/// let params = SamplingParams::default().temperature(0.7).top_k(20).seed(42);
/// let mut sampler = Sampler::new(params, 3)?;
/// let token = sampler.sample(&[0.1, 2.0, -1.0])?;
/// sampler.accept(token)?;
/// # Ok::<(), powerinfer_core::sampling::SamplingError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// Divisor of the logits before the draw; default 0.8. At 0 the most probable token is taken, ties
    /// to the lowest id, and no cut, mirostat or random number plays a part.
    pub temperature: f32,
    /// Keep the `top_k` most probable tokens; default 40, 0 is off.
    pub top_k: usize,
    /// Keep the smallest set of most probable tokens that holds this share of the probability;
    /// default 0.95, 1 is off, 0 keeps one token.
    pub top_p: f32,
    /// Drop tokens less probable than this share of the most probable one; default 0.05, 0 is off.
    pub min_p: f32,
    /// Keep the tokens whose surprise is nearest to the entropy, until they hold this share of the
    /// probability; default 1, which is off; 0 keeps one token.
    pub typical: f32,
    /// The three penalties look at this many tokens, the latest ones accepted; default 64, 0 turns the
    /// penalties off.
    pub repeat_last_n: usize,
    /// A logit above zero is divided by this, one below is multiplied, once for each distinct token in
    /// the window; default 1, which is off.
    pub repeat_penalty: f32,
    /// Taken from the logit once per occurrence in the window; default 0, which is off.
    pub frequency_penalty: f32,
    /// Taken from the logit once if the token is in the window at all; default 0, which is off.
    pub presence_penalty: f32,
    /// Added to the logits before anything else; default empty. Negative infinity forbids a token. The
    /// entries of one token add up. In JSON a list of `[id, bias]`, where a bias of `null` forbids.
    #[serde(with = "bias_list")]
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Mirostat instead of the four cuts; default off.
    pub mirostat: Mirostat,
    /// Surprise that mirostat aims at, in bits per token; default 5.
    pub mirostat_tau: f32,
    /// Share of the error that mirostat corrects per token; default 0.1.
    pub mirostat_eta: f32,
    /// Seed of the random numbers; default none, which takes one from the operating system. The seed in
    /// use can be read back with [`Sampler::seed`](super::Sampler::seed).
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical: 1.0,
            repeat_last_n: 64,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            mirostat: Mirostat::Off,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            seed: None,
        }
    }
}

impl SamplingParams {
    /// Always the most probable token, ties to the lowest id: the same text every time.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Every cut and penalty off and temperature 1: draws from the model's own distribution.
    pub fn unfiltered() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..Self::default() }
    }

    /// Sets [`temperature`](Self#structfield.temperature).
    #[must_use]
    pub fn temperature(self, temperature: f32) -> Self {
        Self { temperature, ..self }
    }

    /// Sets [`top_k`](Self#structfield.top_k).
    #[must_use]
    pub fn top_k(self, top_k: usize) -> Self {
        Self { top_k, ..self }
    }

    /// Sets [`top_p`](Self#structfield.top_p).
    #[must_use]
    pub fn top_p(self, top_p: f32) -> Self {
        Self { top_p, ..self }
    }

    /// Sets [`min_p`](Self#structfield.min_p).
    #[must_use]
    pub fn min_p(self, min_p: f32) -> Self {
        Self { min_p, ..self }
    }

    /// Sets [`typical`](Self#structfield.typical).
    #[must_use]
    pub fn typical(self, typical: f32) -> Self {
        Self { typical, ..self }
    }

    /// Sets [`repeat_last_n`](Self#structfield.repeat_last_n).
    #[must_use]
    pub fn repeat_last_n(self, repeat_last_n: usize) -> Self {
        Self { repeat_last_n, ..self }
    }

    /// Sets [`repeat_penalty`](Self#structfield.repeat_penalty).
    #[must_use]
    pub fn repeat_penalty(self, repeat_penalty: f32) -> Self {
        Self { repeat_penalty, ..self }
    }

    /// Sets [`frequency_penalty`](Self#structfield.frequency_penalty).
    #[must_use]
    pub fn frequency_penalty(self, frequency_penalty: f32) -> Self {
        Self { frequency_penalty, ..self }
    }

    /// Sets [`presence_penalty`](Self#structfield.presence_penalty).
    #[must_use]
    pub fn presence_penalty(self, presence_penalty: f32) -> Self {
        Self { presence_penalty, ..self }
    }

    /// Adds one entry to [`logit_bias`](Self#structfield.logit_bias).
    #[must_use]
    pub fn logit_bias(mut self, token: TokenId, bias: f32) -> Self {
        self.logit_bias.push((token, bias));
        self
    }

    /// Sets [`mirostat`](Self#structfield.mirostat) with its target surprise in bits and its rate.
    #[must_use]
    pub fn mirostat(self, version: Mirostat, tau: f32, eta: f32) -> Self {
        Self { mirostat: version, mirostat_tau: tau, mirostat_eta: eta, ..self }
    }

    /// Sets [`seed`](Self#structfield.seed).
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Whether any of the three penalties can change a logit.
    pub fn penalizes(&self) -> bool {
        self.repeat_last_n > 0
            && (self.repeat_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0)
    }

    /// Checks every setting against its range, and the biases against the vocabulary.
    ///
    /// # Errors
    ///
    /// [`SamplingError::VocabularySize`] when `n_vocab` is 0 or beyond 32-bit ids;
    /// [`SamplingError::SettingRange`] for a NaN, infinite or out-of-range number;
    /// [`SamplingError::WindowTooLong`] past [`MAX_REPEAT_LAST_N`];
    /// [`SamplingError::BiasToken`] and [`SamplingError::BiasValue`] for a bad bias.
    pub fn validate(&self, n_vocab: usize) -> Result<(), SamplingError> {
        if n_vocab == 0 || u32::try_from(n_vocab).is_err() {
            return Err(SamplingError::VocabularySize { n_vocab });
        }
        for (name, value) in [("top_p", self.top_p), ("min_p", self.min_p), ("typical", self.typical)] {
            check((0.0..=1.0).contains(&value), name, "0 to 1", value)?;
        }
        for (name, value) in [
            ("temperature", self.temperature),
            ("mirostat_tau", self.mirostat_tau),
            ("mirostat_eta", self.mirostat_eta),
        ] {
            check(value.is_finite() && value >= 0.0, name, "a finite number, 0 or more", value)?;
        }
        let repeat = self.repeat_penalty;
        check(repeat.is_finite() && repeat > 0.0, "repeat_penalty", "a finite number above 0", repeat)?;
        for (name, value) in
            [("frequency_penalty", self.frequency_penalty), ("presence_penalty", self.presence_penalty)]
        {
            check(value.is_finite(), name, "a finite number", value)?;
        }
        if self.repeat_last_n > MAX_REPEAT_LAST_N {
            return Err(SamplingError::WindowTooLong { got: self.repeat_last_n, limit: MAX_REPEAT_LAST_N });
        }
        for &(token, bias) in &self.logit_bias {
            if token.index() >= n_vocab {
                return Err(SamplingError::BiasToken { token, n_vocab });
            }
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(SamplingError::BiasValue { token, got: bias });
            }
        }
        Ok(())
    }
}

fn check(ok: bool, name: &'static str, expected: &'static str, got: f32) -> Result<(), SamplingError> {
    if ok { Ok(()) } else { Err(SamplingError::SettingRange { name, expected, got: got.into() }) }
}

/// The bias list as `[[id, bias], ...]`. JSON has no infinity, so negative infinity travels as `null`.
mod bias_list {
    use powerinfer_sparse_ops::TokenId;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        list: &[(TokenId, f32)],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let banned = |bias: f32| bias == f32::NEG_INFINITY;
        serializer.collect_seq(list.iter().map(|&(token, bias)| (token.0, (!banned(bias)).then_some(bias))))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<(TokenId, f32)>, D::Error> {
        let list = Vec::<(u32, Option<f32>)>::deserialize(deserializer)?;
        Ok(list.into_iter().map(|(id, bias)| (TokenId(id), bias.unwrap_or(f32::NEG_INFINITY))).collect())
    }
}
