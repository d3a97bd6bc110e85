"""Reformer: each query attends to the keys that random rotations hash into its own bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Mask, Mechanism, Unsupported
from ..ops.ranges import Ranges, attend_ranges
from .directions import sample

BITS = 6  # of a bucket's number that one rotation gives: 64 buckets from 32 directions
ROTATIONS = 4  # for up to 2^24 buckets
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
        shelves = self._shelves(real, mask, q.shape[-2])
        with torch.no_grad():
            rounds = self._rounds(q, k, shelves, -1 if scale < 0 else 1)
        k, v = (t if shelves.key is None else t[:, :, shelves.key] for t in (k, v))
        out = attend_ranges(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), rounds, scale)
        return out.view(*q.shape[:3], v.shape[-1])

    def _shelves(self, real: Tensor, mask: Mask, queries: int) -> _Shelves:
        """Where causal, one for each number of buckets that queries ask for, with the keys up to the last of them; else one for all."""
        places = torch.arange(queries, device=real.device) + mask.offset
        if not mask.causal or self.buckets is not None:
            bits = self._bits(real.sum(-1, keepdim=True))
            return _Shelves(real, mask.causal, places, bits, bits)
        ends = (places + 1).clamp(0, real.shape[1])
        asked = self._bits(F.pad(real.cumsum(-1), (1, 0))[:, ends])  # (batch, queries)
        levels = asked.unique()
        stops = [int(ends[(asked == bits).any(0)][-1]) for bits in levels]
        key = torch.cat([torch.arange(stop, device=real.device) for stop in stops])
        return _Shelves(
            real[:, key], True, places, asked, levels.repeat_interleave(torch.tensor(stops, device=real.device))[None], key
        )

    def _rounds(self, q: Tensor, k: Tensor, shelves: _Shelves, sign: int) -> list[Ranges]:
        """What is in reach: the window, then one hash after another. (batch, heads, tokens) become (batch * heads, tokens)."""
        x = q.float() * sign  # one precision for all, so that equal inputs find equal buckets
        asked = self._hash(x, shelves.asked)
        kept = self._hash(x if self.hashed == "queries" else k.float(), shelves.kept, shelves.key)
        nowhere = torch.zeros_like(asked[0]), torch.zeros_like(kept[0])
        pairs = [(nowhere, self.window), *(((a, b), self.chunk) for a, b in zip(asked, kept, strict=True))]
        return [shelves.ranges(a, b, chunk) for (a, b), chunk in pairs]

    def _bits(self, count: Tensor) -> Tensor:
        """How many bits number the buckets of that many real keys; padding must not change it."""
        if self.buckets is not None:
            return torch.full_like(count, self.buckets.bit_length() - 1)
        sizes = self.chunk * 2 ** torch.arange(BITS * ROTATIONS, device=count.device)
        return (count[..., None] > sizes).sum(-1)

    def _hash(self, x: Tensor, bits: Tensor, key: Tensor | None = None) -> Tensor:
        """(rounds, batch, heads, tokens): the bucket in each round, argmax of [xR; -xR] for as many rotations R as the bits need.

        With `key`, those of the tokens so numbered; `bits` number the buckets of each (text, token).
        """
        assert self._directions is not None
        most, bucket = int(bits.max()), torch.zeros(1, dtype=torch.long, device=x.device)
        for number, start in enumerate(range(0, max(most, 1), BITS)):
            half = 2 ** (min(BITS, max(most - start, 1)) - 1)
            directions = self._directions[:, number, :, :half].to(x.device)
            along = x.contiguous() @ directions.flatten(1)
            along = (along if key is None else along[:, :, key]).unflatten(-1, (-1, half))  # (batch, heads, tokens, rounds, half)
            own = (bits - start).clamp(0, BITS)[:, None, :, None]
            asked = torch.arange(half, device=x.device) < 2 ** (own[..., None] - 1).clamp_min(0)  # not those of a longer text
            best = (along.abs() * asked).argmax(-1)
            negative = along.take_along_dim(best[..., None], -1)[..., 0] < 0
            size = 2**own
            bucket = bucket * size + (best + negative * (size // 2)).masked_fill(own == 0, 0)
        return bucket.movedim(-1, 0)


@dataclass(frozen=True, eq=False)
class _Shelves:
    """Keys in groups, within which they are sorted into buckets; each query looks into one group."""

    real: Tensor  # (batch or 1, keys)
    causal: bool
    place: Tensor  # (queries): the position of each
    asked: Tensor  # (batch or 1, queries or 1): the bits of the buckets' numbers, which tell the group
    kept: Tensor  # (batch or 1, keys or 1)
    key: Tensor | None = None  # (keys): which one each is, where there are several groups

    def ranges(self, asked: Tensor, kept: Tensor, chunk: int) -> Ranges:
        """The ranges that queries in the buckets `asked` have among keys in the buckets `kept`; padding is sorted to the end.

        Both are (batch, heads, tokens) and become (batch * heads, tokens).
        """
        keys, shelf = kept.shape[2], 2 ** (BITS * ROTATIONS)
        position = torch.arange(keys, device=kept.device) if self.key is None else self.key
        codes = (kept + self.kept[:, None] * shelf) * (keys + 1) + position
        codes = codes.masked_fill(~self.real[:, None], torch.iinfo(torch.long).max).flatten(0, 1)
        codes, order = codes.sort(dim=-1, stable=True)
        start = (asked + self.asked[:, None] * shelf).flatten(0, 1) * (keys + 1)
        after = torch.searchsorted(codes, start + self.place.clamp_max(keys), right=True)  # keys up to the query's own place
        count = (codes != torch.iinfo(torch.long).max).sum(-1, keepdim=True)
        if self.causal:
            low, high = torch.maximum(torch.searchsorted(codes, start), after - chunk), after
        else:
            own = (after - 1).clamp_min(0).minimum((count - 1).clamp_min(0)) // chunk
            low, high = (own - 1).clamp_min(0) * chunk, ((own + 2) * chunk).minimum(count)
        return Ranges(order, torch.minimum(low, high).int(), high.int())
