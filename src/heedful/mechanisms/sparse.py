"""Sparse attention: each query sees its neighbours and a column of the far tokens, in time L sqrt(L)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..attention import Mask, Mechanism, Rule
from ..ops.again import again
from ..ops.dispatch import is_plain
from ..ops.hop import formula, hop
from ..ops.padding import silent, unpadded
from ..ops.pieces import joined
from ..ops.sparse import Pattern, pieces

PATTERNS = ("strided", "fixed")
TILE = 2**22  # numbers of k gathered in one step


@dataclass(eq=False)
class Sparse(Mechanism):
    """Exact attention over a fixed pattern of keys: with stride l near sqrt(L), about l + L/l of the L keys for each query.

    strided: the keys nearer than l, and those at a multiple of l from the query. fixed: the query's own block of l tokens, and the last
    `summary` tokens of every block. Causal or both ways. Positions count the real tokens of each text, so padding on either side changes
    nothing; a query at padding gets 0. stride None takes the nearest to sqrt of each text's length: give a number where a text grows
    (generation), or where the start of a text must not depend on its length. Made for models trained with it: a pretrained head that
    looks at the first token, or anywhere by content, loses what the pattern leaves out.

    >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
    >>> near = lambda i, j: (i - j < 3) | ((i - j) % 3 == 0)
    >>> place = torch.arange(10)
    >>> hidden = ~near(place[:, None], place).tril()
    >>> dense = (q @ k.mT / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    >>> torch.allclose(Sparse(stride=3)(q, k, v, Mask(causal=True)), dense, atol=1e-5)
    True

    Child et al. 2019, Generating Long Sequences with Sparse Transformers (both parts of a pattern in one head).
    """

    pattern: str = "strided"  # or fixed
    stride: int | None = None
    summary: int = 8  # of the fixed pattern; at most the stride

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "keys", "cross"})

    def __post_init__(self):
        if self.pattern not in PATTERNS:
            raise ValueError(f"pattern is {self.pattern!r}; it must be one of {', '.join(PATTERNS)}.")
        for name, value in (("stride", 1 if self.stride is None else self.stride), ("summary", self.summary)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        if mask.causal:  # what no query sees
            last = max(0, mask.offset + q.shape[2])
            k, v, mask = k[:, :, :last], v[:, :, :last], replace(mask, keys=None if mask.keys is None else mask.keys[:, :last])
        if min(q.numel(), v.numel()) == 0:
            return silent(q, k, v)
        if is_plain():
            return self._spelled(q, k, v, mask, scale)
        if not mask.same(q.shape[2], k.shape[2]):
            return self._listed(q, k, v, mask, scale)

        def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return joined(q, k, v, pieces(self._of(q.shape[2]), q.shape[2], mask.causal, q.device), scale)

        return unpadded(one, q, k, v, mask.keys)

    def _of(self, length: int) -> Pattern:
        stride = max(1, round(length**0.5)) if self.stride is None else self.stride
        return Pattern(self.pattern, stride, min(self.summary, stride))

    def _spelled(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        """The plain formula: the pattern as a rule, in tiles of queries."""
        keys = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if mask.keys is None else mask.keys
        query, key = _places(keys, q.shape[2], mask.offset), _places(keys, k.shape[2], 0)
        strides = [self._of(length).stride for length in keys.sum(-1).tolist()]
        stride = torch.tensor(strides, device=k.device)[:, None, None, None]
        pattern = Pattern(self.pattern, stride, self.summary)

        def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            here = pattern._replace(stride=stride[batch[:, 0, 0, 0]])
            return here.sees(query[batch, row - mask.offset], key[batch, column])

        out, _ = hop(q, k, v, mask=replace(mask, rule=Rule(sees, len(keys))), scale=scale)
        return _silenced(out, mask, k.shape[2])

    def _listed(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        """Queries that are not the keys' own tokens, such as one that follows a cache: their keys are gathered, text by text."""
        keys = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if mask.keys is None else mask.keys
        places, texts = _places(keys, q.shape[2], mask.offset), []
        for entry in range(len(q)):
            text = entry % len(keys)
            one = q[entry], k[entry], v[entry]
            texts.append(self._gathered(one, keys[text].nonzero()[:, 0], places[text], mask.causal, scale))
        return _silenced(torch.stack(texts), mask, k.shape[2])

    def _gathered(self, text: tuple[Tensor, Tensor, Tensor], real: Tensor, places: Tensor, causal: bool, scale: float) -> Tensor:
        """One text, (heads, tokens, dim): its real keys by number, its queries by their places among these."""
        q, k, v = text
        if len(real) == 0:
            return silent(*(t[None] for t in text))[0]
        pattern = self._of(len(real))

        def one(q: Tensor, places: Tensor) -> Tensor:
            near, counts = pattern.listed(places, len(real))
            counts = counts & (near <= places[:, None]) if causal else counts
            added = torch.zeros(counts.shape, device=q.device).masked_fill_(~counts, -torch.inf)[None, :, None]
            found = real[near]
            return formula(q[:, :, None], k[:, found], v[:, found], added, scale, None)[0][:, :, 0]

        width = pattern.listed(places[:1], len(real))[0].shape[-1]
        step = max(1, TILE // (width * q.shape[0] * q.shape[-1]))
        return torch.cat([again(one, q[:, s : s + step], places[s : s + step]) for s in range(0, q.shape[1], step)], 1).to(v.dtype)


def _places(keys: Tensor, count: int, offset: int) -> Tensor:
    """Where `count` tokens from `offset` stand among the real keys, (batch, count); at padding, where the last real one before stands."""
    last = keys.shape[-1] - 1
    index = torch.arange(offset, offset + count, device=keys.device)
    return (keys.cumsum(-1) - 1)[:, index.clamp_max(last)] + (index - last).clamp_min(0)


def _silenced(out: Tensor, mask: Mask, keys: int) -> Tensor:
    """0 where a query is padding; none is where queries and keys are different tokens."""
    queries = out.shape[2]
    if mask.keys is None or not (mask.causal or mask.same(queries, keys)):
        return out
    real = mask.keys[:, mask.offset : mask.offset + queries]
    real = torch.nn.functional.pad(real, (0, queries - real.shape[1]), value=True)
    return out.masked_fill(~real[:, None, :, None], 0)
