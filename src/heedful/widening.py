"""Widening: one attention layer with more dims in its heads, from its matrices and what the loss asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact.deciding import growth_score
from .exact.growing import DAMPINGS, NewDims, NewHead, add_head, grow_dk, grow_dv
from .exact.operators import Operator
from .exact.signal import Signal
from .huggingface.adopt import Matrices
from .huggingface.layer import Sizes
from .statistics.growth import Growth


@dataclass(frozen=True, eq=False)
class New:
    """New dims of a projection pair, by query head; `right` is the same for heads that share a key head (for values, `left` is).

    For q.k: `left` holds columns of W_Q' (its last row the bias), `right` columns of W_K. For v: columns of W_V', and rows of W_O.
    """

    left: Tensor  # (heads, dim + 1, new)
    right: Tensor  # (heads, dim, new)
    counts: tuple[int, ...] | None = None  # how many of them each key head gets, the first ones; all where None

    def by_head(self, heads: int) -> tuple[int, ...]:
        """How many new dims each key head gets."""
        return self.counts or (self.left.shape[-1],) * heads

    @classmethod
    def of(cls, step: NewDims, size: float, rms: float) -> New:
        """A step of that size; where the folds disagree, and everywhere at size 0, columns that leave the function as it is."""
        left, right = step.at(size)
        idle, zeros = step.preserving(rms)
        kept = step.kept[:, None] if size > 0 else torch.zeros_like(step.kept[:, None])
        return cls(torch.where(kept, left, idle), torch.where(kept, right, zeros))

    @classmethod
    def random(cls, heads: int, left: int, right: int, count: int, norm: float, seed: int = 0) -> New:
        """Columns that leave the function as it is, without data: random ones of about that norm on the left, zeros on the right."""
        made = torch.randn(heads, left + 1, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        made[:, -1] = 0
        return cls(made * norm / left**0.5, torch.zeros(heads, right, count, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class Widener:
    """Everything that can be asked of one layer that shall grow: what new dims would gain, and its matrices with them."""

    name: str
    found: Matrices
    sizes: Sizes
    growth: Growth
    scale: float = 1.0

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.sizes.heads // len(self.sizes.qk)

    @cached_property
    def keys(self) -> Signal:
        return _biased(self.growth.keys(self.group), self.found.b_q is not None)

    @cached_property
    def values(self) -> Signal:
        return _biased(self.growth.values(self.group), self.found.b_v is not None)

    def qk(self, new: int, operator: Operator | None = None, dampings: tuple[float, ...] = DAMPINGS) -> NewDims:
        """The step of new key dims, whose size is measured in logits."""
        wanted = operator if operator is None or self.found.b_q is not None else _unbiased(operator)
        return _padded(grow_dk(self.keys, new, wanted, dampings), self.found.b_q is not None)

    def v(self, new: int, dampings: tuple[float, ...] = DAMPINGS) -> NewDims:
        """The step of new value dims."""
        return _padded(grow_dv(self.values, new, dampings), self.found.b_v is not None)

    def head(self, width: int, dampings: tuple[float, ...] = DAMPINGS) -> NewHead:
        """The step of one new head: of uniform attention, or a copy of the head whose pattern gains most."""
        there = self.found.b_v is not None
        patterns = {"uniform": self.growth.patterns()["uniform"], "copy": self.growth.values()}
        found = add_head({name: _biased(signal, there) for name, signal in patterns.items()}, width, dampings)
        return replace(found, dims=_padded(found.dims, there))

    def score(self, new: int) -> float:
        """What the best new key dims gain beyond what the present ones can do: squared, to first order, over heads."""
        w_q = _columns(self.found.q, self.found.b_q, self.sizes.queries).to(self.keys.left)
        w_k = _columns(self.found.k, None, self.sizes.qk)
        w_k = w_k.to(w_q).repeat_interleave(self.group, 0)
        return float(growth_score(self.keys, w_q, w_k, new).sum())

    @cached_property
    def query_rms(self) -> float:
        """Root mean square of the numbers that queries hold."""
        return _rms(self.found.q, self.found.b_q, self.growth.query_gram / self._tokens)

    @cached_property
    def value_rms(self) -> float:
        """Of those that outputs of heads hold."""
        return _rms(self.found.v, self.found.b_v, self.growth.mixed_gram[: self.sizes.heads].mean(0) / self._tokens)

    @property
    def _tokens(self) -> Tensor:
        return self.growth.tokens.sum().clamp_min(1)


def widen_qk(found: Matrices, sizes: Sizes, new: New) -> tuple[Matrices, Sizes]:
    """The matrices with new dims behind those of each head; they do not turn in a rotary layer.

    >>> before = Matrices(torch.eye(2), torch.eye(2), torch.eye(2), torch.eye(2))
    >>> after, sizes = widen_qk(before, Sizes(2, (1, 1), (1, 1)), New(torch.full((2, 3, 1), 0.5), torch.zeros(2, 2, 1)))
    >>> after.q.tolist(), sizes.qk
    ([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [0.5, 0.5]], (2, 2))
    """
    group, counts = sizes.heads // len(sizes.qk), new.by_head(len(sizes.qk))
    q, b_q = _behind(found.q, found.b_q, sizes.queries, new.left, counts)
    k, b_k = _behind(found.k, found.b_k, sizes.qk, F.pad(new.right[::group], (0, 0, 0, 1)), counts)
    return replace(found, q=q, k=k, b_q=b_q, b_k=b_k), replace(sizes, qk=tuple(map(add, sizes.qk, counts)))


def widen_v(found: Matrices, sizes: Sizes, new: New) -> tuple[Matrices, Sizes]:
    """The matrices with new value dims behind those of each head."""
    group, counts = sizes.heads // len(sizes.v), new.by_head(len(sizes.v))
    v, b_v = _behind(found.v, found.b_v, sizes.v, new.left[::group], counts)
    o, _ = _behind(found.o.mT, None, sizes.values, F.pad(new.right, (0, 0, 0, 1)), counts)
    return replace(found, v=v, o=o.mT, b_v=b_v), replace(sizes, v=tuple(map(add, sizes.v, counts)))


def widen_heads(found: Matrices, sizes: Sizes, new: New, like: int | None = None) -> tuple[Matrices, Sizes]:
    """The matrices with one head behind the others: it attends as head `like` does, or uniformly, and mixes by the new v and W_O."""
    model, shown = (0, 0.0) if like is None else (like, 1.0)  # uniform: q is zero, and learns by the keys of the first head
    start, dims = sum(sizes.qk[:model]), sizes.qk[model]
    own = slice(start, start + dims)
    made = {"v": new.left[0, :-1].mT, "o": new.right[0], "b_v": new.left[0, -1]}
    made |= {"q": found.q[own] * shown, "k": found.k[own]}
    made |= {"b_q": None if found.b_q is None else found.b_q[own] * shown, "b_k": None if found.b_k is None else found.b_k[own]}
    changed = {}
    for name, more in made.items():
        was = getattr(found, name)
        if was is not None and more is not None:
            changed[name] = torch.cat([was.detach(), more.detach().to(was)], 1 if name == "o" else 0)
    pairs = None if sizes.pairs is None else (*sizes.pairs, sizes.pairs[model])
    grown = replace(sizes, heads=sizes.heads + 1, qk=(*sizes.qk, dims), v=(*sizes.v, new.left.shape[-1]), pairs=pairs)
    return replace(found, **changed), grown


def _behind(
    weight: Tensor, bias: Tensor | None, dims: Sequence[int], columns: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Rows of heads of `dims`, each head's columns (dim + 1, new) as rows behind its own; the last entry goes to the bias."""
    made, group = columns.to(weight.device, weight.dtype), len(dims) // len(counts)
    new = [one[:, : counts[h // group]] for h, one in enumerate(made)]
    rows = [part for own, more in zip(weight.detach().split(list(dims)), new, strict=True) for part in (own, more[:-1].mT)]
    if bias is None:
        return torch.cat(rows), None
    entries = [part for own, more in zip(bias.detach().split(list(dims)), new, strict=True) for part in (own, more[-1])]
    return torch.cat(rows), torch.cat(entries)


def _biased(signal: Signal, there: bool) -> Signal:
    """The signal without the row of the bias where the layer has none."""
    return signal if there else replace(signal, gradient=signal.gradient[:, :, :-1], left=signal.left[..., :-1, :-1])


def _unbiased(operator: Operator) -> Operator:
    return lambda z: operator(F.pad(z, (0, 0, 0, 1)))[:, :-1]


def _padded(step: NewDims, there: bool) -> NewDims:
    """The step with a row of zeros for a bias that is not there."""
    return step if there else replace(step, left=F.pad(step.left, (0, 0, 0, 1)), idle=F.pad(step.idle, (0, 0, 0, 1)))


def _columns(weight: Tensor, bias: Tensor | None, dims: Sequence[int]) -> Tensor:
    """Heads side by side as (heads, dim (+ 1), largest), zeros behind the shorter ones."""
    whole = weight.detach() if bias is None else torch.cat([weight.detach(), bias.detach()[:, None]], 1)
    parts = whole.cpu().double().split(list(dims))
    return torch.stack([F.pad(part, (0, 0, 0, max(dims) - len(part))).mT for part in parts])


def _rms(weight: Tensor, bias: Tensor | None, gram: Tensor) -> float:
    w = weight.detach() if bias is None else torch.cat([weight.detach(), bias.detach()[:, None]], 1)
    w = w.to(gram)
    return float((w @ gram[: w.shape[1], : w.shape[1]] * w).sum(1).mean().clamp_min(0)) ** 0.5 or 1.0
