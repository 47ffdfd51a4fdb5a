//! `powerinfer bench`: tokens per second, and the share of the memory's speed that decoding reaches.

use std::time::Instant;

use powerinfer_core::{ActiveMode, Session, SessionOptions, TokenId};
use serde::Serialize;

use crate::args::BenchArgs;
use crate::bandwidth;
use crate::error::CliError;
use crate::options::{self, Loaded};
use crate::output::{bytes, percent, print, print_json, say, table};

/// Measurements of one quantity.
#[derive(Debug, Serialize)]
struct Figure {
    median: f64,
    min: f64,
    max: f64,
    all: Vec<f64>,
}

#[derive(Debug, Serialize)]
struct Outcome {
    model: String,
    mode: &'static str,
    backends: Vec<String>,
    threads: usize,
    n_prompt: u32,
    n_gen: u32,
    repeats: u32,
    prefill_tok_s: Figure,
    decode_tok_s: Figure,
    /// Weights and KV cache read per decoded token.
    bytes_per_token: f64,
    active_share: f64,
    fired_share: f64,
    /// What the same number of threads reads from memory; null if it was not measured.
    stream_bytes_s: Option<f64>,
    /// Share of that which decoding read.
    stream_share: Option<f64>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<(), CliError> {
    let loaded = Loaded::new(&args.model, None)?;
    let threads = options::threads(&args.model.device);
    let modes = options::modes(&args.mode, &loaded.model);
    if !args.json {
        loaded.say_notes();
    }
    let stream = if args.no_stream { None } else { bandwidth::measure(threads) };
    if stream.is_none() && !args.no_stream {
        say("warning: not enough memory or threads to measure the memory's bandwidth");
    }
    let mut outcomes = Vec::new();
    for mode in modes {
        outcomes.push(measure(args, &loaded, mode, threads, stream)?);
    }
    if !args.json {
        return print_outcomes(&outcomes, args, threads, stream);
    }
    match outcomes.as_slice() {
        [one] => print_json(one),
        several => print_json(&several),
    }
}

fn measure(
    args: &BenchArgs,
    loaded: &Loaded,
    mode: ActiveMode,
    threads: usize,
    stream: Option<f64>,
) -> Result<Outcome, CliError> {
    let model = &loaded.model;
    let n_ctx = args.n_prompt as usize + args.n_gen as usize;
    let mut session = model.session(&SessionOptions { n_ctx: Some(n_ctx), mode: Some(mode) })?;
    let prompt = random_ids(args.n_prompt as usize, model.tokenizer().n_vocab());
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for repeat in 0..=args.repeats {
        session.rewind(0)?;
        let start = Instant::now();
        session.prefill(&prompt)?;
        let prefill_s = start.elapsed().as_secs_f64();
        let start = Instant::now();
        for _ in 0..args.n_gen {
            let next = most_probable(session.logits());
            session.decode(next)?;
        }
        let decode_s = start.elapsed().as_secs_f64();
        // The first one pages in the weights.
        if repeat > 0 {
            prefill.push(f64::from(args.n_prompt) / prefill_s);
            decode.push(f64::from(args.n_gen) / decode_s);
        }
    }
    Ok(outcome(args, loaded, &session, threads, stream, (figure(prefill), figure(decode))))
}

fn outcome(
    args: &BenchArgs,
    loaded: &Loaded,
    session: &Session,
    threads: usize,
    stream: Option<f64>,
    (prefill_tok_s, decode_tok_s): (Figure, Figure),
) -> Outcome {
    let stats = session.stats().decode;
    let bytes_per_token = stats.bytes_per_token();
    Outcome {
        model: loaded.source.name(),
        mode: session.mode().name(),
        backends: loaded.model.backends().iter().map(|b| format!("{}: {}", b.name, b.description)).collect(),
        threads,
        n_prompt: args.n_prompt,
        n_gen: args.n_gen,
        repeats: args.repeats,
        bytes_per_token,
        active_share: stats.active_share(),
        fired_share: stats.fired_share(),
        stream_bytes_s: stream,
        stream_share: stream.map(|stream| stream_share(bytes_per_token, decode_tok_s.median, stream)),
        prefill_tok_s,
        decode_tok_s,
    }
}

/// The part of the memory's speed that decoding reaches.
fn stream_share(bytes_per_token: f64, tok_s: f64, stream_bytes_s: f64) -> f64 {
    bytes_per_token * tok_s / stream_bytes_s
}

fn figure(all: Vec<f64>) -> Figure {
    let mut sorted = all.clone();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    Figure { median: (low + high) / 2.0, min: sorted[0], max: sorted[sorted.len() - 1], all }
}

/// Ties go to the lowest id.
fn most_probable(logits: &[f32]) -> TokenId {
    let (mut best, mut id) = (f32::NEG_INFINITY, 0);
    for (i, &logit) in (0..).zip(logits) {
        if logit > best {
            (best, id) = (logit, i);
        }
    }
    TokenId(id)
}

/// The same ids every time. Xorshift suffices: they only have to be spread over the vocabulary.
fn random_ids(n: usize, n_vocab: usize) -> Vec<TokenId> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        TokenId((state % n_vocab as u64) as u32)
    };
    (0..n).map(|_| next()).collect()
}

fn print_outcomes(
    outcomes: &[Outcome],
    args: &BenchArgs,
    threads: usize,
    stream: Option<f64>,
) -> Result<(), CliError> {
    say(&format!(
        "prompt of {} tokens, {} decoded, {threads} threads; median (min..max) of {}",
        args.n_prompt, args.n_gen, args.repeats
    ));
    if let Some(stream) = stream {
        say(&format!("reading memory: {:.2} GB/s", stream / 1e9));
    }
    let head = ["mode", "prefill tok/s", "decode tok/s", "bytes/token", "active", "fired", "of memory speed"];
    let spread = |f: &Figure| format!("{:.1} ({:.1}..{:.1})", f.median, f.min, f.max);
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(outcomes.iter().map(|o| {
        vec![
            o.mode.to_owned(),
            spread(&o.prefill_tok_s),
            spread(&o.decode_tok_s),
            bytes(o.bytes_per_token),
            percent(o.active_share),
            percent(o.fired_share),
            o.stream_share.map_or_else(|| "?".to_owned(), percent),
        ]
    }));
    print(&table(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        let odd = figure(vec![3.0, 1.0, 2.0]);
        assert_eq!((odd.median, odd.min, odd.max), (2.0, 1.0, 3.0));
        assert_eq!(odd.all, [3.0, 1.0, 2.0]);
        assert_eq!(figure(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(figure(vec![7.0]).median, 7.0);
    }

    #[test]
    fn the_share_is_what_decoding_reads_of_what_memory_gives() {
        // 1 GB for each of 5 tokens a second, of 20 GB a second.
        assert_eq!(stream_share(1e9, 5.0, 20e9), 0.25);
        // Caches may be faster than memory.
        assert_eq!(stream_share(1e9, 50.0, 25e9), 2.0);
    }

    #[test]
    fn prompts_stay_in_the_vocabulary_and_are_the_same_every_time() {
        let ids = random_ids(1000, 10);
        assert!((0..10).all(|id| ids.contains(&TokenId(id))));
        assert!(ids.iter().all(|id| id.0 < 10));
        assert_eq!(ids, random_ids(1000, 10));
    }

    #[test]
    fn ties_go_to_the_lowest_id() {
        assert_eq!(most_probable(&[0.0, 2.0, 2.0]), TokenId(1));
    }
}
