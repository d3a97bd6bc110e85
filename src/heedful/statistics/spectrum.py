"""Spectrum: how much of the attention is the same for every query, and its effective rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..attention import Capture
from ..ops.spectrum import of_entry, spectral_norms
from ..statistic import Estimate, Statistic, kept_largest


@dataclass(frozen=True, eq=False)
class Spectrum(Statistic):
    """The 2-norm of the attention P of a text with its mean row taken off, and |P|_F^2 / |P|_2^2, means over texts.

    The centred norm is the most that attention stretches differences between tokens: below 1 they shrink, but sink columns bring it to
    several. A sample of rows would bias both, so where some rows were not looked at they are nan: scan with rows=None.

    >>> q, k, v = torch.zeros(3, 1, 1, 16, 4)
    >>> found = Spectrum.of(Capture("layer", q, k, v)).result()
    >>> round(found["centred_norm"].value.item(), 4), round(found["effective_rank"].value.item(), 4)
    (0.0, 1.0)
    """

    columns: ClassVar[dict[str, str]] = {
        "centred_norm": "|(I - 11^T/n) P|_2, the most that attention stretches differences between tokens",
        "effective_rank": "|P|_F^2 / |P|_2^2, the number of directions attention keeps in effect",
    }

    centred: Tensor  # (heads,) summed over texts
    rank: Tensor  # (heads,) summed over texts
    texts: Tensor  # ()
    sampled: Tensor = kept_largest()  # () 1 where some row was not looked at

    @classmethod
    def of(cls, capture: Capture) -> Self:
        sampled = not bool(capture.whole.all())
        sums = torch.zeros(3, capture.q.shape[1], dtype=torch.float64, device=capture.q.device)
        for entry in [] if sampled else capture.rows.valid.any(-1).nonzero()[:, 0].tolist():
            norm, centred = _norms(capture, entry)
            mass = capture.rows.squared[entry].double() * capture.rows.valid[entry]
            sums += torch.stack([centred, mass.sum(-1) / norm.square(), torch.ones_like(norm)])
        return cls(sums[0], sums[1], sums[2, 0], sums.new_tensor(float(sampled)))

    def result(self) -> dict[str, Estimate]:
        values = (x / self.texts if not self.sampled else torch.full_like(x, torch.nan) for x in (self.centred, self.rank))
        return {name: Estimate(x, torch.zeros_like(x) * x) for name, x in zip(self.columns, values, strict=True)}


def _norms(capture: Capture, entry: int) -> tuple[Tensor, Tensor]:
    valid = capture.rows.valid[entry].nonzero()[:, 0]
    rows = valid if capture.sample is None else capture.sample[valid]
    real = capture.mask.keys
    count = capture.k.shape[-2]
    keys = torch.arange(count, device=rows.device) if real is None else real[min(entry, len(real) - 1)].nonzero()[:, 0]
    load = capture.columns.load[entry]
    return spectral_norms(capture.q[entry : entry + 1], of_entry(capture.logits, entry), rows, keys, load)
