"""The plain formula of the hop: in one tile, and over tiles of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mask import Mask
from .again import again

TILE = 2**22  # logits that one tile may hold


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


def tiled(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Mask, scale: float, cap: float | None = None
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
        parts.append(again(one, *call))
    return torch.cat([out for out, _ in parts], -2).to(v.dtype), torch.cat([lse for _, lse in parts], -1)
