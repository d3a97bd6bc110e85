"""LayerNorm does not change the argument: with it the residual of a self-attention network still goes to 0.

Source 001 leaves it out of Theorems 2.1 and 2.2; the paper it follows (Dong et al. 2021) takes it for a map of the columns. Expected: the
real one multiplies by diag(1/sigma_i) on the left, so the rows of what multiplies X no longer sum to 1, and it can prevent collapse.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact import SelfAttention, residual, residual_recursion

from .drawing import COLOURS, figure
from .minilm import reading

VERDICT = "wrong: it is diag(1/sigma_i) on the left, whose rows are not stochastic, and can keep the tokens of a network apart that collapses without it"
ERRATA = ("001.12",)
DIM, SHORT = 8, 8  # without LayerNorm 8 layers are enough
SIZES = {"tiny": {"tokens": 16, "depth": 12}, "small": {"tokens": 128, "depth": 24}, "full": {"tokens": 256, "depth": 200}}


def measure(size: str) -> dict[str, Any]:
    """MiniLM's diag(1/sigma) P: how far it is from stochastic; one network with and without LayerNorm by depth."""
    setting = SIZES[size]
    read, rows, error = reading(setting["tokens"], "SAN + LN"), [], 0.0
    body: Any = read.checkpoint.model
    norms = [block.attention.output.LayerNorm for block in body.encoder.layer]
    for layer, norm, x in zip(read.layers, norms, read.states, strict=True):
        given = layer(x)
        scale = (given.var(-1, correction=0) + norm.eps).rsqrt()
        weight, bias = norm.weight.detach().double(), norm.bias.detach().double()
        made = torch.nn.functional.layer_norm(given, given.shape[-1:], weight, bias, norm.eps)
        left = scale[:, None] * layer.attention(x)  # diag(1/sigma) P_h
        spelled = (left @ x @ layer.map).sum(0) + scale[:, None] * layer.bias
        spelled = (spelled - spelled.mean(-1, keepdim=True)) * weight + bias
        error = max(error, float((made - spelled).abs().max() / made.abs().max()))
        rows.append([float(left.sum(-1).amin()), float(left.sum(-1).amax())])
    without, kept = apart(setting["depth"])
    return {**setting, "identity": error, "row sums": rows, "log10 without": without, "with": kept}


def apart(depth: int) -> tuple[list[float], list[float]]:
    """One network whose bias lies along the ones, which LayerNorm takes off: log10 |R| / |X| without it, |R| / |X| with it."""
    eye, draws = torch.eye(DIM, dtype=torch.float64), torch.Generator().manual_seed(0)
    layer = SelfAttention.of(2 * eye, eye, eye / 2, eye, biases=[None, None, None, torch.full((DIM,), 5.0, dtype=torch.float64)])
    x = normed(torch.randn(16, DIM, generator=draws, dtype=torch.float64))
    spread = residual_recursion(x, [layer] * SHORT)
    without = [a.log10 - math.log10(math.sqrt(16 * float(a.centre.square().sum()) + 10 ** (2 * a.log10))) for a in spread]
    kept = [share(x)]
    for _ in range(depth):
        x = normed(layer(x))
        kept.append(share(x))
    return without, kept


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def share(x: Tensor) -> float:
    return float(residual(x).norm() / x.norm())


def holds(numbers: dict[str, Any]) -> bool:
    uneven = numbers["row sums"][0][1] > 1.05 * numbers["row sums"][0][0]
    return uneven and numbers["identity"] < 1e-12 and numbers["log10 without"][-1] < -100 and numbers["with"][-1] > 0.5


def figure_of(numbers: dict[str, Any]) -> str:
    low, high = numbers["row sums"][0]
    return (
        f"MiniLM's diag(1/sigma) P has rows that sum to {low:.2f} .. {high:.2f} (layer 0, n = {numbers['tokens']}; identity to {numbers['identity']:.0e}); "
        f"one network has "
        f"|R| / |X| = 1e{numbers['log10 without'][-1]:.0f} after {SHORT} layers without LayerNorm and {numbers['with'][-1]:.2f} after {numbers['depth']} with it"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        axes.semilogy(numbers["with"], "-o", color=COLOURS[0], label="with LayerNorm", markersize=4)
        axes.semilogy(
            [10 ** max(v, -16.0) for v in numbers["log10 without"]], "--s", color=COLOURS[1], label="without", markersize=4
        )
        axes.set_xlabel("layer")
        axes.set_ylabel("|R| / |X|, Frobenius (down to 1e-16)")
        axes.set_title("one network, W_V = I / 2, bias along the ones", fontsize=10)
        axes.legend(fontsize=8)
