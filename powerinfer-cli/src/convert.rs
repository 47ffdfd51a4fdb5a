//! Joins a dense ReLU model and its predictors to one `PWRI` file.
//!
//! The FFN's down projection is what changes: a neuron's part of it is a column in a dense file and becomes a
//! row, so that skipping the neuron skips bytes. Floats are transposed without loss. Quantised weights have
//! their blocks along the other axis and must be quantised again, which makes a slightly different model: how
//! much it differs is measured and reported, and `down_from` avoids the second rounding.

use std::cell::RefCell;
use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use powerinfer_core::SUPPORTED_ARCHS;
use powerinfer_gguf::{
    GgmlType, GgufError, GgufModel, GgufWriter, Magic, Metadata, Tensor, TensorSource, Value, WriteError,
};
use powerinfer_predictor::{Matrix, PredictorError, PredictorFile, WeightFile};
use powerinfer_sparse_ops::block::{decode_row, encode_row};
use powerinfer_sparse_ops::{Activation, LayerId, WeightType};

pub(crate) mod quantize;

const THRESHOLD_KEY: &str = "powerinfer.sparse_threshold";
const FILE_TYPE_KEY: &str = "general.file_type";

/// Above this relative distance, `down_from` and the model cannot hold the same weights: 4-bit rounding gives
/// about 0.08, 2-bit rounding about 0.3, independent weights give 1.4.
const MAX_SOURCE_DISTANCE: f64 = 0.5;

/// What to join and how.
#[derive(Clone, Debug)]
pub(crate) struct ConvertRequest {
    /// Dense GGUF file; the first one, if there are several.
    pub(crate) model: PathBuf,
    /// Folder of the predictors, or their `model.safetensors`.
    pub(crate) predictor: PathBuf,
    /// The file to write.
    pub(crate) output: PathBuf,
    /// What the model was trained with, if the file does not say so or is wrong.
    pub(crate) activation: Option<Activation>,
    /// Type for every matrix. Without it they stay as they are.
    pub(crate) matrix_type: Option<WeightType>,
    /// Type of the down projections, in place of `matrix_type`. Without both they keep their type where it
    /// has an encoder and fits, and become F16 otherwise.
    pub(crate) down_type: Option<WeightType>,
    /// Type of the predictors, in place of `matrix_type`; F16 without both.
    pub(crate) predictor_type: Option<WeightType>,
    /// Safetensors file with the unquantised `model.layers.N.mlp.down_proj.weight` to make the down
    /// projections from. It is held in memory.
    pub(crate) down_from: Option<PathBuf>,
    /// In place of the threshold that the predictors come with.
    pub(crate) sparse_threshold: Option<f32>,
    /// Whether an output that is there already is replaced.
    pub(crate) replace: bool,
}

impl ConvertRequest {
    /// A request that leaves every choice to the files.
    pub(crate) fn new(
        model: impl Into<PathBuf>,
        predictor: impl Into<PathBuf>,
        output: impl Into<PathBuf>,
    ) -> Self {
        Self {
            model: model.into(),
            predictor: predictor.into(),
            output: output.into(),
            activation: None,
            matrix_type: None,
            down_type: None,
            predictor_type: None,
            down_from: None,
            sparse_threshold: None,
            replace: false,
        }
    }
}

/// What rounding cost: the root of the mean square error over the root of the mean square.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RoundingError {
    square_error: f64,
    square: f64,
}

impl RoundingError {
    fn add(&mut self, before: &[f32], after: &[f32]) {
        for (&before, &after) in before.iter().zip(after) {
            self.square_error += (f64::from(before) - f64::from(after)).powi(2);
            self.square += f64::from(before).powi(2);
        }
    }

    fn merge(&mut self, other: Self) {
        self.square_error += other.square_error;
        self.square += other.square;
    }

    /// 0 if nothing was lost.
    pub(crate) fn relative_rms(self) -> f64 {
        if self.square_error == 0.0 { 0.0 } else { (self.square_error / self.square).sqrt() }
    }
}

/// A percentage, or with `{:#}` a phrase.
impl fmt::Display for RoundingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.relative_rms() {
            0.0 => f.write_str("lossless"),
            error if f.alternate() => write!(f, "relative RMS error {:.3} %", 100.0 * error),
            error => write!(f, "{:.3} %", 100.0 * error),
        }
    }
}

