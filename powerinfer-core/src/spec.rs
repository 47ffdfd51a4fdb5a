//! From metadata to [`ModelSpec`]: which families there are and what their keys mean.

use powerinfer_gguf::{GgufModel, Magic};
use powerinfer_sparse_ops::{
    Activation, BlockKind, Gating, ModelSpec, Norm, NormKind, Rope, RopeKind, RopeScaling,
};

use crate::load::{LoadError, LoadOptions, Notes};

/// The families that the forward pass knows, by `general.architecture`.
pub const SUPPORTED_ARCHS: [&str; 4] = ["llama", "bamboo", "falcon", "opt"];

/// What a family is, before any number is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Family {
    pub(crate) arch: &'static str,
    norm: NormKind,
    /// `None` where the original engine reads no epsilon and uses 0.
    eps_key: &'static str,
    eps_default: Option<f32>,
    block: BlockKind,
    rope: Option<RopeKind>,
    gating: Gating,
    /// Activation of a dense file that does not name one.
    dense_activation: Activation,
    /// Queries, keys and values in one tensor.
    pub(crate) fused_qkv: bool,
    /// Biases on every linear map, which are then required.
    pub(crate) biases: bool,
    /// The position of the first row that is used in the table of learned positions.
    pub(crate) first_position_row: Option<usize>,
}

const LLAMA: Family = Family {
    arch: "llama",
    norm: NormKind::Rms,
    eps_key: "attention.layer_norm_rms_epsilon",
    eps_default: None,
    block: BlockKind::Sequential,
    rope: Some(RopeKind::Interleaved),
    gating: Gating::Gate,
    dense_activation: Activation::Silu,
    fused_qkv: false,
    biases: false,
    first_position_row: None,
};

const FAMILIES: [Family; 4] = [
    LLAMA,
    Family { arch: "bamboo", gating: Gating::GateAndUp, dense_activation: Activation::Relu, ..LLAMA },
    Family {
        arch: "falcon",
        norm: NormKind::Layer,
        eps_key: "attention.layer_norm_epsilon",
        block: BlockKind::Parallel,
        rope: Some(RopeKind::Halves),
        gating: Gating::None,
        dense_activation: Activation::Gelu,
        fused_qkv: true,
        ..LLAMA
    },
    Family {
        arch: "opt",
        norm: NormKind::Layer,
        eps_key: "attention.layer_norm_epsilon",
        // Files of the original carry no epsilon for opt, and the original computes with 0.
        eps_default: Some(0.0),
        rope: None,
        gating: Gating::None,
        dense_activation: Activation::Relu,
        biases: true,
        first_position_row: Some(2),
        ..LLAMA
    },
];

/// Limit on layers, far above any model, far below what a broken file may claim.
const MAX_LAYERS: u32 = 4096;

impl Family {
    pub(crate) fn of(file: &GgufModel) -> Result<&'static Self, LoadError> {
        let arch = file.metadata().require::<&str>("general.architecture")?;
        FAMILIES.iter().find(|f| f.arch == arch).ok_or_else(|| LoadError::UnsupportedArch {
            arch: arch.chars().take(64).collect(),
            supported: SUPPORTED_ARCHS.join(", "),
        })
    }
}

/// Reads the keys `<arch>.…` under the rules that make a model.
struct Keys<'f> {
    file: &'f GgufModel,
    arch: &'static str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    /// A number, or a list of which every entry is the same number.
    fn optional_u32(&self, name: &str) -> Result<Option<u32>, LoadError> {
        let key = self.key(name);
        let Some(values) = self.file.metadata().u32_or_array(&key)? else { return Ok(None) };
        match values.split_first() {
            Some((&first, rest)) if rest.iter().all(|&v| v == first) => Ok(Some(first)),
            _ => Err(self.bad(
                name,
                "must be one number, or the same one for every layer",
                &format!("{values:?}"),
            )),
        }
    }

    fn u32(&self, name: &str) -> Result<u32, LoadError> {
        self.optional_u32(name)?.ok_or_else(|| LoadError::MissingKey { key: self.key(name) })
    }

    /// A number in `1..=limit`.
    fn positive(&self, name: &str, limit: u32) -> Result<usize, LoadError> {
        let value = self.u32(name)?;
        self.in_range(name, value, limit)
    }

    fn in_range(&self, name: &str, value: u32, limit: u32) -> Result<usize, LoadError> {
        if value == 0 || value > limit {
            return Err(self.bad(name, &format!("must be in 1..={limit}"), &value.to_string()));
        }
        Ok(value as usize)
    }

    fn optional_f32(&self, name: &str) -> Result<Option<f32>, LoadError> {
        let Some(value) = self.file.metadata().find::<f32>(&self.key(name))? else { return Ok(None) };
        if !value.is_finite() {
            return Err(self.bad(name, "must be a finite number", &value.to_string()));
        }
        Ok(Some(value))
    }

    fn bad(&self, name: &str, rule: &str, got: &str) -> LoadError {
        LoadError::BadValue {
            key: self.key(name),
            rule: rule.to_owned(),
            got: got.chars().take(80).collect(),
        }
    }
}

