"""A small change of one key changes little of the attention, and a change of one query all of it.

Source 002, 1.1 (e): "this perturbation here only affects the attention corresponding to the key k_i, not the entire attention matrix", and
(f): "Perturbation in one query affect in the entire attention matrix". Expected: the reverse. K^T q changes by (eps^T q) e_i, one logit
of each query (a constant on every logit, as the source adds it, changes nothing: 2e-16), so one key changes every output; one query
changes its own output alone, all others by exactly 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful import Capture, capture
from heedful.exact import perturb_key, perturb_query

from .drawing import COLOURS, figure

VERDICT = "wrong: one key changes every output that sees it, one query its own output alone and every other by exactly 0"
ERRATA = ("002.14", "002.15")
SIZES = {"tiny": {"tokens": 24, "edits": 4}, "small": {"tokens": 128, "edits": 16}, "full": {"tokens": 512, "edits": 32}}
STEP = 0.1  # length of the change, relative to the keys' and queries' own


def measure(size: str) -> dict[str, Any]:
    """How many outputs an edit moves, how far each, and what a constant on every logit does."""
    setting: Any = SIZES[size]
    calls = {"random": drawn(setting["tokens"])}
    if size != "tiny":
        calls["MiniLM"] = read(setting["tokens"])
    return {**setting, "step": STEP, "calls": {name: edited(call, setting["edits"]) for name, call in calls.items()}}


def drawn(tokens: int) -> Capture:
    q, k, v = torch.randn(3, 1, 4, tokens, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Capture("random", q, k, v, scale=0.25)


def read(tokens: int) -> Capture:
    """A layer in the middle of MiniLM, in float64."""
    from benchmarks.real import data, minilm

    found = capture(minilm(), [data("wikitext2/test.txt").read_text()[:8000]], length=tokens)
    call = list(found.values())[2][0]
    return Capture(call.layer, call.q.double(), call.k.double(), call.v.double(), call.mask, call.scale)


def edited(call: Capture, edits: int) -> dict[str, Any]:
    """The mean share of outputs that move, and the size of all moves relative to the outputs, of a key and of a query."""
    source, tokens = torch.Generator().manual_seed(1), call.q.shape[2]
    shares: dict[str, list[float]] = {"key": [], "query": []}
    moves: dict[str, list[Tensor]] = {"key": [], "query": []}
    for place in torch.linspace(0, tokens - 1, edits).long().tolist():
        for name, vectors, edit in (("key", call.k, perturb_key), ("query", call.q, perturb_query)):
            change = torch.randn(call.q.shape[-1], generator=source, dtype=torch.float64)
            change *= STEP * vectors.norm(dim=-1).mean() / change.norm()
            moved = (edit(call, place, change) - edit(call, place, 0 * change)).norm(dim=-1)  # (batch, heads, queries)
            shares[name].append(float((moved > 0).double().mean()))
            moves[name].append(moved.mean((0, 1)).sort(descending=True).values)
    logits = call.q @ call.k.mT * call.scale
    constant = (logits + 3).softmax(-1) - logits.softmax(-1)
    return {
        "outputs_moved_by_a_key": min(shares["key"]),
        "outputs_moved_by_a_query": max(shares["query"]),
        "one_output": 1 / tokens,
        "constant_on_every_logit": float(constant.abs().max()),
        "moves": {name: torch.stack(rows).mean(0).tolist() for name, rows in moves.items()},
    }


def holds(numbers: dict[str, Any]) -> bool:
    """A key moves all outputs, a query one, a constant none."""
    return all(
        row["outputs_moved_by_a_key"] > 0.99
        and row["outputs_moved_by_a_query"] <= row["one_output"] * 1.001
        and row["constant_on_every_logit"] < 1e-14
        for row in numbers["calls"].values()
    )


def figure_of(numbers: dict[str, Any]) -> str:
    name, row = list(numbers["calls"].items())[-1]
    return (
        f"{name}, {numbers['tokens']} tokens: a key moves {row['outputs_moved_by_a_key']:.1%} of the outputs, a query "
        f"{row['outputs_moved_by_a_query'] * numbers['tokens']:.0f} of {numbers['tokens']}; a constant on all logits changes P by "
        f"{row['constant_on_every_logit']:.0e}"
    )


def draw(numbers: dict[str, Any], path: Path) -> None:
    with figure(path, panels=len(numbers["calls"])) as panels:
        for axes, (name, row) in zip(panels, numbers["calls"].items(), strict=True):
            for (what, moves), colour in zip(row["moves"].items(), COLOURS, strict=False):
                axes.loglog(
                    range(1, len(moves) + 1), [x or None for x in moves], "-o", color=colour, label=f"one {what}", markersize=3
                )
            axes.set_xlabel("outputs, the one that moves most first")
            axes.set_ylabel("mean move of an output")
            axes.set_title(f"{name}, {numbers['tokens']} tokens, a change of {numbers['step']:g} of the length", fontsize=10)
            axes.legend()
