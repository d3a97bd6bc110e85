"""The sweep: attention probabilities in tiles of queries that fit a cache, never L x L."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mask import Mask

if TYPE_CHECKING:
    from jaxtyping import Float

TILE = 2**19  # logits of one tile: small enough to stay in the cache
ROWS = 128  # queries of one tile at most, so that causal tiles waste little
BLOCK = 16  # tiles begin and end on multiples of this many keys
HIDDEN = -1e30  # a finite logit of weight zero, so that weight times logit is zero too


@dataclass(frozen=True)
class Logits:
    """What makes the logits of a call: keys in high precision, mask, scale, soft cap, null logits."""

    k: Float[Tensor, "batch key_heads keys dim"]
    mask: Mask
    scale: float
    cap: float | None
    null: Float[Tensor, " heads"] | None

    def of(self, q: Tensor, rows: Tensor, low: int, high: int) -> Float[Tensor, "batch heads rows keys"]:
        """The logits of some queries over the keys low..high, HIDDEN where the mask forbids; `rows` may differ by batch entry."""
        logits = self.bare(q, low, high)
        added = self.mask.tile(rows, low, high)
        return logits if added is None else logits.add_(added.clamp_min(HIDDEN))

    def bare(self, q: Tensor, low: int, high: int) -> Float[Tensor, "batch heads rows keys"]:
        """The logits before any mask or bias."""
        batch, heads, count, dim = q.shape
        folded = q.to(self.k.dtype).reshape(batch, self.k.shape[1], heads // self.k.shape[1] * count, dim) * self.scale
        logits = (folded @ self.k[:, :, low:high].mT).view(batch, heads, count, high - low)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def visible(self, rows: Tensor, low: int, high: int) -> Float[Tensor, "batch 1 rows"]:
        """How many of the keys low..high each query may look at."""
        seen = self.mask.visible(rows, low, high)
        everything = torch.full((), high - low, dtype=self.k.dtype, device=rows.device)
        return (everything if seen is None else seen[:, :1].sum(-1).to(self.k.dtype)).expand(self.k.shape[0], 1, rows.shape[-1])


@dataclass(frozen=True)
class Tile:
    """The probabilities of some heads' queries over a range of keys; all first dimensions are (entries, heads)."""

    entries: slice
    heads: slice
    spots: slice  # which of the swept rows these are
    rows: Tensor  # their positions in the call, (rows,)
    low: int  # the first key
    high: int  # one after the last key; the tensors are padded to whole blocks beyond it
    q: Tensor  # (entries, heads, rows, dim)
    mass: Tensor  # (entries, heads, rows, keys) probabilities, 0 where hidden
    logits: Tensor  # the same less the row's largest: small numbers, so that their sums are accurate
    slope: Tensor | None  # derivative of the soft cap at each logit
    largest: Tensor  # (entries, heads, rows)
    peak: Tensor  # the largest probability
    lse: Tensor
    own: Tensor  # lse without the null logit
    share: Tensor | None  # what the null logit left, (entries, heads, rows)

    @property
    def keys(self) -> slice:
        return slice(self.low, self.high)

    def some(self, which: slice) -> Tile:
        """The same tile with some of its rows only."""
        if which == slice(0, None, 1):
            return self
        rowwise = {name: getattr(self, name)[..., which] for name in ("rows", "largest", "peak", "lse", "own")}
        wide = {name: getattr(self, name)[..., which, :] for name in ("q", "mass", "logits")}
        slope = None if self.slope is None else self.slope[..., which, :]
        share = None if self.share is None else self.share[..., which]
        return replace(self, **rowwise, **wide, slope=slope, share=share)

    @cached_property
    def blocks(self) -> Tensor:
        """The mass on each block of keys, (entries, heads, rows, blocks)."""
        return (self.mass.reshape(-1, BLOCK) @ self.mass.new_ones(BLOCK)).view(*self.mass.shape[:-1], -1)  # faster than a sum


@dataclass(frozen=True)
class Seen:
    """What is kept of a tile so that its probabilities can be had again."""

    entries: slice
    heads: slice
    spots: slice
    low: int
    high: int
    lse: Tensor  # infinite where a query sees nothing

    @classmethod
    def of(cls, tile: Tile) -> Seen:
        lse = tile.lse.masked_fill(tile.largest <= HIDDEN / 2, torch.inf)
        return cls(tile.entries, tile.heads, tile.spots, tile.low, tile.high, lse)


