"""Metric: the square root of a Gram matrix and its pseudo-inverse, where directions that hold nothing are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Metric:
    """C^1/2 and C^+1/2 of a positive semidefinite C, or of a batch of them.

    >>> x = torch.randn(4, 6, dtype=torch.float64)  # rank 4 in 6 dims
    >>> metric = Metric.of(x.mT @ x)
    >>> torch.allclose(metric.root @ metric.root, x.mT @ x), torch.allclose(x @ metric.inverse @ metric.root, x)
    (True, True)
    """

    root: Float[Tensor, "... dim dim"]
    inverse: Float[Tensor, "... dim dim"]

    @classmethod
    def of(cls, gram: Float[Tensor, "... dim dim"], damping: float = 0.0, floor: float | None = None) -> Metric:
        """The metric of gram + damping * its mean eigenvalue; the identity where the damping is infinite.

        Eigenvalues at or below `floor` times the largest count as 0: what rounding leaves, unless said.
        """
        dim = gram.shape[-1]
        eye = torch.eye(dim, dtype=gram.dtype, device=gram.device)
        if math.isinf(damping):
            return cls(eye.expand_as(gram), eye.expand_as(gram))
        mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        values, vectors = torch.linalg.eigh((gram + gram.mT) / 2 + damping * mean * eye)
        floor = dim * torch.finfo(gram.dtype).eps if floor is None else floor
        values = torch.where(values > floor * values[..., -1:], values, 0)
        inverse = torch.where(values > 0, values, 1).rsqrt() * (values > 0)
        return cls(_of(vectors, values.sqrt()), _of(vectors, inverse))


def _of(vectors: Tensor, values: Tensor) -> Tensor:
    return (vectors * values[..., None, :]) @ vectors.mT
