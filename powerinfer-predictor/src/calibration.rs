//! 2-bit gate copies with calibrated thresholds of all layers of one model, in a file.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use half::f16;
use powerinfer_sparse_ops::{GateCopy, GateCopyParts, LayerId, WeightBytes};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};

use crate::error::{PredictorError, shortened};
use crate::file::{check_layers, layer_number, write_atomic};
use crate::weights::{FloatType, read};

/// The one key of the file's metadata; its value is JSON.
const KEY: &str = "powerinfer.calibration";
const VERSION: u32 = 1;
const EXPECTED: &str =
    "`blk.N.` and one of `codes`, `scales`, `thresholds`, `mean`, `outliers`, `outlier_weights`";

/// What a layer's copy did on text that set none of its numbers.
///
/// The figures belong together: a recall says nothing without the share of neurons that it was bought with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecallFigures {
    /// Share of the active neurons that were selected.
    pub recall: f64,
    /// Share of the selected neurons that were active.
    pub precision: f64,
    /// Share of all neurons that were selected.
    pub selected: f64,
    /// Share of `Σ act(gate) · |up| · ‖down‖` that the selected neurons hold.
    pub mass_recall: f64,
}

/// Why a layer uses its copy, or computes its gate exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UseReason {
    /// The layer took less time with the copy.
    Faster,
    /// The layer took no less time with the copy.
    Slower,
    /// Whoever calibrated asked for every layer.
    AsAsked,
}

/// What is known about a layer of a calibration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerFigures {
    /// Whether mode `predictor` uses the copy; otherwise it computes the layer exactly.
    pub used: bool,
    /// Why.
    pub reason: UseReason,
    /// Microseconds of a decoding step in this layer, attention included, in mode `exact`.
    pub exact_us: f64,
    /// The same with the copy. Both were measured where the file was made; they decide nothing at run time.
    pub predictor_us: f64,
    /// Share of the neurons that were active.
    pub active: f64,
    /// For each recall of the file, in its order.
    pub at: Vec<RecallFigures>,
}

/// The copy of one layer.
#[derive(Clone, Debug)]
pub struct CalibrationLayer {
    copy: GateCopy,
    /// `[n_recalls, n_ff]`.
    thresholds: Vec<f32>,
    figures: LayerFigures,
}

impl CalibrationLayer {
    /// A layer from its parts. The thresholds that `copy` has do not count.
    ///
    /// # Shapes
    /// `thresholds [n_recalls, n_ff]`; `figures.at [n_recalls]`.
    ///
    /// # Errors
    /// [`PredictorError::Shape`], [`PredictorError::Thresholds`] if one is NaN or +∞.
    pub fn new(copy: GateCopy, thresholds: Vec<f32>, figures: LayerFigures) -> Result<Self, PredictorError> {
        let (n_recalls, n_ff) = (figures.at.len(), copy.n_ff());
        if n_ff == 0 || thresholds.len() != n_recalls * n_ff {
            return Err(PredictorError::Shape {
                tensor: "thresholds".to_owned(),
                expected: format!("[{n_recalls}, {n_ff}]"),
                got: vec![thresholds.len()],
            });
        }
        // A neuron that is never computed is none of the model's any more.
        match thresholds.iter().position(|&t| t.is_nan() || t == f32::INFINITY) {
            Some(at) => Err(PredictorError::Thresholds { neuron: at % n_ff, value: thresholds[at] }),
            None => Ok(Self { copy, thresholds, figures }),
        }
    }

    /// What is known about the layer.
    pub fn figures(&self) -> &LayerFigures {
        &self.figures
    }

    /// Number of neurons.
    pub fn n_ff(&self) -> usize {
        self.copy.n_ff()
    }

    /// Number of columns kept apart.
    pub fn n_outliers(&self) -> usize {
        self.copy.n_outliers()
    }

    /// The copy with the thresholds of the recall at this place of [`CalibrationFile::recalls`].
    ///
    /// # Panics
    /// If there is no such place.
    pub fn gate_copy(&self, recall_ix: usize) -> GateCopy {
        let n_ff = self.copy.n_ff();
        let thresholds = self.thresholds[recall_ix * n_ff..][..n_ff].to_vec();
        self.copy.clone().with_thresholds(thresholds).expect("thresholds were checked with the layer")
    }

