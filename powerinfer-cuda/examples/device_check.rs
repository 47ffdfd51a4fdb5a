//! What a machine with an NVIDIA GPU has to show: conformance on the real driver and the logits of the original engine, then a
//! table of speeds, of kernels and of decoding under several budgets. `--conformance` stops after the first part, which is
//! what a memory checker is for; `--rehearse` runs goldens and budgets of a toy on the emulated device, to see that the program
//! does its work before a machine is at hand. Run by `tools/device-check.sh`.
#![allow(clippy::print_stdout, reason = "a table is what it is for")]

#[path = "../tests/support/budgets.rs"]
mod budgets;
#[path = "../tests/support/goldens.rs"]
mod goldens;
#[expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]
#[path = "../../powerinfer-core/tests/support/mod.rs"]
mod model_file;
#[path = "../tests/support/no_traffic.rs"]
mod no_traffic;
#[path = "../tests/support/mod.rs"]
mod support;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use powerinfer_core::{Device, MakeBackend};
use powerinfer_cuda::{CudaBackend, CudaKvType, CudaOptions, probe_devices};
use powerinfer_sparse_ops::reference::{ReferenceBackend, Rounding};
use powerinfer_sparse_ops::{
    Activation, ActiveMode, BlockKind, DensePart, DownWeights, EmbeddingWeights, FfnWeights, Gating,
    HeadWeights, HybridBackend, LayerId, LayerWeights, Linear, ModelSpec, NeuronSet, Norm, NormKind,
    NormWeights, Rope, RopeKind, RopeScaling, SeqId, Step, StepRow, TokenId, WeightBytes, WeightMatrix,
    WeightType,
};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure};
use powerinfer_testing::conformance::{self, Subject};
use powerinfer_testing::drive::Drive;
use powerinfer_testing::tiny::{Family, Random, TinyModel, TinyOptions};
use powerinfer_testing::tolerance::{NMSE_F16_KV, NMSE_F32, assert_close};

use budgets::Shape;
use no_traffic::NoTraffic;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn backend(spec: Arc<ModelSpec>, kv_type: CudaKvType) -> CudaBackend {
    let options = CudaOptions { kv_type, ..CudaOptions::default() };
    CudaBackend::new(spec, options).expect("the device has been found")
}

/// The device, for the engine.
fn device(options: CudaOptions) -> Device {
    Device::Other(MakeBackend::new(move |spec| {
        Ok(Box::new(CudaBackend::new(spec, options.clone())?) as Box<dyn HybridBackend>)
    }))
}

/// The emulated device, for the engine.
fn emulated() -> Device {
    Device::Other(MakeBackend::new(|spec| {
        Ok(Box::new(support::backend(&spec, CudaKvType::F16)) as Box<dyn HybridBackend>)
    }))
}

/// Shapes whose decoding is timed, the first one first.
const SHAPES: [Shape; 2] = [
    Shape { name: "1B", n_layer: 22, n_embd: 2048, n_ff: 5632, n_head: 16, n_vocab: 32000, latency: 2e-5 },
    Shape { name: "7B", n_layer: 32, n_embd: 4096, n_ff: 11008, n_head: 32, n_vocab: 32000, latency: 2e-5 },
];

const TOY: Shape =
    Shape { name: "toy", n_layer: 3, n_embd: 64, n_ff: 352, n_head: 4, n_vocab: 300, latency: 0.0 };

/// Steps launched as a graph and one by one have the same bits.
fn check_graphs() {
    for family in Family::ALL {
        let model = TinyModel::new(TinyOptions { family, ..TinyOptions::default() });
        let logits = [false, true].map(|without_graphs| {
            let options = CudaOptions { without_graphs, ..CudaOptions::default() };
            let spec = Arc::clone(&model.spec);
            let mut backend = CudaBackend::new(spec, options).expect("the device has been found");
            model.load_all(&mut backend);
            backend.reserve(SeqId(0), 600, 1).expect("there is memory");
            let n_steps = if family == Family::Opt { 40 } else { 300 };
            let mut all = Vec::new();
            for pos in 0..n_steps {
                let rows = [StepRow { seq: SeqId(0), pos, token: TokenId(pos * 37 % 96) }];
                let step = Step { rows: &rows, mode: ActiveMode::Predictor };
                backend.embed(&step);
                model.spec.layers().for_each(|layer| assert!(backend.whole_layer(layer, &step)));
                let mut logits = vec![0.0; 96];
                backend.head(0..1, &mut logits);
                all.extend(logits);
            }
            println!("graphs                  {}", backend.info().description);
            all
        });
        assert!(logits[0] == logits[1], "{family:?}: a graph computes something else");
    }
    println!("graphs                  ok");
}

