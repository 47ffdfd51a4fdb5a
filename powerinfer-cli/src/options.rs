//! What the flags mean: options of the library, and the model they name.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use powerinfer_core::sampling::{Mirostat, SamplingParams};
use powerinfer_core::tokenizer::{Encode, Tokenizer, TokenizerError};
use powerinfer_core::{
    Activation, ActiveMode, CalibrationChoice, Certified, CpuLevel, CpuOptions, Device, KvType, LoadOptions,
    LoadProgress, Model, NoteLevel, Notes, Rounding, TokenId, WeightHome, default_threads,
};
use powerinfer_gguf::{GgufFile, GgufModel};

use crate::args::{
    ActivationName, CertifiedName, DeviceArgs, DeviceName, KvTypeName, LevelName, Mode, ModelArgs,
    SamplingArgs, WeightsIn,
};
use crate::error::CliError;
use crate::output::{progress_bar, say};
use crate::placement::{self, Wanted};

/// Where a model comes from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    File(PathBuf),
    /// The story model that is part of the program.
    Demo,
}

impl Source {
    pub(crate) fn of(path: Option<&PathBuf>) -> Self {
        path.map_or(Self::Demo, |path| Self::File(path.clone()))
    }

    /// The name in messages and results.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Demo => "demo model".to_owned(),
        }
    }

    pub(crate) fn is_demo(&self) -> bool {
        matches!(self, Self::Demo)
    }

    /// Opens the file or set of files and checks the header.
    pub(crate) fn open(&self) -> Result<GgufModel, CliError> {
        match self {
            Self::File(path) => GgufModel::open(path),
            Self::Demo => GgufFile::from_bytes(powerinfer_demo_model::MODEL).map(GgufModel::from),
        }
        .map_err(|error| self.load_error(error))
    }

    pub(crate) fn load_error(&self, error: impl Into<powerinfer_core::LoadError>) -> CliError {
        let model = match self {
            Self::File(path) => format!("`{}`", path.display()),
            Self::Demo => "the demo model".to_owned(),
        };
        CliError::Load { model, source: Box::new(error.into()) }
    }
}

/// A loaded model and where it came from.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) model: Model,
    pub(crate) source: Source,
}

/// Prints notes, warnings as such.
pub(crate) fn say_all(notes: &Notes) {
    for (level, line) in notes.iter() {
        let level = if level == NoteLevel::Warning { "warning" } else { "info" };
        say(&format!("{level}: {line}"));
    }
}

impl Loaded {
    /// Loads the model that the flags name, for contexts of `n_ctx` positions, and prints its warnings.
    pub(crate) fn new(
        args: &ModelArgs,
        mode: Option<ActiveMode>,
        n_ctx: Option<usize>,
    ) -> Result<Self, CliError> {
        let options = load_options(args, mode, n_ctx)?;
        let source = Source::of(args.model.as_ref());
        let model = match &source {
            Source::File(path) => Model::open(path, &options),
            Source::Demo => Model::from_bytes(powerinfer_demo_model::MODEL, &options),
        }
        .map_err(|error| source.load_error(error))?;
        for (level, line) in model.notes().iter() {
            if level == NoteLevel::Warning {
                say(&format!("warning: {line}"));
            }
        }
        Ok(Self { model, source })
    }

    /// Prints what was decided at load.
    pub(crate) fn say_notes(&self) {
        let spec = self.model.spec();
        say(&format!("model: {} ({}, {} layers)", self.title(), spec.arch, spec.n_layer));
        for (level, line) in self.model.notes().iter() {
            if level == NoteLevel::Info {
                say(&format!("info: {line}"));
            }
        }
    }

    fn title(&self) -> String {
        match self.model.name() {
            Some(name) => format!("{name}, {}", self.source.name()),
            None => self.source.name(),
        }
    }
}