class Sweep:
    """All tiles of a call, in order of their queries; a tile's tensors are overwritten by the next."""

    def __init__(self, q: Tensor, call: Logits, sample: Tensor | None = None):
        self.call = call
        self.sampled = sample is not None
        self.rows = torch.arange(q.shape[-2], device=q.device) if sample is None else sample
        self.q = (q if sample is None else q[:, :, sample]).to(call.k.dtype)
        self.count = call.k.shape[-2]  # of keys
        self.shared = q.shape[1] // call.k.shape[1] if call.k.shape[1] else 1
        self.k = F.pad(call.k, (0, 0, 0, -self.count % BLOCK)).contiguous()
        self._buffers: dict[str, Tensor] = {}
        self._rules: tuple[slice, int, Tensor | None] | None = None  # what `again` added last

    def buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Scratch memory that is used again by the next tile."""
        size = torch.Size(shape).numel()
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self.k.dtype, device=self.k.device)
        return self._buffers[name][:size].view(shape)

    def __iter__(self) -> Iterator[Tile]:
        if min(self.q.shape[:3]) == 0 or self.count == 0:
            return
        for spots in self.cuts():
            yield from self._across(spots)

    def cuts(self) -> Iterator[slice]:
        """Which of the rows are swept together."""
        return _cuts(len(self.rows), min(ROWS, max(1, TILE // max(1, self.k.shape[-2]))))

    def _across(self, spots: slice) -> Iterator[Tile]:
        """The tiles of some queries, one for each group of entries and heads."""
        rows = self.rows[spots]
        low, high = self.call.mask.reach(int(rows.min()), int(rows.max()) + 1, self.count)
        low, high = (low // BLOCK * BLOCK, high) if high > low else (0, min(BLOCK, self.count))
        start, added = self._added(rows, low, high)
        room = max(1, TILE // (len(rows) * (high - low)))
        (batch, heads), shared = self.q.shape[:2], self.shared
        if room >= heads:
            groups = [(entries, slice(0, heads)) for entries in _cuts(batch, room // heads)]
        else:
            cuts = list(_cuts(heads, max(1, room // shared) * shared))
            groups = [(slice(b, b + 1), cut) for b in range(batch) for cut in cuts]
        for entries, cut in groups:
            yield self._tile(entries, cut, spots, low, high, start, _part(added, entries, cut))

    def _added(self, rows: Tensor, low: int, high: int) -> tuple[int, Tensor | None]:
        """What is added to the logits, and the key it begins at: all see those before."""
        mask, end = self.call.mask, low - (low - high) // BLOCK * BLOCK
        start = low
        if not mask.demands:
            start = high // BLOCK * BLOCK
        elif mask.demands == {"causal"}:
            start = max(low, min(int(rows.min()) + mask.offset, high) // BLOCK * BLOCK)
        if start >= high:
            return start, None
        added = mask.tile(rows, start, high)
        if added is None:
            added = torch.zeros(1, 1, 1, high - start, device=rows.device)
        added = added.to(self.k.dtype).clamp_min(HIDDEN)
        if added.shape[-1] == 1:
            added = added.expand(*added.shape[:-1], high - start)
        return start, F.pad(added, (0, end - high), value=HIDDEN)

    def again(self, seen: Seen) -> Tensor:
        """The probabilities of a tile that was swept before, from its lse in fewer passes: (entries, heads, rows, keys). Without a cap."""
        if self._rules is None or self._rules[0] != seen.spots:
            self._rules = (seen.spots, *self._added(self.rows[seen.spots], seen.low, seen.high))
        _, start, added = self._rules
        q = self.q[seen.entries, seen.heads, seen.spots]
        logits = self._products(q, seen.entries, seen.heads, slice(seen.low, seen.low - (seen.low - seen.high) // BLOCK * BLOCK))
        extra = _part(added, seen.entries, seen.heads)
        if extra is not None:
            logits[..., start - seen.low :].add_(extra)
        return logits.sub_(seen.lse[..., None]).exp_()

    def _products(self, q: Tensor, entries: slice, heads: slice, keys: slice) -> Tensor:
        """The scaled products of queries and keys, (entries, heads, rows, keys)."""
        batch, many, rows, dim = q.shape
        k = self.k[entries, heads.start // self.shared : heads.stop // self.shared, keys].flatten(0, 1)
        folded = (q * self.call.scale).reshape(-1, self.shared * rows, dim)
        logits = self.buffer("logits", (len(folded), folded.shape[1], k.shape[1]))
        return torch.bmm(folded, k.mT, out=logits).view(batch, many, rows, k.shape[1])

    def _tile(self, entries: slice, heads: slice, spots: slice, low: int, high: int, start: int, added: Tensor | None) -> Tile:
        q, end = self.q[entries, heads, spots], low - (low - high) // BLOCK * BLOCK
        logits = self._products(q, entries, heads, slice(low, end))
        slope = None
        if self.call.cap is not None:
            logits.div_(self.call.cap).tanh_()
            slope = torch.mul(logits, logits, out=self.buffer("slope", logits.shape)).neg_().add_(1)
            logits.mul_(self.call.cap)
        if added is not None:
            logits[..., start - low :].add_(added)
        largest = logits.amax(-1)
        logits.sub_(largest[..., None])
        mass = torch.ops.aten._softmax.out(logits, -1, False, out=self.buffer("mass", logits.shape))
        peak = mass.amax(-1)
        lse = own = largest - peak.log()
        share = None
        if self.call.null is not None:
            null = self.call.null.to(lse.dtype)[heads, None]
            whole = torch.logaddexp(lse, null)
            share = (lse - whole).exp()
            mass, peak, lse = mass.mul_(share[..., None]), peak * share, whole
        blind = largest <= HIDDEN / 2
        if added is not None and bool(blind.any()):
            mass, peak, lse = mass.masked_fill_(blind[..., None], 0), peak.masked_fill(blind, 0), lse.masked_fill(blind, -torch.inf)
        return Tile(entries, heads, spots, self.rows[spots], low, high, q, mass, logits, slope, largest, peak, lse, own, share)


def _cuts(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _part(added: Tensor | None, entries: slice, heads: slice) -> Tensor | None:
    if added is None:
        return None
    return added[entries if added.shape[0] > 1 else slice(None), heads if added.shape[1] > 1 else slice(None)]
