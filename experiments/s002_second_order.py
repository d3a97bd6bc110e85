"""A key's noise of mean 0 leaves the mean of the attention what it was.

Source 002, 1.1 (e): "Since eps has mean 0, this new value will still has the same mean of K^T q, and small variance ... the value of a and
the attention h won't be changing a lot". Expected: the logits keep their mean, the weights do not. With noise of variance sigma^2 on each
entry of key i, E[change of a_i] = 1/2 sigma^2 beta^2 |q|^2 a_i (1 - a_i) (1 - 2 a_i) to second order (Monte Carlo .00488 against .00484).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .drawing import COLOURS, figure, mark

VERDICT = (
    "wrong: the weights' mean changes by 1/2 sigma^2 beta^2 |q|^2 a_i (1 - a_i) (1 - 2 a_i), which is 0 only at a_i = 1/2 (or 0, 1)"
)
ERRATA = ("002.16",)
DIM, NODES = 16, 64  # nodes of the quadrature
WEIGHTS = (0.02, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)  # a_i before the noise
STEPS = (0.05, 0.1, 0.2, 0.4, 0.8)  # sigma beta |q|, the std of the logit
SHOWN = 0.2
SIZES = {"tiny": {"draws": 2 * 10**5}, "small": {"draws": 4 * 10**6}, "full": {"draws": 64 * 10**6}}


def measure(size: str) -> dict[str, Any]:
    """The mean change of a_i by Monte Carlo over keys, exactly by quadrature over their logits, and by the formula."""
    draws = SIZES[size]["draws"]
    means, errors = zip(*(simulated(weight, SHOWN, draws) for weight in WEIGHTS), strict=True)
    return {
        "draws": draws,
        "weights": list(WEIGHTS),
        "steps": list(STEPS),
        "shown": SHOWN,
        "monte_carlo": list(means),
        "standard_error": list(errors),
        "exact": {f"{step:g}": [exact(weight, step) for weight in WEIGHTS] for step in STEPS},
        "formula": {f"{step:g}": [formula(weight, step) for weight in WEIGHTS] for step in STEPS},
    }


def simulated(weight: float, step: float, draws: int) -> tuple[float, float]:
    """The mean change of a_i over draws of a key's noise, and its standard error; half of the draws mirror the others."""
    source = torch.Generator().manual_seed(0)
    q = torch.randn(DIM, generator=source, dtype=torch.float64)
    beta = DIM**-0.5
    sigma = step / (beta * float(q.norm()))
    found = []
    for _ in range(0, draws, 10**5):
        noise = sigma * torch.randn(5 * 10**4, DIM, generator=source, dtype=torch.float64)
        shift = beta * (noise @ q)
        found.append((changed(weight, shift) + changed(weight, -shift)) / 2)
    every = torch.cat(found)
    return float(every.mean()), float(every.std() / len(every) ** 0.5)


def changed(weight: float, shift: Tensor) -> Tensor:
    """How far a_i moves when its logit does: the exact edit of a key."""
    g = weight * torch.expm1(shift)
    return g / (1 + g) * (1 - weight)


def exact(weight: float, step: float) -> float:
    """The mean over a normal shift, by Gauss and Hermite."""
    near = torch.arange(1, NODES, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(near, 1) + torch.diag(near, -1))
    return float((vectors[0].square() * changed(weight, step * nodes)).sum())


def formula(weight: float, step: float) -> float:
    return step**2 / 2 * weight * (1 - weight) * (1 - 2 * weight)


def holds(numbers: dict[str, Any]) -> bool:
    """The formula is the exact mean as the noise gets small, Monte Carlo agrees with both, and it is not 0."""
    shown = f"{numbers['shown']:g}"
    for place, weight in enumerate(numbers["weights"]):
        value = numbers["exact"][shown][place]
        if abs(numbers["monte_carlo"][place] - value) > 5 * numbers["standard_error"][place] + 1e-12:
            return False
        if weight != 0.5 and abs(value) < 20 * numbers["standard_error"][place]:
            return False
        for step in numbers["steps"]:
            exactly, formed = (numbers[kind][f"{step:g}"][place] for kind in ("exact", "formula"))
            if abs(exactly - formed) > step**4 * 0.05 + 1e-15:  # what is left is of fourth order
                return False
    return True


def figure_of(numbers: dict[str, Any]) -> str:
    shown, place = f"{numbers['shown']:g}", numbers["weights"].index(0.2)
    return (
        f"a = .2, logit std {shown}: Monte Carlo {numbers['monte_carlo'][place]:.3e} +- {numbers['standard_error'][place]:.0e}, "
        f"exact {numbers['exact'][shown][place]:.3e}, formula {numbers['formula'][shown][place]:.3e}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    shown = f"{numbers['shown']:g}"
    grid = torch.linspace(0, 1, 101).tolist()
    with figure(path, panels=2) as (mean, rest):
        mean.plot(grid, [formula(weight, numbers["shown"]) for weight in grid], color=COLOURS[0], label="formula")
        error = [2 * x for x in numbers["standard_error"]]
        mean.errorbar(
            numbers["weights"], numbers["monte_carlo"], error, fmt="o", color=COLOURS[1], label="Monte Carlo", markersize=4
        )
        mean.plot(numbers["weights"], numbers["exact"][shown], "x", color=COLOURS[2], label="exact")
        mean.set_xlabel("weight a of the key")
        mean.set_ylabel("mean change of a")
        mean.set_title(f"the key's logit has noise of std {shown}", fontsize=10)
        mean.legend()
        for place in (1, 3, 6):
            gaps = [abs(numbers["exact"][f"{s:g}"][place] - numbers["formula"][f"{s:g}"][place]) for s in numbers["steps"]]
            rest.loglog(numbers["steps"], gaps, "-o", label=f"a = {numbers['weights'][place]:g}", markersize=4)
        rest.loglog(numbers["steps"], [0.01 * math.pow(s, 4) for s in numbers["steps"]], "--", color="grey", label="fourth order")
        mark(rest, numbers["steps"])
        rest.set_xlabel("std of the logit")
        rest.set_ylabel("exact less formula")
        rest.legend()
