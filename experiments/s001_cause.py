"""The low rank of the softmax is the reason of the losing of rank.

Source 001, section 2.3: "It means that the low rank property of the softmax function is the reason of the losing of rank", and problem 4,
"The problems in conclusion part". Expected: neither needs the other. Two blocks that average within themselves have rank 2 and keep the
difference between the blocks for ever; (I + 11^T/n) / 2 has full rank and halves every difference. What collapses is contraction of what is
off the constant vector 1, which P keeps because P 1 = 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .drawing import COLOURS, figure

VERDICT = (
    "wrong: a P of rank 2 need not collapse and one of full rank may; the cause is that P 1 = 1 while what is off 1 contracts, "
    "layer after layer"
)
ERRATA = ("001.P4",)

SIZES = {"tiny": {"tokens": 16, "layers": 12}, "small": {"tokens": 128, "layers": 12}, "full": {"tokens": 512, "layers": 12}}


def measure(size: str) -> dict[str, Any]:
    """For three kinds of P: its rank, its contraction off 1, and |res X| / |res X_0| by layer."""
    setting: Any = SIZES[size]
    n, layers = setting["tokens"], setting["layers"]
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = torch.randn(layers, n, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(-1)
    eye, mean = torch.eye(n, dtype=torch.float64), torch.full((n, n), 1 / n, dtype=torch.float64)
    blocks = torch.block_diag(*[torch.full((n // 2, n // 2), 2 / n, dtype=torch.float64)] * 2)
    kinds = {"two blocks": [blocks] * layers, "half identity": [(eye + mean) / 2] * layers, "random logits": list(drawn)}
    return {**setting, "kinds": {name: followed(x, matrices) for name, matrices in kinds.items()}}


def followed(x: Tensor, matrices: list[Tensor]) -> dict[str, Any]:
    residuals = [residual(x)]
    for p in matrices:
        x = p @ x
        residuals.append(residual(x))
    first = matrices[0]
    return {
        "rank": int(torch.linalg.matrix_rank(first)),
        "contraction": torch.linalg.matrix_norm(first - first.mean(0), 2).item(),
        "residuals": [value / residuals[0] for value in residuals],
    }


def residual(x: Tensor) -> float:
    return (x - x.mean(0)).norm().item()


def holds(numbers: dict[str, Any]) -> bool:
    """Rank 2 stays where it was after its first layer; full rank halves its residual each time, and random logits collapse at full rank."""
    blocks, half, drawn = (numbers["kinds"][name] for name in ("two blocks", "half identity", "random logits"))
    stays = blocks["rank"] == 2 and blocks["residuals"][-1] > 0.999 * blocks["residuals"][1] > 0
    halves = half["rank"] == numbers["tokens"] and abs(half["residuals"][-1] * 2 ** numbers["layers"] - 1) < 1e-3
    return stays and halves and drawn["rank"] == numbers["tokens"] and drawn["residuals"][-1] < 1e-6


def figure_of(numbers: dict[str, Any]) -> str:
    kinds, layers = numbers["kinds"], numbers["layers"]
    kept = kinds["two blocks"]["residuals"][-1] / kinds["two blocks"]["residuals"][1]
    return (
        f"{layers} layers of {numbers['tokens']} tokens: two blocks, rank {kinds['two blocks']['rank']}, keep x{kept:.3f} of their residual "
        f"from layer 1 on; (I + 11^T/n)/2, rank {kinds['half identity']['rank']}, leaves {kinds['half identity']['residuals'][-1]:.0e} of it; "
        f"softmax of random logits, rank {kinds['random logits']['rank']}, {kinds['random logits']['residuals'][-1]:.0e}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for (name, found), colour in zip(numbers["kinds"].items(), COLOURS, strict=False):
            label = f"{name}: rank {found['rank']}, off 1 by x{found['contraction']:.2f}"
            axes.semilogy(found["residuals"], "-o", color=colour, markersize=3, label=label)
        axes.set(xlabel="layers of P alone", ylabel="|res X| / |res X_0|", ylim=(1e-16, 3))
        axes.legend(fontsize=8)
