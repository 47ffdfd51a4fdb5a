#!/usr/bin/env python3
"""Copies a GGUF model with every matrix in one type, through llama.cpp's own quantizer.

Makes the files that compare_llama_cpp.py times. All matrices get the same type, output head and embedding too
(llama.cpp's `pure`), so that a figure belongs to one kernel. Matrices whose rows do not fit a type's blocks get the
type that llama.cpp falls back to. The file appears under its name when it is complete.

Usage:
    python tools/quantize_llama_cpp.py -m F16.gguf -o Q4_K.gguf --type q4_k

Packages: pip install llama-cpp-python==0.3.36
"""
import argparse
import ctypes
import os
import sys
from pathlib import Path

import llama_cpp as lib

TYPES = {
    "f16": lib.LLAMA_FTYPE_MOSTLY_F16,
    "q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_1": lib.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q4_k": lib.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "q6_k": lib.LLAMA_FTYPE_MOSTLY_Q6_K,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--type", choices=TYPES, required=True)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--force", action="store_true", help="replace the output if it is there already")
    args = parser.parse_args()
    if args.out.exists() and not args.force:
        sys.exit(f"{args.out} exists already; --force replaces it")
    silent = lib.llama_log_callback(lambda *_: None)  # kept in a name: llama.cpp calls it until the process ends
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    params = lib.llama_model_quantize_default_params()
    params.ftype = TYPES[args.type]
    params.nthread = args.threads
    params.pure = True
    params.allow_requantize = True  # the caller sees from the name what the source was
    part = args.out.with_name(args.out.name + ".part")
    status = lib.llama_model_quantize(str(args.model).encode(), str(part).encode(), ctypes.byref(params))
    if status != 0:
        part.unlink(missing_ok=True)
        sys.exit(f"llama.cpp cannot quantize {args.model} to {args.type}: status {status}")
    os.replace(part, args.out)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
