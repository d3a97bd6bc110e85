"""The regression is of one X: with a batch of texts each has its own, and no closed form gives the minimiser of the sum.

Source 000, section 2: "f(Z) = |B - X Z X^T|^2", with X in R^{d_s x d_e}, one text; b is named but never met. Expected: A(Z) = sum_b X_b^T F(X_b Z
X_b^T) X_b is applied, never inverted; conjugate gradients then truncation in the metric keep .998 of the best decrease at every
heterogeneity of the texts, Kronecker factors alone .99 .82 .78, the plain SVD .77 .98 1.00, GradMax .56 .50 .67. Constraint or penalty
(remark 7: |dS| <= gamma against the regression): the same direction, eta is only the length of the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact.metric import Metric
from heedful.exact.operators import conjugate_gradients
from heedful.exact.regression import gradmax, lowrank_solution, truncate

from .drawing import COLOURS, figure

VERDICT = (
    "holds if there is one text: for a batch the problem is linear but not Kronecker; conjugate gradients, then a truncation in the metric, "
    "solve it nearly exactly, closed forms from mean moments do not"
)
ERRATA = ("000.4", "000.7")
MIXED = (0.0, 0.5, 1.0)  # how far the texts' covariances differ
DIM, RANK = 10, 3
SIZES = {
    "tiny": {"texts": 6, "tokens": 12, "draws": 1},
    "small": {"texts": 24, "tokens": 24, "draws": 10},
    "full": {"texts": 64, "tokens": 32, "draws": 40},
}


def measure(size: str) -> dict[str, Any]:
    """The decrease of <N, Z> + <Z, A Z> / 2 by recipe and heterogeneity, as a share of the full-rank optimum's best rank-r part."""
    setting: Any = SIZES[size]
    shares: dict[str, list[float]] = {}
    for mixed in MIXED:
        found = [once(seed, mixed, setting["texts"], setting["tokens"]) for seed in range(setting["draws"])]
        for name in found[0]:
            shares.setdefault(name, []).append(sum(f[name] for f in found) / len(found))
    return {**setting, "dim": DIM, "rank": RANK, "shares": shares}


def once(seed: int, mixed: float, texts: int, tokens: int) -> dict[str, float]:
    """Shares of the decrease of the best Z of that rank, found by alternating exact solves."""
    g = torch.Generator().manual_seed(seed)
    x = torch.stack([text(tokens, mixed, g) for _ in range(texts)])
    force = torch.randn(texts, tokens, RANK, generator=g, dtype=torch.float64)
    gradient = force @ torch.randn(texts, tokens, RANK, generator=g, dtype=torch.float64).mT + (x @ hidden(g) @ x.mT)
    causal = torch.ones(tokens, tokens, dtype=torch.float64).tril()

    def apply(z: Tensor) -> Tensor:
        return (x.mT @ (causal * (x @ z @ x.mT)) @ x).sum(0)

    n = (x.mT @ (causal * gradient) @ x).sum(0)
    gram = (x.mT @ x).sum(0)
    metric, flat = Metric.of(gram / gram.diagonal().mean().sqrt()), Metric.of(gram, float("inf"))
    full = -conjugate_gradients(apply, n, steps=400, tolerance=1e-12)
    steps = {
        "CG, then metric": truncate(full, metric, metric, RANK).matrix,
        "Kronecker": -lowrank_solution(n, metric, metric, RANK).matrix,
        "plain SVD": truncate(full, None, None, RANK).matrix,
        "GradMax": -gradmax(n, RANK).matrix,
    }
    best = max(decrease(refined(z, n, apply), n, apply) for z in (*steps.values(), truncate(full, flat, flat, RANK).matrix))
    return {name: decrease(z, n, apply) / best for name, z in steps.items()}


def text(tokens: int, mixed: float, g: torch.Generator) -> Tensor:
    """Rows whose scales by dim are those of all texts, and by `mixed` the text's own."""
    common = torch.linspace(1, -1, DIM, dtype=torch.float64)
    own = torch.randn(DIM, generator=g, dtype=torch.float64)
    return torch.randn(tokens, DIM, generator=g, dtype=torch.float64) * (common + mixed * own).exp()


def hidden(g: torch.Generator) -> Tensor:
    return torch.randn(DIM, DIM, generator=g, dtype=torch.float64)


def decrease(z: Tensor, n: Tensor, apply: Any) -> float:
    """Of the quadratic along z, at its best length: the constrained and the penalised problem give the same ray."""
    slope, bend = -float((n * z).sum()), float((z * apply(z)).sum())
    return max(slope, 0.0) ** 2 / (2 * bend)


def refined(z: Tensor, n: Tensor, apply: Any, rounds: int = 8) -> Tensor:
    """Alternating exact solves for both factors, from z."""
    u, s, vh = torch.linalg.svd(z)
    left, right = u[:, :RANK] * s[:RANK].sqrt(), vh[:RANK].mT * s[:RANK].sqrt()
    for _ in range(rounds):
        left = -conjugate_gradients(lambda a, right=right: apply(a @ right.mT) @ right, n @ right, steps=60, tolerance=1e-12)
        right = -conjugate_gradients(lambda a, left=left: apply(left @ a.mT).mT @ left, n.mT @ left, steps=60, tolerance=1e-12)
    return left @ right.mT


def holds(numbers: dict[str, Any]) -> bool:
    shares = numbers["shares"]
    mixed = shares["Kronecker"][-1]
    return min(shares["CG, then metric"]) > 0.95 and mixed < shares["CG, then metric"][-1] and max(shares["GradMax"]) < 0.9


def figure_of(numbers: dict[str, Any]) -> str:
    cells = (f"{name} {' / '.join(f'{v:.3f}' for v in values)}" for name, values in numbers["shares"].items())
    return f"share of the best rank-{RANK} decrease at heterogeneity {' / '.join(f'{m:g}' for m in MIXED)}: {'; '.join(cells)}"


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for (name, values), colour in zip(numbers["shares"].items(), COLOURS, strict=False):
            axes.plot(MIXED, values, "-o", color=colour, label=name)
        axes.set(xlabel="how far the texts differ", ylabel=f"share of the best decrease, rank {RANK}", ylim=(0, 1.05))
        axes.legend(fontsize=8)
