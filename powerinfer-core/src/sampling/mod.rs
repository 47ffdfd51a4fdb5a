//! From logits to a token.
//!
//! [`SamplingParams`] says how, [`Sampler`] does it for one sequence. The steps, in order:
//!
//! 1. **Checks.** NaN or positive infinity among the logits is an error that names the token; negative
//!    infinity marks an impossible token.
//! 2. **Logit bias**, before everything else, so that a ban or a push holds whatever the cuts do.
//! 3. **Penalties** over the last `repeat_last_n` accepted tokens: repetition and presence once per
//!    distinct token, frequency once per occurrence. The prompt counts if the caller feeds it to
//!    [`Sampler::accept`].
//! 4. **Temperature 0**: the largest logit, ties to the lowest id. Ends here.
//! 5. **Mirostat**, when on, takes the place of all cuts; or else **top-k**, **typical**, **top-p**,
//!    **min-p**. Each works on what the one before left, with the probabilities normalized anew, at
//!    temperature 1, and keeps at least one token. Ties at a border of top-k and top-p go to the lowest id.
//! 6. **Temperature**, then one random number draws the token.
//!
//! # Methods
//!
//! * Top-p (nucleus): [arXiv 1904.09751](https://arxiv.org/abs/1904.09751).
//! * Typical: [arXiv 2202.00666](https://arxiv.org/abs/2202.00666).
//! * Min-p: [arXiv 2407.01082](https://arxiv.org/abs/2407.01082).
//! * Mirostat: [arXiv 2007.14966](https://arxiv.org/abs/2007.14966). Both versions work on the
//!   distribution after temperature, and feed back the surprise of the drawn token under that
//!   distribution *before* truncation, as the paper defines it. Programs that take the surprise after
//!   truncation settle at a higher true surprise for the same `tau`.
//!
//! # Random numbers
//!
//! xoshiro256++, seeded from the 64-bit seed by SplitMix64, 53 bits per draw: a published generator with a
//! fixed stream, so that a seed keeps its meaning when a library is updated. One number is used per drawn
//! token and none at temperature 0. Between machines the same seed can still part ways where logits, or
//! the platform's `exp`, differ in the last bit.
//!
//! # Not here
//!
//! Grammars, tail-free sampling and beam search. There is no `min_keep` setting: a cut always keeps at
//! least one token, and [`Sampler::top_logprobs`] reads the uncut distribution.

mod error;
mod filter;
mod params;
mod sampler;
#[cfg(test)]
mod tests;

pub use error::SamplingError;
pub use params::{MAX_REPEAT_LAST_N, Mirostat, SamplingParams};
pub use sampler::{Sampler, TokenLogprob};
