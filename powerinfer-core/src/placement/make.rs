//! From the weights of a file to a plan: one that was saved, or a new one, by figures that are given or measured.

use std::path::Path;

use powerinfer_gguf::GgufModel;
use powerinfer_sparse_ops::{ActiveMode, LayerId, ModelSpec};
use sha2::{Digest, Sha256};

use super::device::{Accelerator, Budget, Host};
use super::measure::{Measured, measure};
use super::plan::{Plan, PlanOptions, PlanRequest, Statistics, plan};
use super::rates::Rates;
use super::report::size;
use super::saved::{MadeFor, NotUsed, SavedPlan};
use super::shape::ModelShape;
use crate::load::{LoadError, LoadOptions, ModelWeights, Notes, ranges};
use crate::session;

/// Bytes of weights that a device is measured with, at most.
const MEASURED_BYTES: u64 = 1 << 30;

/// What a plan is made from.
#[derive(Clone, Copy)]
pub(crate) struct Planning<'a> {
    pub(crate) file: &'a GgufModel,
    pub(crate) spec: &'a ModelSpec,
    pub(crate) name: &'a str,
    pub(crate) weights: &'a ModelWeights,
    pub(crate) mode: ActiveMode,
    pub(crate) options: &'a LoadOptions,
    pub(crate) how: &'a PlanOptions,
}

