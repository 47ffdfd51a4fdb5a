//! The cuts: each takes the candidates left so far and keeps at least one of them.
//!
//! None of these functions allocates: they reorder and truncate the vector they are given.

use std::cmp::Ordering;

/// A token that may still be picked. Its logit is finite: impossible tokens never become candidates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) logit: f32,
    /// Probability among the candidates; set by [`softmax`], stale after a cut.
    pub(super) p: f64,
}

/// Most probable first, ties to the lowest id.
pub(super) fn by_logit(a: &Candidate, b: &Candidate) -> Ordering {
    // Not `total_cmp`: -0.0 and 0.0 tie. Logits are never NaN here.
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// What turns a logit into a log-probability: `ln p = (logit - max) / temperature - ln_sum`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogNorm {
    max: f64,
    temperature: f64,
    ln_sum: f64,
}

impl LogNorm {
    pub(super) fn ln_p(&self, logit: f32) -> f64 {
        (f64::from(logit) - self.max) / self.temperature - self.ln_sum
    }

    /// Surprise of a token, `-log2 p`, in bits.
    pub(super) fn surprise_bits(&self, logit: f32) -> f64 {
        -self.ln_p(logit) / std::f64::consts::LN_2
    }
}

/// Largest of some logits, as f64.
pub(super) fn max_logit(logits: impl Iterator<Item = f32>) -> f64 {
    logits.fold(f32::NEG_INFINITY, f32::max).into()
}

/// Normalizer of `exp(logit / temperature)` over logits of which one at least is finite. Summed in f64:
/// with 150 000 terms an f32 sum loses the digits that top-p compares.
pub(super) fn log_norm(logits: impl Iterator<Item = f32> + Clone, temperature: f64) -> LogNorm {
    let max = max_logit(logits.clone());
    let sum: f64 = logits.map(|logit| ((f64::from(logit) - max) / temperature).exp()).sum();
    LogNorm { max, temperature, ln_sum: sum.ln() }
}

/// Sets every `p` to `exp(logit / temperature)`, normalized over the candidates.
pub(super) fn softmax(candidates: &mut [Candidate], temperature: f64) -> LogNorm {
    let max = max_logit(candidates.iter().map(|c| c.logit));
    let mut sum = 0.0;
    for c in candidates.iter_mut() {
        c.p = ((f64::from(c.logit) - max) / temperature).exp();
        sum += c.p;
    }
    for c in candidates.iter_mut() {
        c.p /= sum;
    }
    LogNorm { max, temperature, ln_sum: sum.ln() }
}

/// Brings the first `n` candidates in the order of `cmp` to the front, sorted; the rest stays behind
/// them in no order. Linear in the candidates for small `n`.
pub(super) fn order_first(
    candidates: &mut [Candidate],
    n: usize,
    cmp: impl Fn(&Candidate, &Candidate) -> Ordering,
) {
    let n = n.min(candidates.len());
    if n == 0 {
        return;
    }
    if n < candidates.len() / 8 {
        select_few(candidates, n, &cmp);
    } else if n < candidates.len() {
        candidates.select_nth_unstable_by(n - 1, &cmp);
    }
    // The order after a selection may change between compilers; a draw must not depend on it.
    candidates[..n].sort_unstable_by(&cmp);
}

/// Brings the first `n` to the front by one scan over the rest: whatever comes before the worst of the
/// best `n` so far joins a pool of `2n`, which is thinned to `n` each time it is full. Nearly every
/// candidate of a large vocabulary costs one comparison, where a selection moves it several times.
fn select_few(candidates: &mut [Candidate], n: usize, cmp: impl Fn(&Candidate, &Candidate) -> Ordering) {
    let mut worst = *candidates[..2 * n].select_nth_unstable_by(n - 1, &cmp).1;
    let mut n_pool = n;
    for i in 2 * n..candidates.len() {
        if cmp(&candidates[i], &worst).is_lt() {
            candidates.swap(i, n_pool);
            n_pool += 1;
            if n_pool == 2 * n {
                worst = *candidates[..n_pool].select_nth_unstable_by(n - 1, &cmp).1;
                n_pool = n;
            }
        }
    }
    candidates[..n_pool].select_nth_unstable_by(n - 1, &cmp);
}

/// Keeps the `k` most probable candidates, most probable first; `k == 0` keeps all.
pub(super) fn top_k(candidates: &mut Vec<Candidate>, k: usize) {
    if k == 0 || k >= candidates.len() {
        return;
    }
    order_first(candidates, k, by_logit);
    candidates.truncate(k);
}

/// Keeps the shortest run, in the order of `cmp`, whose probabilities sum to `mass` or more.
///
/// A nucleus is small as a rule, so the order is made in blocks from the front, each twice as long as
/// the one before, and the far tail is never sorted.
fn keep_mass(candidates: &mut Vec<Candidate>, mass: f64, cmp: impl Fn(&Candidate, &Candidate) -> Ordering) {
    let (mut start, mut block, mut sum) = (0, 256, 0.0);
    while start < candidates.len() {
        let end = candidates.len().min(start + block);
        order_first(&mut candidates[start..], block, &cmp);
        for i in start..end {
            sum += candidates[i].p;
            if sum >= mass {
                candidates.truncate(i + 1);
                return;
            }
        }
        start = end;
        block *= 2;
    }
}

/// Keeps the smallest set of most probable candidates with at least `share` of the probability; 1 keeps
/// all, 0 keeps one.
pub(super) fn top_p(candidates: &mut Vec<Candidate>, share: f32) {
    if share < 1.0 {
        softmax(candidates, 1.0);
        keep_mass(candidates, share.into(), by_logit);
    }
}

/// Keeps the candidates whose surprise is nearest to the entropy, until they have `share` of the
/// probability; 1 keeps all, 0 keeps one. Ties go to the more probable.
pub(super) fn typical(candidates: &mut Vec<Candidate>, share: f32) {
    if share >= 1.0 {
        return;
    }
    let norm = softmax(candidates, 1.0);
    let entropy: f64 = candidates.iter().map(|c| -c.p * norm.ln_p(c.logit)).sum();
    let distance = |c: &Candidate| (norm.ln_p(c.logit) + entropy).abs();
    keep_mass(candidates, share.into(), |a, b| {
        distance(a).total_cmp(&distance(b)).then_with(|| by_logit(a, b))
    });
}

/// Keeps the candidates with at least `share` of the probability of the most probable; 0 keeps all.
/// The order stays.
pub(super) fn min_p(candidates: &mut Vec<Candidate>, share: f32) {
    if share > 0.0 {
        // p >= share * p_max, said in logits.
        let floor = max_logit(candidates.iter().map(|c| c.logit)) + f64::from(share).ln();
        candidates.retain(|c| f64::from(c.logit) >= floor);
    }
}

/// Keeps the candidates whose surprise under `norm` is at most `limit_bits`, or else the most probable
/// one. The order stays.
pub(super) fn max_surprise(candidates: &mut Vec<Candidate>, norm: &LogNorm, limit_bits: f64) {
    let Some(&best) = candidates.iter().min_by(|a, b| by_logit(a, b)) else { return };
    candidates.retain(|c| norm.surprise_bits(c.logit) <= limit_bits);
    if candidates.is_empty() {
        candidates.push(best);
    }
}
