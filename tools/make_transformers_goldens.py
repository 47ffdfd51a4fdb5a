#!/usr/bin/env python3
"""Tiny random models of each family, with the float32 logits that Hugging Face transformers gives for them.

For every model the script builds a seeded transformers model on the CPU, computes the logits of a fixed list of token
ids, and writes three files:

    NAME.gguf         F32 weights, named and laid out as llama.cpp's converter does, plus `<arch>.hidden_act`
    NAME.logits.f32   little-endian float32, shape `logits_shape` = [n_ids, n_vocab], row i = after ids[0..=i]
    NAME.json         ids, shape, tolerances, measured spreads, versions

It then reads each GGUF back and runs it through a small float64 forward pass in this file, which shares no code with
transformers; a disagreement fails the run. `--check-llama-cpp` also compares with llama.cpp where llama.cpp can compute
the same function (see `llama_cpp_checks`).

Usage:
    python tools/make_transformers_goldens.py           # rewrites powerinfer-core/tests/data/transformers
    python tools/make_transformers_goldens.py --out DIR --only llama-silu
    python tools/make_transformers_goldens.py --out DIR --check-llama-cpp

Packages (a virtual environment outside the repository):
    pip install torch transformers gguf   # torch's wheel brings CUDA packages unused here: 5.5 GB installed
    pip install llama-cpp-python==0.3.36         # only for --check-llama-cpp; compiles llama.cpp

Weights and ids come from numpy generators seeded by the model's name, so another torch gives the same files up to the
last bits of the logits.
"""
import argparse
import hashlib
import json
import math
import sys
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "powerinfer-core/tests/data/transformers"
SIZE_LIMIT_BYTES = 2_500_000
OPT_EPSILON = 1e-5  # fixed inside transformers' OPT
OPT_SHRINK = 16.0


# --------------------------------------------------------------------------------------------- model definitions

@dataclass
class Spec:
    """One model: how to build it in transformers and what to say about it in the file."""

    name: str
    family: str  # llama | mistral | falcon | opt
    n_embd: int = 64
    n_ff: int = 96
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 4
    n_vocab: int = 96
    n_ctx: int = 256
    n_ids: int = 20
    act: str = "relu"
    tied: bool = False
    eps: float = 1e-2  # larger than usual, so that leaving it out shows
    rope_theta: float = 10000.0
    rope: dict = field(default_factory=dict)
    new_decoder: bool = False  # falcon 40B style: grouped queries, two norms
    notes: str = ""

    @property
    def arch(self):
        return "llama" if self.family == "mistral" else self.family

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


# rope variants: two heads of 32, so that the yarn ramp runs strictly inside the head (dimensions 4 to 11 of 16)
ROPE = dict(family="llama", act="silu", n_ff=64, n_head=2, n_head_kv=1, tied=True, n_ids=24, eps=1e-3)

SPECS = [
    Spec("llama-relu", "llama", notes="ReLU in the gated FFN, no grouped queries, own output matrix"),
    Spec("llama-silu", "llama", act="silu", n_head_kv=2, tied=True, eps=1e-3, rope_theta=500000.0,
         notes="SiLU, grouped queries, output tied to token_embd, epsilon 1e-3"),
    Spec("llama-rope-llama3", **ROPE, n_ctx=512,
         rope=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64),
         notes="llama3 rope scaling, stored as rope_freqs.weight: every rotation angle is divided by it"),
    Spec("llama-rope-linear", **ROPE, n_ctx=512, rope=dict(rope_type="linear", factor=2.5),
         notes="linear rope scaling: positions divided by 2.5"),
    Spec("llama-rope-yarn", **ROPE, n_ctx=8192,
         rope=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048),
         notes="yarn: beta 32/1, ramp ends rounded outwards (floor, ceil); cos and sin multiplied by 0.1*ln(factor)+1"),
    Spec("mistral", "mistral", act="silu", n_head_kv=1, n_ff=64,
         notes="Mistral without a sliding window, arch llama in the file, one key/value head"),
    Spec("falcon-7b-style", "falcon", n_ff=128, n_head_kv=1,
         notes="multi-query, parallel attention and FFN after one norm; ReLU instead of Falcon's GELU"),
    Spec("falcon-40b-style", "falcon", n_ff=128, n_head_kv=2, new_decoder=True,
         notes="grouped queries, two norms: ln_mlp is attn_norm, ln_attn is attn_norm_2; ReLU instead of GELU"),
    Spec("opt", "opt", tied=True, n_ctx=64,
         notes="biases, learned positions (table row = position + 2, all 66 rows kept, context_length counts them), "
               "output tied to token_embd, epsilon in opt.attention.layer_norm_epsilon"),
]