/// What was written and what it cost.
#[derive(Clone, Debug)]
pub(crate) struct ConvertReport {
    /// Bytes of the file.
    pub(crate) output_bytes: u64,
    /// Tensors in the file.
    pub(crate) n_tensors: usize,
    /// The threshold in the file.
    pub(crate) sparse_threshold: f32,
    /// Type of the down projections before, as stored in the model or in the file named by `down_from`.
    pub(crate) down_from: String,
    /// Type of the down projections in the file.
    pub(crate) down_type: WeightType,
    /// Cost of the down projections, layer 0 first.
    pub(crate) down: Vec<RoundingError>,
    /// Type of the predictors in the file.
    pub(crate) predictor_type: WeightType,
    /// Cost of the predictors of all layers.
    pub(crate) predictor: RoundingError,
    /// Cost of `matrix_type` over every other matrix; `None` if it was not asked for.
    pub(crate) matrices: Option<RoundingError>,
    /// Rules that were applied, and what other engines would say to the file.
    pub(crate) notes: Vec<String>,
}

impl ConvertReport {
    /// Cost of the down projections of all layers.
    pub(crate) fn down_overall(&self) -> RoundingError {
        let mut sum = RoundingError::default();
        for layer in &self.down {
            sum.merge(*layer);
        }
        sum
    }
}

impl fmt::Display for ConvertReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.output_bytes as f64 / f64::from(1 << 20);
        writeln!(f, "{} tensors, {mib:.2} MiB, threshold {}", self.n_tensors, self.sparse_threshold)?;
        writeln!(f, "down projections: {} to {}, {:#}", self.down_from, self.down_type, self.down_overall())?;
        if self.down_overall().relative_rms() > 0.0 {
            for (layer, error) in self.down.iter().enumerate() {
                writeln!(f, "  layer {layer}: {error:#}")?;
            }
        }
        write!(f, "predictors: {}, {:#}", self.predictor_type, self.predictor)?;
        if let Some(error) = &self.matrices {
            write!(f, "\nother matrices: {error:#}")?;
        }
        self.notes.iter().try_for_each(|note| write!(f, "\nnote: {note}"))
    }
}

