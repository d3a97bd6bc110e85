"""Sensitivity: how far a head's output moves when a value, a key or a query does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..attention import Capture
from ..ops.sensitivity import query_norms
from ..statistic import Estimate, Statistic, TokenMean, kept_largest, sampling_variance

SPREAD = 4  # queries of a text whose own Jacobian is measured
SHORT = 64  # a text of no more tokens is measured at all of them


@dataclass(frozen=True, eq=False)
class _PerKey(Statistic):
    """Of the squared norms of dO / d(something of key j): their mean over keys, and the largest of each text.

    Sampled rows give sums of squares without bias, so it is their root that is reported, not the mean of roots. The largest key of a
    sample is picked by luck too: biased upwards, its error is nan.
    """

    total: Tensor  # (heads,) sum over keys
    variance: Tensor  # (heads,) of that sum, from sampling rows
    keys: Tensor  # ()
    largest: Tensor  # (heads,) the largest key's, summed over texts
    texts: Tensor  # ()
    sampled: Tensor = kept_largest()  # () 1 where some row was not looked at

    @classmethod
    def _of(cls, capture: Capture, by_row: Tensor, by_key: Tensor) -> Self:
        """From the squared norms summed by row, (batch, heads, rows), nan where not taken, and by key over the same rows."""
        seen = capture.rows.valid & ~by_row[:, 0].isnan()
        count, total = seen.sum(-1).double(), capture.stands_for
        n = count.clamp_min(1)[:, None]
        x = by_row.double().masked_fill(~seen[:, None], 0)
        mean = x.sum(-1) / n
        largest = by_key.amax(-1).double() / n * total[:, None]
        found = count > 0
        return cls(
            (mean * total[:, None])[found].sum(0),
            sampling_variance(by_row, seen, total),
            capture.sources[found].sum().double(),
            largest[found].sum(0),
            found.sum().double(),
            (total > count).any().double(),
        )

    def result(self) -> dict[str, Estimate]:
        norm, largest = (self.total / self.keys).sqrt(), (self.largest / self.texts).sqrt()
        error = self.variance.sqrt() / self.keys / (2 * norm).clamp_min(1e-300)
        doubt = torch.full_like(largest, torch.nan) if self.sampled else torch.zeros_like(largest)
        return dict(zip(self.columns, (Estimate(norm, error), Estimate(largest, doubt)), strict=True))


@dataclass(frozen=True, eq=False)
class ValueSensitivity(_PerKey):
    """How far all outputs together move when one value does: |dO/dv_j|, the 2-norm of column j of the attention.

    >>> q, k, v = torch.zeros(3, 1, 1, 16, 4)
    >>> ValueSensitivity.of(Capture("layer", q, k, v)).result()["value_sensitivity"].value
    tensor([0.2500], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {
        "value_sensitivity": "|dO/dv_j|, root mean square over the keys j",
        "value_largest": "the same of the key of each text where it is largest",
    }

    @classmethod
    def of(cls, capture: Capture) -> Self:
        return cls._of(capture, capture.rows.squared, capture.columns.squares)


@dataclass(frozen=True, eq=False)
class KeySensitivity(_PerKey):
    """How far all outputs together move when one key does: |dO/dk_j| in the Frobenius norm.

    >>> q, k, v = torch.ones(3, 1, 1, 16, 4)
    >>> KeySensitivity.of(Capture("layer", q, k, v)).result()["key_sensitivity"].value  # where all values are alike no key matters
    tensor([0.], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {
        "key_sensitivity": "|dO/dk_j| in the Frobenius norm, root mean square over the keys j",
        "key_largest": "the same of the key of each text where it is largest",
    }

    @classmethod
    def of(cls, capture: Capture) -> Self:
        known = capture.sample is not None
        by_row = capture.rows.moved if known else torch.zeros_like(capture.rows.lse)
        found = cls._of(capture, by_row, capture.columns.moved)
        if known:
            return found
        some = capture.rows.valid.any(-1)
        total = capture.columns.moved[some].double().sum((0, 2))
        return cls(total, found.variance, found.keys, found.largest, found.texts, found.sampled)


@dataclass(frozen=True, eq=False)
class QuerySensitivity(TokenMean):
    """How far an output moves when its own query does: |do_i/dq_i| = s |Cov(v, k)| under the attention, in the Frobenius norm.

    Measured at queries spread evenly over each text, at all of them where the text is short.

    >>> q, k, v = torch.ones(3, 1, 1, 16, 4)
    >>> QuerySensitivity.of(Capture("layer", q, k, v)).result()["query_sensitivity"].value  # where all keys are alike no query matters
    tensor([0.], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {"query_sensitivity": "|do_i/dq_i| in the Frobenius norm, mean over tokens i"}

    @classmethod
    def of(cls, capture: Capture) -> Self:
        rows, seen = spread_rows(capture)
        norms = query_norms(capture.q.take_along_dim(rows[:, None, :, None], -2), capture.v, capture.logits, rows)
        sees = seen & ~norms.isnan().all(1)
        stands_for = capture.tokens * sees.sum(-1).double() / seen.sum(-1).clamp_min(1)
        return cls.over(norms.nan_to_num(), sees, stands_for)


def spread_rows(capture: Capture) -> tuple[Tensor, Tensor]:
    """Some queries of each text by its own length, the same in any batch: (batch, rows), and which of the entries count."""
    tokens = capture.tokens
    shape = (capture.q.shape[0], capture.q.shape[-2])
    real = torch.ones(shape, dtype=torch.bool, device=tokens.device) if capture.real is None else capture.real.expand(shape)
    counts = torch.where(tokens <= SHORT, tokens, SPREAD)  # (batch,)
    turn = torch.arange(int(counts.max()) if len(counts) else 0, device=tokens.device)
    place = ((turn + 0.5) * tokens[:, None] / counts.clamp_min(1)[:, None]).long()  # among the text's own tokens
    order = torch.where(real, real.cumsum(-1) - 1, real.shape[-1]).argsort(dim=-1, stable=True)  # tokens first
    rows = order.take_along_dim(place.clamp_max(real.shape[-1] - 1), -1)
    return rows, turn < counts[:, None]
