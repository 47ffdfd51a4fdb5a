//! Decoding of a random model under several budgets of device memory.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use powerinfer_core::placement::{Accelerator, Bandwidth, Budget, Host, PlanOptions, Statistics};
use powerinfer_core::{CpuOptions, Device, LoadOptions, Model, SessionOptions, TokenId};
use powerinfer_gguf::{GgmlType, Magic};
use powerinfer_testing::tiny::Random;

use crate::model_file::TinyFile;

/// Shape of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) n_layer: usize,
    pub(crate) n_embd: usize,
    pub(crate) n_ff: usize,
    pub(crate) n_head: usize,
    pub(crate) n_vocab: usize,
    /// Seconds that the planner is told a transfer takes.
    pub(crate) latency: f64,
}

const N_CTX: usize = 256;
const N_TEXT: usize = 32;

/// A llama file with ReLU and random Q4_0 matrices whose scales are small; half of the neurons are silent.
pub(crate) fn random_model(shape: Shape) -> Result<Arc<[u8]>, Box<dyn Error>> {
    let Shape { n_layer, n_embd, n_ff, n_head, n_vocab, .. } = shape;
    let mut file = TinyFile::dense();
    // Down rows by neuron, so that a part of a layer can be on the device; no predictors.
    file.magic = Magic::Pwri;
    file.remove("llama.hidden_act");
    file.set("powerinfer.sparse_threshold", 0.0f32);
    for (key, value) in [
        ("block_count", n_layer),
        ("context_length", N_CTX),
        ("embedding_length", n_embd),
        ("feed_forward_length", n_ff),
        ("attention.head_count", n_head),
        ("attention.head_count_kv", n_head),
    ] {
        file.set(&format!("llama.{key}"), value as u32);
    }
    let mut random = Random::new(7);
    let mut noise = vec![0u8; 1 << 20];
    noise.chunks_exact_mut(8).for_each(|c| c.copy_from_slice(&random.next_u64().to_le_bytes()));
    let ty = GgmlType::Q4_0;
    let block_bytes = ty.row_bytes(32).ok_or("blocks of 32")?;
    let mut matrix =
        |file: &mut TinyFile, name: &str, n_cols: usize, n_rows: usize| -> Result<(), Box<dyn Error>> {
            let n_bytes = ty.row_bytes(n_cols).ok_or("rows of whole blocks")? * n_rows;
            let from = random.below(1 << 18);
            let mut bytes: Vec<u8> = noise.iter().copied().cycle().skip(from).take(n_bytes).collect();
            // The high half of each scale: about 2^-9, either sign.
            bytes.chunks_exact_mut(block_bytes).for_each(|block| block[1] = block[1] & 0x83 | 0x18);
            file.raw_tensor(name, &[n_cols, n_rows], ty, bytes);
            Ok(())
        };
    for name in ["token_embd.weight", "output.weight"] {
        matrix(&mut file, name, n_embd, n_vocab)?;
    }
    file.tensor("output_norm.weight", &[n_embd], vec![1.0; n_embd]);
    for layer in 0..n_layer {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        for norm in ["attn_norm", "ffn_norm"] {
            file.tensor(&name(norm), &[n_embd], vec![1.0; n_embd]);
        }
        for (part, n_cols, n_rows) in [
            ("attn_q", n_embd, n_embd),
            ("attn_k", n_embd, n_embd),
            ("attn_v", n_embd, n_embd),
            ("attn_output", n_embd, n_embd),
            ("ffn_gate", n_embd, n_ff),
            ("ffn_up", n_embd, n_ff),
        ] {
            matrix(&mut file, &name(part), n_cols, n_rows)?;
        }
        file.remove_tensor(&name("ffn_down"));
        matrix(&mut file, &name("ffn_down_t"), n_embd, n_ff)?;
    }
    for layer in n_layer..crate::model_file::N_LAYER {
        for part in [
            "attn_norm",
            "ffn_norm",
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        ] {
            file.remove_tensor(&format!("blk.{layer}.{part}.weight"));
        }
    }
    Ok(file.bytes().into())
}

