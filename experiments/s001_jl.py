"""A random projection to O(log n) dims keeps P w within eps |P w| (Johnson-Lindenstrauss).

Source 001, theorem 2.3: "P(|P~ w' - P w'| <= eps |P w'|) > 1 - o(1), where rank(P~) = Theta(log n)", "P~ = P R'R where R is a random k x n
matrix with N(0, 1/k) entries". Expected: the mean square error is (|P|^2 |w|^2 + |P w|^2) / k exactly, so the error is measured by |P| |w|;
with k = 9 ln n and the values of MiniLM it is 190 to 220 % of |P V|, where the best matrix of that rank loses 3 to 29 %; P = I needs
k about n / eps^2.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact import attention_matrix, jl_error, projected

from .drawing import COLOURS, figure, mark
from .real import minilm_calls

VERDICT = (
    "wrong: E|P R'R w - P w|^2 = (|P|^2 |w|^2 + |P w|^2) / k exactly, which is relative to |P| |w| and not to |P w|; "
    "P = I and w = 1 need k = (n + 1) / eps^2"
)
ERRATA = ("001.10",)

SIZES = {
    "tiny": {"lengths": (64, 128), "draws": 100, "heads": 4},
    "small": {"lengths": (64, 128, 256, 512), "draws": 400, "heads": 12},
    "full": {"lengths": (64, 128, 256, 512), "draws": 1000, "heads": 72},
}


def measure(size: str) -> dict[str, Any]:
    """Relative errors at k = 9 ln n: of random projections as drawn and as the formula says, and of the best matrix of that rank."""
    setting: Any = SIZES[size]
    found: dict[str, list[float]] = {"rank": [], "drawn": [], "formula": [], "best": [], "quotient": []}
    for length in setting["lengths"]:
        rank = round(9 * math.log(length))
        calls = minilm_calls(length)
        p, v = (torch.cat(parts) for parts in zip(*((attention_matrix(c)[0], c.v[0].double()) for c in calls), strict=True))
        p, v = (x[:: len(x) // setting["heads"]] for x in (p, v))
        size_of = (p @ v).square().sum((-2, -1))
        drawn = torch.stack([squared(projected(p, v, rank, seed) - p @ v) for seed in range(setting["draws"])]).mean(0)
        said = jl_error(p, v, rank)
        for name, value in {
            "rank": torch.tensor(float(rank)),
            "drawn": (drawn / size_of).sqrt(),
            "formula": (said / size_of).sqrt(),
            "best": (squared(best(p, rank) @ v - p @ v) / size_of).sqrt(),
            "quotient": (drawn / said).mean(),
        }.items():
            found[name].append(value.median().item())
        if length == setting["lengths"][-1]:
            curves = by_rank(p, v)
    identity = {str(n): needed(torch.eye(n), torch.ones(n, 1), 0.1) for n in (64, 512, 4096)}
    return {**setting, **found, "identity": identity, "by_rank": curves}


def by_rank(p: Tensor, v: Tensor) -> dict[str, list[float]]:
    """Relative errors by rank, medians over heads: the formula's and those of the best matrix."""
    size_of = squared(p @ v)
    u, s, vh = torch.linalg.svd(p, full_matrices=False)
    parts = (u * s[..., None, :]).mT[..., None] * (vh @ v)[..., None, :]  # (heads, ranks, queries, width)
    left = parts.flip(1).cumsum(1).flip(1)  # what is lost below each rank
    ranks = [2**i for i in range(int(math.log2(p.shape[-1])))]
    return {
        "ranks": [float(rank) for rank in ranks],
        "formula": [(jl_error(p, v, rank) / size_of).sqrt().median().item() for rank in ranks],
        "best": [(squared(left[:, rank]) / size_of).sqrt().median().item() for rank in ranks],
    }


def squared(x: Tensor) -> Tensor:
    return x.square().sum((-2, -1))


def best(p: Tensor, rank: int) -> Tensor:
    """The nearest matrix of that rank."""
    u, s, vh = torch.linalg.svd(p, full_matrices=False)
    return (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]


def needed(p: Tensor, w: Tensor, error: float) -> int:
    """The k at which the root mean square error is that share of |P w|."""
    return math.ceil((jl_error(p, w, 1) / squared(p @ w)).item() / error**2 - 1e-3)


def holds(numbers: dict[str, Any]) -> bool:
    """The formula is what is drawn, the error exceeds |P V| itself, the best matrix loses far less, and the identity needs (n + 1) / eps^2."""
    exact = all(abs(q - 1) < 0.1 for q in numbers["quotient"])
    beyond = all(x > 1 and x > 3 * y for x, y in zip(numbers["drawn"], numbers["best"], strict=True))
    return exact and beyond and all(k == (int(n) + 1) * 100 for n, k in numbers["identity"].items())


def figure_of(numbers: dict[str, Any]) -> str:
    drawn, best_ = ([f"{100 * x:.0f}" for x in (min(numbers[name]), max(numbers[name]))] for name in ("drawn", "best"))
    off = max(abs(q - 1) for q in numbers["quotient"])
    return (
        f"k = 9 ln n on MiniLM's P and V: {drawn[0]} to {drawn[1]} % error (drawn and formula agree within {100 * off:.1f} %), "
        f"the best matrix of that rank {best_[0]} to {best_[1]} %; P = I at 10 % error and n = 4096 needs k = {numbers['identity']['4096']}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    names = {"drawn": "random projection, drawn", "formula": "random projection, formula", "best": "best matrix of that rank (SVD)"}
    with figure(path, panels=2) as (axes, right):
        for (name, label), line, colour in zip(names.items(), ("o", "-", "-s"), COLOURS, strict=False):
            axes.loglog(numbers["lengths"], numbers[name], line, color=colour, label=label, markersize=5)
        mark(axes, numbers["lengths"])
        axes.set(xlabel="tokens n", ylabel="|error| / |P V| at rank 9 ln n, median of MiniLM's heads")
        axes.legend(fontsize=8)
        curves = numbers["by_rank"]
        for name, line, colour in (("formula", "-", COLOURS[1]), ("best", "-s", COLOURS[2])):
            right.loglog(curves["ranks"], curves[name], line, color=colour, label=names[name], markersize=5)
        right.set(xlabel=f"rank, n = {numbers['lengths'][-1]}", ylabel="|error| / |P V|", ylim=(1e-3, None))
        right.legend(fontsize=8)
