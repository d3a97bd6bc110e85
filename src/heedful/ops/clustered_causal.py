"""Causal clustered attention: a window and the best past clusters key by key, the rest of the past as averages; no future anywhere.

The past of a window is cut as a number is into powers of two: stretches of 1, 2, 4... windows, the longest first, so that each is clustered
once when it is complete, and a query meets few of them however long the text is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mask import Mask
from .clustered import exactly
from .clusters import cluster_means, learns, means_in_order, moment, nearest_means, rows, spend
from .hop import hop
from .merge import Part, merge

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

CAUSAL = Mask(causal=True)
PER_WINDOW = 4  # clusters of a stretch of one window


class Reach(NamedTuple):
    """How much a query may read."""

    window: int  # tokens that one stretch has at least; a query reads its own window's
    sinks: int  # first tokens that every query reads
    clusters: int  # averages of a stretch at most
    exact: int  # keys of the best clusters
    rounds: int  # of Lloyd's algorithm
    group: int  # neighbouring queries that choose together; a divisor of the window

    def clusters_of(self, tokens: int) -> int:
        """A stretch's clusters: four for each window, unless that is too many."""
        return min(self.clusters, PER_WINDOW * tokens // self.window)


class Level(NamedTuple):
    """The stretches of one length, clustered."""

    place: Int[Tensor, "stretches tokens"]  # their tokens
    label: Int[Tensor, "many*stretches tokens"]
    sizes: Int[Tensor, "many*stretches clusters"]


class Table(NamedTuple):
    """All clusters of all levels in one row, and which of them each window sees."""

    order: Int[Tensor, "many members"]  # the tokens, cluster by cluster
    member: Int[Tensor, "many members"]  # the cluster of each of them
    start: Int[Tensor, "many clusters"]  # where a cluster's begin in that order
    sizes: Int[Tensor, "many clusters"]
    seen: Int[Tensor, "windows visible"]  # clusters
    there: Bool[Tensor, "windows visible"]  # whether there is such a one


def clustered_causal(
    q: Float[Tensor, "many tokens dim"],
    k: Float[Tensor, "many tokens dim"],
    v: Float[Tensor, "many tokens width"],
    reach: Reach,
    scale: float,
) -> Float[Tensor, "many tokens width"]:
    """Attend causally.

    >>> q, k = torch.randn(2, 300, 8), torch.randn(2, 5, 8).repeat(1, 60, 1) + 0.1 * torch.randn(2, 300, 8)  # keys of 5 kinds
    >>> exact = hop(q[:, None], k[:, None], k[:, None], mask=CAUSAL, scale=1.0)[0][:, 0]
    >>> found = clustered_causal(q, k, k, Reach(window=32, sinks=2, clusters=16, exact=48, rounds=1, group=8), scale=1.0)
    >>> float((found - exact).norm() / exact.norm()) < 0.1
    True
    """
    many, tokens, _ = q.shape
    window, lead = reach.window, -(-reach.sinks // reach.window)  # the sinks fill windows of their own, from behind
    room = lead * window - reach.sinks
    q, k, v = (F.pad(t, (0, 0, room, -(room + tokens) % window)) for t in (q, k, v))
    grouped = q.reshape(many * (q.shape[1] // window), -1, reach.group, q.shape[-1])  # (many * windows, groups, group, dim)
    own_q, own_k, own_v = (t.unflatten(1, (-1, window)) for t in (q, k, v))
    parts = [own(own_q, own_k, own_v, room, scale, reach.group)]
    picked, real = sinks_of(grouped, many, room, reach)
    table = remember(q.detach().float(), k.detach().float(), reach, lead)
    if table is not None:
        centres, means = (means_of(t, table) for t in (k, v))
        chosen, ours, used = choose_past(grouped[:, :, 0].detach().float(), centres.detach().float(), table, reach, scale)
        picked, real = torch.cat([picked, ours], -1), torch.cat([real, used], -1)
        parts.append(far(grouped, centres, means, table, chosen, scale))
    if picked.shape[-1]:
        parts.append(exactly(grouped, k, v, picked, real, scale))
    return merge(*parts)[0].reshape(many, k.shape[1], -1)[:, room : room + tokens]


def own(q: Tensor, k: Tensor, v: Tensor, room: int, scale: float, group: int) -> Part:
    """Each window, (many, windows, window, dim), over itself, in groups; nothing is seen of the room before the first token."""
    bias = None
    if room:
        bias = q.new_zeros(q.shape[:3])
        bias[:, 0, :room] = -torch.inf
    out, lse = hop(q, k, v, bias=bias, mask=CAUSAL, scale=scale)
    return tuple(t.flatten(0, 1).unflatten(1, (-1, group)) for t in (out, lse))  # type: ignore[return-value]


def sinks_of(grouped: Tensor, many: int, room: int, reach: Reach) -> tuple[Tensor, Tensor]:
    """The sinks, picked by each group, and whether it sees them in a window before its own: (many, groups, sinks) twice."""
    sink = torch.arange(room, room + reach.sinks, device=grouped.device)
    number = torch.arange(len(grouped) // many, device=grouped.device)
    before = (sink // reach.window < number[:, None])[:, None].expand(-1, grouped.shape[1], -1).flatten(0, 1)
    return sink.expand(many, len(before), -1), before.expand(many, -1, -1)


@torch.no_grad()
def remember(q: Tensor, k: Tensor, reach: Reach, lead: int) -> Table | None:
    """Cluster the past of all windows after the first `lead`; None where there is none."""
    windows = k.shape[1] // reach.window
    begin = lead * reach.window
    forest = plant(q[:, begin:], k[:, begin:], reach, windows - lead)
    if not forest:
        return None
    orders, sizes = [], []
    for place, label, counts in forest:
        order = label.argsort(dim=-1, stable=True).view(-1, *place.shape)
        orders.append((order + place[:, :1]).flatten(1))
        sizes.append(counts.reshape(len(order), -1))
    order, size = torch.cat(orders, 1) + begin, torch.cat(sizes, 1)
    ends = size.cumsum(1)
    member = torch.searchsorted(ends, torch.arange(order.shape[1], device=k.device).expand_as(order).contiguous(), right=True)
    return Table(order, member, ends - size, size, *_visible(forest, reach, windows, lead))


@torch.no_grad()
def plant(q: Tensor, k: Tensor, reach: Reach, windows: int) -> list[Level]:
    """The stretches of 1, 2, 4... windows that some later window meets, each clustered as its own queries see its keys."""
    forest, number = [], 1
    metrics = moment(q.reshape(-1, reach.window, q.shape[-1])).unflatten(0, (len(q), -1))
    while number < windows:
        size = number * reach.window
        starts = torch.arange(0, (windows - 1 - number) * reach.window + 1, 2 * size, device=k.device)
        place = starts[:, None] + torch.arange(size, device=k.device)
        x = rows(k, place.expand(len(k), -1, -1)).flatten(0, 1)
        metric = metrics[:, : 2 * len(starts) : 2].flatten(0, 1)
        forest.append(Level(place, *nearest_means(x, reach.clusters_of(size), reach.rounds, metric=metric)))
        pairs = metrics.shape[1] // 2
        metrics = metrics[:, : 2 * pairs : 2] + metrics[:, 1 : 2 * pairs : 2]
        number *= 2
    return forest


def _visible(forest: list[Level], reach: Reach, windows: int, lead: int) -> tuple[Tensor, Tensor]:
    """The clusters of the stretches that make up the past of each window."""
    window = (torch.arange(windows, device=forest[0].place.device) - lead).clamp_min(0)
    seen, there, base = [], [], 0
    for level, (place, _, _) in enumerate(forest):
        clusters = reach.clusters_of(place.shape[1])
        bit = (window >> level) % 2 == 1
        stretch = torch.where(bit, window >> (level + 1), 0)
        seen.append(base + stretch[:, None] * clusters + torch.arange(clusters, device=window.device))
        there.append(bit[:, None].expand(-1, clusters))
        base += len(place) * clusters
    return torch.cat(seen, 1), torch.cat(there, 1)


@torch.no_grad()
def choose_past(starts: Tensor, centres: Tensor, table: Table, reach: Reach, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each group by its first query: the clusters read key by key, (many * windows, groups, visible); their keys; whether used."""
    many, (windows, visible) = len(centres), table.seen.shape
    scores = (starts @ centres[:, table.seen].flatten(0, 1).mT * scale).view(many, windows, -1, visible)
    sizes = table.sizes[:, table.seen].masked_fill(~table.there, 0)[:, :, None].expand_as(scores)
    scores = scores.masked_fill(sizes == 0, -torch.inf)
    chosen, which, offset, used = spend(scores, sizes, reach.exact)
    cluster = table.seen[:, None].expand(many, -1, scores.shape[2], -1).gather(-1, which)
    place = table.start.gather(1, cluster.flatten(1)).view_as(cluster) + offset
    place = place.masked_fill(~used, 0).flatten(1)
    picked = table.order.gather(1, place).view(many, -1, reach.exact)
    return chosen.flatten(0, 1), picked, used.flatten(1, 2)


def means_of(x: Tensor, table: Table) -> Tensor:
    """The mean of each cluster's rows, (many, clusters, width)."""
    if learns(x):
        return cluster_means(rows(x, table.order), table.member, table.sizes)
    return means_in_order(x, table.order, table.sizes)


def far(grouped: Tensor, centres: Tensor, means: Tensor, table: Table, chosen: Tensor, scale: float) -> Part:
    """The clusters that were not chosen, by their means."""
    index = table.seen.expand(len(centres), -1, -1)
    keys, values = (rows(t, index).flatten(0, 1)[:, None] for t in (centres, means))
    sizes = table.sizes[:, table.seen].masked_fill(~table.there, 0).flatten(0, 1)[:, None]
    weights = sizes.to(grouped.dtype).log().masked_fill(chosen, -torch.inf)
    return hop(grouped, keys, values, bias=weights, scale=scale)