/// Decodes with nothing, parts and all of the model on the device, while there is time, and tells a line for each. Returns
/// how many neurons each run had on the device.
pub(crate) fn decode(
    shape: Shape,
    device: &Device,
    free_bytes: u64,
    left: Duration,
    say: &mut dyn FnMut(String),
) -> Result<Vec<usize>, Box<dyn Error>> {
    let start = Instant::now();
    let file = random_model(shape)?;
    let whole = file.len() as u64;
    say(format!(
        "{}: {} MiB in the file, {:.1} s to make it",
        shape.name,
        whole >> 20,
        start.elapsed().as_secs_f64()
    ));
    say("budget MiB   planned MiB   neurons on the device   load s   prompt tok/s   decode tok/s   text as on the host".into());
    let mut before: Option<Vec<TokenId>> = None;
    let mut placed = Vec::new();
    for quarters in [0, 1, 2, 3, 6] {
        if start.elapsed() > left {
            say(format!("{quarters} quarters and more: left out, out of time"));
            break;
        }
        // What steps work in is a little more than the file.
        let budget = (whole + (8 << 20)) * quarters / 4;
        let plan = PlanOptions {
            host: Host { name: "host".into(), bandwidth: Bandwidth { dense: 60e9, gather: 50e9 } },
            devices: vec![Accelerator {
                name: "device".into(),
                free_bytes,
                budget: Budget::Bytes(budget),
                bandwidth: Bandwidth { dense: 1000e9, gather: 800e9 },
                link: 25e9,
                latency: shape.latency,
            }],
            statistics: Statistics::Unknown { rate: 0.5 },
            n_ctx: Some(N_CTX),
            n_seq: 1,
            neurons: true,
        };
        let options = LoadOptions {
            device: Device::Cpu(CpuOptions::default()),
            accelerators: vec![device.clone()],
            plan: Some(plan),
            n_batch: 64,
            allow_missing_predictors: true,
            ..LoadOptions::default()
        };
        let loading = Instant::now();
        let model = Model::from_bytes(Arc::clone(&file), &options)?;
        let load_seconds = loading.elapsed().as_secs_f64();
        let on_device = &model.placement().ok_or("a plan was asked for")?.devices[0];
        let (n_neurons, of_neurons) = (on_device.n_neurons, on_device.of_neurons);
        let planned = on_device.bytes.total();
        let prompt: Vec<TokenId> = (0..64).map(|i| TokenId(i * 37 % 250 + 3)).collect();
        let mut session =
            model.session(&SessionOptions { n_ctx: Some(N_CTX), ..SessionOptions::default() })?;
        let reading = Instant::now();
        let mut next = arg_max(session.prefill(&prompt)?);
        let prompt_seconds = reading.elapsed().as_secs_f64();
        let mut text = vec![next];
        // Graphs are made in the first.
        next = arg_max(session.decode(next)?);
        let decoding = Instant::now();
        for _ in 2..N_TEXT {
            text.push(next);
            next = arg_max(session.decode(next)?);
        }
        text.push(next);
        let decode_seconds = decoding.elapsed().as_secs_f64();
        let same =
            before.as_ref().map_or(text.len(), |b| b.iter().zip(&text).take_while(|(a, b)| a == b).count());
        say(format!(
            "{:>10}   {:>11}   {n_neurons:>10} of {of_neurons:>7}   {load_seconds:>6.1}   {:>12.1}   {:>12.1}   {same} of {}",
            budget >> 20,
            planned >> 20,
            prompt.len() as f64 / prompt_seconds,
            (N_TEXT - 2) as f64 / decode_seconds,
            text.len(),
        ));
        if n_neurons == 0 {
            on_device.reasons.iter().for_each(|reason| say(format!("    {reason}")));
        }
        before = before.or(Some(text));
        placed.push(n_neurons);
    }
    Ok(placed)
}

fn arg_max(logits: &[f32]) -> TokenId {
    let best = (0..logits.len()).reduce(|best, ix| if logits[ix] > logits[best] { ix } else { best });
    TokenId(best.unwrap_or(0) as u32)
}
