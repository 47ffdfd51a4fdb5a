//! From tensors to weights in their roles, with a line in the summary for everything worth knowing.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use powerinfer_gguf::{GgmlType, GgufError, GgufModel, Magic};
use powerinfer_predictor::{CalibrationFile, PredictorError};
use powerinfer_sparse_ops::{
    Activation, ActiveMode, BackendError, BlockKind, DensePart, DownWeights, EmbeddingWeights, FfnWeights,
    Gating, HeadWeights, LayerId, LayerWeights, Linear, LowRank, ModelSpec, NormWeights, PredictorWeights,
    ShapeError, WeightMatrix, WeightType, sample_outlier_columns,
};

use crate::devices::Device;
use crate::placement::{AdaptiveOptions, Assignment, AssignmentError, PlanOptions, RatesError};
use crate::spec::Family;
use crate::tokenizer::{PreTokenizer, TokenizerError};

/// Whether 2-bit gate copies predict which neurons are computed; see [`crate::calibration`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CalibrationChoice {
    /// Those of the file beside the model that [`calibration_path`] names, if it is there, is whole and belongs to the
    /// model, and the model has no predictors of its own. Why one is left aside is said in a note.
    #[default]
    Beside,
    /// None.
    Never,
    /// Those of this file, in place of the predictors that the model may have.
    File(PathBuf),
}

/// Where the calibration of a model file is looked for: `model.calibration.safetensors` for `model.gguf`.
pub fn calibration_path(model: &Path) -> PathBuf {
    model.with_extension("calibration.safetensors")
}

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The host: what computes all that is assigned to nobody else.
    pub device: Device,
    /// Further devices, backends 1 and up of the assignment.
    pub accelerators: Vec<Device>,
    /// Who holds which part of the model; goes before `plan`. Without both, everything is on the host.
    pub assignment: Option<Assignment>,
    /// Plans who holds what; see [`crate::Model::plan`].
    pub plan: Option<PlanOptions>,
    /// Lets neurons move between the host and the accelerators while the model runs; of layers that both hold neurons of,
    /// the host keeps all.
    pub adaptive: Option<AdaptiveOptions>,
    /// Overrides the FFN's activation; see the rule in [`crate::Model`].
    pub activation: Option<Activation>,
    /// Overrides the file's `powerinfer.sparse_threshold` for all layers.
    pub sparse_threshold: Option<f32>,
    /// Which neurons sessions compute unless they say otherwise.
    pub mode: Option<ActiveMode>,
    /// Lets layers of a sparse file without a predictor be computed exactly, with a note, instead of refusing
    /// the file.
    pub allow_missing_predictors: bool,
    /// Where gate copies come from.
    pub calibration: CalibrationChoice,
    /// Which of a calibration's recalls is used: the smallest that is at least this; its own default unless given.
    pub recall: Option<f32>,
    /// Overrides the pre-tokenizer that the file names.
    pub pre_tokenizer: Option<PreTokenizer>,
    /// Tokens that go through the model together in a prompt.
    pub n_batch: usize,
    /// Told how far the weights have been brought in.
    pub progress: LoadProgress,
}

/// Called while weights are brought in, with the bytes done and the bytes in all.
#[derive(Clone, Default)]
pub struct LoadProgress(Option<Arc<dyn Fn(u64, u64) + Send + Sync>>);

impl LoadProgress {
    /// Calls `f`.
    pub fn new(f: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(f)))
    }

    pub(crate) fn tell(&self, done: u64, total: u64) {
        if let Some(f) = &self.0 {
            f(done, total);
        }
    }
}

