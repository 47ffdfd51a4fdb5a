//! The flags as they are typed. What they mean is in [`crate::options`].

use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use powerinfer_core::placement::Budget;
use powerinfer_core::tokenizer::PreTokenizer;
use powerinfer_sparse_ops::WeightType;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Runs language models whose FFN neurons mostly stay silent, and reads only those that fire.
///
/// `powerinfer generate` works at once: without -m a small story model that is part of the program is used.
/// Results go to standard output, everything else to standard error.
#[derive(Debug, Parser)]
#[command(name = "powerinfer", version, styles = STYLES, max_term_width = 100)]
#[command(after_help = "Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Generate(GenerateArgs),
    Inspect(InspectArgs),
    Tokenize(TokenizeArgs),
    Logits(LogitsArgs),
    Perplexity(PerplexityArgs),
    Bench(BenchArgs),
    Calibrate(CalibrateArgs),
    Evaluate(EvaluateArgs),
    Convert(ConvertArgs),
    Quantize(QuantizeArgs),
    Profile(ProfileArgs),
    Plan(PlanArgs),
}

/// Which neurons of the FFN are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// Every neuron.
    Dense,
    /// The gate of every neuron; the rest of those that fire. Same text as dense.
    Exact,
    /// The neurons that the predictors of the file name.
    Predictor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationName {
    Relu,
    Silu,
    Gelu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StatisticsFormat {
    /// One file, with all that was counted
    Safetensors,
    /// A folder with activation_N.pt for each layer N, as PowerInfer's own tools read it
    Pt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceName {
    /// The CPU, with threads and its vector instructions.
    Cpu,
    /// Slow and simple arithmetic that the others are compared with.
    Reference,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightsIn {
    /// Memory of this process, in pages of 2 MiB where the system has them
    HugePages,
    /// Memory of this process, in pages of the usual size
    SmallPages,
    /// MODEL.weights-cache beside the model: written at the first start, mapped and shared by later ones
    CacheFile,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LevelName {
    Scalar,
    Avx2,
    Avx512,
    Neon,
}

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvTypeName {
    F16,
    F32,
    /// A little over half the bytes of f16; for heads of a multiple of 32 values.
    #[value(name = "q8_0")]
    Q8_0,
}

/// Which gates get an 8-bit copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CertifiedName {
    /// F16 and BF16 gates that are wide enough, of layers without a predictor, with AVX-512
    Auto,
    /// All gates of F16, BF16 and F32
    On,
    Off,
}

/// The model and how it is loaded; the same for every command that runs one.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Model file, GGUF or PWRI; the first one of a set. Without it the embedded demo model is used
    #[arg(short, long, value_name = "FILE")]
    pub(crate) model: Option<PathBuf>,
    /// FFN activation, overriding what the file says
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) activation: Option<ActivationName>,
    /// Pre-tokenizer, overriding what the file says
    #[arg(long, value_name = "NAME", value_parser = pre_tokenizer)]
    pub(crate) pre: Option<PreTokenizer>,
    /// A neuron is active from this predictor score on, overriding what the file says
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) sparse_threshold: Option<f32>,
    /// Compute layers of a sparse file that have no predictor exactly, instead of refusing the file
    #[arg(long)]
    pub(crate) allow_missing_predictors: bool,
    /// File that `calibrate` wrote, whose gate copies take the place of the file's predictors; the one beside a model
    /// without predictors is used unless told otherwise
    #[arg(long, value_name = "FILE")]
    pub(crate) calibration: Option<PathBuf>,
    /// Leave a calibration beside the model aside
    #[arg(long, conflicts_with = "calibration")]
    pub(crate) no_calibration: bool,
    /// Share of the neurons that fire which a calibration is to find, as in 0.98; 0.99 unless it was made otherwise
    #[arg(long, value_name = "X", value_parser = share)]
    pub(crate) recall: Option<f32>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) placement: PlacementArgs,
}