/// Contracts, and types that the suite does not have.
fn check() {
    let make = |spec: Arc<ModelSpec>| -> Box<dyn HybridBackend> {
        Box::new(NoTraffic(Box::new(backend(spec, CudaKvType::F32))))
    };
    conformance::run(&Subject {
        make: &make,
        same_bits: &[&make],
        count_allocations: Some(&|work| measure(work).1.n_allocs),
        // Products are fused and the device has its own sine and exponential.
        nmse_limit: NMSE_F32,
        kv_value_bytes: 4,
    });
    println!("conformance             ok");
    for ty in [WeightType::F16, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0] {
        for family in Family::ALL {
            let options =
                TinyOptions { family, ffn_type: ty, dense_type: ty, n_ff: 352, ..TinyOptions::default() };
            let model = TinyModel::new(options);
            let tokens: Vec<u32> = (0..50).map(|i| i * 37 % 96).collect();
            let mut slow = ReferenceBackend::new(Arc::clone(&model.spec), Rounding::None);
            model.load_all(&mut slow);
            let mut slow = Drive::new(&model.spec, vec![&mut slow], 50);
            let want = slow.step(0, &tokens, ActiveMode::Exact);
            let mut fast = backend(Arc::clone(&model.spec), CudaKvType::F16);
            model.load_all(&mut fast);
            let mut fast = Drive::new(&model.spec, vec![&mut fast], 50);
            let got = fast.step(0, &tokens, ActiveMode::Exact);
            assert_close(&format!("{ty}, {family:?}"), got, want, NMSE_F16_KV);
        }
    }
    println!("types and families      ok");
}

const N_EMBD: usize = 4096;
const N_FF: usize = 11008;
const N_VOCAB: usize = 32000;
const N_LAYER: usize = 32;

/// The shape of a 7B model.
fn spec() -> ModelSpec {
    ModelSpec {
        arch: "llama".into(),
        n_layer: N_LAYER,
        n_embd: N_EMBD,
        n_ff: vec![N_FF; N_LAYER],
        n_head: 32,
        n_head_kv: 32,
        head_dim: 128,
        n_vocab: N_VOCAB,
        n_ctx_train: 4096,
        norm: Norm { kind: NormKind::Rms, eps: 1e-5 },
        block: BlockKind::Sequential,
        rope: Some(Rope::new(RopeKind::Interleaved, 128, 10000.0, &RopeScaling::None, None)),
        activation: Activation::Relu,
        gating: Gating::Gate,
        sparse_file: true,
    }
}

/// A matrix of random blocks with small scales: half of the gates are negative, so half of the neurons are silent.
fn matrix(name: &str, ty: WeightType, n_rows: usize, n_cols: usize) -> Result<WeightMatrix, Box<dyn Error>> {
    // Bytes of the high halves of f16 numbers that make them small.
    let scales: &[usize] = match ty {
        WeightType::F16 => &[0],
        WeightType::Q8_0 | WeightType::Q4_0 => &[0],
        WeightType::Q4_K => &[0, 2],
        WeightType::Q6_K => &[208],
        other => return Err(format!("{other} is not measured").into()),
    };
    let mut random = Random::new(n_rows as u64);
    let mut one_mib = vec![0u8; 1 << 20];
    one_mib.chunks_exact_mut(8).for_each(|c| c.copy_from_slice(&random.next_u64().to_le_bytes()));
    let n_bytes = ty.row_bytes(n_cols).ok_or("rows of whole blocks")? * n_rows;
    let mut bytes: Vec<u8> = one_mib.iter().copied().cycle().take(n_bytes).collect();
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        for &at in scales {
            block[at + 1] = block[at + 1] & 0x83 | 0x18;
        }
    }
    Ok(WeightMatrix::try_new(name, ty, n_rows, n_cols, WeightBytes::from_vec(bytes))?)
}

struct Model {
    backend: CudaBackend,
    spec: Arc<ModelSpec>,
    load_seconds: f64,
}

fn load(ty: WeightType) -> Result<Model, Box<dyn Error>> {
    let spec = Arc::new(spec());
    let mut backend = backend(Arc::clone(&spec), CudaKvType::F16);
    let norm = || NormWeights { weight: vec![1.0; N_EMBD], bias: None };
    let square = matrix("square", ty, N_EMBD, N_EMBD)?;
    let linear = || Linear { weight: square.clone(), bias: None };
    let ffn = FfnWeights {
        gate: Some(matrix("gate", ty, N_FF, N_EMBD)?),
        up: matrix("up", ty, N_FF, N_EMBD)?,
        up_bias: None,
        down: DownWeights::ByNeuron(matrix("down", ty, N_FF, N_EMBD)?),
    };
    let table = matrix("table", ty, N_VOCAB, N_EMBD)?;
    let start = Instant::now();
    backend.load_dense(DensePart::Embedding(EmbeddingWeights { token: table.clone(), position: None }))?;
    backend.load_dense(DensePart::Head(HeadWeights { norm: norm(), output: table }))?;
    for layer in (0..N_LAYER as u32).map(LayerId) {
        let weights = LayerWeights {
            attn_norm: norm(),
            attn_norm_2: None,
            q: linear(),
            k: linear(),
            v: linear(),
            output: linear(),
            ffn_norm: Some(norm()),
            ffn_down_bias: None,
        };
        backend.load_dense(DensePart::Layer(layer, Box::new(weights)))?;
        backend.load_ffn(layer, ffn.clone(), &NeuronSet::all(N_FF))?;
    }
    backend.reserve(SeqId(0), 1024, 256)?;
    Ok(Model { backend, spec, load_seconds: start.elapsed().as_secs_f64() })
}

