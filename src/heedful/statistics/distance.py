"""Distance: how far from the query a head looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention import Capture
from ..statistic import TokenMean


@dataclass(frozen=True, eq=False)
class Distance(TokenMean):
    """Mean of |query - key| in tokens under the attention.

    >>> from heedful.attention import Mask
    >>> q, k, v = torch.zeros(3, 1, 1, 8, 4)
    >>> Distance.of(Capture("layer", q, k, v, Mask(causal=True))).result()["distance"].value
    tensor([1.7500], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {"distance": "mean |query - key| in tokens"}

    @classmethod
    def row(cls, capture: Capture) -> Tensor:
        return capture.rows.distance
