"""Attention over ranges of sorted keys: the keys put into several orders, each query sees a range of places in each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mask import Mask, Rule
from .again import differentiated
from .dispatch import is_plain, writes_own_backward
from .hop import hop
from .merge import merge

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ROWS = 32  # queries of one tile
STEP = 2**17  # logits held in one step
WHOLE = 16  # places of a tile come in so many, whole cache lines of logits
FAR = 1e30  # how far below all others a hidden logit is, at least: 2**-FAR is 0 as 2**-inf is, but quicker to make


@dataclass(frozen=True, eq=False)
class Ranges:
    """One order of the keys and the places in it that each query sees: low <= place < high."""

    order: Int[Tensor, "many keys"]  # the key at each place
    low: Int[Tensor, "many queries"]
    high: Int[Tensor, "many queries"]

    @cached_property
    def place(self) -> Int[Tensor, "many keys"]:
        """The place of each key."""
        places = torch.arange(self.order.shape[1], device=self.order.device, dtype=self.low.dtype)
        return torch.empty_like(self.order, dtype=self.low.dtype).scatter_(1, self.order, places.expand_as(self.order))

    def sees(self, entry: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query has a key in reach, from index tensors that broadcast."""
        place = self.place[entry, key]
        return (place >= self.low[entry, query]) & (place < self.high[entry, query])


def attend_ranges(
    q: Float[Tensor, "many queries dim"],
    k: Float[Tensor, "many keys dim"],
    v: Float[Tensor, "many keys width"],
    rounds: list[Ranges],
    scale: float,
) -> Float[Tensor, "many queries width"]:
    """Exact attention of each query over the keys that any round puts in its reach, each counted once; 0 where there is none.

    >>> q, k, v = torch.randn(3, 1, 4, 8)
    >>> order, low = torch.tensor([[3, 1, 0, 2]]), torch.zeros(1, 4, dtype=torch.long)
    >>> out = attend_ranges(q, k, v, [Ranges(order, low, low + 2)], 1.0)
    >>> torch.allclose(out, (q @ k[:, [1, 3]].mT).softmax(-1) @ v[:, [1, 3]], atol=1e-6)
    True
    """
    high = torch.promote_types(q.dtype, torch.float32)
    x, y, values = (t.to(high).contiguous() for t in (q, k, v))
    if is_plain() or not writes_own_backward() or 0 in (x.numel(), y.numel(), values.numel()):
        return formula(x, y, values, rounds, scale).to(v.dtype)
    return TiledRanges.apply(x, y, values, rounds, scale).to(v.dtype)  # type: ignore[union-attr]


