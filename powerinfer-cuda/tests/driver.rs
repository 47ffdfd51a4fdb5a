//! The file that calls NVIDIA's driver, on a library that plays the driver. The library is found by name, so each test runs
//! itself again with the folder in the loader's path.

#[path = "support/no_traffic.rs"]
mod no_traffic;

use std::process::Command;
use std::sync::Arc;

use powerinfer_cuda::{CudaBackend, CudaKvType, CudaOptions, devices, probe_devices};
use powerinfer_cuda_emulator::{available, driver_folder};
use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{
    ActiveMode, BackendError, FfnInput, HybridBackend, LayerId, ModelSpec, NeuronId, NeuronSet, SeqId, Step,
    StepRow, TokenId,
};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure};
use powerinfer_testing::conformance::{self, Subject};
use powerinfer_testing::tiny::{Random, TinyModel, TinyOptions};
use powerinfer_testing::tolerance::{NMSE_F32, assert_close};

use no_traffic::NoTraffic;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const IS_CHILD: &str = "POWERINFER_TEST_HAS_DRIVER";

/// Whether this process has the driver; if not, runs the test `name` in one that has.
#[expect(clippy::print_stderr, reason = "a test that does not run says so")]
fn has_driver(name: &str, driver: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var_os(IS_CHILD).is_some_and(|of| of == driver) {
        return true;
    }
    let Some(folder) = driver_folder(driver) else {
        let required = std::env::var_os("POWERINFER_REQUIRE_EMULATOR").is_some_and(|v| v == "1");
        assert!(
            !required || !cfg!(target_os = "linux") || !available(),
            "the emulated driver is required and was not built"
        );
        eprintln!("not run: the driver is not emulated on this machine");
        return false;
    };
    let this = std::env::current_exe().expect("a test knows its program");
    let child = Command::new(this)
        .args(["--exact", name, "--nocapture"])
        .env("LD_LIBRARY_PATH", folder)
        .env(IS_CHILD, driver)
        .envs(variables.iter().copied())
        .output()
        .expect("the program runs again");
    let said = String::from_utf8_lossy(&child.stdout) + String::from_utf8_lossy(&child.stderr);
    assert!(
        child.status.success() && said.contains("1 passed"),
        "{name} with the driver `{driver}`:\n{said}"
    );
    false
}

fn backend(spec: &Arc<ModelSpec>, without_graphs: bool) -> CudaBackend {
    let options = CudaOptions { kv_type: CudaKvType::F32, without_graphs, ..CudaOptions::default() };
    CudaBackend::new(Arc::clone(spec), options).expect("there is a device")
}

#[test]
fn contracts_hold_on_the_driver() {
    if !has_driver("contracts_hold_on_the_driver", "whole", &[]) {
        return;
    }
    let make = |spec: Arc<ModelSpec>| -> Box<dyn HybridBackend> {
        Box::new(NoTraffic(Box::new(backend(&spec, false))))
    };
    let subject = Subject {
        make: &make,
        same_bits: &[],
        count_allocations: Some(&|work| measure(work).1.n_allocs),
        nmse_limit: NMSE_F32,
        kv_value_bytes: 4,
    };
    conformance::c1_finish_adds(&subject);
    conformance::c2_only_owned_neurons_count(&subject);
    conformance::c3_inputs_may_be_reused(&subject);
    conformance::c5_steps_do_not_allocate(&subject);
    conformance::c7_the_caller_owns_lengths(&subject);
    conformance::position_0_is_not_predicted_by_gate_copies(&subject);
}

/// Logits of some tokens, one at a time through whole layers.
fn whole_layers(backend: &mut CudaBackend, model: &TinyModel, positions: std::ops::Range<u32>) -> Vec<f32> {
    let mut all = Vec::new();
    let mut logits = vec![0.0; model.spec.n_vocab];
    for pos in positions {
        let rows = [StepRow { seq: SeqId(0), pos, token: TokenId(pos * 37 % 96) }];
        let step = Step { rows: &rows, mode: ActiveMode::Exact };
        backend.embed(&step);
        model.spec.layers().for_each(|layer| assert!(backend.whole_layer(layer, &step)));
        backend.head(0..1, &mut logits);
        all.extend_from_slice(&logits);
    }
    all
}

#[test]
fn graphs_of_the_driver_give_the_bits_of_single_launches() {
    if !has_driver("graphs_of_the_driver_give_the_bits_of_single_launches", "whole", &[]) {
        return;
    }
    let model = TinyModel::new(TinyOptions::default());
    let [mut graphs, mut single] = [false, true].map(|without_graphs| {
        let mut backend = backend(&model.spec, without_graphs);
        model.load_all(&mut backend);
        backend.reserve(SeqId(0), 600, 4).expect("there is memory");
        backend
    });
    let mut got = vec![0.0; 12 * 96];
    let want = whole_layers(&mut single, &model, 0..12);
    assert_eq!(whole_layers(&mut graphs, &model, 0..12), want);
    let n_allocs = measure(|| {
        let rows = [StepRow { seq: SeqId(0), pos: 300, token: TokenId(1) }];
        let step = Step { rows: &rows, mode: ActiveMode::Dense };
        graphs.embed(&step);
        model.spec.layers().for_each(|layer| assert!(graphs.whole_layer(layer, &step)));
        graphs.head(0..1, &mut got[..96]);
    });
    assert_eq!(n_allocs.1.n_allocs, 0, "a graph is made without the heap of the host");
    assert_eq!(graphs.info().description, "Emulated device 0, compute capability 8.9");
    assert!(single.info().description.contains("without graphs"));
    // Other memory, other graphs, and everything is given back when the backend goes.
    graphs.record_fired(true);
    assert_eq!(whole_layers(&mut graphs, &model, 0..12), want);
    let mut counts = vec![0; 96];
    assert!(graphs.take_fired(LayerId(0), &mut counts));
    assert!(counts.iter().any(|&n| n > 0));
    graphs.release(SeqId(0));
}

