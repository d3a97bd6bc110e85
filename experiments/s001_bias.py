"""All biases of a network together add one row to every token: e b'.

Source 001, section 2.1: "SAN(X) = sum P_path X W_path + e b'", where "b isn't the same all the time, but we omitted the script by
defining new b with summation". The sum is b^T = sum_l b_l^T prod_(m>l) (c I + sum_h W_h^m), c = 1 with skip and 0 without, b_l of all
heads' b_V W_O and of the output bias, which the source leaves out.
Expected: in attention alone the formula is exact (1e-14) and the rows are alike; without the factors behind, as a mere sum of b_l, it is
far off; once there are LayerNorm and MLP the bias stream differs from token to token and with the text.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.exact import Network, path_streams

from .drawing import COLOURS, figure
from .networks import minilm_frozen, minilm_network, random_network, relative

VERDICT = (
    "holds if the network is attention alone: b^T = sum_l b_l^T prod_(m>l) (c I + sum_h W_h^m), b_l with the output bias; "
    "with LayerNorm and MLP the bias term is no 1 b^T"
)
ERRATA = ("001.3",)
SIZES = {
    "tiny": {"seeds": 2, "layers": 3, "heads": 2, "dim": 8, "tokens": 6, "real": 0},
    "small": {"seeds": 8, "layers": 6, "heads": 4, "dim": 32, "tokens": 24, "real": 64},
    "full": {"seeds": 32, "layers": 6, "heads": 8, "dim": 128, "tokens": 64, "real": 128},
}


def measure(size: str) -> dict[str, Any]:
    """By network: the formula's relative error, that of the mere sum of biases, and how far the rows of the bias stream are from alike."""
    setting: Any = dict(SIZES[size])
    real, seeds = setting.pop("real"), range(setting.pop("seeds"))
    found: dict[str, Any] = {}
    for skip in (False, True):
        what = "with skip" if skip else "without skip"
        made = [errors(random_network(seed, skip=skip, **setting)) for seed in seeds]
        found[f"random, {what}"] = {name: statistics.median(one[name] for one in made) for name in made[0]}
        if real:
            found[f"MiniLM's attention, {what}"] = errors(minilm_network(real, 6, skip))
    if real:
        found["MiniLM"] = {"rows": rows_apart(path_streams(minilm_frozen(real)[1]).bias[0])}
    return {**SIZES[size], "found": found}


@torch.no_grad()
def errors(network: Network) -> dict[str, float]:
    """Of the formula and of the plain sum, relative to the bias stream."""
    stream = path_streams(network).bias[0]
    return {
        "formula": relative(formula(network).expand_as(stream), stream),
        "mere sum": relative(sum(own(layer) for layer in network.layers).expand_as(stream), stream),  # type: ignore[union-attr]
        "rows": rows_apart(stream),
    }


def own(layer: Any) -> Tensor:
    """The bias of one layer: of its values through W_O, and of its output."""
    return (layer.heads.b_v[:, None] @ layer.heads.w_o).sum((0, 1)) + layer.heads.b_o


def formula(network: Network) -> Tensor:
    """sum_l b_l^T prod_(m>l) (c I + sum_h W_h^m), by Horner's rule."""
    total = torch.zeros_like(network.x[0, 0])
    for layer in network.layers:
        turned = torch.einsum("i,hiv,hvo->o", total, layer.heads.w_v, layer.heads.w_o)
        total = own(layer) + turned + (total if layer.skip else 0)
    return total


def rows_apart(stream: Tensor) -> float:
    """|B - 1 mean^T| / |B|."""
    return relative(stream.mean(0, keepdim=True).expand_as(stream), stream)


def holds(numbers: dict[str, Any]) -> bool:
    """Exact and alike without norms, and not a mere sum; with them rows differ."""
    alone = [one for name, one in numbers["found"].items() if name != "MiniLM"]
    exact = all(one["formula"] < 1e-11 and one["rows"] < 1e-11 and one["mere sum"] > 0.1 for one in alone)
    return exact and numbers["found"].get("MiniLM", {"rows": 1})["rows"] > 0.02


def figure_of(numbers: dict[str, Any]) -> str:
    """Our figure in one line."""
    alone = [one for name, one in numbers["found"].items() if name != "MiniLM"]
    text = f"attention alone: formula off by {max(one['formula'] for one in alone):.0e}, a mere sum of biases by up to {max(one['mere sum'] for one in alone):.2g}"
    real = numbers["found"].get("MiniLM")
    return text if real is None else f"{text}; MiniLM's bias rows differ by {real['rows']:.0%} of their norm"


def draw(numbers: dict[str, Any], path: Path) -> None:
    names = list(numbers["found"])
    with figure(path) as (axes,):
        for place, (what, colour) in enumerate(zip(LABELS, COLOURS, strict=False)):
            seen = [
                (i + 0.27 * place, numbers["found"][name][what]) for i, name in enumerate(names) if what in numbers["found"][name]
            ]
            axes.bar([x for x, _ in seen], [max(y, 1e-17) for _, y in seen], 0.25, color=colour, label=LABELS[what])
        axes.set_yscale("log")
        axes.set_xticks(
            [i + 0.27 for i in range(len(names))], [name.replace(", ", "\n").replace("'s ", "'s\n") for name in names], fontsize=7
        )
        axes.set_ylabel("relative to the bias stream")
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)


LABELS = {"formula": "error of the formula", "mere sum": "error of sum_l b_l", "rows": "how far rows are from alike"}
