"""The tokens of a self-attention network become one at a rate bounded by |res X|^(3^L), as the residual of the input is below 1.

Source 001, Theorem 2.2 (beta alone) and problem 3, "Why the input residual is smaller than 1?". Expected: the proof needs gamma, every
D_ii <= 1.2564 at every layer, and for contraction |res X|^2 < sqrt(d_qk) / (4 gamma beta H). On small random weights the corrected bound
holds 173 of 173 times, median slack 1.35e4. On MiniLM beta is 227-322, gamma 1.4-1.8, the residual 181-215 against a threshold of
.014-.019, at most 2.3% of the rows satisfy D_ii, and log10 of the bound is 10.5, 35, 109, 331, 995, 2990: vacuous.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch

from heedful.exact import SelfAttention, collapse_bound, composite_norm, residual_recursion
from heedful.exact.bound import LARGEST

from .drawing import COLOURS, figure
from .minilm import reading

VERDICT = (
    "wrong: it needs gamma, every D <= 1.2564 at every layer, and |res X|^2 < sqrt(dqk) / (4 gamma beta H); on MiniLM it is vacuous"
)
ERRATA = ("001.7", "001.9", "001.P3")
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"tokens": 16, "trials": 40},
    "small": {"tokens": 128, "trials": 400},
    "full": {"tokens": 256, "trials": 2000},
}


def measure(size: str) -> dict[str, Any]:
    """Random small networks, as many as asked; the model's own layers and what enters them; counterexamples to "below 1"."""
    setting, slack, valid = SIZES[size], [], 0
    for seed in range(setting["trials"]):
        x, layers = small(seed)
        report = collapse_bound(x, layers)
        if report.valid:
            valid += 1
            last = residual_recursion(x, layers, "image")[-1]
            slack.append(float(report.log10_bound[-1] - composite_norm(last.unit).log10()) - last.log10)
    read = reading(setting["tokens"])
    report = collapse_bound(read.states, read.layers)
    rows = {name: getattr(report, name).tolist() for name in ("beta", "gamma", "fraction_valid", "log10_residual")}
    more = {
        "log10_threshold": report.log10_threshold.tolist(),
        "log10_bound": report.log10_bound.tolist(),
        "vacuous": report.vacuous,
    }
    more["rows"] = (report.D <= LARGEST).all(1).double().mean(-1).tolist()  # that meet it in every head
    found = {"valid": valid, "held": sum(value >= 0 for value in slack), "slack": 10 ** median(slack), "grew": grew()}
    return {**setting, "random": found, "model": rows | more}


def small(seed: int) -> tuple[torch.Tensor, list[SelfAttention]]:
    """Input and two layers of two heads; inputs and weights of many sizes."""
    draws = torch.Generator().manual_seed(seed)
    size = 2.0 * torch.rand((), generator=draws, dtype=torch.float64)
    x = size * torch.randn(8, 8, generator=draws, dtype=torch.float64) / 2
    weights = torch.randn(2, 4, 8, 8, generator=draws, dtype=torch.float64) / 8**0.5 / 2
    return x, [SelfAttention.of(*w, heads=2) for w in weights]


def grew() -> dict[str, float]:
    """One layer with a residual below 1 in the composite norm, and what it makes of it: large weights undo the third power."""
    x = torch.tensor([[0.4, 0.0], [-0.4, 0.0]], dtype=torch.float64)
    layer = SelfAttention.of(*(size * torch.eye(2, dtype=torch.float64) for size in (20, 20, 3, 3)))
    before, after = (composite_norm(around.rest) for around in residual_recursion(x, [layer]))
    return {"before": float(before), "after": float(after)}


def holds(numbers: dict[str, Any]) -> bool:
    random, model = numbers["random"], numbers["model"]
    counter = random["grew"]["before"] < 1 < random["grew"]["after"]
    return random["held"] == random["valid"] > 10 and counter and model["vacuous"] and max(model["rows"]) < 0.5


def figure_of(numbers: dict[str, Any]) -> str:
    random, model = numbers["random"], numbers["model"]
    spans = {name: f"{min(model[name]):.3g}-{max(model[name]):.3g}" for name in ("beta", "gamma")}
    size, limit = (f"{10 ** min(model[name]):.3g}-{10 ** max(model[name]):.3g}" for name in ("log10_residual", "log10_threshold"))
    bounds = ", ".join(f"{value:.3g}" for value in model["log10_bound"])
    return (
        f"two layers: held {random['held']} of {random['valid']} times, median slack {random['slack']:.2g}; MiniLM, n = {numbers['tokens']}: beta "
        f"{spans['beta']}, gamma {spans['gamma']}, residual {size} against {limit}, at most {max(model['rows']):.1%} of rows meet D, log10 bound {bounds}; a residual of "
        f"{random['grew']['before']:.2g} grew to {random['grew']['after']:.2g}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    model = numbers["model"]
    with figure(path, panels=2) as (left, right):
        left.plot(model["log10_residual"], "-o", color=COLOURS[0], label="residual", markersize=4)
        left.plot(model["log10_threshold"], "--s", color=COLOURS[1], label="threshold of contraction", markersize=4)
        left.set_ylabel("log10, composite norm")
        right.plot(range(1, len(model["log10_bound"]) + 1), model["log10_bound"], "-o", color=COLOURS[2], markersize=4)
        right.set_ylabel("log10 of the bound")
        for axes in (left, right):
            axes.set_xlabel("layer")
            axes.set_title(f"MiniLM, {numbers['tokens']} tokens", fontsize=10)
        left.legend(fontsize=8)
