//! Predictors of all layers of a model, in files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use powerinfer_sparse_ops::LayerId;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::error::{PredictorError, shortened};
use crate::weights::{FloatType, Matrix, matrix, read};

const WEIGHTS_FILE: &str = "model.safetensors";
const CONFIG_FILE: &str = "config.json";
const EXPECTED: &str = "`model.layers.N.fc1.weight` and `model.layers.N.fc2.weight`";

/// The two matrices of one layer: `score = fc2 · relu(fc1 · h)`.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictorLayer {
    fc1: Matrix,
    fc2: Matrix,
}

impl PredictorLayer {
    /// A layer from numbers in memory. The other sizes follow from the lengths.
    ///
    /// # Shapes
    /// `fc1 [rank, n_embd]`, `fc2 [n_ff, rank]`, none of the sizes zero.
    ///
    /// # Errors
    /// [`PredictorError::Shape`] if a length is not a multiple of the rank, [`PredictorError::NotFinite`].
    pub fn new(rank: usize, fc1: Vec<f32>, fc2: Vec<f32>) -> Result<Self, PredictorError> {
        let n_embd = fc1.len().checked_div(rank).unwrap_or(0);
        let n_ff = fc2.len().checked_div(rank).unwrap_or(0);
        let fc1 = Matrix::new("fc1.weight", rank, n_embd, fc1)?;
        let fc2 = Matrix::new("fc2.weight", n_ff, rank, fc2)?;
        Ok(Self { fc1, fc2 })
    }

    /// First matrix, `[rank, n_embd]`.
    pub fn fc1(&self) -> &Matrix {
        &self.fc1
    }

    /// Second matrix, `[n_ff, rank]`.
    pub fn fc2(&self) -> &Matrix {
        &self.fc2
    }

    /// Width between the matrices. Layers may differ in it.
    pub fn rank(&self) -> usize {
        self.fc1.n_rows()
    }

    /// Width of the input.
    pub fn n_embd(&self) -> usize {
        self.fc1.n_cols()
    }

    /// Number of scores, one for each neuron.
    pub fn n_ff(&self) -> usize {
        self.fc2.n_rows()
    }
}

/// The predictors of all layers, and the threshold they were made for.
///
/// On disk this is a folder with `model.safetensors`, which holds `model.layers.N.fc1.weight` `[rank,
/// n_embd]` and `model.layers.N.fc2.weight` `[n_ff, rank]` as F32, F16 or BF16 for every layer N from 0, and
/// optionally `config.json`, of which these keys count:
///
/// | key | meaning |
/// | --- | --- |
/// | `sparse_threshold` | number; a neuron is computed unless its score is below it |
/// | `activation` | must be `"relu"` if it is there |
/// | `bias` | must be `false` if it is there |
#[derive(Clone, Debug, PartialEq)]
pub struct PredictorFile {
    layers: Vec<PredictorLayer>,
    sparse_threshold: Option<f32>,
}

impl PredictorFile {
    /// Predictors from layers in memory, layer 0 first.
    ///
    /// # Errors
    /// [`PredictorError::NoLayers`], [`PredictorError::Shape`] if the layers differ in `n_embd`, or
    /// [`PredictorError::Config`] if the threshold is not finite.
    pub fn new(layers: Vec<PredictorLayer>, sparse_threshold: Option<f32>) -> Result<Self, PredictorError> {
        let first =
            layers.first().ok_or_else(|| PredictorError::NoLayers { expected: fc1_name(LayerId(0)) })?;
        for (id, layer) in (0..).map(LayerId).zip(&layers) {
            if layer.n_embd() != first.n_embd() {
                return Err(PredictorError::Shape {
                    tensor: fc1_name(id),
                    expected: format!("[rank, {}] as in layer 0", first.n_embd()),
                    got: layer.fc1.shape(),
                });
            }
        }
        match sparse_threshold.filter(|threshold| !threshold.is_finite()) {
            Some(threshold) => Err(bad_threshold(threshold.to_string())),
            None => Ok(Self { layers, sparse_threshold }),
        }
    }

