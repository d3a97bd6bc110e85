"""Landmarks: keys shared out among learned points, of which only sums are kept, merged with the near keys taken exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .hop import formula
from .merge import Part, merge

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

SPAN = 512  # tokens that look at landmarks in one step, so that what lies between stays small
FAINT = 1e-30  # a landmark that holds less than that much of a key holds none


class Learned(NamedTuple):
    """What is learned: softmax(directions y + levels) shares a key y out, queries look at sights + pull * mean of the keys held."""

    directions: Float[Tensor, "heads landmarks dim"]
    levels: Float[Tensor, "heads landmarks"]
    sights: Float[Tensor, "heads landmarks dim"]
    weights: Float[Tensor, "heads landmarks"]  # log-weights, added to the log of how many keys are held
    pull: Float[Tensor, " heads"]


class Tokens(NamedTuple):
    """One call in float32 at least, q and k times the root of the scale; what is not `real` is 0."""

    q: Float[Tensor, "batch heads queries dim"]
    k: Float[Tensor, "batch heads keys dim"]
    v: Float[Tensor, "batch heads keys width"]
    real: Bool[Tensor, "batch keys"]


class Sinks(NamedTuple):
    """The first real keys, and how many real keys there were so far."""

    k: Float[Tensor, "batch heads sinks dim"]
    v: Float[Tensor, "batch heads sinks width"]
    count: Float[Tensor, " batch"]


def landmarks(t: Tokens, learned: Learned, chunk: int, sinks: int, causal: bool) -> Float[Tensor, "batch heads queries width"]:
    """Each query sees the sinks and the keys of its own chunk and of those beside it, and landmarks that hold all other keys.

    softmax over r of (directions_r . y + levels_r) says how much of key y landmark r holds; a query sees a landmark as one key, with
    the mean value of what it holds and the log of how much that is as its log-weight: every key counts once.
    """
    queries, width = t.q.shape[2], t.v.shape[-1]
    t = padded(t, -(-max(queries, t.k.shape[2]) // chunk) * chunk)
    part, counted = nearby(t, chunk, sinks, causal)
    step = max(1, SPAN // chunk)  # split, not sliced: the backward pass of many slices is quadratic
    held = elsewhere(shared_out(t.k, t.v, counted, learned, chunk).split(step, 2), causal)
    pieces = *(x.split(step, 2) for x in (*part, t.q.unflatten(2, (-1, chunk)))), held
    out = [merge((out, lse), far(q, h, learned, width))[0] for out, lse, q, h in zip(*pieces, strict=True)]
    return torch.cat(out, 2).flatten(2, 3)[:, :, :queries]


def nearby(t: Tokens, chunk: int, sinks: int, causal: bool) -> tuple[Part, Bool[Tensor, "batch keys"]]:
    """The part of the sinks and of the chunks beside each chunk; and which keys the landmarks are to hold."""
    first, own, counts = gather_sinks(t, no_sinks(t, sinks))
    counted, chunks = t.real & ~own, t.real.shape[1] // chunk
    if not causal:
        counts = first.count[:, None].expand_as(counts)
    return near(t.q.unflatten(2, (chunks, chunk)), t._replace(real=counted), first, counts, causal), counted


def elsewhere(sums: Sequence[Tensor], causal: bool) -> Iterator[Tensor]:
    """For each chunk the sums of all that are not beside it, in the causal form of those before; in pieces as the sums are."""
    if causal:
        return behind(sums)
    ahead = [held.flip(2) for held in behind([piece.flip(2) for piece in reversed(sums)])]
    return (one + other for one, other in zip(behind(sums), reversed(ahead), strict=True))


def behind(sums: Sequence[Tensor]) -> Iterator[Tensor]:
    """For each chunk the sums of all before the one before it: adding up alone, so that nothing cancels."""
    start = last = torch.zeros_like(sums[0][:, :, :1])
    for piece in sums:
        running = torch.cat([start, last, piece], 2).cumsum(2)
        yield running[:, :, :-2]
        start, last = running[:, :, -2:-1], piece[:, :, -1:]


def tokens(q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float) -> Tokens:
    """One call; `keys` is False at padding, of which nothing is left, not even a NaN."""
    if scale < 0:
        raise ValueError(f"scale is {scale}; landmarks need one of at least 0 (1/sqrt(dim) is usual).")
    high = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(high) * scale**0.5, k.to(high) * scale**0.5, v.to(high)
    if keys is None:
        return Tokens(q, k, v, torch.ones(len(k), k.shape[2], dtype=torch.bool, device=k.device))
    hidden = ~keys[:, None, :, None]
    return Tokens(q, k.masked_fill(hidden, 0), v.masked_fill(hidden, 0), keys.expand(len(k), -1))


def padded(t: Tokens, length: int) -> Tokens:
    """With padding behind up to that length."""
    q, k, v = (F.pad(s, (0, 0, 0, length - s.shape[2])) for s in t[:3])
    return Tokens(q, k, v, F.pad(t.real, (0, length - t.real.shape[1]), value=False))


def no_sinks(t: Tokens, number: int) -> Sinks:
    """Room for that many, before any token is read."""
    k, v = (s.new_zeros(*s.shape[:2], number, s.shape[-1]) for s in (t.k, t.v))
    return Sinks(k, v, k.new_zeros(len(k)))


def gather_sinks(t: Tokens, before: Sinks) -> tuple[Sinks, Tensor, Tensor]:
    """The sinks with these tokens read, which of the tokens are sinks, how many real keys there are up to each (batch, keys)."""
    counts = before.count[:, None] + t.real.to(before.count.dtype).cumsum(-1)
    places = torch.arange(1, before.k.shape[2] + 1, device=counts.device)
    slots = (counts[:, None] == places[:, None]) & t.real[:, None]  # (batch, sinks, keys)
    chosen = slots[:, None].to(t.k.dtype)
    return Sinks(before.k + chosen @ t.k, before.v + chosen @ t.v, counts[:, -1]), slots.any(1), counts


def shared_out(k: Tensor, v: Tensor, counted: Tensor, learned: Learned, chunk: int) -> Tensor:
    """What each landmark holds of each chunk: sums of values, of ones and of keys (batch, heads, chunks, landmarks, width + 1 + dim)."""
    shares = torch.softmax(k @ learned.directions.mT + learned.levels[:, None], -1)  # (batch, heads, keys, landmarks)
    shares, cut = shares * counted[:, None, :, None].to(shares.dtype), (k.shape[2] // chunk, chunk)
    held = torch.cat([v, torch.ones_like(v[..., :1]), k], -1).unflatten(2, cut)
    return shares.unflatten(2, cut).mT @ held


def far(q: Tensor, held: Tensor, learned: Learned, width: int) -> Part:
    """A hop of queries (batch, heads, chunks, chunk, dim) over the landmarks of each chunk."""
    count = held[..., width]
    empty = count < FAINT
    means = held / count.masked_fill(empty, 1)[..., None]
    sights = learned.sights[:, None] + learned.pull[:, None, None, None] * means[..., width + 1 :]
    bias = torch.log(count.masked_fill(empty, 1)) + learned.weights[:, None]
    return formula(q, sights, means[..., :width], bias.masked_fill(empty, -torch.inf)[..., None, :], 1.0, None)


def near(q: Tensor, t: Tokens, first: Sinks, counts: Tensor, causal: bool) -> Part:
    """A hop of the last chunks of queries over the chunks beside each and over the sinks; `counts` are the sinks that each may see."""
    (chunks, chunk), sides = q.shape[2:4], (-1, 0) if causal else (-1, 0, 1)
    k, v = (
        torch.cat([beside(x, chunk, sides)[:, :, -chunks:], s[:, :, None].expand(-1, -1, chunks, -1, -1)], 3)
        for x, s in ((t.k, first.k), (t.v, first.v))
    )
    seen = beside(t.real[:, None, :, None], chunk, sides)[:, :, -chunks:].mT.expand(-1, -1, -1, chunk, -1)
    if causal:
        seen = seen & torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril_(chunk)
    there = counts.unflatten(1, (chunks, chunk))[..., None] > torch.arange(first.k.shape[2], device=counts.device)
    added = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~torch.cat([seen, there[:, None]], -1), -torch.inf)
    return formula(q, k, v, added, 1.0, None)


def beside(t: Tensor, chunk: int, sides: tuple[int, ...]) -> Tensor:
    """Of tokens (batch, heads, tokens, dim) those of the chunks beside each chunk; blank beyond the ends."""
    t = t.unflatten(2, (-1, chunk))
    blank = torch.zeros_like(t[:, :, :1])
    moved = {-1: torch.cat([blank, t[:, :, :-1]], 2), 0: t, 1: torch.cat([t[:, :, 1:], blank], 2)}
    return torch.cat([moved[side] for side in sides], 3)