def build(spec):
    """The transformers model of `spec`, float32, eager attention, seeded weights."""
    import torch
    import transformers as tf

    common = dict(vocab_size=spec.n_vocab, hidden_size=spec.n_embd, tie_word_embeddings=spec.tied,
                  bos_token_id=1, eos_token_id=2, pad_token_id=None, attn_implementation="eager")
    rope = dict(rope_type="default", rope_theta=spec.rope_theta) | spec.rope
    if spec.family in ("llama", "mistral"):
        kind = dict(llama=(tf.LlamaConfig, tf.LlamaForCausalLM), mistral=(tf.MistralConfig, tf.MistralForCausalLM))
        config_type, model_type = kind[spec.family]
        extra = dict(sliding_window=None) if spec.family == "mistral" else {}
        config = config_type(**common, **extra, intermediate_size=spec.n_ff, num_hidden_layers=spec.n_layer,
                             num_attention_heads=spec.n_head, num_key_value_heads=spec.n_head_kv,
                             max_position_embeddings=spec.n_ctx, hidden_act=spec.act, rms_norm_eps=spec.eps,
                             rope_parameters=rope)
    elif spec.family == "falcon":
        model_type = tf.FalconForCausalLM
        config = tf.FalconConfig(**common, num_hidden_layers=spec.n_layer, num_attention_heads=spec.n_head,
                                 num_kv_heads=spec.n_head_kv, new_decoder_architecture=spec.new_decoder,
                                 multi_query=True, parallel_attn=True, bias=False, alibi=False,
                                 ffn_hidden_size=spec.n_ff, activation=spec.act, layer_norm_epsilon=spec.eps,
                                 max_position_embeddings=spec.n_ctx, rope_parameters=rope,
                                 attention_dropout=0.0, hidden_dropout=0.0)
    else:
        model_type = tf.OPTForCausalLM
        config = tf.OPTConfig(**common, ffn_dim=spec.n_ff, num_hidden_layers=spec.n_layer,
                              num_attention_heads=spec.n_head, max_position_embeddings=spec.n_ctx,
                              activation_function=spec.act, do_layer_norm_before=True, enable_bias=True,
                              word_embed_proj_dim=spec.n_embd, dropout=0.0, attention_dropout=0.0, layerdrop=0.0)
    model = model_type(config).eval()
    rng = np.random.default_rng(zlib.crc32(spec.name.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(random_weight(rng, spec, name, tuple(parameter.shape))))
    return model


def random_weight(rng, spec, name, shape):
    """Weights of a size that lets logits vary (std about 1) and attention prefer some positions."""
    noise, gain = rng.standard_normal(shape), 1.0
    if len(shape) == 1:
        # OPT's epsilon is small and fixed: small embeddings make it count, a large last norm restores the logits
        gain = OPT_SHRINK if name.startswith("model.decoder.final_layer_norm") else 1.0
        return (gain * (noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))).astype(np.float32)
    if "embed" in name:
        gain = 1.0 / OPT_SHRINK if spec.family == "opt" else 1.0
        return (gain * noise * (spec.n_embd ** -0.5 if spec.tied else 1.0)).astype(np.float32)
    if any(part in name for part in ("q_proj", "k_proj", "query_key_value")):
        gain = 1.5
    if any(part in name for part in ("down_proj", "fc2", "dense_4h_to_h")):
        gain = 1.5  # the activation before it halves the variance
    return (noise * gain * shape[1] ** -0.5).astype(np.float32)


