#!/usr/bin/env python3
"""Compares our logits for SmolLM2-135M-Instruct with llama.cpp's stored greedy answers.

For each stored prompt our CLI gets the prompt's ids followed by the stored greedy ids (all but the last), so that one
different choice does not hide what comes after it. The rule, at every step and per prompt:

    * each of the ten stored logits is within 1.5 of ours;
    * the median of those differences over a prompt is at most 0.6;
    * our arg max is the stored id wherever the two best stored logits are at least 0.4 apart.

The limits are wide because the matrices are Q4_1: two right implementations that round activations differently end up
about 1 apart after 30 layers.

Usage:
    python tools/check_smollm2.py --cli target/release/powerinfer --golden smollm2-greedy.json \\
        --model models/SmolLM2-135M-Instruct.Q4_1.gguf [--mode dense] [--threads 2]

Needs only Python's standard library. Our CLI is called as
    powerinfer logits -m FILE --tokens 1,2,3 [--mode M] [--threads N] --out FILE.json
and writes {"logits": [[n_vocab values] for each token]}. Exit status: 0 passed, 1 not.
"""
import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_DIFFERENCE = 1.5
MAX_MEDIAN = 0.6
CLEAR_GAP = 0.4


def our_logits(args, ids, folder):
    """Rows of logits, one for each id."""
    out = Path(folder) / "logits.json"
    command = [args.cli, "logits", "-m", args.model, "--tokens", ",".join(map(str, ids)), "--out", str(out)]
    if args.mode:
        command += ["--mode", args.mode]
    if args.threads:
        command += ["--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"`{args.cli} logits` exited with {done.returncode}:\n{done.stderr.strip()}")
    answer = json.loads(out.read_text())
    out.unlink()
    rows = answer["logits"] if isinstance(answer, dict) else answer
    if len(rows) != len(ids):
        sys.exit(f"expected {len(ids)} rows of logits, got {len(rows)}")
    return rows


def check_prompt(prompt, rows):
    """The broken rules of one prompt, and its figures. `rows[i]` are our logits where step i was chosen."""
    faults, differences, same, clear = [], [], 0, 0
    for step, (stored_id, top10, row) in enumerate(zip(prompt["greedy_ids"], prompt["top10"], rows, strict=True)):
        here = [abs(row[i] - logit) for i, logit in top10]
        differences += here
        if not all(math.isfinite(d) for d in here) or max(here) > MAX_DIFFERENCE:
            faults.append(f"step {step}: a stored logit is {max(here):.3f} away, limit {MAX_DIFFERENCE}")
        best = max(range(len(row)), key=row.__getitem__)
        gap = top10[0][1] - top10[1][1]
        same += best == stored_id
        clear += gap >= CLEAR_GAP
        if best != stored_id and gap >= CLEAR_GAP:
            faults.append(f"step {step}: chose {best}, stored {stored_id}, gap {gap:.3f}")
    median = statistics.median(differences)
    if not median <= MAX_MEDIAN:
        faults.append(f"median difference {median:.3f}, limit {MAX_MEDIAN}")
    steps = len(prompt["greedy_ids"])
    return faults, f"max {max(differences):.3f}  median {median:.3f}  same id {same}/{steps} (clear gap in {clear})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cli", required=True, help="our powerinfer program")
    parser.add_argument("--model", required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--golden", type=Path, required=True, help="smollm2-greedy.json")
    parser.add_argument("--mode", choices=["dense", "exact", "predictor"])
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    golden = json.loads(args.golden.read_text())
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, prompt in enumerate(golden["prompts"]):
            n_prompt = len(prompt["prompt_ids"])
            rows = our_logits(args, prompt["prompt_ids"] + prompt["greedy_ids"][:-1], folder)[n_prompt - 1:]
            faults, figures = check_prompt(prompt, rows)
            broken += bool(faults)
            print(f"prompt {number}: {'ok' if not faults else 'FAIL'}  {figures}")
            for fault in faults:
                print(f"    {fault}")
    print(f"{len(golden['prompts']) - broken} passed, {broken} failed")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
