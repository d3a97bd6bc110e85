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
from .clustered import cluster_means, exactly, nearest_means, spend
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


def clustered_causal(
    q: Float[Tensor, "many heads tokens dim"],
    k: Float[Tensor, "many tokens dim"],
    v: Float[Tensor, "many tokens width"],
    reach: Reach,
    scale: float,
) -> Float[Tensor, "many heads tokens width"]:
    """Attend causally; the heads of q share k and v.

    >>> q, k = torch.randn(2, 300, 8), torch.randn(2, 5, 8).repeat(1, 60, 1) + 0.1 * torch.randn(2, 300, 8)  # keys of 5 kinds
    >>> exact = hop(q[:, None], k[:, None], k[:, None], mask=CAUSAL, scale=1.0)[0][:, 0]
    >>> found = clustered_causal(q[:, None], k, k, Reach(window=32, sinks=2, clusters=16, exact=48, rounds=1, group=8), scale=1.0)[:, 0]
    >>> float((found - exact).norm() / exact.norm()) < 0.1
    True
    """
    sinks, window, tokens = reach.sinks, reach.window, k.shape[1]
    first = hop(q[:, :, :sinks], k[:, None, :sinks], v[:, None, :sinks], mask=CAUSAL, scale=scale)[0] if sinks else q[:, :, :0, :0]
    if tokens <= sinks:
        return first
    room = (0, 0, 0, -(tokens - sinks) % window)
    q, k, v = (F.pad(t, room) for t in (q, k, v))
    many, heads, width = q.shape[0], q.shape[1], v.shape[-1]
    windows = (k.shape[1] - sinks) // window
    q = q[:, :, sinks:].unflatten(2, (windows, window)).transpose(1, 2).flatten(0, 1)  # (many * windows, heads, window, dim)
    grouped = q.reshape(len(q), -1, reach.group, q.shape[-1])
    own = hop(q, *(t[:, sinks:].reshape(len(q), 1, window, t.shape[-1]) for t in (k, v)), mask=CAUSAL, scale=scale)
    parts = [(own[0].reshape(*grouped.shape[:3], width), own[1].reshape(grouped.shape[:3]))]
    forest = plant(k[:, sinks:].detach().float(), reach, windows)
    picked, real = always(grouped, many, sinks)
    if forest is not None:
        table = Table.of(forest, reach, windows)
        starts = grouped[:, :, 0].detach().float()
        chosen, ours, used = choose_past(starts, k[:, sinks:].detach().float(), table, reach, scale)
        picked, real = torch.cat([picked, ours + sinks], -1), torch.cat([real, used], -1)
        parts.append(far(grouped, k[:, sinks:], v[:, sinks:], table, chosen, scale))
    if picked.shape[-1]:
        parts.append(exactly(grouped, k, v, picked, real, scale))
    out = merge(*parts)[0].reshape(many, windows, heads, window, width).transpose(1, 2).flatten(2, 3)[:, :, : tokens - sinks]
    return torch.cat([first, out], 2) if sinks else out


def always(grouped: Tensor, many: int, sinks: int) -> tuple[Tensor, Tensor]:
    """The sinks, picked by each group: (many, groups, sinks) twice."""
    groups = grouped.shape[0] * grouped.shape[1] // many
    picked = torch.arange(sinks, device=grouped.device).expand(many, groups, -1)
    return picked, torch.ones_like(picked, dtype=torch.bool)


@torch.no_grad()
def plant(k: Tensor, reach: Reach, windows: int) -> list[Level] | None:
    """The stretches of 1, 2, 4... windows that some later window meets, each clustered; None where there is none."""
    forest, number = [], 1
    while number < windows:
        size = number * reach.window
        starts = torch.arange(0, (windows - 1 - number) * reach.window + 1, 2 * size, device=k.device)
        place = starts[:, None] + torch.arange(size, device=k.device)
        x = k[:, place.flatten()].reshape(-1, size, k.shape[-1])
        forest.append(Level(place, *nearest_means(x, reach.clusters_of(size), reach.rounds)))
        number *= 2
    return forest or None


class Table(NamedTuple):
    """All clusters of all levels in one row, and which of them each window sees."""

    forest: list[Level]
    order: Int[Tensor, "many members"]  # the tokens, cluster by cluster
    start: Int[Tensor, "many clusters"]  # where a cluster's begin in it
    sizes: Int[Tensor, "many clusters"]
    seen: Int[Tensor, "windows visible"]  # clusters
    there: Bool[Tensor, "windows visible"]  # whether there is such a one

    @classmethod
    def of(cls, forest: list[Level], reach: Reach, windows: int) -> Table:
        orders, sizes = [], []
        for place, label, counts in forest:
            order = label.argsort(dim=-1, stable=True).view(-1, *place.shape)
            orders.append((order + place[:, :1]).flatten(1))
            sizes.append(counts.reshape(len(order), -1))
        everything = torch.cat(sizes, 1)
        seen, there = _visible(forest, reach, windows)
        return cls(forest, torch.cat(orders, 1), everything.cumsum(1) - everything, everything, seen, there)


def _visible(forest: list[Level], reach: Reach, windows: int) -> tuple[Tensor, Tensor]:
    """The clusters of the stretches that make up the past of each window."""
    window = torch.arange(windows, device=forest[0].place.device)
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
def choose_past(starts: Tensor, k: Tensor, table: Table, reach: Reach, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each group by its first query: the clusters read key by key, (many * windows, groups, visible); their keys; whether used."""
    many, (windows, visible) = len(k), table.seen.shape
    centres = means_of(k, table)[:, table.seen].flatten(0, 1)  # (many * windows, visible, dim)
    scores = (starts @ centres.mT * scale).view(many, windows, -1, visible)
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
    parts = []
    for place, label, sizes in table.forest:
        rows = x[:, place.flatten()].reshape(len(label), -1, x.shape[-1])
        parts.append(cluster_means(rows, label, sizes).view(len(x), -1, x.shape[-1]))
    return torch.cat(parts, 1)


def far(grouped: Tensor, k: Tensor, v: Tensor, table: Table, chosen: Tensor, scale: float) -> Part:
    """The clusters that were not chosen, by their means."""
    centres, means = (means_of(t, table)[:, table.seen].flatten(0, 1)[:, None] for t in (k, v))
    sizes = table.sizes[:, table.seen].masked_fill(~table.there, 0).flatten(0, 1)[:, None]
    weights = sizes.to(grouped.dtype).log().masked_fill(chosen, -torch.inf)
    return hop(grouped, centres, means, bias=weights, scale=scale)
