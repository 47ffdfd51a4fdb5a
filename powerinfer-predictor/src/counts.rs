//! How often each neuron fired on some text.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use powerinfer_sparse_ops::{LayerId, NeuronId};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::error::{PredictorError, shortened};
use crate::file::{check_layers, layer_number, write_atomic};
use crate::weights::read;

const TOKENS: &str = "tokens";
const FINGERPRINT: &str = "fingerprint";
const FORMAT_VERSION: &str = "format_version";
/// The latest version of the file. Version 1 has no histograms; a file that does not name its version is one of it.
const LATEST_VERSION: u32 = 2;
const EXPECTED: &str = "`activation_N`, `active_share_N` and `tokens`";

/// For how many tokens which share of a layer's neurons fired.
///
/// Bin `b` of [`ShareHistogram::BINS`] counts the tokens for which at least `b` hundredths of the neurons fired and less
/// than `b + 1` hundredths; the last one also those for which all did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareHistogram([u64; Self::BINS]);

impl ShareHistogram {
    /// Number of bins.
    pub const BINS: usize = 100;

    /// Of no tokens.
    pub fn new() -> Self {
        Self([0; Self::BINS])
    }

    /// Adds one token for which `n_fired` of `n_ff` neurons fired.
    ///
    /// # Panics
    /// If more fired than there are.
    pub fn add(&mut self, n_fired: usize, n_ff: usize) {
        assert!(n_fired <= n_ff, "{n_fired} of {n_ff} neurons fired");
        // Exact in 64 bits: a layer has less than 2^32 neurons.
        let bin = n_fired * Self::BINS / n_ff.max(1);
        self.0[bin.min(Self::BINS - 1)] += 1;
    }

    /// Tokens of each bin.
    pub fn bins(&self) -> &[u64; Self::BINS] {
        &self.0
    }

    /// The upper edge of the first bin up to which there are at least `part` of the tokens: for so many of them, at most
    /// this share of the neurons fired. 0 if there are no tokens.
    pub fn share_within(&self, part: f64) -> f64 {
        let goal = part * self.n_tokens() as f64;
        let mut sum = 0;
        let n_below = self.0.iter().take_while(|&&n| {
            let is_below = (sum as f64) < goal;
            sum += u128::from(n);
            is_below
        });
        n_below.count() as f64 / Self::BINS as f64
    }

    fn n_tokens(&self) -> u128 {
        self.0.iter().map(|&n| u128::from(n)).sum()
    }
}

impl Default for ShareHistogram {
    fn default() -> Self {
        Self::new()
    }
}

/// Activation statistics: for each layer and neuron, how many tokens had it active. Hot neurons are those
/// with the highest counts. They may have a [`ShareHistogram`] for each layer as well.
///
/// The file is in the safetensors format: tensors `activation_N` (I64, `[n_ff]`) for each layer N, and `tokens` (I64,
/// `[1]`), the number of tokens; with histograms, also `active_share_N` (I64, `[100]`) for each layer. Its metadata may
/// have the keys `format_version` (1 if it is absent, 2 with histograms) and `fingerprint`, which tells the model file
/// apart from others; files without it, such as those of other programs, are read as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActivationCounts {
    n_tokens: u64,
    layers: Vec<Vec<u64>>,
    /// `[n_layer]`, each over `n_tokens`.
    histograms: Option<Vec<ShareHistogram>>,
    fingerprint: Option<String>,
}

impl ActivationCounts {
    /// Counts of `n_tokens` tokens, `[n_layer][n_ff]`.
    ///
    /// # Errors
    /// A [`PredictorError`]: no tokens, no layers, a layer without neurons, or a count above the number of tokens.
    pub fn new(n_tokens: u64, layers: Vec<Vec<u64>>) -> Result<Self, PredictorError> {
        let tokens = i64::try_from(n_tokens).unwrap_or(i64::MAX);
        if tokens == 0 {
            return Err(PredictorError::NoTokens { n_tokens: tokens });
        }
        check_layers((0..).map(LayerId).take(layers.len()), "activation_0")?;
        for (layer, counts) in (0..).map(LayerId).zip(&layers) {
            if counts.is_empty() {
                return Err(PredictorError::Shape {
                    tensor: format!("activation_{layer}"),
                    expected: "one dimension, not empty".to_owned(),
                    got: vec![0],
                });
            }
            let counts = counts.iter().map(|&count| i64::try_from(count).unwrap_or(i64::MAX)).collect();
            check_counts(layer, counts, tokens)?;
        }
        Ok(Self { n_tokens, layers, histograms: None, fingerprint: None })
    }

