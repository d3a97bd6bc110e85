"""The hop: exact attention of some queries over some keys, with a log-weight for each key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..mask import Mask
from .dispatch import fusable
from .formula import formula, tiled
from .fused import FusedHop

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["EVERYTHING", "check_shapes", "formula", "hop"]

EVERYTHING = Mask()


def hop(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch key_heads keys dim"],
    v: Float[Tensor, "batch key_heads keys width"],
    bias: Float[Tensor, "batch heads keys"] | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> tuple[Float[Tensor, "batch heads queries width"], Float[Tensor, "batch heads queries"]]:
    """Attend and also return the log of what the softmax divided by; both are differentiable.

    `bias` is a log-weight for each key, `cap` a soft cap (cap * tanh(logit / cap)). A query that sees no key gets out 0 and lse -inf.
    lse is float32 at least.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> out, lse = hop(q, k, v, scale=1.0)
    >>> logits = q @ k.mT
    >>> torch.allclose(out, logits.softmax(-1) @ v, atol=1e-5), torch.allclose(lse, logits.logsumexp(-1), atol=1e-5)
    (True, True)
    """
    mask = EVERYTHING if mask is None else mask
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    check_shapes(q, k, v)
    mask.check(q.shape[-2], k.shape[-2])
    bias_learns = mask.bias is not None and mask.bias.requires_grad and torch.is_grad_enabled()
    if fusable(q, k, v) and cap is None and not bias_learns and abs(scale) > 2 / torch.finfo(q.dtype).max:  # a kernel needs 1/scale
        q, scale = (q, scale) if scale > 0 else (-q, -scale)  # causal, it hides by -inf * scale
        return FusedHop.apply(q, k, v, bias, mask, scale)  # type: ignore[return-value]
    return tiled(q, k, v, bias, mask, scale, cap)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q, k, v that cannot be one attention call."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, k, v must be (batch, heads, tokens, dim); got {q.ndim}, {k.ndim} and {v.ndim} dimensions.")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries have {q.shape[-1]} dims but keys {k.shape[-1]}; they must agree.")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} differ in batch, key heads or keys.")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly; use a multiple of {k.shape[1]}.")
