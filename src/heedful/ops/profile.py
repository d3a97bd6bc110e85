"""Row and column profiles of attention: what ten statistics need, from one sweep over tiles of queries, never L x L."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..mask import Mask

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

TILE = 2**19  # logits of one tile: small enough to stay in a core's cache
WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
HIDDEN = -1e30  # a finite logit of weight zero, so that weight times logit is zero too


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


@dataclass(frozen=True)
class Columns:
    """One number for each key, added up over the sampled queries: (batch, heads, keys)."""

    load: Float[Tensor, "batch heads keys"]  # column sums of the probabilities
    squares: Float[Tensor, "batch heads keys"]  # column sums of their squares


@dataclass(frozen=True)
class Logits:
    """What makes the logits of a call: keys in high precision, mask, scale, soft cap, null logits."""

    k: Float[Tensor, "batch key_heads keys dim"]
    mask: Mask
    scale: float
    cap: float | None
    null: Float[Tensor, " heads"] | None

    def of(self, q: Tensor, rows: Tensor, low: int, high: int) -> Float[Tensor, "batch heads rows keys"]:
        """The logits of some queries over the keys low..high, HIDDEN where the mask forbids."""
        batch, heads, count, dim = q.shape
        folded = q.to(self.k.dtype).reshape(batch, self.k.shape[1], -1, dim) * self.scale
        logits = (folded @ self.k[:, :, low:high].mT).view(batch, heads, count, high - low)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        added = self.mask.tile(rows, low, high)
        return logits if added is None else logits.add_(added.clamp_min(HIDDEN)).clamp_min_(HIDDEN)

    def visible(self, rows: Tensor, low: int, high: int) -> Float[Tensor, "batch 1 rows"]:
        """How many of the keys low..high each query may look at."""
        seen = self.mask.visible(rows, low, high)
        everything = torch.full((), high - low, dtype=self.k.dtype, device=rows.device)
        return (everything if seen is None else seen[:, :1].sum(-1).to(self.k.dtype)).expand(self.k.shape[0], 1, len(rows))


def profile(q: Tensor, logits: Logits, sample: Tensor | None = None, real: Tensor | None = None) -> tuple[Rows, Columns]:
    """The rows and columns profiles of softmax attention; `sample` names the queries looked at, `real` those that are tokens."""
    (batch, heads, queries, _), keys = q.shape, logits.k.shape[-2]
    rows = torch.arange(queries, device=q.device) if sample is None else sample
    columns = Columns(*(torch.zeros(batch, heads, keys, dtype=logits.k.dtype, device=q.device) for _ in range(2)))
    first = _first(logits.mask, batch, q.device)
    found = []
    for here in rows.split(max(1, TILE // max(1, batch * heads * keys))):
        counted = None if real is None else real[:, here]
        found.append(_tile(q[:, :, here], logits, here, first, counted, columns))
    joined = {f.name: torch.cat([getattr(part, f.name) for part in found], 1 if f.name == "valid" else 2) for f in fields(Rows)}
    return Rows(**joined), columns


def _tile(q: Tensor, call: Logits, rows: Tensor, first: Tensor, counted: Tensor | None, columns: Columns) -> Rows:
    keys = columns.load.shape[-1]
    low, high = call.mask.reach(int(rows.min()), int(rows.max()) + 1, keys)
    low, high = (low, high) if high > low else (0, keys)
    logits = call.of(q, rows, low, high)
    largest = logits.amax(-1)
    mass = logits.softmax(-1)
    peak = mass.amax(-1)
    lse = largest - peak.log()
    inner = torch.linalg.vecdot(mass, logits)
    if call.null is not None:
        null = call.null.to(lse.dtype)[:, None]
        whole = torch.logaddexp(lse, null)
        share = (lse - whole).exp()
        mass, peak, lse = mass.mul_(share[..., None]), peak * share, whole
        inner = share * inner + (1 - share) * null.expand_as(share)
    valid = (largest > HIDDEN / 2).any(1)  # heads share their mask, but a bias may blind one of them
    if counted is not None:
        valid = valid & counted
    weight = valid.to(mass.dtype)[:, None, None]
    columns.load[..., low:high] += (weight @ mass)[..., 0, :]
    doubled = mass * mass
    columns.squares[..., low:high] += (weight @ doubled)[..., 0, :]
    position = rows + call.mask.offset - low
    sink = mass.gather(-1, (first - low).clamp(0, high - low - 1).view(-1, 1, 1, 1).expand(*mass.shape[:3], 1))[..., 0]
    sink = sink.masked_fill((first < low).view(-1, 1, 1) | (first >= high).view(-1, 1, 1), 0)
    near, distance, visible = _near(mass, position), _distance(mass, position), call.visible(rows, low, high)
    return Rows(lse, lse - inner, peak, doubled.sum(-1), distance, sink, largest, near, visible, valid)


def _distance(mass: Tensor, position: Tensor) -> Tensor:
    gap = (position[:, None] - torch.arange(mass.shape[-1], device=mass.device)).abs().to(mass.dtype)  # (rows, keys)
    batch, heads, rows, keys = mass.shape
    by_row = mass.reshape(batch * heads, rows, keys).transpose(0, 1) @ gap[:, :, None]  # (rows, batch * heads, 1)
    return by_row[..., 0].mT.reshape(batch, heads, rows)


def _near(mass: Tensor, position: Tensor) -> Tensor:
    """Mass within each window around the query, from one running sum over the keys."""
    windows = torch.tensor(WINDOWS, device=mass.device)
    running = mass.cumsum(-1)
    last = (position[:, None] + windows - 1).clamp(0, mass.shape[-1] - 1).expand(*mass.shape[:3], -1)
    before = position[:, None] - windows
    near = running.gather(-1, last)
    skipped = running.gather(-1, before.clamp_min(0).expand(*mass.shape[:3], -1))
    return near - skipped.masked_fill(before < 0, 0)


def _first(mask: Mask, batch: int, device: torch.device) -> Tensor:
    """The first key of each batch entry that is a token."""
    if mask.keys is None:
        return torch.zeros(batch, dtype=torch.long, device=device)
    return mask.keys.int().argmax(-1).expand(batch)
