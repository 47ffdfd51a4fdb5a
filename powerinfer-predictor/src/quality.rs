//! How good predictions are.

use std::fmt;

use powerinfer_sparse_ops::LayerId;

/// The figures of a prediction, always printed together: each alone can be made perfect by giving up another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quality {
    /// Share of the active neurons that were predicted; 1 if none was active.
    pub recall: f64,
    /// Share of the predicted neurons that were active; 1 if none was predicted.
    pub precision: f64,
    /// Share of all neurons that were active.
    pub active_share: f64,
    /// Share of all neurons that were predicted, and so are computed.
    pub predicted_share: f64,
}

impl fmt::Display for Quality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "recall {:.3}, precision {:.3}, active {:.1} %, predicted {:.1} %",
            self.recall,
            self.precision,
            100.0 * self.active_share,
            100.0 * self.predicted_share
        )
    }
}

/// Counts of predictions and truths, from which [`Quality`] is worked out. Counting is exact, so the order in
/// which tokens come does not matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QualityCounter {
    n_neurons: u64,
    n_active: u64,
    n_predicted: u64,
    n_hit: u64,
}

impl QualityCounter {
    /// Counts the neurons of one layer for one token, or for several whose rows follow each other.
    ///
    /// Predicted is every neuron unless `score < threshold`, so equality and NaN count as predicted, as in
    /// the engine. Active is every neuron whose activation is not zero.
    ///
    /// # Shapes
    /// `scores [n_tokens, n_ff]`, raw predictor outputs; `activations [n_tokens, n_ff]`, the values behind
    /// the ReLU.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn add(&mut self, scores: &[f32], threshold: f32, activations: &[f32]) {
        assert_eq!(scores.len(), activations.len(), "scores and activations are of the same neurons");
        self.n_neurons += scores.len() as u64;
        for (&score, &activation) in scores.iter().zip(activations) {
            let below = score < threshold;
            self.count(!below, activation != 0.0);
        }
    }

    /// Counts one neuron for one token.
    pub fn add_neuron(&mut self, predicted: bool, active: bool) {
        self.n_neurons += 1;
        self.count(predicted, active);
    }

    fn count(&mut self, predicted: bool, active: bool) {
        self.n_predicted += u64::from(predicted);
        self.n_active += u64::from(active);
        self.n_hit += u64::from(active && predicted);
    }

    /// Adds the counts of another counter.
    pub fn merge(&mut self, other: &Self) {
        self.n_neurons += other.n_neurons;
        self.n_active += other.n_active;
        self.n_predicted += other.n_predicted;
        self.n_hit += other.n_hit;
    }

    /// Neurons counted, each once per token.
    pub fn n_neurons(&self) -> u64 {
        self.n_neurons
    }

    /// The figures; `None` if nothing was counted.
    pub fn quality(&self) -> Option<Quality> {
        let share = |part: u64, whole: u64| if whole == 0 { 1.0 } else { part as f64 / whole as f64 };
        (self.n_neurons > 0).then(|| Quality {
            recall: share(self.n_hit, self.n_active),
            precision: share(self.n_hit, self.n_predicted),
            active_share: share(self.n_active, self.n_neurons),
            predicted_share: share(self.n_predicted, self.n_neurons),
        })
    }
}

/// A [`QualityCounter`] for each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QualityByLayer {
    layers: Vec<QualityCounter>,
}

impl QualityByLayer {
    /// Nothing counted yet in `n_layer` layers.
    pub fn new(n_layer: usize) -> Self {
        Self { layers: vec![QualityCounter::default(); n_layer] }
    }

    /// Counts tokens of one layer; see [`QualityCounter::add`].
    ///
    /// # Shapes
    /// `scores, activations [n_tokens, n_ff]`.
    ///
    /// # Panics
    /// If there is no such layer, or the lengths differ.
    pub fn add(&mut self, layer: LayerId, scores: &[f32], threshold: f32, activations: &[f32]) {
        let n_layer = self.layers.len();
        let counter = self.layers.get_mut(layer.index());
        counter.unwrap_or_else(|| panic!("layer {layer} of {n_layer}")).add(scores, threshold, activations);
    }

    /// The figures of each layer; `None` for layers of which nothing was counted.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = Option<Quality>> {
        self.layers.iter().map(QualityCounter::quality)
    }

    /// The figures over all neurons of all layers; `None` if nothing was counted.
    pub fn overall(&self) -> Option<Quality> {
        let mut sum = QualityCounter::default();
        for layer in &self.layers {
            sum.merge(layer);
        }
        sum.quality()
    }
}

