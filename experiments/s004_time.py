"""Performer's time grows in proportion to the tokens and exact attention's with their square, so it wins on long texts.

Source 004, section 5 and Fig. 5: forward and backward through one head, "num Features R = 100, embedding dim d = 50"; "sur des sequences
de grandes tailles le performer permet d'ameliorer la vitesse de calcul". Expected: exponents of time over length near 1 and 2 on long
texts, and a crossover at some hundreds of tokens. Exact attention is shown twice: written out as the source has it, and by torch's fused
kernel, which a fair comparison needs.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.timing import Case, timings
from heedful.mechanisms import Performer

from .drawing import COLOURS, figure, mark

VERDICT = "holds if texts are longer than some hundreds of tokens: below that exact attention is faster"
ERRATA = ()

DIM, FEATURES = 50, 100
WRITTEN_OUT = 4096  # tokens; beyond, its L x L matrices take gigabytes
SIZES = {
    "tiny": {"lengths": (64, 128, 256), "rounds": 3},
    "small": {"lengths": (128, 256, 512, 1024, 2048, 4096, 8192), "rounds": 11},
    "full": {"lengths": (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768), "rounds": 15},
}


def measure(size: str) -> dict[str, Any]:
    """Median seconds of one forward and backward pass by length, each length's cases in turns; the exponents at the end."""
    setting: Any = SIZES[size]
    seconds: dict[str, list[float]] = {"Performer": [], "exact, fused": [], "exact, written out": []}
    for length in setting["lengths"]:
        for name, taken in timings(cases(length), rounds=setting["rounds"], budget=60.0).items():
            seconds[name].append(taken.median)
    exponents = {name: round(exponent(setting["lengths"], taken), 3) for name, taken in seconds.items()}
    return {"dim": DIM, "features": FEATURES, **setting, "seconds": seconds, "exponents": exponents}


def cases(length: int) -> dict[str, Case]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, DIM, requires_grad=True) for _ in range(3))
    grad, performer = torch.randn(1, 1, length, DIM), Performer(FEATURES)

    def step(attend: Any) -> Case:
        return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    found = {"Performer": step(performer), "exact, fused": step(F.scaled_dot_product_attention)}
    if length <= WRITTEN_OUT:
        found["exact, written out"] = step(lambda q, k, v: (q @ k.mT / DIM**0.5).softmax(-1) @ v)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        performer(q, k, v)  # says once that R is small for these norms
    return found


def exponent(lengths: tuple[int, ...], seconds: list[float]) -> float:
    """The growth over the last two doublings."""
    last = min(3, len(seconds))
    return math.log(seconds[-1] / seconds[-last]) / math.log(lengths[len(seconds) - 1] / lengths[len(seconds) - last])


def holds(numbers: dict[str, Any]) -> bool:
    exponents, seconds = numbers["exponents"], numbers["seconds"]
    return (
        0.7 < exponents["Performer"] < 1.3
        and exponents["exact, fused"] > 1.7
        and seconds["Performer"][-1] < seconds["exact, fused"][-1] / 4
    )


def figure_of(numbers: dict[str, Any]) -> str:
    mine, exact = (numbers["seconds"][name] for name in ("Performer", "exact, fused"))
    faster = [length for length, a, b in zip(numbers["lengths"], mine, exact, strict=True) if a < b]
    since = f"faster from {min(faster)} tokens on" if faster else "not faster yet"
    powers = numbers["exponents"]
    return (
        f"time grows as n^{powers['Performer']:.2f} against n^{powers['exact, fused']:.2f} of fused exact attention; {since}, "
        f"x{exact[-1] / mine[-1]:.1f} at {numbers['lengths'][-1]} tokens"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for (name, seconds), colour in zip(numbers["seconds"].items(), COLOURS, strict=False):
            label = f"{name} (exponent {numbers['exponents'][name]:.2f})"
            axes.loglog(
                numbers["lengths"][: len(seconds)], [s * 1e3 for s in seconds], "-o", color=colour, label=label, markersize=4
            )
        mark(axes, numbers["lengths"])
        axes.set_xlabel("tokens")
        axes.set_ylabel("ms, forward and backward of one head")
        axes.set_title(f"R = {FEATURES}, d = {DIM}, CPU", fontsize=10)
        axes.legend(fontsize=8)
