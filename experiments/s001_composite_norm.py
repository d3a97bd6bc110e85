"""The composite norm sqrt(|X|_1 |X|_inf) measures a distance.

Source 001, Definition 2.1, and problem 2: "If a norm does not satisfy triangle inequality, can it represent distance?". Expected: no.
A = 1 e_1^T and B = A^T, n = 16, give |A + B| = 17 > 8 = |A| + |B|, a ratio of (n + 1) / (2 sqrt n) that grows without end. It is
homogeneous and submultiplicative, so a sum over heads needs |.|_1 and |.|_inf separately.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from heedful.exact import composite_norm

from .drawing import COLOURS, figure, mark

VERDICT = "wrong: it breaks the triangle inequality by (n + 1) / (2 sqrt n); it is homogeneous and submultiplicative only"
ERRATA = ("001.5", "001.P2")
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"tokens": (4, 16, 64), "trials": 50},
    "small": {"tokens": (4, 16, 64, 256, 1024), "trials": 1000},
    "full": {"tokens": (4, 16, 64, 256, 1024, 4096), "trials": 5000},
}


def measure(size: str) -> dict[str, Any]:
    """|A + B| / (|A| + |B|) at its worst by n, and the largest |AB| / (|A| |B|) and the broken triangles among random products."""
    setting = SIZES[size]
    ratios = [ratio(*crossed(n)) for n in setting["tokens"]]
    draws = torch.Generator().manual_seed(0)
    product, broken = 0.0, 0
    for _ in range(setting["trials"]):
        a, b = torch.randn(2, 6, 6, generator=draws, dtype=torch.float64) ** 5
        product = max(product, float(composite_norm(a @ b) / composite_norm(a) / composite_norm(b)))
        broken += ratio(a, b) > 1
    return {**setting, "ratios": ratios, "product": product, "broken": broken, "sum of 16": float(composite_norm(sum(crossed(16))))}  # type: ignore[arg-type]


def crossed(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A column of ones and a row of ones."""
    a = torch.zeros(n, n, dtype=torch.float64)
    a[:, 0] = 1
    return a, a.mT


def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(composite_norm(a + b) / (composite_norm(a) + composite_norm(b)))


def holds(numbers: dict[str, Any]) -> bool:
    wanted = [(n + 1) / (2 * n**0.5) for n in numbers["tokens"]]
    met = all(abs(a - b) < 1e-12 * b for a, b in zip(numbers["ratios"], wanted, strict=True))
    return met and numbers["sum of 16"] == 17 and numbers["product"] <= 1 + 1e-12


def figure_of(numbers: dict[str, Any]) -> str:
    n, worst = numbers["tokens"][-1], numbers["ratios"][-1]
    return (
        f"n = 16: |A + B| = {numbers['sum of 16']:g} > 8 = |A| + |B|; n = {n}: {worst:.3g} times; broken by {numbers['broken']} of "
        f"{numbers['trials']} random heavy-tailed pairs; |AB| / (|A| |B|) at most {numbers['product']:.2g}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        axes.loglog(numbers["tokens"], numbers["ratios"], "-o", color=COLOURS[0], label="column and row of ones", markersize=4)
        axes.axhline(1, color="grey", linestyle="--", label="triangle inequality")
        mark(axes, numbers["tokens"])
        axes.set_xlabel("n")
        axes.set_ylabel("|A + B| / (|A| + |B|)")
        axes.legend(fontsize=8)
