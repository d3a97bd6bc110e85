"""Softmax attention: exact, by torch's fused kernels wherever they know the mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Mask, Mechanism
from ..ops.dispatch import is_plain, writes_own_backward
from ..ops.window import window_hop

EXACT = frozenset({"causal", "keys", "window", "sinks", "segments", "bias", "rule", "cross", "cap", "null", "shared"})


@dataclass(eq=False)
class Softmax(Mechanism):
    """softmax(beta * scale * q k^T) v; a larger beta looks harder at fewer keys (beta is an inverse temperature).

    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> torch.allclose(Softmax()(q, k, v), ((q @ k.mT) / 8**0.5).softmax(-1) @ v, atol=1e-5)
    True
    """

    beta: float = 1.0

    supports: ClassVar[frozenset[str]] = EXACT

    def __post_init__(self):
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}; it must be above 0 (1 is the usual attention, large is nearly Hard()).")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, cap: float | None = None, null: Tensor | None = None
    ) -> Tensor:
        return exactly(q, k, v, mask, self.beta * scale, cap, null)


def exactly(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, cap: float | None = None, null: Tensor | None = None
) -> Tensor:
    """softmax(scale q k^T) v under any mask, a soft cap and null logits."""
    if cap is not None or null is not None or not _torch_will_do(q, k, v, mask, scale):
        out, lse = window_hop(q, k, v, mask, scale, cap)
        return out if null is None else out * torch.sigmoid(lse - null[:, None].to(lse.dtype))[..., None].to(out.dtype)
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, scale=scale, enable_gqa=shared)


def _torch_will_do(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> bool:
    """Whether torch's own call knows all that is asked and answers in linear memory."""
    if is_plain() or not mask.demands <= {"causal"} or (mask.causal and mask.offset) or not scale > 0:
        return False
    if q.device.type != "cpu" or not writes_own_backward():
        return True
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return q.shape[-1] == v.shape[-1] and not learns  # else it holds L x L, or has no second derivative
