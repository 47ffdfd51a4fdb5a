//! From scores and true gates to a rule: least squares for each neuron, one bound for the layer.

use powerinfer_predictor::RecallFigures;

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    /// Fitting a neuron's line.
    Fit,
    /// Setting the bound, in one of two parts.
    Held(usize),
}

/// `g ≈ a · s + b`, and the deviation of what is left.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    a: f64,
    b: f64,
    sigma: f64,
}

/// Least squares of `g` on `s`; `None` if the score says nothing, or leaves nothing to be said.
fn fit_line(pairs: impl Iterator<Item = (f32, f32)> + Clone) -> Option<Line> {
    let (mut n, mut sum_s, mut sum_g) = (0.0, 0.0, 0.0);
    for (s, g) in pairs.clone() {
        n += 1.0;
        sum_s += f64::from(s);
        sum_g += f64::from(g);
    }
    let (mean_s, mean_g) = (sum_s / n, sum_g / n);
    let (mut ss, mut sg, mut gg) = (0.0, 0.0, 0.0);
    for (s, g) in pairs {
        let (s, g) = (f64::from(s) - mean_s, f64::from(g) - mean_g);
        ss += s * s;
        sg += s * g;
        gg += g * g;
    }
    let a = sg / ss;
    let residual = gg - a * sg;
    // Rounding alone leaves about 1e-14 of the variance of an exact line in f32. Written so that NaN is no line.
    let is_line = a > 0.0 && residual > 1e-12 * gg;
    is_line.then(|| Line { a, b: mean_g - a * mean_s, sigma: (residual / n).sqrt() })
}

/// The held-out tokens of a layer under the rule `z = (a · s + b) / σ`.
pub(super) struct Held<'a> {
    folds: &'a [Fold],
    /// Part of each held-out token, in order.
    parts: Vec<usize>,
    lines: Vec<Option<Line>>,
    /// `[n_ff, n_held]`; +∞ for neurons that are always selected.
    z: Vec<f32>,
    /// Share in the FFN's sum, `[n_ff, n_held]`; −1 where the neuron is not active.
    gains: Vec<f32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    n: u64,
    active: u64,
    selected: u64,
    hits: u64,
    mass: f64,
    mass_hit: f64,
}

impl<'a> Held<'a> {
    pub(super) fn new(folds: &'a [Fold]) -> Self {
        let parts = folds.iter().filter_map(|fold| match fold {
            Fold::Fit => None,
            Fold::Held(part) => Some(*part),
        });
        Self { folds, parts: parts.collect(), lines: Vec::new(), z: Vec::new(), gains: Vec::new() }
    }

    /// Fits the next neurons.
    ///
    /// # Shapes
    /// `scores, gates, gains [n_neurons, folds.len()]`.
    pub(super) fn add_block(&mut self, scores: &[f32], gates: &[f32], gains: &[f32]) {
        let n = self.folds.len().max(1);
        let rows = scores.chunks_exact(n).zip(gates.chunks_exact(n)).zip(gains.chunks_exact(n));
        for ((scores, gates), gains) in rows {
            let pairs = scores.iter().copied().zip(gates.iter().copied()).zip(self.folds);
            let line = fit_line(pairs.filter(|(_, fold)| **fold == Fold::Fit).map(|(pair, _)| pair));
            self.lines.push(line);
            for (ix, fold) in self.folds.iter().enumerate() {
                if *fold == Fold::Fit {
                    continue;
                }
                self.z.push(line.map_or(f32::INFINITY, |line| {
                    ((line.a * f64::from(scores[ix]) + line.b) / line.sigma) as f32
                }));
                self.gains.push(if gates[ix] > 0.0 { gains[ix] } else { -1.0 });
            }
        }
    }

    /// Pairs of z and gain with the token's part.
    fn pairs(&self) -> impl Iterator<Item = (f32, f32, usize)> {
        let parts = self.parts.iter().copied().cycle();
        self.z.iter().zip(&self.gains).zip(parts).map(|((&z, &gain), part)| (z, gain, part))
    }

    /// The highest bound on z that keeps this share of the active pairs of a part, or of both; −∞ if none is active.
    pub(super) fn bound(&self, recall: f32, part: Option<usize>) -> f32 {
        let wanted = |of: usize| part.is_none_or(|part| part == of);
        let active = self.pairs().filter(|&(_, gain, of)| gain >= 0.0 && wanted(of));
        let mut active: Vec<f32> = active.map(|(z, ..)| z).collect();
        if active.is_empty() {
            return f32::NEG_INFINITY;
        }
        let n_missed = ((1.0 - f64::from(recall)) * active.len() as f64) as usize;
        let n_missed = n_missed.min(active.len() - 1);
        *active.select_nth_unstable_by(n_missed, f32::total_cmp).1
    }

    /// The rule `z ≥ bound` as a threshold of each neuron's score.
    pub(super) fn thresholds(&self, bound: f32) -> impl Iterator<Item = f32> {
        let threshold = move |line: Line| {
            let threshold = ((f64::from(bound) * line.sigma - line.b) / line.a) as f32;
            // Rounded down, so that what is on the bound is selected. A threshold that is no number selects all.
            if threshold < f32::INFINITY { threshold.next_down() } else { f32::NEG_INFINITY }
        };
        self.lines.iter().map(move |line| line.map_or(f32::NEG_INFINITY, threshold))
    }