impl Planning<'_> {
    /// The plan that was saved if it still holds, otherwise a new one, which is saved.
    pub(crate) fn plan(&self, notes: &mut Notes) -> Result<Plan, LoadError> {
        let Self { spec, weights, how, .. } = *self;
        let mut shape =
            ModelShape::new(self.name.to_owned(), spec, &weights.dense, &weights.ffn, &weights.predictors);
        if !how.neurons {
            shape.keep_neurons("no neurons are to leave it");
        }
        if self.options.adaptive.is_some() {
            shape.count();
        }
        let fingerprint = crate::calibration::fingerprint(self.file);
        let rates = self.rates(&shape, &fingerprint, notes)?;
        let Some(path) = &how.saved else { return Ok(self.new_plan(&shape, &rates, notes)) };
        let made_for = self.made_for(&shape, fingerprint);
        if !how.anew
            && let Some(plan) = self.saved_plan(path, &made_for, notes)
        {
            return Ok(plan);
        }
        let plan = self.new_plan(&shape, &rates, notes);
        let saved = SavedPlan::new(&plan, made_for);
        if let Err(error) = saved.write(path) {
            notes.warn(format!("the plan is not kept: `{}` cannot be written: {error}", path.display()));
        }
        Ok(plan)
    }

    /// The plan of a file, if it holds; otherwise says why not, unless there is no such file.
    fn saved_plan(&self, path: &Path, made_for: &MadeFor, notes: &mut Notes) -> Option<Plan> {
        let devices = &self.how.devices;
        match SavedPlan::open(path, made_for, devices) {
            Ok(plan) if plan.assignment.check(self.spec, 1 + devices.len()).is_ok() => {
                notes.info(format!("placed by the plan in `{}`", path.display()));
                return Some(plan);
            }
            Ok(_) => {
                notes.info(format!(
                    "the plan in `{}` is made anew: it does not fit the model",
                    path.display()
                ));
            }
            Err(NotUsed::Read(error)) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(why) => notes.info(format!("the plan in `{}` is made anew: {why}", path.display())),
        }
        None
    }

    /// A plan by the figures that are given or measured.
    fn new_plan(&self, shape: &ModelShape, rates: &Rates, notes: &mut Notes) -> Plan {
        let Self { spec, mode, options, how, .. } = *self;
        let (mut host, mut devices) = (how.host.clone(), how.devices.clone());
        if how.measure {
            self.measure(&mut host, &mut devices, notes);
        }
        plan(&PlanRequest {
            shape,
            rates,
            mode,
            host: &host,
            devices: &devices,
            n_ctx: how.n_ctx.unwrap_or_else(|| session::default_context(spec)),
            n_batch: options.n_batch,
            n_seq: how.n_seq,
        })
    }

    /// Puts measured figures in the place of those that were given.
    fn measure(&self, host: &mut Host, devices: &mut [Accelerator], notes: &mut Notes) {
        let Self { spec, weights, mode, options, .. } = *self;
        let say = |notes: &mut Notes, name: &str, m: &Measured| {
            let [dense, gather] = [m.bandwidth.dense, m.bandwidth.gather].map(|n| n / 1e9);
            let link = m.link.map_or(String::new(), |link| format!(" and {:.1} GB/s", link / 1e9));
            notes.info(format!(
                "measured: {name} reads {dense:.1} GB/s of dense weights and {gather:.1} GB/s of neurons in mode {}; \
                 transfers take {:.1} µs{link}",
                mode.name(),
                1e6 * m.latency,
            ));
        };
        let device = options.device.to_measure();
        match measure(|spec| device.backend(spec), spec, weights, mode, MEASURED_BYTES) {
            Ok(Some(m)) => {
                host.bandwidth = m.bandwidth;
                say(notes, &host.name, &m);
            }
            Ok(None) => notes.info(format!("{} is not measured: a layer is too large for it", host.name)),
            Err(error) => notes.warn(format!("{} could not be measured: {error}", host.name)),
        }
        for (device, accelerator) in options.accelerators.iter().zip(devices) {
            let n_bytes = (accelerator.usable_bytes() / 2).min(MEASURED_BYTES);
            let make = |spec: &_| device.to_measure().backend(spec);
            // What does not fit is planned by the figures that are given.
            match measure(make, spec, weights, mode, n_bytes) {
                Ok(Some(m)) => {
                    (accelerator.bandwidth, accelerator.latency) = (m.bandwidth, m.latency);
                    accelerator.link = m.link.unwrap_or(accelerator.link);
                    say(notes, &accelerator.name, &m);
                }
                Ok(None) => notes.info(format!(
                    "{} is not measured: no layer fits into {}, half of what may be used",
                    accelerator.name,
                    size(n_bytes)
                )),
                Err(error) => notes.warn(format!("{} could not be measured: {error}", accelerator.name)),
            }
        }
    }

    /// How often neurons are active, by the statistics.
    fn rates(&self, shape: &ModelShape, fingerprint: &str, notes: &mut Notes) -> Result<Rates, LoadError> {
        let counts = match &self.how.statistics {
            Statistics::Unknown { rate } => return Ok(Rates::uniform(shape, *rate)),
            Statistics::Counts(counts) => counts,
        };
        counts.check_model(fingerprint)?;
        let Some(rate) = self.how.fallback_rate else { return Ok(Rates::from_counts(counts, shape)?) };
        let (rates, without) = Rates::with_fallback(counts, shape, rate);
        let (got, expected) = (counts.n_layer(), shape.layers.len());
        if got > expected {
            notes.warn(format!(
                "the statistics have {got} layers, the model {expected}: the rest is left aside"
            ));
        }
        if !without.is_empty() {
            notes.warn(format!(
                "no statistics for layers {}: every neuron of them is taken to fire for {:.0} % of the tokens",
                ranges(without.into_iter().map(|LayerId(layer)| layer)),
                100.0 * rate
            ));
        }
        Ok(rates)
    }

    /// What the plan depends on. Free memory and measured figures are left out: the one is compared by itself, the
    /// others are never twice the same.
    fn made_for(&self, shape: &ModelShape, fingerprint: String) -> MadeFor {
        let Self { options, how, mode, spec, .. } = *self;
        let hex = |hash: Sha256| -> String {
            hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
        };
        let hash = |text: String| hex(Sha256::new_with_prefix(text));
        let budgets: Vec<Budget> = how.devices.iter().map(|d| d.budget).collect();
        let devices = how.devices.iter().map(|d| {
            let figures = (!how.measure).then_some((d.bandwidth, d.link, d.latency));
            (&d.name, d.granule, d.kv_value_bytes, figures)
        });
        let machine =
            (&how.host.name, (!how.measure).then_some(how.host.bandwidth), devices.collect::<Vec<_>>());
        let statistics = match &how.statistics {
            Statistics::Unknown { rate } => format!("every neuron {rate}"),
            Statistics::Counts(counts) => {
                let mut hash = Sha256::new();
                hash.update(counts.n_tokens().to_le_bytes());
                for layer in (0..counts.n_layer() as u32).map(LayerId) {
                    let counts = counts.layer(layer).unwrap_or_default();
                    hash.update(counts.len().to_le_bytes());
                    counts.iter().for_each(|count| hash.update(count.to_le_bytes()));
                }
                hex(hash)
            }
        };
        let context = how.n_ctx.unwrap_or_else(|| session::default_context(spec));
        [
            ("budget", format!("{budgets:?}")),
            ("context", format!("{context}")),
            ("batch", format!("{}", options.n_batch)),
            ("version of this program", env!("CARGO_PKG_VERSION").to_owned()),
            ("number of sequences", format!("{}", how.n_seq)),
            ("mode", mode.name().to_owned()),
            ("model", fingerprint),
            // Types, predictors and what may leave the host.
            ("form of the model", hash(format!("{shape:?}"))),
            ("machine", hash(format!("{machine:?}"))),
            ("host device", hash(format!("{:?}", options.device))),
            ("statistics", format!("{statistics}, otherwise {:?}", how.fallback_rate)),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
    }
}