/// Why a conversion was refused or failed. The output file is then as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ConvertError {
    /// The model cannot be read.
    #[error("cannot read the model `{}`", path.display())]
    Model {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        source: Box<GgufError>,
    },
    /// The predictors or the unquantised weights cannot be read.
    #[error(transparent)]
    Predictor(#[from] PredictorError),
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The output is there, and its size cannot be asked for.
    #[error("cannot look at `{}`", path.display())]
    Output {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The output is there already.
    #[error("the output `{}` exists already; --force replaces it", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The output would replace an input.
    #[error("the output `{}` is also an input", path.display())]
    SameFile {
        /// The file.
        path: PathBuf,
    },
    /// The input has predictors already.
    #[error("`{}` is a sparse file already: {sign}", path.display())]
    AlreadySparse {
        /// The file.
        path: PathBuf,
        /// How that was seen.
        sign: &'static str,
    },
    /// A family that has no sparse form.
    #[error("architecture `{arch}` has no sparse form; supported: {}", SUPPORTED_ARCHS.join(", "))]
    UnsupportedArch {
        /// From `general.architecture`.
        arch: String,
    },
    /// A model without exact zeros.
    #[error("the activation is `{activation}` ({reason}); only relu gives neurons that can be left out")]
    NotRelu {
        /// The activation.
        activation: String,
        /// Where that was found.
        reason: String,
    },
    /// A model that does not say whether it has exact zeros.
    #[error("the model has no key `{key}`; say that its activation is relu if you know it to be")]
    ActivationUnknown {
        /// The missing key.
        key: String,
    },
    /// A threshold that no score can be compared with.
    #[error("the threshold must be a finite number, got {got}")]
    Threshold {
        /// The threshold.
        got: f32,
    },
    /// A tensor that every model has.
    #[error("tensor `{tensor}` is missing")]
    MissingTensor {
        /// Its name.
        tensor: String,
    },
    /// A tensor of another shape than the model's numbers ask for.
    #[error("tensor `{tensor}` has the dimensions {got:?}, expected {expected:?}")]
    Shape {
        /// Its name.
        tensor: String,
        /// What the numbers ask for, the contiguous axis first.
        expected: Vec<usize>,
        /// What it has.
        got: Vec<usize>,
    },
    /// A tensor whose type the file cannot keep.
    #[error("tensor `{tensor}` is {ty}, which {rule}")]
    TensorType {
        /// Its name.
        tensor: String,
        /// Its type.
        ty: GgmlType,
        /// Why not.
        rule: &'static str,
    },
    /// A type that nothing can be encoded as.
    #[error("cannot encode {what} as {ty}; can as F32, F16, BF16, Q8_0 and Q4_0")]
    NoEncoder {
        /// What should be encoded.
        what: &'static str,
        /// The type.
        ty: WeightType,
    },
    /// Rows that are no whole number of blocks.
    #[error("tensor `{tensor}` cannot be {ty}: a row of {n_cols} is no multiple of {}", ty.block_len())]
    RowLength {
        /// Its name.
        tensor: String,
        /// The type.
        ty: WeightType,
        /// Length of a row.
        n_cols: usize,
    },
    /// Predictors of another model.
    #[error("the predictors are of another model: they have {got} layers, the model has {expected}")]
    PredictorLayers {
        /// Layers of the model.
        expected: usize,
        /// Layers of the predictors.
        got: usize,
    },
    /// Predictors of another model.
    #[error(
        "the predictors are of another model: {dim} of layer {layer} is {got}, in the model it is {expected}"
    )]
    PredictorShape {
        /// The layer.
        layer: LayerId,
        /// `n_embd` or `n_ff`.
        dim: &'static str,
        /// Of the model.
        expected: usize,
        /// Of the predictors.
        got: usize,
    },
    /// Unquantised weights of another model.
    #[error(
        "unquantised `{tensor}` is of another model: it differs from layer {layer} by {:.0} %, \
         rounding explains less than {:.0} %",
        100.0 * distance,
        100.0 * MAX_SOURCE_DISTANCE
    )]
    OtherWeights {
        /// Its name.
        tensor: String,
        /// The layer.
        layer: LayerId,
        /// Root of the mean square difference over the root of the mean square.
        distance: f64,
    },
}

/// Called after each tensor with its name, and the bytes of tensor data that are written and that will be.
pub(crate) type Progress<'p> = dyn FnMut(&str, u64, u64) + 'p;

/// Writes the model of `request` with its predictors as a `PWRI` file. Tensors go through memory one at a
/// time; the file appears when it is complete.
///
/// Keys are copied; `<arch>.hidden_act` and `powerinfer.sparse_threshold` are set. `blk.N.ffn_down` becomes
/// `blk.N.ffn_down_t`, the predictors become `blk.N.fc1` and `blk.N.fc2`, other tensors keep their names.
///
/// # Errors
/// A [`ConvertError`] that names what does not fit.
pub(crate) fn convert(
    request: &ConvertRequest,
    progress: &mut Progress<'_>,
) -> Result<ConvertReport, ConvertError> {
    let weights = request.predictor.join("model.safetensors");
    let inputs = [Some(&request.model), Some(&request.predictor), Some(&weights), request.down_from.as_ref()];
    check_output(&request.output, inputs.into_iter().flatten(), request.replace)?;
    let model_error = |source| ConvertError::Model { path: request.model.clone(), source: Box::new(source) };
    let model = GgufModel::open(&request.model).map_err(model_error)?;
    let predictor = PredictorFile::open(&request.predictor)?;
    let down_from = request.down_from.as_ref().map(WeightFile::open).transpose()?;
    let mut notes = Vec::new();
    let arch = check_model(&model, request, &mut notes)?;
    let n_layer = read_u32(model.metadata(), &format!("{arch}.block_count")).map_err(model_error)?;
    let n_embd = read_u32(model.metadata(), &format!("{arch}.embedding_length")).map_err(model_error)?;
    let source =
        Source { model: &model, predictor: &predictor, down_from: down_from.as_ref(), n_layer, n_embd };
    source.check_shapes()?;
    let sparse_threshold = threshold(request, &predictor, &mut notes)?;
    let types = Types::choose(request, &source, &mut notes)?;
    let items = source.items(&types)?;
    say_compatibility(&items, arch, &types, &mut notes);

    let n_tensors = items.len();
    let total = items.iter().map(Item::n_bytes).sum();
    let tally = RefCell::new(Tally::new(n_layer, total, progress));
    let mut writer = GgufWriter::new(Magic::Pwri);
    copy_keys(&mut writer, model.metadata(), arch, request.matrix_type, sparse_threshold)?;
    for item in items {
        let (name, dims, ty) = (item.name.clone(), item.dims.clone(), item.ty);
        let tally = &tally;
        let write = move |out: &mut dyn Write| {
            let error = item.write(out)?;
            tally.borrow_mut().done(&item, error);
            Ok(())
        };
        writer.tensor(&name, &dims, ty, TensorSource::stream(write))?;
    }
    let output_bytes = finish(writer, &request.output)?;
    let Tally { down, predictor, matrices, .. } = tally.into_inner();
    Ok(ConvertReport {
        output_bytes,
        n_tensors,
        sparse_threshold,
        down_from: types.down_source,
        down_type: types.down,
        down,
        predictor_type: types.predictor,
        predictor,
        matrices: request.matrix_type.map(|_| matrices),
        notes,
    })
}

