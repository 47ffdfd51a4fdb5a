//! A toy llama file in memory, whose keys and tensors tests change one at a time.
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod split;

use powerinfer_core::{LoadError, LoadOptions, Model};
use powerinfer_gguf::{GgmlType, GgufFile, GgufModel, GgufWriter, Magic, Value};
use powerinfer_sparse_ops::WeightType;
use powerinfer_testing::tiny::{Random, encoded};

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
    tensors: Vec<TinyTensor>,
}

struct TinyTensor {
    name: String,
    dims: Vec<usize>,
    ty: GgmlType,
    bytes: Vec<u8>,
}

impl TinyTensor {
    fn values(&self) -> Vec<f32> {
        assert_eq!(self.ty, GgmlType::F32, "{}", self.name);
        self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
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
            let down = file.values(&format!("blk.{layer}.ffn_down.weight"));
            file.remove_tensor(&format!("blk.{layer}.ffn_down.weight"));
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
        self.raw_tensor(name, dims, GgmlType::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// Sets a tensor of any type by its bytes.
    pub(crate) fn raw_tensor(
        &mut self,
        name: &str,
        dims: &[usize],
        ty: GgmlType,
        bytes: Vec<u8>,
    ) -> &mut Self {
        self.remove_tensor(name);
        self.tensors.push(TinyTensor { name: name.to_owned(), dims: dims.to_vec(), ty, bytes });
        self
    }

    /// Sets a tensor of any type to zeros in bytes, in the shape of the one that is there.
    pub(crate) fn zero_bytes(&mut self, name: &str, ty: GgmlType) -> &mut Self {
        let dims = self.find(name).dims.clone();
        let n_rows: usize = dims[1..].iter().product();
        let n_bytes = n_rows * ty.row_bytes(dims[0]).unwrap();
        self.raw_tensor(name, &dims, ty, vec![0; n_bytes])
    }

    /// Encodes every F32 matrix whose name has one of these parts.
    pub(crate) fn encode(&mut self, ty: WeightType, parts: &[&str]) -> &mut Self {
        let wanted = |name: &str| parts.iter().any(|part| name.contains(&format!("{part}.")));
        let mut n_encoded = 0;
        for tensor in self.tensors.iter_mut().filter(|t| t.dims.len() == 2 && wanted(&t.name)) {
            let (n_cols, n_rows) = (tensor.dims[0], tensor.dims[1]);
            let matrix = encoded(&tensor.name, ty, n_rows, n_cols, &tensor.values());
            (tensor.ty, tensor.bytes) = (ty.into(), matrix.bytes().to_vec());
            n_encoded += 1;
        }
        assert!(n_encoded > 0, "{parts:?}");
        self
    }

    pub(crate) fn remove_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|t| t.name != name);
        self
    }

    fn find(&self, name: &str) -> &TinyTensor {
        self.tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor `{name}`"))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.name == name)
    }

    pub(crate) fn values(&self, name: &str) -> Vec<f32> {
        self.find(name).values()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut writer = GgufWriter::new(self.magic);
        for (key, value) in &self.keys {
            writer.key(key, value.clone()).unwrap();
        }
        for TinyTensor { name, dims, ty, bytes } in &self.tensors {
            writer.tensor(name, dims, *ty, &bytes[..]).unwrap();
        }
        writer.into_bytes().unwrap()
    }

    pub(crate) fn load(&self) -> Result<Model, LoadError> {
        self.load_with(&LoadOptions::default())
    }

    pub(crate) fn load_with(&self, options: &LoadOptions) -> Result<Model, LoadError> {
        Model::from_bytes(self.bytes(), options)
    }

    /// The file, opened.
    pub(crate) fn model(&self) -> GgufModel {
        GgufModel::from(GgufFile::from_bytes(self.bytes()).unwrap())
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
