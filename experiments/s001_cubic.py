"""In a pure self-attention network what is left of the tokens' differences shrinks layer by layer like its own third power.

Source 001, Theorem 2.2: "|res SAN(X)| <= (4 beta / sqrt(d_qk))^((3^L - 1) / 2) |res X|^(3^L)". Expected, MiniLM's attention alone on 64
tokens: |R|_F 76.8, 21.2, .770, 7.0e-5, 1.2e-16, 9.8e-52, 1.5e-157, log-ratios 3.83, 3.20, 3.07. A float64 forward pass, which subtracts
the mean, stalls at 1.5e-14; the recursion P - 1u^T = u_j (e_ij - z_i) / (1 + z_i) subtracts nothing.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from heedful.exact import residual, residual_recursion

from .drawing import COLOURS, figure
from .minilm import reading

VERDICT = (
    "holds if |R| is small: while it is large one layer takes off little, and below rounding only the exact recursion shows the law"
)
ERRATA = ("001.8",)
SIZES = {"tiny": {"tokens": 16}, "small": {"tokens": 64}, "full": {"tokens": 256}}


def measure(size: str) -> dict[str, Any]:
    """log10 |R|_F of what enters each layer and leaves the last, by the recursion and by a forward pass."""
    read = reading(**SIZES[size])
    exact = [around.log10 for around in residual_recursion(read.states[0], read.layers)]
    x, naive = read.states[0], [float(residual(read.states[0]).norm())]
    for layer in read.layers:
        x = layer(x)
        naive.append(float(residual(x).norm()))
    low = [value for value in exact if value < -2]
    return {**SIZES[size], "log10": exact, "naive": naive, "ratios": [b / a for a, b in pairwise(low)]}


def holds(numbers: dict[str, Any]) -> bool:
    """The ratios fall to 3; both ways agree above rounding; the forward pass stalls."""
    ratios, pairs = numbers["ratios"], list(zip(numbers["log10"], numbers["naive"], strict=True))
    agree = all(abs(10**log / naive - 1) < 1e-6 for log, naive in pairs if log > -5)
    return agree and len(ratios) >= 2 and abs(ratios[-1] - 3) < 0.15 and 1e-15 < numbers["naive"][-1] < 1e-12


def figure_of(numbers: dict[str, Any]) -> str:
    sizes = ", ".join(f"{10**log:.3g}" if log > -300 else f"1e{log:.0f}" for log in numbers["log10"])
    ratios, tokens = ", ".join(f"{ratio:.2f}" for ratio in numbers["ratios"]), numbers["tokens"]
    return f"MiniLM, n = {tokens}: |R|_F {sizes}; log-ratios {ratios}; a float64 forward pass stalls at {numbers['naive'][-1]:.1e}"


def draw(numbers: dict[str, Any], path: Path) -> None:
    from math import log10

    with figure(path) as (axes,):
        axes.plot(numbers["log10"], "-o", color=COLOURS[0], label="exact recursion", markersize=4)
        axes.plot([log10(value) for value in numbers["naive"]], "--s", color=COLOURS[1], label="float64 forward pass", markersize=4)
        axes.set_xlabel("layer")
        axes.set_ylabel("log10 |R|, Frobenius")
        axes.set_title(f"attention of MiniLM alone, {numbers['tokens']} tokens", fontsize=10)
        axes.legend(fontsize=8)