impl std::fmt::Debug for LoadProgress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "LoadProgress(set)" } else { "LoadProgress(none)" })
    }
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            device: Device::default(),
            accelerators: Vec::new(),
            assignment: None,
            plan: None,
            adaptive: None,
            activation: None,
            sparse_threshold: None,
            mode: None,
            allow_missing_predictors: false,
            calibration: CalibrationChoice::default(),
            recall: None,
            pre_tokenizer: None,
            n_batch: 256,
            progress: LoadProgress::default(),
        }
    }
}

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file is broken or lacks a key.
    #[error(transparent)]
    File(#[from] GgufError),
    /// A family that the forward pass does not know.
    #[error("architecture `{arch}` is not supported; supported: {supported}")]
    UnsupportedArch {
        /// From `general.architecture`.
        arch: String,
        /// Comma-separated list.
        supported: String,
    },
    /// A key that the family needs.
    #[error("key `{key}` is missing")]
    MissingKey {
        /// Its name.
        key: String,
    },
    /// A key whose value makes no model.
    #[error("key `{key}` {rule}, got {got}")]
    BadValue {
        /// Its name.
        key: String,
        /// What it must be.
        rule: String,
        /// What it is.
        got: String,
    },
    /// A tensor that the family needs.
    #[error("tensor `{tensor}` is missing; `{arch}` models need it in every {magic} file")]
    MissingTensor {
        /// Its name.
        tensor: String,
        /// Family.
        arch: String,
        /// Kind of file.
        magic: &'static str,
    },
    /// A tensor in a type that nothing computes with.
    #[error("tensor `{tensor}` is {ty}, which cannot be computed with; supported: {supported}")]
    UnsupportedType {
        /// Its name.
        tensor: String,
        /// Its type.
        ty: GgmlType,
        /// Comma-separated list.
        supported: String,
    },
    /// A tensor of another shape than the model's numbers ask for.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A backend refuses a weight.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The vocabulary or its merges are broken.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The vocabulary has more tokens than the embedding has rows.
    #[error("the vocabulary has {n_tokens} tokens, `token_embd.weight` only {n_rows} rows")]
    VocabularySize {
        /// Tokens in the vocabulary.
        n_tokens: usize,
        /// Rows of the embedding.
        n_rows: usize,
    },
    /// A dense file that does not say whether it is a ReLU model, though its name does.
    #[error(
        "the file does not say which activation it was trained with: it is called `{name}`, but has no key \
         `{key}` and the default would be {default}; say which one to use"
    )]
    ActivationUnclear {
        /// The missing key.
        key: String,
        /// `general.name`.
        name: String,
        /// What the family would get.
        default: &'static str,
    },
    /// A sparse file whose activation has no exact zeros.
    #[error(
        "a PWRI file with activation {activation} cannot be run: its predictors leave out neurons that are not \
         zero; convert the model to a plain GGUF file"
    )]
    SparseActivation {
        /// The activation.
        activation: &'static str,
    },
    /// Mode `predictor` for a file that has none.
    #[error(
        "mode predictor needs predictors: the file has none (`blk.N.fc1.weight`, `blk.N.fc2.weight`), and no \
         calibration that uses a layer belongs to it"
    )]
    NoPredictors,
    /// A calibration or statistics that cannot be read or belong to another model.
    #[error(transparent)]
    Calibration(#[from] PredictorError),
    /// A calibration with more or fewer layers than the model.
    #[error("the calibration has {got} layers, the model {expected}")]
    CalibrationLayers {
        /// Layers of the model.
        expected: usize,
        /// Layers of the calibration.
        got: usize,
    },
    /// A tensor with more dimensions than a matrix.
    #[error("tensor `{tensor}` has the shape {got:?}, a matrix has two dimensions")]
    NoMatrix {
        /// Its name.
        tensor: String,
        /// Its shape, contiguous axis first.
        got: Vec<usize>,
    },
    /// A tensor that belongs to the computation and that nothing here computes with.
    #[error(
        "tensor `{tensor}` has no place in a `{arch}` model here: leaving it out would compute another function"
    )]
    UnknownTensor {
        /// Its name.
        tensor: String,
        /// Family.
        arch: String,
    },
    /// An assignment that does not fit the model or the devices.
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
    /// Statistics of another model.
    #[error(transparent)]
    Rates(#[from] RatesError),
    /// A batch of no tokens, or of more than any buffer is made for.
    #[error("n_batch must be in 1..={MAX_BATCH}, got {n_batch}")]
    BatchSize {
        /// Asked for.
        n_batch: usize,
    },
}

