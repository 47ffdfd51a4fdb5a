#!/usr/bin/env python3
"""Writes the golden data of powerinfer-sparse-ops/tests/blocks.rs.

Decoded and encoded blocks come from the PyPI package `gguf`, so that our own code is not compared with itself;
what that package lacks (rounding of activations) is computed here from the formulas, with numpy.

    pip install gguf==0.19.0 numpy
    python tools/make_block_goldens.py powerinfer-sparse-ops/tests/data

Little-endian, no headers:

    TYPE.blocks             random blocks, extreme scales included
    TYPE.f32                the same, decoded
    encode.f32              rows to encode
    encode.TYPE             the same, encoded
    activations.f32         a vector of 256-value blocks
    activations.q8_0 _1 _k  the same, rounded
"""

import sys
from pathlib import Path

import gguf
import numpy as np

TYPES = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL MXFP4".split()

# Where a block has its f16 scales, in bytes.
F16_AT = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}

# Zero, the smallest and largest subnormal, the smallest normal, one, the largest; as f16 bits.
EDGE_F16 = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF], np.uint16)


def random_f16(rng, n):
    """Finite f16 of all exponents, the edge cases first, as bits."""
    bits = rng.integers(0, 0x10000, n, dtype=np.uint16)
    bits = np.where(bits & 0x7C00 == 0x7C00, bits ^ 0x4000, bits)
    # Half of the blocks have scales as weights do.
    usual = (rng.standard_normal(n) * 0.02).astype(np.float16).view(np.uint16)
    bits = np.where(np.arange(n) % 2 == 0, bits, usual).astype(np.uint16)
    k = min(n - 1, len(EDGE_F16))
    bits[:k] = EDGE_F16[:k]
    return bits


def random_blocks(rng, name):
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    n = {1: 128, 32: 32, 256: 8}[block_len]
    blocks = rng.integers(0, 256, (n, block_bytes), dtype=np.uint8)
    if name == "F32":
        blocks = (rng.standard_normal(n) * 10.0 ** rng.integers(-38, 38, n)).astype(np.float32).view(np.uint8)
    elif name == "F16":
        blocks = random_f16(rng, n).view(np.uint8)
    elif name == "BF16":
        bits = rng.integers(0, 0x10000, n, dtype=np.uint16)
        blocks = np.where(bits & 0x7F80 == 0x7F80, bits ^ 0x4000, bits).astype(np.uint16).view(np.uint8)
    elif name == "MXFP4":
        # Above 252 a weight may be infinite.
        blocks[:, 0] = rng.integers(0, 253, n)
        blocks[:6, 0] = [0, 1, 2, 127, 128, 252]
    else:
        for at in F16_AT[name]:
            blocks[:, at:at + 2] = rng.permutation(random_f16(rng, n)).reshape(n, 1).view(np.uint8)
        # All bits set and none, with a scale of one.
        blocks[:2] = [[0], [255]]
        for at in F16_AT[name]:
            blocks[:2, at:at + 2] = np.array([0x3C00], np.uint16).view(np.uint8)
    return blocks.reshape(-1)


def row_that_tells_the_factors_apart(rng):
    """32 values for which a factor of 127 / amax and one of 1 / (amax / 127) give different integers."""
    while True:
        x = rng.standard_normal((100_000, 32)).astype(np.float32)
        amax = np.abs(x).max(axis=1, keepdims=True)
        a = np.rint(x * (np.float32(127) / amax))
        b = np.rint(x * (np.float32(1) / (amax / np.float32(127))))
        differ = (a != b).any(axis=1)
        if differ.any():
            return x[np.argmax(differ)]


def rows_to_encode(rng):
    rows = rng.standard_normal((24, 32)) * 10.0 ** np.linspace(-6, 3, 24)[:, None]
    rows[0] = 0
    rows[1] = 0.75
    rows[2] = -rows[1]
    # Scale one, values on halves: shows which way they are rounded.
    rows[3] = np.arange(32) - 15.5
    rows[3, 31] = 127
    rows[4] = np.arange(32) / 4 - 3.5
    rows[4, 0] = -8
    rows[5] = rows[4] * -1
    # Two peaks of opposite sign: the first one counts.
    rows[6, 5], rows[6, 9] = 0.125, -0.125
    rows[7, 5], rows[7, 9] = -90.0, 90.0
    rows[8] = row_that_tells_the_factors_apart(rng)
    return rows.astype(np.float32)


def round_to_q8_0(x):
    """Blocks of 32 with an f16 scale; also returns scale and integers for the other 32-value form."""
    x = x.reshape(-1, 32)
    amax = np.abs(x).max(axis=1, keepdims=True)
    factor = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax != 0)
    q = np.rint(x * factor).astype(np.int8)
    scale = amax / np.float32(127)
    return np.hstack([scale.astype(np.float16).view(np.uint8), q.view(np.uint8)]), scale, q


def round_to_q8_1(x):
    _, scale, q = round_to_q8_0(x)
    total = scale * q.astype(np.int32).sum(axis=1, keepdims=True).astype(np.float32)
    return np.hstack([scale.view(np.uint8), total.view(np.uint8), q.view(np.uint8)])


def round_to_q8_k(x):
    out = []
    for block in x.reshape(-1, 256):
        peak = block[np.argmax(np.abs(block))]
        scale, q = np.float32(0), np.zeros(256, np.int8)
        if peak != 0:
            factor = np.float32(-128) / peak
            q = np.minimum(127, np.rint(block * factor)).astype(np.int8)
            scale = np.float32(1) / factor
        sums = q.reshape(16, 16).astype(np.int16).sum(axis=1, dtype=np.int16)
        out += [np.array([scale], np.float32).view(np.uint8), q.view(np.uint8), sums.view(np.uint8)]
    return np.concatenate(out)


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(20240229)
    for name in TYPES:
        blocks = random_blocks(rng, name)
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        assert values.dtype == np.float32 and np.isfinite(values).all(), name
        blocks.tofile(folder / f"{name.lower()}.blocks")
        values.tofile(folder / f"{name.lower()}.f32")

    rows = rows_to_encode(rng)
    rows.tofile(folder / "encode.f32")
    for name in ["F16", "BF16", "Q8_0", "Q4_0"]:
        encoded = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
        encoded.tofile(folder / f"encode.{name.lower()}")

    x = (rng.standard_normal((6, 256)) * 10.0 ** np.linspace(-5, 3, 6)[:, None]).astype(np.float32)
    x[0] = 0
    # Factors of one and minus one (for the 256-value form), values on halves: these go to even.
    x[1] = np.arange(256) / 2 - 63.5
    x[1, ::32] = 127
    x[2] = np.arange(256) / 4 - 32
    x[2, 7], x[2, 9] = 128, -128
    x[3, :32] = row_that_tells_the_factors_apart(rng)
    x.tofile(folder / "activations.f32")
    round_to_q8_0(x)[0].tofile(folder / "activations.q8_0")
    round_to_q8_1(x).tofile(folder / "activations.q8_1")
    round_to_q8_k(x).tofile(folder / "activations.q8_k")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
