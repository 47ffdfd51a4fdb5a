//! `powerinfer perplexity`: how well a model predicts a text, in one mode or in several side by side.

use powerinfer_core::{ActiveMode, Model, Session, SessionOptions, TokenId};
use serde::Serialize;

use crate::args::PerplexityArgs;
use crate::error::CliError;
use crate::options::{self, Loaded};
use crate::output::{bytes, percent, print, print_json, progress_bar, say, table};

/// The scores of one mode.
#[derive(Debug, Default)]
struct Score {
    /// Negative log-likelihood of each scored token, in nats.
    nlls: Vec<f64>,
}

#[derive(Debug, Serialize)]
struct Outcome {
    model: String,
    mode: &'static str,
    ppl: f64,
    ppl_error: f64,
    /// Relative change of the perplexity against the first mode, and its standard error, token by token.
    change: f64,
    change_error: f64,
    n_ctx: usize,
    n_chunks: usize,
    n_scored: usize,
    active_share: f64,
    fired_share: f64,
    bytes_per_token: f64,
    tok_s: f64,
}

pub(crate) fn run(args: &PerplexityArgs) -> Result<(), CliError> {
    let text = options::read_text(&args.file)?;
    let loaded = Loaded::new(&args.model, None, Some(args.ctx_size as usize))?;
    let model = &loaded.model;
    let is_demo = loaded.source.is_demo();
    let n_ctx = args.ctx_size as usize;
    let ids = options::encode(model.tokenizer(), &text, false, is_demo)?;
    if ids.len() < 2 * n_ctx {
        return Err(CliError::TextTooShort { n_tokens: ids.len(), n_ctx });
    }
    let n_chunks = (ids.len() / n_ctx).min(args.chunks.map_or(usize::MAX, |n| n as usize));
    let bos = options::bos(model.tokenizer(), is_demo);
    let modes = options::modes(&args.mode, model);
    let mut runs = start(model, &modes, n_ctx)?;
    let bar = progress_bar((n_chunks * modes.len()) as u64, "{bar:40} {pos}/{len} chunks, {eta} left");
    for chunk in ids.chunks_exact(n_ctx).take(n_chunks) {
        let mut chunk = chunk.to_vec();
        if let (Some(bos), Some(first)) = (bos, chunk.first_mut()) {
            *first = bos;
        }
        for (session, score) in &mut runs {
            score_chunk(session, &chunk, score)?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let outcomes: Vec<Outcome> = runs
        .iter()
        .map(|(session, score)| outcome(&loaded.source.name(), session, (score, &runs[0].1), n_chunks))
        .collect();
    if args.json {
        return print_json(&outcomes);
    }
    say(&format!(
        "{n_chunks} chunks of {n_ctx} tokens, {} tokens scored; bytes per token when {} go through together",
        outcomes.first().map_or(0, |o| o.n_scored),
        n_ctx.min(model.n_batch())
    ));
    print_table(&outcomes)
}

fn start(model: &Model, modes: &[ActiveMode], n_ctx: usize) -> Result<Vec<(Session, Score)>, CliError> {
    let mut runs = Vec::new();
    for &mode in modes {
        let options = SessionOptions { n_ctx: Some(n_ctx), mode: Some(mode) };
        runs.push((model.session(&options)?, Score::default()));
    }
    Ok(runs)
}

/// Scores tokens `n_ctx / 2 + 1 .. n_ctx` of a chunk, each by the logits of the token before it.
fn score_chunk(session: &mut Session, chunk: &[TokenId], score: &mut Score) -> Result<(), CliError> {
    let n_vocab = session.model().tokenizer().n_vocab();
    let first = chunk.len() / 2;
    // What follows the last token is not scored, so it need not be computed.
    let (context, scored) = chunk[..chunk.len() - 1].split_at(first);
    session.rewind(0)?;
    session.prefill(context)?;
    session.evaluate(scored, |position, logits| {
        // Rows of the embedding beyond the vocabulary are padding.
        score.add(negative_log_likelihood(&logits[..n_vocab], chunk[position + 1]));
    })?;
    Ok(())
}

impl Score {
    fn add(&mut self, nll: f64) {
        self.nlls.push(nll);
    }

    /// Perplexity and its standard error: that of the mean, carried through the exponential.
    fn perplexity(&self) -> (f64, f64) {
        let (mean, error) = mean_and_error(self.nlls.iter().copied());
        (mean.exp(), error * mean.exp())
    }

    /// Relative change of the perplexity against `base`, which scored the same tokens, and its standard error. Paired:
    /// what both find hard cancels out.
    fn change(&self, base: &Self) -> (f64, f64) {
        let (mean, error) = mean_and_error(self.nlls.iter().zip(&base.nlls).map(|(nll, base)| nll - base));
        (mean.exp() - 1.0, error * mean.exp())
    }
}

/// Mean, and standard error of the mean; the error of a single value is 0.
fn mean_and_error(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    let squares: f64 = values.map(|v| (v - mean) * (v - mean)).sum();
    (mean, if n > 1.0 { (squares / n / (n - 1.0)).sqrt() } else { 0.0 })
}

/// `ln Σ exp(logits) − logits[id]`, in f64.
fn negative_log_likelihood(logits: &[f32], id: TokenId) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&v| f64::from(v - max).exp()).sum();
    sum.ln() - f64::from(logits[id.index()] - max)
}

