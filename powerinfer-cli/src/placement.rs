//! What the placement flags mean.

use std::path::{Path, PathBuf};

use powerinfer_core::Device;
use powerinfer_core::placement::{
    Accelerator, Assignment, Bandwidth, Budget, Host, LayerAssignment, PlanOptions, Statistics,
};
use powerinfer_gguf::{GgufFile, GpuIndex, GpuIndexError};
use powerinfer_predictor::ActivationCounts;

use crate::args::{ModelArgs, PlacementArgs};
use crate::error::CliError;
use crate::output::say;

/// Rate of a neuron where nothing is known of it.
const UNKNOWN_RATE: f32 = 0.2;

/// Where statistics of a model file are looked for.
pub(crate) fn statistics_path(model: &Path) -> PathBuf {
    model.with_extension("statistics.safetensors")
}

/// The statistics that the flags name, or those beside the model; says which.
pub(crate) fn statistics(args: &ModelArgs) -> Result<Statistics, CliError> {
    let beside = args.model.as_deref().map(statistics_path).filter(|path| path.exists());
    let Some(path) = args.placement.statistics.as_ref().or(beside.as_ref()) else {
        say(
            "info: no statistics: which neurons are hot is not known, so any go to the device; `powerinfer profile` finds out",
        );
        return Ok(Statistics::Unknown { rate: UNKNOWN_RATE });
    };
    let counts = ActivationCounts::open(path).map_err(CliError::Statistics)?;
    say(&format!("info: statistics of {} tokens from {}", counts.n_tokens(), path.display()));
    Ok(Statistics::Counts(Box::new(counts)))
}

/// The options of a plan.
pub(crate) fn plan_options(
    args: &ModelArgs,
    host: Host,
    mut devices: Vec<Accelerator>,
    n_ctx: Option<usize>,
) -> Result<PlanOptions, CliError> {
    let PlacementArgs { vram_budget, disable_gpu_index, .. } = args.placement;
    for device in &mut devices {
        device.budget = vram_budget.unwrap_or(Budget::Auto);
    }
    let statistics =
        if disable_gpu_index { Statistics::Unknown { rate: UNKNOWN_RATE } } else { statistics(args)? };
    Ok(PlanOptions { host, devices, statistics, n_ctx, n_seq: 1, neurons: !disable_gpu_index })
}

/// What the placement flags ask for.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    pub(crate) accelerators: Vec<Device>,
    pub(crate) plan: Option<PlanOptions>,
    pub(crate) assignment: Option<Assignment>,
}

/// The neurons of an index file on device 1, everything else on the host.
fn read_gpu_index(path: &Path) -> Result<Assignment, CliError> {
    let failed =
        |source: GpuIndexError| CliError::GpuIndex { path: path.to_owned(), source: Box::new(source) };
    let file = GgufFile::open(path).map_err(|error| failed(error.into()))?;
    let index = GpuIndex::parse(&file).map_err(failed)?;
    let layers = index.layers.into_iter();
    let layers = layers.map(|hot| LayerAssignment { home: 0, owned: vec![hot.complement(), hot] }).collect();
    say(&format!("info: the neurons of {} go to the GPU", path.display()));
    Ok(Assignment { embed: 0, head: 0, layers })
}

/// The index file that the flags name, or the one beside the model.
fn gpu_index(args: &ModelArgs) -> Result<Option<Assignment>, CliError> {
    let flags = &args.placement;
    let beside = args.model.as_ref().map(|model| {
        let mut name = model.clone().into_os_string();
        name.push(".generated.gpuidx");
        PathBuf::from(name)
    });
    let may_look = !flags.reset_gpu_index && !flags.disable_gpu_index && flags.statistics.is_none();
    let beside = beside.filter(|path| may_look && path.exists());
    flags.gpu_index.as_ref().or(beside.as_ref()).map(|path| read_gpu_index(path)).transpose()
}

/// The devices of this machine and what goes to them, if a budget is given.
pub(crate) fn on_this_machine(args: &ModelArgs) -> Result<Wanted, CliError> {
    match args.placement.vram_budget {
        None | Some(Budget::Bytes(0)) => return Ok(Wanted::default()),
        Some(_) => {}
    }
    match gpus() {
        Ok((mut devices, accelerators)) => {
            if let Some(assignment) = gpu_index(args)? {
                devices.truncate(1);
                return Ok(Wanted { accelerators: devices, plan: None, assignment: Some(assignment) });
            }

            // Figures of the host are assumed until it is measured.
            let host =
                Host { name: "this machine".to_owned(), bandwidth: Bandwidth { dense: 50e9, gather: 35e9 } };
            let plan = plan_options(args, host, accelerators, None)?;
            Ok(Wanted { accelerators: devices, plan: Some(plan), assignment: None })
        }
        Err(reason) => {
            say(&format!(
                "warning: no part of the model is on a GPU, because {reason}; the CPU computes all of it"
            ));
            // A file that cannot be used is an error with or without a GPU.
            gpu_index(args)?;
            Ok(Wanted::default())
        }
    }
}

#[cfg(feature = "cuda")]
fn gpus() -> Result<(Vec<Device>, Vec<Accelerator>), String> {
    let found = powerinfer_core::cuda_devices().map_err(|error| error.to_string())?;
    if found.is_empty() {
        return Err("there is none".to_owned());
    }
    let devices = (0..found.len()).map(|device| {
        Device::Cuda(powerinfer_core::CudaOptions { device, ..powerinfer_core::CudaOptions::default() })
    });
    let accelerators = found.iter().map(|info| Accelerator {
        name: info.name.clone(),
        free_bytes: info.free_bytes,
        budget: Budget::Auto,
        // Assumed for lack of a measurement: those of a middling card, on PCIe 4.
        bandwidth: Bandwidth { dense: 400e9, gather: 300e9 },
        link: 20e9,
        latency: 15e-6,
        granule: Accelerator::CUDA_GRANULE,
        kv_value_bytes: 2,
    });
    let accelerators = accelerators.collect();
    Ok((devices.collect(), accelerators))
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> Result<(Vec<Device>, Vec<Accelerator>), String> {
    Err("this program was built without the feature `cuda`".to_owned())
}
