#!/usr/bin/env python3
"""Opens GGUF files that we wrote with other people's readers: the `gguf` package, and llama.cpp when asked.

Checked with `gguf`: the header, that each tensor's offset is a multiple of the alignment, that its bytes lie inside the
file and inside no other tensor, that the byte count fits type and shape, that names are unique, that F32, F16 and
quantised values are finite, that there is a key `general.architecture`, and that the vocabulary's arrays are of one
length. Files with the magic `PWRI` are read too, through a temporary copy that starts with `GGUF`.

Usage:
    python tools/check_gguf_writer.py FILE...              # pip install gguf
    python tools/check_gguf_writer.py --list FILE          # print keys and tensors too
    python tools/check_gguf_writer.py --llama-cpp vocab FILE...   # pip install llama-cpp-python==0.3.36
    python tools/check_gguf_writer.py --llama-cpp full FILE...    # load all tensors and decode one token

llama.cpp has no architecture `opt` and reads no sparse (`PWRI`) file: those fail with --llama-cpp.
Exit status: 0 all files right, 1 not.
"""
import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFReader
from gguf.quants import dequantize

SPARSE_MAGIC = b"PWRI"


def check_tensors(reader, file_bytes):
    faults, spans, seen = [], [], set()
    for t in reader.tensors:
        block, block_bytes = GGML_QUANT_SIZES[t.tensor_type]
        shape = [int(n) for n in t.shape]
        if t.name in seen:
            faults.append(f"tensor `{t.name}` appears twice")
        seen.add(t.name)
        if shape[0] % block:
            faults.append(f"tensor `{t.name}`: row length {shape[0]} is not a multiple of {block}")
        expected = int(np.prod(shape)) // block * block_bytes
        if int(t.n_bytes) != expected:
            faults.append(f"tensor `{t.name}`: expected {expected} bytes, got {t.n_bytes}")
        start = int(t.data_offset)
        if (start - reader.data_offset) % reader.alignment:
            offset = start - reader.data_offset
            faults.append(f"tensor `{t.name}`: offset {offset} is not a multiple of {reader.alignment}")
        spans.append((start, start + expected, t.name))
        if t.tensor_type.name not in ("I8", "I16", "I32", "I64"):
            if not np.isfinite(dequantize(t.data, t.tensor_type)).all():
                faults.append(f"tensor `{t.name}`: a value is not finite")
    spans.sort()
    for (_, end, name), (start, _, following) in zip(spans, spans[1:]):
        if end > start:
            faults.append(f"tensors `{name}` and `{following}` overlap")
    if spans and spans[-1][1] > file_bytes:
        faults.append(f"tensor `{spans[-1][2]}` ends at byte {spans[-1][1]}, the file at {file_bytes}")
    return faults


def check_keys(reader):
    faults = []
    if "general.architecture" not in reader.fields:
        faults.append("key `general.architecture` is missing")
    lengths = {key: len(reader.fields[key].data) for key in
               ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type") if key in reader.fields}
    if len(set(lengths.values())) > 1:
        faults.append(f"vocabulary arrays differ in length: {lengths}")
    embd = next((t for t in reader.tensors if t.name == "token_embd.weight"), None)
    n_vocab = lengths.get("tokenizer.ggml.tokens")
    if embd is not None and n_vocab is not None and int(embd.shape[1]) != n_vocab:
        faults.append(f"token_embd.weight has {embd.shape[1]} rows, the vocabulary {n_vocab} tokens")
    return faults


def load_in_llama_cpp(path, how):
    from llama_cpp import Llama
    try:
        if how == "vocab":
            Llama(str(path), vocab_only=True, verbose=False).close()
            return []
        llm = Llama(str(path), n_ctx=32, logits_all=True, verbose=False)
        llm.eval([1])
        finite = np.isfinite(np.array(llm.scores[:1])).all()
        llm.close()
        return [] if finite else ["llama.cpp: a logit is not finite"]
    except (ValueError, RuntimeError) as error:
        return [f"llama.cpp: {error}"]


def print_listing(reader):
    for key, field in reader.fields.items():
        text = str(field.contents()) if len(field.data) < 50 else f"array of {len(field.data)}"
        print(f"    {key} = {text}")
    for t in reader.tensors:
        print(f"    {t.name:32} {t.tensor_type.name:5} {[int(n) for n in t.shape]}")


def check(path, args, folder):
    """The faults of one file."""
    with open(path, "rb") as f:
        sparse = f.read(4) == SPARSE_MAGIC
    readable = path
    if sparse:
        readable = Path(folder) / "dense-magic.gguf"
        shutil.copyfile(path, readable)
        with open(readable, "r+b") as f:
            f.write(b"GGUF")
    try:
        reader = GGUFReader(str(readable))
        faults = check_tensors(reader, path.stat().st_size) + check_keys(reader)
    except Exception as error:  # the package raises many kinds; any of them means that it cannot read the file
        return [f"gguf: {type(error).__name__}: {error}"]
    if args.list:
        print_listing(reader)
    if args.llama_cpp:
        faults += ["llama.cpp does not read sparse files"] if sparse else load_in_llama_cpp(readable, args.llama_cpp)
    if not faults:
        print(f"{path}: ok, {'PWRI' if sparse else 'GGUF'}, {len(reader.fields)} keys, {len(reader.tensors)} tensors")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print keys and tensors")
    parser.add_argument("--llama-cpp", choices=["vocab", "full"], help="also load the file with llama-cpp-python")
    args = parser.parse_args()
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        for path in args.files:
            faults = check(path, args, folder)
            broken += bool(faults)
            for fault in faults:
                print(f"{path}: {fault}")
    print(f"{len(args.files) - broken} passed, {broken} failed")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
