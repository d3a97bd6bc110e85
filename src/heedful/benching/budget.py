"""Budget: the seconds and bytes that a bench may take, asked before every measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .. import measuring
from .growth import predicted

FEW = 2**16  # bytes below which differences are the system's own
KEPT = 0.03  # of the seconds, for what comes after the last measurement


class TooSmall(ValueError):
    """The budget does not suffice for the least that a bench must measure."""


@dataclass
class Budget:
    """What may be taken in all: seconds from now on, and bytes beyond what the model holds."""

    seconds: float
    memory: int
    held: int = 0  # bytes that the captures take already
    start: float = field(default_factory=lambda: measuring.clock())

    @property
    def spent(self) -> float:
        return measuring.clock() - self.start

    @property
    def left(self) -> float:
        """Seconds that measurements may still take."""
        return self.seconds * (1 - KEPT) - self.spent

    @property
    def room(self) -> int:
        """Bytes that a measurement may still take."""
        return self.memory - self.held

    def refusal(self, length: int, seconds: Mapping[int, float], memory: Mapping[int, float], available: float) -> str | None:
        """Why a call at that length is not made, told from the shorter ones; None where it is.

        It is made where it can be called twice in the seconds that are `available`, in three quarters of the room.
        """
        if available <= 0:
            return "the budget's time was spent"
        if not seconds:
            return None
        wanted = predicted(seconds, length)
        size = predicted({n: max(x, FEW) for n, x in memory.items()}, length)
        if size > 0.75 * self.room:
            return f"it would take about {as_bytes(size)}"
        if 2 * wanted > available:
            return f"one call would take about {as_seconds(wanted)}"
        return None


def as_seconds(seconds: float) -> str:
    """Two digits with a unit.

    >>> as_seconds(0.00123), as_seconds(41.3), as_seconds(600)
    ('1.2 ms', '41 s', '10 min')
    """
    value, unit = (seconds * 1e3, "ms") if seconds < 1 else (seconds, "s") if seconds < 120 else (seconds / 60, "min")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def as_bytes(size: float) -> str:
    """Two digits with a unit.

    >>> as_bytes(1.25e9), as_bytes(41e6)
    ('1.2 GB', '41 MB')
    """
    value, unit = (size / 1e9, "GB") if size >= 1e9 else (size / 1e6, "MB")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
