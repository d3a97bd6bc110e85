"""Clustered: each query reads the keys that matter one by one and the rest of the text as averages of similar keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..attention import Mask, Mechanism, State
from ..ops.clustered import Work, clustered
from ..ops.clustered_causal import Reach, clustered_causal
from ..ops.clustered_state import New, Past, nothing, read

TOGETHER = 2**16  # tokens of some heads that are read at once: what is gathered for them is then soon used and freed


@dataclass(eq=False)
class Clustered(Mechanism):
    """Attention over the means of clustered keys, and over the very keys of the clusters that a group of queries looks at most.

    Each key counts once: by itself or within its cluster's mean. A query reads clusters + exact keys; where the attention is causal,
    its own window, the sinks, the exact keys and the clusters of few stretches of the past (clusters / 2 of each at most). To decode,
    its state keeps every key and value and so grows with the text, as an ordinary cache does; a new token reads only so many.

    >>> q, k = torch.randn(1, 2, 500, 16), torch.randn(1, 2, 20, 16).repeat(1, 1, 25, 1)  # keys of 20 kinds
    >>> k = k + 0.1 * torch.randn(1, 2, 500, 16)
    >>> exact = ((q @ k.mT) / 16**0.5).softmax(-1) @ k
    >>> float((Clustered()(q, k, k) - exact).norm() / exact.norm()) < 0.05
    True

    Vyas et al. 2020, Fast transformers with clustered attention; here keys are clustered, by the logits that the queries give them.
    """

    clusters: int = 64
    exact: int = 128  # keys read one by one
    window: int = 64  # causal: the tokens of the finest stretch; each reads its own
    sinks: int = 4  # causal: first tokens that all read
    group: int = 32  # neighbouring queries that choose their clusters together
    rounds: int = 1  # of Lloyd's algorithm

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "keys", "shared", "state"})
    keeps_all: ClassVar[bool] = True

    def __post_init__(self):
        for name, least in (("clusters", 2), ("exact", 1), ("window", 4), ("sinks", 0), ("group", 1), ("rounds", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
        if self.window % self.group or self.window % 4:
            raise ValueError(f"a window of {self.window} is not a multiple of 4 and of the group, {self.group}; use one that is.")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        high, dtype = torch.promote_types(q.dtype, torch.float32), v.dtype
        q, k, v = (t.to(high) for t in (q, k, v))
        order = counts = None
        if mask.keys is not None:
            order, counts = _real_first(mask.keys.expand(len(q), -1))
            q, k, v = (_first(t, order, counts) for t in (q, k, v))
        out = self._each(q, k, v, mask, scale, counts).unflatten(0, q.shape[:2])
        return (out if order is None or counts is None else _back(out, order, counts)).to(dtype)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, keys: Tensor | None, scale: float
    ) -> tuple[Tensor, Past]:
        everything = torch.ones(len(q), q.shape[2], dtype=torch.bool, device=q.device)
        order, counts = _real_first(everything if keys is None else keys)
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        if keys is not None:
            q, k, v = (_first(t, order, counts) for t in (q, k, v))
        new = New(q, k, v, counts)
        former = nothing(new, self._reach) if state is None else state
        assert isinstance(former, Past)
        out, past = read(new, former, self._reach, scale)
        return (out if keys is None else _back(out, order, counts)).to(v.dtype), past

    @property
    def _reach(self) -> Reach:
        return Reach(self.window, self.sinks, self.clusters // 2, self.exact, self.rounds, self.group)

    def _each(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, counts: Tensor | None) -> Tensor:
        """Every head for itself: its own queries say which keys are similar."""
        q, k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).flatten(0, 1) for t in (q, k, v))
        counts = None if counts is None else counts.repeat_interleave(len(q) // len(counts))
        size = max(1, TOGETHER // max(1, q.shape[1]))
        pieces = zip(*(t.split(size) for t in (q, k, v)), [None] * len(q) if counts is None else counts.split(size), strict=False)
        if mask.causal:
            return torch.cat([clustered_causal(q, k, v, self._reach, scale) for q, k, v, _ in pieces])
        work = Work(self.clusters, self.exact, self.rounds, self.group)
        return torch.cat([clustered(q, k, v, work, scale, counts) for q, k, v, counts in pieces])


def _real_first(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The order in which padding comes last, and how many tokens are real."""
    return keys.logical_not().argsort(dim=-1, stable=True), keys.sum(-1)


def _first(x: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """The tokens in that order, 0 after the first `counts` of each batch entry."""
    beyond = torch.arange(x.shape[2], device=x.device) >= counts[:, None]
    return _along(x, order).masked_fill(beyond[:, None, :, None], 0)


def _back(out: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """In the order given, 0 at padding."""
    places = torch.arange(out.shape[2], device=out.device).expand_as(order)
    return _along(_first(out, places, counts), order.argsort(dim=-1))


def _along(x: Tensor, order: Tensor) -> Tensor:
    return x.take_along_dim(order[:, None, :, None], 2)
