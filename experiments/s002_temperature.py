"""A small beta makes softargmax_beta one-hot like argmax, and a big one makes it soft.

Source 002, 1.1 (c): "the temperature beta is small, making the softargmax output looks like a one hot vector", and (d): "The value beta
should be big (i.e. high temperature)"; with its own softargmax_beta(s) = softmax(beta s) and beta = 1/sqrt(d_k) of (b). Expected: the
reverse, beta is an inverse temperature. The hard limit is reached within (n - 1) exp(-beta margin), the soft one within
(exp(beta spread) - 1) / n.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from heedful.exact import hard_bound, soft_bound

from .drawing import COLOURS, figure

VERDICT = (
    "wrong: softmax(beta s) becomes argmax as beta grows, within (n - 1) exp(-beta margin), and the mean of all as beta goes to 0; "
    "beta = 1/sqrt(d_k) is an inverse temperature"
)
ERRATA = ("002.13",)

SIZES = {"tiny": {"keys": 16, "rows": 20}, "small": {"keys": 64, "rows": 500}, "full": {"keys": 1024, "rows": 2000}}
BETAS = tuple(10.0**power for power in (-4, -3, -2, -1, 0, 1, 2, 3, 4))


def measure(size: str) -> dict[str, Any]:
    """By beta, over rows of normal logits: how far the weights are from argmax and from 1/n, how much of their bounds, and the entropy."""
    setting: Any = SIZES[size]
    n = setting["keys"]
    s = torch.randn(setting["rows"], n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hard = torch.nn.functional.one_hot(s.argmax(-1), n).double()
    found: dict[str, list[float]] = {"hard": [], "soft": [], "entropy": [], "hard_share": [], "soft_share": []}
    for beta in BETAS:
        a = (beta * (s - s.amax(-1, keepdim=True))).softmax(-1)
        to_hard, to_soft = (a - hard).abs().amax(-1), (a - 1 / n).abs().amax(-1)
        found["hard"].append(to_hard.median().item())
        found["soft"].append(to_soft.median().item())
        found["entropy"].append(torch.special.entr(a).sum(-1).mean().item() / math.log(n))
        found["hard_share"].append((to_hard - hard_bound(s, beta)).max().item())
        found["soft_share"].append((to_soft - soft_bound(s, beta)).max().item())
    return {**setting, "betas": BETAS, **found}


def holds(numbers: dict[str, Any]) -> bool:
    """Entropy falls with beta all the way from 1 to 0, and no weight leaves its bound."""
    entropy, bounded = numbers["entropy"], max(numbers["hard_share"] + numbers["soft_share"]) < 1e-12
    falls = all(a > b for a, b in pairwise(entropy))
    return falls and bounded and entropy[0] > 0.999 and entropy[-1] < 0.01


def figure_of(numbers: dict[str, Any]) -> str:
    rows = dict(zip(numbers["betas"], zip(numbers["entropy"], numbers["hard"], strict=True), strict=True))
    said = "; ".join(
        f"beta {beta:g}: entropy {rows[beta][0]:.3f} of ln n, {rows[beta][1]:.1g} from argmax" for beta in (1e-2, 1.0, 1e2)
    )
    return f"{numbers['rows']} rows of {numbers['keys']} normal logits, {said}; both bounds hold at every beta"


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for name, label, colour in zip(("hard", "soft"), ("from argmax", "from 1/n"), COLOURS, strict=False):
            axes.loglog(numbers["betas"], numbers[name], "-o", color=colour, markersize=4, label=f"largest difference {label}")
        axes.loglog(numbers["betas"], numbers["entropy"], "--", color="0.5", label="entropy / ln n")
        axes.set(xlabel="beta", ylim=(1e-6, 2))
        axes.legend(fontsize=8)