/// How much of a GPU is used, and for what.
#[derive(Debug, Args)]
#[command(next_help_heading = "Placement")]
pub(crate) struct PlacementArgs {
    /// Memory of the GPU that may be used: auto for what is free less a reserve, or a size as in 8GiB, 500MiB, 1000B;
    /// a plain number is GiB; 0 is the CPU alone, as without this flag. Of several GPUs each may use as much, or as a
    /// list says, such as 8GiB,6GiB
    #[arg(long, value_name = "SIZE", value_parser = budget, value_delimiter = ',')]
    pub(crate) vram_budget: Vec<Budget>,
    /// File that says how often each neuron fires, by which the hottest go to the GPU, or a folder of PyTorch's
    /// activation_N.pt; MODEL.statistics.safetensors beside the model is used if it is there
    #[arg(long, value_name = "FILE")]
    pub(crate) statistics: Option<PathBuf>,
    /// Share of the tokens for which the neurons of layers fire that the statistics lack; without it they are an error
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) statistics_fallback: Option<f32>,
    /// Take the neurons of this index file (.gpuidx) for the GPU, as PowerInfer writes it, instead of planning
    #[arg(long, value_name = "FILE", conflicts_with_all = ["statistics", "reset_gpu_index"])]
    pub(crate) gpu_index: Option<PathBuf>,
    /// Plan anew even if MODEL.plan.json, which keeps the last plan, or MODEL.generated.gpuidx lies beside the model
    #[arg(long)]
    pub(crate) reset_gpu_index: bool,
    /// Leave all neurons to the CPU; the GPU gets attention and head alone
    #[arg(long, conflicts_with_all = ["statistics", "gpu_index", "reset_gpu_index"])]
    pub(crate) disable_gpu_index: bool,
}

/// Shows which parts of a model would go where.
///
/// Nothing is loaded and no GPU need be there: --machine describes one. With --machine this, the machine is measured with
/// the first layers of the model, and with a GPU the plan is kept beside the model for the other commands. The speed is
/// predicted from bytes and bandwidths; it is no measurement.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  powerinfer plan -m model.gguf --machine rtx4090+ddr5 --vram-budget 8GiB
  powerinfer plan -m model.gguf --machine rtx2080ti+ddr4 --vram-budget auto --svg plan.svg
  powerinfer plan -m model.gguf --machine this
  powerinfer plan --simulate")]
pub(crate) struct PlanArgs {
    /// Parts of the machine, joined by +: rtx4090, rtx2080ti; ddr5, ddr4. Or `this` alone
    #[arg(long, value_name = "NAME", default_value = "rtx4090+ddr5")]
    pub(crate) machine: String,
    /// Context length in tokens; the model's own, at most 4096, unless given
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ctx_size: Option<u32>,
    /// Which neurons are computed; the best the file allows unless given
    #[arg(long, value_enum, value_name = "MODE")]
    pub(crate) mode: Option<Mode>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw the plan into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Write the neurons of the first device as an index file that PowerInfer reads
    #[arg(long, value_name = "FILE")]
    pub(crate) write_gpu_index: Option<PathBuf>,
    /// Predict speeds of published models on published machines instead, beside the published figures
    #[arg(long, conflicts_with_all = ["machine", "model", "json", "svg", "write_gpu_index", "vram_budget"])]
    pub(crate) simulate: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

fn budget(text: &str) -> Result<Budget, String> {
    if text == "auto" {
        return Ok(Budget::Auto);
    }
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let factor: u64 = match unit.trim() {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" | "" => 1 << 30,
        _ => return Err("expected auto, or a number with B, KiB, MiB or GiB".to_owned()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).map(Budget::Bytes).ok_or_else(|| "more than 2^64 bytes".to_owned());
    }
    match number.parse::<f64>() {
        Ok(part) if factor > 1 => Ok(Budget::Bytes((part * factor as f64) as u64)),
        _ => Err("expected auto, or a number with B, KiB, MiB or GiB".to_owned()),
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// What computes
    #[arg(long, value_enum, value_name = "NAME", default_value_t = DeviceName::Cpu)]
    pub(crate) device: DeviceName,
    /// Threads that compute; one for each physical core unless given
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
    /// Instruction set; the best of this CPU unless given
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) cpu_level: Option<LevelName>,
    /// Where weights live; huge-pages unless given
    #[arg(long, value_enum, value_name = "HOME")]
    pub(crate) weights_in: Option<WeightsIn>,
    /// How keys and values of the context are kept; f16 unless given
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) kv_type: Option<KvTypeName>,
    /// Whether 8-bit copies of F16 and BF16 gates, half their size, show which rows need not be read in mode exact;
    /// results are the same; auto unless given
    #[arg(long, value_enum, value_name = "WHEN")]
    pub(crate) certified: Option<CertifiedName>,
}

