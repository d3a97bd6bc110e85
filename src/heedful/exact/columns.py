"""Attention as source 003 writes it, with tokens as columns: f(x, y) = softmax(l x^T A^T B y) C x and its two gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layer import check_finite

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class ColumnAttention:
    """f(x, y) = softmax(l x^T A^T B y) C x, softmax along rows; x is (n, m), y (n, keys), A and B (k, n), C (keys, n).

    This is what the source asks for, and no transformer's attention: there the values are tokens, (y^T W), while C x sums over the
    features of x, so that out[i, m] is about the pair of tokens i and m.

    >>> x, y, a, b = torch.randn(4, 4, 4, dtype=torch.float64)
    >>> f = ColumnAttention(a, b, torch.randn(4, 4, dtype=torch.float64), 0.5)
    >>> torch.allclose(f.by_y(x, y), torch.func.jacrev(f, 1)(x, y)), torch.allclose(f.by_x(x, y), torch.func.jacrev(f, 0)(x, y))
    (True, True)
    """

    a: Float[Tensor, "k n"]
    b: Float[Tensor, "k n"]
    c: Float[Tensor, "keys n"]
    scale: float = 1.0

    def __call__(self, x: Float[Tensor, "n m"], y: Float[Tensor, "n keys"]) -> Float[Tensor, "m m"]:
        return self.weights(x, y) @ self.c @ x

    def weights(self, x: Float[Tensor, "n m"], y: Float[Tensor, "n keys"]) -> Float[Tensor, "m keys"]:
        """F, whose row i is s_i."""
        self._check(x, y)
        return (self.scale * (self.a @ x).mT @ (self.b @ y)).softmax(-1)

    def by_y(self, x: Float[Tensor, "n m"], y: Float[Tensor, "n keys"]) -> Float[Tensor, "m m n keys"]:
        """d f[i, m] / d y[l, k] = scale (b_l . A x_i) e_k^T (S_i - s_i s_i^T) C x_m, as [i, m, l, k]."""
        pull = self.scale * (self.b.mT @ self.a @ x).mT  # [i, l] = b_l . A x_i
        return torch.einsum("il,ikm->imlk", pull, self._covariance(x, y))

    def by_x(self, x: Float[Tensor, "n m"], y: Float[Tensor, "n keys"]) -> Float[Tensor, "m m n m"]:
        """d f[i, m] / d x[l, k] = scale a_l^T B y (S_k - s_k s_k^T) C x_m [i = k] + (F c_l)_i [m = k], as [i, m, l, k].

        With y = x the derivative by both is `by_x` + `by_y`.
        """
        push = self.scale * self.a.mT @ self.b @ y  # (n, keys)
        same = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        first = torch.einsum("lk,ikm->iml", push, self._covariance(x, y))
        second = self.weights(x, y) @ self.c  # [i, l] = (F c_l)_i
        return first[..., None] * same[:, None, None] + second[:, None, :, None] * same[None, :, None]

    def _covariance(self, x: Tensor, y: Tensor) -> Tensor:
        """(S_i - s_i s_i^T) C x, (i, keys, m)."""
        s, spoken = self.weights(x, y), self.c @ x
        return s[..., None] * (spoken - (s @ spoken)[:, None])

    def _check(self, x: Tensor, y: Tensor) -> None:
        n = self.a.shape[1]
        if (
            x.ndim != 2
            or y.ndim != 2
            or len(x) != n
            or len(y) != n
            or self.b.shape != self.a.shape
            or self.c.shape != (y.shape[1], n)
        ):
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip("xyABC", (x, y, self.a, self.b, self.c), strict=True))
            raise ValueError(
                f"{shapes} do not fit; x is (n, m), y (n, keys), A and B (k, n), C (keys, n): C is keys x n, not square."
            )
        for name, t in (("x", x), ("y", y), ("A", self.a), ("B", self.b), ("C", self.c)):
            check_finite(name, t)
