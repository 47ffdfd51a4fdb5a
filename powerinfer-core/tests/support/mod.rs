//! A toy llama file in memory, whose keys and tensors tests change one at a time.
#![allow(dead_code, reason = "each test binary uses a part")]

use powerinfer_core::{LoadError, LoadOptions, Model};
use powerinfer_gguf::{GgmlType, GgufWriter, Magic, Value};
use powerinfer_testing::tiny::Random;

pub(crate) const N_LAYER: usize = 12;
pub(crate) const N_EMBD: usize = 64;
pub(crate) const N_FF: usize = 96;
pub(crate) const N_VOCAB: usize = 300;
pub(crate) const N_CTX: usize = 64;
const RANK: usize = 8;

/// Keys and tensors of a file that is not written yet.
pub(crate) struct TinyFile {
    pub(crate) magic: Magic,
    keys: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
}

impl TinyFile {
    /// A dense file with ReLU by its key: 12 layers, so that the order of numbers and of text differ.
    pub(crate) fn dense() -> Self {
        let mut file = Self { magic: Magic::Gguf, keys: Vec::new(), tensors: Vec::new() };
        for (key, value) in [
            ("general.architecture", Value::from("llama")),
            ("llama.block_count", Value::from(N_LAYER as u32)),
            ("llama.context_length", Value::from(N_CTX as u32)),
            ("llama.embedding_length", Value::from(N_EMBD as u32)),
            ("llama.feed_forward_length", Value::from(N_FF as u32)),
            ("llama.attention.head_count", Value::from(4u32)),
            ("llama.attention.head_count_kv", Value::from(2u32)),
            ("llama.attention.layer_norm_rms_epsilon", Value::from(1e-5f32)),
            ("llama.hidden_act", Value::from("relu")),
            ("tokenizer.ggml.model", Value::from("llama")),
            ("tokenizer.ggml.bos_token_id", Value::from(1u32)),
            ("tokenizer.ggml.eos_token_id", Value::from(2u32)),
        ] {
            file.set(key, value);
        }
        let (tokens, scores, types) = vocabulary();
        file.set("tokenizer.ggml.tokens", tokens);
        file.set("tokenizer.ggml.scores", scores);
        file.set("tokenizer.ggml.token_type", types);

        let mut random = Random::new(4);
        let mut matrix = |file: &mut Self, name: &str, n_cols: usize, n_rows: usize| {
            let values = random.normals(n_cols * n_rows, 1.5 / (n_cols as f32).sqrt());
            file.tensor(name, &[n_cols, n_rows], values);
        };
        matrix(&mut file, "token_embd.weight", N_EMBD, N_VOCAB);
        matrix(&mut file, "output.weight", N_EMBD, N_VOCAB);
        file.tensor("output_norm.weight", &[N_EMBD], vec![1.0; N_EMBD]);
        for layer in 0..N_LAYER {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            for norm in ["attn_norm", "ffn_norm"] {
                file.tensor(&name(norm), &[N_EMBD], vec![1.0; N_EMBD]);
            }
            for (part, n_cols, n_rows) in [
                ("attn_q", N_EMBD, N_EMBD),
                ("attn_k", N_EMBD, N_EMBD / 2),
                ("attn_v", N_EMBD, N_EMBD / 2),
                ("attn_output", N_EMBD, N_EMBD),
                ("ffn_gate", N_EMBD, N_FF),
                ("ffn_up", N_EMBD, N_FF),
                ("ffn_down", N_FF, N_EMBD),
            ] {
                matrix(&mut file, &name(part), n_cols, n_rows);
            }
        }
        file
    }

    /// The same weights as a PWRI file with predictors.
    pub(crate) fn sparse() -> Self {
        let mut file = Self::dense();
        file.magic = Magic::Pwri;
        file.remove("llama.hidden_act");
        file.set("powerinfer.sparse_threshold", 0.25f32);
        let mut random = Random::new(5);
        for layer in 0..N_LAYER {
            let (ix, down) = file.find(&format!("blk.{layer}.ffn_down.weight"));
            file.tensors.remove(ix);
            let by_neuron =
                (0..N_FF).flat_map(|j| (0..N_EMBD).map(move |e| (j, e))).map(|(j, e)| down[e * N_FF + j]);
            file.tensor(&format!("blk.{layer}.ffn_down_t.weight"), &[N_EMBD, N_FF], by_neuron.collect());
            let fc1 = random.normals(N_EMBD * RANK, 0.2);
            let fc2 = random.normals(RANK * N_FF, 0.5);
            file.tensor(&format!("blk.{layer}.fc1.weight"), &[N_EMBD, RANK], fc1);
            file.tensor(&format!("blk.{layer}.fc2.weight"), &[RANK, N_FF], fc2);
        }
        file
    }

    /// Sets a key, in the place of the one that was there.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.remove(key);
        self.keys.push((key.to_owned(), value.into()));
        self
    }

    pub(crate) fn remove(&mut self, key: &str) -> &mut Self {
        self.keys.retain(|(k, _)| k != key);
        self
    }

    /// Sets a tensor, in the place of the one that was there.
    pub(crate) fn tensor(&mut self, name: &str, dims: &[usize], values: Vec<f32>) -> &mut Self {
        assert_eq!(values.len(), dims.iter().product::<usize>(), "{name}");
        self.remove_tensor(name);
        self.tensors.push((name.to_owned(), dims.to_vec(), values));
        self
    }

    pub(crate) fn remove_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|(n, ..)| n != name);
        self
    }

    fn find(&self, name: &str) -> (usize, Vec<f32>) {
        let ix = self.tensors.iter().position(|(n, ..)| n == name).unwrap();
        (ix, self.tensors[ix].2.clone())
    }

    pub(crate) fn values(&self, name: &str) -> Vec<f32> {
        self.find(name).1
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut writer = GgufWriter::new(self.magic);
        for (key, value) in &self.keys {
            writer.key(key, value.clone()).unwrap();
        }
        for (name, dims, values) in &self.tensors {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            writer.tensor(name, dims, GgmlType::F32, bytes).unwrap();
        }
        writer.into_bytes().unwrap()
    }

    pub(crate) fn load(&self) -> Result<Model, LoadError> {
        self.load_with(&LoadOptions::default())
    }

    pub(crate) fn load_with(&self, options: &LoadOptions) -> Result<Model, LoadError> {
        Model::from_bytes(self.bytes(), options)
    }

    /// The error of loading it.
    pub(crate) fn error(&self) -> LoadError {
        self.load().expect_err("this file must not load")
    }
}

/// Three special tokens, 256 bytes, letters.
fn vocabulary() -> (Vec<String>, Vec<f32>, Vec<i32>) {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut types = vec![2, 3, 3];
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    types.resize(tokens.len(), 6);
    tokens.push("\u{2581}".to_owned());
    tokens.extend(('a'..='z').map(String::from));
    let mut n = 0;
    while tokens.len() < N_VOCAB {
        tokens.push(format!("\u{2581}{}", char::from(b'a' + n)));
        n += 1;
    }
    types.resize(N_VOCAB, 1);
    let scores = (0..N_VOCAB).map(|ix| -(ix as f32)).collect();
    (tokens, scores, types)
}
