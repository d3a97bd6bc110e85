"""The hop under a window: chunks of queries with the keys around them, all chunks in a few kernel calls instead of one for each tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mask import Mask
from .dispatch import is_plain, writes_own_backward
from .hop import hop
from .merge import Part, merge

SIZES = ((256, 64), (512, 128))  # (windows up to this, queries of one chunk); for wider ones the hop's own tiles waste little
LIMIT = 2**20  # numbers in the mask of one call
BAND, CUT, NOTHING = range(3)  # a chunk sees all of its band, a part of it that must be spelled out, or no key


def window_hop(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, cap: float | None = None) -> Part:
    """The hop; where the mask has a window much narrower than the queries are many, in batched chunks.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 8)
    >>> mask = Mask(causal=True, window=20, sinks=2)
    >>> torch.allclose(window_hop(q, k, v, mask, 1.0)[0], hop(q, k, v, mask=mask, scale=1.0)[0], atol=1e-5)
    True
    """
    size = chunk_size(q, k, mask)
    if size is None:
        return hop(q, k, v, mask=mask, scale=scale, cap=cap)
    mask.check(q.shape[-2], k.shape[-2])
    near = _within(q, k, v, Band(mask, size, q.shape[-2], k.shape[-2], q.device), scale, cap)
    return merge(near, _sinks(q, k, v, mask, scale, cap)) if mask.sinks else near


def chunk_size(q: Tensor, k: Tensor, mask: Mask) -> int | None:
    """How many queries a chunk should hold; None where chunks do not pay."""
    if is_plain() or mask.window is None or not mask.demands <= {"causal", "keys", "window", "sinks", "segments"}:
        return None
    size = next((size for widest, size in SIZES if mask.window <= widest), None)
    overlap = -q.shape[-2] < mask.offset < k.shape[-2]  # else the queries stand beside the keys
    many = size is not None and q.shape[-2] > 2 * max(size, mask.window)
    return size if many and overlap and min(q.numel(), k.numel()) else None


@dataclass(frozen=True)
class Band:
    """The chunks of a call, each of `size` queries with a slice of `width` keys around them."""

    mask: Mask
    size: int
    queries: int
    keys: int
    device: torch.device

    @property
    def back(self) -> int:
        assert self.mask.window is not None
        return self.mask.window - 1

    @property
    def width(self) -> int:
        return self.size + self.back * (1 if self.mask.causal else 2)

    @property
    def count(self) -> int:
        return -(-self.queries // self.size)

    @property
    def around(self) -> tuple[int, int]:
        """Keys to add before the first and after the last, negative where some are beyond reach."""
        before = self.back - self.mask.offset
        return before, (self.count - 1) * self.size + self.width - before - self.keys

    def slices(self, t: Tensor, dim: int) -> Tensor:
        """(..., keys, ...) as (..., count, ..., width): overlapping views of one padded copy."""
        behind = [0, 0] * (t.ndim - 1 - dim)
        return F.pad(t, (*behind, *self.around)).unfold(dim, self.width, self.size)

    def pattern(self) -> Tensor:
        """Which keys of its slice a query may see by causality and window, the same in every chunk: (size, width)."""
        behind = torch.arange(self.size, device=self.device)[:, None] + self.back - torch.arange(self.width, device=self.device)
        near = behind.abs() <= self.back
        return near & (behind >= 0) if self.mask.causal else near

    def tokens(self) -> tuple[Tensor, Tensor | None]:
        """Which entries of each slice are real keys, and their texts: (batch or 1, count, width)."""
        real, texts = self.mask.keys, self.mask.segments
        real = torch.ones(1, self.keys, dtype=torch.bool, device=self.device) if real is None else real
        if texts is None:
            return self.slices(real, 1), None
        batch = max(len(real), len(texts))
        return self.slices(real.expand(batch, -1), 1), self.slices(texts.expand(batch, -1), 1)

    def runs(self, real: Tensor, texts: Tensor | None, heads: int) -> Iterator[tuple[int, Tensor | None]]:
        """(how many chunks, what is added to their logits) of the calls for one batch entry; None where the chunks see no key."""
        whole = real.all(-1) if texts is None else real.all(-1) & (texts == texts[:, :1]).all(-1)
        kinds = torch.where(whole, BAND, torch.where(real.any(-1), CUT, NOTHING)).tolist()
        most, start, pattern = max(1, LIMIT // (heads * self.size * self.width)), 0, self.pattern()
        for kind, run in groupby(kinds):
            stop = start + len(list(run))
            while start < stop:
                end = min(start + most, stop) if kind == CUT else stop
                seen = pattern[None]
                if kind == CUT:
                    seen = seen & real[start:end, None]
                    if texts is not None:
                        seen = seen & (texts[start:end, self.back : self.back + self.size, None] == texts[start:end, None])
                yield end - start, None if kind == NOTHING else added(seen)[None].repeat(1, 1, heads, 1)
                start = end


def added(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)


def _within(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, cap: float | None) -> Part:
    """The part within the window; query heads that share keys lie below each other in one chunk."""
    batch, heads, shared = *q.shape[:2], q.shape[1] // k.shape[1]
    rows = F.pad(q, (0, 0, 0, band.count * band.size - band.queries))
    rows = rows.reshape(batch, -1, shared, band.count, band.size, q.shape[-1])
    rows = rows.transpose(2, 3).flatten(3, 4).flatten(0, 1)  # (batch * key heads, count, shared * size, dim)
    real, texts = band.tokens()
    runs = [list(band.runs(real[i], None if texts is None else texts[i], shared)) for i in range(len(real))]  # of each entry
    cuts = [[count for count, _ in entry] for entry in runs]
    queries = (part for entry, sizes in zip(rows.chunk(len(cuts)), cuts, strict=True) for part in entry.split(sizes, 1))
    calls = zip(queries, _slices(k, band, cuts), _slices(v, band, cuts), (bias for entry in runs for _, bias in entry), strict=True)
    found = [_run(*call, scale, cap) for call in calls]
    out, lse = (_joined([part[i] for part in found], cuts).unflatten(2, (shared, -1)) for i in range(2))
    out, lse = (t.unflatten(0, (batch, -1)).transpose(2, 3) for t in (out, lse))
    return out.reshape(batch, heads, -1, v.shape[-1])[:, :, : band.queries], lse.reshape(batch, heads, -1)[..., : band.queries]


def _joined(parts: list[Tensor], cuts: list[list[int]]) -> Tensor:
    """The runs of a batch entry after each other, the entries below each other."""
    rest = iter(parts)
    return torch.cat([torch.cat([next(rest) for _ in entry], 1) for entry in cuts])


def _run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, cap: float | None) -> Part:
    if bias is not None:
        return hop(q, k, v, mask=Mask(bias=bias), scale=scale, cap=cap)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return v.new_zeros(*q.shape[:3], v.shape[-1]), torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)


def _sinks(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, cap: float | None) -> Part:
    """The part of the first real keys, for the queries that have them outside of their window."""
    assert mask.window is not None
    place, real = first_real(mask.keys, mask.sinks, k)  # (batch or 1, sinks)
    keys, values = (torch.take_along_dim(t, place[:, None, :, None], 2) for t in (k, v))
    row = mask.offset + torch.arange(q.shape[-2], device=q.device)
    behind = row[:, None] - place[:, None]  # (batch or 1, queries, sinks)
    seen = (behind >= mask.window if mask.causal else behind.abs() >= mask.window) & real[:, None]
    if mask.segments is not None:
        seen = seen & (mask.segments[:, row, None] == mask.segments.take_along_dim(place, 1)[:, None])
    differ = (seen != real[:, None]).any(-1).any(0).nonzero()
    mixed = int(differ.max()) + 1 if len(differ) else 0  # from there on each query sees them all
    parts = []
    if mixed:
        bias = added(seen[:, None, :mixed])
        parts.append(hop(q[:, :, :mixed], keys, values, mask=Mask(bias=bias), scale=scale, cap=cap))
    if mixed < q.shape[-2]:
        padding = None if bool(real.all()) else real.expand(len(q), -1)
        parts.append(hop(q[:, :, mixed:], keys, values, mask=Mask(keys=padding), scale=scale, cap=cap))
    return torch.cat([out for out, _ in parts], -2), torch.cat([lse for _, lse in parts], -1)


def first_real(real: Tensor | None, count: int, k: Tensor) -> tuple[Tensor, Tensor]:
    """Where the first real keys lie, and which of them there are: (batch or 1, count)."""
    if real is None:
        return torch.arange(min(count, k.shape[-2]), device=k.device)[None], torch.ones(1, 1, dtype=torch.bool, device=k.device)
    place = (~real).to(torch.int8).argsort(dim=-1, stable=True)[:, :count]
    return place, real.take_along_dim(place, 1)


def _slices(t: Tensor, band: Band, cuts: list[list[int]]) -> tuple[Tensor, ...]:
    """For each run of each entry the slices of its chunks, (heads, chunks, width, dim), without a copy of what overlaps."""
    return _Slices.apply(t, band, cuts) if writes_own_backward() else _cut(band.slices(t, 2).mT, cuts)  # type: ignore[return-value]


def _cut(t: Tensor, cuts: list[list[int]]) -> tuple[Tensor, ...]:
    entries = zip(t.chunk(len(cuts)), cuts, strict=True)
    return tuple(part.flatten(0, 1) for entry, sizes in entries for part in entry.split(sizes, 2))


class _Slices(torch.autograd.Function):
    """Overlapping slices, whose gradients are added up in a few passes."""

    @staticmethod
    def forward(ctx, t: Tensor, band: Band, cuts: list[list[int]]):
        ctx.band, ctx.cuts, ctx.shape = band, cuts, t.shape
        return _cut(band.slices(t, 2).mT, cuts)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        band, (batch, heads, _, dim) = ctx.band, ctx.shape
        steps = -(-band.width // band.size)
        total = grads[0].new_zeros(batch, heads, band.count + steps, band.size, dim)
        rest = iter(grads)
        many = batch // len(ctx.cuts)
        for number, sizes in enumerate(ctx.cuts):
            entry, start = total[number * many : (number + 1) * many], 0
            for size in sizes:
                grad = next(rest).unflatten(0, entry.shape[:2])
                for step in range(steps):
                    part = grad[..., step * band.size : (step + 1) * band.size, :]
                    entry[:, :, start + step : start + step + size, : part.shape[-2]] += part
                start += size
        before, after = band.around
        whole = total.flatten(2, 3)[:, :, : (band.count - 1) * band.size + band.width]
        return F.pad(whole, (0, 0, -before, -after)), None, None
