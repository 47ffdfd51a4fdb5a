//! What a plan is made for: devices, their speed and their memory.

use serde::{Deserialize, Serialize};

/// Every part of a buffer takes a multiple of this many bytes.
pub const ALLOCATION_BYTES: u64 = 256;

/// What a part of `n_bytes` takes in its buffer.
pub(crate) fn allocated(n_bytes: u64) -> u64 {
    n_bytes.checked_next_multiple_of(ALLOCATION_BYTES).unwrap_or(u64::MAX)
}

/// How much of a device may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Budget {
    /// What is free, less [`Accelerator::RESERVE_BYTES`].
    Auto,
    /// So many bytes, or what is free if that is less.
    Bytes(u64),
}

/// How fast memory is read, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Rows one after the other.
    pub dense: f64,
    /// Rows picked out by an active set.
    pub gather: f64,
}

/// The host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// For people.
    pub name: String,
    /// Memory speed.
    pub bandwidth: Bandwidth,
}

/// A device besides the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accelerator {
    /// For people.
    pub name: String,
    /// Bytes that are free on it.
    pub free_bytes: u64,
    /// How much of them may be used.
    pub budget: Budget,
    /// Memory speed.
    pub bandwidth: Bandwidth,
    /// Bytes a second between it and the host.
    pub link: f64,
    /// Seconds that a transfer of any size takes, launches and waiting included.
    pub latency: f64,
    /// Bytes of which every buffer takes a multiple: one for each layer's dense part, neurons and predictor, one for the
    /// head, for each sequence and for what steps work in.
    pub granule: u64,
    /// Bytes of a value in keys and values.
    pub kv_value_bytes: u64,
}

impl Accelerator {
    /// [`Accelerator::granule`] of CUDA, whose driver hands out memory in pages of 2 MiB.
    pub const CUDA_GRANULE: u64 = 2 << 20;

    /// Left free by [`Budget::Auto`], for the driver's own allocations and for what else draws on the device.
    pub const RESERVE_BYTES: u64 = 512 << 20;

    /// What a buffer of `n_bytes` takes.
    pub(crate) fn buffer(&self, n_bytes: u64) -> u64 {
        n_bytes.checked_next_multiple_of(self.granule.max(1)).unwrap_or(u64::MAX)
    }

    /// Bytes that a plan may use.
    pub fn usable_bytes(&self) -> u64 {
        match self.budget {
            Budget::Auto => self.free_bytes.saturating_sub(Self::RESERVE_BYTES),
            Budget::Bytes(n) => n.min(self.free_bytes),
        }
    }
}
