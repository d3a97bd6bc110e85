"""Causal clustered attention read from left to right: the stretches are clustered when they are complete, a new token reads few keys.

All keys of the past are kept, since any cluster may be read key by key. The work of a token does not grow with them: its window, the
sinks, what its group chose, and the averages. Texts of a batch may have read different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..state import State
from .clustered_causal import Reach
from .clusters import cluster_means, moment, nearest_means, rows, spend

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True, eq=False)
class Past(State):
    """What was read: complete windows after the sinks, the clusters of their stretches, the present window, what its group chose."""

    k: Float[Tensor, "batch key_heads room dim"]
    v: Float[Tensor, "batch key_heads room width"]
    order: Int[Tensor, "batch heads room"]  # the tokens of each stretch, cluster by cluster
    closed: Int[Tensor, " batch"]  # how many tokens of the room are there
    start: Int[Tensor, "batch heads clusters"]  # where a cluster's tokens begin in that order
    sizes: Int[Tensor, "batch heads clusters"]  # those of level 0 first; 0 where there is no such stretch
    centres: Float[Tensor, "batch heads clusters dim"]
    means: Float[Tensor, "batch heads clusters width"]
    new_k: Float[Tensor, "batch key_heads window dim"]
    new_v: Float[Tensor, "batch key_heads window width"]
    new_q: Float[Tensor, "batch heads window dim"]
    moments: Float[Tensor, "batch heads levels dim dim"]  # of the queries of the stretches that are there
    opened: Int[Tensor, " batch"]  # how many tokens of the present window are there
    near_k: Float[Tensor, "batch heads sinks+exact dim"]
    near_v: Float[Tensor, "batch heads sinks+exact width"]
    near: Float[Tensor, "batch heads sinks+exact"]  # 0, or -inf where there is no such key
    far: Float[Tensor, "batch heads clusters"]  # log-weights of the averages, -inf of those read key by key


class New(NamedTuple):
    """Tokens to read; the first `counts` of each batch entry are real."""

    q: Float[Tensor, "batch heads tokens dim"]  # in float32 at least
    k: Float[Tensor, "batch key_heads tokens dim"]
    v: Float[Tensor, "batch key_heads tokens width"]
    counts: Int[Tensor, " batch"]


def nothing(new: New, reach: Reach) -> Past:
    """The state before any token."""
    batch, heads, dim, width = *new.q.shape[:2], new.k.shape[-1], new.v.shape[-1]
    count, room, key_heads = torch.zeros_like(new.counts), max(reach.sinks, 1), new.k.shape[1]
    clusters, window, near = reach.clusters_of(reach.window), max(reach.window, reach.sinks), reach.sinks + reach.exact

    def zeros(like: Tensor, *size: int) -> Tensor:
        return like.new_zeros(batch, *size)

    return Past(
        *(zeros(new.k, key_heads, room, dim), zeros(new.v, key_heads, room, width), zeros(count, heads, room), count),
        *(zeros(count, heads, clusters), zeros(count, heads, clusters)),
        *(zeros(new.q, heads, clusters, dim), zeros(new.q, heads, clusters, width)),
        *(zeros(new.k, key_heads, window, dim), zeros(new.v, key_heads, window, width)),
        *(zeros(new.q, heads, window, dim), zeros(new.q, heads, 1, dim, dim).float(), count),
        *(zeros(new.k, heads, near, dim), zeros(new.v, heads, near, width)),
        *(zeros(new.q, heads, size) - torch.inf for size in (near, clusters)),
    )


def read(new: New, past: Past, reach: Reach, scale: float) -> tuple[Float[Tensor, "batch heads tokens width"], Past]:
    """Read on, a group of queries at a time: what each sees, 0 at padding, and the state behind them.

    >>> from heedful.ops.clustered_causal import clustered_causal
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> reach, start = Reach(window=16, sinks=2, clusters=8, exact=24, rounds=1, group=4), New(q, k, v, torch.tensor([100]))
    >>> found, past = read(start, nothing(start, reach), reach, scale=1.0)
    >>> torch.allclose(found[0], clustered_causal(q[0], k[0], v[0], reach, scale=1.0), atol=1e-5)
    True
    >>> past.closed.tolist(), past.opened.tolist()  # six windows after the sinks
    ([98], [2])
    """
    past, done = _with_room(past, new.counts, reach), torch.zeros_like(new.counts)
    out = new.q.new_zeros(*new.q.shape[:3], new.v.shape[-1])
    while bool((done < new.counts).any()):
        past = _close_full(past, reach)
        past = _choose(_at(new.q, done[:, None])[:, :, 0], past, reach, scale)
        until = torch.where(past.closed < reach.sinks, reach.sinks - past.opened, reach.group - past.opened % reach.group)
        size = torch.minimum(until, new.counts - done)
        number = torch.arange(int(size.max()), device=done.device)
        entry, token = (number < size[:, None]).nonzero(as_tuple=True)
        source, target = done[entry] + token, past.opened[entry] + token
        kept = past.new_k.clone(), past.new_v.clone(), past.new_q.clone()
        for held, given in zip(kept, (new.k, new.v, new.q), strict=True):
            held[entry, :, target] = given[entry, :, source]
        past = replace(past, new_k=kept[0], new_v=kept[1], new_q=kept[2])
        found = _look(_at(new.q, done[:, None] + number), past, past.opened[:, None] + number, scale)
        out[entry, :, source] = found[entry, :, token]
        past, done = replace(past, opened=past.opened + size), done + size
    return out, past


def _at(x: Tensor, index: Tensor) -> Tensor:
    """These tokens of each batch entry, the last one for those after it."""
    return x.take_along_dim(index.clamp_max(x.shape[2] - 1)[:, None, :, None], 2)


def _with_room(past: Past, counts: Tensor, reach: Reach) -> Past:
    """With tensors of its own to write to, large enough, where a window will be closed."""
    limit = torch.where(past.closed < reach.sinks, reach.sinks, reach.window)
    if not bool(((past.opened + counts > limit) | (past.opened == limit)).any()):
        return past
    more = max(0, int((past.closed + past.opened + counts).max()) - past.k.shape[2])
    k, v = (F.pad(t, (0, 0, 0, more)) for t in (past.k, past.v))
    return replace(past, k=k, v=v, order=F.pad(past.order, (0, more)))


def _close_full(past: Past, reach: Reach) -> Past:
    """Where the present window, or the sinks, are complete: begin another one."""
    before, full = past.closed, past.opened == torch.where(past.closed < reach.sinks, reach.sinks, reach.window)
    for begin in set(before[full].tolist()):  # texts of equal length together
        entries = (full & (before == begin)).nonzero()[:, 0]
        size = reach.sinks if begin < reach.sinks else reach.window
        past.k[entries, :, begin : begin + size] = past.new_k[entries, :, :size]
        past.v[entries, :, begin : begin + size] = past.new_v[entries, :, :size]
        opened, closed = past.opened.index_fill(0, entries, 0), past.closed.index_fill(0, entries, begin + size)
        past = replace(past, opened=opened, closed=closed)
        if begin >= reach.sinks:
            past = _cluster(past, entries, begin + size, reach)
    return past


def _cluster(past: Past, entries: Tensor, end: int, reach: Reach) -> Past:
    """Make the stretch that now ends: the last window, and the shorter stretches before it, in one; as 1 is added to a binary number."""
    windows = (end - reach.sinks) // reach.window
    level = (windows & -windows).bit_length() - 1
    size = reach.window << level
    start, clusters = end - size, reach.clusters_of(size)
    below = sum(reach.clusters_of(reach.window << lower) for lower in range(level))
    past, metric = _met(past, entries, level, reach)
    k, v = (_spread(t[entries, :, start:end], past.order.shape[1]).flatten(0, 1) for t in (past.k, past.v))
    label, sizes = nearest_means(k, clusters, reach.rounds, metric=metric)
    heads = (len(entries), past.order.shape[1])
    past.order[entries, :, start:end] = label.argsort(dim=-1, stable=True).unflatten(0, heads) + start
    made = (start + sizes.cumsum(-1) - sizes, sizes, *(cluster_means(t.to(past.centres.dtype), label, sizes) for t in (k, v)))
    held = _wider(past, below + clusters)
    held.sizes[entries, :, :below] = 0
    for tensor, value in zip((held.start, held.sizes, held.centres, held.means), made, strict=True):
        tensor[entries, :, below : below + clusters] = value.unflatten(0, heads)
    return held


def _met(past: Past, entries: Tensor, level: int, reach: Reach) -> tuple[Past, Tensor]:
    """With the moment of the queries of the stretch that now ends, which is the sum of those of its parts; and that moment."""
    moments = F.pad(past.moments, (0, 0, 0, 0, 0, max(0, level + 1 - past.moments.shape[2])))
    q = past.new_q[entries, :, : reach.window].float()
    total = moment(q.flatten(0, 1)).unflatten(0, q.shape[:2])
    for lower in range(level):
        total = moments[entries, :, lower] + total
    moments = moments.clone()
    moments[entries, :, level] = total
    return replace(past, moments=moments), total.flatten(0, 1)


def _wider(past: Past, clusters: int) -> Past:
    """With new tensors for at least so many clusters."""
    more = max(0, clusters - past.sizes.shape[-1])
    start, sizes = (F.pad(t, (0, more)) for t in (past.start, past.sizes))
    centres, means = (F.pad(t, (0, 0, 0, more)) for t in (past.centres, past.means))
    return replace(past, start=start, sizes=sizes, centres=centres, means=means, far=F.pad(past.far, (0, more), value=-torch.inf))


def _choose(q: Float[Tensor, "batch heads dim"], past: Past, reach: Reach, scale: float) -> Past:
    """Where a group begins: by its first query, what the whole group reads key by key."""
    begins = (past.closed >= reach.sinks) & (past.opened % reach.group == 0)
    if not bool(begins.any()):
        return past
    shape, sizes = q.shape[:2], past.sizes.flatten(0, 1)
    scores = torch.linalg.vecdot(past.centres.float(), q.float()[:, :, None]).flatten(0, 1) * scale
    chosen, which, offset, used = spend(scores.masked_fill(sizes == 0, -torch.inf), sizes, reach.exact)
    place = past.start.flatten(0, 1).gather(-1, which) + offset
    picked = past.order.flatten(0, 1).gather(-1, place.masked_fill(~used, 0))
    first = torch.arange(reach.sinks, device=q.device).expand(len(picked), -1)
    picked = torch.cat([first, picked], -1)
    real = F.pad(used, (reach.sinks, 0), value=True)
    near = torch.zeros_like(real, dtype=q.dtype).masked_fill_(~real, -torch.inf)
    far = sizes.to(q.dtype).log().masked_fill(chosen, -torch.inf)
    together = picked.view(len(q) * past.k.shape[1], -1)  # the heads that share keys
    near_k, near_v = (rows(t.flatten(0, 1), together) for t in (past.k, past.v))
    return _where(begins, past, near_k=near_k, near_v=near_v, near=near, far=far, shape=shape)


def _where(begins: Bool[Tensor, " batch"], past: Past, shape: torch.Size, **found: Tensor) -> Past:
    """With what was found for the batch entries where a group begins."""
    for name, tensor in found.items():
        former = getattr(past, name)
        tensor = tensor.reshape(*shape, *former.shape[2:])
        found[name] = torch.where(begins.view(-1, *[1] * (former.ndim - 1)), tensor, former)
    return replace(past, **found)


def _look(q: Float[Tensor, "batch heads queries dim"], past: Past, place: Int[Tensor, "batch queries"], scale: float) -> Tensor:
    """What queries at these places of the present window see: of it what is not after them, the near keys, and the averages."""
    heads = q.shape[1]
    keys = (_spread(past.new_k, heads), past.near_k, past.centres)
    values = (_spread(past.new_v, heads), past.near_v, past.means)
    after = torch.arange(past.new_k.shape[2], device=q.device) > place[..., None]
    own = torch.zeros_like(after, dtype=q.dtype).masked_fill_(after, -torch.inf)[:, None]
    added = (own, past.near[:, :, None], past.far[:, :, None])
    logits = [q @ k.to(q.dtype).mT * scale + bias for k, bias in zip(keys, added, strict=True)]
    weights = torch.cat(logits, -1).softmax(-1).split([k.shape[2] for k in keys], -1)
    return sum(weight @ value.to(q.dtype) for weight, value in zip(weights, values, strict=True))  # type: ignore[return-value]


def _spread(x: Tensor, heads: int) -> Tensor:
    """Key heads, one for each query head."""
    return x.repeat_interleave(heads // x.shape[1], 1)