    /// Says whether the copy is used, and why.
    pub fn decide(&mut self, used: bool, reason: UseReason, exact_us: f64, predictor_us: f64) {
        self.figures = LayerFigures { used, reason, exact_us, predictor_us, ..self.figures.clone() };
    }
}

/// Gate copies of all layers, for one model file.
///
/// On disk this is a safetensors file; see `docs/file-format.md`.
#[derive(Clone, Debug)]
pub struct CalibrationFile {
    fingerprint: String,
    n_tokens: u64,
    recalls: Vec<f32>,
    default_recall: f32,
    layers: Vec<CalibrationLayer>,
}

/// The JSON of the metadata.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    version: u32,
    fingerprint: String,
    n_tokens: u64,
    recalls: Vec<f32>,
    default_recall: f32,
    layers: Vec<LayerFigures>,
}

impl CalibrationFile {
    /// A calibration from layers in memory, layer 0 first.
    ///
    /// `fingerprint` tells the model file apart from others; `recalls` ascend, and the one that is used unless
    /// another is asked for is among them.
    ///
    /// # Errors
    /// [`PredictorError::NoLayers`], [`PredictorError::Calibration`] if the recalls do not ascend between 0 and
    /// 1, [`PredictorError::Shape`] if a layer has figures for more or fewer of them or another width.
    pub fn new(
        fingerprint: String,
        n_tokens: u64,
        recalls: Vec<f32>,
        default_recall: f32,
        layers: Vec<CalibrationLayer>,
    ) -> Result<Self, PredictorError> {
        let first =
            layers.first().ok_or_else(|| PredictorError::NoLayers { expected: name(LayerId(0), "codes") })?;
        // Written so that NaN is refused.
        let ascend = recalls.windows(2).all(|pair| pair[0] < pair[1]);
        if recalls.is_empty() || !ascend || !recalls.iter().all(|&r| r > 0.0 && r < 1.0) {
            return Err(PredictorError::Calibration {
                key: "recalls",
                expected: "numbers between 0 and 1 that ascend",
                got: shortened(&format!("{recalls:?}")),
            });
        }
        if !recalls.contains(&default_recall) {
            return Err(PredictorError::Calibration {
                key: "default_recall",
                expected: "one of the recalls",
                got: default_recall.to_string(),
            });
        }
        for (id, layer) in (0..).map(LayerId).zip(&layers) {
            if layer.figures.at.len() != recalls.len() {
                return Err(PredictorError::Shape {
                    tensor: name(id, "thresholds"),
                    expected: format!("a row for each of {} recalls", recalls.len()),
                    got: vec![layer.figures.at.len()],
                });
            }
            if layer.copy.n_embd() != first.copy.n_embd() {
                return Err(PredictorError::Shape {
                    tensor: name(id, "mean"),
                    expected: format!("[{}] as in layer 0", first.copy.n_embd()),
                    got: vec![layer.copy.n_embd()],
                });
            }
        }
        Ok(Self { fingerprint, n_tokens, recalls, default_recall, layers })
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`PredictorError::Read`], or [`PredictorError::InFile`] with an error of [`CalibrationFile::from_bytes`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, PredictorError> {
        let path = path.as_ref();
        read(path).and_then(|bytes| Self::from_bytes(&bytes)).map_err(|error| error.in_file(path))
    }

    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// A [`PredictorError`] that names the tensor or key: not the format, no calibration, another version, a
    /// missing layer or tensor, a stray one, another type, shapes that do not fit, a number that is NaN.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PredictorError> {
        let (_, metadata) = SafeTensors::read_metadata(bytes)?;
        let text = metadata.metadata().as_ref().and_then(|map| map.get(KEY));
        let text = text.ok_or(PredictorError::Calibration {
            key: KEY,
            expected: "there in the metadata of a calibration",
            got: "nothing".to_owned(),
        })?;
        let version = version(text)?;
        if version.as_u64() != Some(VERSION.into()) {
            return Err(PredictorError::Calibration {
                key: "version",
                expected: "1",
                got: shortened(&version.to_string()),
            });
        }
        let header: Header = serde_json::from_str(text).map_err(|error| PredictorError::Json(Some(error)))?;
        let file = SafeTensors::deserialize(bytes)?;
        let mut views: BTreeMap<LayerId, HashMap<&str, TensorView<'_>>> = BTreeMap::new();
        for (name, view) in file.iter() {
            let (layer, part) = parse_name(name).ok_or_else(|| PredictorError::UnexpectedTensor {
                tensor: shortened(name),
                expected: EXPECTED,
            })?;
            views.entry(layer).or_default().insert(part, view);
        }
        check_layers(views.keys().copied(), &name(LayerId(0), "codes"))?;
        if views.len() != header.layers.len() {
            return Err(PredictorError::Calibration {
                key: "layers",
                expected: "an entry for each layer of tensors",
                got: format!("{} entries, {} layers", header.layers.len(), views.len()),
            });
        }
        let layers = views
            .into_iter()
            .zip(header.layers)
            .map(|((layer, views), figures)| parse_layer(layer, &views, figures))
            .collect::<Result<_, _>>()?;
        Self::new(header.fingerprint, header.n_tokens, header.recalls, header.default_recall, layers)
    }

