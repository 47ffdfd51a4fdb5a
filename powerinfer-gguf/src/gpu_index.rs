//! PowerInfer's index files (`.gpuidx`): which neurons of each layer belong on the accelerator.

use powerinfer_sparse_ops::{LayerId, NeuronId, NeuronSet};

use crate::error::GgufError;
use crate::file::{GgufFile, Magic};
use crate::tensor::Tensor;
use crate::writer::{GgufWriter, WriteError};
use crate::{GgmlType, Value};

const ARCHITECTURE: &str = "generic.gpu_index";
const COUNT_KEY: &str = "generic.gpu_index.block_count";
const CAPACITY_KEY: &str = "split.vram_capacity";

/// An index file that contradicts itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuIndexError {
    /// A key or tensor is not what it should be.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file is something else, for example a model.
    #[error("not a neuron index: `general.architecture` is `{found}`, expected `{ARCHITECTURE}`")]
    Architecture {
        /// The architecture in the file.
        found: String,
    },
    /// Not two tensors for each layer.
    #[error("the index of {n_layer} layers has {n_tensors} tensors, expected {expected}")]
    TensorCount {
        /// Number of layers, from the key.
        n_layer: u32,
        /// Number of tensors.
        n_tensors: usize,
        /// Number of tensors that fit the layers.
        expected: u64,
    },
    /// A tensor of a layer is absent.
    #[error("layer {layer}: tensor `blk.{layer}.{part}` is missing")]
    TensorMissing {
        /// The layer.
        layer: LayerId,
        /// `gpu_idx` or `gpu_bucket`.
        part: &'static str,
    },
    /// A tensor that is no plain list.
    #[error("layer {layer}: `{part}` should have one dimension, has {n_dims}")]
    NotAList {
        /// The layer.
        layer: LayerId,
        /// `gpu_idx` or `gpu_bucket`.
        part: &'static str,
        /// Number of dimensions.
        n_dims: usize,
    },
    /// A flag that is neither 0 nor 1.
    #[error("layer {layer}: `gpu_idx` of neuron {neuron} is {value}, allowed are 0 and 1")]
    Flag {
        /// The layer.
        layer: LayerId,
        /// The neuron.
        neuron: usize,
        /// Its flag.
        value: i32,
    },
    /// A neuron that the layer does not have.
    #[error("layer {layer}: `gpu_bucket` has the neuron {neuron} at place {place}, the layer has {n_ff}")]
    OutOfRange {
        /// The layer.
        layer: LayerId,
        /// Place in the bucket.
        place: usize,
        /// The neuron.
        neuron: i32,
        /// Number of neurons of the layer.
        n_ff: usize,
    },
    /// A bucket that does not ascend: a neuron is repeated or out of order.
    #[error(
        "layer {layer}: `gpu_bucket` has {neuron} at place {place} after {previous}, expected ascending ids"
    )]
    NotAscending {
        /// The layer.
        layer: LayerId,
        /// Place in the bucket.
        place: usize,
        /// The neuron.
        neuron: i32,
        /// The one before.
        previous: i32,
    },
    /// Flags and bucket name different neurons.
    #[error("layer {layer}: `gpu_idx` and `gpu_bucket` disagree about neuron {neuron}")]
    Disagree {
        /// The layer.
        layer: LayerId,
        /// The first neuron that only one of the two names.
        neuron: usize,
    },
}

/// The content of an index file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuIndex {
    /// The memory budget that the index was made for, in bytes; not what its neurons need.
    pub vram_capacity_bytes: u64,
    /// The neurons on the accelerator, a set for each layer.
    pub layers: Vec<NeuronSet>,
}

impl GpuIndex {
    /// Reads and checks an index file.
    ///
    /// Whether its layers and neurons are those of a certain model is for the caller to compare.
    ///
    /// # Errors
    /// [`GpuIndexError`], naming the layer and the rule that is broken.
    pub fn parse(file: &GgufFile) -> Result<Self, GpuIndexError> {
        let keys = file.metadata();
        let found: &str = keys.require("general.architecture")?;
        if found != ARCHITECTURE {
            return Err(GpuIndexError::Architecture { found: found.chars().take(64).collect() });
        }
        let n_layer: u32 = keys.require(COUNT_KEY)?;
        let (n_tensors, expected) = (file.n_tensors(), u64::from(n_layer).saturating_mul(2));
        if n_tensors as u64 != expected {
            return Err(GpuIndexError::TensorCount { n_layer, n_tensors, expected });
        }
        let vram_capacity_bytes = keys.require(CAPACITY_KEY)?;
        let layers = (0..n_layer).map(|layer| read_layer(file, LayerId(layer))).collect::<Result<_, _>>()?;
        Ok(Self { vram_capacity_bytes, layers })
    }

