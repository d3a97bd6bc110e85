"""Truncation: the fewest dims of a head that keep its logits and its output, measured on data, in closed form.

A group of query heads shares one key head. Moments are second moments over tokens; with those of the weights themselves
(W W^T, as if inputs were white) the same formulas give the plain truncated SVD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

FLOOR = 1e-10  # of the largest eigenvalue; what is smaller is rounding


@dataclass(frozen=True, eq=False)
class Factors:
    """Maps of a head's dims to fewer, best first: queries by `left` (group, dim, dim), keys by `right` (dim, dim).

    `loss[i]` is what the i-th adds to the mean square of the logits (or of the output): keeping r costs `loss[r:].sum()`.
    """

    left: Tensor
    right: Tensor
    loss: Tensor


def logit_factors(queries: Float[Tensor, "group dim dim"], keys: Float[Tensor, "dim dim"]) -> Factors:
    """The factors of q.k: q L_r and k R_r have the logits nearest to those of q and k, on data with these moments, for every r.

    >>> q, k = torch.randn(2, 500, 6, dtype=torch.float64)
    >>> q = q * torch.tensor([3.0, 2, 1, 0.1, 0.1, 0.01])
    >>> found = logit_factors(q.T[None] @ q.mT.T / 500, k.T @ k / 500)
    >>> shorter = (q @ found.left[0, :, :3]) @ (k @ found.right[:, :3]).T
    >>> error = (shorter - q @ k.T).square().mean()
    >>> torch.allclose(error, found.loss[3:].sum()), bool(error < 0.02 * (q @ k.T).square().mean())
    (True, True)
    """
    left, right = root(queries), root(keys)
    u, s, vh = torch.linalg.svd((left @ right).flatten(0, 1), full_matrices=False)  # the heads of a group stacked
    half = s.sqrt()
    mapped = torch.linalg.solve(left, u.unflatten(0, (len(queries), -1))) * half
    return Factors(mapped, torch.linalg.solve(right, vh.mT) * half, s.square())


def value_factors(outputs: Float[Tensor, "group dim dim"], mixing: Float[Tensor, "group dim width"]) -> Factors:
    """The factors of o W_O: values keep v L_r, the mixing matrix becomes R_r^T W_O, for every r; `right` is (dim, dim) for a pooled group.

    >>> o, w = torch.randn(500, 6, dtype=torch.float64), torch.randn(1, 6, 9, dtype=torch.float64)
    >>> found = value_factors(o.T[None] @ o / 500, w)
    >>> error = (o @ found.left[0, :, :4] @ found.right[:, :4].T @ w[0] - o @ w[0]).square().sum(1).mean()
    >>> torch.allclose(error, found.loss[4:].sum())
    True
    """
    pooled = root(outputs.mean(0))
    loss, u = torch.linalg.eigh(pooled @ (mixing @ mixing.mT).sum(0) @ pooled)
    u = u.flip(-1)
    return Factors(torch.linalg.solve(pooled, u)[None], pooled @ u, loss.flip(-1).clamp_min(0))


def mixing_again(
    outputs: Float[Tensor, "group dim dim"], kept: Float[Tensor, "dim rank"], mixing: Float[Tensor, "group dim width"]
) -> tuple[Float[Tensor, "group rank width"], Float[Tensor, " group"]]:
    """The mixing matrices that do best with values v `kept`, head by head, and the mean square of what is lost."""
    seen = kept.mT @ outputs
    again = torch.linalg.lstsq(seen @ kept, seen @ mixing).solution
    off = mixing - kept @ again
    return again, (off * (outputs @ off)).sum((-1, -2)).clamp_min(0)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Frequency pairs of a rotary head, best first, and how they weigh: `gram` (group, pairs, pairs) is of their parts of the logit."""

    order: Tensor
    loss: Tensor
    gram: Tensor

    def gains(self, count: int) -> Float[Tensor, "group count"]:
        """What the first `count` pairs are multiplied by to stand in for the others too, in the order of their frequency."""
        kept, gone = self.order[:count].sort().values, self.order[count:]
        own = self.gram[:, kept][:, :, kept]
        ridge = 1e-6 * own.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(count, dtype=own.dtype)
        return 1 + torch.linalg.solve(own + ridge, self.gram[:, kept][:, :, gone].sum(-1))


def frequency_pairs(queries: Float[Tensor, "group dim dim"], keys: Float[Tensor, "dim dim"], count: int) -> Pairs:
    """Which of `count` frequency pairs of turned queries and keys to keep: each time the one goes whose loss grows the logits' error least.

    >>> q, k = torch.randn(2, 400, 4, dtype=torch.float64)
    >>> frequency_pairs((q * torch.tensor([1.0, 9, 1, 9])).T[None] @ q / 400, k.T @ k / 400, 2).order
    tensor([1, 0])
    """
    both = (queries * keys).unflatten(-1, (2, count)).unflatten(-3, (2, count)).sum((-2, -4))  # (group, pairs, pairs)
    gram = both.sum(0)
    left, order, loss = list(range(count)), [], []
    while left:
        growth = gram[left, left] + 2 * gram[left][:, order].sum(-1)
        worst = int(growth.argmin())
        loss.append(float(growth[worst].clamp_min(0)))
        order.append(left.pop(worst))
    return Pairs(torch.tensor(order).flip(0), torch.tensor(loss, dtype=gram.dtype).flip(0), both)


def root(gram: Float[Tensor, "... dim dim"]) -> Float[Tensor, "... dim dim"]:
    """The symmetric square root, made invertible where the data have no variance."""
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    least = (values[..., -1:] * FLOOR).clamp_min(torch.finfo(gram.dtype).tiny)
    return vectors * values.clamp_min(least).sqrt()[..., None, :] @ vectors.mT