pub(crate) fn load_options(
    args: &ModelArgs,
    mode: Option<ActiveMode>,
    n_ctx: Option<usize>,
) -> Result<LoadOptions, CliError> {
    let Wanted { accelerators, plan, assignment } = placement::on_this_machine(args, n_ctx)?;
    let on_host = load_options_on_host(args, mode)?;
    Ok(LoadOptions { accelerators, plan, assignment, ..on_host })
}

/// As [`load_options`], with everything on the host.
pub(crate) fn load_options_on_host(
    args: &ModelArgs,
    mode: Option<ActiveMode>,
) -> Result<LoadOptions, CliError> {
    Ok(LoadOptions {
        device: device(&args.device, args.model.as_deref())?,
        activation: args.activation.map(activation),
        sparse_threshold: args.sparse_threshold,
        mode,
        allow_missing_predictors: args.allow_missing_predictors,
        calibration: match &args.calibration {
            _ if args.no_calibration => CalibrationChoice::Never,
            Some(path) => CalibrationChoice::File(path.clone()),
            None => CalibrationChoice::Beside,
        },
        recall: args.recall,
        pre_tokenizer: args.pre,
        progress: load_progress(),
        ..LoadOptions::default()
    })
}

/// A bar for weights that take a moment to bring in.
fn load_progress() -> LoadProgress {
    const WORTH_SHOWING: u64 = 512 << 20;
    let bar = std::sync::OnceLock::new();
    LoadProgress::new(move |done, total| {
        if total < WORTH_SHOWING {
            return;
        }
        let bar = bar.get_or_init(|| progress_bar(total, "loading  {bar:40} {bytes}/{total_bytes}"));
        bar.set_position(done);
        if done == total {
            bar.finish_and_clear();
        }
    })
}

pub(crate) fn activation(name: ActivationName) -> Activation {
    match name {
        ActivationName::Relu => Activation::Relu,
        ActivationName::Silu => Activation::Silu,
        ActivationName::Gelu => Activation::Gelu,
    }
}

pub(crate) fn mode(mode: Mode) -> ActiveMode {
    match mode {
        Mode::Dense => ActiveMode::Dense,
        Mode::Exact => ActiveMode::Exact,
        Mode::Predictor => ActiveMode::Predictor,
    }
}

/// The modes that were asked for, each once, or the model's own.
pub(crate) fn modes(asked: &[Mode], model: &Model) -> Vec<ActiveMode> {
    let mut modes = Vec::new();
    for mode in asked.iter().map(|&m| mode(m)) {
        if !modes.contains(&mode) {
            modes.push(mode);
        }
    }
    if modes.is_empty() {
        modes.push(model.default_mode());
    }
    modes
}

fn device(args: &DeviceArgs, model: Option<&Path>) -> Result<Device, CliError> {
    match args.device {
        DeviceName::Reference => {
            let flags = [
                ("--threads", args.threads.is_some()),
                ("--cpu-level", args.cpu_level.is_some()),
                ("--kv-type", args.kv_type.is_some()),
                ("--certified", args.certified.is_some()),
                ("--weights-in", args.weights_in.is_some()),
            ];
            match flags.into_iter().find(|(_, given)| *given) {
                Some((flag, _)) => Err(CliError::FlagWithoutUse { flag, device: "reference" }),
                None => Ok(Device::Reference(Rounding::None)),
            }
        }
        DeviceName::Cpu => cpu(args, model),
    }
}

