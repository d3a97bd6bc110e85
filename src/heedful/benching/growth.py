"""Growth: how figures grow with the length, where one falls below another, and what the next length will take."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

MARGIN = 1.5  # what a prediction allows for
STEEPEST = 3.0  # power that a prediction believes
LEAD = 1.05  # times less, from which on a difference counts


def exponent(figures: Mapping[int, float]) -> float | None:
    """The power of the length that figures grow with: least squares on logarithms over the larger half of the lengths.

    At least three lengths count where there are so many; None where there are fewer than two.

    >>> exponent({512: 1.0, 1024: 4.0, 2048: 16.0})
    2.0
    """
    known = sorted((length, figure) for length, figure in figures.items() if figure > 0)
    larger = known[-max(3, math.ceil(len(known) / 2)) :]
    if len(larger) < 2:
        return None
    x, y = ([math.log(pair[i]) for pair in larger] for i in (0, 1))
    mean = sum(x) / len(x)
    return round(sum((a - mean) * b for a, b in zip(x, y, strict=True)) / sum((a - mean) ** 2 for a in x), 6)


def predicted(figures: Mapping[int, float], length: int) -> float:
    """What a longer length will take at most, from the two longest before it; where one is all that is known, growth by the square.

    >>> predicted({512: 1.0, 1024: 2.0}, 2048) == 4.0 * MARGIN
    True
    """
    known = dict(sorted(figures.items())[-2:])
    longest = max(known)
    power = exponent(known) if len(known) > 1 else 2.0
    return known[longest] * (length / longest) ** min(max(1.0, power or 1.0), STEEPEST) * MARGIN


@dataclass(frozen=True)
class Crossover:
    """The length from which on something takes less than another: None where it never does up to `longest`."""

    length: float | None
    shortest: int
    longest: int

    @property
    def always(self) -> bool:
        """Whether it takes less at every length that was measured."""
        return self.length == self.shortest

    def __str__(self) -> str:
        if self.length is None:
            return f"never up to {self.longest:,}"
        return f"always (from {self.shortest:,})" if self.always else f"{max(rounded(self.length), self.shortest):,}"


def crossover(mine: Mapping[int, float], theirs: Mapping[int, float], doubted: Collection[int] = ()) -> Crossover | None:
    """From which length on mine stay clearly below theirs, between two measured lengths on logarithms; None without a common length.

    At lengths that are `doubted`, and where theirs are not `LEAD` times mine, nothing is below.

    >>> print(crossover({1000: 2.0, 4000: 8.0}, {1000: 1.0, 4000: 16.0}))
    2,000
    >>> print(crossover({1000: 2.0}, {1000: 1.0}))
    never up to 1,000
    """
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return None
    lead = [math.log(mine[length] / theirs[length]) for length in common]  # below zero where mine take less
    slower = [i for i, x in enumerate(lead) if x > -math.log(LEAD) or common[i] in doubted]
    if not slower:
        return Crossover(common[0], common[0], common[-1])
    last = slower[-1]
    if last == len(common) - 1:
        return Crossover(None, common[0], common[-1])
    part = lead[last] / (lead[last] - lead[last + 1]) if lead[last] >= 0 else 1.0  # in doubt: from the first clear lead on
    where = math.exp(math.log(common[last]) + part * math.log(common[last + 1] / common[last]))
    return Crossover(max(where, common[0] + 1e-9), common[0], common[-1])


def rounded(length: float) -> int:
    """Two digits: a crossover is known no better.

    >>> rounded(2143.7), rounded(64)
    (2100, 64)
    """
    step = 10 ** max(0, math.floor(math.log10(max(length, 1))) - 1)
    return int(round(length / step) * step)
