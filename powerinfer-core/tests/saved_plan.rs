//! Plans in files are used while they hold and made anew, with one line that says why, when they do not; devices are
//! measured; statistics that do not fit are refused, or replaced where that is asked for.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use powerinfer_core::placement::{
    Accelerator, Bandwidth, Budget, Host, Plan, PlanOptions, Statistics, plan_path,
};
use powerinfer_core::{ActiveMode, Device, LoadError, LoadOptions, MakeBackend, Model};
use powerinfer_predictor::{ActivationCounts, PredictorError};
use powerinfer_testing::mock::{Account, MockDevice, MockOptions};
use powerinfer_testing::tiny::Random;

use support::{N_FF, N_LAYER, TinyFile};

fn counts(seed: u64, n_layer: usize) -> ActivationCounts {
    let mut random = Random::new(seed);
    let counts = (0..n_layer).map(|_| (0..N_FF).map(|_| random.below(100) as u64).collect()).collect();
    ActivationCounts::new(100, counts).unwrap()
}

fn options(counts: ActivationCounts, saved: Option<PathBuf>) -> PlanOptions {
    let host = Host { name: "host".to_owned(), bandwidth: Bandwidth { dense: 50e9, gather: 30e9 } };
    let device = Accelerator {
        name: "device".to_owned(),
        free_bytes: 1 << 30,
        budget: Budget::Bytes(800_000),
        bandwidth: Bandwidth { dense: 800e9, gather: 600e9 },
        link: 1e15,
        latency: 0.0,
        granule: 256,
        kv_value_bytes: 2,
    };
    PlanOptions { saved, ..PlanOptions::new(host, vec![device], Statistics::Counts(Box::new(counts))) }
}

fn load_options(plan: PlanOptions) -> LoadOptions {
    LoadOptions {
        accelerators: vec![Device::Other(MakeBackend::new(|spec| {
            let options = MockOptions { memory_bytes: None, late: true };
            Ok(Box::new(MockDevice::new(spec, options, Arc::new(Account::default()))))
        }))],
        plan: Some(plan),
        n_batch: 8,
        ..LoadOptions::default()
    }
}

/// The plan, and the lines about the saved one.
fn load(plan: PlanOptions) -> (Plan, Vec<String>) {
    let model = TinyFile::sparse().load_with(&load_options(plan)).unwrap();
    let about = |line: &str| line.contains("plan in `") || line.contains("plan is not kept");
    let lines = model.notes().iter().map(|(_, line)| line.to_owned()).filter(|line| about(line)).collect();
    (model.placement().unwrap().clone(), lines)
}

#[test]
fn a_saved_plan_is_used_until_what_it_was_made_for_changes() {
    let folder = tempfile::tempdir().unwrap();
    let path = plan_path(&folder.path().join("model.gguf"));
    assert_eq!(path, folder.path().join("model.gguf.plan.json"));
    let kept = |seed| options(counts(seed, N_LAYER), Some(path.clone()));
    let (first, lines) = load(kept(1));
    assert_eq!(lines, [] as [&str; 0], "there was none");
    assert!(first.devices[0].n_neurons > 0 && path.exists());
    let (second, lines) = load(kept(1));
    assert_eq!(lines, [format!("placed by the plan in `{}`", path.display())]);
    assert!(second.assignment == first.assignment);
    assert_eq!(second.devices[0].bytes, first.devices[0].bytes);

    let changed = |plan: PlanOptions, why: &str| {
        let (new, lines) = load(plan.clone());
        assert_eq!(lines, [format!("the plan in `{}` is made anew: {why}", path.display())]);
        let (again, lines) = load(plan);
        assert!(lines[0].starts_with("placed by"), "{lines:?}");
        assert!(again.assignment == new.assignment);
    };
    changed(kept(2), "statistics differs from what it was made for");
    let mut other = kept(2);
    other.devices[0].budget = Budget::Bytes(900_000);
    changed(other.clone(), "budget differs from what it was made for");
    other.host.name = "another".to_owned();
    changed(other.clone(), "machine differs from what it was made for");
    other.n_ctx = Some(32);
    changed(other.clone(), "context differs from what it was made for");
    // Less memory than the plan takes, with a budget that leaves it to what is free.
    other.devices[0].budget = Budget::Auto;
    changed(other.clone(), "budget differs from what it was made for");
    other.devices[0].free_bytes = 512 << 20;
    let planned = 1u64 << 29;
    changed(other.clone(), &format!("device has 0 bytes for it now, it was made with {planned}"));
    // What is asked to be made anew is.
    other.anew = true;
    assert_eq!(load(other).1, [] as [&str; 0]);

    // Another mode.
    let plan = kept(3);
    load(plan.clone());
    let options = LoadOptions { mode: Some(ActiveMode::Exact), ..load_options(plan) };
    let model = TinyFile::sparse().load_with(&options).unwrap();
    assert!(model.notes().iter().any(|(_, line)| line.ends_with("mode differs from what it was made for")));
}

