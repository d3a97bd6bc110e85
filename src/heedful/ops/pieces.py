"""Pieces: exact attention over disjoint parts of the keys, each part one kernel call on views of the tokens, and one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..mask import Mask
from .again import differentiated
from .dispatch import fusable
from .fused import _backward, _forward
from .hop import hop
from .merge import Part, merge

if TYPE_CHECKING:
    from jaxtyping import Float

View = Callable[[Tensor], Tensor]


class Piece(NamedTuple):
    """Some queries over some keys. Both are views that take (batch, heads, tokens, dim) to (batch, heads, ..., dim), and what
    stands there to `blocks` blocks, each block of queries over its own block of keys. Every query of a piece sees a key."""

    blocks: int
    queries: View
    keys: View
    causal: bool = False  # within a block, query i sees the keys up to i
    added: Tensor | None = None  # to the logits of every block, (queries of a block, keys of a block)

    def seen(self, queries: int, keys: int) -> Tensor:
        """Which pairs of a block see each other."""
        every = torch.ones(queries, keys, dtype=torch.bool)
        every = every.tril() if self.causal else every
        return every if self.added is None else every & (self.added == 0)


def joined(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch heads keys dim"],
    v: Float[Tensor, "batch heads keys width"],
    pieces: Sequence[Piece],
    scale: float,
) -> Float[Tensor, "batch heads queries width"]:
    """Attention of each query over the keys that its pieces give it; the first piece of a query may be any, no key may come twice.

    >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
    >>> halves = [Piece(1, lambda x: x, lambda x: x[:, :, :2]), Piece(1, lambda x: x, lambda x: x[:, :, 2:])]
    >>> torch.allclose(joined(q, k, v, halves, 1.0), (q @ k.mT).softmax(-1) @ v, atol=1e-5)
    True
    """
    q, scale = (q, scale) if scale >= 0 else (-q, -scale)  # a causal kernel hides by -inf * scale
    if q.device.type == "cpu" and fusable(q, k, v) and scale > 0:
        return Joined.apply(q, k, v, pieces, scale)  # type: ignore[return-value]
    return composed(q, k, v, pieces, scale)


def composed(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float) -> Tensor:
    """The same by hops and a merge."""
    return merge(*(_layer(q, k, v, some, scale) for some in _layers(pieces, q.shape[2])))[0]


def _layers(pieces: Sequence[Piece], tokens: int) -> list[list[tuple[Piece, Tensor]]]:
    """Pieces of different queries together, each with the numbers of its queries: so many layers as a query has pieces."""
    number, layers = torch.arange(tokens).view(1, 1, -1, 1), []
    taken = torch.ones(tokens, dtype=torch.bool)
    for piece in pieces:
        place = piece.queries(number).flatten()
        if bool(taken[place].any()):
            layers.append([])
            taken = torch.zeros_like(taken)
        layers[-1].append((piece, place))
        taken[place] = True
    return layers


def _layer(q: Tensor, k: Tensor, v: Tensor, pieces: list[tuple[Piece, Tensor]], scale: float) -> Part:
    """The part of some pieces that share no query; nothing (lse -inf) for the queries of none."""
    parts = []
    for piece, _ in pieces:
        bias = None if piece.added is None else piece.added.to(torch.promote_types(q.dtype, torch.float32))[None, None]
        out, lse = hop(*_blocks(piece, q, k, v), mask=Mask(causal=piece.causal, bias=bias), scale=scale)
        parts.append((out.reshape(*q.shape[:2], -1, v.shape[-1]), lse.reshape(*q.shape[:2], -1)))
    place = torch.cat([place for _, place in pieces]).to(q.device)
    out, lse = torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    whole, seen = out.new_zeros(*q.shape[:3], v.shape[-1]), lse.new_full(q.shape[:3], -torch.inf)
    return whole.index_copy(2, place, out), seen.index_copy(2, place, lse)


class Joined(torch.autograd.Function):
    """Running sums forward. Backward every piece is told the lse and the output of all pieces, so that its share is exact at once:
    the kernel's own exp(logit - lse) is then the weight among all keys, and no gradient goes through a merge."""

    @staticmethod
    def forward(ctx, q, k, v, pieces, scale):
        out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float32, device=q.device)
        lse = torch.full((*q.shape[:3], 1), -torch.inf, device=q.device)
        for piece in pieces:
            here, keys, values = _blocks(piece, q, k, v, square=True)
            found, own, _ = _forward(here, keys, values, piece.added, piece.causal, scale)
            whole, seen = piece.queries(out), piece.queries(lse)
            found, own = found[..., : v.shape[-1]].reshape(whole.shape), own.reshape(seen.shape)
            total = torch.logaddexp(seen, own)
            whole.mul_((seen - total).exp_()).add_(found * own.sub_(total).exp_())
            seen.copy_(total)
        out = out.to(v.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            pieces, scale = ctx.pieces, ctx.scale
            return *differentiated(lambda q, k, v: (composed(q, k, v, pieces, scale),), (q, k, v), grads), None, None
        found = tuple(torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
        for piece in ctx.pieces:
            here, keys, values = _blocks(piece, q, k, v, square=True)
            answer, given = (_folded(piece, piece.queries(t), here.shape[-1]) for t in (out, grads[0]))
            total = _folded(piece, piece.queries(lse), 1)[..., 0]
            parts = _backward(given, here, keys, values, answer, total, piece.added, piece.causal, ctx.scale, ())
            for whole, view, part in zip(found, (piece.queries, piece.keys, piece.keys), parts, strict=True):
                place = view(whole)
                place.add_(part[..., : whole.shape[-1]].reshape(place.shape))
        return *(g.to(t.dtype) for g, t in zip(found, (q, k, v), strict=True)), None, None


def _blocks(piece: Piece, q: Tensor, k: Tensor, v: Tensor, square: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a piece as (batch * heads, blocks, tokens, dim); `square`: of one width."""
    width = max(q.shape[-1], v.shape[-1]) if square else 0
    here, keys, values = piece.queries(q), piece.keys(k), piece.keys(v)
    return _folded(piece, here, width), _folded(piece, keys, width), _folded(piece, values, width)


def _folded(piece: Piece, view: Tensor, width: int) -> Tensor:
    folded = view.reshape(view.shape[0] * view.shape[1], piece.blocks, -1, view.shape[-1])
    return folded if folded.shape[-1] >= width else torch.nn.functional.pad(folded, (0, width - folded.shape[-1]))
