"""Residual: what is left of the rows of a matrix when one row is taken off all of them, and how large it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .centre import l1_centre

if TYPE_CHECKING:
    from jaxtyping import Float

CENTRES: dict[str, Callable[[Tensor], Tensor]] = {  # (..., tokens, dim) to (..., dim)
    "mean": lambda x: x.mean(-2),
    "median": lambda x: (x.sort(-2).values[..., [(x.shape[-2] - 1) // 2, x.shape[-2] // 2], :]).mean(-2),
    "l1": lambda x: l1_centre(x).point,
}


def residual(x: Float[Tensor, "... tokens dim"], center: str = "mean") -> Float[Tensor, "... tokens dim"]:
    """X - 1 c^T with the row c that makes it small; which c makes it smallest depends on how it is measured.

    "mean" is best in the Frobenius and the spectral norm, "median" of each column in |.|_1, "l1" (`l1_centre`, a linear program) in
    |.|_inf. No formula is known for the composite norm. In any of the last three the mean is within a factor 2 (1 - 1/tokens).

    >>> x = torch.tensor([[0.0], [0.0], [3.0]])
    >>> [residual(x, center)[:, 0].tolist() for center in ("mean", "median", "l1")]
    [[-1.0, -1.0, 2.0], [0.0, 0.0, 3.0], [-1.5, -1.5, 1.5]]

    Source 001 (Definition 2.1) takes one minimiser for all norms; Dong et al. 2021.
    """
    check_states(x)
    if center not in CENTRES:
        raise ValueError(f"there is no center {center!r}; give one of {', '.join(CENTRES)}.")
    return x - CENTRES[center](x)[..., None, :]


def composite_norm(x: Float[Tensor, "... rows columns"]) -> Float[Tensor, "*batch"]:
    """sqrt(|X|_1 |X|_inf), the geometric mean of the largest column and the largest row sum of |X|. It is no norm.

    It is homogeneous and |AB| <= |A| |B|, but |A + B| may exceed |A| + |B|: the more the larger the matrices, so a sum over heads needs
    bounds on |.|_1 and |.|_inf separately.

    >>> a = torch.zeros(16, 16)
    >>> a[:, 0] = 1
    >>> [round(composite_norm(x).item(), 4) for x in (a, a.mT, a + a.mT)]
    [4.0, 4.0, 17.0]

    Source 001, Definition 2.1.
    """
    size = x.abs()
    return (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt()


def check_states(x: Tensor, name: str = "x") -> None:
    """Refuse what has no tokens, no dims, or no finite numbers."""
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; give (..., tokens, dim) with at least one of each.")
    if not x.is_floating_point():
        raise TypeError(f"{name} holds {x.dtype}; give floating-point states.")
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(
            f"{name} holds {bad} numbers that are nan or infinite; find what made them (half precision, a bad weight)."
        )
