//! Plans in files, and when they still hold.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use powerinfer_sparse_ops::{NeuronId, NeuronSet};
use serde::{Deserialize, Serialize};

use super::device::Accelerator;
use super::plan::{DevicePlan, Plan};
use super::{Assignment, LayerAssignment};

/// Raised when the same request gives another plan.
const VERSION: u32 = 1;

/// More bytes than this that are free beyond those planned with make a new plan worth while.
const MORE_BYTES: u64 = 256 << 20;

/// Where the plan of a model file is kept: `model.gguf.plan.json` for `model.gguf`.
pub fn plan_path(model: &Path) -> PathBuf {
    let mut name = model.as_os_str().to_owned();
    name.push(".plan.json");
    PathBuf::from(name)
}

/// What a plan was made for, by names for people. Equal maps, equal plans.
pub(crate) type MadeFor = BTreeMap<String, String>;

/// A plan as it lies in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedPlan {
    version: u32,
    made_for: MadeFor,
    embed: usize,
    head: usize,
    homes: Vec<usize>,
    /// For each layer and backend the neurons as bits, 64 to a word, in hexadecimal.
    owned: Vec<Vec<String>>,
    n_ff: Vec<usize>,
    on_devices: Vec<DevicePlan>,
    token_seconds: f64,
    host_seconds: f64,
    gap: f64,
}

/// Why a saved plan is not used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotUsed {
    #[error("it cannot be read: {0}")]
    Read(#[from] std::io::Error),
    #[error("it is no plan: {0}")]
    Json(#[from] serde_json::Error),
    #[error("it is of format {got}, this program writes {VERSION}")]
    Version { got: u32 },
    #[error("{what} differs from what it was made for")]
    Stale { what: String },
    #[error("{device} has {usable} bytes for it now, it was made with {planned}")]
    Memory { device: String, usable: u64, planned: u64 },
    #[error("its neurons are not written as a plan writes them")]
    Neurons,
    #[error("it is for {got} devices, there are {expected}")]
    Devices { expected: usize, got: usize },
}

impl SavedPlan {
    pub(crate) fn new(plan: &Plan, made_for: MadeFor) -> Self {
        let Assignment { embed, head, layers } = &plan.assignment;
        let hex = |set: &NeuronSet| {
            set.words().iter().fold(String::new(), |mut text, word| {
                let _ = write!(text, "{word:016x}");
                text
            })
        };
        Self {
            version: VERSION,
            made_for,
            embed: *embed,
            head: *head,
            homes: layers.iter().map(|l| l.home).collect(),
            owned: layers.iter().map(|l| l.owned.iter().map(hex).collect()).collect(),
            n_ff: layers.iter().map(|l| l.owned.first().map_or(0, NeuronSet::n_ff)).collect(),
            on_devices: plan.devices.clone(),
            token_seconds: plan.token_seconds,
            host_seconds: plan.host_seconds,
            gap: plan.gap,
        }
    }

    /// The plan, with the figures it was made with, if it was made for this and still fits `devices`.
    pub(crate) fn open(path: &Path, made_for: &MadeFor, devices: &[Accelerator]) -> Result<Plan, NotUsed> {
        let saved: Self = serde_json::from_slice(&std::fs::read(path)?)?;
        if saved.version != VERSION {
            return Err(NotUsed::Version { got: saved.version });
        }
        let differs = made_for.iter().find(|(name, value)| saved.made_for.get(*name) != Some(*value));
        if let Some((what, _)) = differs {
            return Err(NotUsed::Stale { what: what.clone() });
        }
        if saved.on_devices.len() != devices.len() {
            return Err(NotUsed::Devices { expected: devices.len(), got: saved.on_devices.len() });
        }
        for (device, on) in devices.iter().zip(&saved.on_devices) {
            let usable = device.usable_bytes();
            let is_too_small = on.bytes.total() > usable;
            if is_too_small || usable > on.usable_bytes.saturating_add(MORE_BYTES) {
                let device = device.name.clone();
                return Err(NotUsed::Memory { device, usable, planned: on.usable_bytes });
            }
        }
        Ok(Plan {
            assignment: saved.assignment().ok_or(NotUsed::Neurons)?,
            devices: saved.on_devices,
            token_seconds: saved.token_seconds,
            host_seconds: saved.host_seconds,
            gap: saved.gap,
        })
    }

    fn assignment(&self) -> Option<Assignment> {
        let lengths = [self.homes.len(), self.owned.len(), self.n_ff.len()];
        if lengths != [lengths[0]; 3] {
            return None;
        }
        let layers = self.homes.iter().zip(&self.owned).zip(&self.n_ff);
        let layers = layers.map(|((&home, owned), &n_ff)| {
            let owned = owned.iter().map(|text| neurons(text, n_ff)).collect::<Option<_>>()?;
            Some(LayerAssignment { home, owned })
        });
        Some(Assignment { embed: self.embed, head: self.head, layers: layers.collect::<Option<_>>()? })
    }

    /// Writes the plan to a temporary file that then takes the name.
    pub(crate) fn write(&self, path: &Path) -> std::io::Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
        serde_json::to_writer(&mut file, self)?;
        file.flush()?;
        file.persist(path)?;
        Ok(())
    }
}

/// The set that 16 digits for 64 neurons stand for.
fn neurons(text: &str, n_ff: usize) -> Option<NeuronSet> {
    if !text.is_ascii() || text.len() != 16 * n_ff.div_ceil(64) {
        return None;
    }
    let mut ids = Vec::new();
    for (word, digits) in text.as_bytes().chunks(16).enumerate() {
        let bits = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        ids.extend((0..64).filter(|bit| bits >> bit & 1 == 1).map(|bit| 64 * word + bit));
    }
    let is_within = ids.last().is_none_or(|&id| id < n_ff);
    is_within.then(|| NeuronSet::from_ids(n_ff, ids.into_iter().map(|id| NeuronId(id as u32))))
}