fn without_devices(plan: &str) -> String {
    let mut plan: serde_json::Value = serde_json::from_str(plan).unwrap();
    plan["on_devices"] = serde_json::json!([]);
    plan.to_string()
}

#[test]
fn a_file_that_is_no_plan_is_replaced_and_one_that_cannot_be_written_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.plan.json");
    let kept = || options(counts(1, N_LAYER), Some(path.clone()));
    let (plan, _) = load(kept());
    let whole = std::fs::read_to_string(&path).unwrap();
    let broken = [
        (String::new(), "it is no plan: "),
        (whole[..whole.len() / 2].to_owned(), "it is no plan: "),
        ("[]".to_owned(), "it is no plan: "),
        (without_devices(&whole), "it is for 0 devices, there are 1"),
        (whole.replacen("\"version\":1", "\"version\":7", 1), "it is of format 7, this program writes 1"),
        (
            whole.replacen("\"homes\":[0", "\"homes\":[9", 1).replacen("\"homes\":[1", "\"homes\":[9", 1),
            "it does not fit the model",
        ),
        (whole.replacen("\"n_ff\":[96", "\"n_ff\":[95", 1), "it"),
        (whole.replacen("\"n_ff\":[96", "\"n_ff\":[18446744073709551615", 1), "its neurons are not written"),
    ];
    for (text, why) in broken {
        assert_ne!(text, whole, "{why}");
        std::fs::write(&path, text).unwrap();
        let (new, lines) = load(kept());
        assert!(
            lines.len() == 1 && lines[0].contains(&format!("is made anew: {why}")),
            "{lines:?}, not {why}"
        );
        assert!(new.assignment == plan.assignment);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), whole, "written anew");
    }
    let nowhere = Path::new("/dev/null/m.plan.json");
    let (new, lines) = load(options(counts(1, N_LAYER), Some(nowhere.to_owned())));
    assert!(new.assignment == plan.assignment);
    assert!(lines.iter().any(|line| line.starts_with("the plan is not kept")), "{lines:?}");
}

#[test]
fn what_is_measured_takes_the_place_of_the_figures_that_are_given() {
    let plan = PlanOptions { measure: true, ..options(counts(1, N_LAYER), None) };
    for mode in [ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor] {
        let options = LoadOptions { mode: Some(mode), ..load_options(plan.clone()) };
        let model = TinyFile::sparse().load_with(&options).unwrap();
        let lines: Vec<&str> = model.notes().iter().map(|(_, line)| line).collect();
        for name in ["host", "device"] {
            let start = format!("measured: {name} reads ");
            let line = lines.iter().find(|line| line.starts_with(&start));
            assert!(line.is_some_and(|line| line.contains(mode.name())), "{lines:?}");
        }
        let given = TinyFile::sparse().load_with(&load_options(options_as_given(&plan))).unwrap();
        assert_ne!(model.placement().unwrap().host_seconds, given.placement().unwrap().host_seconds);
    }
    // No layer fits into half of such a device.
    let mut poor = plan;
    poor.devices[0].budget = Budget::Bytes(100);
    let model = TinyFile::sparse().load_with(&load_options(poor)).unwrap();
    assert!(model.notes().iter().any(|(_, line)| line.starts_with("device is not measured: no layer fits")));
}

fn options_as_given(plan: &PlanOptions) -> PlanOptions {
    PlanOptions { measure: false, ..plan.clone() }
}

#[test]
fn statistics_that_do_not_fit_are_refused_or_replaced_where_asked() {
    let error = |counts: ActivationCounts| {
        TinyFile::sparse().load_with(&load_options(options(counts, None))).unwrap_err()
    };
    let foreign = counts(1, N_LAYER).of_model("of another file");
    assert!(matches!(error(foreign.clone()), LoadError::Calibration(PredictorError::OtherModel { .. })));
    assert!(matches!(error(counts(1, 3)), LoadError::Rates(_)));
    assert!(matches!(error(counts(1, N_LAYER + 1)), LoadError::Rates(_)));

    let lenient = |counts| PlanOptions { fallback_rate: Some(0.25), ..options(counts, None) };
    let lines = |counts| -> Vec<String> {
        let model: Model = TinyFile::sparse().load_with(&load_options(lenient(counts))).unwrap();
        model.notes().iter().map(|(_, line)| line.to_owned()).filter(|l| l.contains("statistics")).collect()
    };
    assert_eq!(
        lines(counts(1, 3)),
        ["no statistics for layers 3-11: every neuron of them is taken to fire for 25 % of the tokens"]
    );
    assert_eq!(
        lines(counts(1, N_LAYER + 1)),
        ["the statistics have 13 layers, the model 12: the rest is left aside"]
    );
    assert_eq!(lines(counts(1, N_LAYER)), [] as [&str; 0]);
    // Those of another file are none of this one, whatever is asked.
    let refused = TinyFile::sparse().load_with(&load_options(lenient(foreign)));
    assert!(matches!(refused, Err(LoadError::Calibration(_))));
}
