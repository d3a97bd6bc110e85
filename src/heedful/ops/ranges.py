"""Attention over ranges of sorted keys: the keys put into several orders, each query sees a range of places in each of them."""

from __future__ import annotations

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
STEP = 2**18  # logits held in one step


@dataclass(frozen=True, eq=False)
class Ranges:
    """One order of the keys and the places in it that each query sees: low <= place < high.

    `chunk` places and `margin` = (before, after) places around them hold the range of every query whose `home` is that chunk.
    """

    order: Int[Tensor, "many keys"]  # the key at each place
    low: Int[Tensor, "many queries"]
    high: Int[Tensor, "many queries"]
    home: Int[Tensor, "many queries"]
    chunk: int
    margin: tuple[int, int]

    @cached_property
    def place(self) -> Int[Tensor, "many keys"]:
        """The place of each key."""
        places = torch.arange(self.order.shape[1], device=self.order.device, dtype=self.low.dtype)
        return torch.empty_like(self.order, dtype=self.low.dtype).scatter_(1, self.order, places.expand_as(self.order))

    @property
    def chunks(self) -> int:
        return -(-self.order.shape[1] // self.chunk)

    @property
    def span(self) -> int:
        """How many places a chunk and its margins have."""
        return self.chunk + sum(self.margin)

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
    >>> order, home = torch.tensor([[3, 1, 0, 2]]), torch.zeros(1, 4, dtype=torch.long)
    >>> out = attend_ranges(q, k, v, [Ranges(order, home, home + 2, home, 4, (0, 0))], 1.0)
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


class Tiles(NamedTuple):
    """The queries of one round, gathered by home into tiles of ROWS."""

    query: Tensor  # (tiles * ROWS): the query in each slot, counted over all entries; one past the last where none is
    slot: Tensor  # (many * queries): where each query went
    group: Tensor  # (tiles): the chunk of each tile, counted over all entries


class TiledRanges(torch.autograd.Function):
    """Round by round and tile by tile; a pair counts in its first round alone. The backward pass makes the weights again."""

    @staticmethod
    def forward(ctx, q, k, v, rounds, scale):
        plans, parts = [_tiles(r) for r in rounds], None
        for number, tiles in enumerate(plans):
            out, lse = q.new_empty(len(tiles.query), v.shape[-1]), q.new_empty(len(tiles.query))
            for rows, logits, _, values in _steps(q, k, v, rounds[: number + 1], tiles, scale):
                highest = logits.amax(-1, keepdim=True).clamp_min_(torch.finfo(q.dtype).min)
                weights = logits.sub_(highest).exp_()
                total = weights.sum(-1, keepdim=True)
                lse[rows] = (total.log() + highest).flatten()
                out[rows] = torch.bmm(weights, values).div_(total.masked_fill_(total == 0, 1)).flatten(0, 1)
            part = out[tiles.slot].view(*q.shape[:2], -1), lse[tiles.slot].view(q.shape[:2])
            parts = part if parts is None else merge(parts, part)
        assert parts is not None
        ctx.save_for_backward(q, k, v, *parts)
        ctx.rounds, ctx.plans, ctx.scale = rounds, plans, scale
        return parts[0]

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, out, lse = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # a second derivative is wanted
            rounds, scale = ctx.rounds, ctx.scale
            return *differentiated(lambda q, k, v: (formula(q, k, v, rounds, scale),), (q, k, v), grads), None, None
        delta = (grad * out).sum(-1)
        lse = lse.masked_fill(lse == -torch.inf, 0)  # blind queries see nothing in any tile
        sums = [torch.zeros_like(t) for t in (q, k, v)]
        for number, tiles in enumerate(ctx.plans):
            parts = _round_backward((q, k, v), (grad, delta, lse), ctx.rounds[: number + 1], tiles, ctx.scale)
            for total, part in zip(sums, parts, strict=True):
                total += part
        return *sums, None, None


def _round_backward(inputs: tuple, outer: tuple, rounds: list[Ranges], tiles: Tiles, scale: float) -> tuple[Tensor, ...]:
    """The gradients of q, k and v that come through the pairs of the last of the rounds."""
    q, k, v = inputs
    slots = q.new_empty(len(tiles.query), q.shape[-1])
    gk, gv = (t.new_zeros(len(t) * rounds[-1].chunks, rounds[-1].span, t.shape[-1]) for t in (k, v))
    for rows, logits, keys, values in _steps(q, k, v, rounds, tiles, scale):
        some, known = tiles.group[rows.start // ROWS : rows.stop // ROWS], tiles.query[rows]
        grad, delta, lse = (_rows(t, known) for t in outer)
        weights = logits.sub_(lse[..., None]).exp_()
        gv.index_add_(0, some, torch.bmm(weights.mT, grad))
        slopes = torch.baddbmm(delta[..., None], grad, values.mT, beta=-1).mul_(weights).mul_(scale)
        slots[rows] = torch.bmm(slopes, keys).flatten(0, 1)
        gk.index_add_(0, some, torch.bmm(slopes.mT, _rows(q, known)))
    return slots[tiles.slot].view_as(q), _unspan(gk, rounds[-1]), _unspan(gv, rounds[-1])


def _steps(
    q: Tensor, k: Tensor, v: Tensor, rounds: list[Ranges], tiles: Tiles, scale: float
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(slots, logits, keys, values) of some tiles at a time, in the last of the rounds.

    The logits (tiles, ROWS, places) are -inf at what is out of reach and at what an earlier round has counted.
    """
    here, earlier = rounds[-1], rounds[:-1]
    keys, values, seats = _spans(k, here), _spans(v, here), [_spans(other.place, here) for other in earlier]
    size = max(1, STEP // (ROWS * here.span))
    for start in range(0, len(tiles.group), size):
        some = tiles.group[start : start + size]
        rows = slice(start * ROWS, (start + len(some)) * ROWS)
        known, mine = tiles.query[rows], keys[some]
        first = (some % here.chunks * here.chunk - here.margin[0]).to(here.low.dtype)
        hidden = _within(here, first[:, None] + torch.arange(here.span, device=q.device, dtype=first.dtype), known).logical_not_()
        for other, seat in zip(earlier, seats, strict=True):
            hidden |= _within(other, seat[some], known)
        logits = torch.bmm(_rows(q, known), mine.mT).mul_(scale).masked_fill_(hidden, -torch.inf)
        yield rows, logits, mine, values[some]


def _tiles(here: Ranges) -> Tiles:
    many, queries = here.home.shape
    chunks, device = here.chunks, here.home.device
    group = (here.home + torch.arange(many, device=device)[:, None] * chunks).flatten()
    group, sequence = group.sort(stable=True)
    counts = torch.bincount(group, minlength=many * chunks)
    tiles = (counts + ROWS - 1) // ROWS
    rank = torch.arange(many * queries, device=device) - (counts.cumsum(0) - counts)[group]  # among those of one home
    slot = (tiles.cumsum(0) - tiles)[group] * ROWS + rank
    query = torch.full((int(tiles.sum()) * ROWS,), many * queries, device=device)
    query[slot] = sequence
    return Tiles(
        query, torch.empty_like(slot).scatter_(0, sequence, slot), torch.arange(len(tiles), device=device).repeat_interleave(tiles)
    )


def _rows(t: Tensor, known: Tensor, empty: float = 0) -> Tensor:
    """What belongs to the query in each slot, by tiles; `empty` where none is."""
    flat = t.flatten(0, 1)
    found = flat.index_select(0, known.clamp_max(len(flat) - 1))
    vacant = known == len(flat)
    return found.masked_fill_(vacant if t.ndim == 2 else vacant[:, None], empty).unflatten(0, (-1, ROWS))


def _spans(t: Tensor, here: Ranges, fill: float = 0) -> Tensor:
    """(many * chunks, before + chunk + after, ...): what belongs to the keys of each chunk and its margin, by place."""
    many, keys = here.order.shape
    starts = torch.arange(many, device=t.device)[:, None] * keys
    ordered = t.flatten(0, 1).index_select(0, (here.order + starts).flatten()).unflatten(0, (many, keys))
    sides = (here.margin[0], here.chunks * here.chunk - keys + here.margin[1])
    padded = F.pad(ordered, (0, 0) * (t.ndim - 2) + sides, value=fill)
    spans = padded.unfold(1, here.span, here.chunk)  # a view, its places last
    return (spans if t.ndim == 2 else spans.mT).flatten(0, 1)


def _unspan(spans: Tensor, here: Ranges) -> Tensor:
    """The sum over spans for each key: the transpose of `_spans`; margins are at most a chunk."""
    many, keys = here.order.shape
    spans = spans.unflatten(0, (many, -1))  # (many, chunks, places, dim)
    before, after = here.margin
    total = spans[:, :, before : before + here.chunk].clone()
    total[:, :-1, here.chunk - before :] += spans[:, 1:, :before]
    total[:, 1:, :after] += spans[:, :-1, before + here.chunk :]
    total = total.flatten(1, 2)
    starts = torch.arange(many, device=spans.device)[:, None] * total.shape[1]
    return total.flatten(0, 1).index_select(0, (here.place + starts).flatten()).unflatten(0, (many, keys))


def _within(here: Ranges, place: Tensor, known: Tensor) -> Tensor:
    """(tiles, ROWS, places): whether a place lies in the range of the query in a slot."""
    place = place[:, None]
    return (place >= _rows(here.low, known)[..., None]) & (place < _rows(here.high, known)[..., None])
