"""Lipschitz: how much the attention of each layer stretches a small move of its input at most, near one text."""

from __future__ import annotations

from torch import Tensor

from ..attention import Capture
from ..exact.stretch import block_lipschitz
from ..huggingface.apart import take_apart
from ..scan import run
from ..verdicts import short_names
from .explanation import Explanation, Lines, Table
from .given import Given


def explain(given: Given) -> Explanation:
    """The largest singular value of each attention layer's Jacobian at what it read."""
    apart = take_apart(given.checkpoint.model, lambda: run(given.checkpoint.model, given.inputs))
    names = short_names([block.attention for block in apart.blocks])
    rows: list[tuple] = []
    for name, block, call, state in zip(names, apart.blocks, apart.calls, apart.states, strict=False):
        x = block.attended(state)
        stretch = block_lipschitz(block, call, x)
        typical = float(block.heads.join(_out(call)).norm() / x.norm())
        rows.append((name, stretch.value, stretch.error, typical, stretch.iterations))
    columns = ("layer", "stretch at most", "its error", "|out| / |in|", "iterations")
    table = Table("local Lipschitz constant of each attention layer: |d out / d in|_2, all tokens together", columns, rows)
    curves = {"stretch at most": [row[1] for row in rows], "|out| / |in|": [row[3] for row in rows]}
    picture = Lines(curves, "layer", "factor", log=True)
    return Explanation("lipschitz", given.checkpoint.name, given.words, [table], _said(rows), picture, given.notes)


def _out(call: Capture) -> Tensor:
    assert call.out is not None
    return call.out


def _said(rows: list[tuple]) -> list[str]:
    most, least = max(rows, key=lambda row: row[1]), min(rows, key=lambda row: row[1])
    return [
        f"Layer {most[0]} stretches most: the worst small move of what it reads comes out {most[1]:.3g} times as long; layer {least[0]} least, {least[1]:.3g}.",
        "This holds near this text: dot-product attention has no constant that holds everywhere (Kim et al. 2021).",
    ]
