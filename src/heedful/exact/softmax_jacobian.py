"""The Jacobian diag(p) - p p^T of a softmax: its 2-norm by the secular equation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

HALVINGS = 60  # of the interval in which the root lies


def softmax_jacobian_norm(p: Float[Tensor, "*rows keys"]) -> Float[Tensor, "*rows"]:
    """|diag(p) - p p^T|_2 for each row of probabilities: the root in [p_(2), p_(1)] of sum p_i^2 / (p_i - l) = 1; 1/2 at most.

    The root is sought by halving, in float64, of sum p_i / (p_i - l), which is that less 1 divided by l: nothing cancels, however hard
    the row. A row of no mass, as where every key is hidden, has the norm 0.

    >>> p = torch.randn(50, dtype=torch.float64).softmax(-1)
    >>> truth = torch.linalg.matrix_norm(p.diag() - p[:, None] * p, 2)
    >>> torch.allclose(softmax_jacobian_norm(p), truth, rtol=1e-12)
    True

    Golub 1973, Some modified matrix eigenvalue problems.
    """
    if p.ndim == 0 or not bool(((p >= 0) & p.isfinite()).all()):
        raise ValueError("p must hold probabilities, none negative or nan; give what softmax gives.")
    wide = p.double()
    total = wide.sum(-1)
    room = max(1e-12, 100 * torch.finfo(p.dtype).eps)  # for a sum's own rounding
    if not bool((((total - 1).abs() < room) | (total == 0)).all()):
        raise ValueError(f"rows of p must sum to 1; the farthest sums to {float(total.flatten()[(total - 1).abs().argmax()])}.")
    if p.shape[-1] < 2:
        return torch.zeros_like(p[..., 0]) if p.shape[-1] else p.sum(-1)
    high, low = (t[..., 0] for t in wide.topk(2).values.split(1, -1))
    rest = wide.scatter(-1, wide.argmax(-1, keepdim=True), 0)  # all but the first largest
    return _root(high, low, rest).to(p.dtype)


def _root(high: Tensor, low: Tensor, rest: Tensor) -> Tensor:
    """Where p_(1) / (p_(1) - l) = sum over the others of p_i / (l - p_i); the left side grows with l, the right one falls."""
    left = rest.sum(-1)  # 1 - p_(1): the norm lies between its own diagonal entry and the trace
    least, most = torch.maximum(low, high * left), torch.minimum(high, 2 * left)
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        others = (rest / (middle[..., None] - rest)).nan_to_num(0, posinf=torch.inf).sum(-1)
        below = high / (high - middle) < others
        least, most = torch.where(below, middle, least), torch.where(below, most, middle)
    return torch.where(high > low, (least + most) / 2, high)  # where two are largest it is they
