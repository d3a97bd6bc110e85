"""Merge: partial attentions over disjoint keys add up exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

Part = tuple["Float[Tensor, '... queries width']", "Float[Tensor, '... queries']"]


def merge(*parts: Part) -> Part:
    """The (out, lse) of all keys from the (out, lse) of each part of them; a part that saw no key (lse -inf) adds nothing.

    >>> from heedful.ops import hop
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
    >>> out, lse = merge(hop(q, k[:, :, :2], v[:, :, :2]), hop(q, k[:, :, 2:], v[:, :, 2:]))
    >>> torch.allclose(out, hop(q, k, v)[0], atol=1e-5)
    True
    """
    if not parts:
        raise ValueError("merge was given no part; give at least one (out, lse) pair.")
    lses = torch.stack([lse for _, lse in parts])
    highest = lses.detach().amax(0).clamp_min(torch.finfo(lses.dtype).min)  # finite where no part saw a key
    weights = torch.exp(lses - highest)
    total = weights.sum(0)
    blind = total == 0
    shares = weights / total.masked_fill(blind, 1)
    out = sum(part * share[..., None].to(part.dtype) for (part, _), share in zip(parts, shares, strict=True))
    safe = torch.log(total.masked_fill(blind, 1)) + highest
    return out, safe.masked_fill(blind, -torch.inf)  # type: ignore[return-value]
