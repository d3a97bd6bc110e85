"""The mask of a call as the attention module hands it over - lazy, dense, two-dimensional or none - as our Mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..mask import Mask, Rule
from .lazy import LazyMask


def mask_of_call(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    given: Any,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
) -> Mask:
    """The Mask of one attention call; no mask means causal where the module is, as in transformers' sdpa."""
    queries, keys = q.shape[-2], k.shape[-2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and queries > 1
    if given is None:
        window = sliding_window if sliding_window is not None and sliding_window < max(queries, keys) and queries > 1 else None
        mask = Mask(causal=causal, window=window)
    elif isinstance(given, LazyMask):
        mask = given.mask
    elif isinstance(given, Tensor) and given.ndim == 2:  # flash attention's padding: the last query meets the last key
        mask = Mask(causal=causal, keys=given.bool(), offset=keys - queries if causal else 0)
    elif isinstance(given, Tensor):
        mask = dense_mask(given)
    else:
        raise TypeError(f"cannot read a mask of type {type(given).__name__}; give a (batch, 1, queries, keys) tensor or none.")
    return mask if position_bias is None else _biased(mask, position_bias, keys)


def dense_mask(given: Tensor) -> Mask:
    """A boolean (True is visible) or additive mask that a user wrote out, as the simplest Mask that says it.

    >>> dense_mask(torch.tensor([[[[0.0, -torch.inf]]]])).keys
    tensor([[ True, False]])
    """
    given = given[None, None] if given.ndim == 2 else given[:, None] if given.ndim == 3 else given
    if given.ndim != 4:
        raise ValueError(f"a mask must be (batch, heads or 1, queries, keys); got {tuple(given.shape)}.")
    seen = given if given.dtype == torch.bool else _as_boolean(given)
    if seen is None:
        return Mask(bias=given)
    if seen.shape[1] > 1 and not bool((seen == seen[:, :1]).all()):
        return Mask(bias=torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf))
    return _boolean_mask(seen[:, 0])


def _boolean_mask(seen: Tensor) -> Mask:
    """A (batch, queries, keys) mask as padding and causality where it is no more than that, else as a rule that looks it up."""
    queries, keys = seen.shape[1:]
    real = seen.any(1)  # keys that some query sees
    padding = None if bool(real.all()) else real
    if queries == 1 or bool((seen == real[:, None]).all()):
        return Mask(keys=padding)
    for offset in {0, keys - queries}:
        past = torch.ones(queries, keys, dtype=torch.bool, device=seen.device).tril(offset)
        if bool((seen == (past & real[:, None])).all()):
            return Mask(causal=True, keys=padding, offset=offset)
    return Mask(rule=Rule(lambda batch, head, query, key: seen[batch % len(seen), query, key], len(seen)))


def _as_boolean(given: Tensor) -> Tensor | None:
    """Which pairs an additive mask leaves alone, where it only leaves alone or hides; None where it weighs."""
    if given.requires_grad:
        return None
    hidden = given <= torch.finfo(given.dtype).min / 2
    return ~hidden if bool(((given == 0) | hidden).all()) else None


def _biased(mask: Mask, bias: Tensor, keys: int) -> Mask:
    bias = bias[..., :keys]
    if not bias.requires_grad and not bool(bias.any()):
        return mask  # T5's cross attention hands over zeros
    return replace(mask, bias=bias if mask.bias is None else mask.bias + bias)
