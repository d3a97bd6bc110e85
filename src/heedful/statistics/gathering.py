"""Gathering: the sums of one lesson, from tiles of probabilities; rows of X are multiplied many at a time, never T x T."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lesson import Lesson
from ..ops.sweep import BLOCK, HIDDEN, ROWS, Sweep, Tile

PATTERNS = ("uniform", "self", "previous")
SPAN = 1024  # rows that are multiplied together


@dataclass
class Sums:
    """The sums of one call, float64; the shapes are Growth's, without folds."""

    logit_gradient: Tensor
    query_gram: Tensor
    key_gram: Tensor
    mixed_gram: Tensor
    value_gradient: Tensor
    lags: Tensor


@torch.no_grad()
def gather(lesson: Lesson) -> Sums:
    """All sums of a lesson: three times the work of its attention, and four products of rows by dim by dim for each head."""
    rows = _Rows(lesson)
    sums = rows.empty()
    for start, stop in rows.spans():
        _add(sums, rows, start, stop)
    sources, loads = rows.sources.flatten(0, 1), rows.loads
    for head in range(loads.shape[1]):
        sums.key_gram[head] += (sources.mT @ (sources * loads[:, head].flatten()[:, None])).double()
    sums.key_gram -= sums.mixed_gram[: len(sums.key_gram), :-1, :-1]
    return sums


def _add(sums: Sums, rows: _Rows, start: int, stop: int) -> None:
    """What the rows of a span add, once the buffers hold them."""
    span, count = slice(0, stop - start), sums.logit_gradient.shape[0]
    x, counted = rows.x[:, start:stop].flatten(0, 1), rows.counted[:, start:stop].flatten()[:, None]
    drift, mixed = (
        rows.drift[:, span].flatten(0, 1),
        rows.mixed[:, span].flatten(0, 1),
    )  # (rows, heads, right), (rows, patterns, mixed)
    sums.logit_gradient += (x.mT @ drift.flatten(1)).unflatten(1, (count, -1)).transpose(0, 1)
    if rows.returned is not None:
        back = rows.returned[:, start:stop].flatten(0, 1)
        sums.value_gradient += (mixed.flatten(1).mT @ back).unflatten(0, (mixed.shape[1], -1))
    x, kept = x * counted, (mixed * counted[..., None]).transpose(0, 1)
    sums.query_gram += x.mT @ x
    sums.mixed_gram += kept.mT @ kept
    if rows.own:
        away = mixed[:, count:, :-1] - mixed[:, count : count + 1, :-1]
        sums.lags += (x.mT @ away.flatten(1)).unflatten(1, (len(PATTERNS), -1)).transpose(0, 1)