/// Most tokens of one step.
pub(crate) const MAX_BATCH: usize = 1 << 16;

/// How loud a line of the summary is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoteLevel {
    /// Good to know.
    Info,
    /// Something is slower or other than one might expect.
    Warning,
}

/// Lines of the load summary: every rule that was applied and every fallback, with its reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes(Vec<(NoteLevel, String)>);

impl Notes {
    pub(crate) fn info(&mut self, line: impl Into<String>) {
        self.0.push((NoteLevel::Info, line.into()));
    }

    pub(crate) fn warn(&mut self, line: impl Into<String>) {
        self.0.push((NoteLevel::Warning, line.into()));
    }

    /// The lines in order.
    pub fn iter(&self) -> impl Iterator<Item = (NoteLevel, &str)> {
        self.0.iter().map(|(level, line)| (*level, line.as_str()))
    }
}

/// The weights of a model, by role. Nothing is copied but transposed down projections and vectors.
pub(crate) struct ModelWeights {
    pub(crate) dense: Vec<DensePart>,
    pub(crate) ffn: Vec<FfnWeights>,
    pub(crate) predictors: Vec<Option<PredictorWeights>>,
}

/// Rows (second dimension) of a tensor that must be there.
pub(crate) fn tensor_rows(file: &GgufModel, family: &Family, name: &str) -> Result<usize, LoadError> {
    let tensor = file.tensor(name).ok_or_else(|| LoadError::MissingTensor {
        tensor: name.to_owned(),
        arch: family.arch.to_owned(),
        magic: magic_name(file),
    })?;
    Ok(tensor.dims().get(1).copied().unwrap_or(1))
}

/// A tensor of one dimension as f32, if it is there.
pub(crate) fn optional_vector(
    file: &GgufModel,
    name: &str,
    len: usize,
) -> Result<Option<Vec<f32>>, LoadError> {
    let Some(tensor) = file.tensor(name) else { return Ok(None) };
    if tensor.dims() != [len] {
        return Err(ShapeError::Shape {
            tensor: name.to_owned(),
            expected: vec![len],
            got: tensor.dims().to_vec(),
        }
        .into());
    }
    Ok(Some(tensor.decode()?))
}

fn magic_name(file: &GgufModel) -> &'static str {
    match file.magic() {
        Magic::Pwri => "PWRI",
        Magic::Gguf => "GGUF",
    }
}

/// Reads tensors by name and remembers which were used.
struct Tensors<'f> {
    file: &'f GgufModel,
    spec: &'f ModelSpec,
    used: HashSet<String>,
}

impl Tensors<'_> {
    fn optional_matrix(&mut self, name: &str) -> Result<Option<WeightMatrix>, LoadError> {
        let Some(tensor) = self.file.tensor(name) else { return Ok(None) };
        let ty = tensor.ty().weight_type().ok_or_else(|| LoadError::UnsupportedType {
            tensor: name.to_owned(),
            ty: tensor.ty(),
            supported: WeightType::ALL.map(WeightType::name).join(", "),
        })?;
        let (n_cols, n_rows) = match *tensor.dims() {
            // Writers may drop a last dimension of one.
            [n_cols] => (n_cols, 1),
            [n_cols, n_rows] => (n_cols, n_rows),
            _ => {
                return Err(LoadError::NoMatrix { tensor: name.to_owned(), got: tensor.dims().to_vec() });
            }
        };
        self.used.insert(name.to_owned());
        let bytes = tensor.bytes();
        Ok(Some(WeightMatrix::try_new(name, ty, n_rows, n_cols, bytes)?))
    }

    fn matrix(&mut self, name: &str) -> Result<WeightMatrix, LoadError> {
        self.optional_matrix(name)?.ok_or_else(|| self.missing(name))
    }

    fn optional_vector(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>, LoadError> {
        let vector = optional_vector(self.file, name, len)?;
        if vector.is_some() {
            self.used.insert(name.to_owned());
        }
        Ok(vector)
    }

    fn missing(&self, name: &str) -> LoadError {
        LoadError::MissingTensor {
            tensor: name.to_owned(),
            arch: self.spec.arch.clone(),
            magic: magic_name(self.file),
        }
    }

    fn norm(&mut self, name: &str) -> Result<NormWeights, LoadError> {
        self.optional_norm(name)?.ok_or_else(|| self.missing(&format!("{name}.weight")))
    }

    fn optional_norm(&mut self, name: &str) -> Result<Option<NormWeights>, LoadError> {
        let n_embd = self.spec.n_embd;
        let Some(weight) = self.optional_vector(&format!("{name}.weight"), n_embd)? else { return Ok(None) };
        let bias = self.optional_vector(&format!("{name}.bias"), n_embd)?;
        Ok(Some(NormWeights { weight, bias }))
    }

    fn linear(&mut self, name: &str, biased: bool) -> Result<Linear, LoadError> {
        let weight = self.matrix(&format!("{name}.weight"))?;
        let bias_name = format!("{name}.bias");
        let bias = self.optional_vector(&bias_name, weight.n_rows())?;
        if biased && bias.is_none() {
            return Err(self.missing(&bias_name));
        }
        Ok(Linear { weight, bias })
    }
}

