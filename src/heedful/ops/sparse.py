"""Sparse patterns: which keys the strided and the fixed pattern give a query, as a rule and as pieces of whole blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .pieces import Piece, View

ROWS = 256  # queries that look at the summaries together


class Pattern(NamedTuple):
    """The settings of a pattern; positions count from 0. `stride` may hold one number for each text, (batch, 1, 1, 1)."""

    kind: str  # strided or fixed
    stride: int | Tensor
    summary: int  # of the fixed pattern: the last positions of each block, which everyone sees

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the positions see each other, causality aside.

        >>> place = torch.arange(6)
        >>> Pattern("strided", 3, 1).sees(place[:, None], place).int().tolist()[0]
        [1, 1, 1, 1, 0, 0]
        >>> Pattern("fixed", 3, 1).sees(place[:, None], place).int().tolist()[0]
        [1, 1, 1, 0, 0, 1]
        """
        if self.kind == "strided":
            return ((query - key).abs() < self.stride) | ((query - key) % self.stride == 0)
        return (query // self.stride == key // self.stride) | (key % self.stride >= self.stride - self.summary)

    def listed(self, query: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The positions that each query's keys are among, and which of these count: (queries, candidates) twice, no key twice."""
        stride, query, last = int(self.stride), query[:, None], int(query.max()) if len(query) else 0
        near = torch.arange(1 - stride, stride, device=query.device)
        grid = torch.arange(0, max(length, last + 1), stride, device=query.device)
        if self.kind == "strided":
            close, far = query + near, query % stride + grid
            apart = (query - far).abs() >= stride
        else:
            close = query // stride * stride + near[stride - 1 :]
            low = max(0, stride - self.summary)
            far = (grid[:, None] + torch.arange(low, stride, device=query.device)).flatten().expand(len(query), -1)
            apart = query // stride != far // stride
        places = torch.cat([close, far], -1)
        counts = torch.cat([torch.ones_like(close, dtype=torch.bool), apart], -1)
        return places.clamp(0, max(0, length - 1)), counts & (places >= 0) & (places < length)


class Grid(NamedTuple):
    """Tokens as whole blocks of `stride` tokens, and a shorter tail."""

    stride: int
    blocks: int
    tail: int

    def block(self, first: int, last: int, low: int = 0, high: int | None = None) -> View:
        """The tokens low..high of each of some blocks: (batch, heads, blocks, tokens, dim)."""
        span = slice(first * self.stride, last * self.stride)
        return lambda x: x[:, :, span].unflatten(2, (last - first, self.stride))[:, :, :, low:high]

    def column(self, first: int, last: int, some: int | None = None) -> View:
        """The first, second ... tokens of some blocks: (batch, heads, tokens of a block, blocks, dim)."""
        across = self.block(first, last, 0, some)
        return lambda x: across(x).transpose(2, 3)

    def rest(self, low: int = 0) -> View:
        """The tail, (batch, heads, tokens, dim)."""
        start, stop = self.stride * self.blocks + low, self.stride * self.blocks + self.tail
        return lambda x: x[:, :, start:stop]


def pieces(pattern: Pattern, length: int, causal: bool, device: torch.device) -> list[Piece]:
    """The pattern over that many tokens, with each visible pair in one piece.

    >>> every, count = torch.ones(1, 1, 9, 1), 0
    >>> for piece in pieces(Pattern("strided", 3, 1), 9, False, every.device):
    ...     shape = [view(every).numel() // piece.blocks for view in (piece.queries, piece.keys)]
    ...     count += piece.blocks * int(torch.ones(shape).tril().sum() if piece.causal else piece.seen(*shape).sum())
    >>> count == int(Pattern("strided", 3, 1).sees(torch.arange(9)[:, None], torch.arange(9)).sum())
    True
    """
    stride = min(int(pattern.stride), length)
    grid = Grid(stride, length // stride, length % stride)
    spelled = _own(grid, causal)
    if pattern.kind == "fixed":
        spelled += _summaries(grid, min(pattern.summary, stride), causal, device)
    else:
        spelled += _neighbours(grid, causal, device) + _columns(grid, causal, device)
    return spelled


def _own(grid: Grid, causal: bool) -> list[Piece]:
    """Each block over itself."""
    whole = grid.block(0, grid.blocks)
    tail = [Piece(1, grid.rest(), grid.rest(), causal)] if grid.tail else []
    return [Piece(grid.blocks, whole, whole, causal), *tail]


def _neighbours(grid: Grid, causal: bool, device: torch.device) -> list[Piece]:
    """What is nearer than the stride in the block before, and in the block after."""
    stride, blocks, tail = grid
    if stride == 1:
        return []
    later = _hidden(torch.ones(stride - 1, stride - 1, device=device).tril(-1).bool())  # query a sees b + 1 > a
    found = [Piece(blocks - 1, grid.block(1, blocks, 0, -1), grid.block(0, blocks - 1, 1), added=later)] if blocks > 1 else []
    if tail:
        found.append(Piece(1, grid.rest(), grid.block(blocks - 1, blocks, 1), added=later[:tail]))
    if not causal and blocks > 1:
        found.append(Piece(blocks - 1, grid.block(0, blocks - 1, 1), grid.block(1, blocks, 0, -1), True))
    if not causal and tail:
        found.append(Piece(1, grid.block(blocks - 1, blocks, 1), grid.rest(), True))
    return found


def _columns(grid: Grid, causal: bool, device: torch.device) -> list[Piece]:
    """Other blocks' tokens at the same place of the block."""
    _, blocks, tail = grid
    single: View = lambda x: grid.rest()(x)[:, :, :, None]  # noqa: E731  (batch, heads, tail, 1, dim)
    found = []
    if blocks > 1 and causal:
        found.append(Piece(grid.stride, grid.column(1, blocks), grid.column(0, blocks - 1), True))
    elif blocks > 1:
        others = _hidden(torch.eye(blocks, device=device).bool())
        found.append(Piece(grid.stride, grid.column(0, blocks), grid.column(0, blocks), added=others))
    if tail:
        found.append(Piece(tail, single, grid.column(0, blocks, tail)))
    if tail and not causal:
        found.append(Piece(tail, grid.column(0, blocks, tail), single))
    return found


def _summaries(grid: Grid, summary: int, causal: bool, device: torch.device) -> list[Piece]:
    """The last tokens of all other blocks, or of those before."""
    stride, blocks, tail = grid
    low, found = stride - summary, []
    for first, last in _groups(grid, causal):
        seen = last - 1 if causal else blocks
        query = torch.arange(first, last, device=device).repeat_interleave(stride)[:, None]
        key = torch.arange(seen, device=device).repeat_interleave(summary)
        added = _hidden(key >= query if causal else key == query)
        found.append(Piece(1, grid.block(first, last), grid.block(0, seen, low), added=added))
    if tail:
        found.append(Piece(1, grid.rest(), grid.block(0, blocks, low)))
    if tail > low and not causal:
        found.append(Piece(1, grid.block(0, blocks), grid.rest(low)))
    return found


def _groups(grid: Grid, causal: bool) -> Iterator[tuple[int, int]]:
    """Blocks whose queries look at the summaries together; in one block alone none has another to see."""
    step = max(1, ROWS // grid.stride)
    for first in range(1 if causal else 0, grid.blocks if grid.blocks > 1 else 0, step):
        yield first, min(first + step, grid.blocks)


def _hidden(where: Tensor) -> Tensor:
    return torch.zeros(where.shape, device=where.device).masked_fill_(where, -torch.inf)