/// Builds the description of the model in `file`; the widths of tensors are checked against it later.
pub(crate) fn read_spec(
    file: &GgufModel,
    family: &'static Family,
    options: &LoadOptions,
    notes: &mut Notes,
) -> Result<ModelSpec, LoadError> {
    let keys = Keys { file, arch: family.arch };
    let n_layer = keys.positive("block_count", MAX_LAYERS)?;
    let n_embd = keys.positive("embedding_length", 1 << 20)?;
    let n_head = keys.positive("attention.head_count", 1 << 16)?;
    let n_head_kv = match keys.optional_u32("attention.head_count_kv")? {
        Some(n) => keys.in_range("attention.head_count_kv", n, n_head as u32)?,
        None => n_head,
    };
    if !n_head.is_multiple_of(n_head_kv) {
        let rule = format!("must divide the {n_head} heads");
        return Err(keys.bad("attention.head_count_kv", &rule, &n_head_kv.to_string()));
    }
    let head_dim = match keys.optional_u32("attention.key_length")? {
        Some(n) => keys.in_range("attention.key_length", n, 1 << 16)?,
        None if n_embd.is_multiple_of(n_head) => n_embd / n_head,
        None => {
            let rule = format!("must divide the width {n_embd}");
            return Err(keys.bad("attention.head_count", &rule, &n_head.to_string()));
        }
    };
    if let Some(value) = keys.optional_u32("attention.value_length")?
        && value as usize != head_dim
    {
        let rule = format!("must equal the key length {head_dim}");
        return Err(keys.bad("attention.value_length", &rule, &value.to_string()));
    }
    if keys.optional_u32("expert_count")?.is_some_and(|n| n > 0) {
        return Err(keys.bad("expert_count", "must be 0: mixtures of experts are not supported", "more"));
    }
    let n_vocab = crate::load::tensor_rows(file, family, "token_embd.weight")?;
    let n_ctx_train = match family.first_position_row {
        // The table is what limits positions, whatever the key says.
        Some(first) => crate::load::tensor_rows(file, family, "position_embd.weight")?.saturating_sub(first),
        None => keys.positive("context_length", 1 << 30)?,
    };
    Ok(ModelSpec {
        arch: family.arch.to_owned(),
        n_layer,
        n_embd,
        n_ff: n_ff(&keys, n_layer)?,
        n_head,
        n_head_kv,
        head_dim,
        n_vocab,
        n_ctx_train,
        norm: Norm { kind: family.norm, eps: eps(&keys, family)? },
        block: family.block,
        rope: family.rope.map(|kind| rope(&keys, kind, head_dim, n_ctx_train)).transpose()?,
        activation: activation(&keys, family, options, notes)?,
        gating: family.gating,
        sparse_file: file.magic() == Magic::Pwri,
    })
}

fn n_ff(keys: &Keys<'_>, n_layer: usize) -> Result<Vec<usize>, LoadError> {
    const NAME: &str = "feed_forward_length";
    let key = keys.key(NAME);
    let values = keys.file.metadata().u32_or_array(&key)?.ok_or(LoadError::MissingKey { key })?;
    let values: Vec<usize> =
        values.iter().map(|&v| keys.in_range(NAME, v, 1 << 24)).collect::<Result<_, _>>()?;
    match values.len() {
        1 => Ok(vec![values[0]; n_layer]),
        n if n == n_layer => Ok(values),
        n => Err(keys.bad(NAME, &format!("must have 1 or {n_layer} entries"), &format!("{n} entries"))),
    }
}

fn eps(keys: &Keys<'_>, family: &Family) -> Result<f32, LoadError> {
    match (keys.optional_f32(family.eps_key)?, family.eps_default) {
        (Some(eps), Some(_)) if eps >= 0.0 => Ok(eps),
        (Some(eps), None) if eps > 0.0 => Ok(eps),
        (Some(eps), _) => Err(keys.bad(family.eps_key, "must be over 0", &eps.to_string())),
        (None, Some(eps)) => Ok(eps),
        (None, None) => Err(LoadError::MissingKey { key: keys.key(family.eps_key) }),
    }
}

