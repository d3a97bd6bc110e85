"""Statistic: a frozen bundle of float64 sums that adds up over calls, texts and machines."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from .attention import Capture

if TYPE_CHECKING:
    from jaxtyping import Float


class Estimate(NamedTuple):
    """A value per head with its standard error: 0 where every row was seen, nan where sampling gives no honest error."""

    value: Float[Tensor, "heads"]  # noqa: UP037
    error: Float[Tensor, "heads"]  # noqa: UP037


def kept_largest() -> Any:
    """A field whose parts merge by their maximum instead of their sum."""
    return field(metadata={"merge": torch.maximum})


@dataclass(frozen=True, eq=False)
class Statistic:
    """Sums over captures. To write one, decorate a subclass with `@dataclass(frozen=True, eq=False)`, give it tensor fields, `of` and `result`.

    The law: the statistic of parts adds up to the statistic of the whole.
    """

    columns: ClassVar[dict[str, str]] = {}  # what `result` names, and what each means

    @classmethod
    def of(cls, capture: Capture) -> Self:
        """The statistic of one call."""
        raise NotImplementedError

    def result(self) -> dict[str, Estimate]:
        """One number per head under each name of `columns`."""
        raise NotImplementedError

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            raise TypeError(f"{type(self).__name__} and {type(other).__name__} do not add up; add statistics of one kind.")
        return type(self)(**{f.name: self._merged(f, other) for f in fields(self)})

    def _merged(self, f: Any, other: Self) -> Tensor:
        mine, theirs = getattr(self, f.name), getattr(other, f.name)
        if mine.shape != theirs.shape:
            raise ValueError(
                f"{type(self).__name__}.{f.name} has shape {tuple(mine.shape)} here and {tuple(theirs.shape)} there; "
                "add statistics of the same layer of the same model."
            )
        return f.metadata.get("merge", torch.add)(mine, theirs.to(mine.device))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, eq=False)
class TokenMean(Statistic):
    """The mean over tokens of a number per query row, with the variance that sampling rows adds.

    A text of N tokens of which n were looked at enters with weight N and variance N^2 s^2/n (1 - n/N).
    """

    total: Float[Tensor, "heads ..."]
    weight: Float[Tensor, ""]
    variance: Float[Tensor, "heads ..."]

    @classmethod
    def row(cls, capture: Capture) -> Tensor:
        """The number of each row, (batch, heads, rows, ...)."""
        raise NotImplementedError

    @classmethod
    def of(cls, capture: Capture) -> Self:
        return cls.over(cls.row(capture), capture.rows.valid, capture.stands_for)

    @classmethod
    def over(cls, x: Tensor, valid: Tensor, stands_for: Tensor) -> Self:
        """From numbers (batch, heads, rows, ...), which rows count, and how many tokens those stand for in each batch entry."""
        x = x.double()
        like = (slice(None), None, *[None] * (x.ndim - 3))  # per batch entry, broadcast over heads and what follows
        seen = valid[(slice(None), None, slice(None), *[None] * (x.ndim - 3))]
        count = valid.sum(-1).double()
        mean = x.masked_fill(~seen, 0).sum(2) / count.clamp_min(1)[like]
        spread = (x - mean[:, :, None]).masked_fill(~seen, 0).square().sum(2) / (count - 1).clamp_min(1)[like]
        unseen = (stands_for * (stands_for - count).clamp_min(0) / count.clamp_min(1))[like]  # N^2/n (1 - n/N)
        return cls((mean * stands_for[like]).sum(0), stands_for.sum(), (spread * unseen).sum(0))

    @property
    def mean(self) -> Tensor:
        return self.total / self.weight

    @property
    def error(self) -> Tensor:
        return self.variance.sqrt() / self.weight

    def result(self) -> dict[str, Estimate]:
        (name,) = self.columns
        return {name: Estimate(self.mean, self.error)}
