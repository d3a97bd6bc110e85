"""Low rank: what a smaller rank of the attention matrix loses, by the best projection and by a random one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def rank_errors(p: Float[Tensor, "... queries keys"]) -> Float[Tensor, "... ranks"]:
    """|P - P_r| / |P| in the Frobenius norm of the best P_r of rank r = 0, 1, 2 ...: no projection of that rank loses less.

    >>> rank_errors(torch.eye(4))
    tensor([1.0000, 0.8660, 0.7071, 0.5000, 0.0000])
    """
    squares = torch.linalg.svdvals(p.to(torch.promote_types(p.dtype, torch.float32))).square()
    left = squares.flip(-1).cumsum(-1).flip(-1)  # from the smallest on: small errors keep their digits
    whole = left[..., :1]
    shares = torch.cat([left, torch.zeros_like(whole)], -1).div(whole)
    return shares.masked_fill(whole == 0, 0).sqrt().to(p.dtype)


def rank_needed(p: Float[Tensor, "... queries keys"], error: float) -> Int[Tensor, ...]:
    """The smallest rank at which P loses no more than `error`, relative, in the Frobenius norm.

    >>> [rank_needed(torch.eye(100), error).item() for error in (0.01, 0.1, 0.5)]
    [100, 99, 75]
    """
    if not error >= 0:
        raise ValueError(f"an error of {error} was asked for; give a share of |P| of at least 0, such as 0.05.")
    return (rank_errors(p) > error).sum(-1)


def projected(
    p: Float[Tensor, "... queries keys"], w: Float[Tensor, "... keys width"], rank: int, seed: int = 0
) -> Float[Tensor, "... queries width"]:
    """P R^T R w with a random R of `rank` rows, entries N(0, 1/rank): P w as the Johnson-Lindenstrauss lemma would have it.

    >>> p, w = torch.eye(50), torch.ones(50, 1)
    >>> bool((projected(p, w, 2000) - w).norm() < 0.3 * w.norm())
    True

    Wang et al. 2020, Linformer, theorem 1.
    """
    _check(p, w, rank)
    drawn = torch.randn(rank, p.shape[-1], generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float64)
    r = drawn.to(p) / rank**0.5
    return (p @ r.mT) @ (r @ w)


def jl_error(p: Float[Tensor, "... queries keys"], w: Float[Tensor, "... keys width"], rank: int) -> Float[Tensor, ...]:
    """The mean over R of |P R^T R w - P w|^2, exactly: (|P|^2 |w|^2 + |P w|^2) / rank.

    It is measured by |P| |w|, not by |P w|: to be right within eps |P w| takes rank (1 + |P|^2 |w|^2 / |P w|^2) / eps^2, which is
    (1 + n) / eps^2 for P = I and never O(log n).

    >>> p, w = torch.eye(6), torch.ones(6, 1)
    >>> jl_error(p, w, rank=7)  # (6 * 6 + 6) / 7
    tensor(6.)
    """
    _check(p, w, rank)
    sizes = [x.square().sum((-2, -1)) for x in (p, w, p @ w)]
    return (sizes[0] * sizes[1] + sizes[2]) / rank


def _check(p: Tensor, w: Tensor, rank: int) -> None:
    if min(p.ndim, w.ndim) < 2 or p.shape[-1] != w.shape[-2]:
        raise ValueError(f"P is {tuple(p.shape)} and w {tuple(w.shape)}; give (..., queries, keys) and (..., keys, width).")
    if rank < 1:
        raise ValueError(f"a projection to {rank} dims was asked for; use a rank of at least 1.")
