"""Peak probability: how sure a head is of its best key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention import Capture
from ..statistic import TokenMean


@dataclass(frozen=True, eq=False)
class Peak(TokenMean):
    """Mean over tokens of the largest probability in the row.

    >>> q, k, v = torch.zeros(3, 1, 1, 8, 4)
    >>> Peak.of(Capture("layer", q, k, v)).result()["peak"].value
    tensor([0.1250], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {"peak": "mean largest probability of a row"}

    @classmethod
    def row(cls, capture: Capture) -> Tensor:
        return capture.rows.peak
