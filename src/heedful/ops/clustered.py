"""Clustered attention: each group of queries reads the keys of its best clusters one by one, the others as their averages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .hop import hop
from .merge import Part, merge

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LARGE = 1  # a cluster of more than this part of the budget is not read key by key


class Work(NamedTuple):
    """How much a query may read."""

    clusters: int  # averages
    exact: int  # keys one by one
    rounds: int  # of Lloyd's algorithm
    group: int  # neighbouring queries that choose together


class Plan(NamedTuple):
    """What was chosen, without a gradient."""

    label: Int[Tensor, "many keys"]  # each key's cluster; `clusters` at padding
    sizes: Int[Tensor, "many clusters"]
    chosen: Bool[Tensor, "many groups clusters"]  # read key by key
    picked: Int[Tensor, "many groups exact"]  # those keys
    real: Bool[Tensor, "many groups exact"]  # whether there is such a key
    centres: Float[Tensor, "many clusters dim"]  # mean keys, in float32
    weights: Float[Tensor, "many clusters"]


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
    plan = choose_clusters(q.detach().float(), k.detach().float(), work, scale, counts)
    centres, means, weights = averages(q, k, v, plan, scale, counts)
    weights = weights[:, None].masked_fill(plan.chosen, -torch.inf)  # (many, groups, clusters)
    grouped = F.pad(q, (0, 0, 0, -queries % work.group)).view(many, -1, work.group, q.shape[-1])
    far = hop(grouped, centres[:, None], means[:, None], bias=weights, scale=scale)
    out, _ = merge(far, exactly(grouped, k, v, plan.picked, plan.real, scale))
    return out.flatten(1, 2)[:, :queries]


def hidden(counts: Tensor, tokens: int) -> Tensor:
    """0 at the first so many tokens of each row, -inf after them."""
    return torch.zeros(len(counts), tokens, device=counts.device).masked_fill_(
        torch.arange(tokens, device=counts.device) >= counts[:, None], -torch.inf
    )


def exactly(q: Tensor, k: Tensor, v: Tensor, picked: Tensor, real: Tensor, scale: float) -> Part:
    """Groups of queries over the keys picked for each: all in one hop."""
    bias = torch.zeros(real.shape, dtype=q.dtype, device=q.device).masked_fill_(~real, -torch.inf)
    keys, values = (rows(t, picked).reshape(*q.shape[:2], -1, t.shape[-1]) for t in (k, v))
    return hop(q, keys, values, bias=bias.view(*q.shape[:2], -1), scale=scale)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x[many, index], for an index of any shape after its first dimension."""
    first = torch.arange(len(x), device=x.device).view(-1, *[1] * (index.ndim - 1)) * x.shape[1]
    return x.reshape(-1, x.shape[-1]).index_select(0, (index + first).flatten()).view(*index.shape, x.shape[-1])


@torch.no_grad()
def choose_clusters(q: Tensor, k: Tensor, work: Work, scale: float, counts: Tensor | None) -> Plan:
    """Cluster the keys as the queries see them, then give each group of queries the clusters its mean query looks at most."""
    mean_square = moment(q, counts)
    seen = k @ torch.linalg.cholesky_ex(_lifted(mean_square))[0]  # |seen|^2 is the mean square of q . k
    label, sizes = nearest_means(seen, work.clusters, work.rounds, counts)
    centres = cluster_means(k, label, sizes)
    weights = _weights(k, centres, label, sizes, mean_square, scale)
    grouped = F.pad(q, (0, 0, 0, -q.shape[1] % work.group)).unflatten(1, (-1, work.group)).sum(2)
    scores = grouped / _members(q, work.group, counts) @ centres.mT * scale + (weights - sizes.log())[:, None]
    chosen, leaf, offset, real = spend(scores.nan_to_num(-torch.inf), sizes[:, None].expand_as(scores), work.exact)
    order = label.argsort(dim=-1, stable=True)
    start = (sizes.cumsum(-1) - sizes)[:, None].expand_as(scores).gather(-1, leaf)
    place = (start + offset).masked_fill(~real, 0)
    return Plan(label, sizes, chosen, order[:, None].expand(-1, place.shape[1], -1).gather(-1, place), real, centres, weights)


def moment(q: Tensor, counts: Tensor | None) -> Tensor:
    """The mean of q q^T over the real queries, (many, dim, dim)."""
    total = q.mT @ q
    return total / (q.shape[1] if counts is None else counts.clamp_min(1)[:, None, None])


