#!/usr/bin/env python3
"""How the cost of a token grows: with context length, threads, batch, neurons per layer, and the share that is active.

Calls `powerinfer bench` over one axis at a time and prints tables with time, bytes and GB/s for each. What should be
seen: bytes grow linearly in context and neurons, time follows bytes, threads help until memory is busy, and a token of a
larger batch costs less. Prompts stand for batches: a prompt of B tokens is one step of B. The fastest measurement counts.

Usage:
    python tools/cost_growth.py --cli target/release/powerinfer -m FILE.gguf
    python tools/cost_growth.py --cli ... --only neurons,active

`neurons` and `active` run on random models that are written to a temporary folder; they need no file. The share of
active neurons is set by the predictor's threshold, so it is what came out, not what was asked for.

Packages: pip install gguf==0.19.0 numpy (for the random models only).
"""
import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from compare_llama_cpp import table, thread_counts

N_EMBD, N_HEAD, N_LAYER, N_VOCAB, RANK = 512, 8, 4, 512, 64


def write_model(path, n_ff):
    """A random ReLU model with predictors, as a PWRI file in F16."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(N_LAYER)
    writer.add_context_length(16384)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(N_VOCAB)])
    writer.add_token_scores([0.0] * N_VOCAB)

    def matrix(name, n_rows, n_cols):
        values = rng.standard_normal((n_rows, n_cols), dtype=np.float32) / np.sqrt(n_cols)
        writer.add_tensor(name + ".weight", values.astype(np.float16))

    def norm(name):
        writer.add_tensor(name + ".weight", np.ones(N_EMBD, dtype=np.float32))

    matrix("token_embd", N_VOCAB, N_EMBD)
    matrix("output", N_VOCAB, N_EMBD)
    norm("output_norm")
    for layer in range(N_LAYER):
        block = f"blk.{layer}."
        norm(block + "attn_norm")
        norm(block + "ffn_norm")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(block + part, N_EMBD, N_EMBD)
        for part in ("ffn_gate", "ffn_up", "ffn_down_t"):
            matrix(block + part, n_ff, N_EMBD)
        matrix(block + "fc1", RANK, N_EMBD)
        matrix(block + "fc2", n_ff, RANK)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open(path, "r+b") as file:
        file.write(b"PWRI")  # the magic is all that differs


class Bench:
    """Calls of `powerinfer bench` with what all of them share."""

    def __init__(self, args):
        self.cli, self.args = args.cli, args

    def __call__(self, model, *more, prompt=16, decode=None, threads=None):
        """The JSON of one call, or None with the reason printed."""
        decode = self.args.decode if decode is None else decode
        command = [self.cli, "bench", *(["-m", str(model)] if model else []), "-p", str(prompt), "-n", str(decode),
                   "-t", str(threads or self.args.threads), "--repeats", str(self.args.repeats),
                   "--no-stream", "--json", *more]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"left out: {' '.join(command)}: {done.stderr.strip()}", file=sys.stderr, flush=True)
            return None
        return json.loads(done.stdout)


def decode_cells(answer):
    """Time, bytes and bandwidth of a decoded token."""
    speed = answer["decode_tok_s"]["max"]
    per_token = answer["bytes_per_token"]
    return [f"{1000 / speed:.3f}", f"{per_token / 2**20:.2f}", f"{per_token * speed / 1e9:.2f}"]


DECODE_HEAD = ["ms/token", "MiB/token", "GB/s"]


def grow(title, head, rows):
    rows = [row for row in rows if row]
    print(f"\n{title}")
    if rows:
        table([head, *rows])
    else:
        print("no figures")


def context(bench, args):
    def row(n_ctx):
        answer = bench(args.model, *args.bench_args, prompt=n_ctx)
        return answer and [str(n_ctx), *decode_cells(answer)]
    lengths = [n for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if n <= args.max_context]
    grow("decoding after a context of N tokens", ["context", *DECODE_HEAD], map(row, lengths))


def threads(bench, args):
    def row(n):
        answer = bench(args.model, *args.bench_args, threads=n)
        return answer and [str(n), *decode_cells(answer)]
    counts = [1]
    while counts[-1] * 2 <= os.cpu_count():
        counts.append(counts[-1] * 2)
    grow("decoding with N threads", ["threads", *DECODE_HEAD], map(row, dict.fromkeys([*counts, os.cpu_count()])))


def batch(bench, args):
    def row(n):
        answer = bench(args.model, "--mode", "dense", prompt=n, decode=1)
        if answer is None:
            return None
        speed = answer["prefill_tok_s"]["max"]
        # In mode dense a step reads the same weights, once, for one token as for many.
        step_bytes = answer["bytes_per_token"]
        return [str(n), f"{1000 * n / speed:.3f}", f"{1000 / speed:.3f}", f"{step_bytes / n / 2**20:.2f}",
                f"{step_bytes * speed / n / 1e9:.2f}"]
    grow("one step of N tokens, dense", ["batch", "ms/step", *DECODE_HEAD], map(row, (1, 2, 4, 8, 16, 32)))


def neurons(bench, args):
    with tempfile.TemporaryDirectory() as folder:
        def row(n_ff, mode):
            path = Path(folder) / f"{n_ff}.gguf"
            if not path.exists():
                write_model(path, n_ff)
            answer = bench(path, "--mode", mode, "--sparse-threshold", "0.9")
            return answer and [f"{n_ff} {mode}", f"{100 * answer['active_share']:.1f} %", *decode_cells(answer)]
        sizes = [(n_ff, mode) for mode in ("dense", "predictor") for n_ff in (1024, 2048, 4096, 8192)]
        grow("N neurons in each layer", ["neurons", "active", *DECODE_HEAD], (row(*size) for size in sizes))


def active(bench, args):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, 8192)

        def row(threshold):
            answer = bench(path, "--mode", "predictor", "--sparse-threshold", str(threshold))
            return answer and [f"{100 * (1 - answer['active_share']):.1f} %", *decode_cells(answer)]
        # In units of the random scores' spread, which is about 0.58 for inputs of RMS 1.
        grow("neurons left out", ["left out", *DECODE_HEAD], map(row, (-100, 0, 0.5, 0.75, 1.0, 1.35, 2.0)))


AXES = {"context": context, "threads": threads, "batch": batch, "neurons": neurons, "active": active}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cli", required=True, help="our powerinfer program")
    parser.add_argument("-m", "--model", help="file for context, threads and batch (default: the embedded model)")
    parser.add_argument("--only", help=f"axes, with commas: {', '.join(AXES)}")
    parser.add_argument("-n", "--decode", type=int, default=32)
    parser.add_argument("-t", "--threads", default="1", help="where they do not vary; `all` is every CPU")
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bench-args", default="", help="more arguments for context and threads, in one string")
    args = parser.parse_args()
    args.bench_args = shlex.split(args.bench_args)
    args.threads = thread_counts(args.threads)[0]
    names = args.only.split(",") if args.only else list(AXES)
    if unknown := set(names) - set(AXES):
        parser.error(f"no axis {', '.join(sorted(unknown))}")
    for name in names:
        AXES[name](Bench(args), args)


if __name__ == "__main__":
    main()
