"""Clustered attention: each group of queries reads the keys of its best clusters one by one, the others as their averages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .clusters import cluster_means, learns, means_in_order, moment, nearest_means, rows, spaced, spend
from .hop import hop
from .merge import Part

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


LIKE = 128  # queries that tell what all are like


class Work(NamedTuple):
    """How much a query may read."""

    clusters: int  # averages
    exact: int  # keys one by one
    rounds: int  # of Lloyd's algorithm
    group: int  # neighbouring queries that choose together


class Choice(NamedTuple):
    """What each group of queries reads key by key."""

    chosen: Bool[Tensor, "many groups clusters"]
    picked: Int[Tensor, "many groups exact"]  # those keys
    real: Bool[Tensor, "many groups exact"]  # whether there is such a key


def clustered(
    q: Float[Tensor, "many queries dim"],
    k: Float[Tensor, "many keys dim"],
    v: Float[Tensor, "many keys width"],
    work: Work,
    scale: float,
    counts: Int[Tensor, " many"] | None = None,
) -> Float[Tensor, "many queries width"]:
    """Attend bidirectionally; `counts` says how many tokens of each row are real, the first ones, and the others must be 0.

    >>> q, k = torch.randn(2, 300, 8), torch.randn(2, 20, 8).repeat(1, 15, 1) + 0.1 * torch.randn(2, 300, 8)  # keys of 20 kinds
    >>> exact = (q @ k.mT).softmax(-1) @ k
    >>> found = clustered(q, k, k, Work(clusters=32, exact=64, rounds=1, group=16), scale=1.0)
    >>> float((found - exact).norm() / exact.norm()) < 0.1
    True
    """
    many, queries, _ = q.shape
    if k.shape[1] <= work.exact:
        seen = None if counts is None else hidden(counts, k.shape[1])[:, None].to(k)
        return hop(*(t[:, None] for t in (q, k, v)), bias=seen, scale=scale)[0][:, 0]
    number = torch.tensor([queries], device=q.device) if counts is None else counts
    metric = moment(rows(q.detach(), spaced(number, LIKE).expand(many, -1)))
    label, sizes = nearest_means(k.detach(), work.clusters, work.rounds, counts, metric)
    order = label.argsort(dim=-1, stable=True)
    centres, means = (cluster_means(t, label, sizes) if learns(t) else means_in_order(t, order, sizes) for t in (k, v))
    starts = mean_queries(q.detach(), work.group, number)
    choice = choose_clusters(starts @ centres.detach().mT * scale, order, sizes, work.exact)
    averages = torch.arange(work.clusters, device=k.device).expand_as(choice.chosen) + k.shape[1]
    index = torch.cat([choice.picked, averages], -1)
    exact = torch.zeros_like(choice.picked, dtype=k.dtype).masked_fill_(~choice.real, -torch.inf)
    weights = sizes[:, None].to(k.dtype).log().masked_fill(choice.chosen, -torch.inf)
    grouped = padded(q, work.group).unflatten(1, (-1, work.group))
    keys, values = (rows(torch.cat(pair, 1), index) for pair in ((k, centres), (v, means)))
    return hop(grouped, keys, values, bias=torch.cat([exact, weights], -1), scale=scale)[0].flatten(1, 2)[:, :queries]


def hidden(counts: Tensor, tokens: int) -> Tensor:
    """0 at the first so many tokens of each row, -inf after them."""
    return torch.zeros(len(counts), tokens, device=counts.device).masked_fill_(
        torch.arange(tokens, device=counts.device) >= counts[:, None], -torch.inf
    )


def exactly(q: Tensor, k: Tensor, v: Tensor, picked: Tensor, real: Tensor, scale: float) -> Part:
    """Groups of queries over the keys picked for each: all in one hop."""
    bias = torch.zeros(real.shape, dtype=q.dtype, device=q.device).masked_fill_(~real, -torch.inf)
    keys, values = (rows(t, picked).view(*q.shape[:2], -1, t.shape[-1]) for t in (k, v))
    return hop(q, keys, values, bias=bias.view(*q.shape[:2], -1), scale=scale)


def padded(q: Tensor, group: int) -> Tensor:
    """With zeros after it, so that it is cut into whole groups."""
    room = -q.shape[1] % group
    return F.pad(q, (0, 0, 0, room)) if room else q


def mean_queries(q: Tensor, group: int, number: Tensor) -> Tensor:
    """The mean of each group's queries, the first `number` of which are real: (many, groups, dim)."""
    grouped = padded(q, group).unflatten(1, (-1, group)).sum(2)
    first = torch.arange(0, q.shape[1], group, device=q.device)
    return grouped / (number[:, None] - first).clamp(1, group)[..., None]


@torch.no_grad()
def choose_clusters(scores: Tensor, order: Tensor, sizes: Tensor, exact: int) -> Choice:
    """Give each group of queries the clusters that it scores highest, as long as their keys are no more than `exact`."""
    chosen, leaf, offset, real = spend(scores.nan_to_num(-torch.inf), sizes[:, None].expand_as(scores), exact)
    start = (sizes.cumsum(-1) - sizes)[:, None].expand_as(scores).gather(-1, leaf)
    place = (start + offset).masked_fill(~real, 0)
    return Choice(chosen, order[:, None].expand(-1, place.shape[1], -1).gather(-1, place), real)
