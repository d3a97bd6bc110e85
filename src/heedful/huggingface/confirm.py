"""Confirming: an adopted model hands the attention interface the same q, k and v as the model it was, and gives the same output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Capture
from .adopt import Unresizable
from .seam import watching


def confirm(native: nn.Module, adopted: nn.Module, run: Callable[[nn.Module], Any]) -> None:
    """Refuse an adopted model whose attention calls in one run are not those of the native one: its table is wrong for it."""
    before, after = (_calls(model, run) for model in (native, adopted))
    named = type(native).__name__
    if [call.layer for call in before] != [call.layer for call in after]:
        raise Unresizable(f"{named} attends in another order once its layers are adopted; its family's table does not fit it.")
    for one, other in zip(before, after, strict=True):
        pairs = (
            ("q", one.q * one.scale, other.q * other.scale),
            ("k", one.k, other.k),
            ("v", one.v, other.v),
            ("output", one.out, other.out),
        )
        for what, x, y in pairs:
            error = _difference(x, y)
            if not error <= 10 * torch.finfo(one.q.dtype).eps ** 0.75:
                raise Unresizable(
                    f"{one.layer} of {named} has another {what} than its family's table says (relative error {error:.1e}); it computes more "
                    "than its family does: merge adapters, and use the family's plain model."
                )


def _calls(model: nn.Module, run: Callable[[nn.Module], Any]) -> list[Capture]:
    kept: list[Capture] = []
    with watching(model, lambda call: kept.append(replace(call, mask=type(call.mask)()))), torch.no_grad():
        run(model)
    return kept


def _difference(x: Tensor | None, y: Tensor | None) -> float:
    if x is None or y is None or x.shape != y.shape:
        return float("inf")
    high = torch.promote_types(x.dtype, torch.float32)
    return float((x.to(high) - y.to(high)).norm() / x.to(high).norm().clamp_min(1e-30))
