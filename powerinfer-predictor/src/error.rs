//! What can be wrong with the files of this crate.

use std::io;
use std::path::PathBuf;

use powerinfer_sparse_ops::{GateCopyError, LayerId};
use safetensors::SafeTensorError;

/// Why a file of predictors, statistics or weights is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PredictorError {
    /// A file cannot be read.
    #[error("cannot read `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file cannot be written. The place where it should be is as it was before.
    #[error("cannot write `{}`", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Anything below, found in this file.
    #[error("in `{}`", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<Self>,
    },
    /// The bytes are no safetensors file, or its header and its size disagree.
    #[error("not a whole safetensors file")]
    Format(#[from] SafeTensorError),
    /// A name that has no meaning here, such as a bias, or a layer number with leading zeros.
    #[error("tensor `{tensor}` is unexpected; expected names are {expected}")]
    UnexpectedTensor {
        /// The name, shortened.
        tensor: String,
        /// The names that have a meaning.
        expected: &'static str,
    },
    /// A file without layers.
    #[error("no layers: there is no tensor `{expected}`")]
    NoLayers {
        /// The first tensor that should be there.
        expected: String,
    },
    /// A tensor that should be there.
    #[error("tensor `{tensor}` is missing")]
    MissingTensor {
        /// Its name.
        tensor: String,
    },
    /// A layer between others without tensors.
    #[error("layer {layer} is missing, though there are {n_found} layers up to layer {last}")]
    MissingLayer {
        /// The layer.
        layer: LayerId,
        /// Layers in the file.
        n_found: usize,
        /// The highest of them.
        last: LayerId,
    },
    /// A layer that two files are for.
    #[error("layer {layer} comes twice")]
    RepeatedLayer {
        /// The layer.
        layer: LayerId,
    },
    /// Something in a file of PyTorch.
    #[cfg(feature = "pt")]
    #[error(transparent)]
    Pt(#[from] crate::pt::PtError),
    /// A folder or a file of PyTorch, where those cannot be read.
    #[error("files of PyTorch are not read: this program was built without the feature `pt`")]
    NoPt,
    /// A tensor of numbers that cannot be used.
    #[error("tensor `{tensor}` is {got}, expected {expected}")]
    Type {
        /// Its name.
        tensor: String,
        /// Types that can be used.
        expected: &'static str,
        /// Its type.
        got: String,
    },
    /// A tensor of the wrong shape.
    #[error("tensor `{tensor}` has the shape {got:?}, expected {expected}")]
    Shape {
        /// Its name.
        tensor: String,
        /// What the shape should be.
        expected: String,
        /// Its shape, rows first.
        got: Vec<usize>,
    },
    /// A weight that is NaN or infinite.
    #[error("tensor `{tensor}` holds {value} at row {row}, column {column}")]
    NotFinite {
        /// Its name.
        tensor: String,
        /// Row.
        row: usize,
        /// Column.
        column: usize,
        /// The weight.
        value: f32,
    },
    /// A weight that the type it should be written in cannot hold.
    #[error("tensor `{tensor}` holds {value} at row {row}, column {column}, beyond the range of {ty}")]
    OutOfRange {
        /// Its name.
        tensor: String,
        /// Row.
        row: usize,
        /// Column.
        column: usize,
        /// The weight.
        value: f32,
        /// The type.
        ty: &'static str,
    },
    /// A count below zero, or above the number of tokens.
    #[error("tensor `{tensor}` says that neuron {neuron} fired {count} times in {n_tokens} tokens")]
    BadCount {
        /// Its name.
        tensor: String,
        /// The neuron.
        neuron: usize,
        /// The count.
        count: i64,
        /// Number of tokens in the file.
        n_tokens: i64,
    },
    /// Statistics in a later version of their format.
    #[error("format_version of the statistics is {got}, versions up to {known} are known")]
    NewerFormat {
        /// What the file says, shortened.
        got: String,
        /// The latest that is known.
        known: u32,
    },
    /// A histogram over another number of tokens than was counted.
    #[error("tensor `{tensor}` is a histogram over {got} tokens, expected {n_tokens}")]
    Histogram {
        /// Its name.
        tensor: String,
        /// Sum of its numbers.
        got: u128,
        /// Number of tokens in the file.
        n_tokens: u64,
    },
    /// Statistics over no tokens.
    #[error("tensor `tokens` must be at least 1, got {n_tokens}")]
    NoTokens {
        /// What the file says.
        n_tokens: i64,
    },
    /// A `config.json` that is no JSON object.
    #[error("not a JSON object")]
    Json(#[source] Option<serde_json::Error>),
    /// A value of `config.json` that means another kind of net.
    #[error("key `{key}` must be {expected}, got {got}")]
    Config {
        /// The key.
        key: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is, shortened.
        got: String,
    },
    /// Something in the header of a calibration.
    #[error("`{key}` of the calibration must be {expected}, got {got}")]
    Calibration {
        /// Which part of the header.
        key: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is, shortened.
        got: String,
    },
    /// A layer of a calibration whose parts do not make a gate copy.
    #[error("the gate copy of layer {layer}")]
    GateCopy {
        /// The layer.
        layer: LayerId,
        /// What is wrong.
        source: GateCopyError,
    },
    /// A threshold that is NaN, or so high that its neuron would never be computed.
    #[error("the threshold of neuron {neuron} is {value}")]
    Thresholds {
        /// The neuron.
        neuron: usize,
        /// The threshold.
        value: f32,
    },
    /// Anything above, in this layer of a calibration.
    #[error("in layer {layer}")]
    InLayer {
        /// The layer.
        layer: LayerId,
        /// What is wrong.
        source: Box<Self>,
    },
    /// A calibration that was made from another model file.
    #[error("the calibration belongs to a model with fingerprint {expected}, this one has {got}")]
    OtherModel {
        /// Fingerprint in the calibration.
        expected: String,
        /// Fingerprint of the model.
        got: String,
    },
    /// A recall that a calibration has no thresholds for.
    #[error("no thresholds for a recall of {asked}; there are some for {stored:?}")]
    Recall {
        /// The wish.
        asked: f32,
        /// What the file has.
        stored: Vec<f32>,
    },
}

impl PredictorError {
    /// Adds the file to an error about content.
    pub(crate) fn in_file(self, path: &std::path::Path) -> Self {
        match self {
            Self::Read { .. } | Self::Write { .. } | Self::InFile { .. } => self,
            other => Self::InFile { path: path.to_owned(), source: Box::new(other) },
        }
    }

    pub(crate) fn in_layer(self, layer: LayerId) -> Self {
        Self::InLayer { layer, source: Box::new(self) }
    }
}

/// The start of a text from a file, for messages.
pub(crate) fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}
