"""Probe: N = dL/dM, M = s W_Q' W_K^T, from autograd through one fused attention call with zero columns added to its queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..lesson import Lesson
from ..ops.hop import hop

if TYPE_CHECKING:
    from jaxtyping import Float

COLUMNS = 64  # of X at once: fused kernels bound the dim of a head


def logit_gradient(lesson: Lesson, columns: int = COLUMNS) -> Float[Tensor, "heads left right"]:
    """N = sum over texts of X'^T (dL/dS) X for each query head, in memory that grows with the tokens, not with their square.

    With q' = [s q, X' Z], k' = [k, X], scale 1 and Z = 0 the call is what it was, and its gradient by Z is N.

    >>> x, gradient = torch.randn(1, 5, 3), torch.randn(1, 1, 5, 3)
    >>> logits = (x @ x.mT).requires_grad_()
    >>> (g,) = torch.autograd.grad(logits.softmax(-1) @ x, logits, gradient[0])
    >>> lesson = Lesson("layer", x[:, None], x[:, None], x[:, None], states=x, gradient=gradient)
    >>> torch.allclose(logit_gradient(lesson)[0], (lesson.augmented.mT @ g @ x)[0], atol=1e-4)
    True
    """
    lesson.check()
    if lesson.null is not None:
        raise ValueError(f"{lesson.layer} gives mass to no key, which a fused call does not know; take heedful.statistics.Growth.")
    high = lesson.logits.k.dtype
    x, sources, gradient = lesson.augmented.to(high), lesson.keyed.to(high), lesson.gradient.to(high)  # type: ignore[union-attr]
    found = [_piece(lesson, x, part, gradient) for part in sources.split(max(1, columns), -1)]
    return torch.cat(found, -1)


def _piece(lesson: Lesson, x: Tensor, sources: Tensor, gradient: Tensor) -> Tensor:
    """N for some columns of X."""
    high = x.dtype
    q, k, v = (t.detach().to(high) for t in (lesson.q, lesson.k, lesson.v))
    with torch.enable_grad():
        z = x.new_zeros(q.shape[1], x.shape[-1], sources.shape[-1], requires_grad=True)
        probing = torch.cat([q * lesson.scale, x[:, None] @ z], -1)
        probed = torch.cat([k, sources[:, None].expand(-1, k.shape[1], -1, -1)], -1)
        out, _ = hop(probing, probed, v, mask=lesson.mask, scale=1.0, cap=lesson.cap)
        return torch.autograd.grad(out, z, gradient)[0].detach()
