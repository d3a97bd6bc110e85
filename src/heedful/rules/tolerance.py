"""Tolerance: every head gets as few dims as lose no more than a given share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ladder import Ladder, Rule, climb


@dataclass(frozen=True)
class Tolerance(Rule):
    """Every head loses at most the share `error` of its logits' variance (or of its output's).

    >>> Tolerance(0.1).steps([Ladder("a", 0, (9.0, 1.0, 0.5)), Ladder("a", 1, (5.0, 5.0))])
    [2, 2]
    """

    error: float

    def __post_init__(self) -> None:
        if not 0 <= self.error < 1:
            raise ValueError(f"tolerance is {self.error}; give the share that may be lost, from 0 to below 1, such as 0.01.")

    def steps(self, ladders: Sequence[Ladder]) -> list[int]:
        taken = [0] * len(ladders)
        for head in dict.fromkeys((ladder.layer, ladder.head) for ladder in ladders):
            own = [i for i, ladder in enumerate(ladders) if (ladder.layer, ladder.head) == head]
            allowed = self.error * sum(sum(ladders[i].worth) for i in own)
            found = climb([ladders[i] for i in own], lambda dims, lost, allowed=allowed: lost > allowed)
            for i, count in zip(own, found, strict=True):
                taken[i] = count
        return taken
