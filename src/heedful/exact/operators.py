"""Operators: how much a change Z of W_Q W_K^T moves the logits of many texts, never as one matrix of entries by entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lesson import Lesson
from ..ops.sweep import BLOCK, HIDDEN, Sweep, Tile

if TYPE_CHECKING:
    from jaxtyping import Float

Operator = Callable[[Tensor], Tensor]


class Pairs:
    """A(Z) = sum over texts of X'^T F(X' Z X^T) X / queries, with F of a subclass; Z is (heads, dim + 1, dim). T x T is never kept.

    Only queries that are tokens count, and only the pairs that they see.
    """

    def __init__(self, lessons: Sequence[Lesson]):
        self.lessons = tuple(lessons)
        self.queries = max(1, sum(int(lesson.counted.sum()) for lesson in self.lessons))

    def weighed(self, moved: Tensor, tile: Tile) -> Tensor:
        """F of a tile of moved logits (entries, heads, rows, keys); the tensor may be overwritten."""
        raise NotImplementedError

    def __call__(self, z: Float[Tensor, "heads left right"]) -> Float[Tensor, "heads left right"]:
        total = torch.zeros_like(z, dtype=torch.float64)
        for lesson, tile, x, sources, moved in self._moved(z):
            counted = lesson.counted[tile.entries, None, tile.rows, None]
            force = self.weighed(moved, tile).mul_(counted)
            rows = (force.flatten(1, 2) @ sources).view(*force.shape[:3], -1)  # (entries, heads, rows, right)
            total[tile.heads] += x.flatten(0, 1).mT @ rows.transpose(0, 1).flatten(1, 2)
        return (total / self.queries).to(z.dtype)

    def largest(self, z: Float[Tensor, "heads left right"]) -> float:
        """The largest change of a visible logit."""
        found = [0.0]
        for lesson, tile, _, _, moved in self._moved(z):
            seen = _visible(tile) & lesson.counted[tile.entries, None, tile.rows, None]
            found.append(float((moved * seen).abs().max()))
        return max(found)

    def _moved(self, z: Tensor) -> Iterator[tuple[Lesson, Tile, Tensor, Tensor, Tensor]]:
        """Every tile of every call, with X' of its rows, X of its keys, and X' Z X^T."""
        for lesson in self.lessons:
            high = lesson.logits.k.dtype
            x, sources = lesson.augmented.to(high), F.pad(lesson.keyed.to(high), (0, 0, 0, -lesson.k.shape[2] % BLOCK))
            for tile in Sweep(lesson.q, lesson.logits):
                left, right = x[tile.entries][:, tile.rows], sources[tile.entries, tile.low : tile.low + tile.mass.shape[-1]]
                rows = left[:, None] @ z[tile.heads].to(high)  # (entries, heads, rows, right)
                moved = (rows.flatten(1, 2) @ right.mT).view(tile.mass.shape)
                yield lesson, tile, left, right, moved if tile.slope is None else moved.mul_(tile.slope)


class Fisher(Pairs):
    """The KL metric: <Z, A(Z)> / 2 is how far the attention weights move, in nats a query.

    F moves logits by p (dS - p . dS): a constant for a row changes nothing, and what nobody looks at weighs nothing.

    >>> x = torch.randn(1, 6, 3, dtype=torch.float64)
    >>> lesson = Lesson("layer", x[:, None], x[:, None], x[:, None], states=x)
    >>> z = 1e-3 * torch.randn(1, 4, 3, dtype=torch.float64)
    >>> p, moved = (x @ x.mT).softmax(-1), (x @ x.mT + lesson.augmented @ z @ x.mT).softmax(-1)
    >>> nats = (p * (p / moved).log()).sum() / 6
    >>> torch.allclose((z * Fisher([lesson])(z)).sum() / 2, nats, rtol=1e-2)
    True
    """

    def weighed(self, moved: Tensor, tile: Tile) -> Tensor:
        force = moved.mul_(tile.mass)
        force = force.sub_(tile.mass * force.sum(-1, keepdim=True))
        return force if tile.slope is None else force.mul_(tile.slope)


class Frobenius(Pairs):
    """The metric of source 000: <Z, A(Z)> is the sum of squares of dS over the pairs that are seen, a query."""

    def weighed(self, moved: Tensor, tile: Tile) -> Tensor:
        force = moved.mul_(_visible(tile))
        return force if tile.slope is None else force.mul_(tile.slope)


def _visible(tile: Tile) -> Tensor:
    return (tile.logits > HIDDEN / 2) & (tile.largest > HIDDEN / 2)[..., None]


def conjugate_gradients(
    apply: Operator,
    target: Float[Tensor, "heads left right"],
    precondition: Operator | None = None,
    steps: int = 50,
    tolerance: float = 1e-8,
) -> Float[Tensor, "heads left right"]:
    """Z with apply(Z) = target, for each head on its own; `apply` is symmetric and not negative, and only ever applied.

    >>> a, b = torch.diag(torch.tensor([1.0, 2, 4])), torch.ones(1, 3, 3)
    >>> torch.allclose(conjugate_gradients(lambda z: a @ z @ a, b), a.inverse() @ b @ a.inverse(), rtol=1e-4)
    True
    """
    precondition = precondition or (lambda z: z)
    z, rest = torch.zeros_like(target), target
    near = precondition(rest)
    along, size = near, _dot(rest, near)
    enough = tolerance * _dot(target, target).sqrt()
    for _ in range(steps):
        if bool((_dot(rest, rest).sqrt() <= enough).all()):
            break
        applied = apply(along)
        bend = _dot(along, applied)
        step = torch.where((bend > 0) & (size > 0), size / bend.clamp_min(torch.finfo(bend.dtype).tiny), 0)
        z, rest = z + step * along, rest - step * applied
        near = precondition(rest)
        size, before = _dot(rest, near), size
        along = near + (size / before.clamp_min(torch.finfo(size.dtype).tiny)) * along
    return z


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)