    /// The bytes of the file.
    ///
    /// # Errors
    /// [`PredictorError::Format`] if it is too large for the format.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PredictorError> {
        let header = Header {
            version: VERSION,
            fingerprint: self.fingerprint.clone(),
            n_tokens: self.n_tokens,
            recalls: self.recalls.clone(),
            default_recall: self.default_recall,
            layers: self.layers.iter().map(|layer| layer.figures.clone()).collect(),
        };
        let header = serde_json::to_string(&header).map_err(|error| PredictorError::Json(Some(error)))?;
        let mut tensors = Vec::new();
        for (id, layer) in (0..).map(LayerId).zip(&self.layers) {
            let (copy, n_ff) = (&layer.copy, layer.copy.n_ff());
            let mut add = |part, dtype, shape: Vec<usize>, bytes: Vec<u8>| {
                tensors.push((name(id, part), dtype, shape, bytes));
            };
            add("codes", Dtype::U8, vec![copy.codes().len()], copy.codes().as_slice().to_vec());
            add("scales", Dtype::F32, vec![n_ff], le_bytes(copy.scales()));
            add("thresholds", Dtype::F32, vec![self.recalls.len(), n_ff], le_bytes(&layer.thresholds));
            add("mean", Dtype::F32, vec![copy.n_embd()], le_bytes(copy.mean()));
            if copy.n_outliers() > 0 {
                let columns = copy.outliers().iter().flat_map(|c| c.to_le_bytes()).collect();
                add("outliers", Dtype::U32, vec![copy.n_outliers()], columns);
                let weights = copy.outlier_weights().iter().flat_map(|w| w.to_le_bytes()).collect();
                add("outlier_weights", Dtype::F16, vec![n_ff, copy.n_outliers()], weights);
            }
        }
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, PredictorError>>()?;
        Ok(safetensors::serialize(views, Some(HashMap::from([(KEY.to_owned(), header)])))?)
    }

    /// Writes the file: under a temporary name first, which takes the place of `path` when all bytes have reached
    /// the disk.
    ///
    /// # Errors
    /// [`PredictorError::Write`], after which what was there before stays, and those of
    /// [`CalibrationFile::to_bytes`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), PredictorError> {
        write_atomic(path.as_ref(), &self.to_bytes()?)
    }

    /// What tells the model file apart that this was made from.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Refuses a model file with another fingerprint.
    ///
    /// # Errors
    /// [`PredictorError::OtherModel`], naming both.
    pub fn check_model(&self, fingerprint: &str) -> Result<(), PredictorError> {
        if self.fingerprint == fingerprint {
            return Ok(());
        }
        Err(PredictorError::OtherModel { expected: self.fingerprint.clone(), got: fingerprint.to_owned() })
    }

    /// Tokens that the numbers were fitted on.
    pub fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    /// The recalls there are thresholds for, ascending.
    pub fn recalls(&self) -> &[f32] {
        &self.recalls
    }

    /// The recall that is used unless another is asked for.
    pub fn default_recall(&self) -> f32 {
        self.default_recall
    }

    /// The place in [`CalibrationFile::recalls`] of the smallest one that is at least `asked`; that of the default
    /// without a wish.
    ///
    /// # Errors
    /// [`PredictorError::Recall`] if it is above all of them, or not above 0.
    pub fn recall_ix(&self, asked: Option<f32>) -> Result<usize, PredictorError> {
        let asked = asked.unwrap_or(self.default_recall);
        let place = self.recalls.iter().position(|&recall| asked > 0.0 && asked <= recall);
        place.ok_or_else(|| PredictorError::Recall { asked, stored: self.recalls.clone() })
    }

    /// The layers, layer 0 first; at least one.
    pub fn layers(&self) -> &[CalibrationLayer] {
        &self.layers
    }

    /// The layers, to decide which are used.
    pub fn layers_mut(&mut self) -> &mut [CalibrationLayer] {
        &mut self.layers
    }
}

