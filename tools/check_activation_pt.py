#!/usr/bin/env python3
"""Files `activation_N.pt` against PyTorch itself (needs torch, numpy and safetensors).

    check_activation_pt.py fixtures FOLDER        writes the files that the tests of powerinfer-predictor read
    check_activation_pt.py compare COUNTS FOLDER  files written by us against the statistics that they were made of

`compare` loads each file with `weights_only=True`, as a careful program does, and once more as the original
PowerInfer's solver does, and compares every number.
"""

import sys
from pathlib import Path

import torch

N_FF = 7


def counts(layer: int) -> torch.Tensor:
    """Numbers that tell the layer: its own first, then every one of them once."""
    return torch.tensor([layer] + [(3 * layer + 5 * j) % 17 for j in range(1, N_FF)])


def fixtures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "twelve").mkdir(exist_ok=True)
    for layer in range(12):
        torch.save(counts(layer), folder / "twelve" / f"activation_{layer}.pt")
    want = counts(1)
    types = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
    types += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    good = {f"good_{str(ty).removeprefix('torch.')}": want.to(ty) for ty in types}
    good["good_row"] = torch.stack([counts(0), want, counts(2)])[1]
    good["good_column"] = torch.stack([counts(0), want, counts(2)], dim=1)[:, 1]
    good["good_parameter"] = torch.nn.Parameter(want.to(torch.float32))
    good["good_parameter_plain"] = want.to(torch.float32).requires_grad_()
    bad = {
        "bad_dict": {"activation": want},
        "bad_list": [want],
        "bad_number": 7,
        "bad_bool": want > 3,
        "bad_complex": want.to(torch.complex64),
        "bad_uint32": want.to(torch.uint32),
        "bad_two_dimensions": want.reshape(1, N_FF),
        "bad_scalar": torch.tensor(3),
        "bad_empty": torch.tensor([], dtype=torch.int64),
        "bad_repeated": torch.tensor([3]).expand(N_FF),
        "bad_sparse": want.to_sparse(),
        "bad_negative": -want,
        "bad_half": want.to(torch.float32) + 0.5,
        "bad_nan": torch.tensor([1.0, float("nan")]),
        "bad_infinite": torch.tensor([1.0, float("inf")]),
        "bad_huge": torch.tensor([1.0, 1e30]),
    }
    for name, value in (good | bad).items():
        torch.save(value, folder / f"{name}.pt")
    torch.save(want, folder / "bad_legacy.pt", _use_new_zipfile_serialization=False)
    print(f"written: {len(list(folder.rglob('*.pt')))} files in {folder}")


def compare(statistics: Path, folder: Path) -> None:
    from safetensors.torch import load_file

    want = load_file(statistics)
    layers = sorted(int(name.removeprefix("activation_")) for name in want if name.startswith("activation_"))
    for layer in layers:
        path = folder / f"activation_{layer}.pt"
        for got in (torch.load(path, weights_only=True), torch.load(path, weights_only=False)):
            assert got.dtype == torch.int64 and got.is_contiguous(), (path, got.dtype)
            assert torch.equal(got, want[f"activation_{layer}"]), path
    assert len(list(folder.glob("activation_*.pt"))) == len(layers), "files of other layers"
    print(f"{len(layers)} layers are the same in {statistics} and {folder}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fixtures", folder]:
            fixtures(Path(folder))
        case ["compare", statistics, folder]:
            compare(Path(statistics), Path(folder))
        case _:
            sys.exit(__doc__)
