//! What the placement flags mean.

use std::path::{Path, PathBuf};

use powerinfer_core::Device;
use powerinfer_core::placement::{
    Accelerator, Assignment, Bandwidth, Budget, Host, LayerAssignment, PlanOptions, Statistics, plan_path,
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

/// Gives each device its budget; those for which a list has none are left out.
fn give_budgets(devices: &mut Vec<Accelerator>, budgets: &[Budget]) -> Result<(), CliError> {
    match budgets {
        [] => {}
        [all] => devices.iter_mut().for_each(|device| device.budget = *all),
        each if each.len() > devices.len() => {
            return Err(CliError::Budgets { n_budgets: each.len(), n_devices: devices.len() });
        }
        each => {
            devices.truncate(each.len());
            devices.iter_mut().zip(each).for_each(|(device, budget)| device.budget = *budget);
        }
    }
    Ok(())
}

/// The options of a plan.
pub(crate) fn plan_options(
    args: &ModelArgs,
    host: Host,
    mut devices: Vec<Accelerator>,
    n_ctx: Option<usize>,
) -> Result<PlanOptions, CliError> {
    let PlacementArgs { vram_budget, disable_gpu_index, statistics_fallback, reset_gpu_index, .. } =
        &args.placement;
    give_budgets(&mut devices, vram_budget)?;
    let statistics =
        if *disable_gpu_index { Statistics::Unknown { rate: UNKNOWN_RATE } } else { statistics(args)? };
    Ok(PlanOptions {
        n_ctx,
        fallback_rate: *statistics_fallback,
        neurons: !disable_gpu_index,
        anew: *reset_gpu_index,
        ..PlanOptions::new(host, devices, statistics)
    })
}

/// The options of a plan for this machine, with what is measured on it.
pub(crate) fn plan_for_this_machine(
    args: &ModelArgs,
    devices: Vec<Accelerator>,
    n_ctx: Option<usize>,
) -> Result<PlanOptions, CliError> {
    // Where nothing can be measured, these are the figures of an ordinary machine.
    let bandwidth = Bandwidth { dense: 50e9, gather: 35e9 };
    let host = Host { name: host_name(), bandwidth };
    let options = plan_options(args, host, devices, n_ctx)?;
    // Without a device there is nothing to keep.
    let saved = args.model.as_deref().filter(|_| !options.devices.is_empty()).map(plan_path);
    Ok(PlanOptions { measure: true, saved, ..options })
}

/// The processor, where the system tells.
fn host_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = info.lines().find_map(|line| line.strip_prefix("model name"));
    let name = named.and_then(|rest| rest.split_once(':')).map_or("", |(_, name)| name.trim());
    if name.is_empty() { "this machine".to_owned() } else { name.to_owned() }
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

/// The devices of this machine and what goes to them, if a budget is given, for contexts of `n_ctx` positions.
pub(crate) fn on_this_machine(args: &ModelArgs, n_ctx: Option<usize>) -> Result<Wanted, CliError> {
    let PlacementArgs { vram_budget: budgets, statistics, statistics_fallback, gpu_index: index, .. } =
        &args.placement;
    let without_use = [
        ("--statistics", statistics.is_some()),
        ("--statistics-fallback", statistics_fallback.is_some()),
        ("--gpu-index", index.is_some()),
        ("--reset-gpu-index", args.placement.reset_gpu_index),
        ("--disable-gpu-index", args.placement.disable_gpu_index),
    ];
    if budgets.is_empty()
        && let Some((flag, _)) = without_use.into_iter().find(|(_, given)| *given)
    {
        return Err(CliError::NeedsBudget { flag });
    }
    if budgets.iter().all(|budget| *budget == Budget::Bytes(0)) {
        return Ok(Wanted::default());
    }
    match gpus() {
        Ok((numbers, found)) => {
            if let Some(assignment) = gpu_index(args)? {
                let accelerators = devices_of(&numbers, &found[..1]);
                return Ok(Wanted { accelerators, plan: None, assignment: Some(assignment) });
            }
            let plan = plan_for_this_machine(args, found, n_ctx)?;
            let accelerators = devices_of(&numbers, &plan.devices);
            Ok(Wanted { accelerators, plan: Some(plan), assignment: None })
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

/// The GPUs of this machine that work, at least one, with the driver's numbers for them; or why there is none.
#[cfg(feature = "cuda")]
pub(crate) fn gpus() -> Result<(Vec<usize>, Vec<Accelerator>), String> {
    let found = powerinfer_core::cuda_devices().map_err(|error| error.to_string())?;
    if found.is_empty() {
        return Err("there is none".to_owned());
    }
    let accelerators = found.iter().map(|info| Accelerator {
        name: info.name.clone(),
        free_bytes: info.free_bytes,
        budget: Budget::Auto,
        // Where they cannot be measured: those of a middling card, on PCIe 4.
        bandwidth: Bandwidth { dense: 400e9, gather: 300e9 },
        link: 20e9,
        latency: 15e-6,
        granule: Accelerator::CUDA_GRANULE,
        kv_value_bytes: 2,
    });
    Ok((found.iter().map(|info| info.device).collect(), accelerators.collect()))
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn gpus() -> Result<(Vec<usize>, Vec<Accelerator>), String> {
    Err("this program was built without the feature `cuda`".to_owned())
}

/// What computes on GPUs of which the driver's numbers are the first of `numbers`; none takes more memory than its budget.
#[cfg(feature = "cuda")]
pub(crate) fn devices_of(numbers: &[usize], gpus: &[Accelerator]) -> Vec<Device> {
    use powerinfer_core::CudaOptions;
    let options = numbers.iter().zip(gpus).map(|(&device, gpu)| CudaOptions {
        device,
        memory_limit: Some(gpu.usable_bytes()),
        ..CudaOptions::default()
    });
    options.map(Device::Cuda).collect()
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn devices_of(_: &[usize], _: &[Accelerator]) -> Vec<Device> {
    Vec::new()
}
