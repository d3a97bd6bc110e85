"""Largest logit: what overflows in half precision, and what grows before training diverges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..attention import Capture
from ..statistic import Estimate, Statistic, kept_largest


@dataclass(frozen=True, eq=False)
class LargestLogit(Statistic):
    """The largest scaled logit seen; where rows are sampled it is a lower bound, and its error nan.

    >>> q, k, v = torch.ones(3, 1, 1, 8, 4)
    >>> LargestLogit.of(Capture("layer", q, k, v, scale=0.5)).result()["largest_logit"].value
    tensor([2.], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {"largest_logit": "largest scaled logit (at least, where rows were sampled)"}

    largest: Tensor = kept_largest()  # (heads,)
    sampled: Tensor = kept_largest()  # () 1 where some row was not looked at

    @classmethod
    def of(cls, capture: Capture) -> Self:
        rows = capture.rows
        logits = rows.largest.double().masked_fill(~rows.valid[:, None], -torch.inf)
        missed = (capture.stands_for > rows.valid.sum(-1)).any()
        return cls(logits.amax((0, 2)), missed.double())

    def result(self) -> dict[str, Estimate]:
        error = torch.full_like(self.largest, float("nan")) if self.sampled else torch.zeros_like(self.largest)
        return {"largest_logit": Estimate(self.largest, error)}
