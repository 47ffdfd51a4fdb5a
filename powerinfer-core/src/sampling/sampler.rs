//! The chain itself, with its state.

use std::collections::VecDeque;

use powerinfer_sparse_ops::TokenId;
use rand::rngs::{SysRng, Xoshiro256PlusPlus};
use rand::{Rng, SeedableRng, TryRng};

use super::filter::{self, Candidate};
use super::{Mirostat, SamplingError, SamplingParams};

/// Mirostat 1 estimates the Zipf exponent from this many of the most probable tokens, as the paper does.
const ZIPF_TOKENS: usize = 100;

/// A token with the natural logarithm of its probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// `ln p` under the model: before bias, penalties, cuts and temperature.
    pub logprob: f32,
}

/// Picks tokens for one sequence. Holds its own random numbers, penalty window and mirostat state, so a
/// sequence gives the same text alone and in a batch.
///
/// A clone continues exactly as the original would: same window, same random numbers to come.
///
/// All buffers are reserved by [`Sampler::new`]; [`sample`](Self::sample) and [`accept`](Self::accept) do
/// not allocate. The engine's allocation test covers this; the tests here check that no buffer grows.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    n_vocab: usize,
    seed: u64,
    rng: Xoshiro256PlusPlus,
    /// Mirostat's running limit of surprise, in bits.
    mu: f64,
    /// The latest `repeat_last_n` tokens accepted, oldest first; stays empty when nothing is penalized.
    window: VecDeque<u32>,
    /// The window sorted, to count each distinct token.
    sorted: Vec<u32>,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// Checks the settings and reserves every buffer: 16 bytes per token of the vocabulary.
    ///
    /// # Errors
    ///
    /// Those of [`SamplingParams::validate`]; [`SamplingError::NoSeed`] when no seed is given and the
    /// operating system has none to offer.
    pub fn new(params: SamplingParams, n_vocab: usize) -> Result<Self, SamplingError> {
        params.validate(n_vocab)?;
        let seed = match params.seed {
            Some(seed) => seed,
            None => SysRng.try_next_u64()?,
        };
        let n_window = if params.penalizes() { params.repeat_last_n } else { 0 };
        Ok(Self {
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            mu: initial_mu(&params),
            window: VecDeque::with_capacity(n_window),
            sorted: Vec::with_capacity(n_window),
            candidates: Vec::with_capacity(n_vocab),
            params,
            n_vocab,
            seed,
        })
    }

    /// The settings in use.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The seed in use: the one given, or the one the operating system chose.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Goes back to the state just after [`Sampler::new`]: empty window, first random number.
    pub fn reset(&mut self) {
        self.reseed(self.seed);
        self.mu = initial_mu(&self.params);
        self.window.clear();
    }

    /// Restarts the random numbers from another seed and keeps the rest: for a fork that shall differ.
    pub fn reseed(&mut self, seed: u64) {
        self.seed = seed;
        self.rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    }

    /// Puts a token into the window that the penalties look at.
    ///
    /// [`sample`](Self::sample) does not do this itself: the caller accepts the tokens that become part
    /// of the text. The prompt counts if, and only if, the caller feeds its tokens too.
    ///
    /// # Errors
    ///
    /// [`SamplingError::TokenOutOfRange`] when the token is not in the vocabulary.
    pub fn accept(&mut self, token: TokenId) -> Result<(), SamplingError> {
        self.check_token(token)?;
        if self.params.penalizes() {
            if self.window.len() == self.params.repeat_last_n {
                self.window.pop_front();
            }
            self.window.push_back(token.0);
        }
        Ok(())
    }

    /// Picks the next token by the chain in the [module documentation](super).
    ///
    /// # Shapes
    ///
    /// `logits [n_vocab]`; negative infinity marks an impossible token.
    ///
    /// # Errors
    ///
    /// [`SamplingError::LogitsLength`]; [`SamplingError::BadLogit`] with the first index that is NaN or
    /// positive infinity; [`SamplingError::NoCandidate`] when no token is possible. After an error the
    /// state is as before the call.
    pub fn sample(&mut self, logits: &[f32]) -> Result<TokenId, SamplingError> {
        let best = self.check_logits(logits)?;
        let greedy = self.params.temperature <= 0.0;
        if greedy && self.params.logit_bias.is_empty() && self.window.is_empty() {
            return Ok(best);
        }
        self.candidates.clear();
        self.candidates.extend((0..).zip(logits).map(|(id, &logit)| Candidate { id, logit, p: 0.0 }));
        self.add_bias();
        self.penalize();
        self.candidates.retain(|c| c.logit > f32::NEG_INFINITY);
        if self.candidates.is_empty() {
            return Err(SamplingError::NoCandidate { n_vocab: self.n_vocab });
        }
        if greedy {
            filter::top_k(&mut self.candidates, 1);
            return Ok(TokenId(self.candidates[0].id));
        }
        Ok(match self.params.mirostat {
            Mirostat::Off => self.cut_and_draw(),
            Mirostat::V1 => self.mirostat_v1(),
            Mirostat::V2 => self.mirostat_v2(),
        })
    }

    /// Writes the `n` most probable tokens with their log-probabilities to `out`, most probable first,
    /// ties to the lowest id; earlier content of `out` goes.
    ///
    /// `ln p_i = logit_i - ln Σ_j exp(logit_j)` over the raw logits: bias, penalties, cuts and temperature
    /// have no say. Impossible tokens are left out, so there may be fewer than `n` entries. The state of
    /// the sampler does not change.
    ///
    /// # Shapes
    ///
    /// `logits [n_vocab]`; `out` at most `[min(n, n_vocab)]`.
    ///
    /// # Errors
    ///
    /// As [`sample`](Self::sample).
    pub fn top_logprobs(
        &mut self,
        logits: &[f32],
        n: usize,
        out: &mut Vec<TokenLogprob>,
    ) -> Result<(), SamplingError> {
        out.clear();
        self.check_logits(logits)?;
        let norm = filter::log_norm(logits.iter().copied(), 1.0);
        self.candidates.clear();
        self.candidates.extend(
            (0..).zip(logits).filter(|(_, l)| l.is_finite()).map(|(id, &logit)| Candidate {
                id,
                logit,
                p: 0.0,
            }),
        );
        filter::order_first(&mut self.candidates, n, filter::by_logit);
        out.extend(
            self.candidates
                .iter()
                .take(n)
                .map(|c| TokenLogprob { token: TokenId(c.id), logprob: norm.ln_p(c.logit) as f32 }),
        );
        Ok(())
    }

    /// The log-probability of one token, by the same rule as [`top_logprobs`](Self::top_logprobs);
    /// negative infinity for an impossible token.
    ///
    /// # Shapes
    ///
    /// `logits [n_vocab]`.
    ///
    /// # Errors
    ///
    /// As [`sample`](Self::sample), and [`SamplingError::TokenOutOfRange`].
    pub fn logprob(&self, logits: &[f32], token: TokenId) -> Result<f32, SamplingError> {
        self.check_token(token)?;
        self.check_logits(logits)?;
        Ok(filter::log_norm(logits.iter().copied(), 1.0).ln_p(logits[token.index()]) as f32)
    }

    fn check_token(&self, token: TokenId) -> Result<(), SamplingError> {
        if token.index() < self.n_vocab {
            Ok(())
        } else {
            Err(SamplingError::TokenOutOfRange { token, n_vocab: self.n_vocab })
        }
    }

    /// The most probable token, ties to the lowest id, if the logits are fit to sample from.
    fn check_logits(&self, logits: &[f32]) -> Result<TokenId, SamplingError> {
        let n_vocab = self.n_vocab;
        if logits.len() != n_vocab {
            return Err(SamplingError::LogitsLength { expected: n_vocab, got: logits.len() });
        }
        let (mut best, mut best_id) = (f32::NEG_INFINITY, None);
        for (id, &got) in (0..).zip(logits) {
            if got.is_nan() || got == f32::INFINITY {
                return Err(SamplingError::BadLogit { token: TokenId(id), got });
            }
            if got > best {
                (best, best_id) = (got, Some(TokenId(id)));
            }
        }
        best_id.ok_or(SamplingError::NoCandidate { n_vocab })
    }

    /// Candidates still stand at the index of their id here and in `penalize`.
    fn add_bias(&mut self) {
        for &(token, bias) in &self.params.logit_bias {
            let logit = &mut self.candidates[token.index()].logit;
            // Two large numbers must not add up to an infinity, which would win for ever.
            *logit = (*logit + bias).min(f32::MAX);
        }
    }

    fn penalize(&mut self) {
        self.sorted.clear();
        self.sorted.extend(&self.window);
        self.sorted.sort_unstable();
        let SamplingParams { repeat_penalty, frequency_penalty, presence_penalty, .. } = self.params;
        for run in self.sorted.chunk_by(|a, b| a == b) {
            let logit = &mut self.candidates[run[0] as usize].logit;
            let scaled = if *logit > 0.0 { *logit / repeat_penalty } else { *logit * repeat_penalty };
            // Clamped, as infinity minus infinity is no number.
            let taken = (run.len() as f32 * frequency_penalty + presence_penalty).clamp(-f32::MAX, f32::MAX);
            *logit = (scaled.min(f32::MAX) - taken).min(f32::MAX);
        }
    }

    fn cut_and_draw(&mut self) -> TokenId {
        filter::top_k(&mut self.candidates, self.params.top_k);
        filter::typical(&mut self.candidates, self.params.typical);
        filter::top_p(&mut self.candidates, self.params.top_p);
        filter::min_p(&mut self.candidates, self.params.min_p);
        TokenId(self.draw().id)
    }

    /// Algorithm 1 of the paper: from the Zipf exponent `s` and the limit `mu`,
    /// `k = (e · 2^mu / (1 - N^-e))^(1/s)` with `e = s - 1` and `N = n_vocab`.
    fn mirostat_v1(&mut self) -> TokenId {
        let temperature = self.params.temperature.into();
        let norm = filter::log_norm(self.candidates.iter().map(|c| c.logit), temperature);
        filter::order_first(&mut self.candidates, ZIPF_TOKENS, filter::by_logit);
        let n_head = self.candidates.len().min(ZIPF_TOKENS);
        let s = zipf_exponent(&self.candidates[..n_head], temperature);
        let k = mirostat_k(s, self.mu, self.n_vocab).min(self.candidates.len());
        filter::top_k(&mut self.candidates, k);
        let picked = self.draw();
        self.learn(norm.surprise_bits(picked.logit));
        TokenId(picked.id)
    }

    /// The second version: no token more surprising than `mu`.
    fn mirostat_v2(&mut self) -> TokenId {
        let temperature = self.params.temperature.into();
        let norm = filter::log_norm(self.candidates.iter().map(|c| c.logit), temperature);
        filter::max_surprise(&mut self.candidates, &norm, self.mu);
        let picked = self.draw();
        self.learn(norm.surprise_bits(picked.logit));
        TokenId(picked.id)
    }

    /// Mirostat's feedback: moves the limit against the error.
    fn learn(&mut self, surprise_bits: f64) {
        let error = surprise_bits - f64::from(self.params.mirostat_tau);
        self.mu -= f64::from(self.params.mirostat_eta) * error;
    }

    /// Draws from the candidates left, at the temperature; one random number per call.
    fn draw(&mut self) -> Candidate {
        filter::softmax(&mut self.candidates, self.params.temperature.into());
        // The upper 53 bits as a number in [0, 1): written out, so that the stream never changes.
        let mut left = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut last = None;
        for &c in self.candidates.iter().filter(|c| c.p > 0.0) {
            if left < c.p {
                return c;
            }
            left -= c.p;
            last = Some(c);
        }
        // Rounding may leave a crumb past the last one.
        last.expect("a cut keeps at least one candidate, and the most probable has p > 0")
    }
}

