"""Finite: what is said of an attention call with NaN or infinite numbers: in which layer, of which weights, and what to do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import Capture

NAMED = 3  # weights told by name


def check_finite(call: Capture, model: nn.Module) -> None:
    """Refuse a call whose q, k or v hold NaN or infinite numbers at real tokens, and say where they may come from.

    >>> q, weight = torch.zeros(1, 1, 3, 2), nn.Linear(2, 2)
    >>> check_finite(Capture("layer.0", q, q, q), weight)
    >>> check_finite(Capture("layer.0", q, q, q / 0), weight)
    Traceback (most recent call last):
    ...
    ValueError: the v of layer.0 in Linear hold NaN or infinite numbers; all weights are finite and in float32, so look at the inputs,
        and for numbers that grow too large in the layers before.
    """
    keys = call.mask.keys
    if keys is None and call.k.shape[-2] == call.q.shape[-2]:
        keys = call.real
    given = {"q": (call.q, call.real), "k": (call.k, keys), "v": (call.v, keys)}
    bad = [name for name, (x, real) in given.items() if not _finite(x, real)]
    if bad:
        held = f"the {', '.join(bad)} of {call.layer} in {type(model).__name__} hold NaN or infinite numbers"
        raise ValueError(f"{held}; {why_not_finite(model)}.")


def why_not_finite(model: nn.Module) -> str:
    """The weights of a model that are not finite and what to do; where all are, what else may be the cause."""
    bad = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    if bad:
        more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
        verb = "is" if len(bad) == 1 else "are"
        return f"{', '.join(bad[:NAMED])}{more} {verb} not finite either: mend the weights, or load another copy"
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    coarse = sorted(str(kind).removeprefix("torch.") for kind in kinds if torch.finfo(kind).bits < 32)
    if coarse:
        return f"all weights are finite, so {' and '.join(coarse)} may overflow: load it with dtype=torch.float32"
    names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "no dtype"
    return f"all weights are finite and in {names}, so look at the inputs, and for numbers that grow too large in the layers before"


def _finite(x: Tensor, real: Tensor | None) -> bool:
    """Whether all numbers (batch, heads, tokens, dim) of real tokens (batch, tokens) are finite."""
    if bool(x.sum().isfinite()) or bool(x.isfinite().all()):  # the sum is the quicker look
        return True
    return real is not None and bool((x.isfinite().all(-1).all(1) | ~real).all())
