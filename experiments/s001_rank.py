"""Softmax attention has low rank: a matrix of rank of order log n can stand for P in any layer.

Source 001, theorem 2.3 and below: "we can find a low rank matrix, i.e. rank P~ = Theta(log n . log n) to replace P in any self-attention
layer", where the theorem itself says Theta(log n). Expected, of the best matrix of a rank (SVD), MiniLM: for 1 / 5 / 10 % error rank
34/16/9 at n = 64, 69/38/21 at 128, 147/67/42 at 256, 304/147/81 at 512: linear in n; of random q and k, logits of std 1, at n = 512 448/340/261.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from heedful.exact import attention_matrix, rank_errors

from .drawing import COLOURS, figure, mark
from .real import minilm_calls

VERDICT = (
    "wrong: the rank that P needs for a given error grows like n, in a trained model and for random q and k; "
    "log n and log n log n contradict one another, and neither suffices"
)
ERRATA = ("001.10",)

DIM = 32  # of random queries and keys, as wide as MiniLM's: their logits have a std of 1
ERRORS = (0.01, 0.05, 0.1)
SIZES = {
    "tiny": {"lengths": (64, 128), "layers": 6},
    "small": {"lengths": (64, 128, 256, 512), "layers": 6},
    "full": {"lengths": (64, 128, 256, 512), "layers": 6},
}


def measure(size: str) -> dict[str, Any]:
    """Ranks by error and length, medians over heads; the power of n between the first and the last length."""
    setting: Any = SIZES[size]
    ranks: dict[str, list[float]] = {str(error): [] for error in ERRORS}
    curves = {}
    for length in setting["lengths"]:
        calls = minilm_calls(length)[: setting["layers"]]
        errors = torch.cat([rank_errors(attention_matrix(call)[0]) for call in calls])  # (heads, ranks)
        for error in ERRORS:
            ranks[str(error)].append((errors > error).sum(-1).double().quantile(0.5).item())
        curves[str(length)] = errors.median(0).values.tolist()
    longest = setting["lengths"][-1]
    q, k = torch.randn(2, longest, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = rank_errors((q @ k.mT / DIM**0.5).softmax(-1))
    return {
        **setting,
        "ranks": ranks,
        "powers": {error: power(setting["lengths"], found) for error, found in ranks.items()},
        "random": {str(error): int((drawn > error).sum()) for error in ERRORS},
        "curves": curves,
    }


def power(lengths: tuple[int, ...], ranks: list[float]) -> float:
    return round(math.log(ranks[-1] / ranks[0]) / math.log(lengths[-1] / lengths[0]), 3)


def holds(numbers: dict[str, Any]) -> bool:
    """Every rank grows like n^.7 at least, and is far above log n at the end."""
    longest = numbers["lengths"][-1]
    steep = all(found > 0.7 for found in numbers["powers"].values())
    return steep and all(found[-1] > 2 * math.log(longest) for found in numbers["ranks"].values())


def figure_of(numbers: dict[str, Any]) -> str:
    longest, ten = numbers["lengths"][-1], numbers["ranks"]["0.1"]
    ends = " / ".join(f"{numbers['ranks'][str(error)][-1]:.0f}" for error in ERRORS)
    drawn = " / ".join(str(numbers["random"][str(error)]) for error in ERRORS)
    return (
        f"rank for 1 / 5 / 10 % error, MiniLM at n = {longest}: {ends} (random q and k: {drawn}); "
        f"it grows as n^{numbers['powers']['0.1']:.2f}, {ten[-1] / longest:.2f} n at 10 %, where ln n is {math.log(longest):.1f}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    lengths = numbers["lengths"]
    with figure(path, panels=2) as (left, right):
        for error, colour in zip(ERRORS, COLOURS, strict=False):
            found = numbers["ranks"][str(error)]
            left.loglog(
                lengths, found, "-o", color=colour, markersize=4, label=f"{error:.0%} error (n^{numbers['powers'][str(error)]:.2f})"
            )
        left.loglog(lengths, lengths, ":", color="0.5", label="n")
        left.loglog(lengths, [math.log(n) for n in lengths], "--", color="0.5", label="ln n")
        mark(left, lengths)
        left.set(xlabel="tokens n", ylabel="rank needed, median of the heads")
        left.legend(fontsize=8)
        for (length, curve), colour in zip(numbers["curves"].items(), COLOURS, strict=False):
            right.semilogy([i / int(length) for i in range(int(length))], curve[:-1], color=colour, label=f"n = {length}")
        right.set(xlabel="rank / n", ylabel="|P - P_r| / |P|", ylim=(1e-4, 1.2))
        right.legend(fontsize=8)
