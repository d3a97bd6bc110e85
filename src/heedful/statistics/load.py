"""Load: which keys the mass goes to, the transposed question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..attention import Capture
from ..statistic import Estimate, Statistic, kept_largest

BINS = 16


@dataclass(frozen=True, eq=False)
class Load(Statistic):
    """The mass that the busiest key of a text receives, as a share of all; and mass received by position in the text, in 16 bins.

    Where rows are sampled the busiest key is picked by luck too: its share is biased upwards and its error nan.

    >>> q, k, v = torch.zeros(3, 1, 1, 32, 4)
    >>> Load.of(Capture("layer", q, k, v)).result()["busiest"].value * 32
    tensor([1.], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {
        "busiest": "share of all mass that the busiest key of a text receives (where rows were sampled, at most this on average)"
    }

    busiest: Tensor  # (heads,) summed over texts
    received: Tensor  # (heads, bins) shares summed over texts
    texts: Tensor  # ()
    sampled: Tensor = kept_largest()  # () 1 where some row was not looked at

    @classmethod
    def of(cls, capture: Capture) -> Self:
        count = capture.rows.valid.sum(-1).double()
        n, load = count.clamp_min(1)[:, None], capture.columns.load.double()
        share = load.amax(-1) / n  # (batch, heads)
        bins = torch.stack([part.sum(-1) for part in _parts(load, capture)], -1) / n[..., None]
        seen = count > 0
        return cls(share[seen].sum(0), bins[seen].sum(0), seen.sum().double(), (capture.stands_for > count).any().double())

    @property
    def by_position(self) -> Tensor:
        """Mean share of the mass that each sixteenth of the text receives, (heads, bins)."""
        return self.received / self.texts

    def result(self) -> dict[str, Estimate]:
        share = self.busiest / self.texts
        return {"busiest": Estimate(share, torch.full_like(share, torch.nan) if self.sampled else torch.zeros_like(share))}


def _parts(load: Tensor, capture: Capture) -> list[Tensor]:
    """The load cut into sixteenths of each text's own length, (batch, heads, keys) with zeros elsewhere."""
    batch, _, keys = load.shape
    real = capture.mask.keys if capture.mask.keys is not None else torch.ones(1, keys, dtype=torch.bool, device=load.device)
    order = real.expand(batch, keys).cumsum(-1) - 1
    bins = (order * BINS // real.sum(-1, keepdim=True).clamp_min(1)).clamp_max(BINS - 1)
    return [load * (bins == b)[:, None] for b in range(BINS)]
