"""Entropy of the attention rows: how many keys a head looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention import Capture
from ..statistic import TokenMean


@dataclass(frozen=True, eq=False)
class Entropy(TokenMean):
    """Mean entropy of the rows in nats; log of the keys in sight where a head looks everywhere alike, 0 where it looks at one.

    >>> q, k, v = torch.zeros(3, 1, 2, 8, 4)
    >>> Entropy.of(Capture("layer", q, k, v)).result()["entropy"].value.exp()
    tensor([8.0000, 8.0000], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {"entropy": "mean entropy of a row, nats"}

    @classmethod
    def row(cls, capture: Capture) -> Tensor:
        return capture.rows.entropy


@dataclass(frozen=True, eq=False)
class Evenness(TokenMean):
    """Mean of entropy / log(keys in sight): 1 looks everywhere alike, 0 at one key; rows with one key in sight count as 0.

    >>> q, k, v = torch.zeros(3, 1, 2, 8, 4)
    >>> Evenness.of(Capture("layer", q, k, v)).result()["evenness"].value.allclose(torch.tensor(1.0).double())
    True
    """

    columns: ClassVar[dict[str, str]] = {"evenness": "entropy over that of looking everywhere alike"}

    @classmethod
    def row(cls, capture: Capture) -> Tensor:
        rows = capture.rows
        return rows.entropy / rows.visible.clamp_min(2).log()