    /// Reads a folder. A path to a file is taken as that `model.safetensors`, with `config.json` beside it.
    ///
    /// # Errors
    /// [`PredictorError::Read`], or [`PredictorError::InFile`] with an error of [`PredictorFile::from_bytes`]
    /// in it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, PredictorError> {
        let path = path.as_ref();
        let weights = if path.is_dir() { path.join(WEIGHTS_FILE) } else { path.to_owned() };
        let config = weights.with_file_name(CONFIG_FILE);
        let sparse_threshold = match fs::read(&config) {
            Ok(bytes) => parse_config(&bytes).map_err(|error| error.in_file(&config))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(PredictorError::Read { path: config, source }),
        };
        let layers = read(&weights).and_then(|bytes| parse_layers(&bytes));
        layers.and_then(|layers| Self::new(layers, sparse_threshold)).map_err(|error| error.in_file(&weights))
    }

    /// Reads the bytes of `model.safetensors` and, if there is one, of `config.json`.
    ///
    /// # Errors
    /// A [`PredictorError`] that names the tensor or key: not the format, a missing layer or tensor, a stray
    /// one, another type, shapes that do not fit, a weight that is not finite, or a key of another kind of
    /// net.
    pub fn from_bytes(weights: &[u8], config: Option<&[u8]>) -> Result<Self, PredictorError> {
        let sparse_threshold = config.map(parse_config).transpose()?.flatten();
        Self::new(parse_layers(weights)?, sparse_threshold)
    }

    /// The layers, layer 0 first; at least one.
    pub fn layers(&self) -> &[PredictorLayer] {
        &self.layers
    }

    /// The predictor of a layer; `None` if there is no such layer.
    pub fn layer(&self, layer: LayerId) -> Option<&PredictorLayer> {
        self.layers.get(layer.index())
    }

    /// Number of layers, at least 1.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Width of the input of every layer.
    pub fn n_embd(&self) -> usize {
        self.layers.first().map_or(0, PredictorLayer::n_embd)
    }

    /// The threshold that `config.json` names, finite.
    pub fn sparse_threshold(&self) -> Option<f32> {
        self.sparse_threshold
    }

    /// The bytes of `model.safetensors`, weights rounded to `ty`.
    ///
    /// # Errors
    /// [`PredictorError::OutOfRange`] if the type cannot hold a weight.
    pub fn to_bytes(&self, ty: FloatType) -> Result<Vec<u8>, PredictorError> {
        let mut tensors = Vec::with_capacity(2 * self.layers.len());
        for (id, layer) in (0..).map(LayerId).zip(&self.layers) {
            for (name, matrix) in [(fc1_name(id), &layer.fc1), (fc2_name(id), &layer.fc2)] {
                let bytes = ty.encode(matrix.values()).map_err(|at| PredictorError::OutOfRange {
                    tensor: name.clone(),
                    row: at / matrix.n_cols(),
                    column: at % matrix.n_cols(),
                    value: matrix.values()[at],
                    ty: ty.name(),
                })?;
                tensors.push((name, matrix.shape(), bytes));
            }
        }
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(ty.dtype(), shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, PredictorError>>()?;
        Ok(safetensors::serialize(views, None)?)
    }

    /// The bytes of `config.json`.
    pub fn config_bytes(&self) -> Vec<u8> {
        let mut config = serde_json::json!({ "activation": "relu", "bias": false });
        if let Some(threshold) = self.sparse_threshold {
            config["sparse_threshold"] = threshold.into();
        }
        format!("{config:#}\n").into_bytes()
    }

    /// Writes `model.safetensors` and `config.json` into a folder, which is made if it is not there. Each
    /// file is written under a temporary name first and takes its place when all bytes have reached the disk.
    ///
    /// # Errors
    /// [`PredictorError::Write`] and those of [`PredictorFile::to_bytes`]. What was there before stays,
    /// unless the second file fails: then the first one is already new.
    pub fn write(&self, folder: impl AsRef<Path>, ty: FloatType) -> Result<(), PredictorError> {
        let folder = folder.as_ref();
        let weights = self.to_bytes(ty)?;
        fs::create_dir_all(folder)
            .map_err(|source| PredictorError::Write { path: folder.to_owned(), source })?;
        write_atomic(&folder.join(WEIGHTS_FILE), &weights)?;
        write_atomic(&folder.join(CONFIG_FILE), &self.config_bytes())
    }
}

