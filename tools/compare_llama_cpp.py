#!/usr/bin/env python3
"""Times llama.cpp and our engine in turn on the same GGUF file and prints paired ratios.

Both read the same prompt length in one batch and then decode greedily after it, on the CPU. The machine's speed
drifts, so the two run one after the other, in alternating order, and the ratio is taken within each pair; the medians
of figures and of ratios are printed, with the smallest and largest ratio beside them. One pair is run first and thrown
away. Each run is a process of its own, whose peak resident memory is read from the operating system (mapped file pages
count, for both). Use an idle machine: with other work on its cores, llama.cpp's spinning threads wait for each other and
its figures for two and more threads collapse. Nothing is checked here: check_smollm2.py says whether the answers are right.

Usage:
    python tools/compare_llama_cpp.py --cli target/release/powerinfer -m FILE.gguf
    python tools/compare_llama_cpp.py --cli ... -m FILE.gguf -p 512 -n 128 -t 1,2 --repeats 5 --save figures.json
    python tools/compare_llama_cpp.py --cli ... -m FILE.gguf --ours-args="--mode predictor"

Packages: pip install llama-cpp-python==0.3.36 (compiles llama.cpp for this machine's instruction set; say so, and the
machine, beside any figure that is quoted). Where the processor reports AMX but the system forbids it, llama.cpp dies of
an illegal instruction (exit status -4) in quantised products of two and more tokens; leave AMX out of its build then:
    export CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" && export CXXFLAGS="$CFLAGS"
    pip install --no-cache-dir --force-reinstall llama-cpp-python==0.3.36
Our CLI is called as
    powerinfer bench -m FILE -p P -n N -t T --no-stream --json
and prints JSON with `prefill_tok_s` and `decode_tok_s`, each a number or {"median": number, ...}.

llama.cpp runs with its library's defaults (f16 cache, flash attention where it chooses so) but for the thread count.
"""
import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIGURES = ("prefill_tok_s", "decode_tok_s")


# ------------------------------------------------------------------------- llama.cpp's side, in a process of its own

def llama_side(args):
    """One timed prompt and one timed decoding; prints JSON."""
    import ctypes

    import llama_cpp as lib
    import numpy as np

    silent = lib.llama_log_callback(lambda *_: None)  # kept in a name: llama.cpp calls it until the process ends
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model_params = lib.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(args.model.encode(), model_params)
    if not model:
        sys.exit(f"llama.cpp cannot load {args.model}")
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    params = lib.llama_context_default_params()
    params.n_ctx = args.prompt + args.decode + 8
    params.n_batch = max(args.prompt, 1)
    params.n_threads = params.n_threads_batch = args.threads
    context = lib.llama_init_from_model(model, params)
    if not context:
        sys.exit("llama.cpp cannot make a context")

    def decode(ids):
        array = (lib.llama_token * len(ids))(*ids)
        status = lib.llama_decode(context, lib.llama_batch_get_one(array, len(ids)))
        if status != 0:
            sys.exit(f"llama_decode returned {status}")
        logits = lib.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(n_vocab,)).argmax())

    def clear():
        lib.llama_memory_clear(lib.llama_get_memory(context), True)

    rng = random.Random(1)
    prompt = [rng.randrange(3, n_vocab) for _ in range(args.prompt)]
    decode(prompt[:8])  # pages in the weights
    clear()
    start = time.perf_counter()
    token = decode(prompt)
    prefill_s = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(args.decode):
        token = decode([token])
    decode_s = time.perf_counter() - start
    print(json.dumps({"prefill_tok_s": args.prompt / prefill_s, "decode_tok_s": args.decode / decode_s}))


# -------------------------------------------------------------------------------------------- running both in turn

def run(command):
    """(stdout, peak resident MiB) of a command; its errors end this script."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode != 0:
            sys.exit(f"`{shlex.join(command)}` exited with {process.returncode}:\n{err.read().strip()}")
        return out.read(), usage.ru_maxrss / 1024


def figure(answer, key):
    value = answer[key]
    return float(value["median"] if isinstance(value, dict) else value)


def measure(command):
    text, rss_mib = run(command)
    answer = json.loads(text)
    if isinstance(answer, list):
        if len(answer) != 1:
            sys.exit(f"expected one result from `{shlex.join(command)}`, got {len(answer)}")
        answer = answer[0]
    return {key: figure(answer, key) for key in FIGURES} | {"peak_rss_mib": rss_mib}


def pairs(args, threads):
    """`repeats` pairs of measurements, the order alternating."""
    sizes = ["-p", str(args.prompt), "-n", str(args.decode), "-t", str(threads)]
    commands = {
        "llama.cpp": [sys.executable, str(Path(__file__).resolve()), "--llama-side", "-m", args.model, *sizes],
        # Measuring the memory's speed would take a buffer larger than most models and spoil the peak.
        "ours": [args.cli, "bench", "-m", args.model, *sizes, "--no-stream", "--json", *shlex.split(args.ours_args)],
    }
    out = []
    for repeat in range(args.repeats + 1):
        order = list(commands) if repeat % 2 else list(reversed(commands))
        pair = {side: measure(commands[side]) for side in order}
        if repeat > 0:
            out.append(pair)
    return out


def report(threads, measured):
    print(f"threads {threads}, {len(measured)} pairs")
    for key in (*FIGURES, "peak_rss_mib"):
        ours = [pair["ours"][key] for pair in measured]
        theirs = [pair["llama.cpp"][key] for pair in measured]
        ratios = [a / b for a, b in zip(ours, theirs)]
        print(f"    {key:14} ours {statistics.median(ours):9.2f}   llama.cpp {statistics.median(theirs):9.2f}   "
              f"ours / llama.cpp {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cli", help="our powerinfer program")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-p", "--prompt", type=int, default=512, help="ids in the prompt (default: %(default)s)")
    parser.add_argument("-n", "--decode", type=int, default=128, help="ids to decode (default: %(default)s)")
    parser.add_argument("-t", "--threads", default="1", help="thread counts, with commas (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs for each thread count (default: %(default)s)")
    parser.add_argument("--ours-args", default="", help="more arguments for `powerinfer bench`, in one string")
    parser.add_argument("--save", type=Path, help="write every measurement to this JSON file")
    parser.add_argument("--llama-side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prompt < 1 or args.decode < 1 or args.repeats < 1:
        parser.error("-p, -n and --repeats must be at least 1")
    if args.llama_side:
        args.threads = int(args.threads)
        llama_side(args)
        return
    if not args.cli:
        parser.error("--cli is required")
    everything = {}
    for threads in (int(t) for t in args.threads.split(",")):
        everything[threads] = pairs(args, threads)
        report(threads, everything[threads])
    if args.save:
        args.save.write_text(json.dumps({"model": args.model, "prompt": args.prompt, "decode": args.decode,
                                         "pairs_by_threads": everything}, indent=1) + "\n")


if __name__ == "__main__":
    main()
