"""The hop: exact attention of some queries over some keys, with a log-weight for each key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..mask import Mask
from .dispatch import fusable
from .fused import FusedHop

if TYPE_CHECKING:
    from jaxtyping import Float

TILE = 2**22  # logits that one tile of the plain formula may hold
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
    if fusable(q, k, v) and cap is None and not bias_learns:
        return FusedHop.apply(q, k, v, bias, mask, scale)  # type: ignore[return-value]
    return _tiled(q, k, v, bias, mask, scale, cap)


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


def formula(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """The plain formula on one tile: logits, log of their sum, weighted values."""
    q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
    logits = q @ k.mT * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if added is not None:
        logits = logits + added
    blind = (logits.detach() == -torch.inf).all(-1)
    lse = torch.logsumexp(logits.masked_fill(blind[..., None], 0), -1)
    weights = torch.exp(logits - lse[..., None])  # a blind row's are exp(-inf)
    return weights @ v, lse.masked_fill(blind, -torch.inf)


def _tiled(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Mask, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """The plain formula over blocks of queries, recomputed in the backward pass: never L x L."""
    (batch, heads, queries, _), keys = q.shape, k.shape[-2]
    block = max(1, TILE // max(1, batch * heads * keys))

    def one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(start, start + q.shape[-2], device=q.device)
        added = mask.tile(rows, 0, keys)
        if bias is not None:
            added = bias[..., None, :] if added is None else added + bias[..., None, :]
        return formula(q, k, v, added, scale, cap)

    if block >= queries:
        out, lse = one(q, k, v, bias, 0)
        return out.to(v.dtype), lse
    parts = []
    for start in range(0, queries, block):
        call = (q[:, :, start : start + block], k, v, bias, start)
        parts.append(checkpoint(one, *call, use_reentrant=False) if torch.is_grad_enabled() else one(*call))
    return torch.cat([out for out, _ in parts], -2).to(v.dtype), torch.cat([lse for _, lse in parts], -1)
