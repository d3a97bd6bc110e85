"""Attention by features: the weight of a key is a sum of products of positive features, given by their logarithms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .again import differentiated
from .dispatch import is_plain, writes_own_backward
from .favor import NOWHERE

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def by_features(
    asked: Float[Tensor, "batch heads queries features"],
    kept: Float[Tensor, "batch key_heads keys features"],
    v: Float[Tensor, "batch key_heads keys width"],
    keys: Bool[Tensor, "batch keys"] | None = None,
) -> Float[Tensor, "batch heads queries width"]:
    """The mean of v with weights sum_r exp(asked_ir) exp(kept_jr); `keys` is False at padding, a query without keys gets 0.

    Each feature is divided by its largest key and each query by its largest feature, which cancels exactly: no epsilon.

    >>> asked, kept, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 3)
    >>> weights = asked.exp() @ kept.exp().mT
    >>> torch.allclose(by_features(asked, kept, v), weights / weights.sum(-1, keepdim=True) @ v, atol=1e-5)
    True
    """
    many = kept.shape[0] * kept.shape[1]
    rows = asked.reshape(many, -1, asked.shape[-1])  # heads that share keys are more queries
    kept, values = (t.reshape(many, *t.shape[2:]) for t in hidden(kept, v.to(kept.dtype), keys))
    own = not is_plain() and writes_own_backward()
    out = ByFeatures.apply(rows, kept, values) if own else formula(rows, kept, values)
    return out.view(*asked.shape[:3], v.shape[-1]).to(v.dtype)  # type: ignore[union-attr]


def hidden(kept: Tensor, v: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log features and values of which padding has nothing left, not even a NaN."""
    if keys is None:
        return kept, v
    at = ~keys[:, None, :, None]
    return kept.masked_fill(at, -torch.inf), v.masked_fill(at, 0)


def formula(asked: Tensor, kept: Tensor, v: Tensor) -> Tensor:
    """The plain formula."""
    highest = _highest(kept.detach())
    key_features = torch.exp(kept - highest)
    asked = asked + highest
    query_features = torch.exp(asked - asked.detach().amax(-1, keepdim=True))
    total = query_features @ key_features.sum(-2)[..., None]
    return query_features @ (key_features.mT @ v) / total.masked_fill(total == 0, 1)


class ByFeatures(torch.autograd.Function):
    """The formula with everything between its products in place."""

    @staticmethod
    def forward(ctx, asked, kept, v):
        highest, values = _highest(kept), F.pad(v, (0, 1), value=1.0)  # the last column sums the weights
        key_features = (kept - highest).exp_()
        state = key_features.mT @ values
        query_features = peaked(asked + highest)
        out, total = divided(query_features @ state)
        ctx.save_for_backward(asked, kept, v, query_features, key_features, values, state, out, total)
        return out

    @staticmethod
    def backward(ctx, *grads):
        asked, kept, v, query_features, key_features, values, state, out, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiated(lambda *given: (formula(*given),), (asked, kept, v), grads)
        grad = of_sums(grads[0], out, total)
        found = query_features.mT @ grad  # of the state
        grad_asked = (grad @ state.mT).mul_(query_features)
        grad_kept = (values @ found.mT).mul_(key_features)
        return grad_asked, grad_kept, (key_features @ found)[..., :-1]


def peaked(logits: Tensor) -> Tensor:
    """exp of the logits, the largest of each row 1; in place."""
    return logits.sub_(logits.amax(-1, keepdim=True)).exp_()


def divided(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted values by the weights' sum, which is their last column, and that sum (1 where there is no key)."""
    total = sums[..., -1:]
    total = total.masked_fill(total == 0, 1)
    return sums[..., :-1] / total, total


def of_sums(grad: Tensor, out: Tensor, total: Tensor) -> Tensor:
    """The gradient of what `divided` was given."""
    return torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], -1).div_(total)


def _highest(kept: Tensor) -> Tensor:
    if kept.shape[-2] == 0:
        return kept.new_full((*kept.shape[:-2], 1, kept.shape[-1]), NOWHERE)
    return kept.amax(-2, keepdim=True).clamp_min(NOWHERE)
