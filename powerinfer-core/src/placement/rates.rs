//! How often neurons are active.

use powerinfer_predictor::ActivationCounts;
use powerinfer_sparse_ops::LayerId;

use super::shape::{LayerShape, ModelShape};

/// Statistics that do not belong to the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RatesError {
    /// Another number of layers.
    #[error("the statistics have {got} layers, the model {expected}")]
    Layers {
        /// Layers of the model.
        expected: usize,
        /// Layers of the statistics.
        got: usize,
    },
    /// A layer with another number of neurons.
    #[error("layer {layer}: the statistics have {got} neurons, the model {expected}")]
    Neurons {
        /// The layer.
        layer: LayerId,
        /// Neurons of the model.
        expected: usize,
        /// Neurons of the statistics.
        got: usize,
    },
}

/// For each layer, its neurons from the hottest to the coldest and the rates of their activation.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    layers: Vec<LayerRates>,
}

#[derive(Clone, Debug, PartialEq)]
struct LayerRates {
    order: Vec<u32>,
    /// Sums of the rates of the first `i` neurons, `[n_ff + 1]`.
    sums: Vec<f64>,
}

impl Rates {
    /// From any rates, `[n_layer][n_ff]`.
    pub fn new(layers: Vec<Vec<f32>>) -> Self {
        let layers = layers.into_iter().map(|rates| {
            let mut order: Vec<u32> = (0..rates.len() as u32).collect();
            order.sort_by(|&a, &b| rates[b as usize].total_cmp(&rates[a as usize]).then(a.cmp(&b)));
            let mut sums = Vec::with_capacity(rates.len() + 1);
            let mut sum = 0.0;
            sums.push(sum);
            sums.extend(order.iter().map(|&i| {
                sum += f64::from(rates[i as usize].clamp(0.0, 1.0));
                sum
            }));
            LayerRates { order, sums }
        });
        Self { layers: layers.collect() }
    }

    /// The same rate for every neuron: what is known without statistics.
    pub fn uniform(shape: &ModelShape, rate: f32) -> Self {
        Self::new(shape.layers.iter().map(|layer| vec![rate; layer.n_ff]).collect())
    }

    /// From counts on some text.
    ///
    /// # Errors
    /// [`RatesError`] if they are those of a model of another shape.
    pub fn from_counts(counts: &ActivationCounts, shape: &ModelShape) -> Result<Self, RatesError> {
        if counts.n_layer() != shape.layers.len() {
            return Err(RatesError::Layers { expected: shape.layers.len(), got: counts.n_layer() });
        }
        let layers = (0..).map(LayerId).zip(&shape.layers);
        Ok(Self::new(
            layers.map(|(layer, expected)| of_layer(counts, layer, expected)).collect::<Result<_, _>>()?,
        ))
    }

    /// From counts on some text; every neuron of a layer that they lack or do not fit has the rate `rate`. Those layers
    /// are the second result.
    pub fn with_fallback(counts: &ActivationCounts, shape: &ModelShape, rate: f32) -> (Self, Vec<LayerId>) {
        let mut without = Vec::new();
        let layers = (0..).map(LayerId).zip(&shape.layers).map(|(layer, expected)| {
            of_layer(counts, layer, expected).unwrap_or_else(|_| {
                without.push(layer);
                vec![rate; expected.n_ff]
            })
        });
        (Self::new(layers.collect()), without)
    }

    /// Rates of a power law, `rate(i) ∝ (i + 1)^-a`, at most 1, in which the share `hot` of the neurons makes 80 % of
    /// the activations and the share `active` of the neurons is active for a token: the skew that papers report.
    pub fn skewed(shape: &ModelShape, active: f64, hot: f64) -> Self {
        // Most models have layers of one width.
        let mut last: Option<LayerRates> = None;
        let layers = shape.layers.iter().map(|layer| {
            let made = last.take().filter(|last| last.order.len() == layer.n_ff);
            let made = made.unwrap_or_else(|| {
                let one = Self::new(vec![power_law(layer.n_ff, active, hot)]);
                one.layers.into_iter().next().expect("one layer")
            });
            last = Some(made.clone());
            made
        });
        Self { layers: layers.collect() }
    }

    /// The neurons of a layer, hottest first.
    pub(crate) fn order(&self, layer: usize) -> &[u32] {
        &self.layers[layer].order
    }

    /// Sum of the rates of the neurons `from..to` in that order.
    pub(crate) fn sum(&self, layer: usize, from: usize, to: usize) -> f64 {
        let sums = &self.layers[layer].sums;
        sums[to] - sums[from]
    }
}

/// Rates of one layer, `[n_ff]`.
fn of_layer(
    counts: &ActivationCounts,
    layer: LayerId,
    expected: &LayerShape,
) -> Result<Vec<f32>, RatesError> {
    let n_tokens = counts.n_tokens() as f32;
    let counts = counts.layer(layer).unwrap_or_default();
    if counts.len() != expected.n_ff {
        return Err(RatesError::Neurons { layer, expected: expected.n_ff, got: counts.len() });
    }
    Ok(counts.iter().map(|&count| count as f32 / n_tokens).collect())
}

/// See [`Rates::skewed`].
fn power_law(n: usize, active: f64, hot: f64) -> Vec<f32> {
    let rates = |a: f64| -> Vec<f64> {
        let raw: Vec<f64> = (0..n).map(|i| ((i + 1) as f64).powf(-a)).collect();
        // Scaled so that the sum is right with every rate at most 1.
        let (mut low, mut high) = (0.0, 1e6 * n as f64);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            let sum: f64 = raw.iter().map(|r| (r * middle).min(1.0)).sum();
            if sum < active * n as f64 { low = middle } else { high = middle }
        }
        raw.iter().map(|r| (r * low).min(1.0)).collect()
    };
    let top = |rates: &[f64]| {
        let n_hot = ((n as f64 * hot) as usize).min(n);
        rates[..n_hot].iter().sum::<f64>() / rates.iter().sum::<f64>()
    };
    let (mut low, mut high) = (0.0, 8.0);
    for _ in 0..30 {
        let middle = f64::midpoint(low, high);
        if top(&rates(middle)) < 0.8 { low = middle } else { high = middle }
    }
    rates(high).into_iter().map(|r| r as f32).collect()
}
