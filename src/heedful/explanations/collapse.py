"""Collapse: how alike the tokens of a text become layer by layer, in the model and without its skips, MLPs and norms."""

from __future__ import annotations

from ..explaining import Curves, collapse_curves
from ..texts import Tokens
from .explanation import Explanation, Lines, Table
from .given import Given

COLLAPSED = 1e-3  # of the first residual


def explain(given: Given) -> Explanation:
    """The curves of all ablations that the model's blocks allow."""
    found = collapse_curves(given.checkpoint, [Tokens(given.ids)])
    curves = _flat(found)
    depths = max(map(len, curves.values()))
    rows = [(depth, *(curve[depth] if depth < len(curve) else None for curve in curves.values())) for depth in range(depths)]
    table = Table("residual after each block: |X - 1 mean^T| / |X| in the composite norm", ("blocks", *curves), rows)
    sentences = [_said(name, curve) for name, curve in curves.items()]
    notes = [*given.notes, *(f"{name}: {why}" for name, why in found.refused.items())]
    picture = Lines(curves, "blocks", "residual / whole, composite norm", log=min(map(min, curves.values())) < COLLAPSED)
    return Explanation("collapse", found.model, given.words, [table], sentences, picture, notes)


def _flat(found: Curves) -> dict[str, list[float]]:
    """One curve for each ablation, and for each stack of blocks where there are several."""
    return {
        name if len(stacks) == 1 else f"{name}, {stack}": curve
        for name, stacks in found.curves.items()
        for stack, curve in stacks.items()
    }


def _said(name: str, curve: list[float]) -> str:
    """What a curve says.

    >>> _said("pure SAN", [0.9, 0.1, 1e-6])
    'pure SAN: the residual goes from 0.9 to 1e-06 of the whole; rank is lost after 2 blocks.'
    """
    start, end = curve[0], curve[-1]
    lost = next((depth for depth, x in enumerate(curve) if x < COLLAPSED * start), None)
    verdict = "no rank collapse" if lost is None else f"rank is lost after {lost} blocks"
    return f"{name}: the residual goes from {start:.2g} to {end:.2g} of the whole; {verdict}."
