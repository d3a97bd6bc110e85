"""Causal FAVOR+: the log features of each span of tokens are made where they are read, from q, k and the directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import is_plain, writes_own_backward
from .favor import differentiable, folded
from .reading import formula
from .spans import read_all, read_back, read_only

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def favor_causal(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch key_heads keys dim"],
    v: Float[Tensor, "batch key_heads keys width"],
    directions: Float[Tensor, "features dim"],
    scale: float,
    keys: Bool[Tensor, "batch keys"] | None = None,
    offset: int = 0,
) -> Float[Tensor, "batch heads queries width"]:
    """`favor` where query i sees the keys up to i + offset, in time linear in the tokens.

    >>> from heedful.ops.favor import favor
    >>> q, k, v, w = *torch.randn(3, 1, 2, 6, 8), torch.randn(32, 8)
    >>> last = favor(q, k[:, :, :4], v[:, :, :4], w, 1.0)[:, :, 3]
    >>> torch.allclose(favor_causal(q, k, v, w, 1.0)[:, :, 3], last, atol=1e-5)
    True
    """
    if offset < 0:
        raise ValueError(f"a mask's offset is the position of the first query among the keys; got {offset}, give 0 or more.")
    batch, heads, queries, _ = q.shape
    total = offset + queries
    k, v = k[:, :, :total], v[:, :, :total]
    x, y, values, lows = folded(q, k, v, scale, None if keys is None else keys[:, :total])
    x = x.view(len(y), heads // k.shape[1], queries, -1).transpose(1, 2)  # (many, queries, group, dim)
    if offset or total > k.shape[2]:  # as many queries as keys
        x = F.pad(x, (0, 0, 0, 0, offset, 0))
        y, values = (F.pad(t, (0, 0, 0, total - t.shape[1])) for t in (y, values))
        lows = F.pad(lows, (0, total - lows.shape[1]), value=-torch.inf)
    rows = directions.to(x) * scale**0.5
    if is_plain() or rows.requires_grad or not writes_own_backward():
        out = _formula(x, y, values, rows, lows)
    elif torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or values.requires_grad):
        out = CausalFavor.apply(x, y, values, rows, lows.detach(), scale)
    else:
        out = read_only(Projected(x, y, rows.mT, lows), len(rows), values, _blind(lows))
    out = out[:, offset:].transpose(1, 2)  # type: ignore[index]
    return out.reshape(batch, heads, queries, v.shape[-1]).to(v.dtype)


def _formula(q: Tensor, k: Tensor, v: Tensor, directions: Tensor, lows: Tensor) -> Tensor:
    return formula(q @ directions.mT, k @ directions.mT + lows[..., None], v)


def _blind(lows: Tensor) -> Tensor:
    """(many, tokens): whether there is no key so far."""
    return (lows == -torch.inf).cummin(-1).values


class Projected(NamedTuple):
    """Log features along directions, of queries (many, tokens, group, dim) and of keys (many, tokens, dim) with log-weights."""

    queries: Tensor
    keys: Tensor
    across: Tensor  # (dim, features)
    lows: Tensor

    def kept(self, here: slice) -> Tensor:
        return torch.baddbmm(self.lows[:, here, None], self.keys[:, here], self.across.expand(len(self.keys), -1, -1))

    def asked(self, here: slice, base: Tensor) -> Tensor:
        rows = self.queries[:, here]
        return torch.baddbmm(base, rows.reshape(len(base), -1, rows.shape[-1]), self.across.expand(len(base), -1, -1))


class CausalFavor(torch.autograd.Function):
    """All tokens read; its gradient walks the spans back, and includes the way through lows = -scale |k|^2/2."""

    @staticmethod
    def forward(ctx, q, k, v, directions, lows, scale):
        out, ctx.places, saved = read_all(Projected(q, k, directions.mT, lows), len(directions), v, _blind(lows))
        ctx.save_for_backward(q, k, v, directions, lows, *saved)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, directions, lows, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable(_formula, (q, k, v, directions, lows), ctx.scale, grads[0])
        along = directions.expand(len(k), -1, -1)
        grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        for here, to_q, to_k, to_v in read_back(ctx.places, saved, grads[0]):
            torch.bmm(to_q, along, out=grad_q[:, here].flatten(1, 2))
            torch.bmm(to_k, along, out=grad_k[:, here])
            grad_k[:, here].addcmul_(k[:, here], to_k.sum(-1, keepdim=True), value=-ctx.scale)
            grad_v[:, here] = to_v
        return grad_q, grad_k, grad_v, None, None, None