fn outcome(model: &str, session: &Session, (score, first): (&Score, &Score), n_chunks: usize) -> Outcome {
    let (ppl, ppl_error) = score.perplexity();
    let (change, change_error) = score.change(first);
    let stats = session.stats().prefill;
    Outcome {
        model: model.to_owned(),
        mode: session.mode().name(),
        ppl,
        ppl_error,
        change,
        change_error,
        n_ctx: session.n_ctx(),
        n_chunks,
        n_scored: score.nlls.len(),
        active_share: stats.active_share(),
        fired_share: stats.fired_share(),
        bytes_per_token: stats.bytes_per_token(),
        tok_s: stats.tok_s(),
    }
}

fn print_table(outcomes: &[Outcome]) -> Result<(), CliError> {
    let head = ["mode", "perplexity", "change", "active", "fired", "bytes/token", "tok/s"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(outcomes.iter().map(|o| {
        vec![
            o.mode.to_owned(),
            format!("{:.4} ± {:.5}", o.ppl, o.ppl_error),
            format!("{:+.2} ± {:.2} %", 100.0 * o.change, 100.0 * o.change_error),
            percent(o.active_share),
            percent(o.fired_share),
            bytes(o.bytes_per_token),
            format!("{:.1}", o.tok_s),
        ]
    }));
    print(&table(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likelihoods_of_equal_and_of_far_logits() {
        let ln4 = 4f64.ln();
        assert!((negative_log_likelihood(&[1.0; 4], TokenId(2)) - ln4).abs() < 1e-12);
        assert!(negative_log_likelihood(&[1000.0, 0.0], TokenId(0)).abs() < 1e-12);
        assert!((negative_log_likelihood(&[1000.0, 0.0], TokenId(1)) - 1000.0).abs() < 1e-9);
    }

    #[test]
    fn the_error_is_that_of_the_mean_times_the_perplexity() {
        let mut score = Score::default();
        for nll in [1.0, 2.0, 3.0] {
            score.add(nll);
        }
        let (ppl, error) = score.perplexity();
        // Variance 2/3 over n, divided by n - 1 = 2.
        assert!((ppl - 2f64.exp()).abs() < 1e-12);
        assert!((error - (1.0f64 / 3.0).sqrt() * 2f64.exp()).abs() < 1e-9);
    }

    #[test]
    fn a_change_is_judged_token_by_token() {
        let score = |nlls: &[f64]| Score { nlls: nlls.to_vec() };
        let (base, same, shifted) = (score(&[1.0, 5.0]), score(&[1.0, 5.0]), score(&[1.1, 5.1]));
        assert_eq!(same.change(&base), (0.0, 0.0));
        let (change, error) = shifted.change(&base);
        assert!((change - (0.1f64.exp() - 1.0)).abs() < 1e-12 && error < 1e-12);
        let (_, error) = score(&[1.0, 5.2]).change(&base);
        assert!((error - 0.1 * 0.1f64.exp()).abs() < 1e-12);
    }
}
