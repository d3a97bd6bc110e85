"""Dropout of attention probabilities, as models train with it: exact, block by block, recomputed in the backward pass."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..attention import Capture, Mechanism
from ..mechanisms import Softmax

TILE = 2**22  # probabilities held at once


def with_dropout(mechanism: Mechanism, call: Capture, dropout: float) -> Tensor:
    """The answer with a share `dropout` of the probabilities zeroed; a mechanism without probabilities warns and drops none.

    >>> q, k, v = torch.randn(3, 1, 1, 4, 8)
    >>> torch.allclose(with_dropout(Softmax(), Capture("x", q, k, v), 0.0), Softmax()(q, k, v, scale=1.0), atol=1e-5)
    True
    """
    if type(mechanism) is Softmax:
        return dropped_softmax(call, call.scale * mechanism.beta, dropout)
    text = f"{call.layer}: {type(mechanism).__name__} has no attention probabilities to drop: it trains without the model's attention dropout"
    warnings.warn(f"{text} of {dropout}; set that to 0 to silence this.", stacklevel=2)
    return mechanism(call.q, call.k, call.v, call.mask, call.scale, cap=call.cap, null=call.null)


def dropped_softmax(call: Capture, scale: float, dropout: float) -> Tensor:
    """softmax(scale q k^T) with dropped entries times v."""
    (batch, heads, queries, _), keys = call.q.shape, call.k.shape[-2]
    if call.cap is None and call.null is None and call.mask.demands <= {"causal"} and not call.mask.offset:
        shared = heads != call.k.shape[1]
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, dropout_p=dropout, is_causal=call.mask.causal, scale=scale, enable_gqa=shared
        )
    parts = []
    for rows in torch.arange(queries, device=call.q.device).split(max(1, TILE // max(1, batch * heads * keys))):
        parts.append(checkpoint(_block, call.q[:, :, rows], call.k, call.v, call, rows, scale, dropout, use_reentrant=False))
    return torch.cat(parts, -2).to(call.v.dtype)


def _block(q: Tensor, k: Tensor, v: Tensor, call: Capture, rows: Tensor, scale: float, dropout: float) -> Tensor:
    high = torch.promote_types(q.dtype, torch.float32)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = (q.to(high) @ k.to(high).mT) * scale
    if call.cap is not None:
        logits = call.cap * torch.tanh(logits / call.cap)
    added = call.mask.tile(rows, 0, k.shape[-2])
    logits = logits if added is None else logits + added
    if call.null is not None:
        null = call.null.to(high)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, null], -1)
    blind = (logits.detach() == -torch.inf).all(-1, keepdim=True)
    mass = logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)[..., : k.shape[-2]]
    return F.dropout(mass, dropout) @ v.to(high)