/// Continues a prompt.
///
/// The text appears as it is made. Ctrl-C ends the generation in an orderly way, a second one at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  powerinfer generate
  powerinfer generate -m model.gguf -p \"The sea\" -n 64 --temp 0
  powerinfer generate -m chat.gguf --chat -p \"Name three rivers.\"")]
#[command(group = ArgGroup::new("text").multiple(false))]
pub(crate) struct GenerateArgs {
    /// Text to continue; a story's beginning for the demo model
    #[arg(short, long, value_name = "TEXT", group = "text")]
    pub(crate) prompt: Option<String>,
    /// File with the text to continue; - is standard input
    #[arg(short, long, value_name = "FILE", group = "text")]
    pub(crate) file: Option<PathBuf>,
    /// Tokens to generate at most; -1, the default, is until the text or the context ends
    #[arg(short, long, value_name = "N", default_value_t = -1, hide_default_value = true,
        allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    pub(crate) n_predict: i64,
    /// Context length in tokens; the model's own, at most 4096, unless given
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ctx_size: Option<u32>,
    /// Which neurons are computed; the best the file allows unless given
    #[arg(long, value_enum, value_name = "MODE")]
    pub(crate) mode: Option<Mode>,
    /// Put the prompt into the chat template of the file, and print the answer alone
    #[arg(long)]
    pub(crate) chat: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub(crate) system: Option<String>,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) stop: Vec<String>,
    /// Go on after end-of-text tokens
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Print the generated text alone, without the prompt
    #[arg(long)]
    pub(crate) no_display_prompt: bool,
    /// Print no summary; warnings and errors still appear
    #[arg(short, long)]
    pub(crate) quiet: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Divisor of the logits; 0 always takes the most probable token
    #[arg(long, value_name = "X", default_value_t = 0.8, allow_negative_numbers = true)]
    pub(crate) temp: f32,
    /// Keep this many most probable tokens; 0 is off
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub(crate) top_k: usize,
    /// Keep the most probable tokens that hold this share of the probability; 1 is off
    #[arg(long, value_name = "X", default_value_t = 0.95, allow_negative_numbers = true)]
    pub(crate) top_p: f32,
    /// Drop tokens less probable than this share of the most probable one; 0 is off
    #[arg(long, value_name = "X", default_value_t = 0.05, allow_negative_numbers = true)]
    pub(crate) min_p: f32,
    /// Keep tokens of typical surprise that hold this share of the probability; 1 is off
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) typical: f32,
    /// Divide positive logits of recent tokens by this; 1 is off
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) repeat_penalty: f32,
    /// Tokens that count as recent
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) repeat_last_n: usize,
    /// Subtract this from the logit of a recent token for each time it appeared
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f32,
    /// Subtract this once from the logit of a recent token
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f32,
    /// Mirostat version in place of top-k, top-p, min-p and typical; 0 is off
    #[arg(long, value_name = "0|1|2", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    pub(crate) mirostat: u8,
    /// Share of its error that mirostat corrects per token
    #[arg(long, value_name = "X", default_value_t = 0.1, allow_negative_numbers = true)]
    pub(crate) mirostat_lr: f32,
    /// Surprise that mirostat aims at, in bits per token
    #[arg(long, value_name = "X", default_value_t = 5.0, allow_negative_numbers = true)]
    pub(crate) mirostat_ent: f32,
    /// Seed of the random numbers; a random one unless given
    #[arg(short, long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Add B to the logit of a token, as in 42+1.5 or 42-inf; may be given several times
    #[arg(long, value_name = "ID+-B", value_parser = logit_bias)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
}

