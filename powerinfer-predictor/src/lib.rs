//! Who will fire: files of activation predictors, activation statistics, and how good a prediction is.
//!
//! A model whose FFN ends in a ReLU computes most neurons for nothing, since they come out as zero. A
//! predictor guesses from the layer's input which ones will not. For each layer it is a small net of two
//! matrices,
//!
//! ```text
//! score = fc2 · relu(fc1 · h)        fc1 [rank, n_embd], fc2 [n_ff, rank], score [n_ff]
//! ```
//!
//! and a neuron is computed unless its score is below a threshold. This crate holds what belongs to that net
//! and needs no model:
//!
//! - [`PredictorFile`] reads and writes `predictor/model.safetensors` with its `config.json`;
//! - [`CalibrationFile`] reads and writes 2-bit copies of gates with calibrated thresholds, which predict without
//!   any training;
//! - [`ActivationCounts`] reads and writes how often each neuron fired on some text, which says which neurons are hot;
//!   with the feature `pt` also as files of PyTorch, in which the original PowerInfer has them;
//! - [`QualityByLayer`] measures predictions against the truth, and [`Quality`] prints the four figures
//!   together: a recall says nothing without the share of neurons that it was bought with;
//! - [`WeightFile`] reads matrices of other safetensors files by name, under the same checks.
//!
//! What it deliberately does not do: it scores nothing (an operator of powerinfer-sparse-ops, which the
//! backends implement), runs no model (powerinfer-core) and trains nothing yet.
//!
//! # Files are not believed
//!
//! Every size is checked against the bytes that are there before memory is asked for, every tensor must have
//! a place, every layer must be there, shapes must fit each other, and no weight may be NaN or infinite. What
//! is wrong comes back as a [`PredictorError`] that names the tensor.
//! Layers are found by number, never by the order of names, in which layer 10 comes before layer 2.
//!
//! # Example
//!
//! ```
//! use powerinfer_predictor::{FloatType, PredictorFile, PredictorLayer, QualityByLayer};
//! use powerinfer_sparse_ops::LayerId;
//!
//! // A predictor for a model of one layer with n_embd = 2 and n_ff = 3, of rank 1.
//! let layer = PredictorLayer::new(1, vec![1.0, -1.0], vec![2.0, 0.5, -3.0])?;
//! let file = PredictorFile::new(vec![layer], Some(1.0))?;
//!
//! // As bytes of a safetensors file, and back.
//! let bytes = file.to_bytes(FloatType::F16)?;
//! let again = PredictorFile::from_bytes(&bytes, None)?;
//! let layer = again.layer(LayerId(0)).expect("the file has one layer");
//! assert_eq!((layer.rank(), layer.n_embd(), layer.n_ff()), (1, 2, 3));
//!
//! // Scores of one token, worked out by hand for h = [3, 1], and what the neurons then really gave.
//! let scores = [4.0, 1.0, -6.0];
//! let truth = [0.7, 0.0, 0.0];
//! let mut quality = QualityByLayer::new(1);
//! quality.add(LayerId(0), &scores, 1.0, &truth);
//! assert_eq!(
//!     quality.overall().expect("one token was added").to_string(),
//!     "recall 1.000, precision 0.500, active 33.3 %, predicted 66.7 %"
//! );
//! # Ok::<(), powerinfer_predictor::PredictorError>(())
//! ```
//!
//! Read next: [`PredictorFile`], then `PredictorWeights` of powerinfer-sparse-ops, the form in which a
//! backend takes a predictor.
#![forbid(unsafe_code)]

mod calibration;
mod counts;
mod error;
mod file;
#[cfg(feature = "pt")]
mod pt;
mod quality;
mod weights;

pub use calibration::{CalibrationFile, CalibrationLayer, LayerFigures, RecallFigures, UseReason};
pub use counts::{ActivationCounts, ShareHistogram};
pub use error::PredictorError;
pub use file::{PredictorFile, PredictorLayer};
#[cfg(feature = "pt")]
pub use pt::PtError;
pub use quality::{Quality, QualityByLayer, QualityCounter};
pub use safetensors::SafeTensorError;
pub use weights::{FloatType, Matrix, WeightFile};
