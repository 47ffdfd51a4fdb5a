#!/usr/bin/env python3
"""Times llama.cpp and our engine in turn on the same GGUF file, or on two of one model, and prints paired ratios.

Both read the same prompt length in one batch and then decode greedily after it, on the CPU. The machine's speed
drifts, so the two run one after the other, in alternating order, and the ratio is taken within each pair; the medians
of figures and of ratios are printed, with the smallest and largest ratio beside them. One pair is run first and thrown
away. Each run is a process of its own that measures --inner times, of which the fastest counts, since other work on the
machine only slows down. A process that fails is run once more; a pair without both figures is left out. Peak resident
memory is read from the operating system (mapped file pages count, for both). Use an idle machine: with other work on
its cores, llama.cpp's spinning threads wait for each other and its figures for two and more threads collapse. Nothing
is checked here: check_smollm2.py says whether the answers are right. compare_all.py runs the whole table.

Usage:
    python tools/compare_llama_cpp.py --cli target/release/powerinfer -m FILE.gguf
    python tools/compare_llama_cpp.py --cli ... -m FILE.gguf -p 512 --prefill-only -t 1,all --save figures.jsonl
    python tools/compare_llama_cpp.py --cli ... -m SPARSE.gguf --llama-model DENSE.gguf --decode-only \\
        --ours-args="--mode predictor"

Packages: pip install llama-cpp-python==0.3.36 (compiles llama.cpp for this machine's instruction set; say so, and the
machine, beside any figure that is quoted). Where the processor reports AMX but the system forbids it, llama.cpp dies of
an illegal instruction (exit status -4) in quantised products of two and more tokens; leave AMX out of its build then:
    export CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" && export CXXFLAGS="$CFLAGS"
    pip install --no-cache-dir --force-reinstall llama-cpp-python==0.3.36
Our CLI is called as
    powerinfer bench -m FILE -p P -n N -t T --repeats INNER --no-stream --json
and prints JSON with `prefill_tok_s` and `decode_tok_s`, each {"max": number, ...}.

llama.cpp runs with its library's defaults (f16 cache, flash attention where it chooses so) but for the thread count.
"""
import argparse
import datetime
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIGURES = ("prefill_tok_s", "decode_tok_s", "peak_rss_mib")
OURS, LLAMA = "ours", "llama.cpp"


class Failed(Exception):
    """A measurement that gave no figures."""


# ------------------------------------------------------------------------- llama.cpp's side, in a process of its own

def llama_side(args):
    """Timed prompts and decodings after them; prints JSON with the fastest."""
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
    prefill_s, decode_s = [], []
    decode(prompt[:8])  # pages in the weights
    for _ in range(args.inner):
        clear()
        start = time.perf_counter()
        token = decode(prompt)
        prefill_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(args.decode):
            token = decode([token])
        decode_s.append(time.perf_counter() - start)
    print(json.dumps({"prefill_tok_s": args.prompt / min(prefill_s), "decode_tok_s": args.decode / min(decode_s)}))


# -------------------------------------------------------------------------------------------- running both in turn

def llama_command(model, prompt, decode, threads, inner):
    return [sys.executable, str(Path(__file__).resolve()), "--llama-side", "-m", str(model),
            "-p", str(prompt), "-n", str(decode), "-t", str(threads), "--inner", str(inner)]


def our_command(cli, model, prompt, decode, threads, inner, more=()):
    # Measuring the memory's speed takes seconds and says nothing about this comparison.
    return [str(cli), "bench", "-m", str(model), "-p", str(prompt), "-n", str(decode), "-t", str(threads),
            "--repeats", str(inner), "--no-stream", "--json", *more]


