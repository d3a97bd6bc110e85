"""Clustered: each query reads the keys that matter one by one and the rest of the text as averages of similar keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..attention import Mask, Mechanism
from ..ops.clustered import Work, clustered
from ..ops.clustered_causal import Reach, clustered_causal


@dataclass(eq=False)
class Clustered(Mechanism):
    """Attention over the means of clustered keys, and over the very keys of the clusters that a group of queries looks at most.

    Each key counts once: by itself or within its cluster's mean. A query reads clusters + exact keys; where the attention is causal,
    its own window, the sinks, the exact keys and the clusters of few stretches of the past (clusters / 2 of each at most).

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

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "keys", "shared"})

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
            keys = mask.keys.expand(len(q), -1)
            order, counts = keys.logical_not().argsort(dim=-1, stable=True), keys.sum(-1)
            q, k, v = (_first(t, order, counts) for t in (q, k, v))
        out = self._causal(q, k, v, scale) if mask.causal else self._everywhere(q, k, v, scale, counts)
        if order is not None and counts is not None:
            out = _first(out, torch.arange(q.shape[2], device=q.device).expand_as(order), counts)
            out = _along(out, order.argsort(dim=-1))
        return out.to(dtype)

    def _everywhere(self, q: Tensor, k: Tensor, v: Tensor, scale: float, counts: Tensor | None) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        counts = None if counts is None else counts.repeat_interleave(q.shape[1])
        work = Work(self.clusters, self.exact, self.rounds, self.group)
        out = clustered(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), work, scale, counts)
        return out.unflatten(0, q.shape[:2])

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        reach = Reach(self.window, self.sinks, self.clusters // 2, self.exact, self.rounds, self.group)
        shared = q.unflatten(1, (k.shape[1], -1)).flatten(0, 1)
        out = clustered_causal(shared, k.flatten(0, 1), v.flatten(0, 1), reach, scale)
        return out.reshape(*q.shape[:3], v.shape[-1])


def _first(x: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """The tokens in that order, 0 after the first `counts` of each batch entry."""
    beyond = torch.arange(x.shape[2], device=x.device) >= counts[:, None]
    return _along(x, order).masked_fill(beyond[:, None, :, None], 0)


def _along(x: Tensor, order: Tensor) -> Tensor:
    return x.take_along_dim(order[:, None, :, None], 2)
