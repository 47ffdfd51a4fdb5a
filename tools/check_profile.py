#!/usr/bin/env python3
"""Counts of `powerinfer profile` against those of transformers, for a Llama file with ReLU.

    check_profile.py MODEL.gguf TOKENIZER.json TEXT STATISTICS [--bos ID] [--tie SHARE]

The weights of the file are dequantized into a transformers model, in float32; hooks count for how many tokens the gate
of each neuron is above zero. Text and sequences are cut as `profile` cuts one text: sequences of 512 tokens, or of the
model's context if that is shorter, the first of them the BOS token if there is one, until there are as many tokens as the
statistics say. Make the statistics so, with arithmetic in float32 as well:

    powerinfer profile -m MODEL.gguf --device reference --text TEXT --tokens 1000 --out STATISTICS

A count may be off by no more than the number of tokens whose gate is within SHARE (1e-4) of the layer's mean gate from
zero. The CPU backend rounds activations to 8 bits where weights are quantized, which moves more gates over zero the more
layers there are: with its statistics the figures tell how many, and --tie 0.2 is wide enough for 30 layers but for a few.

Packages (a virtual environment outside the repository): torch transformers gguf tokenizers safetensors
"""

import argparse
import sys

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

BINS = 100


def load(path: str) -> LlamaForCausalLM:
    reader = GGUFReader(path)

    def key(name: str):
        field = reader.get_field(f"llama.{name}")
        return field.contents() if field else None

    assert key("hidden_act") == "relu", "the file is not a ReLU Llama by its key `llama.hidden_act`"
    tensors = {t.name: t for t in reader.tensors}
    n_head, n_head_kv = key("attention.head_count"), key("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=n_head,
        num_key_value_heads=n_head_kv,
        hidden_act="relu",
        max_position_embeddings=key("context_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_theta=key("rope.freq_base"),
        tie_word_embeddings="output.weight" not in tensors,
    )

    def values(name: str) -> torch.Tensor:
        tensor = tensors[name]
        rows = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(rows))

    def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
        """Rows from pairs of neighbors, which a GGUF file has turned together, to two halves of a head."""
        n_rows, n_columns = weight.shape
        return weight.reshape(heads, n_rows // heads // 2, 2, n_columns).swapaxes(1, 2).reshape(weight.shape)

    state = {"model.embed_tokens.weight": values("token_embd.weight"), "model.norm.weight": values("output_norm.weight")}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    if "output.weight" in tensors:
        state["lm_head.weight"] = values("output.weight")
    names = {
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        for hf, name in names.items():
            state[f"model.layers.{layer}.{hf}.weight"] = values(f"blk.{layer}.{name}.weight")
        for part, heads in [("q", n_head), ("k", n_head_kv)]:
            weight = values(f"blk.{layer}.attn_{part}.weight")
            state[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = halves(weight, heads)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokenizer")
    parser.add_argument("text")
    parser.add_argument("statistics")
    parser.add_argument("--bos", type=int)
    parser.add_argument("--tie", type=float, default=1e-4)
    args = parser.parse_args()

    want = load_file(args.statistics)
    n_tokens = int(want["tokens"][0])
    model = load(args.model)
    config = model.config
    with open(args.text, encoding="utf-8") as file:
        ids = Tokenizer.from_file(args.tokenizer).encode(file.read(), add_special_tokens=False).ids
    begin = [] if args.bos is None else [args.bos]
    length = min(512, config.max_position_embeddings) - len(begin)
    sequences, left = [], n_tokens
    for start in range(0, len(ids), length):
        sequence = (begin + ids[start : start + length])[:left]
        left -= len(sequence)
        if len(sequence) > len(begin):
            sequences.append(sequence)
    assert sum(map(len, sequences)) == n_tokens, "the text is shorter than what was counted"

    shape = (config.num_hidden_layers, config.intermediate_size)
    fired, low, high = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    bins = torch.zeros((shape[0], BINS), dtype=torch.int64)

    def hook(layer: int):
        def count(_module, _inputs, gates: torch.Tensor) -> None:
            gates = gates[0]
            tie = args.tie * gates.abs().mean()
            fired[layer] += (gates > 0).sum(0)
            low[layer] += (gates > tie).sum(0)
            high[layer] += (gates > -tie).sum(0)
            share = ((gates > 0).sum(1) * BINS // shape[1]).clamp(max=BINS - 1)
            bins[layer] += torch.bincount(share, minlength=BINS)

        return count

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate_proj.register_forward_hook(hook(layer))
    with torch.inference_mode():
        for sequence in sequences:
            model(torch.tensor([sequence]))

    beyond, worst = 0, 0
    for layer in range(shape[0]):
        got = want[f"activation_{layer}"]
        beyond += int(((got < low[layer]) | (got > high[layer])).sum())
        worst = max(worst, int((got - fired[layer]).abs().max()))
    got = torch.stack([want[f"activation_{layer}"] for layer in range(shape[0])])
    total, off = int(fired.sum()), int((got - fired).abs().sum())
    same = int((got == fired).sum())
    print(f"{n_tokens} tokens, {shape[0]} layers of {shape[1]} neurons, {total} firings by transformers")
    print(f"same count: {same} of {got.numel()} neurons; off by {off} in all, by {worst} at most")
    print(f"ties: {int((high - low).sum())}; counts that ties do not explain: {beyond}")
    if "active_share_0" in want:
        shares = torch.stack([want[f"active_share_{layer}"] for layer in range(shape[0])])
        moved = int((shares - bins).abs().sum()) // 2
        print(f"tokens in another hundredth of active share: {moved} of {shape[0] * n_tokens}")
    if beyond:
        sys.exit("the counts differ")


if __name__ == "__main__":
    main()
