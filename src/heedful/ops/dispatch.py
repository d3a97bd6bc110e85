"""The one choice between a plain formula and something faster that must equal it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_plain: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def plain() -> Iterator[None]:
    """Inside this block every op computes by its plain torch formula.

    >>> with plain():
    ...     is_plain()
    True
    """
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def is_plain() -> bool:
    return _plain.get()


def fusable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a stock fused attention kernel takes these tensors."""
    if is_plain() or q.device.type not in ("cpu", "cuda"):
        return False
    if min(q.numel(), k.numel(), v.numel()) == 0:
        return False  # the CPU kernel divides by the length
    if not writes_own_backward():
        return False
    return q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.bfloat16, torch.float16)


def writes_own_backward() -> bool:
    """Whether a formula with a backward pass of its own may run here; torch's transforms and compiler need the plain one."""
    return not (torch.compiler.is_compiling() or is_transformed())


def is_transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad ...) is at work."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]


def holds_features(count: int) -> bool:
    """Whether so many numbers may be kept for the backward pass, rather than computed twice."""
    return count <= 2**28