impl Model {
    /// Runs a step of `n` tokens a few times, and says how long one took and what it read.
    fn step(&mut self, first: u32, n: u32, mode: ActiveMode, times: u32) -> (f64, f64) {
        let rows: Vec<StepRow> = (0..n)
            .map(|i| StepRow { seq: SeqId(0), pos: first + i, token: TokenId(i * 37 % N_VOCAB as u32) })
            .collect();
        let step = Step { rows: &rows, mode };
        let mut logits = vec![0.0; N_VOCAB];
        let mut start = Instant::now();
        for time in 0..=times {
            if time == 1 {
                // The first one warms up.
                self.backend.take_cost();
                start = Instant::now();
            }
            self.backend.embed(&step);
            for layer in self.spec.layers() {
                assert!(self.backend.whole_layer(layer, &step), "everything is on the device");
            }
            self.backend.head(rows.len() - 1..rows.len(), &mut logits);
        }
        let times = f64::from(times.max(1));
        let seconds = start.elapsed().as_secs_f64() / times;
        let cost = self.backend.take_cost();
        (seconds, (cost.weight_bytes + cost.kv_bytes) as f64 / times / 1e9)
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let has = |wanted: &str| std::env::args().any(|arg| arg == wanted);
    let say = &mut |line: String| println!("{line}");
    if has("--rehearse") {
        goldens::check(&emulated(), say)?;
        budgets::decode(TOY, &emulated(), 1 << 30, Duration::from_secs(60), say)?;
        return Ok(());
    }
    let mut free_bytes = None;
    for (device, found) in probe_devices()?.into_iter().enumerate() {
        match found {
            Ok(d) => {
                let (major, minor) = d.compute_capability;
                let [free, all] = [d.free_bytes, d.total_bytes].map(|n| n >> 20);
                println!("device {device}: {}, {major}.{minor}, {free} of {all} MiB free", d.name);
                if device == 0 {
                    free_bytes = Some(d.free_bytes);
                }
            }
            Err(reason) => println!("device {device}: {reason}"),
        }
    }
    let free_bytes = free_bytes.ok_or("the first device cannot be used")?;
    check();
    check_graphs();
    if has("--conformance") {
        return Ok(());
    }
    goldens::check(&device(CudaOptions::default()), say)?;
    let start = Instant::now();
    let mut copied = 0.0;
    println!(
        "7B shape, all on the device; GB/s of weights and keys, share of a device copy (read and write counted)"
    );
    println!("type   step                       ms    tokens/s     GB/s   of copy");
    for ty in [WeightType::F16, WeightType::Q8_0, WeightType::Q4_0, WeightType::Q4_K, WeightType::Q6_K] {
        if start.elapsed().as_secs() > 60 {
            println!("{ty}: left out, out of time");
            continue;
        }
        let mut model = load(ty)?;
        // Keys and values that are numbers.
        for first in [0, 256] {
            model.step(first, 256, ActiveMode::Exact, 0);
        }
        if copied == 0.0 {
            copied = 2.0 * 0.5 / model.backend.copy_seconds(500_000_000)?;
            println!("device copy of 0.5 GB: {copied:.0} GB/s");
        }
        println!("{ty}: {:.1} s to load, {} MiB used", model.load_seconds, model.backend.memory_used() >> 20);
        for (what, first, n, mode, times) in [
            ("decode, dense", 500, 1, ActiveMode::Dense, 20),
            ("decode, exact", 500, 1, ActiveMode::Exact, 20),
            ("batch of 4, exact", 500, 4, ActiveMode::Exact, 10),
            ("batch of 8, exact", 500, 8, ActiveMode::Exact, 10),
            ("prompt of 256, exact", 0, 256, ActiveMode::Exact, 2),
        ] {
            let (seconds, gb) = model.step(first, n, mode, times);
            println!(
                "{:<6} {what:<22} {:8.2} {:11.1} {:8.0} {:8.0} %",
                ty.name(),
                seconds * 1e3,
                f64::from(n) / seconds,
                gb / seconds,
                100.0 * gb / seconds / copied
            );
        }
    }
    println!(
        "the host rounds what Q4_0 rows are multiplied with to 8 bits, so texts of random models soon part from its own"
    );
    for shape in SHAPES {
        let left = Duration::from_secs(110).saturating_sub(start.elapsed());
        if left.as_secs() < 20 {
            println!("{}: left out, out of time", shape.name);
            continue;
        }
        budgets::decode(shape, &device(CudaOptions::default()), free_bytes, left / 2, say)?;
    }
    Ok(())
}