/// Writes the file and returns its bytes.
fn finish(writer: GgufWriter<'_>, output: &Path) -> Result<u64, ConvertError> {
    writer.write(output)?;
    let written =
        fs::metadata(output).map_err(|source| ConvertError::Output { path: output.to_owned(), source })?;
    Ok(written.len())
}

/// Checks that the output replaces no input, and nothing at all unless it may.
fn check_output<'p>(
    output: &Path,
    mut inputs: impl Iterator<Item = &'p PathBuf>,
    replace: bool,
) -> Result<(), ConvertError> {
    let same = |input: &PathBuf| match (input.canonicalize(), output.canonicalize()) {
        (Ok(input), Ok(output)) => input == output,
        // What is not there yet is no input.
        _ => false,
    };
    if inputs.any(same) {
        return Err(ConvertError::SameFile { path: output.to_owned() });
    }
    // A link that leads nowhere would be replaced too.
    if !replace && fs::symlink_metadata(output).is_ok() {
        return Err(ConvertError::Exists { path: output.to_owned() });
    }
    Ok(())
}

/// The family of a dense ReLU model.
fn check_model<'m>(
    model: &'m GgufModel,
    request: &ConvertRequest,
    notes: &mut Vec<String>,
) -> Result<&'m str, ConvertError> {
    let already = |sign| Err(ConvertError::AlreadySparse { path: request.model.clone(), sign });
    if model.magic() == Magic::Pwri {
        return already("it has the magic PWRI");
    }
    if model.tensor("blk.0.ffn_down_t.weight").is_some() || model.tensor("blk.0.fc1.weight").is_some() {
        return already("it has tensors of predictors or transposed down projections");
    }
    let model_error = |source| ConvertError::Model { path: request.model.clone(), source: Box::new(source) };
    let arch: &str = model.metadata().require("general.architecture").map_err(model_error)?;
    if !SUPPORTED_ARCHS.contains(&arch) {
        return Err(ConvertError::UnsupportedArch { arch: arch.chars().take(64).collect() });
    }
    let key = format!("{arch}.hidden_act");
    let in_file = model.metadata().find::<&str>(&key).map_err(model_error)?;
    match (request.activation, in_file) {
        (Some(Activation::Relu), in_file) => {
            if let Some(other) = in_file.filter(|name| *name != "relu") {
                let other: String = other.chars().take(64).collect();
                notes.push(format!("key `{key}` changed from `{other}` to `relu`, as asked for"));
            }
        }
        (Some(other), _) => {
            let (activation, reason) = (other.name().to_owned(), "as asked for".to_owned());
            return Err(ConvertError::NotRelu { activation, reason });
        }
        (None, Some("relu")) => {}
        (None, Some(other)) => {
            let activation = other.chars().take(64).collect();
            return Err(ConvertError::NotRelu { activation, reason: format!("key `{key}`") });
        }
        (None, None) if matches!(arch, "bamboo" | "opt") => {
            notes.push(format!("activation relu, which every `{arch}` model has"));
        }
        (None, None) => return Err(ConvertError::ActivationUnknown { key }),
    }
    Ok(arch)
}

