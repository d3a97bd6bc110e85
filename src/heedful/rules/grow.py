"""Room: layers grow where new dims gain most for a parameter, as far as a budget of parameters goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """So many parameters may be added; layers that gain less than `least` of the best, for a parameter, wait for another time.

    >>> Room(250).layers({"a": 9.0, "b": 8.0, "c": 1.0}, dict.fromkeys("abc", 100))
    ['a', 'b']
    >>> Room(50).layers({"a": 9.0}, {"a": 100})
    []
    """

    parameters: int
    least: float = 0.25

    def __post_init__(self) -> None:
        if self.parameters < 0 or not 0 <= self.least <= 1:
            raise ValueError(
                f"{self.parameters} parameters and least {self.least} were given; give 0 or more, and a share from 0 to 1."
            )

    def layers(self, gains: Mapping[str, float], costs: Mapping[str, int]) -> list[str]:
        """Which layers shall grow, best first; `costs` are the parameters that each would add."""
        worth = {name: gain / costs[name] for name, gain in gains.items()}
        best, chosen, left = max(worth.values(), default=0.0), [], self.parameters
        for name in sorted(worth, key=lambda name: -worth[name]):
            if worth[name] > 0 and worth[name] >= self.least * best and costs[name] <= left:
                chosen.append(name)
                left -= costs[name]
        return chosen
