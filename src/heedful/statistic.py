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


def sampling_variance(x: Tensor, valid: Tensor, stands_for: Tensor) -> Tensor:
    """The variance that sampling rows adds to the sum over texts of N times the mean of x, (heads, ...), as in `TokenMean.over`.

    The texts of a call share the positions that are looked at, so a position is what was drawn: z_i adds up what it adds to every text,
    and the sum of z_i^2 is the variance. For one text that is N^2 s^2/n (1 - n/N). nan where one row stands for more.

    >>> x, some = torch.tensor([1.0, 2, 3]).expand(2, 1, 3), torch.ones(2, 3, dtype=torch.bool)
    >>> one, two = (sampling_variance(x[:n], some[:n], torch.tensor([6.0, 6.0])[:n]).item() for n in (1, 2))
    >>> round(one, 4), round(two, 4)  # two texts alike err alike
    (6.0, 24.0)
    """
    x = x.double()
    like = (slice(None), None, *[None] * (x.ndim - 3))  # per batch entry, broadcast over heads and what follows
    seen = valid[(slice(None), None, slice(None), *[None] * (x.ndim - 3))]
    n = valid.sum(-1).double()
    unseen = (1 - n / stands_for.clamp_min(1)).clamp_min(0)
    weight = stands_for / n.clamp_min(1) * (unseen * n / (n - 1).clamp_min(1)).sqrt()
    weight = weight.masked_fill((n == 1) & (stands_for > 1), torch.nan)
    mean = x.masked_fill(~seen, 0).sum(2, keepdim=True) / n.clamp_min(1)[like][:, :, None]
    return ((x - mean).masked_fill(~seen, 0) * weight[like][:, :, None]).sum(0).square().sum(1)


@dataclass(frozen=True, eq=False)
class TokenMean(Statistic):
    """The mean over tokens of a number per query row, with the variance that sampling rows adds.

    A text of N tokens of which n were looked at enters with weight N; its variance is that of `sampling_variance`.
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
        variance = sampling_variance(x, valid, stands_for)
        return cls((mean * stands_for[like]).sum(0), stands_for.sum(), variance)

    @property
    def mean(self) -> Tensor:
        return self.total / self.weight

    @property
    def error(self) -> Tensor:
        return self.variance.sqrt() / self.weight

    def result(self) -> dict[str, Estimate]:
        (name,) = self.columns
        return {name: Estimate(self.mean, self.error)}