    /// The same counts with a histogram for each layer, `[n_layer]`.
    ///
    /// # Errors
    /// [`PredictorError::Histogram`] if one is over another number of tokens, [`PredictorError::MissingTensor`] if there
    /// are more or fewer of them than layers.
    pub fn with_histograms(mut self, histograms: Vec<ShareHistogram>) -> Result<Self, PredictorError> {
        let n_layer = self.n_layer().max(histograms.len());
        let layers = || (0..).map(LayerId).take(n_layer);
        if let Some(layer) = layers().find(|l| l.index() >= self.n_layer().min(histograms.len())) {
            let prefix = if layer.index() < self.n_layer() { "active_share" } else { "activation" };
            return Err(PredictorError::MissingTensor { tensor: format!("{prefix}_{layer}") });
        }
        for (layer, histogram) in layers().zip(&histograms) {
            if histogram.n_tokens() != u128::from(self.n_tokens) {
                return Err(PredictorError::Histogram {
                    tensor: format!("active_share_{layer}"),
                    got: histogram.n_tokens(),
                    n_tokens: self.n_tokens,
                });
            }
        }
        self.histograms = Some(histograms);
        Ok(self)
    }

    /// The same counts of the model file with this fingerprint.
    #[must_use]
    pub fn of_model(mut self, fingerprint: impl Into<String>) -> Self {
        self.fingerprint = Some(fingerprint.into());
        self
    }

    /// What tells the model file apart from others, if it is known.
    pub fn fingerprint(&self) -> Option<&str> {
        self.fingerprint.as_deref()
    }

