"""A layer takes O(n) recurrent, O(n^2) as a transformer, O(n sqrt n) sparse, O(n log n) in Reformer and O(n) in Linformer.

Source 001, table 1: "Per-layer time complexity and minimum number of sequential operations as a function of sequence length (n)". Expected:
with the width d written out attention takes n^2 d and a recurrent layer n d^2, so that for n < d attention is the cheaper; the recurrent
layer's operations wait for one another n times. Multiplications of the layers are counted, not timed (benchmarks.complexity times them).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from benchmarks.complexity import Chain
from heedful import mechanisms
from heedful.attention import Mechanism
from heedful.benching.recurrent import Recurrent

from .drawing import COLOURS, figure, mark

VERDICT = (
    "holds if the width d is held fixed; with it attention takes n^2 d, a recurrent layer n d^2, and the shorter of n and d decides "
    "which is cheaper; O(n log n) of Reformer is its sorting, its multiplications are O(n d)"
)
ERRATA = ("001.11",)

SIZES = {
    "tiny": {"lengths": (64, 256), "dims": (16, 32, 64), "at": (64, 32)},
    "small": {"lengths": (256, 1024, 4096), "dims": (16, 32, 64), "at": (256, 32)},
    "full": {"lengths": (1024, 4096, 16384), "dims": (32, 64, 128), "at": (1024, 64)},
}
FUSED: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch's counter knows only those of GPUs
EXPECTED = {"Softmax": (2.0, 1.0), "Recurrent": (1.0, 2.0), "Sparse": (1.5, 1.0), "Reformer": (1.0, 1.0), "Linformer": (1.0, 1.0)}


def layers(longest: int) -> dict[str, Mechanism]:
    """The rows of the table: buckets and projected keys are held fixed."""
    linformer = mechanisms.Linformer(keys=32, length=longest)
    return {
        "Softmax": mechanisms.Softmax(),
        "Recurrent": Recurrent(),
        "Sparse": mechanisms.Sparse(),
        "Reformer": mechanisms.Reformer(),
        "Linformer": linformer,
    }


def measure(size: str) -> dict[str, Any]:
    """Multiplications by length and by width with their powers, and the operations of a forward pass that wait for one another."""
    setting: Any = SIZES[size]
    lengths, dims, (length, dim) = setting["lengths"], setting["dims"], setting["at"]
    found: dict[str, Any] = {}
    for name in EXPECTED:
        by_length = [multiplications(name, n, dim) for n in lengths]
        by_dim = [multiplications(name, length, d) for d in dims]
        waits = [waiting(name, n) for n in (32, 64)]
        found[name] = {
            "by_length": by_length,
            "powers": (power(lengths[-2:], by_length[-2:]), power(dims, by_dim)),
            "waiting": power((32, 64), waits),
        }
    return {**setting, "layers": found}


def call(name: str, length: int, dim: int) -> Any:
    """A forward pass of one layer, with the steps of a recurrent one laid open."""
    layer, q = layers(length)[name], torch.randn(1, 1, length, dim)
    layer(q, q, q)  # makes its tensors
    return lambda: layer(q, q, q)


@torch.no_grad()
def multiplications(name: str, length: int, dim: int) -> int:
    case = call(name, length, dim)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False, custom_mapping={FUSED: fused}) as counter:
        case()
    return counter.get_total_flops() // 2


def fused(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    return sdpa_flop_count(q, k, v)


@torch.no_grad()
def waiting(name: str, length: int) -> int:
    case = call(name, length, 16)
    with torch.backends.mkldnn.flags(enabled=False), Chain() as chain:
        case()
    return chain.longest


def power(sizes: tuple[int, ...], counts: list[int]) -> float:
    return round(math.log(counts[-1] / counts[0]) / math.log(sizes[-1] / sizes[0]), 3)


def holds(numbers: dict[str, Any]) -> bool:
    """Every power within .2 of the table's, and only the recurrent layer waits n times."""
    found = numbers["layers"]
    right = all(abs(p - q) < 0.2 for name, wanted in EXPECTED.items() for p, q in zip(found[name]["powers"], wanted, strict=True))
    return right and all((row["waiting"] > 0.9) == (name == "Recurrent") for name, row in found.items())


def figure_of(numbers: dict[str, Any]) -> str:
    said = (f"{name} n^{row['powers'][0]:.2f} d^{row['powers'][1]:.2f}" for name, row in numbers["layers"].items())
    waits = ", ".join(f"{name} n^{row['waiting']:.2f}" for name, row in numbers["layers"].items() if row["waiting"] > 0.5)
    return f"multiplications counted: {', '.join(said)}; operations in sequence: {waits}, the others n^0"


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for (name, row), colour in zip(numbers["layers"].items(), COLOURS, strict=False):
            label = f"{name}: n^{row['powers'][0]:.2f} d^{row['powers'][1]:.2f}"
            axes.loglog(numbers["lengths"], row["by_length"], "-o", color=colour, markersize=4, label=label)
        mark(axes, numbers["lengths"])
        axes.set(xlabel="tokens n", ylabel=f"multiplications, d = {numbers['at'][1]}")
        axes.legend(fontsize=8)
