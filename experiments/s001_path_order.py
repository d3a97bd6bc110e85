"""The product of a path has its layers in one order on both sides: P_h1 P_h2 X W_h1 W_h2.

Source 001, section 2.1, theorem 2.1 and the display before it: "SA o SA(X) = sum P_h1 P_h2 X W_h1 W_h2 + e b'". The right side
multiplies by W_h1 first, so h1 is of the first layer, and P_h1 must stand next to X: P_path = P^L ... P^1, W_path = W^1 ... W^L.
Expected: at three layers the source's order is some tenths wrong (.16 without and .26 with skip on the random networks of theory.md;
it depends on the weights), the right one to the last digits of float64. For one layer there is no order to mistake.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact import Network, path_streams

from .drawing import COLOURS, figure
from .networks import matrices, minilm_network, random_network, relative

VERDICT = "wrong: P_path = P^L ... P^1 with the last layer leftmost, W_path = W^1 ... W^L"
ERRATA = ("001.2",)
LAYERS = (1, 2, 3)
SIZES = {
    "tiny": {"seeds": 2, "heads": 2, "dim": 8, "tokens": 6, "real": 0},
    "small": {"seeds": 8, "heads": 4, "dim": 32, "tokens": 24, "real": 32},
    "full": {"seeds": 16, "heads": 4, "dim": 64, "tokens": 64, "real": 128},
}
ORDERS = ("the source's", "right")


def measure(size: str) -> dict[str, Any]:
    """By kind of network, skip and order: the relative error of the sum of all paths, for each number of layers."""
    setting: Any = dict(SIZES[size])
    real, seeds = setting.pop("real"), range(setting.pop("seeds"))
    found: dict[str, Any] = {}
    for skip in (False, True):
        what = "with skip" if skip else "without skip"
        made = [[random_network(seed, layers, skip=skip, **setting) for seed in seeds] for layers in LAYERS]
        found[f"random, {what}"] = by_order([[errors(one, skip) for one in some] for some in made])
        if real:
            found[f"MiniLM, {what}"] = by_order([[errors(minilm_network(real, layers, skip), skip)] for layers in LAYERS])
    return {**SIZES[size], "layers": LAYERS, "errors": found}


def by_order(found: list[list[dict[str, float]]]) -> dict[str, list[float]]:
    """Medians over networks."""
    return {order: [statistics.median(one[order] for one in some) for some in found] for order in ORDERS}


@torch.no_grad()
def errors(network: Network, skip: bool) -> dict[str, float]:
    """Both sums over all paths, one by one, against what the network makes of its tokens."""
    exact = network.output - path_streams(network).bias
    layers = matrices(network)
    choices = [[*range(len(p)), *([None] if skip else [])] for p, _ in layers]
    sums = {order: torch.zeros_like(exact[0]) for order in ORDERS}
    for path in itertools.product(*choices):
        turned = network.x[0]
        for (_, heads), head in zip(layers, path, strict=True):
            turned = turned if head is None else (turned @ heads.w_v[head]) @ heads.w_o[head]
        chosen = [p[head] for (p, _), head in zip(layers, path, strict=True) if head is not None]
        sums["right"] += mixed(chosen, turned)
        sums["the source's"] += mixed(chosen[::-1], turned)
    return {order: relative(total, exact[0]) for order, total in sums.items()}


def mixed(chosen: list[Tensor], x: Tensor) -> Tensor:
    """The first matrix next to x, the last one leftmost."""
    for p in chosen:
        x = p @ x
    return x


def holds(numbers: dict[str, Any]) -> bool:
    """The right order is exact everywhere; the source's is with one layer, and is percents off with three."""
    for found in numbers["errors"].values():
        wrong, right = found["the source's"], found["right"]
        if max(right) > 1e-12 or wrong[0] > 1e-12 or wrong[-1] < 0.02:
            return False
    return True


def figure_of(numbers: dict[str, Any]) -> str:
    """Our figure in one line."""
    wrong = ", ".join(f"{name} {found[ORDERS[0]][-1]:.0%}" for name, found in numbers["errors"].items())
    right = max(max(found["right"]) for found in numbers["errors"].values())
    return f"three layers in the source's order are off by: {wrong}; in the right one by {right:.0e}"


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for (name, found), colour in zip(numbers["errors"].items(), COLOURS, strict=False):
            for order, line in zip(ORDERS, ("-s", "--o"), strict=True):
                shown = [max(x, 1e-17) for x in found[order]]
                axes.semilogy(numbers["layers"], shown, line, color=colour, label=f"{name}, {order} order", markersize=4)
        axes.set_xticks(numbers["layers"])
        axes.set_xlabel("layers")
        axes.set_ylabel("|sum of all paths - output| / |output|")
        axes.legend(fontsize=7)