fn read_u32(metadata: Metadata<'_>, key: &str) -> Result<usize, GgufError> {
    // No target of this program has pointers of fewer than 32 bits.
    metadata.require::<u32>(key).map(|value| value as usize)
}

fn threshold(
    request: &ConvertRequest,
    predictor: &PredictorFile,
    notes: &mut Vec<String>,
) -> Result<f32, ConvertError> {
    match request.sparse_threshold.or(predictor.sparse_threshold()) {
        Some(got) if !got.is_finite() => Err(ConvertError::Threshold { got }),
        Some(threshold) => Ok(threshold),
        None => {
            notes.push("threshold 0: neither the predictors nor the request name one".to_owned());
            Ok(0.0)
        }
    }
}

/// What is joined.
struct Source<'m> {
    model: &'m GgufModel,
    predictor: &'m PredictorFile,
    down_from: Option<&'m WeightFile>,
    n_layer: usize,
    n_embd: usize,
}

impl<'m> Source<'m> {
    fn tensor(&self, name: &str) -> Result<Tensor<'m>, ConvertError> {
        self.model.tensor(name).ok_or_else(|| ConvertError::MissingTensor { tensor: name.to_owned() })
    }

    fn layers(&self) -> impl Iterator<Item = LayerId> {
        (0..).map(LayerId).take(self.n_layer)
    }

    /// Checks that model, predictors and unquantised weights fit each other.
    fn check_shapes(&self) -> Result<(), ConvertError> {
        if self.predictor.n_layer() != self.n_layer {
            let (expected, got) = (self.n_layer, self.predictor.n_layer());
            return Err(ConvertError::PredictorLayers { expected, got });
        }
        self.layers().zip(self.predictor.layers()).try_for_each(|(layer, predictor)| {
            let up = self.tensor(&format!("blk.{layer}.ffn_up.weight"))?;
            let n_ff = up.n_rows();
            check_dims(&up, &[self.n_embd, n_ff])?;
            check_dims(&self.tensor(&down_name(layer))?, &[n_ff, self.n_embd])?;
            let dims = [("n_embd", self.n_embd, predictor.n_embd()), ("n_ff", n_ff, predictor.n_ff())];
            if let Some((dim, expected, got)) = dims.into_iter().find(|(_, model, got)| model != got) {
                return Err(ConvertError::PredictorShape { layer, dim, expected, got });
            }
            self.check_down_from(layer, n_ff)
        })
    }

    /// Checks that the unquantised weights are those of the model, by shape and by values.
    fn check_down_from(&self, layer: LayerId, n_ff: usize) -> Result<(), ConvertError> {
        let Some(weights) = self.down_from else { return Ok(()) };
        let name = unquantised_name(layer);
        let matrix = weights.matrix(&name)?;
        if (matrix.n_rows(), matrix.n_cols()) != (self.n_embd, n_ff) {
            let (expected, got) = (vec![n_ff, self.n_embd], vec![matrix.n_cols(), matrix.n_rows()]);
            return Err(ConvertError::Shape { tensor: name, expected, got });
        }
        let stored = decode(&self.tensor(&down_name(layer))?)?;
        let mut difference = RoundingError::default();
        difference.add(matrix.values(), &stored);
        let distance = difference.relative_rms();
        // A NaN in the model is no match either.
        if distance <= MAX_SOURCE_DISTANCE {
            return Ok(());
        }
        Err(ConvertError::OtherWeights { tensor: name, layer, distance })
    }

    /// Every tensor of the file to write.
    fn items(&self, types: &Types) -> Result<Vec<Item<'m>>, ConvertError> {
        let mut items = Vec::new();
        for tensor in self.model.tensors() {
            items.push(self.item(tensor, types)?);
        }
        for (layer, predictor) in self.layers().zip(self.predictor.layers()) {
            for (part, matrix) in [("fc1", predictor.fc1()), ("fc2", predictor.fc2())] {
                items.push(Item {
                    name: format!("blk.{layer}.{part}.weight"),
                    dims: vec![matrix.n_cols(), matrix.n_rows()],
                    ty: types.predictor.into(),
                    content: Content::Predictor(matrix, types.predictor),
                });
            }
        }
        items.iter().try_for_each(Item::check_rows)?;
        Ok(items)
    }

    fn item(&self, tensor: Tensor<'m>, types: &Types) -> Result<Item<'m>, ConvertError> {
        let layer_of = |suffix: &str| {
            let number = tensor.name().strip_prefix("blk.")?.strip_suffix(suffix)?;
            self.layers().find(|layer| layer.to_string() == number)
        };
        let name = tensor.name().to_owned();
        if let Some(layer) = layer_of(".ffn_down.weight") {
            return Ok(Item {
                name: format!("blk.{layer}.ffn_down_t.weight"),
                dims: tensor.dims().iter().rev().copied().collect(),
                ty: types.down.into(),
                content: Content::Down { layer, tensor, unquantised: self.down_from, ty: types.down },
            });
        }
        let name = match layer_of(".ffn_down.bias") {
            Some(layer) => format!("blk.{layer}.ffn_down_t.bias"),
            None => name,
        };
        let dims = tensor.dims().to_vec();
        match types.matrix.filter(|ty| dims.len() > 1 && tensor.ty() != GgmlType::from(*ty)) {
            Some(ty) => Ok(Item { name, dims, ty: ty.into(), content: Content::Encode(tensor, ty) }),
            None => Ok(Item { name, dims, ty: tensor.ty(), content: Content::Copy(tensor) }),
        }
    }
}

