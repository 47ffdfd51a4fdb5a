//! A loaded model: weights, tokenizer and chat template, shared by its sessions.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use powerinfer_gguf::{GgufFile, GgufModel};
use powerinfer_predictor::CalibrationFile;
use powerinfer_sparse_ops::{
    ActiveMode, BackendInfo, DensePart, LayerId, ModelSpec, NeuronSet, WeightMatrix,
};

use crate::chat::{ChatError, ChatTemplate};
use crate::forward::Forward;
use crate::load::{self, LoadError, LoadOptions, ModelWeights, Notes};
use crate::placement::{Adaptive, Assignment, Plan, PlanTable, Planning};
use crate::session::{Engine, Session, SessionError, SessionOptions};
use crate::spec::{self, Family};
use crate::tokenizer::Tokenizer;
use crate::vocab;

/// A loaded model. Cloning is cheap and shares the weights; it may be used from many threads, which take turns
/// at its backends.
///
/// # Which activation the FFN has
///
/// Decided by the first of these rules that applies, and said in [`Model::notes`]:
///
/// 1. [`LoadOptions::activation`];
/// 2. the key `<arch>.hidden_act` (`relu`, `silu` or `gelu`), which files written by this project carry;
/// 3. a `PWRI` file: ReLU;
/// 4. the family: llama SiLU, bamboo and opt ReLU, falcon GELU. A dense llama or falcon file without the key
///    whose `general.name` says ReLU, ReGLU, ProSparse or TurboSparse is refused, since the default would
///    silently compute another function.
#[derive(Clone)]
pub struct Model {
    shared: Arc<Shared>,
}

/// What all sessions of a model share.
pub(crate) struct Shared {
    pub(crate) spec: Arc<ModelSpec>,
    pub(crate) default_mode: ActiveMode,
    pub(crate) n_batch: usize,
    name: Option<String>,
    plan: Option<Plan>,
    has_predictors: bool,
    /// Layers with a predictor, `[n_layer]`.
    predicted: Vec<bool>,
    tokenizer: Tokenizer,
    chat_template: Option<Result<ChatTemplate, ChatError>>,
    notes: Notes,
    backends: Vec<BackendInfo>,
    weight_bytes: u64,
    engine: Mutex<Engine>,
}