    /// Refuses a model file with another fingerprint; counts without one are those of any model of their shape.
    ///
    /// # Errors
    /// [`PredictorError::OtherModel`] with both.
    pub fn check_model(&self, fingerprint: &str) -> Result<(), PredictorError> {
        match &self.fingerprint {
            Some(own) if own != fingerprint => {
                Err(PredictorError::OtherModel { expected: own.clone(), got: fingerprint.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Adds counts on other text. Counts without a fingerprint are taken for those of the same model if their shape is
    /// the same. The sum has histograms if both have.
    ///
    /// # Errors
    /// [`PredictorError::OtherModel`] or [`PredictorError::Shape`] if they are of another model; nothing is added then.
    pub fn merge(&mut self, other: &Self) -> Result<(), PredictorError> {
        if let Some(fingerprint) = &other.fingerprint {
            self.check_model(fingerprint)?;
        }
        let shape = |counts: &Self| counts.layers.iter().map(Vec::len).collect::<Vec<_>>();
        if shape(self) != shape(other) {
            return Err(PredictorError::Shape {
                tensor: "activation counts that are added".to_owned(),
                expected: format!("layers of {:?} neurons", shape(self)),
                got: shape(other),
            });
        }
        // The file has 63 bits for each number; no count is above the number of tokens.
        let sum = self.n_tokens.checked_add(other.n_tokens).filter(|&n| i64::try_from(n).is_ok());
        self.n_tokens = sum.ok_or_else(|| PredictorError::BadCount {
            tensor: TOKENS.to_owned(),
            neuron: 0,
            count: i64::MAX,
            n_tokens: i64::MAX,
        })?;
        for (counts, other) in self.layers.iter_mut().zip(&other.layers) {
            counts.iter_mut().zip(other).for_each(|(count, other)| *count += other);
        }
        self.histograms = self.histograms.take().zip(other.histograms.as_ref()).map(|(mut sums, others)| {
            for (sum, other) in sums.iter_mut().zip(others) {
                sum.0.iter_mut().zip(&other.0).for_each(|(n, other)| *n += other);
            }
            sums
        });
        self.fingerprint = self.fingerprint.take().or_else(|| other.fingerprint.clone());
        Ok(())
    }

    /// The bytes of a file.
    ///
    /// # Errors
    /// [`PredictorError::Format`] if the format cannot hold it.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PredictorError> {
        let bytes = |values: &[u64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let mut tensors = vec![(TOKENS.to_owned(), vec![1], bytes(&[self.n_tokens]))];
        tensors.extend(
            self.layers
                .iter()
                .enumerate()
                .map(|(layer, counts)| (format!("activation_{layer}"), vec![counts.len()], bytes(counts))),
        );
        for (layer, histogram) in self.histograms.iter().flatten().enumerate() {
            let shape = vec![ShareHistogram::BINS];
            tensors.push((format!("active_share_{layer}"), shape, bytes(&histogram.0)));
        }
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::I64, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        let version: u32 = if self.histograms.is_some() { 2 } else { 1 };
        let mut metadata = HashMap::from([(FORMAT_VERSION.to_owned(), version.to_string())]);
        metadata.extend(self.fingerprint.iter().map(|f| (FINGERPRINT.to_owned(), f.clone())));
        Ok(safetensors::serialize(views, Some(metadata))?)
    }

    /// Writes a file that appears under its name when it is complete.
    ///
    /// # Errors
    /// [`PredictorError::Write`], and those of [`ActivationCounts::to_bytes`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), PredictorError> {
        write_atomic(path.as_ref(), &self.to_bytes()?)
    }

    /// Smallest share of a layer's neurons that makes `part` of its activations; `None` if there is no such layer.
    pub fn share_making(&self, layer: LayerId, part: f64) -> Option<f64> {
        let mut counts = self.layer(layer)?.to_vec();
        counts.sort_unstable_by_key(|&count| std::cmp::Reverse(count));
        let goal = part * counts.iter().map(|&c| c as f64).sum::<f64>();
        let mut sum = 0.0;
        let n = counts.iter().take_while(|&&count| {
            let before = sum;
            sum += count as f64;
            before < goal
        });
        Some(n.count() as f64 / counts.len() as f64)
    }

    /// Reads a file; with the feature `pt`, also a folder of files `activation_N.pt`, or the only one of such files.
    ///
    /// # Errors
    /// [`PredictorError::Read`], or [`PredictorError::InFile`] with an error of
    /// [`ActivationCounts::from_bytes`] in it. Without the feature, [`PredictorError::NoPt`] for a folder or a file whose
    /// name ends in `.pt`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, PredictorError> {
        let path = path.as_ref();
        let is_pt_file = path.extension().is_some_and(|e| e == "pt");
        #[cfg(feature = "pt")]
        if path.is_dir() {
            return Self::open_pt(path);
        } else if is_pt_file {
            return Self::from_pt_files([path]);
        }
        #[cfg(not(feature = "pt"))]
        if path.is_dir() || is_pt_file {
            return Err(PredictorError::NoPt.in_file(path));
        }
        Self::from_bytes(&read(path)?).map_err(|error| error.in_file(path))
    }

    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// A [`PredictorError`] that names the tensor: not the format or a later version of it, a missing layer, a stray
    /// tensor, another type or shape, no tokens, a count that is negative or above the number of tokens, or a histogram
    /// over other tokens.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PredictorError> {
        let file = SafeTensors::deserialize(bytes)?;
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let metadata = |key: &str| header.metadata().as_ref().and_then(|map| map.get(key));
        if let Some(version) = metadata(FORMAT_VERSION)
            && !version.parse().is_ok_and(|v: u32| (1..=LATEST_VERSION).contains(&v))
        {
            let got = shortened(version);
            return Err(PredictorError::NewerFormat { got, known: LATEST_VERSION });
        }
        let mut layers = BTreeMap::new();
        let mut histograms = BTreeMap::new();
        let mut n_tokens = None;
        for (name, view) in file.iter() {
            let values = integers(name, &view)?;
            let layer_after = |prefix| name.strip_prefix(prefix).and_then(layer_number);
            if let Some(layer) = layer_after("activation_") {
                layers.insert(layer, values);
            } else if let Some(layer) = layer_after("active_share_") {
                histograms.insert(layer, histogram(name, &values)?);
            } else if name == TOKENS {
                n_tokens = Some(token_count(&values, view.shape())?);
            } else {
                return Err(PredictorError::UnexpectedTensor { tensor: shortened(name), expected: EXPECTED });
            }
        }
        let n_tokens = n_tokens.ok_or_else(|| PredictorError::MissingTensor { tensor: TOKENS.to_owned() })?;
        check_layers(layers.keys().copied(), "activation_0")?;
        let layers = layers.into_iter().map(|(layer, counts)| check_counts(layer, counts, n_tokens));
        let counts = Self {
            layers: layers.collect::<Result<_, _>>()?,
            n_tokens: n_tokens.unsigned_abs(),
            histograms: None,
            fingerprint: metadata(FINGERPRINT).cloned(),
        };
        if histograms.is_empty() {
            return Ok(counts);
        }
        if let Some((layer, _)) = (0..).map(LayerId).zip(histograms.keys()).find(|(want, got)| want != *got) {
            return Err(PredictorError::MissingTensor { tensor: format!("active_share_{layer}") });
        }
        counts.with_histograms(histograms.into_values().collect())
    }

    /// Number of tokens that were counted, at least 1.
    pub fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    /// Number of layers, at least 1.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// How many tokens had each neuron of a layer active, `[n_ff]`, each at most [`Self::n_tokens`]; `None`
    /// if there is no such layer.
    pub fn layer(&self, layer: LayerId) -> Option<&[u64]> {
        self.layers.get(layer.index()).map(Vec::as_slice)
    }

    /// For how many tokens which share of a layer's neurons fired; `None` if there is no such layer or that was not
    /// counted.
    pub fn histogram(&self, layer: LayerId) -> Option<&ShareHistogram> {
        self.histograms.as_ref()?.get(layer.index())
    }

    /// Share of neurons that were active in a layer, over all tokens; `None` if there is no such layer.
    pub fn active_share(&self, layer: LayerId) -> Option<f64> {
        let counts = self.layer(layer)?;
        // Summed as floats: many counts near 2^63 would leave the range of integers.
        let sum: f64 = counts.iter().map(|&count| count as f64).sum();
        Some(sum / (counts.len() as f64 * self.n_tokens as f64))
    }

    /// The neurons of a layer, highest count first and lower id first where counts are equal; `None` if there
    /// is no such layer.
    pub fn hottest_first(&self, layer: LayerId) -> Option<Vec<NeuronId>> {
        let counts = self.layer(layer)?;
        // 2^32 neurons would be a file of 32 GiB for each layer, and their ids are 32 bits wide.
        let mut ids: Vec<NeuronId> = (0..u32::MAX).map(NeuronId).take(counts.len()).collect();
        ids.sort_by_key(|id| std::cmp::Reverse(counts[id.index()]));
        Some(ids)
    }
}

fn integers(name: &str, view: &TensorView<'_>) -> Result<Vec<i64>, PredictorError> {
    if view.dtype() != Dtype::I64 {
        return Err(PredictorError::Type {
            tensor: shortened(name),
            expected: "I64",
            got: format!("{:?}", view.dtype()),
        });
    }
    if !matches!(view.shape(), [n] if *n > 0) {
        return Err(PredictorError::Shape {
            tensor: shortened(name),
            expected: "one dimension, not empty".to_owned(),
            got: view.shape().to_vec(),
        });
    }
    Ok(view.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
}

fn histogram(tensor: &str, values: &[i64]) -> Result<ShareHistogram, PredictorError> {
    let wrong_length = |_| PredictorError::Shape {
        tensor: tensor.to_owned(),
        expected: format!("[{}]", ShareHistogram::BINS),
        got: vec![values.len()],
    };
    let values: [i64; ShareHistogram::BINS] = values.try_into().map_err(wrong_length)?;
    match values.iter().position(|&n| n < 0) {
        Some(bin) => Err(PredictorError::Type {
            tensor: tensor.to_owned(),
            expected: "counts from 0 up",
            got: format!("{} in bin {bin}", values[bin]),
        }),
        None => Ok(ShareHistogram(values.map(i64::unsigned_abs))),
    }
}

fn token_count(values: &[i64], shape: &[usize]) -> Result<i64, PredictorError> {
    match *values {
        [n_tokens] if n_tokens > 0 => Ok(n_tokens),
        [n_tokens] => Err(PredictorError::NoTokens { n_tokens }),
        _ => Err(PredictorError::Shape {
            tensor: TOKENS.to_owned(),
            expected: "[1]".to_owned(),
            got: shape.to_vec(),
        }),
    }
}

fn check_counts(layer: LayerId, counts: Vec<i64>, n_tokens: i64) -> Result<Vec<u64>, PredictorError> {
    match counts.iter().position(|count| !(0..=n_tokens).contains(count)) {
        Some(neuron) => Err(PredictorError::BadCount {
            tensor: format!("activation_{layer}"),
            neuron,
            count: counts[neuron],
            n_tokens,
        }),
        None => Ok(counts.into_iter().map(i64::unsigned_abs).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, values: &[i64]) -> (String, Dtype, Vec<usize>, Vec<u8>) {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        (name.to_owned(), Dtype::I64, vec![values.len()], bytes)
    }

    fn file(tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
        let views = tensors
            .iter()
            .map(|(name, ty, shape, bytes)| (name, TensorView::new(*ty, shape.clone(), bytes).unwrap()));
        safetensors::serialize(views, None).unwrap()
    }

    fn error(tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)]) -> PredictorError {
        ActivationCounts::from_bytes(&file(tensors)).unwrap_err()
    }

    #[test]
    fn layers_come_by_number_not_by_the_order_of_names() {
        // The hot set of layer i is 8i..8i+8; by name, layers 10 and 11 would come before layer 2.
        let mut tensors: Vec<_> = (0..12)
            .map(|layer| {
                let hot = 8 * layer..8 * layer + 8;
                let counts: Vec<i64> =
                    (0..96).map(|j| if hot.contains(&j) { 90 + j % 8 } else { 1 }).collect();
                tensor(&format!("activation_{layer}"), &counts)
            })
            .collect();
        tensors.push(tensor("tokens", &[100]));
        let counts = ActivationCounts::from_bytes(&file(&tensors)).unwrap();
        assert_eq!((counts.n_layer(), counts.n_tokens()), (12, 100));
        for layer in 0..12 {
            let mut hot = counts.hottest_first(LayerId(layer)).unwrap();
            hot.truncate(8);
            let expected: Vec<NeuronId> = (8 * layer..8 * layer + 8).rev().map(NeuronId).collect();
            assert_eq!(hot, expected, "layer {layer}");
        }
        assert_eq!(counts.layer(LayerId(12)), None);
        let share = counts.active_share(LayerId(0)).unwrap();
        assert!((share - (8.0 * 93.5 + 88.0) / 9600.0).abs() < 1e-12, "{share}");
    }

    #[test]
    fn counts_are_read_back_added_up_and_kept_apart_from_other_models() {
        let mut counts =
            ActivationCounts::new(10, vec![vec![1, 2, 10], vec![0, 0, 7]]).unwrap().of_model("a");
        assert_eq!(ActivationCounts::from_bytes(&counts.to_bytes().unwrap()).unwrap(), counts);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.statistics.safetensors");
        counts.write(&path).unwrap();
        assert_eq!(ActivationCounts::open(&path).unwrap(), counts);

        let more = ActivationCounts::new(5, vec![vec![5, 0, 0], vec![1, 1, 1]]).unwrap();
        counts.merge(&more).unwrap();
        assert_eq!((counts.n_tokens(), counts.layer(LayerId(0)).unwrap()), (15, &[6, 2, 10][..]));
        assert_eq!(counts.fingerprint(), Some("a"));
        assert!(matches!(
            counts.merge(&more.clone().of_model("b")).unwrap_err(),
            PredictorError::OtherModel { .. }
        ));
        let other = ActivationCounts::new(5, vec![vec![5, 0], vec![1, 1, 1]]).unwrap();
        assert!(matches!(counts.merge(&other).unwrap_err(), PredictorError::Shape { .. }));
        assert!(matches!(counts.check_model("b").unwrap_err(), PredictorError::OtherModel { .. }));
        counts.check_model("a").unwrap();
        // 10 of 18 are under 80 %, 16 of 18 are over.
        assert_eq!(counts.share_making(LayerId(0), 0.8), Some(2.0 / 3.0));
    }

    fn histogram_of(fired: &[usize], n_ff: usize) -> ShareHistogram {
        let mut histogram = ShareHistogram::new();
        fired.iter().for_each(|&n| histogram.add(n, n_ff));
        histogram
    }

    #[test]
    fn a_histogram_sorts_tokens_by_hundredths() {
        // 0 and 9 of 1000 are below a hundredth, 10 is at it; 999 and 1000 share the last bin.
        let histogram = histogram_of(&[0, 9, 10, 500, 989, 990, 999, 1000], 1000);
        let mut want = [0; ShareHistogram::BINS];
        for (bin, n) in [(0, 2), (1, 1), (50, 1), (98, 1), (99, 3)] {
            want[bin] = n;
        }
        assert_eq!(histogram.bins(), &want);
        let within = |part| histogram.share_within(part);
        assert_eq!(
            [within(0.25), within(0.26), within(0.5), within(0.51), within(1.0)],
            [0.01, 0.02, 0.51, 0.99, 1.0]
        );
        assert_eq!(ShareHistogram::default().share_within(0.5), 0.0);
        // One of three is a third: bin 33.
        assert_eq!(histogram_of(&[1], 3).bins()[33], 1);
    }

    #[test]
    fn histograms_are_written_read_back_and_added_up() {
        let plain = ActivationCounts::new(2, vec![vec![1, 2], vec![0, 1]]).unwrap();
        let histograms = vec![histogram_of(&[1, 2], 2), histogram_of(&[0, 1], 2)];
        let mut counts = plain.clone().with_histograms(histograms.clone()).unwrap();
        assert_eq!(ActivationCounts::from_bytes(&counts.to_bytes().unwrap()).unwrap(), counts);
        counts.merge(&counts.clone()).unwrap();
        let doubled = ActivationCounts::from_bytes(&counts.to_bytes().unwrap()).unwrap();
        assert_eq!(doubled.histogram(LayerId(0)), Some(&histogram_of(&[1, 2, 1, 2], 2)));
        assert_eq!(doubled.histogram(LayerId(2)), None);
        // What is known of some of the tokens only is left out.
        counts.merge(&plain).unwrap();
        assert_eq!((counts.n_tokens(), counts.histogram(LayerId(0))), (6, None));

        let wrong = |histograms| plain.clone().with_histograms(histograms).unwrap_err().to_string();
        assert_eq!(wrong(histograms[..1].to_vec()), "tensor `active_share_1` is missing");
        assert_eq!(
            wrong([histograms.clone(), histograms.clone()].concat()),
            "tensor `activation_2` is missing"
        );
        assert_eq!(
            wrong(vec![histograms[0].clone(), histogram_of(&[1], 2)]),
            "tensor `active_share_1` is a histogram over 1 tokens, expected 2"
        );
    }

    #[test]
    fn histograms_in_files_are_not_believed() {
        let bins = |n: i64| {
            let mut bins = [0; ShareHistogram::BINS];
            (bins[3], bins[99]) = (n, 1);
            bins
        };
        let with = |shares: &[(&str, &[i64])]| {
            let mut tensors = vec![tensor("activation_0", &[1, 2]), tensor("activation_1", &[1, 2])];
            tensors.push(tensor("tokens", &[5]));
            tensors.extend(shares.iter().map(|(name, values)| tensor(name, values)));
            ActivationCounts::from_bytes(&file(&tensors)).map_err(|error| error.to_string())
        };
        let good = bins(4);
        assert!(with(&[("active_share_0", &good), ("active_share_1", &good)]).is_ok());
        for (shares, want) in [
            (vec![("active_share_0", &good[..])], "tensor `active_share_1` is missing"),
            (vec![("active_share_1", &good)], "tensor `active_share_0` is missing"),
            (
                vec![("active_share_0", &good), ("active_share_1", &bins(5))],
                "tensor `active_share_1` is a histogram over 6 tokens, expected 5",
            ),
            (vec![("active_share_0", &bins(-4))], "tensor `active_share_0` is -4 in bin 3"),
            (
                vec![("active_share_0", &good[1..])],
                "tensor `active_share_0` has the shape [99], expected [100]",
            ),
        ] {
            let error = with(&shares).unwrap_err();
            assert!(error.starts_with(want), "{error}");
        }
    }

    #[test]
    fn later_versions_of_the_file_are_refused() {
        let tensors = [tensor("activation_0", &[1, 2]), tensor("tokens", &[5])];
        let views = || {
            let view = |(name, ty, shape, bytes)| (name, TensorView::new(ty, shape, bytes).unwrap());
            tensors.iter().map(|(name, ty, shape, bytes)| (name, *ty, shape.clone(), &bytes[..])).map(view)
        };
        for (version, is_known) in [("1", true), ("2", true), ("3", false), ("0", false), ("two", false)] {
            let metadata = HashMap::from([("format_version".to_owned(), version.to_owned())]);
            let read =
                ActivationCounts::from_bytes(&safetensors::serialize(views(), Some(metadata)).unwrap());
            match read {
                Ok(_) => assert!(is_known, "{version}"),
                Err(error) => {
                    assert!(!is_known && matches!(error, PredictorError::NewerFormat { .. }), "{error}");
                }
            }
        }
        // Without histograms, a file is one of version 1, which says so.
        let bytes = ActivationCounts::new(1, vec![vec![1]]).unwrap().to_bytes().unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format_version"], "1");
    }

    #[cfg(not(feature = "pt"))]
    #[test]
    fn files_of_pytorch_need_the_feature() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().to_owned(), folder.path().join("activation_0.pt")] {
            let PredictorError::InFile { source, .. } = ActivationCounts::open(path).unwrap_err() else {
                panic!()
            };
            assert!(matches!(*source, PredictorError::NoPt));
        }
    }