fn down_name(layer: LayerId) -> String {
    format!("blk.{layer}.ffn_down.weight")
}

fn unquantised_name(layer: LayerId) -> String {
    format!("model.layers.{layer}.mlp.down_proj.weight")
}

fn check_dims(tensor: &Tensor<'_>, expected: &[usize]) -> Result<(), ConvertError> {
    if tensor.dims() == expected {
        return Ok(());
    }
    let (expected, got) = (expected.to_vec(), tensor.dims().to_vec());
    Err(ConvertError::Shape { tensor: tensor.name().to_owned(), expected, got })
}

fn decode(tensor: &Tensor<'_>) -> Result<Vec<f32>, ConvertError> {
    tensor.decode().map_err(|_| not_decodable(tensor))
}

fn not_decodable(tensor: &Tensor<'_>) -> ConvertError {
    ConvertError::TensorType { tensor: tensor.name().to_owned(), ty: tensor.ty(), rule: "cannot be decoded" }
}

/// The types that were chosen.
struct Types {
    matrix: Option<WeightType>,
    down: WeightType,
    /// For people: what the down projections were before.
    down_source: String,
    predictor: WeightType,
}

impl Types {
    fn choose(
        request: &ConvertRequest,
        source: &Source<'_>,
        notes: &mut Vec<String>,
    ) -> Result<Self, ConvertError> {
        let asked = [
            ("matrices", request.matrix_type),
            ("down projections", request.down_type),
            ("predictors", request.predictor_type),
        ];
        for (what, ty) in asked {
            if let Some(ty) = ty.filter(|ty| !has_encoder(*ty)) {
                return Err(ConvertError::NoEncoder { what, ty });
            }
        }
        let stored = source.tensor(&down_name(LayerId(0)))?;
        let stored = stored.ty().weight_type().ok_or_else(|| not_decodable(&stored))?;
        let down_source = if source.down_from.is_some() {
            "unquantised weights".to_owned()
        } else {
            stored.name().to_owned()
        };
        let fits = |ty: WeightType| has_encoder(ty) && ty.row_bytes(source.n_embd).is_some();
        let down = match request.down_type.or(request.matrix_type) {
            Some(ty) => ty,
            None if fits(stored) => stored,
            None => {
                notes.push(format!(
                    "down projections become F16: {stored} has no encoder, or its blocks do not fit rows of {}",
                    source.n_embd
                ));
                WeightType::F16
            }
        };
        Ok(Self {
            matrix: request.matrix_type,
            down,
            down_source,
            predictor: predictor_type(request, source, notes),
        })
    }
}

