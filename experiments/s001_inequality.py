"""P R is at most (I + 2D) 1 softmax(r)^T R, entry by entry.

Source 001, equations (9) and (10), and problem 1, "The proof in A.1". Expected: it multiplies an inequality between positive matrices by a
signed R, and fails in 196 of 200 random trials. Right is |(P - 1u^T) R| <= (e^D - 1) 1 u^T |R| entrywise, u = softmax(r): it fails in none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .drawing import COLOURS, figure

VERDICT = "wrong: a signed R turns the inequality round; right is |(P - 1u^T) R| <= (e^D - 1) 1 u^T |R|, and e^D - 1 <= 2D for D <= 1.2564"
ERRATA = ("001.8", "001.P1")
SIZES = {
    "tiny": {"tokens": 8, "dim": 4, "trials": 50},
    "small": {"tokens": 16, "dim": 8, "trials": 200},
    "full": {"tokens": 64, "dim": 32, "trials": 2000},
}


def measure(size: str) -> dict[str, Any]:
    """In how many random trials, all with D <= 1.2564, some entry breaks each inequality; how near the right one comes at most."""
    setting = SIZES[size]
    draws, source, right, twice, near = torch.Generator().manual_seed(0), 0, 0, 0, []
    for _ in range(setting["trials"]):
        x, w = (
            torch.randn(*shape, generator=draws, dtype=torch.float64)
            for shape in ((setting["tokens"], setting["dim"]), (setting["dim"],) * 2)
        )
        rest, shared = x - x.mean(0), torch.randn(setting["tokens"], generator=draws, dtype=torch.float64)
        own = rest @ w @ rest.mT
        own = own / (own.amax(-1) - own.amin(-1)).amax()  # the widest D is 1
        spread, u, p = (own.amax(-1) - own.amin(-1))[:, None], shared.softmax(-1), (shared + own).softmax(-1)
        moved, limit = (p - u) @ rest, u @ rest.abs()
        above = (p @ rest > u @ rest + 2 * spread * (u @ rest) + 1e-12).any()
        source += bool(above)
        right += bool((moved.abs() > torch.expm1(spread) * limit * (1 + 1e-12)).any())
        twice += bool((moved.abs() > 2 * spread * limit * (1 + 1e-12)).any())
        near.append(float((moved.abs() / (torch.expm1(spread) * limit)).amax()))
    return {**setting, "broken": {"source": source, "(e^D - 1)": right, "2 D": twice}, "nearest": max(near)}


def holds(numbers: dict[str, Any]) -> bool:
    broken = numbers["broken"]
    return broken["source"] > 0.9 * numbers["trials"] and broken["(e^D - 1)"] == broken["2 D"] == 0


def figure_of(numbers: dict[str, Any]) -> str:
    broken, trials = numbers["broken"], numbers["trials"]
    return (
        f"broken in {broken['source']} of {trials} random trials; corrected in {broken['(e^D - 1)']} of {trials}, whose nearest "
        f"entry reached {numbers['nearest']:.2f} of its bound (n = {numbers['tokens']}, d = {numbers['dim']}, D <= 1)"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        axes.bar(list(numbers["broken"]), [count / numbers["trials"] for count in numbers["broken"].values()], color=COLOURS[:3])
        axes.set_ylabel("share of trials in which an entry breaks it")
        axes.set_ylim(0, 1.05)
        axes.set_title(f"{numbers['trials']} random trials, n = {numbers['tokens']}", fontsize=10)