/// Reads every weight that the model needs.
pub(crate) fn read_weights(
    file: &GgufModel,
    family: &Family,
    spec: &ModelSpec,
    options: &LoadOptions,
    calibration: Option<&CalibrationFile>,
    notes: &mut Notes,
) -> Result<ModelWeights, LoadError> {
    let mut tensors = Tensors { file, spec, used: HashSet::new() };
    let token = tensors.matrix("token_embd.weight")?;
    let position = match family.first_position_row {
        Some(first) => Some((tensors.matrix("position_embd.weight")?, first)),
        None => None,
    };
    let output = match tensors.optional_matrix("output.weight")? {
        Some(output) => output,
        None => {
            notes.info("output tied to token_embd.weight");
            token.clone()
        }
    };
    let norm = tensors.norm("output_norm")?;
    let mut dense = vec![
        DensePart::Embedding(EmbeddingWeights { token, position }),
        DensePart::Head(HeadWeights { norm, output }),
    ];
    let mut ffn = Vec::with_capacity(spec.n_layer);
    let mut predictors = Vec::with_capacity(spec.n_layer);
    for layer in spec.layers() {
        dense.push(DensePart::Layer(layer, Box::new(read_layer(&mut tensors, family, layer)?)));
        ffn.push(read_ffn(&mut tensors, layer)?);
        predictors.push(read_predictor(&mut tensors, layer, options)?);
    }
    say_down_layout(&ffn, spec, notes);
    say_outliers(&ffn, spec, notes);
    if let Some(calibration) = calibration {
        predictors = gate_copies(calibration, spec, options, notes)?;
    } else if spec.sparse_file || predictors.iter().any(Option::is_some) {
        check_predictors(&predictors, spec, options, notes)?;
    }
    check_unused(&tensors, notes)?;
    Ok(ModelWeights { dense, ffn, predictors })
}

/// The FFN of one layer alone.
pub(crate) fn layer_ffn(file: &GgufModel, spec: &ModelSpec, layer: LayerId) -> Result<FfnWeights, LoadError> {
    read_ffn(&mut Tensors { file, spec, used: HashSet::new() }, layer)
}

