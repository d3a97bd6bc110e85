"""Sink mass: how much of a head's attention is parked on the first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention import Capture
from ..statistic import TokenMean


@dataclass(frozen=True, eq=False)
class Sink(TokenMean):
    """Mean mass on the first key that is a token.

    >>> q, k, v = torch.zeros(3, 1, 1, 8, 4)
    >>> Sink.of(Capture("layer", q, k, v)).result()["sink"].value
    tensor([0.1250], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {"sink": "mean mass on the first token"}

    @classmethod
    def row(cls, capture: Capture) -> Tensor:
        return capture.rows.sink
