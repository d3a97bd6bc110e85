"""What attention gives once a key has moved, or a token is gone, has a closed form, however large the edit.

Source 002, 1.1 (e), which replaces k_i by k_i + eps and argues that little changes. Expected: with g = P_ij expm1(s q_i . eps),
o_i' = o_i + g / (1 + g) (v_j - o_i) (4e-16), and without token j o_i' = o_i - P_ij / (1 - P_ij) (v_j - o_i) (2e-16), while the first order
P_ij (s q_i . eps) (v_j - o_i) is off as soon as the logit moves by 1 or so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful import Capture
from heedful.exact import CallDerivative, Removal, delete_token, perturb_key

from .drawing import COLOURS, figure
from .s002_key_query import drawn, read

VERDICT = "holds"
ERRATA = ("002.17",)
STEPS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of the keys' mean length
SIZES = {"tiny": {"tokens": 24, "edits": 3}, "small": {"tokens": 128, "edits": 12}, "full": {"tokens": 512, "edits": 24}}


def measure(size: str) -> dict[str, Any]:
    """Errors against attending again, in float64, relative to what the edit changes at most."""
    setting: Any = SIZES[size]
    call = drawn(setting["tokens"]) if size == "tiny" else read(setting["tokens"])
    places = torch.linspace(0, setting["tokens"] - 1, setting["edits"]).long().tolist()
    moved = {f"{step:g}": [key_edit(call, place, step) for place in places] for step in STEPS}
    removals = Removal.of(call).norms
    deleted = [deletion(call, place, removals) for place in places]
    return {
        **setting,
        "layer": call.layer,
        "steps": list(STEPS),
        "closed_form": [max(exact for exact, _ in rows) for rows in moved.values()],
        "first_order": [sum(first for _, first in rows) / len(rows) for rows in moved.values()],
        "deletion": max(error for error, _ in deleted),
        "removal_of_all_at_once": max(error for _, error in deleted),
    }


def key_edit(call: Capture, place: int, step: float) -> tuple[float, float]:
    """The relative errors of the closed form and of the first order."""
    change = torch.randn(call.k.shape[-1], generator=torch.Generator().manual_seed(place), dtype=torch.float64)
    change *= step * call.k.norm(dim=-1).mean() / change.norm()
    dk = torch.zeros_like(call.k)
    dk[:, :, place] = change
    before, after = attended(call), attended(replace(call, k=call.k + dk))
    first = before + CallDerivative(call).push(dk=dk)
    moved = (after - before).norm()
    return float((perturb_key(call, place, change) - after).abs().max() / after.abs().max()), float((first - after).norm() / moved)


def deletion(call: Capture, place: int, removals: Tensor) -> tuple[float, float]:
    """Of one token's deletion, and of its norm among those of all tokens."""
    left = torch.arange(call.k.shape[2]) != place
    after = attended(replace(call, k=call.k[:, :, left], v=call.v[:, :, left]))
    norm = (after - attended(call)).norm(dim=(2, 3))
    error = (delete_token(call, place) - after).abs().max() / after.abs().max()
    return float(error), float(((removals[..., place] - norm) / norm).abs().max())


def attended(call: Capture) -> Tensor:
    """Densely, as the sources write it."""
    return (call.q @ call.k.mT * call.scale).softmax(-1) @ call.v


def holds(numbers: dict[str, Any]) -> bool:
    """The closed forms at rounding for every size of edit; the first order only where it is small."""
    exact = max(*numbers["closed_form"], numbers["deletion"])
    return (
        exact < 1e-13 and numbers["removal_of_all_at_once"] < 1e-9 and numbers["first_order"][0] < 0.1 < numbers["first_order"][-1]
    )


def figure_of(numbers: dict[str, Any]) -> str:
    return (
        f"key edits {max(numbers['closed_form']):.0e}, deletions {numbers['deletion']:.0e} (relative, {numbers['tokens']} tokens); the "
        f"first order is off by {numbers['first_order'][0]:.0%} at .01 of a key's length and {numbers['first_order'][4]:.0%} at 1"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path) as (axes,):
        for name, colour in zip(("closed_form", "first_order"), COLOURS, strict=False):
            axes.loglog(numbers["steps"], numbers[name], "-o", color=colour, label=name.replace("_", " "), markersize=4)
        axes.set_xlabel("length of the key's change, of the keys' mean length")
        axes.set_ylabel("relative error against attending again")
        axes.legend()
