"""Cutting the SVD of Z = X^+ B (X^+)^T off at rank r solves the low-rank regression of B on X.

Source 000, section 2: "a low rank regression problem ... we can approximate X (W_Q + dW_Q)(W_K + dW_K)^T X^T with a truncated SVD".
Expected: the minimiser of |B - X Z X^T| is the truncation in the metric of X, Z* = C^+1/2 trunc(C^+1/2 X^T B X C^+1/2) C^+1/2 with
C = X^T X, which is where alternating least squares end. The plain SVD captures of the reachable signal, at rank 4: .29 at condition 100
(worst .07), and at condition 1000 less than doing nothing. X^+ is the SVD's pseudo-inverse: (X^T X)^-1 X^T needs full column rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact.regression import lowrank_regression, plain_regression

from .drawing import COLOURS, figure, mark

VERDICT = (
    "wrong: the plain SVD of Z minimises |Z - Z_r|, not |B - X Z_r X^T|; the minimiser is truncated in the metric of X, with X^+ from the "
    "SVD where columns depend on each other"
)
ERRATA = ("000.2", "000.3")
CONDITIONS, RANK, DIM = (1.0, 10.0, 100.0, 1000.0, 10000.0), 4, 16
SIZES = {"tiny": {"rows": 32, "draws": 5}, "small": {"rows": 64, "draws": 50}, "full": {"rows": 128, "draws": 400}}
RECIPES = {"metric": lowrank_regression, "plain SVD": plain_regression}


def measure(size: str) -> dict[str, Any]:
    """The captured share of the reachable signal by condition: mean and worst; how far alternating least squares end from ours."""
    setting: Any = SIZES[size]
    shares = {name: {"mean": [], "worst": []} for name in RECIPES}
    for condition in CONDITIONS:
        found = {name: [] for name in RECIPES}
        for seed in range(setting["draws"]):
            x, b = drawn(setting["rows"], condition, seed)
            for name, recipe in RECIPES.items():
                found[name].append(captured(b, x, recipe(b, x, RANK).matrix))
        for name, values in found.items():
            shares[name]["mean"].append(sum(values) / len(values))
            shares[name]["worst"].append(min(values))
    return {**setting, "rank": RANK, "dim": DIM, "shares": shares, "alternating": alternating(), "dependent": dependent()}


def drawn(rows: int, condition: float, seed: int) -> tuple[Tensor, Tensor]:
    """X of that condition and a random B."""
    g = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, DIM, generator=g, dtype=torch.float64))[0] for n in (rows, DIM))
    falling = condition ** -torch.linspace(0, 1, DIM, dtype=torch.float64)
    return u * falling @ v.mT, torch.randn(rows, rows, generator=g, dtype=torch.float64)


def captured(b: Tensor, x: Tensor, z: Tensor) -> float:
    """Of what any Z of that rank can take away from |B|^2, the share that this one does."""
    u = torch.linalg.svd(x, full_matrices=False)[0]
    reachable = torch.linalg.svdvals(u.mT @ b @ u)[:RANK].square().sum()
    return float((b.square().sum() - (b - x @ z @ x.mT).square().sum()) / reachable)


def alternating(rounds: int = 500) -> float:
    """The relative difference between our residual and that of alternating least squares, from a near start."""
    x, b = drawn(24, 10.0, 0)
    ours = lowrank_regression(b, x, RANK)
    right = ours.right + 0.1 * ours.right.norm() * torch.randn(ours.right.shape, generator=torch.Generator().manual_seed(1)) / DIM
    left, pseudo = right, torch.linalg.pinv(x)
    for _ in range(rounds):
        left = pseudo @ b @ torch.linalg.pinv((x @ right).mT)
        right = (torch.linalg.pinv(x @ left) @ b @ pseudo.mT).mT
    residuals = [float((b - x @ z @ x.mT).norm()) for z in (ours.matrix, left @ right.mT)]
    return abs(residuals[0] - residuals[1]) / residuals[0]


def dependent() -> float:
    """With dependent columns: the relative difference between our full-rank answer and X^+ B (X^+)^T by the SVD."""
    x, b = drawn(24, 10.0, 0)
    x = torch.cat([x, x[:, :4]], 1)
    pseudo = torch.linalg.pinv(x, rtol=1e-12)
    truth = pseudo @ b @ pseudo.mT
    return float((lowrank_regression(b, x, DIM).matrix - truth).norm() / truth.norm())


def holds(numbers: dict[str, Any]) -> bool:
    metric, plain = numbers["shares"]["metric"], numbers["shares"]["plain SVD"]
    at = CONDITIONS.index(1000.0)
    exact = min(metric["worst"][: at + 1]) > 0.99 and numbers["alternating"] < 1e-8 and numbers["dependent"] < 1e-8
    return exact and plain["mean"][at] < 0.3


def figure_of(numbers: dict[str, Any]) -> str:
    cells = []
    for condition in (100.0, 1000.0):
        at = CONDITIONS.index(condition)
        both = (
            f"{name} {numbers['shares'][name]['mean'][at]:.3f} (worst {numbers['shares'][name]['worst'][at]:.3f})"
            for name in RECIPES
        )
        cells.append(f"condition {condition:g}: {', '.join(both)}")
    return f"captured at rank {RANK}, {'; '.join(cells)}; alternating least squares end {numbers['alternating']:.0e} away"


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for (name, found), colour in zip(numbers["shares"].items(), COLOURS, strict=False):
            axes.plot(CONDITIONS, found["mean"], "-o", color=colour, label=name)
            axes.plot(
                CONDITIONS, [max(v, -1.0) for v in found["worst"]], ":", color=colour, label=f"{name}, worst of {numbers['draws']}"
            )
        axes.set_xscale("log")
        mark(axes, CONDITIONS)
        axes.set(xlabel="condition of X", ylabel=f"share captured at rank {RANK}", ylim=(-1.05, 1.05))
        axes.legend(fontsize=8)