/// Ranks are often no multiple of 32. Asked for by itself, a type that does not fit is an error later on; as
/// part of a type for every matrix it gives way.
fn predictor_type(request: &ConvertRequest, source: &Source<'_>, notes: &mut Vec<String>) -> WeightType {
    let wanted = request.predictor_type.or(request.matrix_type).unwrap_or(WeightType::F16);
    let misfit = source.predictor.layers().iter().find(|layer| wanted.row_bytes(layer.rank()).is_none());
    match misfit {
        Some(layer) if request.predictor_type.is_none() => {
            notes.push(format!(
                "predictors are F16, not {wanted}: a rank of {} is no multiple of {}",
                layer.rank(),
                wanted.block_len()
            ));
            WeightType::F16
        }
        _ => wanted,
    }
}

fn has_encoder(ty: WeightType) -> bool {
    use WeightType::{BF16, F16, F32, Q4_0, Q8_0};
    matches!(ty, F32 | F16 | BF16 | Q8_0 | Q4_0)
}

/// Types that `PWRI` files hold: those of the original engine, and BF16.
fn may_stand_in_pwri(ty: GgmlType) -> bool {
    use GgmlType::*;
    matches!(ty, F32 | F16 | BF16 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q2_K | Q3_K | Q4_K | Q5_K | Q6_K)
}

fn say_compatibility(items: &[Item<'_>], arch: &str, types: &Types, notes: &mut Vec<String>) {
    if !matches!(types.down, WeightType::F16 | WeightType::Q4_0) {
        notes.push(format!(
            "the original PowerInfer computes transposed down projections as F16 and Q4_0 only, these are {}",
            types.down
        ));
    }
    if items.iter().any(|item| item.ty == GgmlType::BF16) {
        notes.push("the original PowerInfer does not know BF16, which this file has".to_owned());
    }
    if arch != "opt" && !items.iter().any(|item| item.name == "output.weight") {
        notes.push(
            "output tied to token_embd.weight; the original PowerInfer wants `output.weight`".to_owned(),
        );
    }
}

fn copy_keys(
    writer: &mut GgufWriter<'_>,
    metadata: Metadata<'_>,
    arch: &str,
    matrix_type: Option<WeightType>,
    sparse_threshold: f32,
) -> Result<(), ConvertError> {
    let activation_key = format!("{arch}.hidden_act");
    for (key, value) in metadata.iter() {
        let value = match (key, matrix_type.and_then(file_type)) {
            (THRESHOLD_KEY, _) => continue,
            _ if is_split_key(key) => continue,
            (FILE_TYPE_KEY, Some(id)) => Value::from(id),
            _ if key == activation_key => continue,
            _ => value.to_value(),
        };
        writer.key(key, value)?;
    }
    writer.key(&activation_key, Activation::Relu.name())?;
    writer.key(THRESHOLD_KEY, sparse_threshold)?;
    Ok(())
}

/// Keys of one file of a set, which the output is not.
fn is_split_key(key: &str) -> bool {
    matches!(key, "split.no" | "split.count" | "split.tensors.count")
}

/// What `general.file_type` says about a file whose matrices are mostly of this type.
fn file_type(ty: WeightType) -> Option<u32> {
    Some(match ty {
        WeightType::F32 => 0,
        WeightType::F16 => 1,
        WeightType::Q4_0 => 2,
        WeightType::Q8_0 => 7,
        WeightType::BF16 => 32,
        _ => return None,
    })
}

/// One tensor of the file to write.
struct Item<'m> {
    name: String,
    dims: Vec<usize>,
    ty: GgmlType,
    content: Content<'m>,
}