/// Shows what a file holds and whether this program can run it.
///
/// The verdict loads the model as `generate` does. A file with a sound header is described even when it cannot be
/// run; then the verdict says why, and the exit status is 0 all the same.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// GGUF or PWRI file; the first one of a set
    #[arg(value_name = "FILE")]
    pub(crate) path: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// List every tensor
    #[arg(long)]
    pub(crate) tensors: bool,
}

/// Turns text into token ids.
///
/// Only the vocabulary of the file is read; its architecture and weights may be unknown to this program.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("text").required(true).multiple(false))]
pub(crate) struct TokenizeArgs {
    /// Model file; without it the embedded demo model is used
    #[arg(short, long, value_name = "FILE")]
    pub(crate) model: Option<PathBuf>,
    /// The text
    #[arg(short, long, value_name = "TEXT", group = "text")]
    pub(crate) prompt: Option<String>,
    /// JSON file with an array of texts
    #[arg(long, value_name = "IN.json", group = "text")]
    pub(crate) file: Option<PathBuf>,
    /// Print JSON: the ids for -p, an array of id arrays for --file
    #[arg(long)]
    pub(crate) json: bool,
    /// Recognize control tokens that are written out in the text
    #[arg(long)]
    pub(crate) parse_special: bool,
    /// Add no beginning-of-text or end-of-text token, whatever the file says
    #[arg(long)]
    pub(crate) no_bos: bool,
    /// Pre-tokenizer, overriding what the file says
    #[arg(long, value_name = "NAME", value_parser = pre_tokenizer)]
    pub(crate) pre: Option<PreTokenizer>,
}

/// Writes the logits after each of the given tokens to a JSON file.
///
/// The file is {"model": text, "tokens": [ids], "mode": text, "n_vocab": N, "logits": [[N numbers] for each token]}
/// and appears complete or not at all. Numbers read back as 32-bit floats give the same bits.
#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    /// Token ids, separated by commas
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', required = true)]
    pub(crate) tokens: Vec<u32>,
    /// File to write
    #[arg(long, value_name = "FILE.json")]
    pub(crate) out: PathBuf,
    /// Which neurons are computed; the best the file allows unless given
    #[arg(long, value_enum, value_name = "MODE")]
    pub(crate) mode: Option<Mode>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

/// Measures how well a model predicts a text.
///
/// As llama.cpp defines it: the text is cut into chunks of the context length, each begins anew, and the second half
/// of each is scored. The text must have at least two chunks. With several modes they are shown side by side, on the
/// same chunks.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  powerinfer perplexity -m model.gguf -f text.txt -c 256 --mode dense --mode predictor")]
pub(crate) struct PerplexityArgs {
    /// File with the text; - is standard input
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Chunk length in tokens
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..))]
    pub(crate) ctx_size: u32,
    /// Score this many chunks at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) chunks: Option<u32>,
    /// Which neurons are computed; may be given several times
    #[arg(long, value_enum, value_name = "MODE", value_delimiter = ',')]
    pub(crate) mode: Vec<Mode>,
    /// Print JSON: an array with an object for each mode
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

/// Measures the speed of a model on this machine.
///
/// Each repeat reads a prompt of random tokens and then decodes greedily; a first one warms up and is not counted.
/// The bytes that decoding read are compared with what the same number of threads can read from memory on huge pages.
/// A model that fits in a cache of the CPU can be faster than memory, and its share above 100 %. The time to the first
/// token is that from the start of loading to the end of the first prompt; the peak memory counts mapped pages of the
/// file.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Tokens of the prompt
    #[arg(short = 'p', long, value_name = "N", default_value_t = 512,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) n_prompt: u32,
    /// Tokens to decode after it
    #[arg(short, long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) n_gen: u32,
    /// Measurements
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeats: u32,
    /// Which neurons are computed; may be given several times
    #[arg(long, value_enum, value_name = "MODE", value_delimiter = ',')]
    pub(crate) mode: Vec<Mode>,
    /// Do not measure how fast memory is read, which takes up to 1 GiB for a few seconds
    #[arg(long)]
    pub(crate) no_stream: bool,
    /// Print JSON: an object, or with several modes an array of them
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

