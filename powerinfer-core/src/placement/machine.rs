//! Machines by name, for plans on other machines than this one.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::device::{Accelerator, Bandwidth, Budget, Host};

const DATA: &str = include_str!("machines.json");

#[derive(Deserialize)]
struct Data {
    hosts: BTreeMap<String, HostData>,
    devices: BTreeMap<String, DeviceData>,
    assumed: Assumed,
}

#[derive(Deserialize)]
struct HostData {
    bandwidth: f64,
}

#[derive(Deserialize)]
struct DeviceData {
    memory: u64,
    bandwidth: f64,
    link: f64,
}

/// Shares of the bandwidth by the data sheet that rows are assumed to be read at, and seconds of a transfer.
#[derive(Deserialize)]
struct Assumed {
    /// In ascending order of the bytes of a weight; the smaller a weight, the more the host computes for each byte.
    host: Vec<HostShares>,
    device_dense: f64,
    device_gather: f64,
    latency: f64,
}

#[derive(Deserialize)]
struct HostShares {
    weight_bytes_from: f64,
    dense: f64,
    gather: f64,
}

/// A name that describes no machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{part}` is no part of a machine; hosts: {hosts}; devices: {devices}")]
pub struct MachineError {
    /// What is not known.
    pub part: String,
    /// Known hosts.
    pub hosts: String,
    /// Known devices.
    pub devices: String,
}

/// A host and its devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// The host.
    pub host: Host,
    /// Its devices, with budget [`Budget::Auto`].
    pub devices: Vec<Accelerator>,
}

impl Machine {
    /// A machine from the names of its parts, as `rtx4090+ddr5`; the host is `ddr5` unless named. The figures and their
    /// sources are in `machines.json` beside this module; bandwidths are those of data sheets times assumed shares, which
    /// on the host depend on the bytes of a weight, `weight_bytes`.
    ///
    /// # Errors
    /// [`MachineError`] naming the part that is not known and those that are.
    pub fn named(name: &str, weight_bytes: f64) -> Result<Self, MachineError> {
        let data: Data = serde_json::from_str(DATA).expect("the embedded file is JSON of this shape");
        let Assumed { host: shares, device_dense, device_gather, latency } = data.assumed;
        let shares = shares.iter().rev().find(|s| weight_bytes >= s.weight_bytes_from).unwrap_or(&shares[0]);
        let host = |name: &str, h: &HostData| Host {
            name: name.to_owned(),
            bandwidth: Bandwidth { dense: h.bandwidth * shares.dense, gather: h.bandwidth * shares.gather },
        };
        let mut machine = Self { host: host("ddr5", &data.hosts["ddr5"]), devices: Vec::new() };
        for part in name.split('+') {
            if let Some(h) = data.hosts.get(part) {
                machine.host = host(part, h);
            } else if let Some(d) = data.devices.get(part) {
                machine.devices.push(Accelerator {
                    name: part.to_owned(),
                    free_bytes: d.memory,
                    budget: Budget::Auto,
                    bandwidth: Bandwidth {
                        dense: d.bandwidth * device_dense,
                        gather: d.bandwidth * device_gather,
                    },
                    link: d.link,
                    latency,
                    granule: Accelerator::CUDA_GRANULE,
                    kv_value_bytes: 2,
                });
            } else {
                let names = |names: Vec<&String>| {
                    names.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ")
                };
                return Err(MachineError {
                    part: part.chars().take(64).collect(),
                    hosts: names(data.hosts.keys().collect()),
                    devices: names(data.devices.keys().collect()),
                });
            }
        }
        Ok(machine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_put_together_from_their_parts() {
        let machine = Machine::named("rtx4090+ddr4", 2.0).unwrap();
        assert_eq!((machine.host.name.as_str(), machine.devices.len()), ("ddr4", 1));
        assert_eq!(machine.devices[0].free_bytes, 24 << 30);
        let two = Machine::named("rtx4090+rtx2080ti", 2.0).unwrap();
        assert_eq!((two.host.name.as_str(), two.devices.len()), ("ddr5", 2));
        let small = Machine::named("rtx4090+ddr4", 0.5625).unwrap();
        assert!(small.host.bandwidth.gather < machine.host.bandwidth.gather);
        assert_eq!(small.devices, machine.devices);
        let error = Machine::named("rtx4090+hal9000", 2.0).unwrap_err().to_string();
        assert_eq!(
            error,
            "`hal9000` is no part of a machine; hosts: ddr4, ddr5; devices: rtx2080ti, rtx4090"
        );
    }
}
