"""The residual X - 1x^T is that of the one row x that makes it smallest.

Source 001, Definition 2.1: "x = arg min |X - 1 x'|_2", then bounded in |.|_(1,inf). Expected: the minimiser depends on the norm. Frobenius
and spectral: the column mean; |.|_1: the column median; |.|_inf: a linear program (the l1-centre); composite: not convex. The mean is
within a factor 2 (1 - 1/n) of the best.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from heedful.exact import composite_norm, l1_centre, residual

from .drawing import COLOURS, figure

VERDICT = (
    "wrong: each norm has a row of its own, the mean, the column medians or the l1-centre; the mean is within 2 (1 - 1/n) of them"
)
ERRATA = ("001.6",)
NORMS: dict[str, Any] = {
    "Frobenius": torch.linalg.matrix_norm,
    "spectral": lambda x: torch.linalg.matrix_norm(x, 2),
    "1": lambda x: torch.linalg.matrix_norm(x, 1),
    "inf": lambda x: torch.linalg.matrix_norm(x, torch.inf),
    "composite": composite_norm,
}
BEST = {"Frobenius": "mean", "spectral": "mean", "1": "median", "inf": "l1"}
CENTRES = ("mean", "median", "l1")
SIZES = {
    "tiny": {"tokens": 12, "dim": 4, "trials": 5},
    "small": {"tokens": 32, "dim": 12, "trials": 100},
    "full": {"tokens": 64, "dim": 24, "trials": 400},
}


def measure(size: str) -> dict[str, Any]:
    """|residual| by norm and centre over the smallest of the three: means and largest over heavy-tailed random states; the LP's proof."""
    setting = SIZES[size]
    draws, found, proof = torch.Generator().manual_seed(0), {norm: {c: [] for c in CENTRES} for norm in NORMS}, 0.0
    for _ in range(setting["trials"]):
        x = torch.randn(setting["tokens"], setting["dim"], generator=draws, dtype=torch.float64) ** 3
        centre = l1_centre(x)
        proof = max(proof, float(1 - centre.floor / centre.radius))
        for norm, measured in NORMS.items():
            sizes = {c: float(measured(residual(x, c))) for c in CENTRES}
            for c, value in sizes.items():
                found[norm][c].append(value / min(sizes.values()))
    means = {norm: {c: sum(v) / len(v) for c, v in by.items()} for norm, by in found.items()}
    worst = {norm: max(by["mean"]) for norm, by in found.items()}
    best = {norm: sum(v < 1 + 1e-9 for v in found[norm][c]) for norm, c in BEST.items()}
    return {**setting, "ratios": means, "worst of the mean": worst, "best": best, "unproved": proof}


def holds(numbers: dict[str, Any]) -> bool:
    """Each is best in its norm every time, by proof where it is a linear program, and the mean is as near as promised."""
    limit = 2 * (1 - 1 / numbers["tokens"])
    every = all(count == numbers["trials"] for count in numbers["best"].values())
    return every and numbers["unproved"] < 1e-7 and all(1 - 1e-9 <= w <= limit for w in numbers["worst of the mean"].values())


def figure_of(numbers: dict[str, Any]) -> str:
    worst = numbers["worst of the mean"]
    return (
        f"best in its norm in {min(numbers['best'].values())} of {numbers['trials']} trials each (n = {numbers['tokens']}); the mean is off by at most "
        f"{worst['1']:.2f} in |.|_1, {worst['inf']:.2f} in |.|_inf, {worst['composite']:.2f} in the composite norm; the LP is proved to {numbers['unproved']:.0e}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for shift, (centre, colour) in enumerate(zip(CENTRES, COLOURS, strict=False)):
            heights = [numbers["ratios"][norm][centre] for norm in NORMS]
            axes.bar([i + 0.27 * (shift - 1) for i in range(len(NORMS))], heights, 0.25, color=colour, label=centre)
        axes.set_xticks(range(len(NORMS)), list(NORMS))
        axes.set_ylim(0.95, None)
        axes.set_ylabel("|residual| over the smallest of the three")
        axes.set_xlabel("norm")
        axes.legend(title="centre", fontsize=8)