/// Makes 2-bit copies of a ReLU model's gates that tell which neurons will fire.
///
/// The model is run over the text, and for each neuron a threshold is set such that the share --recall of those that
/// fire is found, judged on a part of the text that nothing was fitted on. A copy is used in the layers that decode
/// faster with it on this machine. The result is a file beside the model, which every command then uses in mode
/// predictor. What is not found is left out: the text may differ from that of mode exact.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  powerinfer calibrate -m dense.gguf --text books.txt chats.txt
  powerinfer generate -m dense.gguf -p \"The sea\"")]
pub(crate) struct CalibrateArgs {
    /// Text like that which the model is to work on; several files are used alike
    #[arg(long, value_name = "FILE", num_args = 1.., required = true,
        conflicts_with_all = ["calibration", "no_calibration"])]
    pub(crate) text: Vec<PathBuf>,
    /// Tokens of the text that are used at most
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(64..))]
    pub(crate) tokens: u32,
    /// File to write; MODEL.calibration.safetensors, beside the model, unless given
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Use the copies of all layers, whether they save time here or not
    #[arg(long)]
    pub(crate) all_layers: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

/// Counts how often each neuron of a ReLU model fires.
///
/// The model runs over text in mode exact. The result is a file beside the model, by which `plan` and --vram-budget send
/// the hottest neurons to the GPU. As files of PyTorch, one for each layer, PowerInfer's own tools read it too; these hold
/// the counts alone, without the number of tokens.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  powerinfer profile -m model.gguf
  powerinfer profile -m model.gguf --text books.txt --merge earlier.safetensors
  powerinfer profile -m model.gguf --format pt --out activation/")]
pub(crate) struct ProfileArgs {
    /// Text like that which the model is to work on; a text that is part of the program unless given
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) text: Vec<PathBuf>,
    /// Tokens of the text that are used at most
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tokens: u32,
    /// Statistics that are added to the new ones: files, or folders of PyTorch's activation_N.pt
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) merge: Vec<PathBuf>,
    /// File to write, or folder for the format pt; MODEL.statistics.safetensors or the folder activation, beside the
    /// model, unless given
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// What is written; pt if --out is a folder, and else safetensors, unless given
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<StatisticsFormat>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

/// Measures how well the predictors of a model name the neurons that fire.
///
/// The model runs over the text in mode predictor, in sequences of 256 tokens, and what its predictors named is compared
/// with what fires by the model's own weights. The mass is what a neuron adds to the result of its layer. "By signs" is what
/// sign bits alone, the baseline of the literature, would have to select for the same recall.
#[derive(Debug, Args)]
pub(crate) struct EvaluateArgs {
    /// Text to measure on; several files are used alike
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) text: Vec<PathBuf>,
    /// Tokens of the text that are used at most
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(64..))]
    pub(crate) tokens: u32,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

