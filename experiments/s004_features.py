"""The error of FAVOR+ falls as 1 / features and is smaller with orthogonal than with iid directions, as long as q and k are short.

Source 004, section 3 and Fig. 3: "MSE loss entre l'approximation et le softmax selon le nombre de features (iid vs orthogonales),
embedding dim d = 100". The source does not say how long its q and k are; here entries are normal with the std printed in the figure.
Expected: at std <= .25 the error falls as 1 / features, with orthogonal directions to .6 .. .8 of that with iid ones; at std 1 the
estimate's variance, (exp|x+y|^2 - 1) / features, is so large that more features buy next to nothing.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch

from heedful.mechanisms import Performer

from .drawing import COLOURS, figure, mark

VERDICT = "holds if the entries of q and k have a std of at most about .25: at std 1 more features buy next to nothing"
ERRATA = ()

DIM, KINDS = 100, ("iid", "orthogonal")
SCALES = (0.125, 0.25, 0.5, 1.0)  # std of the entries of q and k
SHORT, LONG = SCALES[:2], SCALES[-1]
SIZES = {
    "tiny": {"tokens": 48, "seeds": 2, "features": (50, 100, 200)},
    "small": {"tokens": 256, "seeds": 16, "features": (25, 50, 100, 200, 400, 800)},
    "full": {"tokens": 1024, "seeds": 32, "features": (25, 50, 100, 200, 400, 800, 1600)},
}


def measure(size: str) -> dict[str, Any]:
    """Squared errors of the attention matrix and of the output, relative to their squared size, by std and kind of directions."""
    setting: Any = SIZES[size]
    errors: Any = {
        what: {str(std): {kind: [0.0] * len(setting["features"]) for kind in KINDS} for std in SCALES}
        for what in ("matrix", "output")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Performer's")
        for seed in range(setting["seeds"]):
            for std in SCALES:
                for kind in KINDS:
                    for number, (matrix, output) in enumerate(once(seed, std, kind, **setting)):
                        errors["matrix"][str(std)][kind][number] += matrix / setting["seeds"]
                        errors["output"][str(std)][kind][number] += output / setting["seeds"]
    return {"dim": DIM, **setting, **errors}


@torch.no_grad()
def once(seed: int, std: float, kind: str, features: tuple[int, ...], tokens: int, seeds: int) -> list[tuple[float, float]]:
    """(matrix, output) errors for each number of features; the same q, k and v for one seed."""
    source = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 1, tokens, DIM, generator=source)
    q, k = q * std, k * std
    exact, spelled = (q @ k.mT / DIM**0.5).softmax(-1), torch.eye(tokens)[None, None]
    found = []
    for number in features:
        weights = Performer(number, kind, seed)(q, k, spelled)  # the mean of unit vectors is the row of weights
        found.append((off(weights, exact), off(weights @ v, exact @ v)))
    return found


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().sum() / wanted.square().sum())


def holds(numbers: dict[str, Any]) -> bool:
    """Short vectors: 1 / features within 30%, orthogonal better from d features on. Long ones: no such fall."""
    features = numbers["features"]
    many = [i for i, number in enumerate(features) if number >= DIM]
    for std in SHORT:
        iid, orthogonal = (numbers["matrix"][str(std)][kind] for kind in KINDS)
        if not all(0.7 < -slope(features, errors) < 1.3 for errors in (iid, orthogonal)):
            return False
        if not all(orthogonal[i] < 0.85 * iid[i] for i in many):
            return False
    return all(-slope(features, numbers["matrix"][str(LONG)][kind]) < 0.5 for kind in KINDS)


def figure_of(numbers: dict[str, Any]) -> str:
    found, features = numbers["matrix"], numbers["features"]
    powers = {std: -slope(features, found[std]["orthogonal"]) for std in (str(SHORT[-1]), str(LONG))}
    gain = found[str(SHORT[-1])]["orthogonal"][-1] / found[str(SHORT[-1])]["iid"][-1]
    return (
        f"squared error falls as R^-{powers[str(SHORT[-1])]:.2f} at std {SHORT[-1]:g}, orthogonal directions at {gain:.2f} of iid; "
        f"as R^-{powers[str(LONG)]:.2f} at std {LONG:g}"
    )


def slope(features: tuple[int, ...], errors: list[float]) -> float:
    """Of log error over log features, by least squares."""
    x, y = ([math.log(t) for t in values] for values in (features, errors))
    middle, height = sum(x) / len(x), sum(y) / len(y)
    return sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path, panels=2) as panels:
        for axes, what in zip(panels, ("matrix", "output"), strict=True):
            for std, colour in zip(SCALES, COLOURS, strict=False):
                for kind, line in zip(KINDS, ("--o", "-s"), strict=True):
                    label = f"{kind}, std {std:g}"
                    axes.loglog(numbers["features"], numbers[what][str(std)][kind], line, color=colour, label=label, markersize=4)
            mark(axes, numbers["features"])
            axes.set_xlabel("random features R")
            axes.set_ylabel(f"squared error of the attention {what}, relative")
            axes.set_title(f"d = {DIM}, {numbers['tokens']} tokens, mean of {numbers['seeds']} seeds", fontsize=10)
        panels[1].legend(title="directions, std of q and k", fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
