"""Row and column profiles of attention: what the statistics need, from one sweep over tiles of queries, never L x L."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mask import Mask
from .sensitivity import SOME, KeySums
from .sweep import BLOCK, HIDDEN, Logits, Sweep, Tile

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["HIDDEN", "WINDOWS", "Columns", "Logits", "Rows", "profile"]

WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # multiples of BLOCK: `_near` builds on it


@dataclass(frozen=True)
class Rows:
    """One number for each sampled query: (batch, heads, rows), or (batch, heads, rows, windows) for `near`."""

    lse: Float[Tensor, "batch heads rows"]
    entropy: Float[Tensor, "batch heads rows"]
    peak: Float[Tensor, "batch heads rows"]  # the largest probability
    squared: Float[Tensor, "batch heads rows"]  # sum of squared probabilities
    distance: Float[Tensor, "batch heads rows"]  # mean |query - key|
    sink: Float[Tensor, "batch heads rows"]  # mass on the first key that is a token
    largest: Float[Tensor, "batch heads rows"]  # the largest logit
    near: Float[Tensor, "batch heads rows windows"]  # mass on |query - key| < window
    visible: Float[Tensor, "batch 1 rows"]  # how many keys the query may look at
    valid: Bool[Tensor, "batch rows"]  # whether the query is a token and sees a key
    moved: Float[Tensor, "batch heads rows"]  # sum over keys of |d out / d key|^2; nan where none was taken


@dataclass(frozen=True)
class Columns:
    """One number for each key, added up over the sampled queries: (batch, heads, keys)."""

    load: Float[Tensor, "batch heads keys"]  # column sums of the probabilities
    squares: Float[Tensor, "batch heads keys"]  # column sums of their squares
    moved: Float[Tensor, "batch heads keys"]  # sums of |d out / d key|^2 over the rows whose own are known; all rows unless sampled


def profile(
    q: Tensor, logits: Logits, sample: Tensor | None = None, real: Tensor | None = None, v: Tensor | None = None
) -> tuple[Rows, Columns]:
    """The rows and columns profiles of softmax attention; `sample` names the queries looked at, `real` those that are tokens."""
    batch, heads, _, _ = q.shape
    sweep = Sweep(q, logits, sample)
    rows = sweep.rows
    found = _empty(sweep, batch, heads)
    columns = Columns(*(torch.zeros(batch, heads, logits.k.shape[-2], dtype=logits.k.dtype, device=q.device) for _ in range(3)))
    counted = torch.ones(batch, len(rows), dtype=torch.bool, device=q.device) if real is None else real[:, rows].expand(batch, -1)
    first = _first(logits.mask, batch, q.device)
    keys = None if v is None else KeySums(sweep, v, 1 if sample is None else max(1, len(rows) // SOME))
    gaps: dict[int, Tensor] = {}
    for tile in sweep:
        seen = counted[tile.entries, None, tile.spots] & (tile.largest > HIDDEN / 2)
        _fill(found, tile, sweep, first[tile.entries], _gap(gaps, tile, logits.mask))
        found.valid[tile.entries, tile.spots] |= seen.any(1)
        _add(columns, found, tile, sweep, seen, keys)
    _count(found.visible, rows, logits, sweep)
    if keys is not None:
        columns.moved.copy_(keys.total())
    return found, columns


def _empty(sweep: Sweep, batch: int, heads: int) -> Rows:
    like = {"dtype": sweep.k.dtype, "device": sweep.k.device}
    shape = (batch, heads, len(sweep.rows))
    found = {name: torch.zeros(shape, **like) for name in ("lse", "entropy", "peak", "squared", "distance", "sink", "largest")}
    near, visible = torch.zeros(*shape, len(WINDOWS), **like), torch.zeros(batch, 1, shape[-1], **like)
    valid = torch.zeros(batch, shape[-1], dtype=torch.bool, device=sweep.k.device)
    return Rows(**found, near=near, visible=visible, valid=valid, moved=torch.full(shape, torch.nan, **like))


def _fill(found: Rows, tile: Tile, sweep: Sweep, first: Tensor, gap: Tensor) -> None:
    """The row statistics of a tile; `gap` is |query - key|, (rows, keys)."""
    here = (tile.entries, tile.heads, tile.spots)
    mass, scratch = tile.mass, sweep.buffer("scratch", tile.mass.shape)
    found.lse[here], found.largest[here], found.peak[here] = tile.lse, tile.largest, tile.peak
    inner = torch.mul(mass, tile.logits, out=scratch).sum(-1)
    entropy = tile.own - tile.largest - inner
    if tile.share is not None and sweep.call.null is not None:
        null = sweep.call.null.to(inner.dtype)[tile.heads, None] - tile.lse
        entropy = tile.share * (tile.lse - tile.largest) - inner - null.exp() * null
    found.entropy[here] = entropy.masked_fill(tile.largest <= HIDDEN / 2, 0)
    found.distance[here] = torch.mul(mass, gap, out=scratch).sum(-1)
    spot = (first - tile.low).view(-1, 1, 1, 1)
    inside = (spot >= 0) & (spot < mass.shape[-1])
    sink = mass.gather(-1, spot.clamp(0, mass.shape[-1] - 1).expand(*mass.shape[:3], 1))
    found.sink[here] = sink.masked_fill(~inside, 0)[..., 0]
    found.near[here] = _near(tile, tile.rows + sweep.call.mask.offset - tile.low)


def _add(columns: Columns, found: Rows, tile: Tile, sweep: Sweep, seen: Tensor, keys: KeySums | None) -> None:
    """What a tile adds to the columns, from the rows that are `seen`."""
    here, width = (tile.entries, tile.heads, tile.keys), tile.high - tile.low
    weight = seen.to(tile.mass.dtype)[:, :, None]  # (entries, heads, 1, rows)
    columns.load[here] += (weight @ tile.mass)[..., 0, :width]
    squared = torch.mul(tile.mass, tile.mass, out=sweep.buffer("scratch", tile.mass.shape))
    found.squared[tile.entries, tile.heads, tile.spots] = squared.sum(-1)
    columns.squares[here] += (weight @ squared)[..., 0, :width]
    if keys is not None:
        found.moved[tile.entries, tile.heads, tile.spots] = keys.add(tile, squared, seen)


def _gap(gaps: dict[int, Tensor], tile: Tile, mask: Mask) -> Tensor:
    """|query - key| of a tile, kept for the other heads of the same queries."""
    if tile.spots.start not in gaps:
        gaps.clear()
        position = (tile.rows + mask.offset - tile.low).to(tile.mass.dtype)
        gaps[tile.spots.start] = (position[:, None] - torch.arange(tile.mass.shape[-1], device=tile.rows.device)).abs_()
    return gaps[tile.spots.start]


def _near(tile: Tile, position: Tensor) -> Tensor:
    """Mass within each window around the query: whole blocks of keys by a running sum, and the begun ones at both ends."""
    mass, whole = tile.mass, tile.blocks
    blocks = whole.shape[-1]
    farthest = max(int(position.max()) + 1, mass.shape[-1] - int(position.min()))
    windows = torch.tensor([w for w in WINDOWS if w < farthest], dtype=torch.long, device=position.device)  # wider: whole rows
    ends = torch.cat([position[:, None] - windows + 1, position[:, None] + windows], -1).clamp_(0, mass.shape[-1])  # (rows, ends)
    block, counts = ends // BLOCK, torch.arange(BLOCK, device=mass.device) < (ends % BLOCK)[..., None]
    before = F.pad(whole, (1, 0)).cumsum_(-1).gather(-1, block.expand(*mass.shape[:3], -1))
    line = torch.arange(mass.shape[:-1].numel(), device=mass.device).view(*mass.shape[:3], 1) * blocks
    begun = mass.view(-1, BLOCK).index_select(0, (line + block.clamp_max_(blocks - 1)).flatten())
    before += begun.view(*before.shape, BLOCK).mul_(counts).sum(-1)
    low, high = before[..., : len(windows)], before[..., len(windows) :]
    rest = mass.sum(-1, keepdim=True).expand(*mass.shape[:3], len(WINDOWS) - len(windows))
    return torch.cat([high - low, rest], -1)


def _count(visible: Tensor, rows: Tensor, logits: Logits, sweep: Sweep) -> None:
    """How many keys each query may look at."""
    mask, keys = logits.mask, sweep.count
    if mask.demands <= {"causal", "bias"}:
        visible[:] = (rows + mask.offset + 1).clamp(0, keys) if mask.causal else keys
        return
    for spots in sweep.cuts():
        low, high = mask.reach(int(rows[spots].min()), int(rows[spots].max()) + 1, keys)
        visible[..., spots] = logits.visible(rows[spots], low, high)


def _first(mask: Mask, batch: int, device: torch.device) -> Tensor:
    """The first key of each batch entry that is a token."""
    if mask.keys is None:
        return torch.zeros(batch, dtype=torch.long, device=device)
    return mask.keys.int().argmax(-1).expand(batch)