def run(command):
    """(stdout, peak resident MiB) of a command."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=err)
        except OSError as error:
            raise Failed(f"`{command[0]}` does not start: {error}") from error
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode != 0:
            raise Failed(f"`{shlex.join(command)}` exited with {process.returncode}: {err.read().strip()}")
        return out.read(), usage.ru_maxrss / 1024


def figure(answer, key):
    value = answer[key]
    return float(value["max"] if isinstance(value, dict) else value)


def measure_once(command):
    text, rss_mib = run(command)
    answer = json.loads(text)
    if isinstance(answer, list):
        raise Failed(f"expected one result from `{shlex.join(command)}`, got {len(answer)}")
    return {key: figure(answer, key) for key in FIGURES[:2]} | {"peak_rss_mib": rss_mib}


def measure(command):
    try:
        return measure_once(command)
    except Failed as error:
        print(f"once more: {error}", file=sys.stderr, flush=True)
        return measure_once(command)


def pairs(first, second, repeats):
    """`repeats` pairs of figures of two commands, the order alternating; fewer if some fail."""
    out = []
    for repeat in range(repeats + 1):
        order = [0, 1] if repeat % 2 else [1, 0]
        try:
            pair = {side: measure((first, second)[side]) for side in order}
        except Failed as error:
            print(f"left out: {error}", file=sys.stderr, flush=True)
            if repeat == 0:
                raise  # twice in a row and nothing that worked: the others would fail too
            continue
        if repeat > 0:
            out.append((pair[0], pair[1]))
    if not out:
        raise Failed("no pair has both figures")
    return out


def summary(measured, key):
    """Medians of both sides, and the median, smallest and largest ratio of a pair."""
    ours, theirs = ([pair[side][key] for pair in measured] for side in (0, 1))
    ratios = [a / b for a, b in zip(ours, theirs)]
    return {"ours": statistics.median(ours), "other": statistics.median(theirs), "ratio": statistics.median(ratios),
            "ratio_min": min(ratios), "ratio_max": max(ratios)}


def table(rows):
    """Prints rows of cells in columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) if column else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip(), flush=True)


def machine():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} CPUs"


def save(path, **result):
    """Appends one line of JSON."""
    line = {"date": datetime.date.today().isoformat(), "machine": machine()} | result
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def thread_counts(text):
    """`1,all` as numbers, each once."""
    counts = [os.cpu_count() if part == "all" else int(part) for part in text.split(",")]
    return list(dict.fromkeys(counts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cli", help="our powerinfer program")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--llama-model", help="another file for llama.cpp, of the same model")
    parser.add_argument("-p", "--prompt", type=int, help="ids in the prompt (default: 512; 16 with --decode-only)")
    parser.add_argument("-n", "--decode", type=int, help="ids to decode (default: 128; 1 with --prefill-only)")
    parser.add_argument("-t", "--threads", default="1", help="thread counts, with commas; `all` is every CPU "
                        "(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs for each thread count (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=2, help="measurements in each process (default: %(default)s)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--prefill-only", action="store_true")
    only.add_argument("--decode-only", action="store_true")
    parser.add_argument("--ours-args", default="", help="more arguments for `powerinfer bench`, in one string")
    parser.add_argument("--save", type=Path, help="append a line of JSON for each thread count to this file")
    parser.add_argument("--llama-side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.prompt = args.prompt if args.prompt is not None else 16 if args.decode_only else 512
    args.decode = args.decode if args.decode is not None else 1 if args.prefill_only else 128
    if min(args.prompt, args.decode, args.repeats, args.inner) < 1:
        parser.error("-p, -n, --repeats and --inner must be at least 1")
    if args.llama_side:
        args.threads = int(args.threads)
        llama_side(args)
        return
    if not args.cli:
        parser.error("--cli is required")
    keys = [key for key in FIGURES if not (args.prefill_only and key == "decode_tok_s")
            and not (args.decode_only and key == "prefill_tok_s")]
    rows = [["figure", "threads", OURS, LLAMA, "ratio", "min", "max", "pairs"]]
    failed = False
    for threads in thread_counts(args.threads):
        sizes = (args.prompt, args.decode, threads, args.inner)
        theirs = llama_command(args.llama_model or args.model, *sizes)
        try:
            measured = pairs(our_command(args.cli, args.model, *sizes, shlex.split(args.ours_args)), theirs, args.repeats)
        except Failed as error:
            print(f"threads {threads}: {error}", file=sys.stderr)
            failed = True
            continue
        for key in keys:
            line = summary(measured, key)
            rows.append([key, str(threads), *(f"{line[k]:.2f}" for k in ("ours", "other")),
                         *(f"{line[k]:.3f}" for k in ("ratio", "ratio_min", "ratio_max")), str(len(measured))])
        if args.save:
            save(args.save, model=Path(args.model).name, other_model=Path(args.llama_model or args.model).name,
                 ours_args=args.ours_args, prompt=args.prompt, decode=args.decode, threads=threads,
                 pairs=[{OURS: a, LLAMA: b} for a, b in measured])
    table(rows)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