    #[test]
    fn counts_that_cannot_be_are_refused_when_they_are_made() {
        assert!(ActivationCounts::new(0, vec![vec![0]]).is_err());
        assert!(ActivationCounts::new(1, vec![]).is_err());
        assert!(ActivationCounts::new(1, vec![vec![]]).is_err());
        assert!(ActivationCounts::new(1, vec![vec![2]]).is_err());
    }

    #[test]
    fn equal_counts_keep_the_order_of_ids() {
        let tensors = [tensor("activation_0", &[3, 5, 3, 5]), tensor("tokens", &[5])];
        let counts = ActivationCounts::from_bytes(&file(&tensors)).unwrap();
        assert_eq!(counts.hottest_first(LayerId(0)).unwrap(), [1, 3, 0, 2].map(NeuronId));
    }

    #[test]
    fn what_is_missing_or_stray_is_named() {
        let tokens = || tensor("tokens", &[5]);
        let layer = |n: u32| tensor(&format!("activation_{n}"), &[1, 2]);
        assert!(matches!(error(&[layer(0)]), PredictorError::MissingTensor { tensor } if tensor == "tokens"));
        assert!(matches!(error(&[tokens()]), PredictorError::NoLayers { .. }));
        let missing = error(&[tokens(), layer(0), layer(2)]);
        assert!(
            matches!(
                missing,
                PredictorError::MissingLayer { layer: LayerId(1), n_found: 2, last: LayerId(2) }
            ),
            "{missing}"
        );
        for stray in ["activation_01", "activation_+1", "activation_", "bias", "activation_4294967296"] {
            let err = error(&[tokens(), layer(0), tensor(stray, &[1, 2])]);
            assert!(
                matches!(&err, PredictorError::UnexpectedTensor { tensor, .. } if tensor == stray),
                "{err}"
            );
        }
    }

