//! What ends a command.

use std::io;
use std::path::PathBuf;

use powerinfer_core::calibration::CalibrateError;
use powerinfer_core::chat::ChatError;
use powerinfer_core::sampling::SamplingError;
use powerinfer_core::tokenizer::TokenizerError;
use powerinfer_core::{GenerateError, LoadError, SessionError};

use powerinfer_predictor::PredictorError;

use crate::convert::ConvertError;

/// Why a command failed. The chain of sources is printed once, in `main`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// No text to continue.
    #[error("no prompt: give one with -p TEXT or -f FILE")]
    NoPrompt,
    /// An input file.
    #[error("cannot read `{}`", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// An input file that is no text.
    #[error("`{}` is not UTF-8: byte {offset} begins no character", path.display())]
    NotUtf8 { path: PathBuf, offset: usize },
    /// An input file that should be JSON.
    #[error("`{}` is not a JSON array of strings", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// A result file.
    #[error("cannot write `{}`", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// Standard output.
    #[error("cannot write to standard output")]
    Stdout(#[source] io::Error),
    /// The handler of Ctrl-C.
    #[error("cannot listen for Ctrl-C")]
    Signal(#[source] ctrlc::Error),
    /// The model.
    #[error("cannot load {model}")]
    Load {
        model: String,
        #[source]
        source: Box<LoadError>,
    },
    /// What this machine lacks.
    #[error("{what} is not available; available: {available}")]
    Unavailable { what: String, available: String },
    /// A flag that the chosen device has no use for.
    #[error("{flag} has no meaning for device {device}")]
    FlagWithoutUse { flag: &'static str, device: &'static str },
    /// `profile` into one file of PyTorch.
    #[error(
        "`{}` is one file, and the format pt has one for each layer: give a folder, such as `activation/`",
        path.display()
    )]
    OnePtFile { path: PathBuf },
    /// `profile`.
    #[error(transparent)]
    Profile(powerinfer_core::profile::ProfileError),
    /// A name that describes no machine.
    #[error(transparent)]
    Machine(#[from] powerinfer_core::placement::MachineError),
    /// More sizes than GPUs.
    #[error("--vram-budget gives {n_budgets} sizes, there are {n_devices} GPUs")]
    Budgets { n_budgets: usize, n_devices: usize },
    /// A flag about a placement that nothing asks for.
    #[error("{flag} has no meaning without --vram-budget")]
    NeedsBudget { flag: &'static str },
    /// A flag that takes the place of a plan, for the command that makes one.
    #[error("--gpu-index takes the place of a plan: leave it out, or use `powerinfer generate`")]
    IndexForPlan,
    /// An index file of neurons.
    #[error("`{}` cannot be used", path.display())]
    GpuIndex { path: PathBuf, source: Box<powerinfer_gguf::GpuIndexError> },
    /// Statistics of neurons.
    #[error(transparent)]
    Statistics(PredictorError),
    /// Bad sampling parameters.
    #[error(transparent)]
    Sampling(SamplingError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// `--chat` with a file that has no template.
    #[error("the file has no chat template; leave out --chat")]
    NoChatTemplate,
    /// `--chat` with a file whose template cannot be used.
    #[error("the chat template of the file cannot be used: {reason}")]
    BrokenChatTemplate { reason: String },
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// A text that is too short to measure.
    #[error(
        "the text has {n_tokens} tokens, a perplexity with chunks of {n_ctx} needs at least {}; \
         give a longer text or a smaller -c",
        2 * n_ctx
    )]
    TextTooShort { n_tokens: usize, n_ctx: usize },
    /// `convert`.
    #[error(transparent)]
    Convert(#[from] ConvertError),
    /// `calibrate` or `profile` without a model file beside which the result could lie.
    #[error("the demo model is no file: say with --out where the result goes")]
    NoOutput,
    #[error(transparent)]
    Calibrate(CalibrateError),
    /// The file that `calibrate` writes.
    #[error(transparent)]
    Predictor(#[from] PredictorError),
    /// Ctrl-C was pressed.
    #[error("interrupted")]
    Interrupted,
}

impl CliError {
    /// The program's exit status.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::NoPrompt
            | Self::OnePtFile { .. }
            | Self::NoOutput
            | Self::FlagWithoutUse { .. }
            | Self::Budgets { .. }
            | Self::NeedsBudget { .. }
            | Self::IndexForPlan
            | Self::Sampling(_) => 2,
            Self::Interrupted => 130,
            _ => 1,
        }
    }

    /// Whether the reader of standard output went away, as `head` does; that is no failure.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Stdout(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}