fn read_layer(tensors: &mut Tensors<'_>, family: &Family, layer: LayerId) -> Result<LayerWeights, LoadError> {
    let spec = tensors.spec;
    let name = |part: &str| format!("blk.{layer}.{part}");
    let (q, k, v) = if family.fused_qkv {
        split_qkv(tensors.linear(&name("attn_qkv"), family.biases)?, spec)?
    } else {
        (
            tensors.linear(&name("attn_q"), family.biases)?,
            tensors.linear(&name("attn_k"), family.biases)?,
            tensors.linear(&name("attn_v"), family.biases)?,
        )
    };
    let down = if spec.sparse_file { "ffn_down_t.bias" } else { "ffn_down.bias" };
    let ffn_down_bias = tensors.optional_vector(&name(down), spec.n_embd)?;
    if family.biases && ffn_down_bias.is_none() {
        return Err(tensors.missing(&name(down)));
    }
    Ok(LayerWeights {
        attn_norm: tensors.norm(&name("attn_norm"))?,
        attn_norm_2: tensors.optional_norm(&name("attn_norm_2"))?,
        q,
        k,
        v,
        output: tensors.linear(&name("attn_output"), family.biases)?,
        ffn_norm: match spec.block {
            BlockKind::Sequential => Some(tensors.norm(&name("ffn_norm"))?),
            BlockKind::Parallel => None,
        },
        ffn_down_bias,
    })
}

/// Rows of queries, then keys, then values.
fn split_qkv(qkv: Linear, spec: &ModelSpec) -> Result<(Linear, Linear, Linear), LoadError> {
    let ends = [spec.q_dim(), spec.q_dim() + spec.kv_dim(), spec.q_dim() + 2 * spec.kv_dim()];
    if qkv.weight.n_rows() != ends[2] {
        return Err(ShapeError::Shape {
            tensor: qkv.weight.name().to_owned(),
            expected: vec![spec.n_embd, ends[2]],
            got: vec![qkv.weight.n_cols(), qkv.weight.n_rows()],
        }
        .into());
    }
    let part = |range: std::ops::Range<usize>| Linear {
        bias: qkv.bias.as_ref().map(|b| b[range.clone()].to_vec()),
        weight: qkv.weight.rows(range),
    };
    Ok((part(0..ends[0]), part(ends[0]..ends[1]), part(ends[1]..ends[2])))
}

fn read_ffn(tensors: &mut Tensors<'_>, layer: LayerId) -> Result<FfnWeights, LoadError> {
    let spec = tensors.spec;
    let name = |part: &str| format!("blk.{layer}.{part}");
    let gate = match spec.gating {
        Gating::None => None,
        Gating::Gate | Gating::GateAndUp => Some(tensors.matrix(&name("ffn_gate.weight"))?),
    };
    let up = tensors.matrix(&name("ffn_up.weight"))?;
    let up_bias = tensors.optional_vector(&name("ffn_up.bias"), up.n_rows())?;
    let down = if spec.sparse_file {
        DownWeights::ByNeuron(tensors.matrix(&name("ffn_down_t.weight"))?)
    } else {
        DownWeights::ByOutput(tensors.matrix(&name("ffn_down.weight"))?)
    };
    let mut ffn = FfnWeights { gate, up, up_bias, down };
    // Checked as the file has it, so that an error shows the file's shape.
    ffn.check(spec, layer)?;
    if let DownWeights::ByOutput(down) = &ffn.down
        && spec.activation.has_exact_zeros()
        && down.ty().is_float()
    {
        ffn.down = DownWeights::ByNeuron(down.transposed());
    }
    Ok(ffn)
}

fn read_predictor(
    tensors: &mut Tensors<'_>,
    layer: LayerId,
    options: &LoadOptions,
) -> Result<Option<PredictorWeights>, LoadError> {
    let name = |part: &str| format!("blk.{layer}.{part}.weight");
    let fc1 = tensors.optional_matrix(&name("fc1"))?;
    let fc2 = tensors.optional_matrix(&name("fc2"))?;
    let (fc1, fc2) = match (fc1, fc2) {
        (Some(fc1), Some(fc2)) => (fc1, fc2),
        (None, None) => return Ok(None),
        (None, Some(_)) => return Err(tensors.missing(&name("fc1"))),
        (Some(_), None) => return Err(tensors.missing(&name("fc2"))),
    };
    let in_file = tensors.file.metadata().find::<f32>("powerinfer.sparse_threshold")?;
    let threshold = options.sparse_threshold.or(in_file).unwrap_or(0.0);
    if threshold.is_nan() {
        return Err(LoadError::BadValue {
            key: "powerinfer.sparse_threshold".to_owned(),
            rule: "must be a number".to_owned(),
            got: "NaN".to_owned(),
        });
    }
    let predictor = PredictorWeights::LowRank(LowRank { fc1, fc2, threshold });
    predictor.check(tensors.spec, layer)?;
    Ok(Some(predictor))
}

