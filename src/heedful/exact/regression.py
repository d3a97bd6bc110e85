"""Low-rank regression: the best map of rank r between two sets of rows, in their own metric; and two recipes that are not (source 000)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .metric import Metric

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class LowRank:
    """Z = left right^T, split evenly between both sides.

    `strengths` are all singular values of Z before truncation, in the metric in which it was truncated, largest first. Where fewer
    than the rank asked for are above rounding there are fewer columns; in a batch, columns of zeros.
    """

    left: Float[Tensor, "... rows rank"]
    right: Float[Tensor, "... columns rank"]
    strengths: Float[Tensor, "... all"]

    @property
    def rank(self) -> int:
        return self.left.shape[-1]

    @property
    def matrix(self) -> Float[Tensor, "... rows columns"]:
        return self.left @ self.right.mT

    @property
    def captured(self) -> Float[Tensor, ...]:
        """The share of the squared strengths that was kept."""
        squares = self.strengths.square()
        return squares[..., : self.rank].sum(-1) / squares.sum(-1).clamp_min(torch.finfo(squares.dtype).tiny)


def lowrank_regression(
    b: Float[Tensor, "rows columns"],
    x: Float[Tensor, "rows left"],
    rank: int,
    y: Float[Tensor, "columns right"] | None = None,
    floor: float | None = None,
) -> LowRank:
    """The Z of at most that rank that minimises |b - x Z y^T|, y being x unless given; of all such Z the shortest.

    With C = x^T x and D = y^T y it is C^+1/2 trunc(C^+1/2 x^T b y D^+1/2) D^+1/2, taken from the SVDs of x and y: any shape, any rank,
    whatever the condition. `floor` is the relative singular value of x and y that counts as 0.

    >>> x, b = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 9, dtype=torch.float64)
    >>> full = torch.linalg.pinv(x) @ b @ torch.linalg.pinv(x).mT
    >>> torch.allclose(lowrank_regression(b, x, 4).matrix, full)  # every rank: least squares
    True
    >>> best, plain = lowrank_regression(b, x, 1).matrix, plain_regression(b, x, 1).matrix
    >>> bool((b - x @ best @ x.mT).norm() < (b - x @ plain @ x.mT).norm())
    True
    """
    y = x if y is None else y
    _check(b, x, y, rank)
    (u, s, v), (uy, sy, vy) = _svd(x, floor), _svd(y, floor)
    reached = u.mT @ b @ uy  # b as far as x and y reach it, in orthonormal coordinates
    return _split(reached, rank, v / s, vy / sy)


def plain_regression(b: Tensor, x: Tensor, rank: int, y: Tensor | None = None) -> LowRank:
    """Source 000 as written: Z = x^+ b (x^+)^T, then the SVD of Z cut off. It minimises |Z - Z_r|, not |b - x Z_r x^T|."""
    y = x if y is None else y
    _check(b, x, y, rank)
    z = torch.linalg.pinv(x) @ b @ torch.linalg.pinv(y).mT
    return truncate(z, None, None, rank)


def gradmax(n: Float[Tensor, "... rows columns"], rank: int) -> LowRank:
    """The SVD of the gradient, cut off: steepest in the Euclidean metric (GradMax, Evci et al. 2022).

    >>> gradmax(torch.diag(torch.tensor([1.0, 3, 2])), 1).matrix.diagonal()
    tensor([0., 3., 0.])
    """
    return truncate(n, None, None, rank)


def lowrank_solution(n: Float[Tensor, "... rows columns"], left: Metric, right: Metric, rank: int) -> LowRank:
    """The Z of at most that rank that minimises |C^1/2 Z D^1/2|^2 / 2 - <n, Z>, C and D being the metrics of its sides.

    >>> x, b = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 9, dtype=torch.float64)
    >>> metric = Metric.of(x.mT @ x)
    >>> torch.allclose(lowrank_solution(x.mT @ b @ x, metric, metric, 2).matrix, lowrank_regression(b, x, 2).matrix)
    True
    """
    _check_rank(rank, n)
    return _split(left.inverse @ n @ right.inverse, rank, left.inverse, right.inverse)


def truncate(z: Float[Tensor, "... rows columns"], left: Metric | None, right: Metric | None, rank: int) -> LowRank:
    """The Z_r of at most that rank that minimises |C^1/2 (z - Z_r) D^1/2|; None is the Euclidean metric."""
    _check_rank(rank, z)
    seen = z if left is None else left.root @ z
    seen = seen if right is None else seen @ right.root
    return _split(seen, rank, None if left is None else left.inverse, None if right is None else right.inverse)


def _split(seen: Tensor, rank: int, left: Tensor | None, right: Tensor | None) -> LowRank:
    """The first singular triples, half of each strength on either side, taken back to the coordinates of Z."""
    u, s, vh = torch.linalg.svd(seen, full_matrices=False)
    some = s > s[..., :1] * max(u.shape[-2], vh.shape[-1]) * torch.finfo(s.dtype).eps
    rank = min(rank, int(some.sum(-1).max()) if s.numel() else 0)
    half = (s * some)[..., None, :rank].sqrt()
    columns, rows = u[..., :rank] * half, vh[..., :rank, :].mT * half
    return LowRank(columns if left is None else left @ columns, rows if right is None else right @ rows, s)


def _svd(x: Tensor, floor: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """u, s and v of x without the directions that hold nothing."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    floor = max(x.shape) * torch.finfo(x.dtype).eps if floor is None else floor
    some = s > floor * s[:1]
    return u[:, some], s[some], vh[some].mT


def _check(b: Tensor, x: Tensor, y: Tensor, rank: int) -> None:
    if b.ndim != 2 or x.ndim != 2 or y.ndim != 2 or b.shape != (x.shape[0], y.shape[0]):
        raise ValueError(
            f"b has shape {tuple(b.shape)} but x {tuple(x.shape)} and y {tuple(y.shape)} need ({x.shape[0]}, {y.shape[0]}): one row of b for "
            "each row of x, one column for each row of y."
        )
    for name, tensor in (("b", b), ("x", x), ("y", y)):
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds NaN or infinite entries; look at what made it.")
    if rank < 1:
        raise ValueError(f"rank is {rank}; ask for at least 1.")


def _check_rank(rank: int, z: Tensor) -> None:
    if rank < 1:
        raise ValueError(f"rank is {rank}; ask for at least 1.")
    if not bool(torch.isfinite(z).all()):
        raise ValueError("the matrix to cut off holds NaN or infinite entries; look at the gradients that made it.")
