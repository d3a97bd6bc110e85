"""The local Lipschitz constant of an attention layer: the largest singular value of its Jacobian, which is never formed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .derivative import Derivative

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Stretch:
    """The largest singular value that was found: another lies within `error` of it at most, and none found is larger."""

    value: float
    error: float  # |J^T u - value v| of its singular vectors u, v
    iterations: int  # products with J; as many with its transpose


@torch.no_grad()
def largest_singular(
    push: Callable[[Tensor], Tensor],
    pull: Callable[[Tensor], Tensor],
    start: Tensor,
    tolerance: float = 1e-3,
    iterations: int = 100,
) -> Stretch:
    """The largest singular value of a linear map given by its products, its error at most `tolerance` of it unless iterations end first.

    Golub-Kahan-Lanczos from `start`, the right vectors kept and made orthogonal again, which keeps the left ones so (Simon and Zha
    2000): memory is that of `iterations` inputs. The value is never too large, and its own error is near error^2 / gap.

    >>> m = torch.randn(30, 20, dtype=torch.float64)
    >>> found = largest_singular(lambda x: m @ x, lambda y: m.mT @ y, torch.ones(20, dtype=torch.float64))
    >>> abs(found.value / torch.linalg.matrix_norm(m, 2).item() - 1) < 1e-5
    True

    Golub and Kahan 1965, Calculating the singular values and pseudo-inverse of a matrix.
    """
    v, shape = _unit(start.flatten()), start.shape
    found, main, above = [v], [], []  # of the upper bidiagonal matrix
    u, best = torch.zeros(()), Stretch(0.0, 0.0, 0)
    for number in range(1, iterations + 1):
        image = push(v.view(shape))
        u = image - above[-1] * u if above else image
        main.append(float(torch.linalg.vector_norm(u)))
        u = u / max(main[-1], torch.finfo(u.dtype).tiny)
        rest = pull(u).flatten() - main[-1] * v
        for _ in range(2):  # twice is enough
            basis = torch.stack(found)
            rest = rest - basis.mT @ (basis @ rest)
        above.append(float(torch.linalg.vector_norm(rest)))
        best = _stretch(main, above, number)
        noise = torch.finfo(rest.dtype).eps * best.value * 10
        if best.error <= tolerance * best.value or above[-1] <= noise or number == start.numel():
            return best
        v = rest / above[-1]
        found.append(v)
    return best


@torch.no_grad()
def local_lipschitz(
    x: Float[Tensor, "tokens dim"], *layer: Any, tolerance: float = 1e-3, iterations: int = 100, seed: int = 0, **setting: Any
) -> Stretch:
    """How much an attention layer (a `Layer` or its fields) stretches a small move of its tokens x at most: |d out / d x|_2.

    Some 10 iterations, each a product with the Jacobian and one with its transpose, over tiles: O(tokens) memory. It holds near x
    alone; dot-product attention has no global constant (Kim et al. 2021, The Lipschitz constant of self-attention).

    >>> x, w = torch.randn(6, 8, dtype=torch.float64), torch.randn(4, 8, 8, dtype=torch.float64)
    >>> from heedful.exact import attention_jacobian
    >>> truth = torch.linalg.matrix_norm(attention_jacobian(x, *w, heads=2).view(48, 48), 2).item()
    >>> abs(local_lipschitz(x, *w, heads=2).value / truth - 1) < 1e-5
    True
    """
    near = Derivative(x, *layer, **setting)
    start = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
    return largest_singular(near.push, near.pull, start, tolerance, iterations)


def _stretch(main: list[float], above: list[float], number: int) -> Stretch:
    """The largest singular value of the bidiagonal matrix, and what the next vector takes from it."""
    small = torch.diag(torch.tensor(main, dtype=torch.float64))
    if number > 1:
        small += torch.diag(torch.tensor(above[:-1], dtype=torch.float64), 1)
    left, values, _ = torch.linalg.svd(small)
    return Stretch(float(values[0]), above[-1] * abs(float(left[-1, 0])), number)


def _unit(x: Tensor) -> Tensor:
    length = float(torch.linalg.vector_norm(x))
    if length == 0:
        raise ValueError("the start is zero and has no direction; give a random one.")
    return x / length