/// The calibration that the options and the place of the file ask for.
pub(crate) fn find_calibration(
    file: &GgufModel,
    path: Option<&Path>,
    options: &LoadOptions,
    notes: &mut Notes,
) -> Result<Option<CalibrationFile>, LoadError> {
    let open = |path: &Path| {
        let calibration = CalibrationFile::open(path)?;
        calibration.check_model(&crate::calibration::fingerprint(file))?;
        Ok::<_, PredictorError>(calibration)
    };
    let path = match (&options.calibration, path) {
        (CalibrationChoice::File(path), _) => return Ok(Some(open(path)?)),
        (CalibrationChoice::Beside, Some(path)) => calibration_path(path),
        _ => return Ok(None),
    };
    if !path.exists() {
        return Ok(None);
    }
    if file.tensors().any(|t| t.name().ends_with(".fc1.weight")) {
        notes.info(format!("`{}` is not used: the file has predictors of its own", path.display()));
        return Ok(None);
    }
    match open(&path) {
        Ok(calibration) => Ok(Some(calibration)),
        Err(error) => {
            let source = std::error::Error::source(&error).map(|s| format!(": {s}")).unwrap_or_default();
            notes.warn(format!("`{}` is not used: {error}{source}", path.display()));
            Ok(None)
        }
    }
}

/// The copies of the layers that use them.
fn gate_copies(
    calibration: &CalibrationFile,
    spec: &ModelSpec,
    options: &LoadOptions,
    notes: &mut Notes,
) -> Result<Vec<Option<PredictorWeights>>, LoadError> {
    if calibration.layers().len() != spec.n_layer {
        return Err(LoadError::CalibrationLayers { expected: spec.n_layer, got: calibration.layers().len() });
    }
    let recall_ix = calibration.recall_ix(options.recall)?;
    let mut predictors = Vec::with_capacity(spec.n_layer);
    for (id, layer) in spec.layers().zip(calibration.layers()) {
        let copy = PredictorWeights::GateCopy(Arc::new(layer.gate_copy(recall_ix)));
        copy.check(spec, id)?;
        predictors.push(layer.figures().used.then_some(copy));
    }
    let used = (0..).zip(&predictors).filter(|(_, p)| p.is_some()).map(|(layer, _): (u32, _)| layer);
    notes.info(format!(
        "calibrated gate copies for recall {} in layers {}",
        calibration.recalls()[recall_ix],
        ranges(used)
    ));
    Ok(predictors)
}

/// Ascending numbers as ranges: `0-3, 7`; `none` for none.
pub(crate) fn ranges(numbers: impl Iterator<Item = u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for n in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => ranges.push((n, n)),
        }
    }
    let show = |(first, last)| if first == last { format!("{first}") } else { format!("{first}-{last}") };
    let shown: Vec<String> = ranges.into_iter().map(show).collect();
    if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
}

fn check_predictors(
    predictors: &[Option<PredictorWeights>],
    spec: &ModelSpec,
    options: &LoadOptions,
    notes: &mut Notes,
) -> Result<(), LoadError> {
    let missing: Vec<String> = (0..)
        .zip(predictors)
        .filter(|(_, p)| p.is_none())
        .map(|(layer, _): (u32, _)| layer.to_string())
        .collect();
    let Some(first) = missing.first() else {
        let low_rank = || {
            predictors.iter().flatten().filter_map(|p| match p {
                PredictorWeights::LowRank(p) => Some(p),
                PredictorWeights::GateCopy(_) => None,
            })
        };
        let ranks: Vec<usize> = low_rank().map(|p| p.fc1.n_rows()).collect();
        let (low, high) = (ranks.iter().min().copied(), ranks.iter().max().copied());
        let threshold = low_rank().next().map_or(0.0, |p| p.threshold);
        notes.info(format!(
            "predictors in all {} layers, rank {} to {}, threshold {threshold}",
            spec.n_layer,
            low.unwrap_or(0),
            high.unwrap_or(0)
        ));
        return Ok(());
    };
    if !options.allow_missing_predictors {
        return Err(LoadError::MissingTensor {
            tensor: format!("blk.{first}.fc1.weight"),
            arch: spec.arch.clone(),
            magic: if spec.sparse_file { "PWRI" } else { "GGUF" },
        });
    }
    notes.warn(format!("no predictor in layers {}: computed exactly, gate first", missing.join(", ")));
    Ok(())
}

