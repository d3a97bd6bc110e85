"""Concentration: the sum of squared probabilities of a row, one over the number of keys that matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention import Capture
from ..statistic import Estimate, TokenMean


@dataclass(frozen=True, eq=False)
class Concentration(TokenMean):
    """Mean sum of squared probabilities, and its inverse: the number of keys a head looks at in effect.

    >>> q, k, v = torch.zeros(3, 1, 1, 8, 4)
    >>> Concentration.of(Capture("layer", q, k, v)).result()["effective_keys"].value
    tensor([8.], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {
        "concentration": "mean sum of squared probabilities of a row",
        "effective_keys": "one over the concentration",
    }

    @classmethod
    def row(cls, capture: Capture) -> Tensor:
        return capture.rows.squared

    def result(self) -> dict[str, Estimate]:
        return {
            "concentration": Estimate(self.mean, self.error),
            "effective_keys": Estimate(1 / self.mean, self.error / self.mean**2),
        }