def token_ids(spec):
    rng = np.random.default_rng(zlib.crc32(spec.name.encode()) + 1)
    return [1] + [int(i) for i in rng.integers(3, spec.n_vocab, spec.n_ids - 1)]


def transformers_logits(model, ids, dtype):
    import torch
    with torch.no_grad():
        return model.to(dtype)(torch.tensor([ids]), use_cache=False).logits[0].numpy()


# ------------------------------------------------------------------------------------------- conversion to GGUF

def interleave(w, n_head):
    """Rows of a Q or K matrix: transformers rotates halves of a head, llama.cpp's llama neighbouring pairs."""
    rows, cols = w.shape
    return w.reshape(n_head, 2, rows // n_head // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def fused_qkv(w, spec):
    """Falcon's groups of (q ... q, k, v) heads to all Q rows, then all K rows, then all V rows."""
    per_group = spec.n_head // spec.n_head_kv + 2
    groups = w.reshape(spec.n_head_kv, per_group, spec.head_dim, spec.n_embd)
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([part.reshape(-1, spec.n_embd) for part in parts])


def llama_tensors(weights, spec):
    out = {"token_embd.weight": weights["model.embed_tokens.weight"],
           "output_norm.weight": weights["model.norm.weight"]}
    if not spec.tied:
        out["output.weight"] = weights["lm_head.weight"]
    if spec.rope.get("rope_type") == "llama3":
        out["rope_freqs.weight"] = llama3_factors(spec)
    names = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    for layer in range(spec.n_layer):
        for ours, theirs in names.items():
            w = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                w = interleave(w, spec.n_head if ours == "attn_q" else spec.n_head_kv)
            out[f"blk.{layer}.{ours}.weight"] = w
    return out


def llama3_factors(spec):
    """What each rotation angle is divided by: 1 for short wavelengths, `factor` for long ones, smooth between."""
    rope, half = spec.rope, spec.head_dim // 2
    wavelength = 2 * math.pi * spec.rope_theta ** (np.arange(half) / half)
    share = rope["original_max_position_embeddings"] / wavelength
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((share - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def falcon_tensors(weights, spec):
    out = {"token_embd.weight": weights["transformer.word_embeddings.weight"],
           "output_norm.weight": weights["transformer.ln_f.weight"],
           "output_norm.bias": weights["transformer.ln_f.bias"], "output.weight": weights["lm_head.weight"]}
    norms = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"} if spec.new_decoder else {"attn_norm": "input_layernorm"}
    names = {"attn_output": "self_attention.dense", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
    for layer in range(spec.n_layer):
        source = f"transformer.h.{layer}."
        for ours, theirs in norms.items():
            for kind in ("weight", "bias"):
                out[f"blk.{layer}.{ours}.{kind}"] = weights[f"{source}{theirs}.{kind}"]
        out[f"blk.{layer}.attn_qkv.weight"] = fused_qkv(weights[source + "self_attention.query_key_value.weight"], spec)
        for ours, theirs in names.items():
            out[f"blk.{layer}.{ours}.weight"] = weights[f"{source}{theirs}.weight"]
    return out


def opt_tensors(weights, spec):
    decoder = "model.decoder."
    out = {"token_embd.weight": weights[decoder + "embed_tokens.weight"],
           "position_embd.weight": weights[decoder + "embed_positions.weight"],
           "output_norm.weight": weights[decoder + "final_layer_norm.weight"],
           "output_norm.bias": weights[decoder + "final_layer_norm.bias"]}
    names = {"attn_norm": "self_attn_layer_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.out_proj", "ffn_norm": "final_layer_norm",
             "ffn_up": "fc1", "ffn_down": "fc2"}
    for layer in range(spec.n_layer):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                out[f"blk.{layer}.{ours}.{kind}"] = weights[f"{decoder}layers.{layer}.{theirs}.{kind}"]
    return out


def vocabulary(n_vocab):
    """A minimal SentencePiece vocabulary: three specials, newline byte, space mark, letters, syllables."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = ["<0x0A>", "\u2581"] + letters + [c + v for c in letters for v in "aeiou" if c not in "aeiou"]
    tokens = ["<unk>", "<s>", "</s>"] + pieces[: n_vocab - 3]
    kinds = [2, 3, 3, 6] + [1] * (n_vocab - 4)
    scores = [0.0] * 4 + [-float(i) for i in range(n_vocab - 4)]
    return tokens, scores, kinds


def write_gguf(path, spec, tensors):
    from gguf import GGUFWriter

    writer, a = GGUFWriter(str(path), spec.arch), spec.arch
    n_ctx = tensors["position_embd.weight"].shape[0] if a == "opt" else spec.n_ctx
    writer.add_name(spec.name)
    writer.add_file_type(0)
    for key, value in (("context_length", n_ctx), ("embedding_length", spec.n_embd),
                       ("feed_forward_length", spec.n_ff), ("block_count", spec.n_layer),
                       ("attention.head_count", spec.n_head), ("attention.head_count_kv", spec.n_head_kv)):
        writer.add_uint32(f"{a}.{key}", value)
    eps_key = "layer_norm_rms_epsilon" if a == "llama" else "layer_norm_epsilon"
    writer.add_float32(f"{a}.attention.{eps_key}", OPT_EPSILON if a == "opt" else spec.eps)
    writer.add_string(f"{a}.hidden_act", spec.act)
    if a == "falcon":
        writer.add_string("falcon.tensor_data_layout", "jploski")
    if a == "llama":
        writer.add_uint32("llama.vocab_size", spec.n_vocab)
        writer.add_uint32("llama.rope.dimension_count", spec.head_dim)
    if a != "opt":
        writer.add_float32(f"{a}.rope.freq_base", spec.rope_theta)
    if spec.rope.get("rope_type") in ("linear", "yarn"):
        writer.add_string(f"{a}.rope.scaling.type", spec.rope["rope_type"])
        writer.add_float32(f"{a}.rope.scaling.factor", spec.rope["factor"])
        n_ctx_orig = spec.rope.get("original_max_position_embeddings")
        if n_ctx_orig is not None:
            writer.add_uint32(f"{a}.rope.scaling.original_context_length", n_ctx_orig)
    tokens, scores, kinds = vocabulary(spec.n_vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(model, spec, path):
    import torch
    weights = {name: w.detach().to(torch.float32).numpy() for name, w in model.state_dict().items()}
    make = dict(llama=llama_tensors, falcon=falcon_tensors, opt=opt_tensors)[spec.arch]
    write_gguf(path, spec, make(weights, spec))


# --------------------------------------------------------- independent forward pass over the written file (float64)

class File:
    """Tensors (float64) and keys of a GGUF file."""

    def __init__(self, path):
        from gguf import GGUFReader
        reader = GGUFReader(str(path))
        self.keys = {k: f.contents() for k, f in reader.fields.items()}
        self.tensors = {t.name: np.array(t.data, np.float64) for t in reader.tensors}
        self.arch = self.keys["general.architecture"]

    def key(self, name, default=None):
        return self.keys.get(f"{self.arch}.{name}", default)


def angles(file, n_tokens, head_dim, wrong):
    """cos and sin [n_tokens, head_dim / 2] of the rotation."""
    base = file.key("rope.freq_base", 10000.0)
    half = head_dim // 2
    freq = base ** (-np.arange(half) / half)
    size = 1.0
    if "rope_freqs.weight" in file.tensors and wrong != "no_rope_scaling":
        freq = freq / file.tensors["rope_freqs.weight"]
    scaling, factor = file.key("rope.scaling.type"), file.key("rope.scaling.factor", 1.0)
    if wrong == "yarn_as_linear":
        scaling = "linear"
    if scaling == "linear" and wrong != "no_rope_scaling":
        freq = freq / factor
    if scaling == "yarn" and wrong != "no_rope_scaling":
        n_orig = file.key("rope.scaling.original_context_length")
        low, high = (head_dim * math.log(n_orig / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1))
        if wrong != "yarn_ramp_not_rounded":
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0.0, 1.0)
        freq = freq * (1.0 - ramp) + freq / factor * ramp
        size = 1.0 if wrong == "yarn_no_attention_factor" else 0.1 * math.log(factor) + 1.0
    angle = np.arange(n_tokens)[:, None] * freq
    return np.cos(angle) * size, np.sin(angle) * size


def rotate(x, cos, sin, halves):
    """x [n_tokens, n_head, head_dim]; pairs are (i, i + half) or (2i, 2i + 1)."""
    cos, sin, out = cos[:, None], sin[:, None], np.empty_like(x)
    half = x.shape[-1] // 2
    a, b = (slice(0, half), slice(half, None)) if halves else (slice(0, None, 2), slice(1, None, 2))
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def reference_logits(file, ids, wrong=None, f16_attention=False):
    """Float64 logits [n_tokens, n_vocab]. `wrong` names one mistake to make, to see how far it leads away;
    `f16_attention` rounds Q, K, V and the softmax to half precision, as an engine with an f16 cache does."""
    t, arch = file.tensors, file.arch
    n_head = file.key("attention.head_count")
    n_head_kv = file.key("attention.head_count_kv", n_head)
    eps = file.key("attention.layer_norm_rms_epsilon" if arch == "llama" else "attention.layer_norm_epsilon", 0.0)
    eps = 0.0 if wrong == "no_epsilon" else eps
    act_name = file.key("hidden_act")
    if wrong == "other_activation":
        act_name = "silu" if act_name == "relu" else "relu"
    n, n_embd = len(ids), t["token_embd.weight"].shape[1]
    head_dim = n_embd // n_head
    half_round = (lambda v: v.astype(np.float16).astype(np.float64)) if f16_attention else (lambda v: v)
    halves = (arch == "falcon") != (wrong == "rope_pairing")

    def act(x):
        if act_name == "relu":
            return np.maximum(x, 0.0)
        if act_name == "silu":
            return x / (1.0 + np.exp(-x))
        return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))

    def linear(x, name):
        y = x @ t[name + ".weight"].T
        return y + t[name + ".bias"] if name + ".bias" in t else y

    def norm(x, name):
        if arch == "llama":
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * t[name + ".weight"]
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * t[name + ".weight"] + t[name + ".bias"]

    def attention(x, blk):
        if arch == "falcon":
            qkv = linear(x, blk + "attn_qkv")
            q, k, v = np.split(qkv, [n_embd, n_embd + n_head_kv * head_dim], axis=-1)
        else:
            q, k, v = (linear(x, blk + part) for part in ("attn_q", "attn_k", "attn_v"))
        q, k, v = q.reshape(n, n_head, -1), k.reshape(n, n_head_kv, -1), v.reshape(n, n_head_kv, -1)
        if arch != "opt":
            cos, sin = angles(file, n, head_dim, wrong)
            q, k = rotate(q, cos, sin, halves), rotate(k, cos, sin, halves)
        q, k, v = half_round(q), half_round(k), half_round(v)
        k, v = (np.repeat(m, n_head // n_head_kv, axis=1) for m in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(head_dim)
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        p = half_round(np.exp(half_round(scores - scores.max(-1, keepdims=True))))
        p = half_round(p / p.sum(-1, keepdims=True))
        return linear(np.einsum("hij,jhd->ihd", p, v).reshape(n, n_embd), blk + "attn_output")

    h = t["token_embd.weight"][ids]
    if arch == "opt":
        h = h + t["position_embd.weight"][np.arange(n) + (0 if wrong == "no_position_offset" else 2)]
    for layer in range(file.key("block_count")):
        blk = f"blk.{layer}."
        if arch == "falcon":
            x = norm(h, blk + "attn_norm")
            two = blk + "attn_norm_2.weight" in t
            x_attn = norm(h, blk + "attn_norm_2") if two else x
            if two and wrong == "norms_swapped":
                x, x_attn = x_attn, x
            h = h + attention(x_attn, blk) + linear(act(linear(x, blk + "ffn_up")), blk + "ffn_down")
            continue
        h = h + attention(norm(h, blk + "attn_norm"), blk)
        x = norm(h, blk + "ffn_norm")
        hidden = act(linear(x, blk + "ffn_up")) if arch == "opt" \
            else act(linear(x, blk + "ffn_gate")) * linear(x, blk + "ffn_up")
        h = h + linear(hidden, blk + "ffn_down")
    return norm(h, "output_norm") @ t.get("output.weight", t["token_embd.weight"]).T


def wrong_rules(spec):
    rules = ["no_epsilon", "other_activation"]
    if spec.arch == "opt":
        return rules + ["no_position_offset"]
    rules.append("rope_pairing")
    if spec.rope:
        rules.append("no_rope_scaling")
    if spec.rope.get("rope_type") == "yarn":
        rules += ["yarn_as_linear", "yarn_no_attention_factor", "yarn_ramp_not_rounded"]
    if spec.new_decoder:
        rules.append("norms_swapped")
    return rules


# ------------------------------------------------------------------------------------------------------ comparing

def difference(a, b):
    """max |a - b| and the largest relative L2 distance of a row."""
    d = a.astype(np.float64) - b.astype(np.float64)
    rows = np.linalg.norm(d, axis=1) / np.linalg.norm(b.astype(np.float64), axis=1)
    return {"max_abs": float(np.abs(d).max()), "rel_l2": float(rows.max())}


def rounded(d):
    return {k: float(f"{v:.3g}") for k, v in d.items()}


def tolerance(spreads):
    """20 times the largest measured spread between float32 and float64, at least 1e-4 (max_abs), 5e-5 (rel_l2).

    The floors leave room for another order of summation over a few hundred terms; the mistakes listed under
    `deviation_of_wrong_rules` lead further away than that."""
    floor = {"max_abs": 1e-4, "rel_l2": 5e-5}
    return rounded({k: max(floor[k], 20 * max(s[k] for s in spreads)) for k in floor})


def golden(spec, out):
    """Writes one model's three files and returns a line for the summary."""
    import torch
    import transformers
    from importlib.metadata import version

    model, ids = build(spec), token_ids(spec)
    path = out / f"{spec.name}.gguf"
    convert(model, spec, path)
    logits = transformers_logits(model, ids, torch.float32).astype("<f4")
    logits64 = transformers_logits(model, ids, torch.float64)
    file = File(path)
    own64 = reference_logits(file, ids)
    spread = {"transformers_f32_vs_f64": difference(logits, logits64), "f32_vs_own_f64": difference(logits, own64)}
    f16 = difference(reference_logits(file, ids, f16_attention=True), own64)
    wrong = {rule: rounded(difference(reference_logits(file, ids, wrong=rule), own64)) for rule in wrong_rules(spec)}
    limit = tolerance(spread.values())
    if spread["f32_vs_own_f64"]["max_abs"] > 1e-4:
        sys.exit(f"{spec.name}: file and transformers disagree: {spread}")
    logits.tofile(out / f"{spec.name}.logits.f32")
    top = np.sort(logits, axis=1)
    info = {
        "name": spec.name, "arch": spec.arch, "family": spec.family, "notes": spec.notes, "ids": ids,
        "logits": f"{spec.name}.logits.f32", "logits_shape": list(logits.shape),
        "tolerance": limit,
        "tolerance_f16_attention": rounded({k: 3 * v for k, v in f16.items()}),
        "spread": {k: rounded(v) for k, v in spread.items()},
        "deviation_of_wrong_rules": wrong,
        "logits_std": round(float(logits.std()), 3),
        "min_gap_of_two_best": float(f"{(top[:, -1] - top[:, -2]).min():.3g}"),
        "argmax": [int(i) for i in logits.argmax(axis=1)],
        "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__,
                     "gguf": version("gguf")},
    }
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in info.items()]
    (out / f"{spec.name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    weakest = min((w["max_abs"], rule) for rule, w in wrong.items())
    return (f"{spec.name:20} std {logits.std():.2f}  hf f32-f64 {spread['transformers_f32_vs_f64']['max_abs']:.1e}  "
            f"own f64 {spread['f32_vs_own_f64']['max_abs']:.1e}  f16 attention {f16['max_abs']:.1e}  "
            f"tolerance {limit['max_abs']:.1e}/{limit['rel_l2']:.1e}  weakest wrong rule {weakest[1]} {weakest[0]:.1e}")


# ------------------------------------------------------------------------------------------------------ llama.cpp

def llama_cpp_checks(spec, folder):
    """Compares with llama.cpp. It has no OPT and no activation key, so `llama` runs as SiLU and `falcon` as GELU
    (a tanh form read from an f16 table, hence the wide limit). Models are rebuilt with that activation."""
    import torch
    from dataclasses import replace

    if spec.arch == "opt":
        return f"{spec.name:20} not in llama.cpp"
    spec = replace(spec, act="silu" if spec.arch == "llama" else "gelu")
    model, ids, path = build(spec), token_ids(spec), Path(folder) / f"{spec.name}.gguf"
    convert(model, spec, path)
    theirs = llama_cpp_logits(path, ids)
    ours = transformers_logits(model, ids, torch.float32)
    d, limit = difference(theirs, ours), 1e-4 if spec.arch == "llama" else 2e-2
    verdict = "ok" if d["max_abs"] <= limit else "FAIL"
    return (f"{spec.name:20} as {spec.act}: max_abs {d['max_abs']:.1e} rel_l2 {d['rel_l2']:.1e} "
            f"limit {limit:.0e} {verdict}")


def llama_cpp_logits(path, ids):
    import llama_cpp
    f32 = llama_cpp.GGML_TYPE_F32
    llm = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, type_k=f32, type_v=f32, verbose=False)
    llm.eval(ids)
    logits = np.array(llm.scores[: len(ids)], np.float32)
    llm.close()
    return logits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the files (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="NAME", help="make only this model; may be repeated")
    parser.add_argument("--check-llama-cpp", action="store_true", help="also compare with llama-cpp-python")
    args = parser.parse_args()
    known = [s.name for s in SPECS]
    unknown = set(args.only or ()) - set(known)
    if unknown:
        parser.error(f"unknown model {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    specs = [s for s in SPECS if not args.only or s.name in args.only]
    args.out.mkdir(parents=True, exist_ok=True)
    import torch
    torch.set_num_threads(1)
    for spec in specs:
        print(golden(spec, args.out), flush=True)
    total = sum(f.stat().st_size for f in args.out.iterdir() if f.is_file())
    print(f"{total} bytes in {args.out}")
    if total > SIZE_LIMIT_BYTES:
        sys.exit(f"more than {SIZE_LIMIT_BYTES} bytes")
    if args.check_llama_cpp:
        with tempfile.TemporaryDirectory() as folder:
            results = [llama_cpp_checks(spec, folder) for spec in specs]
        print("\n".join(results))
        if any(r.endswith("FAIL") for r in results):
            sys.exit(1)


if __name__ == "__main__":
    main()
