"""Uniform: every head gets the same size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ladder import Ladder, Rule, climb


@dataclass(frozen=True)
class Uniform(Rule):
    """Every head keeps `dims` dims, or all that it has where that is less.

    >>> Uniform(2).steps([Ladder("a", 0, (9.0, 1.0, 0.5)), Ladder("a", 1, (5.0,))])
    [2, 1]
    """

    dims: int

    def steps(self, ladders: Sequence[Ladder]) -> list[int]:
        taken = [0] * len(ladders)
        for head in dict.fromkeys((ladder.layer, ladder.head) for ladder in ladders):
            own = [i for i, ladder in enumerate(ladders) if (ladder.layer, ladder.head) == head]
            found = climb([ladders[i] for i in own], lambda dims, lost: dims <= self.dims)
            for i, count in zip(own, found, strict=True):
                taken[i] = count
        return taken