enum Content<'m> {
    Copy(Tensor<'m>),
    Encode(Tensor<'m>, WeightType),
    Down { layer: LayerId, tensor: Tensor<'m>, unquantised: Option<&'m WeightFile>, ty: WeightType },
    Predictor(&'m Matrix, WeightType),
}

impl Item<'_> {
    fn n_cols(&self) -> usize {
        self.dims.first().copied().unwrap_or(0)
    }

    fn n_bytes(&self) -> u64 {
        let n_rows: u64 = self.dims.iter().skip(1).map(|&dim| dim as u64).product();
        self.ty.row_bytes(self.n_cols()).unwrap_or(0) as u64 * n_rows
    }

    /// Checks that the tensor can be written in its type.
    fn check_rows(&self) -> Result<(), ConvertError> {
        let refused = |rule| ConvertError::TensorType { tensor: self.name.clone(), ty: self.ty, rule };
        if !may_stand_in_pwri(self.ty) {
            return Err(refused("PWRI files do not hold; give a type for every matrix"));
        }
        let ty = match &self.content {
            Content::Copy(_) => return Ok(()),
            Content::Predictor(_, ty) => *ty,
            Content::Encode(tensor, ty) | Content::Down { tensor, ty, .. } => {
                tensor.ty().weight_type().ok_or_else(|| not_decodable(tensor))?;
                *ty
            }
        };
        match ty.row_bytes(self.n_cols()) {
            Some(_) => Ok(()),
            None => Err(ConvertError::RowLength { tensor: self.name.clone(), ty, n_cols: self.n_cols() }),
        }
    }

    /// Writes the tensor and returns what its rounding cost.
    fn write(&self, out: &mut dyn Write) -> io::Result<RoundingError> {
        let mut error = RoundingError::default();
        match &self.content {
            Content::Copy(tensor) => out.write_all(tensor.as_slice())?,
            Content::Encode(tensor, ty) => {
                let values = tensor.decode().map_err(io::Error::other)?;
                encode(values.chunks_exact(tensor.n_cols()), *ty, out, &mut error)?;
            }
            Content::Down { layer, tensor, unquantised, ty } => {
                let matrix = down_matrix(*layer, tensor, *unquantised).map_err(io::Error::other)?;
                encode(matrix.transposed().rows(), *ty, out, &mut error)?;
            }
            Content::Predictor(matrix, ty) => encode(matrix.rows(), *ty, out, &mut error)?,
        }
        Ok(error)
    }
}

/// Down projection by output, `[n_embd, n_ff]`.
fn down_matrix(
    layer: LayerId,
    tensor: &Tensor<'_>,
    unquantised: Option<&WeightFile>,
) -> Result<Matrix, ConvertError> {
    if let Some(weights) = unquantised {
        return Ok(weights.matrix(&unquantised_name(layer))?);
    }
    Ok(Matrix::new(tensor.name(), tensor.n_rows(), tensor.n_cols(), decode(tensor)?)?)
}

/// Writes rows in a type and counts what that costs.
fn encode<'r>(
    rows: impl Iterator<Item = &'r [f32]>,
    ty: WeightType,
    out: &mut dyn Write,
    error: &mut RoundingError,
) -> io::Result<()> {
    let (mut bytes, mut after) = (Vec::new(), Vec::new());
    for (ix, row) in rows.enumerate() {
        bytes.resize(ty.row_bytes(row.len()).expect("row lengths were checked before writing"), 0);
        after.resize(row.len(), 0.0);
        encode_row(ty, row, &mut bytes).map_err(|source| io::Error::other(RowError { row: ix, source }))?;
        decode_row(ty, &bytes, &mut after);
        error.add(row, &after);
        out.write_all(&bytes)?;
    }
    Ok(())
}

/// Which row of a tensor cannot be encoded; the writer's error names the tensor.
#[derive(Debug, thiserror::Error)]
#[error("row {row}")]
struct RowError {
    row: usize,
    source: powerinfer_sparse_ops::block::EncodeError,
}

/// What was written so far.
struct Tally<'p, 'q> {
    down: Vec<RoundingError>,
    predictor: RoundingError,
    matrices: RoundingError,
    done: u64,
    total: u64,
    progress: &'p mut Progress<'q>,
}

impl<'p, 'q> Tally<'p, 'q> {
    fn new(n_layer: usize, total: u64, progress: &'p mut Progress<'q>) -> Self {
        let none = RoundingError::default();
        Self { down: vec![none; n_layer], predictor: none, matrices: none, done: 0, total, progress }
    }

    fn done(&mut self, item: &Item<'_>, error: RoundingError) {
        match &item.content {
            Content::Copy(_) => {}
            Content::Encode(..) => self.matrices.merge(error),
            Content::Down { layer, .. } => self.down[layer.index()] = error,
            Content::Predictor(..) => self.predictor.merge(error),
        }
        self.done += item.n_bytes();
        (self.progress)(&item.name, self.done, self.total);
    }
}

#[cfg(test)]
mod tests;