fn name(layer: LayerId, part: &str) -> String {
    format!("blk.{layer}.{part}")
}

fn parse_name(name: &str) -> Option<(LayerId, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let known = ["codes", "scales", "thresholds", "mean", "outliers", "outlier_weights"];
    known.contains(&part).then_some((layer_number(layer)?, part))
}

/// Read apart from the rest, which another version may have otherwise.
fn version(text: &str) -> Result<serde_json::Value, PredictorError> {
    let header: serde_json::Value =
        serde_json::from_str(text).map_err(|error| PredictorError::Json(Some(error)))?;
    Ok(header.get("version").cloned().unwrap_or_default())
}

fn parse_layer(
    layer: LayerId,
    views: &HashMap<&str, TensorView<'_>>,
    figures: LayerFigures,
) -> Result<CalibrationLayer, PredictorError> {
    let part = |part: &str, dtype: Dtype, expected: &'static str| match views.get(part) {
        None => Err(PredictorError::MissingTensor { tensor: name(layer, part) }),
        Some(view) if view.dtype() != dtype => Err(PredictorError::Type {
            tensor: name(layer, part),
            expected,
            got: format!("{:?}", view.dtype()),
        }),
        Some(view) => Ok(view),
    };
    let shape = |part: &str, view: &TensorView<'_>, expected: &[usize]| {
        if view.shape() == expected {
            return Ok(());
        }
        Err(PredictorError::Shape {
            tensor: name(layer, part),
            expected: format!("{expected:?}"),
            got: view.shape().to_vec(),
        })
    };
    let scales = part("scales", Dtype::F32, "F32")?;
    let mean = part("mean", Dtype::F32, "F32")?;
    let thresholds = part("thresholds", Dtype::F32, "F32")?;
    let codes = part("codes", Dtype::U8, "U8")?;
    let (n_ff, n_embd) = (scales.data().len() / 4, mean.data().len() / 4);
    shape("scales", scales, &[n_ff])?;
    shape("mean", mean, &[n_embd])?;
    shape("thresholds", thresholds, &[figures.at.len(), n_ff])?;
    let (outliers, outlier_weights) =
        if views.contains_key("outliers") || views.contains_key("outlier_weights") {
            let outliers = part("outliers", Dtype::U32, "U32")?;
            let weights = part("outlier_weights", Dtype::F16, "F16")?;
            let n_outliers = outliers.data().len() / 4;
            shape("outliers", outliers, &[n_outliers])?;
            shape("outlier_weights", weights, &[n_ff, n_outliers])?;
            (
                outliers.data().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect(),
                weights.data().as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect(),
            )
        } else {
            (Vec::new(), Vec::new())
        };
    let copy = GateCopy::try_new(GateCopyParts {
        n_ff,
        n_embd,
        codes: aligned(codes.data()),
        scales: FloatType::F32.decode(scales.data()),
        thresholds: vec![f32::NEG_INFINITY; n_ff],
        outliers,
        outlier_weights,
        mean: FloatType::F32.decode(mean.data()),
    })
    .map_err(|source| PredictorError::GateCopy { layer, source })?;
    CalibrationLayer::new(copy, FloatType::F32.decode(thresholds.data()), figures)
        .map_err(|error| error.in_layer(layer))
}

