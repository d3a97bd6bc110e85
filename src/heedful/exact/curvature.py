"""The second derivative of attention along a direction of its queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention import Capture
from ..ops.sweep import Sweep

if TYPE_CHECKING:
    from jaxtyping import Float


@torch.no_grad()
def query_curvature(call: Capture, dq: Float[Tensor, "batch heads queries dim"]) -> Float[Tensor, "batch heads queries width"]:
    """d^2 o_i / dt^2 for the queries q + t dq: E[(kappa - E kappa)^2 (v - o)] under P_i, kappa_j = s dq_i . k_j; over tiles.

    >>> q, k, v, dq = torch.randn(4, 1, 1, 5, 8, dtype=torch.float64)
    >>> attend = lambda t: ((q + t * dq) @ k.mT).softmax(-1) @ v
    >>> twice = torch.func.jacfwd(torch.func.jacfwd(attend))(torch.zeros((), dtype=torch.float64))
    >>> torch.allclose(query_curvature(Capture("layer", q, k, v), dq), twice)
    True
    """
    if call.cap is not None:
        raise ValueError(f"logits with a soft cap of {call.cap} bend by themselves; take a call without one.")
    if dq.shape != call.q.shape:
        raise ValueError(f"dq is {tuple(dq.shape)} but the queries are {tuple(call.q.shape)}; give a direction for each.")
    sweep = Sweep(call.q, call.logits)
    k, v = (t.to(sweep.k.dtype).repeat_interleave(sweep.shared, 1) for t in (call.k, call.v))
    dq, out = dq.to(k.dtype) * call.scale, v.new_zeros(*call.q.shape[:3], v.shape[-1])
    for tile in sweep:
        here, there = (tile.entries, tile.heads), (tile.entries, tile.heads, tile.keys)
        mass = tile.mass[..., : tile.high - tile.low]
        kappa = dq[(*here, tile.spots)] @ k[there].mT
        mean = (mass * kappa).sum(-1, keepdim=True)
        bent = mass * (kappa - mean).square()
        lost = 0 if tile.share is None else (1 - tile.share)[..., None] * mean.square()  # of the null, which does not move
        out[(*here, tile.spots)] = bent @ v[there] - (bent.sum(-1, keepdim=True) + lost) * (mass @ v[there])
    return out.to(call.v.dtype)