def spend(scores: Tensor, sizes: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best clusters whose keys fit into the budget; then for each place in it: the cluster, the number therein, whether it is used."""
    scores = scores.masked_fill(sizes > budget // LARGE, -torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    taken = sizes.gather(-1, order)
    ends = taken.cumsum(-1)
    fits = (ends <= budget) & (scores.gather(-1, order) > -torch.inf)
    place = torch.arange(budget, device=scores.device).expand(*ends.shape[:-1], -1).contiguous()
    which = torch.searchsorted(ends, place, right=True).clamp_max(ends.shape[-1] - 1)
    real = place < (taken * fits).sum(-1, keepdim=True)
    chosen = torch.zeros_like(fits).scatter_(-1, order, fits)
    return chosen, order.gather(-1, which), place - (ends - taken).gather(-1, which), real


def averages(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, counts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Each cluster's mean key, mean value and log-weight."""
    means = cluster_means(v, plan.label, plan.sizes)
    if k.dtype == torch.float32 and not (torch.is_grad_enabled() and (k.requires_grad or q.requires_grad)):
        return plan.centres, means, plan.weights  # the same, computed already
    centres = cluster_means(k, plan.label, plan.sizes)
    return centres, means, _weights(k, centres, plan.label, plan.sizes, moment(q, counts), scale)


def cluster_means(x: Tensor, label: Tensor, sizes: Tensor) -> Tensor:
    """The mean of the rows of each cluster, (many, clusters, width)."""
    many, clusters = sizes.shape
    sums = x.new_zeros(many * (clusters + 1), x.shape[-1]).index_add(0, _bins(label, clusters), x.reshape(-1, x.shape[-1]))
    return sums.view(many, clusters + 1, -1)[:, :clusters] / sizes.clamp_min(1)[..., None]


def _weights(k: Tensor, centres: Tensor, label: Tensor, sizes: Tensor, moment: Tensor, scale: float) -> Tensor:
    """log of a cluster's size, and what its spread adds to the mean of its exponentials."""
    away = k - rows(F.pad(centres, (0, 0, 0, 1)), label)
    spread = cluster_means(((away @ moment) * away).sum(-1, keepdim=True), label, sizes)[..., 0] * scale**2
    return sizes.to(k.dtype).log() + excess(spread, sizes.to(k.dtype))


def excess(spread: Tensor, sizes: Tensor) -> Tensor:
    """log mean exp of so many normal numbers of that variance: half of it, and linear in the deviation once the largest rules.

    Derrida 1981, Random-energy model.
    """
    deviation = spread.clamp_min(1e-12).sqrt()
    return (deviation.square() - F.relu(deviation - (2 * sizes.clamp_min(1).log()).sqrt()).square()) / 2


def _lifted(moment: Tensor) -> Tensor:
    """With a little of every direction, so that it has a root."""
    trace = moment.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-20)
    return moment + torch.eye(moment.shape[-1], device=moment.device) * trace[:, None, None] * 1e-3


def _members(q: Tensor, group: int, counts: Tensor | None) -> Tensor:
    """How many real queries each group has, 1 at least: (many or 1, groups, 1)."""
    first = torch.arange(0, q.shape[1], group, device=q.device)
    last = torch.tensor([q.shape[1]], device=q.device) if counts is None else counts
    return (last[:, None] - first).clamp(1, group)[..., None]


@torch.no_grad()
def nearest_means(x: Tensor, clusters: int, rounds: int, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each row's cluster by some rounds of Lloyd's algorithm from rows at equal distances, `clusters` for padding; and the clusters' sizes.

    Lloyd 1982, Least squares quantization in PCM.
    """
    many, tokens, _ = x.shape
    number = torch.tensor([tokens], device=x.device) if counts is None else counts
    places = torch.arange(clusters, device=x.device) * 2 + 1
    centres = rows(x, (places * number[:, None] // (2 * clusters)).expand(many, -1))
    beyond = None if counts is None else torch.arange(tokens, device=x.device) >= counts[:, None]
    label, sizes = _nearest(x, centres, None, beyond)
    for _ in range(rounds):
        label, sizes = _nearest(x, cluster_means(x, label, sizes), sizes, beyond)
    return label, sizes


def _nearest(x: Tensor, centres: Tensor, sizes: Tensor | None, beyond: Tensor | None) -> tuple[Tensor, Tensor]:
    many, clusters, _ = centres.shape
    low = torch.linalg.vecdot(centres, centres) * -0.5
    if sizes is not None:
        low = low.masked_fill(sizes == 0, -torch.inf)
    label = torch.baddbmm(low[:, None], x, centres.mT).argmax(-1)
    if beyond is not None:
        label = label.masked_fill(beyond, clusters)
    found = torch.bincount(_bins(label, clusters), minlength=many * (clusters + 1))
    return label, found.view(many, -1)[:, :clusters]


def _bins(label: Tensor, clusters: int) -> Tensor:
    return (label + torch.arange(len(label), device=label.device)[:, None] * (clusters + 1)).flatten()
