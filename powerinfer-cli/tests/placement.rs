//! `profile` and `plan` as a user calls them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::process::{Command, Output};

fn powerinfer(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_powerinfer")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The demo model as a file of its own.
fn model(folder: &tempfile::TempDir) -> PathBuf {
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, powerinfer_demo_model::MODEL).unwrap();
    path
}

#[test]
fn a_profile_lies_beside_the_model_and_the_plan_uses_it() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder);
    let model = model.to_str().unwrap();
    let profile = powerinfer(&["profile", "-m", model, "--tokens", "200"]);
    assert!(profile.status.success(), "{}", text(&profile.stderr));
    let table = text(&profile.stdout);
    assert!(table.starts_with("200 tokens\nlayer  active"), "{table}");
    let statistics = folder.path().join("model.statistics.safetensors");
    let more =
        powerinfer(&["profile", "-m", model, "--tokens", "100", "--merge", statistics.to_str().unwrap()]);
    assert!(text(&more.stdout).starts_with("300 tokens\n"), "{}", text(&more.stderr));

    // A sum has the shares of single tokens if all of it has them.
    assert!(!text(&more.stdout).contains(" -"), "{}", text(&more.stdout));
    let activation = folder.path().join("activation");
    let pt = powerinfer(&["profile", "-m", model, "--tokens", "200", "--format", "pt"]);
    assert!(pt.status.success() && activation.join("activation_0.pt").exists(), "{}", text(&pt.stderr));
    let activation = activation.to_str().unwrap();
    let plan = powerinfer(&["plan", "-m", model, "--vram-budget", "2MiB", "--statistics", activation]);
    assert!(plan.status.success(), "{}", text(&plan.stderr));
    let new = format!("{}/", folder.path().join("new").display());
    let sum = powerinfer(&["profile", "-m", model, "--tokens", "50", "--merge", activation, "--out", &new]);
    assert!(text(&sum.stderr).contains("says nothing of single tokens"), "{}", text(&sum.stderr));
    assert!(folder.path().join("new/activation_0.pt").exists(), "{}", text(&sum.stderr));
    let one = powerinfer(&["profile", "-m", model, "--out", "x.pt"]);
    assert_eq!(one.status.code(), Some(2), "{}", text(&one.stderr));
    assert!(text(&one.stderr).contains("give a folder"), "{}", text(&one.stderr));

    let svg = folder.path().join("plan.svg");
    let index = folder.path().join("model.gpuidx");
    let plan = powerinfer(&[
        "plan",
        "-m",
        model,
        "-c",
        "64",
        "--vram-budget",
        "2MiB",
        "--json",
        "--svg",
        svg.to_str().unwrap(),
        "--write-gpu-index",
        index.to_str().unwrap(),
    ]);
    assert!(plan.status.success(), "{}", text(&plan.stderr));
    assert!(text(&plan.stderr).contains("statistics of 300 tokens"), "{}", text(&plan.stderr));
    let json: serde_json::Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert!(json["devices"][0]["total_bytes"].as_u64().unwrap() <= 2 << 20, "{json}");
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg "));
    let file = powerinfer_gguf::GgufFile::open(&index).unwrap();
    let read = powerinfer_gguf::GpuIndex::parse(&file).unwrap();
    let neurons: usize = read.layers.iter().map(|set| set.len()).sum();
    assert_eq!(neurons as u64, json["devices"][0]["n_neurons"].as_u64().unwrap());
}