def formula(q: Tensor, k: Tensor, v: Tensor, rounds: list[Ranges], scale: float) -> Tensor:
    """The plain formula: one hop under the rule that some round has the pair in reach."""

    def sees(entry: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = rounds[0].sees(entry, query, key)
        for other in rounds[1:]:
            found = found | other.sees(entry, query, key)
        return found

    return hop(q[:, None], k[:, None], v[:, None], mask=Mask(rule=Rule(sees, len(q))), scale=scale)[0][:, 0]


class TiledRanges(torch.autograd.Function):
    """Round by round and tile by tile; a pair counts in its first round alone. The backward pass makes the weights again."""

    @staticmethod
    def forward(ctx, q, k, v, rounds, scale):
        asked, parts = with_nobody(q * (scale / math.log(2))), None
        for number in range(len(rounds)):
            out, lse = q.new_empty(len(asked), v.shape[-1]), q.new_empty(len(asked))
            for queries, keys, _, logits in _steps(asked, k, rounds[: number + 1]):
                highest = logits.amax(-1, keepdim=True)
                weights = logits.sub_(highest).exp2_()
                total = weights.sum(-1, keepdim=True)
                lse[queries] = (total.log2() + highest).masked_fill_(highest < -FAR / 4, -torch.inf)[..., 0]
                out[queries] = torch.bmm(weights, rows(v, keys)).div_(total)
            part = out[:-1].view(*q.shape[:2], -1), lse[:-1].view(q.shape[:2]) * math.log(2)
            parts = part if parts is None else merge(parts, part)
        assert parts is not None
        ctx.save_for_backward(q, k, v, *parts)
        ctx.rounds, ctx.scale = rounds, scale
        return parts[0]

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, out, lse = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # a second derivative is wanted
            rounds, scale = ctx.rounds, ctx.scale
            return *differentiated(lambda q, k, v: (formula(q, k, v, rounds, scale),), (q, k, v), grads), None, None
        lse = (lse / math.log(2)).masked_fill(lse == -torch.inf, 0)  # blind queries see nothing in any tile
        grad, delta, lse = (with_nobody(t) for t in (grad, (grad * out).sum(-1, keepdim=True), lse[..., None]))
        gq, gk, gv = with_nobody(torch.zeros_like(q)), *(torch.zeros_like(t).flatten(0, 1) for t in (k, v))
        asked = with_nobody(q * (ctx.scale / math.log(2)))
        for number in range(len(ctx.rounds)):
            for queries, keys, mine, logits in _steps(asked, k, ctx.rounds[: number + 1]):
                here = rows(grad, queries)
                weights = logits.sub_(rows(lse, queries)).exp2_()
                gv.index_add_(0, keys.flatten(), torch.bmm(weights.mT, here).flatten(0, 1))
                slopes = torch.baddbmm(rows(delta, queries), here, rows(v, keys).mT, beta=-1).mul_(weights)
                gq.index_add_(0, queries.flatten(), torch.bmm(slopes, mine).flatten(0, 1))
                gk.index_add_(0, keys.flatten(), torch.bmm(slopes.mT, rows(asked, queries)).flatten(0, 1))
        return gq[:-1].mul_(ctx.scale).view_as(q), gk.mul_(math.log(2)).view_as(k), gv.view_as(v), None, None


class Tiles(NamedTuple):
    """The queries of one round, those with ranges near each other by ROWS together, the tiles that need the most places first."""

    queries: Tensor  # (tiles, ROWS): counted over all entries; one past the last where a tile has room left
    first: Tensor  # (tiles, 1): the first place that the tile sees, in the places of its entry
    entry: Tensor  # (tiles, 1)
    width: Tensor  # (tiles, 1): how many places it sees from there on


def tiles_of(here: Ranges) -> Tiles:
    (many, queries), keys, device = here.low.shape, here.order.shape[1], here.low.device
    near = (here.low + here.high).argsort(-1)
    room = (0, -queries % ROWS)
    low, high = here.low.gather(1, near), here.high.gather(1, near)
    low, high = low.masked_fill(low >= high, keys), high.masked_fill(low >= high, 0)  # who sees nothing needs nothing
    first = F.pad(low, room, value=keys).view(-1, ROWS).amin(1)
    width = F.pad(high, room).view(-1, ROWS).amax(1).sub_(first).clamp_min_(1)
    near = F.pad(near + torch.arange(many, device=device)[:, None] * queries, room, value=many * queries).view(-1, ROWS)
    entry = torch.arange(many, device=device).repeat_interleave(len(near) // many)
    width, order = width.sort(descending=True)
    return Tiles(near[order], first[order, None].long(), entry[order, None], width[:, None])


class Reaches(NamedTuple):
    """Ranges as real numbers, so that one subtraction and one comparison tell whether a place lies in one."""

    place: list[Tensor]  # for each round (many * keys)
    bounds: Tensor  # (many * queries + 1, 2 * rounds): middle and half of the width; nobody sees anything


def reaches_of(rounds: list[Ranges], dtype: torch.dtype) -> Reaches:
    bounds = [t for r in rounds for t in (r.low.to(dtype).add(r.high - 1).div_(2), (r.high - r.low).to(dtype).div_(2))]
    return Reaches(
        [r.place.flatten().to(dtype) for r in rounds], F.pad(torch.stack(bounds, -1).flatten(0, 1), (0, 0, 0, 1), value=-1)
    )


def inside(place: Tensor, bounds: Tensor, number: int) -> Tensor:
    """How far (tiles, places) lie within the ranges of (tiles, ROWS) queries in a round; below 0 what does not."""
    middle, half = bounds[..., 2 * number, None], bounds[..., 2 * number + 1, None]
    away = (place[:, None] - middle).abs_()
    return torch.sub(half, away, out=away)


def _steps(asked: Tensor, k: Tensor, rounds: list[Ranges]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(queries, keys, the rows of these keys, logits) of some tiles at a time, in the last of the rounds.

    The logits (tiles, ROWS, places) are below -FAR / 2 at what is out of reach and at what an earlier round has counted.
    """
    here, keys, tiles, reaches = rounds[-1], k.shape[1], tiles_of(rounds[-1]), reaches_of(rounds, asked.dtype)
    widths, stop = tiles.width[:, 0].tolist(), 0
    while stop < len(widths):
        span = -(-widths[stop] // WHOLE) * WHOLE
        start, stop = stop, stop + max(1, STEP // (ROWS * span))
        queries, first, entry, _ = (t[start:stop] for t in tiles)
        place, bounds = first + torch.arange(span, device=k.device), rows(reaches.bounds, queries)
        known = here.order.take(place.clamp_max(keys - 1) + entry * keys) + entry * keys
        hidden = inside(place.to(asked.dtype), bounds, len(rounds) - 1).neg_()
        for number, places in enumerate(reaches.place[:-1]):
            hidden = torch.maximum(hidden, inside(places.take(known), bounds, number), out=hidden)
        mine = rows(k, known)
        logits = torch.bmm(rows(asked, queries), mine.mT)
        yield queries, known, mine, logits.sub_(hidden.clamp_min_(0), alpha=FAR)


def rows(t: Tensor, index: Tensor) -> Tensor:
    """(..., dim) of the rows of t so numbered, counted over all entries."""
    return t.reshape(-1, t.shape[-1]).index_select(0, index.flatten()).unflatten(0, index.shape)


def with_nobody(t: Tensor) -> Tensor:
    """The rows of all entries and one of zeros."""
    return F.pad(t.flatten(0, 1), (0, 0, 0, 1))