fn cpu(args: &DeviceArgs, model: Option<&Path>) -> Result<Device, CliError> {
    let wanted = args.cpu_level.map(|level| match level {
        LevelName::Scalar => "scalar",
        LevelName::Avx2 => "avx2",
        LevelName::Avx512 => "avx512",
        LevelName::Neon => "neon",
    });
    let available = CpuLevel::available();
    let level = match wanted {
        None => None,
        Some(name) => Some(available.iter().copied().find(|l| l.name() == name).ok_or_else(|| {
            CliError::Unavailable {
                what: format!("instruction set {name}"),
                available: available.iter().map(|l| l.name()).collect::<Vec<_>>().join(", "),
            }
        })?),
    };
    // 0 is the library's own choice.
    let threads = args.threads.map_or(0, |n| n as usize);
    let kv_type = match args.kv_type {
        None => KvType::default(),
        Some(KvTypeName::F16) => KvType::F16,
        Some(KvTypeName::F32) => KvType::F32,
        Some(KvTypeName::Q8_0) => KvType::Q8_0,
    };
    let certified = match args.certified {
        None | Some(CertifiedName::Auto) => Certified::Auto,
        Some(CertifiedName::On) => Certified::On,
        Some(CertifiedName::Off) => Certified::Off,
    };
    let home = match (args.weights_in, model) {
        (None | Some(WeightsIn::HugePages), _) => WeightHome::HugePages,
        (Some(WeightsIn::SmallPages), _) => WeightHome::SmallPages,
        (Some(WeightsIn::CacheFile), Some(path)) => {
            let mut name = path.as_os_str().to_owned();
            name.push(".weights-cache");
            WeightHome::CacheFile(name.into())
        }
        (Some(WeightsIn::CacheFile), None) => {
            return Err(CliError::FlagWithoutUse {
                flag: "--weights-in cache-file",
                device: "cpu without --model",
            });
        }
    };
    Ok(Device::Cpu(CpuOptions { threads, level, kv_type, certified, home, ..CpuOptions::default() }))
}

/// Threads that compute with these flags.
pub(crate) fn threads(args: &DeviceArgs) -> usize {
    match (args.device, args.threads) {
        (DeviceName::Reference, _) => 1,
        (DeviceName::Cpu, Some(n)) => n as usize,
        (DeviceName::Cpu, None) => default_threads(),
    }
}

pub(crate) fn sampling(args: &SamplingArgs) -> SamplingParams {
    SamplingParams {
        temperature: args.temp,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        typical: args.typical,
        repeat_last_n: args.repeat_last_n,
        repeat_penalty: args.repeat_penalty,
        frequency_penalty: args.frequency_penalty,
        presence_penalty: args.presence_penalty,
        logit_bias: args.logit_bias.iter().map(|&(id, bias)| (TokenId(id), bias)).collect(),
        mirostat: match args.mirostat {
            0 => Mirostat::Off,
            1 => Mirostat::V1,
            _ => Mirostat::V2,
        },
        mirostat_tau: args.mirostat_ent,
        mirostat_eta: args.mirostat_lr,
        seed: args.seed,
    }
}

/// The beginning-of-text token that goes before a text: the file's rule, and for the demo model, whose file has no
/// rule though every text it was trained on begins so, always.
pub(crate) fn bos(tokenizer: &Tokenizer, is_demo: bool) -> Option<TokenId> {
    tokenizer.bos().filter(|_| tokenizer.adds_bos() || is_demo)
}

/// The ids of a text as a model wants it, with the special tokens around it.
pub(crate) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    parse_special: bool,
    is_demo: bool,
) -> Result<Vec<TokenId>, TokenizerError> {
    let mut ids = tokenizer.encode(text, Encode { add_special: true, parse_special })?;
    if let Some(bos) = bos(tokenizer, is_demo)
        && !tokenizer.adds_bos()
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
    }
    Ok(ids)
}

/// A text file; `-` is standard input.
pub(crate) fn read_text(path: &Path) -> Result<String, CliError> {
    let failed = |source| CliError::Read { path: path.to_owned(), source };
    let bytes = if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes).map_err(failed)?;
        bytes
    } else {
        std::fs::read(path).map_err(failed)?
    };
    String::from_utf8(bytes).map_err(|error| CliError::NotUtf8 {
        path: path.to_owned(),
        offset: error.utf8_error().valid_up_to(),
    })
}
