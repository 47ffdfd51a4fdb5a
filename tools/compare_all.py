#!/usr/bin/env python3
"""Runs every comparison that the project sets itself and prints ratio, goal and whether it is met.

The ratio is ours / llama.cpp on the dense file; how it is measured says compare_llama_cpp.py. Lines whose files are missing are skipped. A line that fails is reported and the
rest goes on. Exit status 1 if a line failed; goals that are missed do not count as failures.

Usage:
    python tools/compare_all.py --cli target/release/powerinfer --models FOLDER
    python tools/compare_all.py --cli ... --models FOLDER --only decode --threads 1 --save benches/record/NAME.jsonl

The folder holds NAME.dense.TYPE.gguf and NAME.pwri.TYPE.gguf for the names given by --size and --prefill-size, and
smol.TYPE.gguf (SmolLM2), and calibrations NAME.TYPE.cal.safetensors that `powerinfer calibrate --all-layers -o` wrote
for the sparse files. quantize_llama_cpp.py makes the dense ones from F16, `powerinfer quantize` the others.
"""
import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from compare_llama_cpp import (Failed, llama_command, our_command, pairs, save, summary, table, thread_counts)


@dataclass
class Case:
    """One line: our file and arguments, the other file, and what is compared."""
    group: str
    ours: str
    other: str
    figure: str
    # Ours / other with one thread and with more; 1 is "not slower".
    goals: tuple
    ours_args: tuple = ()


def cases(size, prefill_size):
    out = []

    def add(group, ours, other, figure, goals, **more):
        out.append(Case(group, f"{ours}.gguf", f"{other}.gguf", figure, goals, **more))

    dense = [f"smol.{ty}" for ty in ("q4_1", "q8_0")]
    dense += [f"{size}.dense.{ty}" for ty in ("f16", "q8_0", "q4_0", "q4_k")]
    for name in dense:
        add("decode", name, name, "decode_tok_s", (1.0, 1.0))
    for ty in ("f16", "q8_0", "q4_0"):
        name = f"{prefill_size}.dense.{ty}"
        add("prefill", name, name, "prefill_tok_s", (1.0, 1.0))
    for ty in ("f16", "q8_0", "q4_0"):
        add("pwri-prefill", f"{prefill_size}.pwri.{ty}", f"{prefill_size}.dense.{ty}", "prefill_tok_s", (0.8, 0.8))
    # Calibrations of the sparse files lie beside them under another name, so that nothing takes them by itself.
    for ty, args, goals in (
        ("f16", "--mode predictor", (2.2, 1.8)),
        ("q4_0", "--mode predictor", (2.2, 2.0)),
        ("f16", "--mode exact --certified off", (1.6, 1.45)),
        ("q4_0", "--mode exact", (1.7, 1.5)),
        ("f16", "--mode exact --certified on", (2.0, 1.7)),
        ("f16", "--mode predictor --calibration {models}/{size}.f16.cal.safetensors", (2.2, 1.9)),
        ("q4_0", "--mode predictor --calibration {models}/{size}.q4_0.cal.safetensors", (2.0, 1.7)),
    ):
        add("sparse", f"{size}.pwri.{ty}", f"{size}.dense.{ty}", "decode_tok_s", goals, ours_args=tuple(args.split()))
    return out


def measured_row(args, case, threads):
    """The cells of a line, or None if a file is missing."""
    ours, other = args.models / case.ours, args.models / case.other
    if not (ours.exists() and other.exists()):
        return None
    prefill = case.figure == "prefill_tok_s"
    prompt, decode = (args.prompt, 1) if prefill else (16, args.decode)
    sizes = (prompt, decode, threads, args.inner)
    names = {"models": args.models, "size": args.size}
    ours_args = tuple(argument.format(**names) for argument in case.ours_args)
    goal = case.goals[0 if threads == 1 else 1]
    measured = pairs(our_command(args.cli, ours, *sizes, ours_args), llama_command(other, *sizes), args.repeats)
    line = summary(measured, case.figure)
    if args.save:
        save(args.save, model=case.ours, other_model=case.other, ours_args=" ".join(case.ours_args),
             figure=case.figure, goal=goal,
             prompt=prompt, decode=decode, threads=threads, n_pairs=len(measured), **line)
    met = "yes" if line["ratio"] >= goal else "no"
    return [f"{line['ours']:.2f}", f"{line['other']:.2f}", f"{line['ratio']:.3f}",
            f"{line['ratio_min']:.3f}..{line['ratio_max']:.3f}", f"{goal:.2f}", met]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cli", required=True, help="our powerinfer program")
    parser.add_argument("--models", type=Path, required=True, help="folder with the files")
    parser.add_argument("--size", default="1b", help="name of the model for decoding (default: %(default)s)")
    parser.add_argument("--prefill-size", default="160m", help="name of the model for prompts (default: %(default)s)")
    parser.add_argument("--only", help="groups, with commas: decode, prefill, pwri-prefill, sparse")
    parser.add_argument("--threads", default="1,all")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2, help="pairs of each line (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=2, help="measurements in each process (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="append a line of JSON for each line of the table to this file")
    args = parser.parse_args()
    groups = set(args.only.split(",")) if args.only else None
    head = ["comparison", "threads", "ours", "other", "ratio", "min..max", "goal", "met"]
    rows, failed = [head], False
    for case in cases(args.size, args.prefill_size):
        if groups and case.group not in groups:
            continue
        name = " ".join([case.group, case.ours.removesuffix(".gguf"), *case.ours_args[1:]])
        for threads in thread_counts(args.threads):
            try:
                cells = measured_row(args, case, threads) or ["file missing", *[""] * 5]
            except Failed as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                cells, failed = ["failed", *[""] * 5], True
            rows.append([name, str(threads), *cells])
            print("  ".join(cell for cell in rows[-1] if cell), file=sys.stderr, flush=True)
    table(rows)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
