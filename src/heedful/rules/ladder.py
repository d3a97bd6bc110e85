"""Ladder: the dims of a head, best first, with what each is worth; a rule says how far to climb each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ladder:
    """Steps of `cost` dims each (2 for a frequency pair), best first; `worth[i]` is the error that leaving out the i-th adds."""

    layer: str
    head: int
    worth: tuple[float, ...]
    cost: int = 1

    @property
    def dims(self) -> int:
        return self.cost * len(self.worth)


class Rule:
    """How many steps of each ladder to take. To write one, subclass and give `steps`."""

    def steps(self, ladders: Sequence[Ladder]) -> list[int]:
        """The number of steps of each ladder; every head keeps at least one."""
        raise NotImplementedError


def climb(ladders: Sequence[Ladder], go_on: Callable[[int, float], bool]) -> list[int]:
    """Take the steps of several ladders together, the most worth for a dim first, each head's best step before all.

    `go_on(dims, lost)` is asked before a step: the dims with it, and what is lost without it.

    >>> climb([Ladder("a", 0, (9.0, 1.0)), Ladder("a", 1, (5.0, 4.0))], lambda dims, lost: dims <= 3)
    [1, 2]
    """
    falling = [_falling(ladder.worth) for ladder in ladders]
    order = [(-falling[i][n] / ladder.cost, n, i) for i, ladder in enumerate(ladders) for n in range(len(ladder.worth))]
    best: dict[tuple[str, int], tuple[float, int, int]] = {}
    for step in sorted(order):
        best.setdefault((ladders[step[2]].layer, ladders[step[2]].head), step)
    first = set(best.values())
    taken, dims, lost = [0] * len(ladders), 0, sum(map(sum, falling))
    for step in [*sorted(first), *(step for step in sorted(order) if step not in first)]:
        i = step[2]
        if step not in first and not go_on(dims + ladders[i].cost, lost):
            break
        taken[i], dims, lost = taken[i] + 1, dims + ladders[i].cost, lost - falling[i][taken[i]]
    return taken


def _falling(worth: Sequence[float]) -> list[float]:
    """No step worth less than a later one, so that ladders are climbed in order."""
    found: list[float] = []
    for value in reversed(worth):
        found.append(max(value, found[-1] if found else 0.0))
    return found[::-1]
