"""Budget: a share of all dims is kept, where they are worth most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ladder import Ladder, Rule, climb


@dataclass(frozen=True)
class Budget(Rule):
    """Of all dims of all layers the share `keep` stays; heads `alike` in a layer keep as many each, so that none is padded.

    >>> Budget(0.5).steps([Ladder("a", 0, (9.0, 1.0)), Ladder("b", 0, (5.0, 4.0, 3.0, 0.1))])
    [1, 2]
    """

    keep: float
    alike: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep is {self.keep}; give the share of dims that stay, above 0 and at most 1, such as 0.75.")

    def steps(self, ladders: Sequence[Ladder]) -> list[int]:
        room = round(self.keep * sum(ladder.dims for ladder in ladders))
        if not self.alike:
            return climb(ladders, lambda dims, lost: dims <= room)
        whole, members = _joined(ladders)
        found = climb(whole, lambda dims, lost: dims <= room)
        taken = [0] * len(ladders)
        for count, own in zip(found, members, strict=True):
            for i in own:
                taken[i] = min(count, len(ladders[i].worth))
        return taken


def _joined(ladders: Sequence[Ladder]) -> tuple[list[Ladder], list[list[int]]]:
    """The ladders of one layer as one, which takes a step in all of its heads at once."""
    groups: dict[tuple[str, int], list[int]] = {}
    for i, ladder in enumerate(ladders):
        groups.setdefault((ladder.layer, ladder.cost), []).append(i)
    whole = []
    for (layer, cost), own in groups.items():
        longest = max(len(ladders[i].worth) for i in own)
        worth = tuple(sum(ladders[i].worth[n] for i in own if n < len(ladders[i].worth)) for n in range(longest))
        whole.append(Ladder(layer, 0, worth, cost * len(own)))
    return whole, list(groups.values())