impl Shared {
    /// The backends, for one step.
    ///
    /// # Panics
    /// If a step panicked before: what it left behind cannot be trusted.
    pub(crate) fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().expect("no step has panicked before")
    }

    /// The backends, for clean-up, whatever happened.
    pub(crate) fn engine_for_release(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("arch", &self.spec.arch).field("backends", &self.backends).finish()
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

impl Model {
    /// Opens a GGUF or PWRI file (the first one, if there are several) and loads it; files are mapped, not
    /// read.
    ///
    /// # Errors
    /// A [`LoadError`] that names the key or tensor at fault.
    pub fn open(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self, LoadError> {
        let path = path.as_ref();
        Self::load_from(&GgufModel::open(path)?, Some(path), options, None)
    }

    /// Loads a model from the bytes of a file.
    ///
    /// # Errors
    /// A [`LoadError`] that names the key or tensor at fault.
    pub fn from_bytes(
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
        options: &LoadOptions,
    ) -> Result<Self, LoadError> {
        Self::load(&GgufModel::from(GgufFile::from_bytes(bytes)?), options)
    }

    /// Loads a model from an opened file. Nothing is looked for beside it.
    ///
    /// # Errors
    /// A [`LoadError`] that names the key or tensor at fault.
    pub fn load(file: &GgufModel, options: &LoadOptions) -> Result<Self, LoadError> {
        Self::load_from(file, None, options, None)
    }

    /// As [`Model::load`], with a calibration that is not in a file.
    pub(crate) fn load_calibrated(
        file: &GgufModel,
        calibration: &CalibrationFile,
        options: &LoadOptions,
    ) -> Result<Self, LoadError> {
        Self::load_from(file, None, options, Some(calibration))
    }

    fn load_from(
        file: &GgufModel,
        path: Option<&Path>,
        options: &LoadOptions,
        calibration: Option<&CalibrationFile>,
    ) -> Result<Self, LoadError> {
        if options.n_batch == 0 || options.n_batch > load::MAX_BATCH {
            return Err(LoadError::BatchSize { n_batch: options.n_batch });
        }
        let mut notes = Notes::default();
        let family = Family::of(file)?;
        let spec = Arc::new(spec::read_spec(file, family, options, &mut notes)?);
        let tokenizer = vocab::read_tokenizer(file, options.pre_tokenizer)?;
        for warning in tokenizer.warnings() {
            notes.warn(warning.to_string());
        }
        if tokenizer.n_vocab() > spec.n_vocab {
            return Err(LoadError::VocabularySize { n_tokens: tokenizer.n_vocab(), n_rows: spec.n_vocab });
        }
        let chat_template = vocab::chat_template(file)?.map(ChatTemplate::parse);
        if let Some(Err(error)) = &chat_template {
            notes.warn(format!("the chat template cannot be used: {error}"));
        }
        let Parts { weights, predicted, has_predictors, default_mode } =
            Parts::read(file, path, family, &spec, options, calibration, &mut notes)?;
        let weight_bytes = file.tensors().map(|t| t.n_bytes() as u64).sum();
        let name = file.metadata().find::<String>("general.name")?;
        let plan = match &options.plan {
            Some(how) if options.assignment.is_none() => {
                let name = name.as_deref().unwrap_or(&spec.arch);
                let mode = default_mode;
                let plan = Planning { file, spec: &spec, name, weights: &weights, mode, options, how };
                let plan = plan.plan(&mut notes)?;
                for line in PlanTable(&plan).to_string().lines() {
                    notes.info(line);
                }
                Some(plan)
            }
            _ => None,
        };
        let forward = fill_backends(&spec, weights, plan.as_ref(), default_mode, options, &mut notes)?;
        let backends: Vec<BackendInfo> = forward.backends.iter().map(|b| b.info()).collect();
        for backend in &backends {
            notes.info(format!("{}: {}", backend.name, backend.description));
        }
        Ok(Self {
            shared: Arc::new(Shared {
                default_mode,
                n_batch: options.n_batch,
                name,
                plan,
                has_predictors,
                predicted,
                tokenizer,
                chat_template,
                notes,
                backends,
                weight_bytes,
                engine: Mutex::new(Engine::new(forward, options.n_batch)),
                spec,
            }),
        })
    }

    pub(crate) fn from_shared(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Starts a text of its own.
    ///
    /// # Errors
    /// [`SessionError::ContextLength`], or [`SessionError::Backend`] if there is no memory for a KV cache.
    pub fn session(&self, options: &SessionOptions) -> Result<Session, SessionError> {
        if options.mode == Some(ActiveMode::Predictor) && !self.shared.has_predictors {
            return Err(SessionError::NoPredictors);
        }
        Session::new(Arc::clone(&self.shared), options)
    }

    /// Plans where the parts of a model file go, by [`LoadOptions::plan`], without loading them; no device need be
    /// there unless it is to be measured. `path` is where a calibration is looked for beside the file. The notes say what
    /// was measured, and which plan of a file is not used. `None` if no plan is asked for.
    ///
    /// # Errors
    /// A [`LoadError`] that names the key or tensor at fault, or says that the statistics are of another model.
    pub fn plan(
        file: &GgufModel,
        path: Option<&Path>,
        options: &LoadOptions,
    ) -> Result<Option<(Plan, Notes)>, LoadError> {
        let Some(how) = &options.plan else { return Ok(None) };
        let mut notes = Notes::default();
        let family = Family::of(file)?;
        let spec = spec::read_spec(file, family, options, &mut notes)?;
        let parts = Parts::read(file, path, family, &spec, options, None, &mut notes)?;
        let name = file.metadata().find::<String>("general.name")?;
        let (weights, mode) = (&parts.weights, parts.default_mode);
        let name = name.as_deref().unwrap_or(&spec.arch);
        let mut notes = Notes::default();
        let plan = Planning { file, spec: &spec, name, weights, mode, options, how }.plan(&mut notes)?;
        Ok(Some((plan, notes)))
    }

    /// The plan that the model was loaded by, if one was asked for.
    pub fn placement(&self) -> Option<&Plan> {
        self.shared.plan.as_ref()
    }

    /// Whether neurons move while it runs, by what the backends count.
    pub(crate) fn is_adaptive(&self) -> bool {
        self.shared.engine().forward.is_adaptive()
    }

    /// The model's name for people, from `general.name`.
    pub fn name(&self) -> Option<&str> {
        self.shared.name.as_deref()
    }

    /// Dimensions and family.
    pub fn spec(&self) -> &ModelSpec {
        &self.shared.spec
    }

    /// The tokenizer of the file.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.shared.tokenizer
    }

    /// The chat template of the file; `None` if it has none.
    ///
    /// # Errors
    /// [`ChatError`] naming the line, if the template is broken.
    pub fn chat_template(&self) -> Option<Result<&ChatTemplate, &ChatError>> {
        self.shared.chat_template.as_ref().map(Result::as_ref)
    }

    /// Which rules and fallbacks were applied at load, each with its reason.
    pub fn notes(&self) -> &Notes {
        &self.shared.notes
    }

    /// What computes; the first one is home.
    pub fn backends(&self) -> &[BackendInfo] {
        &self.shared.backends
    }

    /// Bytes of all tensors of the file.
    pub fn weight_bytes(&self) -> u64 {
        self.shared.weight_bytes
    }

    /// Which neurons sessions compute unless they say otherwise: `predictor` with predictors, `exact` with an
    /// activation that has exact zeros, otherwise `dense`.
    pub fn default_mode(&self) -> ActiveMode {
        self.shared.default_mode
    }

    /// Whether the file or its calibration has predictors and an activation with exact zeros, so that mode `predictor` is there.
    pub fn has_predictors(&self) -> bool {
        self.shared.has_predictors
    }

    /// Whether mode `predictor` predicts in this layer; otherwise it computes it exactly.
    pub fn layer_has_predictor(&self, layer: LayerId) -> bool {
        self.shared.has_predictors && self.shared.predicted.get(layer.index()).is_some_and(|&p| p)
    }

    /// Tokens of a prompt that go through the model together.
    pub fn n_batch(&self) -> usize {
        self.shared.n_batch
    }
}

/// The weights of a file and what follows from them.
struct Parts {
    weights: ModelWeights,
    /// Layers with a predictor, `[n_layer]`.
    predicted: Vec<bool>,
    has_predictors: bool,
    default_mode: ActiveMode,
}

impl Parts {
    /// Reads them; `calibration` takes the place of one that the options may name.
    fn read(
        file: &GgufModel,
        path: Option<&Path>,
        family: &Family,
        spec: &ModelSpec,
        options: &LoadOptions,
        calibration: Option<&CalibrationFile>,
        notes: &mut Notes,
    ) -> Result<Self, LoadError> {
        let found = match calibration {
            Some(_) => None,
            None => load::find_calibration(file, path, options, notes)?,
        };
        let calibration = calibration.or(found.as_ref());
        let weights = load::read_weights(file, family, spec, options, calibration, notes)?;
        let predicted: Vec<bool> = weights.predictors.iter().map(Option::is_some).collect();
        let mut has_predictors = predicted.contains(&true);
        if has_predictors && !spec.activation.has_exact_zeros() {
            notes.warn(format!(
                "the file's predictors are not used: activation {} has no exact zeros to leave out",
                spec.activation.name()
            ));
            has_predictors = false;
        }
        let default_mode = default_mode(spec, has_predictors, options, notes)?;
        Ok(Self { weights, predicted, has_predictors, default_mode })
    }
}

fn default_mode(
    spec: &ModelSpec,
    has_predictors: bool,
    options: &LoadOptions,
    notes: &mut Notes,
) -> Result<ActiveMode, LoadError> {
    let (mode, why) = match options.mode {
        Some(ActiveMode::Predictor) if !has_predictors => return Err(LoadError::NoPredictors),
        Some(mode) => (mode, "as asked for"),
        None if has_predictors => (ActiveMode::Predictor, "there are predictors"),
        None if spec.activation.has_exact_zeros() => {
            (ActiveMode::Exact, "the activation has exact zeros, the file no predictors")
        }
        None => (ActiveMode::Dense, "the activation has no exact zeros"),
    };
    if mode == ActiveMode::Exact && !spec.activation.has_exact_zeros() {
        notes.warn("mode exact computes as dense: the activation has no exact zeros");
    }
    notes.info(format!("mode {} ({why})", mode.name()));
    Ok(mode)
}

/// Makes the backends and gives each what it is to hold. The host comes last to bring its weights in, since it gives
/// back the pages that all copied from.
fn fill_backends(
    spec: &Arc<ModelSpec>,
    weights: ModelWeights,
    plan: Option<&Plan>,
    mode: ActiveMode,
    options: &LoadOptions,
    notes: &mut Notes,
) -> Result<Forward, LoadError> {
    let devices = || std::iter::once(&options.device).chain(&options.accelerators);
    let n_backends = devices().count();
    let everything_on_host;
    let assignment = match options.assignment.as_ref().or(plan.map(|plan| &plan.assignment)) {
        Some(assignment) => assignment,
        None => {
            everything_on_host = Assignment::all_on(spec, 0, n_backends);
            &everything_on_host
        }
    };
    assignment.check(spec, n_backends)?;
    let mut backends = devices().map(|device| device.backend(spec)).collect::<Result<Vec<_>, _>>()?;
    let mut not_on_host: Vec<WeightMatrix> = Vec::new();
    for part in weights.dense {
        let home = match &part {
            DensePart::Embedding(_) => assignment.embed,
            DensePart::Layer(layer, _) => assignment.layers[layer.index()].home,
            DensePart::Head(_) => assignment.head,
        };
        if home != 0 {
            not_on_host.extend(part.matrices().cloned());
        }
        backends[home].load_dense(part)?;
    }
    let adaptive = options.adaptive.filter(|_| n_backends > 1);
    let mut adaptive = adaptive.map(|how| Adaptive::new(how, assignment, weights.ffn.clone()));
    let layers = weights.ffn.into_iter().zip(weights.predictors).zip(&assignment.layers);
    for (layer, ((ffn, predictor), assigned)) in (0..).map(LayerId).zip(layers) {
        // Only between two holders do neurons move.
        let is_split = !assigned.owned[0].is_empty() && !assigned.owned[0].is_all();
        let everything = adaptive.as_ref().filter(|_| is_split).map(|_| NeuronSet::all(ffn.n_ff()));
        let host_owns = everything.as_ref().unwrap_or(&assigned.owned[0]);
        if host_owns.is_empty() {
            not_on_host.extend(ffn.matrices().cloned());
        }
        let owned = std::iter::once(host_owns).chain(&assigned.owned[1..]);
        for (backend, owned) in backends.iter_mut().zip(owned) {
            if !owned.is_empty() {
                backend.load_ffn(layer, ffn.clone(), owned)?;
            }
        }
        if let Some(predictor) = predictor {
            backends[assigned.home].load_predictor(layer, predictor)?;
        }
    }
    for backend in backends.iter_mut().rev() {
        backend.load_done(&mut |done, total| options.progress.tell(done, total))?;
    }
    not_on_host.iter().for_each(WeightMatrix::release);
    if let Some(name) = adaptive.as_mut().and_then(|adaptive| adaptive.start(mode, &mut backends)) {
        notes.warn(format!("in mode exact no neurons move: {name} does not count which of them fire"));
    }
    Ok(Forward::new(spec, backends, assignment, adaptive, options.n_batch))
}
