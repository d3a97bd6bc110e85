"""The truth: attention as one dense float64 matrix, and a table of calls to compare on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.attention import Capture, Mask, Rule
from heedful.ops.profile import WINDOWS

BATCH, HEADS, SHARED, DIM, WIDTH = 2, 4, 2, 8, 6  # key heads are HEADS / SHARED


def padding(keys: int, left: bool = False) -> Tensor:
    """Two texts, the first of about half the length."""
    real = torch.ones(BATCH, keys, dtype=torch.bool)
    real[0, keys // 2 + 1 :] = False
    return real.flip(-1) if left else real


def segments(keys: int) -> Tensor:
    return torch.stack([torch.arange(keys) // 5, torch.arange(keys) // 9])


def biased(queries: int, keys: int, seed: int = 3) -> Tensor:
    return torch.randn(1, HEADS, queries, keys, generator=torch.Generator().manual_seed(seed))


def same_parity(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The first text's tokens see those of their own parity, the second's all but those of other thirds."""
    return torch.where(batch == 0, (query - key) % 2 == 0, (query - key) % 3 == 0)


MASKS: dict[str, Callable[[int, int], Mask]] = {
    "everything": lambda n, m: Mask(),
    "causal": lambda n, m: Mask(causal=True),
    "padding right": lambda n, m: Mask(keys=padding(m)),
    "padding left": lambda n, m: Mask(keys=padding(m, left=True)),
    "causal padding right": lambda n, m: Mask(causal=True, keys=padding(m)),
    "causal padding left": lambda n, m: Mask(causal=True, keys=padding(m, left=True)),
    "window": lambda n, m: Mask(window=4),
    "causal window sinks": lambda n, m: Mask(causal=True, window=4, sinks=2),
    "window sinks padding left": lambda n, m: Mask(window=3, sinks=2, keys=padding(m, left=True)),
    "bias": lambda n, m: Mask(bias=biased(n, m)),
    "bias of keys, causal": lambda n, m: Mask(causal=True, bias=biased(1, m)),
    "bias that hides": lambda n, m: Mask(bias=biased(n, m).masked_fill(biased(n, m, 5) > 0, torch.finfo(torch.float32).min)),
    "rule": lambda n, m: Mask(rule=Rule(same_parity, BATCH)),
    "rule padding causal": lambda n, m: Mask(causal=True, keys=padding(m), rule=Rule(same_parity, BATCH)),
}
SQUARE: dict[str, Callable[[int, int], Mask]] = {  # these need one key for each query
    "segments": lambda n, m: Mask(segments=segments(m)),
    "causal segments padding": lambda n, m: Mask(causal=True, segments=segments(m), keys=padding(m)),
}
CACHED: dict[str, Callable[[int, int], Mask]] = {  # queries that follow m - n cached keys
    "cache causal": lambda n, m: Mask(causal=True, offset=m - n),
    "cache causal padding left": lambda n, m: Mask(causal=True, offset=m - n, keys=padding(m, left=True)),
    "cache window sinks": lambda n, m: Mask(causal=True, offset=m - n, window=5, sinks=1),
    "cache segments": lambda n, m: Mask(causal=True, offset=m - n, segments=segments(m)),
}
SHAPES = [(17, 17), (1, 1), (9, 21), (1, 33), (40, 40)]


def calls() -> list:
    """(name, mask, queries, keys) of every mask on every shape it can take."""
    found = []
    for n, m in SHAPES:
        fitting = MASKS | (SQUARE if n == m else CACHED)
        found += [(f"{name} {n}x{m}", make(n, m), n, m) for name, make in fitting.items()]
    return found


def tensors(queries: int, keys: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, queries, DIM), (HEADS // SHARED, keys, DIM), (HEADS // SHARED, keys, WIDTH))
    q, k, v = (torch.randn(BATCH, *shape, generator=g, dtype=torch.float64) for shape in shapes)
    return q.to(dtype), (k + 1).to(dtype), (v + 2).to(dtype)


def spread(t: Tensor, heads: int) -> Tensor:
    return t.repeat_interleave(heads // t.shape[1], 1)


def logits(q: Tensor, k: Tensor, mask: Mask, scale: float, cap: float | None = None) -> Tensor:
    """In the dtype of q, mask and all."""
    found = q @ spread(k, q.shape[1]).mT * scale
    found = found if cap is None else cap * torch.tanh(found / cap)
    return found + mask.dense(q.shape[-2], k.shape[-2]).to(q.dtype)


def hop(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Mask, scale: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in the dtype given; queries that see nothing get 0 and -inf."""
    found = logits(q, k, mask, scale, cap)
    found = found if bias is None else found + bias[..., None, :]
    blind = (found.detach() == -torch.inf).all(-1)
    safe = found.masked_fill(blind[..., None], 0)
    weights = safe.softmax(-1).masked_fill(blind[..., None], 0)
    return weights @ spread(v, q.shape[1]), safe.logsumexp(-1).masked_fill(blind, -torch.inf)


def probabilities(c: Capture) -> tuple[Tensor, Tensor]:
    """P of a capture and the lse, float64; rows that see nothing are 0."""
    found = logits(c.q.double(), c.k.double(), c.mask, c.scale, c.cap)
    every = found if c.null is None else torch.cat([found, c.null.double()[None, :, None, None].expand(*found.shape[:3], 1)], -1)
    blind = (found.detach().amax(-1) < -1e30)[..., None]
    mass = every.masked_fill(blind, 0).softmax(-1)[..., : found.shape[-1]].masked_fill(blind, 0)  # safe to differentiate
    return mass, every.logsumexp(-1)


def moved(c: Capture) -> Tensor:
    """|d o_i / d k_j|^2, (batch, heads, queries, keys)."""
    p, _ = probabilities(c)
    q, k, v = c.q.double(), spread(c.k, c.q.shape[1]).double(), spread(c.v, c.q.shape[1]).double()
    slope = torch.ones_like(p) if c.cap is None else 1 - torch.tanh(q @ k.mT * c.scale / c.cap).square()
    gap = (v[:, :, None] - (p @ v)[:, :, :, None]).square().sum(-1)
    return (c.scale * p * slope).square() * q.square().sum(-1, keepdim=True) * gap


def rows(c: Capture) -> dict[str, Tensor]:
    """The row profile of all queries."""
    p, lse = probabilities(c)
    place = torch.arange(p.shape[-2]) + c.mask.offset
    gap = (place[:, None] - torch.arange(p.shape[-1])).abs()
    lost = 0 if c.null is None else torch.special.entr((c.null.double()[:, None] - lse).exp())
    first = torch.zeros(len(p), dtype=torch.long) if c.mask.keys is None else c.mask.keys.int().argmax(-1)
    return {
        "lse": lse,
        "entropy": torch.special.entr(p).sum(-1) + lost,
        "peak": p.amax(-1),
        "squared": p.square().sum(-1),
        "distance": (p * gap).sum(-1),
        "sink": p.take_along_dim(first.view(-1, 1, 1, 1), -1)[..., 0],
        "largest": logits(c.q.double(), c.k.double(), c.mask, c.scale, c.cap).amax(-1),
        "near": torch.stack([(p * (gap < w)).sum(-1) for w in WINDOWS], -1),
    }
