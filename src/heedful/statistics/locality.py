"""Locality: how much attention falls near the query, and the window that holds 99 % of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..attention import Capture
from ..ops.profile import WINDOWS
from ..statistic import Estimate, TokenMean


@dataclass(frozen=True, eq=False)
class Locality(TokenMean):
    """Mean mass within |query - key| < w for w = 16, 32 ... 4096, and the smallest of these windows that holds 99 % (inf if none does).

    >>> from heedful.attention import Mask
    >>> q, k, v = torch.zeros(3, 1, 1, 64, 4)
    >>> found = Locality.of(Capture("layer", q, k, v, Mask(causal=True, window=16))).result()
    >>> round(found["near_16"].value.item(), 5), found["window99"].value.item()
    (1.0, 16.0)
    """

    columns: ClassVar[dict[str, str]] = {
        **{f"near_{w}": f"mean mass on keys less than {w} tokens away" for w in WINDOWS},
        "window99": "the smallest of these windows that holds 99 % of the mass",
    }

    @classmethod
    def row(cls, capture: Capture) -> Tensor:
        return capture.rows.near

    def result(self) -> dict[str, Estimate]:
        named = {f"near_{w}": Estimate(self.mean[:, i], self.error[:, i]) for i, w in enumerate(WINDOWS)}
        return {**named, "window99": Estimate(*self._window(0.99))}

    def _window(self, share: float) -> tuple[Tensor, Tensor]:
        windows = torch.tensor([*WINDOWS, float("inf")], dtype=torch.float64, device=self.total.device)
        slack = 1e-6  # float32 sums of a full window
        narrowest = windows[(self.mean < share - slack).sum(-1)]
        doubtful = ((self.mean - share).abs() < 2 * self.error).any(-1)  # within two errors of another window
        return narrowest, torch.zeros_like(narrowest).masked_fill(doubtful, torch.nan)