    fn count(&self, bound: f32, part: usize) -> Counts {
        let mut counts = Counts::default();
        for (z, gain, _) in self.pairs().filter(|&(.., of)| of == part) {
            let (active, selected) = (gain >= 0.0, z >= bound);
            counts.n += 1;
            counts.selected += u64::from(selected);
            if active {
                counts.active += 1;
                counts.hits += u64::from(selected);
                counts.mass += f64::from(gain);
                counts.mass_hit += if selected { f64::from(gain) } else { 0.0 };
            }
        }
        counts
    }

    /// How the rule does at this recall: each part under the bound of the other.
    pub(super) fn figures(&self, recall: f32) -> RecallFigures {
        let (a, b) = (self.count(self.bound(recall, Some(1)), 0), self.count(self.bound(recall, Some(0)), 1));
        let share = |part: u64, whole: u64| if whole == 0 { 1.0 } else { part as f64 / whole as f64 };
        let mass = a.mass + b.mass;
        RecallFigures {
            recall: share(a.hits + b.hits, a.active + b.active),
            precision: share(a.hits + b.hits, a.selected + b.selected),
            selected: share(a.selected + b.selected, a.n + b.n),
            mass_recall: if mass > 0.0 { (a.mass_hit + b.mass_hit) / mass } else { 1.0 },
        }
    }

    /// Share of the held-out pairs that are active.
    pub(super) fn active_share(&self) -> f64 {
        let active = self.gains.iter().filter(|&&gain| gain >= 0.0).count();
        active as f64 / self.gains.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_testing::tiny::Random;

    use super::*;

    #[test]
    fn a_line_is_that_of_the_textbook() {
        let line = fit_line([(0.0, 1.0), (1.0, 2.0), (2.0, 6.0)].into_iter()).unwrap();
        assert!((line.a - 2.5).abs() < 1e-9 && (line.b - 0.5).abs() < 1e-9, "{line:?}");
        assert!((line.sigma - 0.5f64.sqrt()).abs() < 1e-9, "{line:?}");
    }

    #[test]
    fn scores_that_say_nothing_or_everything_make_no_line() {
        for pairs in [
            vec![(0.0, 1.0), (1.0, 0.0), (2.0, -1.5)],
            vec![(1.0, 1.0), (1.0, 2.0)],
            vec![(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)],
            vec![(f32::NAN, 1.0), (2.0, 5.0)],
            vec![],
        ] {
            assert_eq!(fit_line(pairs.clone().into_iter()), None, "{pairs:?}");
        }
    }

    /// Gates with noise in their scores; 50 neurons, 400 tokens.
    fn noisy(random: &mut Random, n: usize, n_ff: usize) -> [Vec<f32>; 3] {
        let [mut scores, mut gates, mut gains] = [const { Vec::new() }; 3];
        for neuron in 0..n_ff {
            for _ in 0..n {
                let gate = random.normal() - 0.8 + neuron as f32 / 100.0;
                scores.push(2.0 * gate + 0.3 * random.normal() + 5.0);
                gates.push(gate);
                gains.push(gate.max(0.0));
            }
        }
        [scores, gates, gains]
    }

    #[test]
    fn the_bound_keeps_the_wanted_share_and_thresholds_say_the_same() {
        let mut random = Random::new(8);
        let (n, n_ff) = (400, 50);
        let folds: Vec<Fold> =
            (0..n).map(|i| if i % 2 == 0 { Fold::Fit } else { Fold::Held(i / 2 % 2) }).collect();
        let [scores, gates, gains] = noisy(&mut random, n, n_ff);
        let mut held = Held::new(&folds);
        held.add_block(&scores, &gates, &gains);
        for recall in [0.5, 0.95, 0.99] {
            let bound = held.bound(recall, None);
            let thresholds: Vec<f32> = held.thresholds(bound).collect();
            let (mut active, mut hits, mut selected) = (0, 0, 0);
            for (ix, fold) in folds.iter().enumerate().filter(|(_, fold)| **fold != Fold::Fit) {
                assert_ne!(*fold, Fold::Fit);
                for neuron in 0..n_ff {
                    let at = neuron * n + ix;
                    let is_selected = scores[at] >= thresholds[neuron];
                    selected += u32::from(is_selected);
                    active += u32::from(gates[at] > 0.0);
                    hits += u32::from(is_selected && gates[at] > 0.0);
                }
            }
            let got = f64::from(hits) / f64::from(active);
            assert!(got >= f64::from(recall) && got < f64::from(recall) + 0.005, "{recall}: {got}");
            let figures = held.figures(recall);
            assert!((figures.recall - f64::from(recall)).abs() < 0.03, "{recall}: {figures:?}");
            let share = f64::from(selected) / (n / 2 * n_ff) as f64;
            assert!((figures.selected - share).abs() < 0.02, "{recall}: {figures:?}, {share}");
            assert!(figures.mass_recall > figures.recall);
        }
    }

    #[test]
    fn a_neuron_without_a_line_and_a_layer_without_activity_are_always_selected() {
        let folds = [Fold::Fit, Fold::Fit, Fold::Held(0), Fold::Held(1)];
        let mut held = Held::new(&folds);
        held.add_block(&[1.0, 1.0, 0.0, 9.0], &[1.0, 2.0, -1.0, -1.0], &[1.0, 1.0, 0.0, 0.0]);
        assert_eq!(held.thresholds(3.0).collect::<Vec<_>>(), [f32::NEG_INFINITY]);
        assert_eq!(held.bound(0.99, None), f32::NEG_INFINITY);
        let figures = held.figures(0.99);
        assert_eq!((figures.recall, figures.selected, figures.mass_recall), (1.0, 1.0, 1.0));
    }
}