    #[test]
    fn numbers_that_cannot_be_counts_are_refused() {
        let layer = |values: &[i64]| tensor("activation_0", values);
        for bad in [-1, 6, i64::MIN] {
            let err = error(&[layer(&[5, bad]), tensor("tokens", &[5])]);
            assert!(
                matches!(err, PredictorError::BadCount { neuron: 1, count, n_tokens: 5, .. } if count == bad),
                "{err}"
            );
        }
        let err = error(&[layer(&[0]), tensor("tokens", &[0])]);
        assert!(matches!(err, PredictorError::NoTokens { n_tokens: 0 }), "{err}");
        let err = error(&[layer(&[0]), tensor("tokens", &[1, 1])]);
        assert!(matches!(&err, PredictorError::Shape { got, .. } if *got == [2]), "{err}");
        let err = error(&[layer(&[]), tensor("tokens", &[1])]);
        assert!(matches!(&err, PredictorError::Shape { got, .. } if *got == [0]), "{err}");
        let floats = ("activation_0".to_owned(), Dtype::F64, vec![1], vec![0; 8]);
        let err = error(&[floats, tensor("tokens", &[1])]);
        assert!(matches!(&err, PredictorError::Type { got, .. } if got == "F64"), "{err}");
    }

    #[test]
    fn every_cut_of_a_file_is_refused() {
        let bytes = file(&[tensor("activation_0", &[1, 2]), tensor("tokens", &[5])]);
        assert!(ActivationCounts::from_bytes(&bytes).is_ok());
        for n in 0..bytes.len() {
            let err = ActivationCounts::from_bytes(&bytes[..n]).unwrap_err();
            assert!(matches!(err, PredictorError::Format(_)), "{n} bytes: {err}");
        }
    }
}
