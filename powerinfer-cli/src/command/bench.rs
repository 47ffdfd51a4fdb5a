//! `powerinfer bench`: tokens per second, and the share of the memory's speed that decoding reaches.

use std::time::Instant;

use powerinfer_core::{ActiveMode, SessionOptions, TokenId};
use serde::Serialize;

use crate::args::BenchArgs;
use crate::bandwidth::{self, kib_field};
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
    /// From the start of loading to the logits behind the prompt, once; in later modes the file is in memory already.
    first_token_s: f64,
    /// Part of that which loading took; the same for every mode.
    load_s: f64,
    /// Weights and KV cache read per decoded token.
    bytes_per_token: f64,
    /// Those bytes times the tokens per second.
    read_bytes_s: f64,
    active_share: f64,
    fired_share: f64,
    /// What the same number of threads reads from memory; null if it was not measured.
    stream_bytes_s: Option<f64>,
    /// Share of that which decoding read.
    stream_share: Option<f64>,
    /// The most memory this process had until then, mapped file pages included; null where the system does not tell.
    peak_rss_bytes: Option<u64>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<(), CliError> {
    let start = Instant::now();
    let loaded = Loaded::new(&args.model, None, None)?;
    let load_s = start.elapsed().as_secs_f64();
    let threads = options::threads(&args.model.device);
    let modes = options::modes(&args.mode, &loaded.model);
    if !args.json {
        loaded.say_notes();
    }
    let mut outcomes = Vec::new();
    for mode in modes {
        outcomes.push(measure(args, &loaded, mode, threads, load_s)?);
    }
    // Last, because its buffer would be the peak of the memory.
    let stream = if args.no_stream { None } else { bandwidth::measure(threads) };
    if stream.is_none() && !args.no_stream {
        say("warning: not enough memory or threads to measure the memory's bandwidth");
    }
    for outcome in &mut outcomes {
        outcome.stream_bytes_s = stream;
        outcome.stream_share = stream.map(|stream| outcome.read_bytes_s / stream);
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
    load_s: f64,
) -> Result<Outcome, CliError> {
    let model = &loaded.model;
    let n_ctx = args.n_prompt as usize + args.n_gen as usize;
    let prompt = random_ids(args.n_prompt as usize, model.tokenizer().n_vocab());
    let start = Instant::now();
    let mut session = model.session(&SessionOptions { n_ctx: Some(n_ctx), mode: Some(mode) })?;
    let mut first_token_s = load_s + start.elapsed().as_secs_f64();
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
        if repeat == 0 {
            first_token_s += prefill_s;
        } else {
            prefill.push(f64::from(args.n_prompt) / prefill_s);
            decode.push(f64::from(args.n_gen) / decode_s);
        }
    }
    let stats = session.stats().decode;
    let (prefill_tok_s, decode_tok_s) = (figure(prefill), figure(decode));
    Ok(Outcome {
        model: loaded.source.name(),
        mode: mode.name(),
        backends: model.backends().iter().map(|b| format!("{}: {}", b.name, b.description)).collect(),
        threads,
        n_prompt: args.n_prompt,
        n_gen: args.n_gen,
        repeats: args.repeats,
        first_token_s,
        load_s,
        bytes_per_token: stats.bytes_per_token(),
        read_bytes_s: stats.bytes_per_token() * decode_tok_s.median,
        active_share: stats.active_share(),
        fired_share: stats.fired_share(),
        stream_bytes_s: None,
        stream_share: None,
        peak_rss_bytes: peak_rss_bytes(),
        prefill_tok_s,
        decode_tok_s,
    })
}

/// The most memory this process ever had, where the system tells.
fn peak_rss_bytes() -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
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
    if let Some(first) = outcomes.first() {
        say(&format!("loaded in {:.3} s", first.load_s));
    }
    if let Some(stream) = stream {
        say(&format!("reading memory: {:.2} GB/s", stream / 1e9));
    }
    let head = [
        "mode",
        "prefill tok/s",
        "decode tok/s",
        "bytes/token",
        "GB/s",
        "of memory speed",
        "active",
        "fired",
        "first token",
        "peak memory",
    ];
    let unknown = || "?".to_owned();
    let spread = |f: &Figure| format!("{:.1} ({:.1}..{:.1})", f.median, f.min, f.max);
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(outcomes.iter().map(|o| {
        vec![
            o.mode.to_owned(),
            spread(&o.prefill_tok_s),
            spread(&o.decode_tok_s),
            bytes(o.bytes_per_token),
            format!("{:.2}", o.read_bytes_s / 1e9),
            // Caches may be faster than memory.
            o.stream_share.map_or_else(unknown, percent),
            percent(o.active_share),
            percent(o.fired_share),
            format!("{:.3} s", o.first_token_s),
            o.peak_rss_bytes.map_or_else(unknown, |n| bytes(n as f64)),
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
