"""The largest singular value of a linear map that is known by what it does, by Golub-Kahan bidiagonalisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


def largest_singular(apply: Map, adjoint: Map, start: Tensor, steps: int = 30, tolerance: float = 1e-12) -> Tensor:
    """The 2-norm of `apply`, for each batch entry of `start` (batch, ...); a lower bound that the steps bring to rounding.

    The map and its adjoint are linear on tensors of any shape. The space searched is that of as many power iterations.

    >>> a = torch.randn(1, 6, 4, dtype=torch.float64)
    >>> found = largest_singular(lambda x: a @ x, lambda y: a.mT @ y, torch.randn(1, 4, 1, dtype=torch.float64))
    >>> torch.allclose(found, torch.linalg.matrix_norm(a, 2))
    True

    Golub and Kahan 1965, with full reorthogonalisation.
    """
    size = torch.finfo(start.dtype).tiny
    v = _unit(start, size)
    rights, lefts, diagonal, beside = [v], [], [], []
    best = start.new_zeros(len(start))
    for _ in range(min(steps, start[0].numel())):
        u = _away(apply(rights[-1]), lefts)
        diagonal.append(_length(u))
        lefts.append(_unit(u, size))
        v = _away(adjoint(lefts[-1]), rights)
        beside.append(_length(v))
        rights.append(_unit(v, size))
        former, best = best, _top(diagonal, beside)
        if bool((best - former <= tolerance * best).all()):
            break
    return best


def _top(diagonal: list[Tensor], beside: list[Tensor]) -> Tensor:
    """The norm of the bidiagonal matrix found so far, its last entry beside the diagonal included: (batch,)."""
    b = torch.zeros(len(diagonal[0]), len(diagonal), len(diagonal) + 1, dtype=diagonal[0].dtype, device=diagonal[0].device)
    for i, (a, c) in enumerate(zip(diagonal, beside, strict=True)):
        b[:, i, i], b[:, i, i + 1] = a, c
    return torch.linalg.matrix_norm(b, 2)


def _length(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=-1)


def _unit(x: Tensor, tiny: float) -> Tensor:
    length = _length(x)
    return x / length.clamp_min(tiny).view(-1, *[1] * (x.ndim - 1))


def _away(x: Tensor, found: list[Tensor]) -> Tensor:
    """x without its parts along what was found, which twice is enough to take off; nothing where only rounding is left."""
    whole = _length(x)
    for _ in range(2):
        for y in found:
            along = (x * y).flatten(1).sum(-1)
            x = x - along.view(-1, *[1] * (x.ndim - 1)) * y
    dust = _length(x) <= 8 * torch.finfo(x.dtype).eps * whole
    return x.masked_fill(dust.view(-1, *[1] * (x.ndim - 1)), 0)
