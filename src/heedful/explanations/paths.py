"""Paths: how much of a model's output comes by paths through 0, 1, 2 ... heads, and through each head."""

from __future__ import annotations

from ..explaining import Paths, path_streams
from ..huggingface.blocks import blocks
from ..texts import Tokens
from ..verdicts import head_name, short_names
from .explanation import Cell, Explanation, Grid, Table
from .given import Given

DEEP = 12  # layers, beyond which the paths longer than LONGEST are kept together: all lengths cost layers^2 / 2
LONGEST = 6
LISTED = 12  # heads listed


def explain(given: Given) -> Explanation:
    """The share of <output, output> that paths of each length have, and what leaving out each head would take away."""
    depth = len(blocks(given.checkpoint.model))
    cut = LONGEST if depth > DEEP else None
    found = path_streams(given.checkpoint, [Tokens(given.ids)], max_length=cut)
    names = short_names(list(found.layers))
    by_length = Table("by length of the paths", ("paths", "share of the output", "norm"), _lengths(found))
    by_head = Table(
        "the heads with the largest shares, over all paths through them", ("head", "share of the output"), _heads(found, names)
    )
    heads = [str(head) for head in range(found.heads.shape[1])]
    picture = Grid(
        found.heads.tolist(), [f"layer {name}" for name in names], heads, "head", "share of the output, paths through a head"
    )
    return Explanation("paths", found.model, given.words, [by_length, by_head], _said(found, names), picture, given.notes)


def _lengths(found: Paths) -> list[tuple[Cell, ...]]:
    values = zip(found.names, found.shares[0].tolist(), found.norms[0].tolist(), strict=True)
    return [(name, share, norm) for name, share, norm in values if share or norm]


def _heads(found: Paths, names: list[str]) -> list[tuple[Cell, ...]]:
    flat = found.heads.flatten()
    order = flat.abs().argsort(descending=True)[:LISTED].tolist()
    return [(_name(found, names, place), flat[place].item()) for place in order]


def _name(found: Paths, names: list[str], place: int) -> str:
    layer, head = divmod(place, found.heads.shape[1])
    return head_name(names[layer], head)


def _said(found: Paths, names: list[str]) -> list[str]:
    layers, heads = found.heads.shape
    shares = dict(zip(found.names, found.shares[0].tolist(), strict=True))
    most = max(shares, key=lambda name: shares[name])
    flat = found.heads.flatten()
    against = int((flat < 0).sum())
    return [
        f"All {(heads + 1) ** layers:.2g} paths through {layers} layers of {heads} heads sum to the model's output within {found.error:.0e}.",
        f"The largest part of the output, {100 * shares[most]:.0f} %, comes by {most}; a share below 0 works against the sum.",
        f"{_name(found, names, int(flat.argmax()))} gives most, {100 * flat.max():.0f} %; {against} of {len(flat)} heads work against the sum.",
    ]
