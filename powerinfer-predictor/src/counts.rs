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
const EXPECTED: &str = "`activation_N` and `tokens`";

/// Activation statistics: for each layer and neuron, how many tokens had it active. Hot neurons are those
/// with the highest counts.
///
/// The file is in the safetensors format: tensors `activation_N` (I64, `[n_ff]`) for each layer N, and `tokens` (I64,
/// `[1]`), the number of tokens. Its metadata may have the key `fingerprint`, which tells the model file apart from
/// others; files without it, such as those of other programs, are read as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActivationCounts {
    n_tokens: u64,
    layers: Vec<Vec<u64>>,
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
        Ok(Self { n_tokens, layers, fingerprint: None })
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
    /// the same.
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
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::I64, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        let metadata =
            self.fingerprint.as_ref().map(|f| HashMap::from([(FINGERPRINT.to_owned(), f.clone())]));
        Ok(safetensors::serialize(views, metadata)?)
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

    /// Reads a file.
    ///
    /// # Errors
    /// [`PredictorError::Read`], or [`PredictorError::InFile`] with an error of
    /// [`ActivationCounts::from_bytes`] in it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, PredictorError> {
        let path = path.as_ref();
        Self::from_bytes(&read(path)?).map_err(|error| error.in_file(path))
    }

    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// A [`PredictorError`] that names the tensor: not the format, a missing layer, a stray tensor, another
    /// type or shape, no tokens, or a count that is negative or above the number of tokens.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PredictorError> {
        let file = SafeTensors::deserialize(bytes)?;
        let mut layers = BTreeMap::new();
        let mut n_tokens = None;
        for (name, view) in file.iter() {
            let values = integers(name, &view)?;
            match name.strip_prefix("activation_").and_then(layer_number) {
                Some(layer) => {
                    layers.insert(layer, values);
                }
                None if name == TOKENS => n_tokens = Some(token_count(&values, view.shape())?),
                None => {
                    return Err(PredictorError::UnexpectedTensor {
                        tensor: shortened(name),
                        expected: EXPECTED,
                    });
                }
            }
        }
        let n_tokens = n_tokens.ok_or_else(|| PredictorError::MissingTensor { tensor: TOKENS.to_owned() })?;
        check_layers(layers.keys().copied(), "activation_0")?;
        let layers = layers.into_iter().map(|(layer, counts)| check_counts(layer, counts, n_tokens));
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let fingerprint = header.metadata().as_ref().and_then(|map| map.get(FINGERPRINT).cloned());
        Ok(Self { layers: layers.collect::<Result<_, _>>()?, n_tokens: n_tokens.unsigned_abs(), fingerprint })
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