fn say_down_layout(ffn: &[FfnWeights], spec: &ModelSpec, notes: &mut Notes) {
    if spec.sparse_file || !spec.activation.has_exact_zeros() {
        return;
    }
    // Layers may differ in type: each kind of layout is said once.
    let mut by_output: Vec<&'static str> = Vec::new();
    let mut transposed_bytes = 0;
    for ffn in ffn {
        match &ffn.down {
            DownWeights::ByNeuron(m) => transposed_bytes += m.n_bytes(),
            DownWeights::ByOutput(m) => by_output.push(m.ty().name()),
        }
    }
    if transposed_bytes > 0 {
        let mib = transposed_bytes as f64 / (1 << 20) as f64;
        notes.info(format!("down projections transposed at load without loss, a copy of {mib:.1} MiB"));
    }
    by_output.sort_unstable();
    by_output.dedup();
    if !by_output.is_empty() {
        notes.info(format!(
            "down projections ({}) are stored by output in blocks that run over neurons: read whole, unless the \
             backend says that it laid them out anew",
            by_output.join(", ")
        ));
    }
}

/// Columns of gates that are much larger than the others, by a sample of the rows: they decide how well a gate can be
/// predicted or kept in few bits.
fn say_outliers(ffn: &[FfnWeights], spec: &ModelSpec, notes: &mut Notes) {
    const N_ROWS: usize = 128;
    if !spec.activation.has_exact_zeros() {
        return;
    }
    let gates = (0..).zip(ffn).filter_map(|(layer, ffn)| ffn.gate.as_ref().map(|gate| (layer, gate)));
    let found: Vec<(u32, usize)> = gates
        .map(|(layer, gate)| (layer, sample_outlier_columns(gate, N_ROWS).len()))
        .filter(|(_, n)| *n > 0)
        .collect();
    let counts = || found.iter().map(|(_, n)| *n);
    if let (Some(least), Some(most)) = (counts().min(), counts().max()) {
        let layers = ranges(found.iter().map(|(layer, _)| *layer));
        notes.info(format!(
            "gates of layers {layers} have {least} to {most} columns of more than 4 times the usual size, by {N_ROWS} of \
             their rows; gate copies keep such columns apart"
        ));
    }
}

/// Tensors that were not read: those of the computation are an error, since without them it is another one.
fn check_unused(tensors: &Tensors<'_>, notes: &mut Notes) -> Result<(), LoadError> {
    // Older converters store frequencies that every reader computes; factors were read with the spec.
    let harmless = |name: &str| name == "rope_freqs.weight" || name.ends_with(".attn_rot_embd");
    let of_computation =
        |name: &str| ["blk.", "output", "token_", "position_"].iter().any(|prefix| name.starts_with(prefix));
    let file = tensors.file;
    let unused: Vec<&str> = file.tensors().map(|t| t.name()).filter(|n| !tensors.used.contains(*n)).collect();
    if let Some(name) = unused.iter().find(|name| of_computation(name) && !harmless(name)) {
        return Err(LoadError::UnknownTensor { tensor: (*name).to_owned(), arch: tensors.spec.arch.clone() });
    }
    if let Some(first) = unused.iter().find(|name| !harmless(name)) {
        notes.warn(format!("{} tensors of the file are not used, such as `{first}`", unused.len()));
    }
    Ok(())
}