#[test]
fn large_weights_arrive_through_pinned_memory() {
    if !has_driver("large_weights_arrive_through_pinned_memory", "whole", &[]) {
        return;
    }
    // Matrices of 4.6 MB, over the size of a piece of pinned memory.
    let model = TinyModel::new(TinyOptions { n_embd: 256, n_ff: 4500, ..TinyOptions::default() });
    let mut input = FfnInput { x: Random::new(3).normals(256, 1.0), ..FfnInput::default() };
    input.active.reset(1, 4500);
    input.active.fill();
    let sums = |backend: &mut dyn HybridBackend| {
        model.load_ffn(backend, |_| NeuronSet::all(4500));
        backend.reserve(SeqId(0), 8, 1).expect("there is memory");
        let mut all = Vec::new();
        for layer in model.spec.layers() {
            let ticket = backend.ffn_start(layer, &input);
            let mut acc = vec![0.0; 256];
            backend.ffn_finish(ticket, &mut acc);
            all.extend(acc);
        }
        all
    };
    let want = sums(&mut ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None));
    assert_close("large weights", &sums(&mut backend(&model.spec, false)), &want, NMSE_F32);
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    if !has_driver("memory_that_is_not_there_is_an_error", "whole", &[]) {
        return;
    }
    let model = TinyModel::new(TinyOptions::default());
    let mut backend = backend(&model.spec, false);
    for layer in model.spec.layers() {
        let part = NeuronSet::from_ids(96, (0..5).map(NeuronId));
        backend.load_ffn(layer, model.ffn[layer.index()].clone(), &part).expect("there is memory");
    }
    model.load_home(&mut backend);
    let used = backend.memory_used();
    match backend.reserve(SeqId(0), 1 << 24, 4) {
        Err(BackendError::OutOfMemory { need_bytes, have_bytes, .. }) => {
            assert!(need_bytes > have_bytes && have_bytes < 1 << 30, "{need_bytes} of {have_bytes}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(backend.memory_used(), used);
}

#[test]
fn a_device_that_does_not_open_is_listed_with_its_reason() {
    let variables = [("FAKE_CUDA_DEVICES", "3"), ("FAKE_CUDA_BROKEN", "1")];
    if !has_driver("a_device_that_does_not_open_is_listed_with_its_reason", "whole", &variables) {
        return;
    }
    let works: Vec<usize> = devices().expect("two work").iter().map(|d| d.device).collect();
    assert_eq!(works, [0, 2]);
    let all = probe_devices().expect("there are devices");
    assert_eq!(all.len(), 3);
    let reason = all[1].as_ref().expect_err("it is broken").to_string();
    assert!(reason.contains("cuDevicePrimaryCtxRetain"), "{reason}");
    let model = TinyModel::new(TinyOptions::default());
    let on =
        |device| CudaBackend::new(Arc::clone(&model.spec), CudaOptions { device, ..CudaOptions::default() });
    assert_eq!(on(1).expect_err("it is broken").to_string(), reason);
    assert!(on(2).is_ok());
    assert!(on(3).expect_err("there are three").to_string().contains("the machine has 3"));
}

#[test]
fn an_old_driver_is_an_error_with_its_version() {
    if !has_driver("an_old_driver_is_an_error_with_its_version", "whole", &[("FAKE_CUDA_VERSION", "11040")]) {
        return;
    }
    let error = devices().expect_err("it is too old").to_string();
    assert!(error.contains("CUDA 11.4") && error.contains("R525"), "{error}");
}

#[test]
fn a_function_that_the_driver_lacks_is_named() {
    if !has_driver("a_function_that_the_driver_lacks_is_named", "without-cuMemHostAlloc", &[]) {
        return;
    }
    let error = devices().expect_err("a function is missing");
    assert!(
        matches!(&error, BackendError::Unavailable { reason, .. } if reason.contains("`cuMemHostAlloc`")),
        "{error}"
    );
    let model = TinyModel::new(TinyOptions::default());
    let made = CudaBackend::new(Arc::clone(&model.spec), CudaOptions::default());
    assert_eq!(made.expect_err("a function is missing"), error);
}

#[test]
fn a_driver_without_graphs_launches_one_by_one() {
    if !has_driver("a_driver_without_graphs_launches_one_by_one", "without-cuGraphLaunch", &[]) {
        return;
    }
    let model = TinyModel::new(TinyOptions::default());
    let mut backend = backend(&model.spec, false);
    model.load_all(&mut backend);
    backend.reserve(SeqId(0), 64, 4).expect("there is memory");
    let logits = whole_layers(&mut backend, &model, 0..3);
    assert!(logits.iter().all(|v| v.is_finite()));
    let description = backend.info().description;
    assert!(
        description.contains("without graphs") && description.contains("`cuGraphLaunch`"),
        "{description}"
    );
}
