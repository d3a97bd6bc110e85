"""Proposals: where Performer's random directions are drawn from, so that they fall where a head's queries and keys meet.

Drawn from another law than the standard normal, each direction carries the log of how much likelier the normal makes it: no bias.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

Drawn = tuple["Float[Tensor, 'heads features dim']", "Float[Tensor, 'heads features']"]


def normal(noise: Float[Tensor, "features dim"], sums: Float[Tensor, "heads pairs dim"], axes: Float[Tensor, "heads dim"]) -> Drawn:
    """The directions as they are, for every head."""
    return noise.expand(len(sums), -1, -1), noise.new_zeros(len(sums), len(noise))


def gaussian(noise: Tensor, sums: Tensor, axes: Tensor) -> Drawn:
    """Wider along the axes on which queries and keys add up to more; `axes` is the mean square of x + y along each.

    Along an axis of mean square m, the log of an estimate's second moment is least for a variance of 1 / (2 - t) with t as below.
    Half of m is taken: the errors that all keys of a query share cancel when the softmax divides.

    Likhosherstov et al. 2023, Dense-Exponential Random Features.
    """
    m = axes.clamp_min(0) / 2
    t = (1 - 2 * m + ((2 * m + 1).square() + 8 * m).sqrt()) / 2
    spread = (2 - t).rsqrt()[:, None]  # (heads, 1, dim)
    directions = noise * spread
    return directions, ((noise.square() - directions.square()) / 2 + spread.log()).sum(-1)


def attention(noise: Tensor, sums: Tensor, axes: Tensor) -> Drawn:
    """Around sums x + y of pairs that attend, where the normal's product with both features is largest: a mixture of normals."""
    pairs = sums.shape[1]
    directions = sums[:, torch.arange(len(noise), device=noise.device) % pairs] + noise
    mixture = torch.logsumexp(torch.cdist(directions, sums).square() / -2, -1) - math.log(pairs)
    return directions, directions.square().sum(-1) / -2 - mixture


PROPOSALS = {"gaussian": gaussian, "attention": attention, "normal": normal}


def balance(queries: Float[Tensor, "heads dim dim"], keys: Float[Tensor, "heads dim dim"]) -> Float[Tensor, "heads dim dim"]:
    """The G that makes queries stretched by its root, keys by the inverse of it, equally long: G queries G = keys.

    >>> x, y = (t @ t.mT for t in torch.randn(2, 1, 4, 4, dtype=torch.float64))
    >>> g = balance(x, y)
    >>> torch.allclose(g @ x @ g, y)
    True
    """
    root, inverse = power(queries, 0.5), power(queries, -0.5)
    return inverse @ power(root @ keys @ root, 0.5) @ inverse


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Of a symmetric positive definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(1e-12).pow(exponent)[..., None, :]) @ vectors.mT
