"""The largest singular value of a linear map that is known by what it does, by Golub-Kahan-Lanczos; one map, or many at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stretch:
    """The largest singular value that was found: another lies within `error` of it at most, and none found is larger."""

    value: float
    error: float  # |J^T u - value v| of its singular vectors u, v
    iterations: int  # products with J; as many with its transpose


@torch.no_grad()
def largest_singular(push: Map, pull: Map, start: Tensor, tolerance: float = 1e-3, iterations: int = 100) -> Stretch:
    """The largest singular value of a linear map given by its products, its error at most `tolerance` of it unless iterations end first.

    Golub-Kahan-Lanczos from `start`, the right vectors kept and made orthogonal again, which keeps the left ones so (Simon and Zha
    2000): memory is that of `iterations` inputs. The value is never too large, and its own error is near error^2 / gap.

    >>> m = torch.randn(30, 20, dtype=torch.float64)
    >>> found = largest_singular(lambda x: m @ x, lambda y: m.mT @ y, torch.ones(20, dtype=torch.float64))
    >>> abs(found.value / torch.linalg.matrix_norm(m, 2).item() - 1) < 1e-5
    True

    Golub and Kahan 1965, Calculating the singular values and pseudo-inverse of a matrix.
    """
    if not bool(start.any()):
        raise ValueError("the start is zero and has no direction; give a random one.")
    values, errors, made = _lanczos(lambda x: push(x[0])[None], lambda y: pull(y[0])[None], start[None], tolerance, iterations)
    return Stretch(float(values), float(errors), made)


@torch.no_grad()
def norms(push: Map, pull: Map, start: Float[Tensor, "batch ..."], iterations: int = 60) -> Float[Tensor, " batch"]:
    """The same of many maps that are applied at once, one for each entry of `start`, as near as the iterations come.

    >>> a = torch.randn(3, 6, 4, dtype=torch.float64)
    >>> found = norms(lambda x: a @ x, lambda y: a.mT @ y, torch.randn(3, 4, 1, dtype=torch.float64))
    >>> torch.allclose(found, torch.linalg.matrix_norm(a, 2))
    True
    """
    return _lanczos(push, pull, start, torch.finfo(start.dtype).eps ** 0.5, iterations)[0].to(start)


def _lanczos(push: Map, pull: Map, start: Tensor, tolerance: float, iterations: int) -> tuple[Tensor, Tensor, int]:
    """The values and their errors, (batch,) in float64, and how many products with the map were made."""
    v = _unit(start.flatten(1))
    found, u = [v], torch.zeros(())
    main: list[Tensor] = []  # of the upper bidiagonal matrices, (batch,)
    above: list[Tensor] = []
    values = errors = torch.zeros(len(start), dtype=torch.float64)
    for number in range(1, min(iterations, v.shape[1]) + 1):
        image = push(v.view_as(start))
        u = image - _times(above[-1], u) if above else image
        main.append(_length(u))
        u = _unit(u)
        rest = _away(pull(u).flatten(1) - _times(main[-1], v), found)
        above.append(_length(rest))
        values, errors = _largest(main, above)
        noise = 10 * torch.finfo(rest.dtype).eps * values
        if bool(((errors <= tolerance * values) | (above[-1].double().cpu() <= noise)).all()):
            return values, errors, number
        v = _unit(rest.masked_fill((above[-1] <= noise.to(rest))[:, None], 0))  # an entry that is done goes on with zeros
        found.append(v)
    return values, errors, len(main)


def _largest(main: list[Tensor], above: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The largest singular values of the bidiagonal matrices, and what the next vectors take from them."""
    matrix = torch.diag_embed(torch.stack(main, -1).double().cpu())
    if len(main) > 1:
        matrix += torch.diag_embed(torch.stack(above[:-1], -1).double().cpu(), 1)
    left, values, _ = torch.linalg.svd(matrix)
    return values[:, 0], above[-1].double().cpu() * left[:, -1, 0].abs()


def _away(x: Tensor, found: list[Tensor]) -> Tensor:
    """x, (batch, size), without its parts along what was found."""
    basis = torch.stack(found, 1)
    for _ in range(2):  # twice is enough
        x = x - (basis.mT @ (basis @ x[..., None]))[..., 0]
    return x


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=-1)


def _unit(x: Tensor) -> Tensor:
    return x / _times(_length(x).clamp_min(torch.finfo(x.dtype).tiny), torch.ones_like(x))


def _times(factor: Tensor, x: Tensor) -> Tensor:
    """A number for each entry of a batch."""
    return factor.view(-1, *[1] * (x.ndim - 1)) * x
