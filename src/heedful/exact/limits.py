"""Limits: how far softmax(beta s) is from its two ends, argmax at a large beta and the mean of all at beta 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def hard_bound(logits: Float[Tensor, "... keys"], beta: float) -> Float[Tensor, ...]:
    """What no weight of softmax(beta logits) can differ by from argmax: (n - 1) exp(-beta margin), with n keys that are visible.

    The margin is the largest logit less the second. beta is an INVERSE temperature: a large one is hard, beta 0 looks everywhere alike.
    Where the two largest logits are equal there is no argmax to come near, and the bound stays at n - 1.

    >>> logits = torch.tensor([0.0, 1.0, 3.0])
    >>> (8 * logits).softmax(-1), hard_bound(logits, 8.0)  # 2 exp(-16)
    (tensor([3.7751e-11, 1.1254e-07, 1.0000e+00]), tensor(2.2507e-07))
    """
    _check(logits, beta)
    if logits.shape[-1] == 1:
        return torch.zeros_like(logits[..., 0])
    first, second = logits.topk(2).values.unbind(-1)
    others = (logits > -torch.inf).sum(-1) - 1
    return (others * torch.exp(-_times(beta, first - second))).masked_fill(others <= 0, 0)


def soft_bound(logits: Float[Tensor, "... keys"], beta: float) -> Float[Tensor, ...]:
    """What no weight of softmax(beta logits) can differ by from 1/n: (exp(beta spread) - 1) / n, and never more than 1 - 1/n.

    The spread is the largest less the smallest logit of the n keys that are visible.

    >>> soft_bound(torch.tensor([0.0, 1.0, 3.0]), 0.01)  # (exp(0.03) - 1) / 3
    tensor(0.0102)
    """
    _check(logits, beta)
    seen = logits > -torch.inf
    count = seen.sum(-1).clamp_min(1)
    spread = (logits.amax(-1) - logits.masked_fill(~seen, torch.inf).amin(-1)).clamp_min(0)
    return torch.minimum(torch.expm1(_times(beta, spread)) / count, 1 - 1 / count.to(logits.dtype))


def _times(beta: float, gap: Tensor) -> Tensor:
    """beta gap; where there is no gap even an infinite beta makes none."""
    return (beta * gap).masked_fill(gap == 0, 0)


def _check(logits: Tensor, beta: float) -> None:
    if not beta >= 0:
        raise ValueError(f"beta is {beta}; an inverse temperature is 0 or more.")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits are {tuple(logits.shape)}; give (..., keys) with at least one key.")
    if not bool((logits < torch.inf).all()):
        raise ValueError("logits hold nan or inf; give numbers, and -inf for keys that are hidden.")