@dataclass
class _Rows:
    """Buffers for a span of queries: R = dL/dS X of each head, and u = P X' of each head and pattern."""

    lesson: Lesson
    x: Tensor = field(init=False)
    sources: Tensor = field(init=False)
    loads: Tensor = field(init=False)  # column sums of P over queries that count, (batch, heads, keys)
    drift: Tensor = field(init=False)
    mixed: Tensor = field(init=False)

    def __post_init__(self):
        lesson, self.sweep = self.lesson, Sweep(self.lesson.q, self.lesson.logits)
        high, pad = self.sweep.k.dtype, (0, 0, 0, -self.lesson.k.shape[2] % BLOCK)
        (batch, heads, queries, _), self.shared = lesson.q.shape, lesson.q.shape[1] // lesson.k.shape[1]
        self.x, self.v = lesson.augmented.to(high), F.pad(lesson.v.to(high), pad)
        self.sources = F.pad(lesson.keyed.to(high), pad)
        self.gradient = lesson.gradient.to(high)  # type: ignore[union-attr]
        self.returned = None if lesson.returned is None else lesson.returned.to(high)
        self.counted = lesson.counted
        self.own = lesson.mask.same(queries, lesson.k.shape[2])
        self.span = max(ROWS, SPAN // max(1, batch) // ROWS * ROWS)
        dim, tall = self.sources.shape[-1], min(self.span + ROWS, queries)
        self.loads = self.x.new_zeros(batch, heads, self.sources.shape[1])
        self.drift = self.x.new_zeros(batch, tall, heads, dim)
        self.mixed = self.x.new_zeros(batch, tall, heads + len(PATTERNS), dim + 1)

    def empty(self) -> Sums:
        left, right, heads = self.x.shape[-1], self.sources.shape[-1], self.loads.shape[1]
        patterns, out = heads + len(PATTERNS), 0 if self.returned is None else self.returned.shape[-1]
        shapes = (
            (heads, left, right),
            (left, left),
            (heads, right, right),
            (patterns, right + 1, right + 1),
            (patterns, right + 1, out),
            (len(PATTERNS), left, right),
        )
        return Sums(*(torch.zeros(shape, dtype=torch.float64, device=self.x.device) for shape in shapes))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Ranges of queries for which the buffers hold what they should; the next overwrites them."""
        start = stop = 0
        for tile in self.sweep:
            if tile.spots.start >= start + self.span:
                yield start, stop
                start = tile.spots.start
            stop = tile.spots.stop
            self._fill(tile, slice(tile.spots.start - start, stop - start))
        if stop > start:
            yield start, stop

    def _fill(self, tile: Tile, span: slice) -> None:
        """Write a tile's rows into the buffers."""
        (entries, heads, many, keys), here = tile.mass.shape, (tile.entries, span, tile.heads)
        sources = self.sources[tile.entries, tile.low : tile.low + keys]
        counted = self.counted[tile.entries, None, tile.spots].to(tile.mass.dtype)
        self.loads[tile.entries, tile.heads, tile.low : tile.low + keys] += (counted[:, :, None] @ tile.mass)[:, :, 0]
        self.mixed[(*here, slice(0, -1))] = self._rows(tile.mass, sources)
        self.mixed[(*here, -1)] = tile.mass.sum(-1).transpose(1, 2)
        if tile.heads.start == 0:
            self._patterns(tile, span, sources)
        shared = slice(tile.heads.start // self.shared, tile.heads.stop // self.shared)
        v = self.v[tile.entries, shared, tile.low : tile.low + keys].flatten(0, 1)
        gradient = self.gradient[tile.entries, tile.heads, tile.spots].reshape(len(v), -1, v.shape[-1])
        force = torch.bmm(gradient, v.mT, out=self.sweep.buffer("force", (len(v), gradient.shape[1], keys)))
        force = force.view(entries, heads, many, keys)
        force = force.sub_((force * tile.mass).sum(-1, keepdim=True)).mul_(tile.mass)  # dL/dS
        if tile.slope is not None:
            force.mul_(tile.slope)
        self.drift[here] = self._rows(force, sources)

    def _rows(self, weights: Tensor, sources: Tensor) -> Tensor:
        """weights (entries, heads, rows, keys) times sources, (entries, rows, heads, dim)."""
        return (weights.flatten(1, 2) @ sources).unflatten(1, weights.shape[1:3]).transpose(1, 2)

    def _patterns(self, tile: Tile, span: slice, sources: Tensor) -> None:
        """The rows that a head of each pattern would mix: all that it sees, itself, the token before."""
        heads = self.drift.shape[2]
        seen = ((tile.logits[:, 0] > HIDDEN / 2) & (tile.largest[:, 0] > HIDDEN / 2)[..., None]).to(sources.dtype)
        some = seen.sum(-1, keepdim=True)
        self.mixed[tile.entries, span, heads, :-1] = (seen @ sources) / some.clamp_min(1)
        self.mixed[tile.entries, span, heads:, -1] = (some > 0).to(sources.dtype)
        if self.own:
            self.mixed[tile.entries, span, heads + 1, :-1] = self.sources[tile.entries, tile.spots]
            before = (tile.rows - 1).clamp_min(0)  # the first token sees itself
            self.mixed[tile.entries, span, heads + 2, :-1] = self.sources[tile.entries, before]