/// Joins a dense ReLU model and its predictors to one file that reads less.
///
/// The output is a PWRI file: down projections lie row by row, so that skipping a neuron skips its bytes, and each
/// layer has its predictor. Quantized down projections must be rounded again, which costs some accuracy; how much is
/// printed. --down-from makes them from unquantized weights instead.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  powerinfer convert --model dense.gguf --predictor predictor/ --out sparse.gguf")]
pub(crate) struct ConvertArgs {
    /// Dense GGUF file; the first one of a set
    #[arg(short, long, value_name = "FILE")]
    pub(crate) model: PathBuf,
    /// Folder with the predictors, or their model.safetensors
    #[arg(long, value_name = "DIR")]
    pub(crate) predictor: PathBuf,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Replace the output if it is there already
    #[arg(long)]
    pub(crate) force: bool,
    /// Type of every matrix; as they are unless given
    #[arg(long = "type", value_name = "TYPE", value_parser = weight_type)]
    pub(crate) matrix_type: Option<WeightType>,
    /// Type of the down projections; as the other matrices unless given
    #[arg(long, value_name = "TYPE", value_parser = weight_type)]
    pub(crate) down_type: Option<WeightType>,
    /// Type of the predictors; as the other matrices if --type is given, F16 otherwise
    #[arg(long, value_name = "TYPE", value_parser = weight_type)]
    pub(crate) predictor_type: Option<WeightType>,
    /// Safetensors file with the unquantized down projections
    #[arg(long, value_name = "FILE")]
    pub(crate) down_from: Option<PathBuf>,
    /// FFN activation, overriding what the file says
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) activation: Option<ActivationName>,
    /// A neuron is active from this predictor score on, overriding what the predictors come with
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) sparse_threshold: Option<f32>,
}

/// Writes a copy of a model whose matrices are encoded in one type.
///
/// Embedding, output head and predictors are matrices too; norms and biases stay as they are. What the rounding cost
/// is printed for each kind of matrix. A matrix that has the type already is copied, and one whose rows are no whole
/// number of blocks stays as it is, with a note.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  powerinfer quantize -m sparse-f16.gguf -o sparse-q4_0.gguf --type q4_0")]
pub(crate) struct QuantizeArgs {
    /// GGUF or PWRI file; the first one of a set
    #[arg(short, long, value_name = "FILE")]
    pub(crate) model: PathBuf,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Type of the matrices: f32, f16, bf16, q8_0 or q4_0
    #[arg(long = "type", value_name = "TYPE", value_parser = weight_type)]
    pub(crate) matrix_type: WeightType,
    /// Replace the output if it is there already
    #[arg(long)]
    pub(crate) force: bool,
}

fn weight_type(name: &str) -> Result<WeightType, String> {
    WeightType::ALL.into_iter().find(|ty| ty.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        format!("not a weight type; known: {}", WeightType::ALL.map(WeightType::name).join(", "))
    })
}

fn finite(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value.is_finite() => Ok(value),
        _ => Err("expected a finite number".to_owned()),
    }
}

/// A number between 0 and 1, neither of them.
fn share(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value > 0.0 && value < 1.0 => Ok(value),
        _ => Err("expected a number between 0 and 1, as in 0.99".to_owned()),
    }
}

fn pre_tokenizer(name: &str) -> Result<PreTokenizer, String> {
    PreTokenizer::from_name(name)
        .ok_or_else(|| format!("not known; known: {}", PreTokenizer::names().collect::<Vec<_>>().join(", ")))
}

/// `ID+B` or `ID-B`; `B` may be `inf` after a minus.
fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let expected = || "expected a token id, + or -, and a number, as in 42+1.5 or 42-inf".to_owned();
    let at = text.find(['+', '-']).ok_or_else(expected)?;
    let (id, bias) = text.split_at(at);
    // A second sign would parse as part of the number.
    if bias[1..].starts_with(['+', '-']) {
        return Err(expected());
    }
    let id = id.trim().parse().map_err(|_| expected())?;
    let bias: f32 = bias.parse().map_err(|_| expected())?;
    if bias.is_nan() || bias == f32::INFINITY {
        return Err("the bias must be finite, or -inf to forbid the token".to_owned());
    }
    Ok((id, bias))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_flags_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_bias_is_an_id_a_sign_and_a_number() {
        assert_eq!(logit_bias("15+1.5"), Ok((15, 1.5)));
        assert_eq!(logit_bias("15-2"), Ok((15, -2.0)));
        assert_eq!(logit_bias("0-1e-3"), Ok((0, -1e-3)));
        assert_eq!(logit_bias("7-inf"), Ok((7, f32::NEG_INFINITY)));
        for bad in ["", "15", "+1", "-1", "15+", "15+-2", "15--2", "15+x", "15+inf", "15+nan", "1.5+2", "é+1"]
        {
            assert!(logit_bias(bad).is_err(), "{bad}");
        }
    }
}
