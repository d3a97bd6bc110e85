"""A very small beta makes self-attention an identity or a permutation, and a head that looks at its neighbours is a convolution.

Source 002, 1.3 (c): "Use arg max or softargmax_beta with very small beta ... which makes the output of the attention an identity or a
permutation layer", (d): "By restricting this, the model will force the self-attention layer to behave like a convolution layer". Expected:
beta must be large, the keys of equal length and W_V = I: |P - I| <= (n - 1) exp(-beta margin). A convolution of K taps needs K heads with
logits -alpha (delta - Delta_h)^2: error 3e-8 at alpha = 20, 1e-16 at 40; one head, whatever it looks at, cannot.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact import Construction, convolution_heads, identity_heads, permutation_heads

from .drawing import COLOURS, figure

VERDICT = (
    "wrong: identity and permutation need a LARGE beta, keys of equal length and W_V = I, then |P - I| <= (n - 1) exp(-beta margin); "
    "a convolution of K taps needs K heads, one cannot"
)
ERRATA = ("002.19",)

TAPS = 5
SIZES = {"tiny": {"tokens": 24, "dim": 8}, "small": {"tokens": 128, "dim": 32}, "full": {"tokens": 512, "dim": 64}}
BETAS = (0.01, 0.1, 1.0, 5.0, 10.0, 20.0, 40.0, 80.0)


def measure(size: str) -> dict[str, Any]:
    """Errors by beta of the three layers, the identity's bound, tokens lost to longer keys, and what fewer heads than taps must lose."""
    setting: Any = SIZES[size]
    n, d = setting["tokens"], setting["dim"]
    generator = torch.Generator().manual_seed(0)
    x, kernel = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((n, d), (TAPS, d, d)))
    made = {
        "identity": identity_heads(x),
        "permutation": permutation_heads(x, torch.randperm(n, generator=generator)),
        "convolution": convolution_heads(kernel, n),
    }
    uneven = x * torch.linspace(0.2, 3, n, dtype=x.dtype)[:, None]
    return {
        **setting,
        "betas": BETAS,
        "errors": {name: [off(heads, x, beta) for beta in BETAS] for name, heads in made.items()},
        "bound": [made["identity"].bound(beta) for beta in BETAS],
        "weights": [entry(made["identity"], beta) for beta in BETAS],
        "uneven": ((uneven @ uneven.mT).argmax(-1) != torch.arange(n)).double().mean().item(),
        "fewer": fewer(made["convolution"]),
    }


def off(heads: Construction, x: Tensor, beta: float) -> float:
    """The output's relative error."""
    return ((heads(x, beta) - heads(x)).norm() / heads(x).norm()).item()


def entry(heads: Construction, beta: float) -> float:
    return (heads.attention(beta) - heads.attention(math.inf)).abs().max().item()


def fewer(heads: Construction) -> list[float]:
    """The least relative error of H = 1 ... K heads, over all attention by position and all weights: singular values of sum_h vec P_h vec W_h^T."""
    p, w = heads.attention(math.inf).flatten(1), heads.weights.flatten(1)
    squares = torch.linalg.svdvals(p.mT @ w)[: len(p)].square()
    return [(squares[h:].sum() / squares.sum()).sqrt().item() for h in range(1, len(p) + 1)]


def holds(numbers: dict[str, Any]) -> bool:
    errors = numbers["errors"]
    hard = all(found[-1] < 1e-5 and found[0] > 0.3 for found in errors.values())
    bounded = all(a <= b + 1e-15 for a, b in zip(numbers["weights"], numbers["bound"], strict=True))
    by_alpha = dict(zip(numbers["betas"], errors["convolution"], strict=True))
    convolves = by_alpha[20.0] < 3e-8 and by_alpha[40.0] < 1e-15
    return hard and bounded and convolves and numbers["uneven"] > 0.2 and numbers["fewer"][0] > 0.5 > 1e-9 > numbers["fewer"][-1]


def figure_of(numbers: dict[str, Any]) -> str:
    errors, betas = numbers["errors"], list(numbers["betas"])
    at = {beta: errors["convolution"][betas.index(beta)] for beta in (20.0, 40.0)}
    return (
        f"identity off by {errors['identity'][0]:.2f} at beta {betas[0]:g} and {errors['identity'][-1]:.0e} at {betas[-1]:g}, within its bound; "
        f"with uneven keys {100 * numbers['uneven']:.0f} % of the tokens go to another; convolution of {TAPS} taps by {TAPS} heads: {at[20.0]:.0e} at "
        f"alpha 20, {at[40.0]:.0e} at 40; by one head at best {numbers['fewer'][0]:.2f}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for (name, found), colour in zip(numbers["errors"].items(), COLOURS, strict=False):
            axes.loglog(numbers["betas"], [max(x, 1e-17) for x in found], "-o", color=colour, markersize=4, label=name)
        axes.loglog(
            numbers["betas"], [max(x, 1e-17) for x in numbers["bound"]], "--", color="0.5", label="bound of the identity's weights"
        )
        axes.set(xlabel="beta (alpha of the convolution)", ylabel="relative error of the output", ylim=(1e-17, 1e3))
        axes.legend(fontsize=8)
