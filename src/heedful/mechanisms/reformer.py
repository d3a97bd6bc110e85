"""Reformer: each query attends to the keys that random rotations hash into its own bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Mask, Mechanism, Unsupported
from ..ops.ranges import Ranges, attend_ranges
from .directions import sample

BITS = 6  # of a bucket's number that one rotation gives: 64 buckets from 32 directions
ROTATIONS = 4  # for up to 2^24 buckets
LEAST = 16  # places of a chunk as computed
HASHED = ("both", "queries")


@dataclass(eq=False)
class Reformer(Mechanism):
    """Exact attention over the keys that share a bucket with the query in some round, in time near linear in the tokens.

    In each round keys are sorted by bucket, then position, and cut into chunks. A query sees its chunk and the ones beside it; where
    causal, the `chunk` last keys of its own bucket, hashed into as many buckets as the tokens up to it ask for: no later token decides
    what it sees, not even by being there. Less than `window` tokens away keys are always in reach: where causal nobody sees nothing;
    bidirectional chunks take in neighbouring buckets, so that nobody does either.

    >>> q, k, v = torch.randn(3, 1, 2, 200, 16)
    >>> out = Reformer(rounds=4, chunk=16)(q, k, v, Mask(causal=True))
    >>> short = Reformer(chunk=64)(q[:, :, :64], k[:, :, :64], v[:, :, :64])  # one chunk holds all
    >>> torch.allclose(short, ((q @ k.mT)[:, :, :64, :64] / 4).softmax(-1) @ v[:, :, :64], atol=1e-5)
    True

    Kitaev, Kaiser and Levskaya 2020, Reformer: The Efficient Transformer.
    """

    rounds: int = 4
    chunk: int = 32
    window: int = 16  # about so near, keys are in reach in any case; 1, as in the paper, is no more than the own token where causal
    buckets: int | None = None  # a power of two; None: one for each chunk of the real keys, where causal of those up to the query
    hashed: str = "both"  # or queries: a key takes the bucket of its own token's query, as where keys are the queries
    seed: int = 0

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "keys", "cross"})

    def __post_init__(self):
        for name in ("rounds", "chunk", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        if self.buckets is not None and (not isinstance(self.buckets, int) or self.buckets < 1 or self.buckets.bit_count() != 1):
            raise ValueError(f"buckets is {self.buckets!r}; it must be a power of two, or None for one bucket a chunk.")
        if self.hashed not in HASHED:
            raise ValueError(f"hashed is {self.hashed!r}; it must be one of {', '.join(HASHED)}.")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number.")
        self._directions: Tensor | None = None  # (dim, rotations, rounds, directions): the settings tell them, so not saved

    def prepare(self, heads: int, head_dim: int) -> None:
        if self._directions is None or len(self._directions) != head_dim:
            shape = (ROTATIONS, self.rounds, 2 ** (BITS - 1), head_dim)
            self._directions = sample("iid", shape[0] * shape[1] * shape[2], head_dim, self.seed).view(shape).permute(3, 0, 1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        if self.hashed == "queries" and (q.shape[-2] != k.shape[-2] or mask.offset):
            raise Unsupported(f"Reformer(hashed='queries') needs each key's own query among {q.shape[-2]}; use hashed='both'.")
        real = torch.ones(1, k.shape[-2], dtype=torch.bool, device=q.device) if mask.keys is None else mask.keys
        if mask.keys is not None:
            k, v = (t.masked_fill(~real[:, None, :, None], 0) for t in (k, v))
        if mask.causal and self.buckets is None:
            return self._growing((q, k, v), real, mask.offset, scale)
        return self._among((q, k, v), _Places(real, mask.causal, mask.offset), self._bits(real.sum(-1)), scale)

    def _growing(self, qkv: tuple[Tensor, ...], real: Tensor, offset: int, scale: float) -> Tensor:
        """The causal form: queries that ask for equally many buckets go together, each time among the keys up to the last of them."""
        q, k, v = qkv
        ends = (torch.arange(q.shape[2], device=q.device) + offset + 1).clamp(0, k.shape[2])
        asked = self._bits(F.pad(real.cumsum(-1), (1, 0))[:, ends])  # (batch, queries)
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        for bits in asked.unique():
            own = asked == bits
            places = own.any(0).nonzero()[:, 0]
            start, stop = int(places[0]), int(places[-1]) + 1
            near = slice(0, max(0, stop + offset))
            here = _Places(real[:, near], True, offset + start, start)
            found = self._among((q[:, :, :stop], k[:, :, near], v[:, :, near]), here, bits.expand(len(own)), scale)
            found = found.masked_fill(~own[:, None, start:stop, None], 0)  # in a text of another length they ask for others
            out = out + F.pad(found, (0, 0, start, q.shape[2] - stop))
        return out

    def _among(self, qkv: tuple[Tensor, ...], places: _Places, bits: Tensor, scale: float) -> Tensor:
        """Each query from `places.start` on among the keys in its bucket; `bits` number the buckets of each text."""
        (q, k, v), start = qkv, places.start
        with torch.no_grad():
            rounds = self._rounds(q, k, places, bits, scale)
        out = attend_ranges(q[:, :, start:].flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), rounds, scale)
        return out.view(*q.shape[:2], q.shape[2] - start, v.shape[-1])

    def _rounds(self, q: Tensor, k: Tensor, places: _Places, bits: Tensor, scale: float) -> list[Ranges]:
        """What is in reach: the window, then one hash after another. (batch, heads, tokens) become (batch * heads, tokens)."""
        x = q.float() * (-1 if scale < 0 else 1)  # one precision for all, so that equal inputs find equal buckets
        bits, places = bits.expand(len(q)), places.of(*q.shape[:2])
        asked = self._hash(x if self.hashed == "queries" else x[:, :, places.start :], bits)
        kept = asked if self.hashed == "queries" else self._hash(k.float(), bits)
        asked = asked[..., asked.shape[-1] - (q.shape[2] - places.start) :]
        nowhere = torch.zeros_like(asked[0]), torch.zeros_like(kept[0])
        pairs = [(nowhere, self.window), *(((a, b), self.chunk) for a, b in zip(asked, kept, strict=True))]
        return [places.ranges(a.flatten(0, 1), b.flatten(0, 1), chunk) for (a, b), chunk in pairs]

    def _bits(self, count: Tensor) -> Tensor:
        """How many bits number the buckets of that many real keys; padding must not change it."""
        if self.buckets is not None:
            return torch.full_like(count, self.buckets.bit_length() - 1)
        sizes = self.chunk * 2 ** torch.arange(BITS * ROTATIONS, device=count.device)
        return (count[..., None] > sizes).sum(-1)

    def _hash(self, x: Tensor, bits: Tensor) -> Tensor:
        """(rounds, batch, heads, tokens): the bucket in each round, argmax of [xR; -xR] for as many rotations R as the bits need."""
        assert self._directions is not None
        most, bucket = int(bits.max()), torch.zeros(1, dtype=torch.long, device=x.device)
        for number, start in enumerate(range(0, max(most, 1), BITS)):
            half = 2 ** (min(BITS, max(most - start, 1)) - 1)
            directions = self._directions[:, number, :, :half].to(x.device)
            along = (x.contiguous() @ directions.flatten(1)).unflatten(-1, (-1, half))  # (batch, heads, tokens, rounds, half)
            own = (bits - start).clamp(0, BITS).view(-1, 1, 1, 1)
            spare = torch.arange(half, device=x.device) >= 2 ** (own[..., None] - 1).clamp_min(0.5)  # beyond a shorter text's
            best = along.abs().masked_fill_(spare, -1).argmax(-1)
            negative = along.take_along_dim(best[..., None], -1)[..., 0] < 0
            size = 2**own
            bucket = bucket * size + (best + negative * (size // 2)).masked_fill(own == 0, 0)
        return bucket.movedim(-1, 0)


@dataclass(frozen=True, eq=False)
class _Places:
    """Buckets made ranges of sorted keys."""

    real: Tensor  # (many, keys)
    causal: bool
    offset: int  # the position of the first query looked at
    start: int = 0  # which query that is

    def of(self, batch: int, heads: int) -> _Places:
        """The same for each of (batch * heads)."""
        return replace(self, real=self.real.expand(batch, -1).repeat_interleave(heads, 0))

    def ranges(self, asked: Tensor, kept: Tensor, chunk: int) -> Ranges:
        """The ranges that queries in the buckets `asked` have among keys in the buckets `kept`; padding is sorted to the end."""
        keys, queries = kept.shape[1], asked.shape[1]
        position = torch.arange(keys, device=kept.device)
        codes = (kept * (keys + 1) + position).masked_fill(~self.real, torch.iinfo(torch.long).max)
        codes, order = codes.sort(dim=-1, stable=True)
        mine = (torch.arange(queries, device=kept.device) + self.offset).clamp_max(keys)
        after = torch.searchsorted(codes, asked * (keys + 1) + mine, right=True)  # keys up to the query's own place
        count = self.real.sum(-1, keepdim=True)
        size = chunk * -(-LEAST // chunk)  # as computed: whole chunks
        if self.causal:
            first = torch.searchsorted(codes, asked * (keys + 1))
            low, high, margin = torch.maximum(first, after - chunk), after, (chunk - 1, 0)
            home = (after - 1).clamp_min(0) // size
        else:
            own = (after - 1).clamp_min(0).minimum((count - 1).clamp_min(0)) // chunk
            low, high, margin = (own - 1).clamp_min(0) * chunk, ((own + 2) * chunk).minimum(count), (chunk, chunk)
            home = own * chunk // size
        low, high = torch.minimum(low, high).int(), high.int()
        return Ranges(order, low, high, home, size, margin)