#[cfg(test)]
impl Sampler {
    /// Id and probability of the candidates of the latest draw.
    pub(super) fn last_distribution(&self) -> impl Iterator<Item = (u32, f64)> {
        self.candidates.iter().map(|c| (c.id, c.p))
    }

    /// What the buffers can hold without growing.
    pub(super) fn reserved(&self) -> [usize; 3] {
        [self.window.capacity(), self.sorted.capacity(), self.candidates.capacity()]
    }
}

fn initial_mu(params: &SamplingParams) -> f64 {
    2.0 * f64::from(params.mirostat_tau)
}

/// Least-squares Zipf exponent of candidates in order: `Σ t·b / Σ t²` with `t = ln((i+2)/(i+1))` and
/// `b = ln(p_i / p_(i+1))`.
fn zipf_exponent(ordered: &[Candidate], temperature: f64) -> f64 {
    let (mut tb, mut tt) = (0.0, 0.0);
    for (i, pair) in ordered.windows(2).enumerate() {
        let t = ((i + 2) as f64 / (i + 1) as f64).ln();
        let b = (f64::from(pair[0].logit) - f64::from(pair[1].logit)) / temperature;
        tb += t * b;
        tt += t * t;
    }
    tb / tt
}

/// At least 1; may exceed the number of candidates.
fn mirostat_k(s: f64, mu: f64, n_vocab: usize) -> usize {
    let n = n_vocab as f64;
    let e = s - 1.0;
    // The limit for e -> 0 is 1 / ln N.
    let scale = if e.abs() < 1e-9 { 1.0 / n.ln() } else { e / (1.0 - n.powf(-e)) };
    let k = (scale * mu.exp2()).powf(1.0 / s);
    // One candidate gives no exponent, hence NaN, which the cast turns into 0; the cast saturates.
    (k.round() as usize).max(1)
}
