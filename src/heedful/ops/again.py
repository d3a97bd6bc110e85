"""A formula computed again in the backward pass: to hold less memory, or so that a gradient can be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .dispatch import is_transformed, plain


def again(formula: Callable[..., Any], *inputs: Any) -> Any:
    """formula(*inputs), without keeping what it computes on the way: the backward pass computes it again.

    >>> x = torch.ones(3, requires_grad=True)
    >>> again(torch.exp, x).sum().backward()
    >>> torch.allclose(x.grad, x.exp())
    True
    """
    if not torch.is_grad_enabled() or is_transformed():  # torch.func refuses the hooks of a checkpoint
        return formula(*inputs)
    return checkpoint(formula, *inputs, use_reentrant=False)


def differentiated(
    formula: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs by a plain formula, with the graph that a second derivative needs; None for what needs none.

    For the backward pass of a faster way: `grads` are those of the formula's outputs, None where an output was not used.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> (slope,) = differentiated(lambda x: (x**3,), [x], [torch.tensor(1.0)])
    >>> slope.item(), torch.autograd.grad(slope, x)[0].item()
    (27.0, 18.0)
    """
    ways = [None if t is None else t.view_as(t) for t in inputs]  # one input may be made of another, or be it: each has its own way
    with plain(), torch.enable_grad():
        found = formula(*ways)
    used = [(out, grad) for out, grad in zip(found, grads, strict=True) if grad is not None and out.requires_grad]
    wanted = [way for way in ways if way is not None and way.requires_grad]
    if not used or not wanted:
        return (None,) * len(ways)
    outs, given = zip(*used, strict=True)
    slopes = iter(torch.autograd.grad(outs, wanted, given, create_graph=True, allow_unused=True))
    return tuple(next(slopes) if way is not None and way.requires_grad else None for way in ways)