    /// A writer that holds the index as PowerInfer lays it out.
    ///
    /// # Errors
    /// [`WriteError::BadShape`] if a layer has no neurons at all.
    pub fn to_writer(&self) -> Result<GgufWriter<'static>, WriteError> {
        let mut writer = GgufWriter::new(Magic::Pwri);
        let n_layer = u32::try_from(self.layers.len()).expect("layers are counted with 32 bits");
        writer.key("general.architecture", ARCHITECTURE)?;
        writer.key(COUNT_KEY, n_layer)?;
        writer.key(CAPACITY_KEY, Value::U64(self.vram_capacity_bytes))?;
        for (layer, set) in (0..n_layer).zip(&self.layers) {
            let flags = (0..set.n_ff()).map(|neuron| neuron_id(neuron).is_some_and(|id| set.contains(id)));
            let flags = flags.flat_map(|on| i32::from(on).to_le_bytes()).collect::<Vec<u8>>();
            let ids = set.ids().iter().flat_map(|id| id.0.to_le_bytes()).collect::<Vec<u8>>();
            writer.tensor(&tensor_name(LayerId(layer), FLAGS), &[set.n_ff()], GgmlType::I32, flags)?;
            writer.tensor(&tensor_name(LayerId(layer), BUCKET), &[set.len()], GgmlType::I32, ids)?;
        }
        Ok(writer)
    }
}

const FLAGS: &str = "gpu_idx";
const BUCKET: &str = "gpu_bucket";

fn tensor_name(layer: LayerId, part: &str) -> String {
    format!("blk.{layer}.{part}")
}

fn neuron_id(neuron: usize) -> Option<NeuronId> {
    u32::try_from(neuron).ok().map(NeuronId)
}

fn read_layer(file: &GgufFile, layer: LayerId) -> Result<NeuronSet, GpuIndexError> {
    let flags = list(file, layer, FLAGS)?.i32_values()?;
    let bucket = list(file, layer, BUCKET)?.i32_values()?;
    let n_ff = flags.len();
    if let Some((neuron, &value)) = flags.iter().enumerate().find(|(_, value)| !matches!(value, 0 | 1)) {
        return Err(GpuIndexError::Flag { layer, neuron, value });
    }
    let mut ids = Vec::with_capacity(bucket.len());
    let mut previous = -1;
    for (place, &neuron) in bucket.iter().enumerate() {
        let id = u32::try_from(neuron).ok().map(NeuronId).filter(|id| id.index() < n_ff);
        let id = id.ok_or(GpuIndexError::OutOfRange { layer, place, neuron, n_ff })?;
        if neuron <= previous {
            return Err(GpuIndexError::NotAscending { layer, place, neuron, previous });
        }
        previous = neuron;
        ids.push(id);
    }
    let set = NeuronSet::from_ids(n_ff, ids);
    let disagrees = |&(neuron, &flag): &(usize, &i32)| {
        neuron_id(neuron).is_some_and(|id| set.contains(id)) != (flag == 1)
    };
    match flags.iter().enumerate().find(disagrees) {
        Some((neuron, _)) => Err(GpuIndexError::Disagree { layer, neuron }),
        None => Ok(set),
    }
}

fn list<'a>(file: &'a GgufFile, layer: LayerId, part: &'static str) -> Result<Tensor<'a>, GpuIndexError> {
    let missing = GpuIndexError::TensorMissing { layer, part };
    let tensor = file.tensor(&tensor_name(layer, part)).ok_or(missing)?;
    match tensor.dims().len() {
        1 => Ok(tensor),
        n_dims => Err(GpuIndexError::NotAList { layer, part, n_dims }),
    }
}
