"""Groups of similar keys: k-means, the means of its clusters, and which of them a budget buys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import writes_own_backward

LARGE = 1  # a cluster of more than this part of the budget is not read key by key
ENOUGH = 4  # rows for each cluster from which a round of Lloyd's algorithm takes the means
FAR = -1e30  # the score of a cluster that has no key


@torch.no_grad()
def nearest_means(
    x: Tensor, clusters: int, rounds: int, counts: Tensor | None = None, metric: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row's cluster by some rounds of Lloyd's algorithm, which look at rows at equal distances, `clusters` for padding; and the clusters' sizes.

    Rows are as far apart as their difference's square in the `metric` (many, dim, dim), the sum of squares unless it is given.

    Lloyd 1982, Least squares quantization in PCM.
    """
    x, metric = x.float(), None if metric is None else metric.float()
    number = torch.tensor([x.shape[1]], device=x.device) if counts is None else counts
    beyond = None if counts is None else torch.arange(x.shape[1], device=x.device) >= counts[:, None]
    centres, sizes = rows(x, spaced(number, clusters).expand(len(x), -1)), None
    sample = rows(x, spaced(number, ENOUGH * clusters).expand(len(x), -1)) if rounds else x
    for _ in range(rounds):
        label, sizes = _nearest(sample, centres, sizes, None, metric)
        centres = cluster_means(sample, label, sizes)
    return _nearest(x, centres, sizes, beyond, metric)


def spaced(number: Tensor, places: int) -> Tensor:
    """So many places at equal distances among the first `number`, both ends among them: (many, places)."""
    return torch.arange(places, device=number.device) * (number[:, None] - 1).clamp_min(0) // (places - 1)


def _nearest(
    x: Tensor, centres: Tensor, sizes: Tensor | None, beyond: Tensor | None, metric: Tensor | None
) -> tuple[Tensor, Tensor]:
    many, clusters, _ = centres.shape
    measured = centres if metric is None else centres @ metric
    low = torch.linalg.vecdot(centres, measured) * -0.5
    if sizes is not None:
        low = low.masked_fill(sizes == 0, FAR)
    label = largest(torch.baddbmm(low[:, None], x, measured.mT))
    if beyond is not None:
        label = label.masked_fill(beyond, clusters)
    found = torch.bincount(_bins(label, clusters), minlength=many * (clusters + 1))
    return label, found.view(many, -1)[:, :clusters]


def moment(q: Tensor) -> Tensor:
    """The sum of q q^T over the queries, (many, dim, dim): the metric in which keys that get other logits are far apart."""
    return q.mT @ q


def largest(scores: Tensor) -> Tensor:
    """The place of the largest finite float32 of the last dimension, or of one that is larger up to the last digits; writes over the scores.

    The place itself becomes the last binary digits, so that a maximum, which is four times as quick on a CPU, gives it.

    >>> largest(torch.tensor([[0.0, -1.0, 2.0], [-3.0, -2.0, -4.0]])).tolist()
    [2, 1]
    """
    number = scores.shape[-1]
    digits = (1 << (number - 1).bit_length()) - 1
    scores.view(torch.int32).bitwise_and_(~digits).bitwise_or_(torch.arange(number, dtype=torch.int32, device=scores.device))
    return scores.amax(-1).view(torch.int32).bitwise_and_(digits).clamp_max_(number - 1).long()  # nan may say anything


def cluster_means(x: Tensor, label: Tensor, sizes: Tensor) -> Tensor:
    """The mean of the rows of each cluster, (many, clusters, width)."""
    many, clusters = sizes.shape
    sums = x.new_zeros(many * (clusters + 1), x.shape[-1]).index_add(0, _bins(label, clusters), x.reshape(-1, x.shape[-1]))
    return sums.view(many, clusters + 1, -1)[:, :clusters] / sizes.clamp_min(1)[..., None]


def means_in_order(x: Tensor, order: Tensor, sizes: Tensor) -> Tensor:
    """The same where it is known which rows make the first cluster, which the next; their gradient would be slow."""
    first, base = (torch.arange(len(x), device=x.device)[:, None] * t.shape[1] for t in (x, order))
    ends = F.pad(sizes.cumsum(-1), (1, 0)) + base  # the last one where padding begins
    sums = F.embedding_bag((order + first).flatten(), x.reshape(-1, x.shape[-1]), ends.flatten(), mode="sum")
    return sums.view(*ends.shape, -1)[:, :-1] / sizes.clamp_min(1)[..., None]


def learns(x: Tensor) -> bool:
    """Whether a gradient may be asked for x."""
    return (torch.is_grad_enabled() and x.requires_grad) or not writes_own_backward()


def _bins(label: Tensor, clusters: int) -> Tensor:
    return (label + torch.arange(len(label), device=label.device)[:, None] * (clusters + 1)).flatten()


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x[many, index], for an index of any shape after its first dimension."""
    first = torch.arange(len(x), device=x.device).view(-1, *[1] * (index.ndim - 1)) * x.shape[1]
    return x.reshape(-1, x.shape[-1]).index_select(0, (index + first).flatten()).view(*index.shape, x.shape[-1])


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