impl fmt::Display for QualityByLayer {
    /// One line for each layer of which something was counted, and one for all of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (layer, quality) in self.layers().enumerate() {
            if let Some(quality) = quality {
                writeln!(f, "layer {layer}: {quality}")?;
            }
        }
        match self.overall() {
            Some(overall) => write!(f, "overall: {overall}"),
            None => f.write_str("overall: nothing counted"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hand_made_numbers() {
        // Predicted: 0, 1, 4 (equal), 5 (NaN). Active: 0, 2, 5 (negative values too).
        let scores = [0.5, 0.3, -0.2, -1.0, 0.1, f32::NAN, 0.0, 0.09];
        let truth = [1.0, 0.0, 2.0, 0.0, 0.0, -0.5, 0.0, -0.0];
        let mut counter = QualityCounter::default();
        counter.add(&scores, 0.1, &truth);
        let expected =
            Quality { recall: 2.0 / 3.0, precision: 0.5, active_share: 3.0 / 8.0, predicted_share: 0.5 };
        assert_eq!(counter.quality(), Some(expected));
        assert_eq!(counter.n_neurons(), 8);
        assert_eq!(expected.to_string(), "recall 0.667, precision 0.500, active 37.5 %, predicted 50.0 %");
    }

    #[test]
    fn nothing_active_loses_nothing_and_nothing_counted_is_no_figure() {
        let mut counter = QualityCounter::default();
        assert_eq!(counter.quality(), None);
        counter.add(&[-1.0, -2.0], 0.0, &[0.0, 0.0]);
        let quality = counter.quality().unwrap();
        assert_eq!((quality.recall, quality.precision), (1.0, 1.0));
        assert_eq!((quality.active_share, quality.predicted_share), (0.0, 0.0));
    }

    #[test]
    fn layers_are_counted_apart_and_summed_by_neuron() {
        let mut layers = QualityByLayer::new(3);
        layers.add(LayerId(0), &[1.0, -1.0], 0.0, &[1.0, 1.0]);
        layers.add(LayerId(2), &[1.0, 1.0, 1.0, 1.0], 0.0, &[1.0, 0.0, 0.0, 1.0]);
        let each: Vec<_> = layers.layers().collect();
        assert_eq!(each[0].map(|q| (q.recall, q.precision)), Some((0.5, 1.0)));
        assert_eq!(each[1], None);
        assert_eq!(each[2].map(|q| (q.recall, q.precision)), Some((1.0, 0.5)));
        let overall = layers.overall().unwrap();
        assert_eq!((overall.recall, overall.precision), (3.0 / 4.0, 3.0 / 5.0));
        assert_eq!(
            layers.to_string(),
            "layer 0: recall 0.500, precision 1.000, active 100.0 %, predicted 50.0 %\n\
             layer 2: recall 1.000, precision 0.500, active 50.0 %, predicted 100.0 %\n\
             overall: recall 0.750, precision 0.600, active 66.7 %, predicted 83.3 %"
        );
    }

    #[test]
    #[should_panic(expected = "layer 1 of 1")]
    fn a_layer_that_is_not_there_is_a_bug() {
        QualityByLayer::new(1).add(LayerId(1), &[0.0], 0.0, &[0.0]);
    }

    fn quality(neurons: &[(f32, bool)], threshold: f32) -> Quality {
        let scores: Vec<f32> = neurons.iter().map(|n| n.0).collect();
        let truth: Vec<f32> = neurons.iter().map(|n| f32::from(u8::from(n.1))).collect();
        let mut counter = QualityCounter::default();
        counter.add(&scores, threshold, &truth);
        counter.quality().unwrap()
    }

    fn neurons() -> impl Strategy<Value = Vec<(f32, bool)>> {
        prop::collection::vec((-2.0f32..2.0, any::<bool>()), 1..80)
    }

    proptest! {
        #[test]
        fn a_lower_threshold_never_lowers_recall(neurons in neurons(), a in -3.0f32..3.0, b in -3.0f32..3.0) {
            let low = quality(&neurons, a.min(b));
            let high = quality(&neurons, a.max(b));
            prop_assert!(low.recall >= high.recall);
            prop_assert!(low.predicted_share >= high.predicted_share);
            prop_assert_eq!(low.active_share, high.active_share);
        }

        #[test]
        fn the_figures_hang_together(neurons in neurons(), threshold in -3.0f32..3.0) {
            let q = quality(&neurons, threshold);
            for share in [q.recall, q.precision, q.active_share, q.predicted_share] {
                prop_assert!((0.0..=1.0).contains(&share));
            }
            // Both sides are the share of hits among all neurons.
            if q.active_share > 0.0 && q.predicted_share > 0.0 {
                prop_assert!((q.recall * q.active_share - q.precision * q.predicted_share).abs() < 1e-12);
            }
        }

        #[test]
        fn pieces_give_the_same_as_the_whole(neurons in neurons(), cut in 0usize..80) {
            let cut = cut.min(neurons.len());
            let count = |part: &[(f32, bool)], into: &mut QualityCounter| {
                let scores: Vec<f32> = part.iter().map(|n| n.0).collect();
                let truth: Vec<f32> = part.iter().map(|n| f32::from(u8::from(n.1))).collect();
                into.add(&scores, 0.25, &truth);
            };
            let mut whole = QualityCounter::default();
            let (mut first, mut second) = (whole, whole);
            count(&neurons, &mut whole);
            count(&neurons[..cut], &mut first);
            count(&neurons[cut..], &mut second);
            second.merge(&first);
            prop_assert_eq!(second, whole);
        }
    }
}
