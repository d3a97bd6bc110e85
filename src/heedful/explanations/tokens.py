"""Tokens: without which tokens of a text the attention of each layer would give something else."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import Capture
from ..capturing import calls
from ..exact import Removal
from ..finite import check_finite, why_not_finite
from ..verdicts import short_names
from .explanation import Cell, Explanation, Grid, Table
from .given import Given

TOP = 3  # tokens named for each layer
LISTED = 12  # tokens listed over all layers


def explain(given: Given) -> Explanation:
    """For each layer, how far the outputs of all its heads move when one token can no longer be attended to, exactly."""
    made = _made(given)
    if not made:
        raise ValueError(
            f"no attention layer of {given.checkpoint.name} reads the text token by token, so none of them can be removed."
        )
    for call in made.values():
        check_finite(call, given.checkpoint.model)
    found = {layer: Removal.of(call).layer[0] for layer, call in made.items()}
    moved = torch.stack([*found.values()]).double()  # (layers, tokens)
    if not bool(moved.isfinite().all()):
        raise ValueError(
            f"the attention of {given.checkpoint.name} gives NaN or infinite numbers for this text; {why_not_finite(given.checkpoint.model)}."
        )
    names, words = _names(list(found)), given.words
    tables = [_layers(names, words, moved), _listed(words, moved)]
    picture = Grid(
        moved.tolist(), [f"layer {name}" for name in names], words, "token", "|change of the heads' outputs| / |outputs|"
    )
    return Explanation("tokens", given.checkpoint.name, words, tables, _said(names, words, moved), picture, given.notes)


def _made(given: Given) -> dict[tuple[str, int], Capture]:
    """The calls whose keys are the text's tokens, by layer and by pass through it."""
    found = calls(given.checkpoint, [given.sample])
    return {(layer, i): call for layer, made in found.items() for i, call in enumerate(made) if call.k.shape[2] == len(given.ids)}


def _names(passes: list[tuple[str, int]]) -> list[str]:
    """Short names of layers; a layer that is passed again and again (ALBERT) has the number of the pass too.

    >>> _names([("encoder.0.attn", 0), ("encoder.1.attn", 0)]), _names([("shared.attn", 0), ("shared.attn", 1)])
    (['0', '1'], ['shared.attn, pass 1', 'shared.attn, pass 2'])
    """
    layers = list(dict.fromkeys(layer for layer, _ in passes))
    short = dict(zip(layers, short_names(layers), strict=True))
    again = {layer for layer, number in passes if number}
    return [short[layer] + (f", pass {number + 1}" if layer in again else "") for layer, number in passes]


def _layers(names: list[str], words: list[str], moved: Tensor) -> Table:
    top = min(TOP, len(words))
    rows: list[tuple[Cell, ...]] = []
    for name, layer in zip(names, moved, strict=True):
        rows.append((name, *(f"{named(words, place)} ({layer[place]:.2f})" for place in layer.topk(top).indices.tolist())))
    return Table("tokens whose removal changes each layer's attention output most (relative)", ("layer", *_places(top)), rows)


def _places(count: int) -> tuple[str, ...]:
    return ("most", "then", "and")[:count]


def _listed(words: list[str], moved: Tensor) -> Table:
    """The tokens that matter most over all layers."""
    mean, most = moved.square().mean(0).sqrt(), moved.max(0)
    places = mean.topk(min(LISTED, len(words))).indices.tolist()
    rows: list[tuple[Cell, ...]] = [(place, words[place], mean[place].item(), most.values[place].item()) for place in places]
    return Table("over all layers", ("position", "token", "change, root mean square", "largest"), rows)


def _said(names: list[str], words: list[str], moved: Tensor) -> list[str]:
    layer, place = divmod(int(moved.argmax()), len(words))
    mean = moved.square().mean(0).sqrt()
    share = float(mean.max() / mean.median().clamp_min(1e-30))
    return [
        f"The removal of {named(words, place)} changes layer {names[layer]} most: its heads' outputs move by {100 * moved[layer, place]:.0f} % of their size.",
        f"Over all layers {named(words, int(mean.argmax()))} matters most, {share:.3g} times as much as the median token.",
    ]


def named(words: list[str], place: int) -> str:
    """A token with its position.

    >>> named(["a", "cat"], 1)
    'cat@1'
    """
    return f"{words[place]}@{place}"
