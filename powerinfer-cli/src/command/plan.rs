//! `powerinfer plan`: which parts of a model go where, without loading it.

use powerinfer_core::placement::{LayerAssignment, Machine, Plan, PlanTable};
use powerinfer_core::{LoadOptions, Model};
use powerinfer_gguf::{GgufModel, GpuIndex};

use crate::args::PlanArgs;
use crate::error::CliError;
use crate::options::{self, Source};
use crate::output::{print, print_json, say, write_file};
use crate::placement;

pub(crate) fn run(args: &PlanArgs) -> Result<(), CliError> {
    if args.simulate {
        return print(&powerinfer_core::placement::simulation().to_string());
    }
    if args.model.placement.gpu_index.is_some() {
        return Err(CliError::IndexForPlan);
    }
    let source = Source::of(args.model.model.as_ref());
    let file = source.open()?;
    let n_ctx = args.ctx_size.map(|n| n as usize);
    let on_host = options::load_options_on_host(&args.model, args.mode.map(options::mode))?;
    let options = if args.machine == "this" {
        let (numbers, found) = placement::gpus().unwrap_or_else(|reason| {
            say(&format!("info: the plan is for the CPU alone, because {reason}"));
            Default::default()
        });
        let how = placement::plan_for_this_machine(&args.model, found, n_ctx)?;
        LoadOptions {
            accelerators: placement::devices_of(&numbers, &how.devices),
            plan: Some(how),
            ..on_host
        }
    } else {
        let machine = Machine::named(&args.machine, weight_bytes(&file))?;
        let how = placement::plan_options(&args.model, machine.host, machine.devices, n_ctx)?;
        LoadOptions { plan: Some(how), ..on_host }
    };
    let (plan, notes) = Model::plan(&file, args.model.model.as_deref(), &options)
        .map_err(|error| source.load_error(error))?
        .expect("a plan was asked for");
    options::say_all(&notes);
    if let Some(path) = &args.svg {
        write_file(path, |out| {
            let failed = |source| CliError::Write { path: path.clone(), source };
            out.write_all(plan.to_svg().as_bytes()).map_err(failed)
        })?;
    }
    if let Some(path) = &args.write_gpu_index {
        let bytes = gpu_index(&plan).to_writer().and_then(powerinfer_gguf::GgufWriter::into_bytes);
        let bytes = bytes.map_err(|error| CliError::Write {
            path: path.clone(),
            source: std::io::Error::other(error.to_string()),
        })?;
        write_file(path, |out| {
            out.write_all(&bytes).map_err(|source| CliError::Write { path: path.clone(), source })
        })?;
    }
    if args.json { print_json(&plan.to_json()) } else { print(&format!("{}\n", PlanTable(&plan))) }
}

/// Bytes of a weight of the FFNs, where nearly all of a model is.
fn weight_bytes(file: &GgufModel) -> f64 {
    let of_ffn = || file.tensors().filter(|tensor| tensor.name().contains(".ffn_"));
    let n_weights: usize = of_ffn().map(|tensor| tensor.dims().iter().product::<usize>()).sum();
    let n_bytes: usize = of_ffn().map(|tensor| tensor.n_bytes()).sum();
    n_bytes as f64 / n_weights.max(1) as f64
}

/// The neurons of the first device; none if there is none.
fn gpu_index(plan: &Plan) -> GpuIndex {
    let of_device =
        |layer: &LayerAssignment| layer.owned.get(1).cloned().unwrap_or_else(|| layer.owned[0].complement());
    GpuIndex {
        vram_capacity_bytes: plan.devices.first().map_or(0, |device| device.usable_bytes),
        layers: plan.assignment.layers.iter().map(of_device).collect(),
    }
}