#[test]
fn budgets_are_kept_refused_or_zero() {
    let plan = |budget: &str| powerinfer(&["plan", "--vram-budget", budget]);
    let zero = plan("0");
    assert!(
        text(&zero.stdout).contains("neurons on rtx4090, because the budget is 0"),
        "{}",
        text(&zero.stdout)
    );
    let one = text(&plan("1B").stdout);
    assert!(one.contains("more than the 1 that may be used"), "{one}");
    for bad in ["8GB", "x", "-1", "99999999999999999999B"] {
        let refused = powerinfer(&["plan", &format!("--vram-budget={bad}")]);
        assert_eq!(refused.status.code(), Some(2), "{bad}: {}", text(&refused.stderr));
    }
    let both = powerinfer(&["plan", "--vram-budget", "1GiB", "--reset-gpu-index", "--disable-gpu-index"]);
    assert_eq!(both.status.code(), Some(2));
    let layers = powerinfer(&["generate", "-ngl", "33"]);
    assert_eq!(layers.status.code(), Some(2));
    assert!(text(&layers.stderr).contains("--vram-budget SIZE"), "{}", text(&layers.stderr));
    let machine = powerinfer(&["plan", "--machine", "toaster"]);
    assert_eq!(machine.status.code(), Some(1));
    assert!(text(&machine.stderr).contains("`toaster` is no part of a machine"));
}

#[test]
fn budgets_of_several_gpus_are_a_list() {
    let plan = |args: &[&str]| powerinfer(&[&["plan", "--machine", "rtx4090+rtx2080ti"], args].concat());
    let json: serde_json::Value =
        serde_json::from_slice(&plan(&["--vram-budget", "64MiB,48MiB", "--json"]).stdout).unwrap();
    let usable: Vec<u64> = (0..2).map(|i| json["devices"][i]["usable_bytes"].as_u64().unwrap()).collect();
    assert_eq!(usable, [64 << 20, 48 << 20]);
    let three = plan(&["--vram-budget", "1GiB,1GiB,1GiB"]);
    assert_eq!(three.status.code(), Some(2));
    assert!(text(&three.stderr).contains("3 sizes, there are 2 GPUs"), "{}", text(&three.stderr));
}

#[test]
fn this_machine_is_measured_with_the_model() {
    let plan = powerinfer(&["plan", "--machine", "this", "-t", "1"]);
    assert!(plan.status.success(), "{}", text(&plan.stderr));
    assert!(text(&plan.stderr).contains("GB/s of neurons in mode predictor"), "{}", text(&plan.stderr));
    assert!(text(&plan.stdout).contains("tokens/s"), "{}", text(&plan.stdout));
}

#[test]
fn flags_about_a_placement_need_one() {
    let refused = powerinfer(&["generate", "--statistics", "x.safetensors"]);
    assert_eq!(refused.status.code(), Some(2));
    let message = text(&refused.stderr);
    assert!(message.contains("--statistics has no meaning without --vram-budget"), "{message}");
    let both = powerinfer(&["plan", "--simulate", "--machine", "rtx4090+ddr4"]);
    assert_eq!(both.status.code(), Some(2), "{}", text(&both.stderr));
    // `plan` plans for all that is free unless told otherwise.
    let plan = powerinfer(&["plan", "--disable-gpu-index"]);
    assert!(plan.status.success(), "{}", text(&plan.stderr));
}

#[test]
fn an_index_takes_no_place_in_a_plan() {
    let both = powerinfer(&["plan", "--vram-budget", "1GiB", "--gpu-index", "x.gpuidx"]);
    assert_eq!(both.status.code(), Some(2));
    assert!(text(&both.stderr).contains("--gpu-index takes the place of a plan"), "{}", text(&both.stderr));
}

#[test]
fn without_a_gpu_a_budget_changes_no_text_and_says_why() {
    let args = ["generate", "-n", "8", "--temp", "0"];
    let plain = powerinfer(&args);
    let budget = powerinfer(&[&args[..], &["--vram-budget", "1GiB"]].concat());
    // On a machine with a GPU and the feature `cuda` the text is the same all the more.
    assert_eq!(text(&budget.stdout), text(&plain.stdout));
    if !cfg!(feature = "cuda") {
        assert!(text(&budget.stderr).contains("no part of the model is on a GPU, because"));
    }
}

#[test]
fn the_simulation_prints_every_case() {
    let table = text(&powerinfer(&["plan", "--simulate"]).stdout);
    assert!(table.contains("Falcon-40B F16") && table.contains("no measurement"), "{table}");
}