fn fc1_name(layer: LayerId) -> String {
    format!("model.layers.{layer}.fc1.weight")
}

fn fc2_name(layer: LayerId) -> String {
    format!("model.layers.{layer}.fc2.weight")
}

/// A layer number as we write it: digits only, no leading zero, so that no two names mean the same layer.
pub(crate) fn layer_number(text: &str) -> Option<LayerId> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(LayerId(number))
}

/// Layers in ascending order must be 0, 1, 2, … without a gap.
pub(crate) fn check_layers(
    layers: impl Iterator<Item = LayerId>,
    first_tensor: &str,
) -> Result<(), PredictorError> {
    let layers: Vec<LayerId> = layers.collect();
    let Some(&last) = layers.last() else {
        return Err(PredictorError::NoLayers { expected: first_tensor.to_owned() });
    };
    match (0..).map(LayerId).zip(&layers).find(|(expected, found)| expected != *found) {
        Some((layer, _)) => Err(PredictorError::MissingLayer { layer, n_found: layers.len(), last }),
        None => Ok(()),
    }
}

/// Layer number, and whether it is the second matrix.
fn parse_name(name: &str) -> Option<(LayerId, bool)> {
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let second = match part {
        "fc1.weight" => false,
        "fc2.weight" => true,
        _ => return None,
    };
    Some((layer_number(layer)?, second))
}

fn parse_layers(bytes: &[u8]) -> Result<Vec<PredictorLayer>, PredictorError> {
    let file = SafeTensors::deserialize(bytes)?;
    let mut views: BTreeMap<LayerId, [Option<TensorView<'_>>; 2]> = BTreeMap::new();
    for (name, view) in file.iter() {
        let (layer, second) = parse_name(name).ok_or_else(|| PredictorError::UnexpectedTensor {
            tensor: shortened(name),
            expected: EXPECTED,
        })?;
        views.entry(layer).or_default()[usize::from(second)] = Some(view);
    }
    check_layers(views.keys().copied(), &fc1_name(LayerId(0)))?;
    views.into_iter().map(|(layer, views)| parse_layer(layer, &views)).collect()
}

fn parse_layer(
    layer: LayerId,
    [fc1, fc2]: &[Option<TensorView<'_>>; 2],
) -> Result<PredictorLayer, PredictorError> {
    let read = |name: String, view: &Option<TensorView<'_>>| match view {
        Some(view) => matrix(&name, view),
        None => Err(PredictorError::MissingTensor { tensor: name }),
    };
    let fc1 = read(fc1_name(layer), fc1)?;
    let fc2 = read(fc2_name(layer), fc2)?;
    if fc2.n_cols() != fc1.n_rows() {
        return Err(PredictorError::Shape {
            tensor: fc2_name(layer),
            expected: format!("[n_ff, {}], since `{}` has {0} rows", fc1.n_rows(), fc1_name(layer)),
            got: fc2.shape(),
        });
    }
    Ok(PredictorLayer { fc1, fc2 })
}

/// The threshold, if there is one.
fn parse_config(bytes: &[u8]) -> Result<Option<f32>, PredictorError> {
    let config: Value = serde_json::from_slice(bytes).map_err(|error| PredictorError::Json(Some(error)))?;
    let config = config.as_object().ok_or(PredictorError::Json(None))?;
    let must_be = |key: &'static str, value: Value, expected: &'static str| match config.get(key) {
        Some(got) if *got != value => {
            Err(PredictorError::Config { key, expected, got: shortened(&got.to_string()) })
        }
        _ => Ok(()),
    };
    must_be("activation", "relu".into(), "\"relu\"")?;
    must_be("bias", false.into(), "false")?;
    let Some(threshold) = config.get("sparse_threshold") else { return Ok(None) };
    let number = threshold.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
    number.map(Some).ok_or_else(|| bad_threshold(shortened(&threshold.to_string())))
}

fn bad_threshold(got: String) -> PredictorError {
    PredictorError::Config { key: "sparse_threshold", expected: "a finite number", got }
}

/// A file that is complete under another name, and goes away unless it takes its own.
pub(crate) struct StagedFile {
    path: PathBuf,
    /// `None` once it is renamed.
    partial: Option<PathBuf>,
}

impl StagedFile {
    pub(crate) fn new(path: &Path, bytes: &[u8]) -> Result<Self, PredictorError> {
        let failed = |source| PredictorError::Write { path: path.to_owned(), source };
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(format!(".{}.partial", std::process::id()));
        let partial = path.with_file_name(name);
        let mut file = File::create_new(&partial).map_err(failed)?;
        let staged = Self { path: path.to_owned(), partial: Some(partial) };
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)?;
        Ok(staged)
    }

    pub(crate) fn rename(mut self) -> Result<(), PredictorError> {
        if let Some(partial) = &self.partial {
            let failed = |source| PredictorError::Write { path: self.path.clone(), source };
            fs::rename(partial, &self.path).map_err(failed)?;
        }
        self.partial = None;
        Ok(())
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            // The first error is the one to report.
            let _ = fs::remove_file(partial);
        }
    }
}

pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), PredictorError> {
    StagedFile::new(path, bytes)?.rename()
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;

    /// A predictor whose numbers tell layer and place, exact in F16.
    fn predictor(ranks: &[usize]) -> PredictorFile {
        let number = |layer: usize, i: usize| (layer as f32) - (i as f32) / 8.0;
        let layers = ranks.iter().enumerate().map(|(layer, &rank)| {
            let values = |n: usize| (0..n).map(|i| number(layer, i)).collect::<Vec<f32>>();
            PredictorLayer::new(rank, values(rank * 4), values(rank * (5 + layer))).unwrap()
        });
        PredictorFile::new(layers.collect(), Some(-0.75)).unwrap()
    }

    type RawTensor = (String, Dtype, Vec<usize>, Vec<u8>);

    fn raw(name: &str, shape: &[usize], values: &[f32]) -> RawTensor {
        (name.to_owned(), Dtype::F32, shape.to_vec(), FloatType::F32.encode_raw(values))
    }

    impl FloatType {
        /// Bytes of any numbers, NaN included.
        fn encode_raw(self, values: &[f32]) -> Vec<u8> {
            values.iter().flat_map(|v| v.to_le_bytes()).collect()
        }
    }

    fn file(tensors: &[RawTensor]) -> Vec<u8> {
        let views = tensors
            .iter()
            .map(|(name, ty, shape, bytes)| (name, TensorView::new(*ty, shape.clone(), bytes).unwrap()));
        safetensors::serialize(views, None).unwrap()
    }

    fn error(tensors: &[RawTensor]) -> PredictorError {
        PredictorFile::from_bytes(&file(tensors), None).unwrap_err()
    }

    fn fc1(layer: u32) -> RawTensor {
        raw(&fc1_name(LayerId(layer)), &[1, 2], &[1.0, 2.0])
    }

    fn fc2(layer: u32) -> RawTensor {
        raw(&fc2_name(LayerId(layer)), &[3, 1], &[1.0, 2.0, 3.0])
    }

    #[test]
    fn what_is_written_is_read_again_with_layers_by_number() {
        let predictor = predictor(&[1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3]);
        for ty in [FloatType::F32, FloatType::F16, FloatType::BF16] {
            let bytes = predictor.to_bytes(ty).unwrap();
            let again = PredictorFile::from_bytes(&bytes, Some(&predictor.config_bytes())).unwrap();
            assert_eq!(again, predictor, "{ty:?}");
        }
        let ten = predictor.layer(LayerId(10)).unwrap();
        assert_eq!((ten.rank(), ten.n_embd(), ten.n_ff()), (2, 4, 15));
        assert_eq!(ten.fc1().values()[0], 10.0);
        assert_eq!(predictor.layer(LayerId(12)), None);
    }

    #[test]
    fn folders_are_written_whole_and_read_with_or_without_config() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("new/predictor");
        let predictor = predictor(&[2, 1]);
        predictor.write(&to, FloatType::F16).unwrap();
        predictor.write(&to, FloatType::F16).unwrap();
        assert_eq!(PredictorFile::open(&to).unwrap(), predictor);
        assert_eq!(PredictorFile::open(to.join(WEIGHTS_FILE)).unwrap(), predictor);
        let mut names: Vec<_> = fs::read_dir(&to).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [CONFIG_FILE, WEIGHTS_FILE], "no temporary file is left");
        fs::remove_file(to.join(CONFIG_FILE)).unwrap();
        assert_eq!(PredictorFile::open(&to).unwrap().sparse_threshold(), None);
    }

    #[test]
    fn errors_of_files_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let err = PredictorFile::open(folder.path()).unwrap_err();
        assert!(matches!(&err, PredictorError::Read { path, .. } if path.ends_with(WEIGHTS_FILE)), "{err}");
        fs::write(folder.path().join(WEIGHTS_FILE), b"no").unwrap();
        let err = PredictorFile::open(folder.path()).unwrap_err();
        let PredictorError::InFile { path, source } = err else { panic!("{err}") };
        assert!(path.ends_with(WEIGHTS_FILE) && matches!(*source, PredictorError::Format(_)), "{source}");
        fs::write(folder.path().join(CONFIG_FILE), b"[]").unwrap();
        let err = PredictorFile::open(folder.path()).unwrap_err();
        let PredictorError::InFile { path, source } = err else { panic!("{err}") };
        assert!(path.ends_with(CONFIG_FILE) && matches!(*source, PredictorError::Json(None)), "{source}");
        let blocked = folder.path().join(CONFIG_FILE).join("below");
        let err = predictor(&[1]).write(&blocked, FloatType::F32).unwrap_err();
        assert!(matches!(&err, PredictorError::Write { path, .. } if *path == blocked), "{err}");
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        // A folder that is not empty cannot be replaced by a file.
        let target = folder.path().join(WEIGHTS_FILE);
        fs::create_dir(&target).unwrap();
        fs::write(target.join("old"), b"old").unwrap();
        let err = predictor(&[1]).write(folder.path(), FloatType::F32).unwrap_err();
        assert!(matches!(err, PredictorError::Write { .. }), "{err}");
        assert_eq!(fs::read(target.join("old")).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn missing_and_stray_tensors_are_named() {
        assert!(matches!(error(&[]), PredictorError::NoLayers { .. }));
        let err = error(&[fc1(0), fc2(0), fc2(1)]);
        assert!(
            matches!(&err, PredictorError::MissingTensor { tensor } if tensor == "model.layers.1.fc1.weight"),
            "{err}"
        );
        let err = error(&[fc1(0), fc2(0), fc1(4_000_000_000), fc2(4_000_000_000)]);
        assert!(matches!(err, PredictorError::MissingLayer { layer: LayerId(1), n_found: 2, .. }), "{err}");
        for stray in
            ["model.layers.0.fc1.bias", "model.layers.00.fc1.weight", "model.layers..fc1.weight", "x"]
        {
            let err = error(&[fc1(0), fc2(0), raw(stray, &[1], &[0.0])]);
            assert!(
                matches!(&err, PredictorError::UnexpectedTensor { tensor, .. } if tensor == stray),
                "{err}"
            );
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_named_with_both_sizes() {
        let second = "model.layers.0.fc2.weight";
        let cases = [
            vec![fc1(0), raw(second, &[1, 3], &[1.0, 2.0, 3.0])],
            vec![fc1(0), raw(second, &[3], &[1.0, 2.0, 3.0])],
            vec![fc1(0), raw(second, &[0, 1], &[])],
            vec![fc1(0), raw(second, &[0, 1 << 60], &[])],
        ];
        for tensors in cases {
            let err = error(&tensors);
            assert!(matches!(&err, PredictorError::Shape { tensor, .. } if tensor == second), "{err}");
        }
        let wide = raw("model.layers.1.fc1.weight", &[1, 3], &[1.0; 3]);
        let err = error(&[fc1(0), fc2(0), wide, fc2(1)]);
        assert_eq!(
            err.to_string(),
            "tensor `model.layers.1.fc1.weight` has the shape [1, 3], expected [rank, 2] as in layer 0"
        );
        let err = PredictorLayer::new(2, vec![1.0; 3], vec![1.0; 2]).unwrap_err();
        assert!(matches!(err, PredictorError::Shape { .. }), "{err}");
        let err = PredictorLayer::new(0, vec![], vec![]).unwrap_err();
        assert!(matches!(err, PredictorError::Shape { .. }), "{err}");
    }

    #[test]
    fn weights_that_are_no_numbers_are_found() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let err = error(&[fc1(0), raw("model.layers.0.fc2.weight", &[3, 1], &[0.0, bad, 0.0])]);
            let place = "tensor `model.layers.0.fc2.weight` holds";
            assert!(matches!(err, PredictorError::NotFinite { row: 1, column: 0, .. }), "{err}");
            assert!(err.to_string().starts_with(place), "{err}");
        }
        let ints = (fc2_name(LayerId(0)), Dtype::I32, vec![3, 1], vec![0; 12]);
        let err = error(&[fc1(0), ints]);
        assert!(matches!(&err, PredictorError::Type { got, .. } if got == "I32"), "{err}");
    }

    #[test]
    fn weights_beyond_the_written_type_are_refused() {
        let layer = PredictorLayer::new(1, vec![1.0, 1e6], vec![1.0]).unwrap();
        let err = PredictorFile::new(vec![layer], None).unwrap().to_bytes(FloatType::F16).unwrap_err();
        assert!(matches!(err, PredictorError::OutOfRange { row: 0, column: 1, ty: "F16", .. }), "{err}");
    }

    #[test]
    fn configs_of_other_nets_are_refused() {
        let bytes = file(&[fc1(0), fc2(0)]);
        let read = |config: &str| PredictorFile::from_bytes(&bytes, Some(config.as_bytes()));
        let threshold = |config: &str| read(config).unwrap().sparse_threshold();
        assert_eq!(threshold("{}"), None);
        assert_eq!(threshold(r#"{"sparse_threshold": 0.5, "rank": 1, "bias": false}"#), Some(0.5));
        for (config, bad) in [
            (r#"{"sparse_threshold": "0"}"#, "sparse_threshold"),
            (r#"{"sparse_threshold": 1e39}"#, "sparse_threshold"),
            (r#"{"activation": "silu"}"#, "activation"),
            (r#"{"bias": true}"#, "bias"),
        ] {
            let err = read(config).unwrap_err();
            assert!(matches!(err, PredictorError::Config { key, .. } if key == bad), "{err}");
        }
        assert!(matches!(read("{").unwrap_err(), PredictorError::Json(Some(_))));
        let layer = PredictorLayer::new(1, vec![1.0], vec![1.0]).unwrap();
        let err = PredictorFile::new(vec![layer], Some(f32::NAN)).unwrap_err();
        assert!(matches!(err, PredictorError::Config { .. }), "{err}");
    }

    #[test]
    fn every_cut_and_flipped_header_byte_gives_an_error_or_the_same_layers() {
        let bytes = file(&[fc1(0), fc2(0)]);
        for n in 0..bytes.len() {
            let err = PredictorFile::from_bytes(&bytes[..n], None).unwrap_err();
            assert!(matches!(err, PredictorError::Format(_)), "{n} bytes: {err}");
        }
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut n_refused = 0;
        for at in 0..header {
            for flip in [1, 0x10, 0x80] {
                let mut broken = bytes.clone();
                broken[at] ^= flip;
                match PredictorFile::from_bytes(&broken, None) {
                    Ok(file) => assert_eq!((file.n_layer(), file.n_embd()), (1, 2), "byte {at}"),
                    Err(_) => n_refused += 1,
                }
            }
        }
        assert!(n_refused > 2 * header, "{n_refused} of {} refused", 3 * header);
    }
}
