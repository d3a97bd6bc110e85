"""The local Lipschitz constant of an attention layer: the largest singular value of its Jacobian, which is never formed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .derivative import Derivative
from .singular import Stretch, largest_singular

if TYPE_CHECKING:
    from jaxtyping import Float


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
    start = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(x)
    return largest_singular(near.push, near.pull, start, tolerance, iterations)
