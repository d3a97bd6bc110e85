"""Cutting: the layers of an adopted model get the sizes of a plan, and what each loses is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from .huggingface.adopt import reshape
from .huggingface.layer import Sizes
from .plan import Plan, Resize, each
from .progress import bar
from .rules import Ladder, Uniform
from .shortening import Cut, Lost, Seen, Shortener


@dataclass(frozen=True)
class Change:
    """What became of a layer: its sizes before and after, and what was lost on the texts it was fitted to and on others."""

    layer: str
    before: Sizes
    after: Sizes
    predicted: Lost
    measured: Lost | None = None


def change(model: nn.Module, plan: Plan, ready: Mapping[str, Shortener], held: Mapping[str, Seen], progress: bool) -> list[Change]:
    """Give the layers their new matrices; what is lost is told for each."""
    changes = []
    with bar("resize", len(plan.layers) if progress else None, lambda n: f"{n:.0f} layers") as shown:
        for name, wanted in plan.layers.items():
            one = ready[name]
            cuts = _cuts(one, wanted)
            for cut in cuts:  # v after qk, of the matrices that those left
                reshape(model, name, cut.matrices, cut.sizes)
            beyond = None if name not in held else Shortener(name, one.found, one.sizes, held[name], one.scale)
            measured = None if beyond is None else _total([beyond.lost(cut, one.centre) for cut in cuts], beyond)
            after = cuts[-1].sizes if cuts else one.sizes
            changes.append(Change(name, one.sizes, after, _total([one.lost(cut) for cut in cuts], one), measured))
            shown.advance(1)
    return changes


def _cuts(one: Shortener, wanted: Resize) -> list[Cut]:
    """The changes of q.k and of v, each on top of the one before."""
    cuts = []
    if wanted.qk is not None:
        named = one if wanted.pairs is None else one.keeping(wanted.pairs)
        dims = each(wanted.qk, len(one.sizes.qk))
        cuts.append(named.qk(*_units(named, dims, wanted.pairs)))
    if wanted.v is not None:
        before = cuts[-1] if cuts else Cut(one.found, one.sizes)
        found = Shortener(one.name, before.matrices, before.sizes, one.seen, one.scale)
        cuts.append(found.v(each(wanted.v, len(one.sizes.v))))
    return cuts


def _units(one: Shortener, dims: tuple[int, ...], pairs: tuple[tuple[int, ...], ...] | None) -> tuple[list[int], list[int]]:
    """How many frequency pairs and how many other dims make up the dims of each key head."""
    if one.sizes.pairs is None:
        return [0] * len(dims), list(dims)
    if pairs is not None:
        return [len(kept) for kept in pairs], [d - 2 * len(kept) for d, kept in zip(dims, pairs, strict=True)]
    ladders: list[Ladder] = one.qk_ladders()
    turning, staying = [0] * len(dims), [0] * len(dims)
    for head, size in enumerate(dims):
        own = [ladder for ladder in ladders if ladder.head == head]
        for ladder, count in zip(own, Uniform(size).steps(own), strict=True):
            (turning if ladder.cost == 2 else staying)[head] = count
    return turning, staying


def _total(parts: list[Lost], one: Shortener) -> Lost:
    whole = one.lost(Cut(one.found, one.sizes))
    return Lost(sum(p.qk for p in parts), whole.qk_of, sum(p.v for p in parts), whole.v_of)
