"""Some sampled paths tell what all paths of their length add up to.

Source 001, theorem 2.1, whose sums Dong et al. 2021 and their public code look at through sampled paths. The mean of sampled paths times
their number is an unbiased estimate of the sum; paths nearly cancel, so its spread is far larger than the sum.
Expected: relative error with 200 sampled paths .48 / 2.9 / 20 / 760 for length 1 / 2 / 3 / 6 on MiniLM's attention with skip, where
streaming all paths is exact and costs a few passes.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact import Heads, Network, path_streams

from .drawing import COLOURS, figure, mark
from .networks import matrices, minilm_network, random_network, relative

VERDICT = "wrong: paths of length 2 and more nearly cancel, so that hundreds of sampled ones are off by more than the sum; stream them all, exactly"
ERRATA = ()
SIZES = {
    "tiny": {"layers": 4, "heads": 4, "dim": 16, "tokens": 6, "paths": (5, 20), "seeds": 2},
    "small": {"layers": 6, "tokens": 64, "paths": (50, 200), "seeds": 3},
    "full": {"layers": 6, "tokens": 128, "paths": (50, 200, 800, 3200), "seeds": 5},
}


@torch.no_grad()
def measure(size: str) -> dict[str, Any]:
    """By number of sampled paths: the relative error of the estimated sum of each length, a median over seeds."""
    setting: Any = SIZES[size]
    if size == "tiny":
        network = random_network(0, setting["layers"], setting["heads"], setting["dim"], setting["tokens"])
    else:
        network = minilm_network(setting["tokens"], setting["layers"])
    streams, layers = path_streams(network), matrices(network)
    found = {str(paths): [] for paths in setting["paths"]}
    for length in range(1, setting["layers"] + 1):
        exact = streams.tokens[length, 0]
        runs = [estimates(network, layers, length, setting["paths"], seed) for seed in range(setting["seeds"])]
        for i, paths in enumerate(setting["paths"]):
            found[str(paths)].append(statistics.median(relative(run[i], exact) for run in runs))
    return {**setting, "real": size != "tiny", "lengths": list(range(1, setting["layers"] + 1)), "errors": found}


def estimates(
    network: Network, layers: list[tuple[Tensor, Heads]], length: int, counts: tuple[int, ...], seed: int
) -> list[Tensor]:
    """The sum of all paths of a length, from the first so many of one row of sampled ones."""
    source, heads = random.Random(1000 * seed + length), len(layers[0][0])
    whole = math.comb(len(layers), length) * heads**length
    total, found = torch.zeros_like(network.x[0]), []
    for number in range(1, max(counts) + 1):
        x = network.x[0]
        for layer in sorted(source.sample(range(len(layers)), length)):
            head, (p, own) = source.randrange(heads), layers[layer]
            x = p[head] @ ((x @ own.w_v[head]) @ own.w_o[head])
        total = total + x
        if number in counts:
            found.append(total * (whole / number))
    return found


def holds(numbers: dict[str, Any]) -> bool:
    """With 200 paths, and even with the most, the error is above the sum itself, and larger the longer they are."""
    most = numbers["errors"][str(max(numbers["paths"]))]
    if not numbers["real"]:
        return most[-1] > 0.5
    growing = all(a < b for a, b in itertools.pairwise(most))
    return growing and numbers["errors"]["200"][1] > 1 and most[2] > 1 and most[-1] > 10


def figure_of(numbers: dict[str, Any]) -> str:
    """Our figure in one line."""
    paths = "200" if "200" in numbers["errors"] else max(numbers["errors"], key=int)
    errors = ", ".join(f"{length}: {error:.2g}" for length, error in zip(numbers["lengths"], numbers["errors"][paths], strict=True))
    return f"relative error with {paths} sampled paths by length: {errors}"


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for (paths, errors), colour in zip(numbers["errors"].items(), COLOURS, strict=False):
            axes.semilogy(numbers["lengths"], errors, "-o", color=colour, label=f"{paths} sampled paths", markersize=4)
        axes.axhline(1, color="black", lw=0.8)
        mark(axes, numbers["lengths"])
        axes.set_xlabel("heads on the path")
        axes.set_ylabel("relative error of the estimated sum")
        axes.set_title(
            f"{'MiniLM attention with skip' if numbers['real'] else 'random attention'}, {numbers['tokens']} tokens", fontsize=10
        )
        axes.legend(fontsize=8)