fn rope(keys: &Keys<'_>, kind: RopeKind, head_dim: usize, n_ctx_train: usize) -> Result<Rope, LoadError> {
    let n_rot = keys.optional_u32("rope.dimension_count")?.unwrap_or(head_dim as u32) as usize;
    if n_rot == 0 || n_rot > head_dim || !n_rot.is_multiple_of(2) {
        let rule = format!("must be even and in 2..={head_dim}");
        return Err(keys.bad("rope.dimension_count", &rule, &n_rot.to_string()));
    }
    let base = keys.optional_f32("rope.freq_base")?.unwrap_or(10_000.0);
    if base <= 1.0 {
        return Err(keys.bad("rope.freq_base", "must be over 1", &base.to_string()));
    }
    let scaling = rope_scaling(keys, n_ctx_train)?;
    let factors = crate::load::optional_vector(keys.file, "rope_freqs.weight", n_rot / 2)?;
    if let Some(factors) = &factors
        && let Some(bad) = factors.iter().find(|f| !(f.is_finite() && **f > 0.0))
    {
        return Err(keys.bad("rope_freqs.weight", "must hold factors over 0", &bad.to_string()));
    }
    Ok(Rope::new(kind, n_rot, base, &scaling, factors.as_deref()))
}

fn rope_scaling(keys: &Keys<'_>, n_ctx_train: usize) -> Result<RopeScaling, LoadError> {
    let factor = match keys.optional_f32("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The older name of the same number.
        None => keys.optional_f32("rope.scale_linear")?,
    };
    // 0 is written by converters for "none".
    let factor = factor.filter(|&f| f != 0.0).unwrap_or(1.0);
    if factor <= 0.0 {
        return Err(keys.bad("rope.scaling.factor", "must be over 0", &factor.to_string()));
    }
    let kind = keys.file.metadata().find::<&str>(&keys.key("rope.scaling.type"))?;
    match kind.unwrap_or("linear") {
        "none" => Ok(RopeScaling::None),
        "linear" if factor == 1.0 => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor }),
        "yarn" => Ok(RopeScaling::Yarn {
            factor,
            original_context: keys
                .optional_u32("rope.scaling.original_context_length")?
                .unwrap_or(n_ctx_train as u32)
                .max(1),
            ext_factor: keys.optional_f32("rope.scaling.yarn_ext_factor")?.unwrap_or(1.0),
            attn_factor: keys.optional_f32("rope.scaling.yarn_attn_factor")?.unwrap_or(1.0),
            beta_fast: keys.optional_f32("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: keys.optional_f32("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        }),
        other => Err(keys.bad("rope.scaling.type", "must be none, linear or yarn", other)),
    }
}

/// The rule that is written down at [`crate::Model`], said in a note each time.
///
/// A `PWRI` file whose activation has no exact zeros is refused: its predictors would leave out neurons that are
/// not zero.
fn activation(
    keys: &Keys<'_>,
    family: &Family,
    options: &LoadOptions,
    notes: &mut Notes,
) -> Result<Activation, LoadError> {
    let meta = keys.file.metadata();
    let key = keys.key("hidden_act");
    let sparse = keys.file.magic() == Magic::Pwri;
    let (activation, why) = if let Some(activation) = options.activation {
        (activation, "as asked for".to_owned())
    } else if let Some(name) = meta.find::<&str>(&key)? {
        let activation = match name {
            "relu" => Activation::Relu,
            "silu" | "swish" => Activation::Silu,
            "gelu" | "gelu_new" | "gelu_pytorch_tanh" => Activation::Gelu,
            other => return Err(keys.bad("hidden_act", "must be relu, silu or gelu", other)),
        };
        (activation, format!("key `{key}`"))
    } else if sparse {
        (Activation::Relu, "a PWRI file".to_owned())
    } else {
        let name = meta.find::<&str>("general.name")?.unwrap_or_default().to_lowercase();
        let relu_kind = ["relu", "reglu", "prosparse", "turbosparse"].iter().any(|s| name.contains(s));
        if family.dense_activation != Activation::Relu && relu_kind {
            return Err(LoadError::ActivationUnclear {
                key,
                name: name.chars().take(64).collect(),
                default: family.dense_activation.name(),
            });
        }
        (family.dense_activation, format!("default of `{}`, the file has no key `{key}`", family.arch))
    };
    if sparse && !activation.has_exact_zeros() {
        return Err(LoadError::SparseActivation { activation: activation.name() });
    }
    notes.info(format!("activation {} ({why})", activation.name()));
    Ok(activation)
}