/// A copy that starts on a multiple of 64, as kernels like it best.
fn aligned(bytes: &[u8]) -> WeightBytes {
    let mut buffer = vec![0; bytes.len() + 63];
    let start = buffer.as_ptr().addr().next_multiple_of(64) - buffer.as_ptr().addr();
    buffer[start..start + bytes.len()].copy_from_slice(bytes);
    WeightBytes::new(Arc::new(buffer), start..start + bytes.len())
}

fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use powerinfer_sparse_ops::{GateCopyError, WeightMatrix};

    use super::*;

    const N_EMBD: usize = 6;

    fn figures(recall: f64) -> LayerFigures {
        let at = [recall, recall / 2.0 + 0.5].map(|recall| RecallFigures {
            recall,
            precision: 0.5,
            selected: 0.25,
            mass_recall: 0.999,
        });
        let (exact_us, predictor_us) = (12.5, 8.25);
        let reason = UseReason::Faster;
        LayerFigures { used: true, reason, exact_us, predictor_us, active: 0.125, at: at.to_vec() }
    }

    fn layer(n_ff: usize, outliers: Vec<u32>) -> CalibrationLayer {
        let weights = (0..n_ff * N_EMBD).map(|i| (i as f32 * 0.7).sin()).collect();
        let gate = WeightMatrix::from_f32("gate", n_ff, N_EMBD, weights).unwrap();
        let mean = (0..N_EMBD).map(|i| i as f32 / 8.0).collect();
        let copy = GateCopy::from_gate(&gate, mean, outliers).unwrap();
        let mut thresholds: Vec<f32> = (0..2 * n_ff).map(|i| i as f32 - 3.0).collect();
        thresholds[1] = f32::NEG_INFINITY;
        CalibrationLayer::new(copy, thresholds, figures(0.5)).unwrap()
    }

    fn calibration() -> CalibrationFile {
        let layers = vec![layer(5, vec![]), layer(7, vec![1, 4])];
        CalibrationFile::new("abc123".to_owned(), 4096, vec![0.95, 0.99], 0.99, layers).unwrap()
    }

    type RawTensor = (String, Dtype, Vec<usize>, Vec<u8>);

    /// The file with its tensors and its JSON changed.
    fn changed(change: impl FnOnce(&mut Vec<RawTensor>, &mut serde_json::Value)) -> Vec<u8> {
        let bytes = calibration().to_bytes().unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let mut header = serde_json::from_str(&metadata.metadata().as_ref().unwrap()[KEY]).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Vec<RawTensor> = file
            .iter()
            .map(|(name, view)| (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec()))
            .collect();
        change(&mut tensors, &mut header);
        let views = tensors
            .iter()
            .map(|(name, ty, shape, bytes)| (name, TensorView::new(*ty, shape.clone(), bytes).unwrap()));
        let metadata = HashMap::from([(KEY.to_owned(), header.to_string())]);
        safetensors::serialize(views, Some(metadata)).unwrap()
    }

    fn with_tensor(name: &str, change: impl FnOnce(&mut RawTensor)) -> PredictorError {
        let bytes = changed(|tensors, _| change(tensors.iter_mut().find(|t| t.0 == name).unwrap()));
        CalibrationFile::from_bytes(&bytes).unwrap_err()
    }

    fn with_header(change: impl FnOnce(&mut serde_json::Value)) -> PredictorError {
        CalibrationFile::from_bytes(&changed(|_, header| change(header))).unwrap_err()
    }

    #[test]
    fn a_file_comes_back_as_it_was() {
        let calibration = calibration();
        let bytes = calibration.to_bytes().unwrap();
        let again = CalibrationFile::from_bytes(&bytes).unwrap();
        assert_eq!((again.fingerprint(), again.n_tokens()), ("abc123", 4096));
        assert_eq!((again.recalls(), again.default_recall()), (&[0.95, 0.99][..], 0.99));
        for (layer, again) in calibration.layers().iter().zip(again.layers()) {
            assert_eq!(layer.figures(), again.figures());
            for recall_ix in [0, 1] {
                let (a, b) = (layer.gate_copy(recall_ix), again.gate_copy(recall_ix));
                assert_eq!(a.thresholds(), b.thresholds());
                assert_eq!(a.outliers(), b.outliers());
                assert_eq!(a.codes().as_slice(), b.codes().as_slice());
                assert_eq!(b.codes().as_slice().as_ptr().addr() % 64, 0);
                let x = [0.5, -1.0, 2.0, 0.25, -0.75, 3.0];
                assert_eq!(a.score(&x), b.score(&x));
            }
        }
        assert_eq!(again.to_bytes().unwrap(), bytes, "the same bytes each time");
    }

    #[test]
    fn a_file_is_written_whole_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.calibration.safetensors");
        calibration().write(&path).unwrap();
        calibration().write(&path).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(CalibrationFile::open(&path).unwrap().layers().len(), 2);
        let err = CalibrationFile::open(folder.path().join("none")).unwrap_err();
        assert!(matches!(err, PredictorError::Read { .. }), "{err}");
        std::fs::write(&path, b"x").unwrap();
        let err = CalibrationFile::open(&path).unwrap_err();
        assert!(matches!(err, PredictorError::InFile { .. }), "{err}");
    }

    #[test]
    fn the_smallest_recall_that_is_enough_is_taken() {
        let calibration = calibration();
        for (asked, ix) in [(None, 1), (Some(0.5), 0), (Some(0.95), 0), (Some(0.96), 1), (Some(0.99), 1)] {
            assert_eq!(calibration.recall_ix(asked).unwrap(), ix, "{asked:?}");
        }
        for asked in [0.995, 0.0, -1.0, f32::NAN] {
            let err = calibration.recall_ix(Some(asked)).unwrap_err();
            assert!(matches!(err, PredictorError::Recall { .. }), "{err}");
        }
    }

    #[test]
    fn another_model_is_refused_with_both_fingerprints() {
        assert!(calibration().check_model("abc123").is_ok());
        let text = calibration().check_model("def456").unwrap_err().to_string();
        assert!(text.contains("abc123") && text.contains("def456"), "{text}");
    }

    #[test]
    fn every_cut_of_a_file_is_refused() {
        let bytes = calibration().to_bytes().unwrap();
        for n in 0..bytes.len() {
            let err = CalibrationFile::from_bytes(&bytes[..n]).unwrap_err();
            assert!(matches!(err, PredictorError::Format(_)), "{n} bytes: {err}");
        }
    }

    #[test]
    fn tensors_of_another_kind_are_named() {
        for (part, dtype) in [
            ("codes", Dtype::I8),
            ("scales", Dtype::I32),
            ("thresholds", Dtype::I32),
            ("mean", Dtype::U32),
            ("outliers", Dtype::I32),
            ("outlier_weights", Dtype::BF16),
        ] {
            let name = format!("blk.1.{part}");
            let err = with_tensor(&name, |tensor| tensor.1 = dtype);
            assert!(matches!(&err, PredictorError::Type { tensor, .. } if *tensor == name), "{err}");
        }
        for part in ["scales", "thresholds", "mean", "outliers", "outlier_weights"] {
            let name = format!("blk.1.{part}");
            let err = with_tensor(&name, |tensor| tensor.2.insert(0, 1));
            assert!(matches!(&err, PredictorError::Shape { tensor, .. } if *tensor == name), "{err}");
        }
        let err = with_tensor("blk.1.codes", |tensor| {
            tensor.3.pop();
            tensor.2 = vec![tensor.3.len()];
        });
        let is_length = |e: &PredictorError| {
            matches!(e, PredictorError::GateCopy { layer: LayerId(1), source: GateCopyError::Length { .. } })
        };
        assert!(is_length(&err), "{err}");
        for part in ["codes", "scales", "thresholds", "mean", "outliers", "outlier_weights"] {
            let name = format!("blk.1.{part}");
            let bytes = changed(|tensors, _| tensors.retain(|t| t.0 != name));
            let err = CalibrationFile::from_bytes(&bytes).unwrap_err();
            assert!(matches!(&err, PredictorError::MissingTensor { tensor } if *tensor == name), "{err}");
        }
    }

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        let put = |tensor: &mut RawTensor, value: f32| tensor.3[..4].copy_from_slice(&value.to_le_bytes());
        for part in ["scales", "mean"] {
            let err = with_tensor(&format!("blk.0.{part}"), |tensor| put(tensor, f32::NAN));
            assert!(matches!(err, PredictorError::GateCopy { .. }), "{err}");
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let err = with_tensor("blk.0.thresholds", |tensor| put(tensor, bad));
            let PredictorError::InLayer { layer: LayerId(0), source } = err else { panic!("{err}") };
            assert!(matches!(*source, PredictorError::Thresholds { neuron: 0, .. }), "{source}");
        }
        let err = with_tensor("blk.1.outliers", |tensor| tensor.3[4] = 200);
        assert!(matches!(err, PredictorError::GateCopy { .. }), "{err}");
    }

    #[test]
    fn stray_tensors_and_missing_layers_are_named() {
        for stray in ["blk.0.gate", "blk.00.codes", "layers.0.codes", "blk.0"] {
            let bytes = changed(|tensors, _| tensors[0].0 = stray.to_owned());
            let err = CalibrationFile::from_bytes(&bytes).unwrap_err();
            assert!(matches!(err, PredictorError::UnexpectedTensor { .. }), "{stray}: {err}");
        }
        let bytes = changed(|tensors, _| tensors.retain(|t| !t.0.starts_with("blk.0.")));
        let err = CalibrationFile::from_bytes(&bytes).unwrap_err();
        assert!(matches!(err, PredictorError::MissingLayer { layer: LayerId(0), .. }), "{err}");
        let bytes = changed(|tensors, _| tensors.clear());
        let err = CalibrationFile::from_bytes(&bytes).unwrap_err();
        assert!(matches!(err, PredictorError::NoLayers { .. }), "{err}");
    }

    #[test]
    fn headers_that_say_something_else_are_refused() {
        let key = |err: &PredictorError| match err {
            PredictorError::Calibration { key, .. } => *key,
            _ => "",
        };
        let plain = safetensors::serialize(Vec::<(String, TensorView<'_>)>::new(), None).unwrap();
        assert_eq!(key(&CalibrationFile::from_bytes(&plain).unwrap_err()), KEY);
        assert_eq!(key(&with_header(|h| h["version"] = 2.into())), "version");
        assert_eq!(key(&with_header(|h| *h = serde_json::json!([]))), "version");
        for bad in [serde_json::json!([]), serde_json::json!([0.99, 0.95]), serde_json::json!([0.95, 1.0])] {
            assert_eq!(key(&with_header(|h| h["recalls"] = bad.clone())), "recalls", "{bad}");
        }
        assert_eq!(key(&with_header(|h| h["default_recall"] = 0.5.into())), "default_recall");
        assert_eq!(key(&with_header(|h| h["layers"] = serde_json::json!([]))), "layers");
        assert!(matches!(with_header(|h| h["layers"] = 3.into()), PredictorError::Json(Some(_))));
        let err = with_header(|h| h["layers"][0]["at"] = serde_json::json!([]));
        assert!(matches!(err, PredictorError::Shape { .. }), "{err}");
    }

    #[test]
    fn layers_of_another_width_do_not_fit_together() {
        let gate = WeightMatrix::from_f32("gate", 2, 3, vec![0.5; 6]).unwrap();
        let copy = GateCopy::from_gate(&gate, vec![0.0; 3], vec![]).unwrap();
        let other = CalibrationLayer::new(copy.clone(), vec![0.0; 4], figures(0.5)).unwrap();
        let layers = vec![layer(5, vec![]), other];
        let err = CalibrationFile::new(String::new(), 1, vec![0.95, 0.99], 0.99, layers).unwrap_err();
        assert!(matches!(err, PredictorError::Shape { .. }), "{err}");
        let err = CalibrationLayer::new(copy, vec![0.0; 3], figures(0.5)).unwrap_err();
        assert!(matches!(err, PredictorError::Shape { .. }), "{err}");
        let err = CalibrationFile::new(String::new(), 1, vec![0.5], 0.5, vec![]).unwrap_err();
        assert!(matches!(err, PredictorError::NoLayers { .. }), "{err}");
    }
}
