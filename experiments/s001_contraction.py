"""Every attention layer brings tokens nearer to each other, and a path of layers by the product of what its layers do.

Source 001, section 2.2 ("prove that |res(SAN(X))| -> 0") with the paths of Theorem 2.1. Expected on MiniLM: the norm of
R -> sum_h C P_h R W_h is 1.5 8.6 11.6 13.6 12.3 4.3 by layer, while the layers shrink their own residuals to .26-.42; |(I - 11^T/n) P|_2
reaches 4.0 where columns are sinks; Dobrushin's coefficient is never above 1. On paths both must be taken of the product of the
matrices (.0265, .0194), not as the product of theirs (31, .45).
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch

from heedful.exact import centred_norm, dobrushin, frozen_contraction, residual

from .drawing import COLOURS, figure
from .minilm import reading

VERDICT = "wrong: layers stretch what they might be given (columns that all look at lengthen); ranges never grow, and of a path only the product of its matrices says how much"
ERRATA = ()
SIZES = {"tiny": {"tokens": 16, "paths": 5}, "small": {"tokens": 128, "paths": 100}, "full": {"tokens": 256, "paths": 400}}


def measure(size: str) -> dict[str, Any]:
    """By layer the most it could stretch, what it did, and the largest figures of its heads; random paths of one head a layer."""
    setting = SIZES[size]
    read = reading(setting["tokens"])
    weights = read.attention
    draws, paths = torch.Generator().manual_seed(0), []
    for _ in range(setting["paths"]):
        path = [p[int(torch.randint(len(p), (), generator=draws))] for p in weights]
        paths.append([figure_pair(centred_norm, path), figure_pair(dobrushin, path)])
    actual = [float(residual(layer(x)).norm() / residual(x).norm()) for layer, x in zip(read.layers, read.states, strict=True)]
    rows = {
        "frozen": [float(frozen_contraction(p, layer.map)) for p, layer in zip(weights, read.layers, strict=True)],
        "actual": actual,
        "centred": [float(centred_norm(p).amax()) for p in weights],
        "dobrushin": [float(dobrushin(p).amax()) for p in weights],
    }
    medians = {name: [median(path[i][j] for path in paths) for j in (0, 1)] for i, name in enumerate(("centred", "dobrushin"))}
    return {**setting, "layers": rows, "path": medians}


def figure_pair(measured: Any, path: list[torch.Tensor]) -> list[float]:
    """Of the product of the matrices, and the product of theirs."""
    return [float(measured(path)), float(torch.stack([measured(p) for p in path]).prod())]


def holds(numbers: dict[str, Any]) -> bool:
    rows, path = numbers["layers"], numbers["path"]
    stretch = max(rows["centred"]) > 1 and max(rows["frozen"]) > 1
    within = all(a <= f for a, f in zip(rows["actual"], rows["frozen"], strict=True)) and max(rows["dobrushin"]) <= 1
    return stretch and within and all(whole < 0.5 * parts for whole, parts in path.values())


def figure_of(numbers: dict[str, Any]) -> str:
    rows, path = numbers["layers"], numbers["path"]
    frozen = " ".join(f"{value:.1f}" for value in rows["frozen"])
    return (
        f"MiniLM, n = {numbers['tokens']}: at most {frozen}, in fact {min(rows['actual']):.2f}-{max(rows['actual']):.2f}; "
        f"|(I - 11^T/n) P|_2 to {max(rows['centred']):.1f}, Dobrushin to {max(rows['dobrushin']):.3f}; of a median path "
        f"{path['centred'][0]:.2g} and {path['dobrushin'][0]:.2g}, as products {path['centred'][1]:.2g} and {path['dobrushin'][1]:.2g}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    labels = {"frozen": "the most it could", "actual": "what it does", "centred": "|(I - 11^T/n) P|_2", "dobrushin": "Dobrushin"}
    with figure(path) as (axes,):
        for (name, label), colour in zip(labels.items(), COLOURS, strict=False):
            axes.semilogy(numbers["layers"][name], "-o", color=colour, label=label, markersize=4)
        axes.axhline(1, color="grey", linestyle="--")
        axes.set_xlabel("layer")
        axes.set_ylabel("stretch of differences between tokens")
        axes.set_title(f"MiniLM, {numbers['tokens']} tokens", fontsize=10)
        axes.legend(fontsize=8)
