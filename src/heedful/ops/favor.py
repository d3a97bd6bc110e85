"""FAVOR+: softmax attention estimated through random features, linear in tokens, stable at any scale and without an epsilon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .again import differentiated
from .dispatch import holds_features, is_plain, writes_own_backward
from .hop import hop

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

NOWHERE = -1e30  # the maximum of a feature that no key feeds: finite, so that nothing subtracts infinities


def favor(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch key_heads keys dim"],
    v: Float[Tensor, "batch key_heads keys width"],
    directions: Float[Tensor, "features dim"],
    scale: float,
    keys: Bool[Tensor, "batch keys"] | None = None,
) -> Float[Tensor, "batch heads queries width"]:
    """Estimate softmax(scale q k^T) v by exp(x.y) = E exp(w.x - |x|^2/2) exp(w.y - |y|^2/2), w normal; `keys` is False at padding.

    Each feature is divided by its largest key and each query by its largest feature, which cancels exactly, so that the denominator
    is at least 1: no epsilon. A query without keys gets 0. Logits and sums are float32 at least.

    >>> q, k, v = torch.randn(3, 1, 2, 6, 8) / 3
    >>> exact = (q @ k.mT).softmax(-1) @ v
    >>> torch.allclose(favor(q, k, v, torch.randn(20000, 8), 1.0), exact, atol=0.02)
    True

    Choromanski et al. 2021, Rethinking Attention with Performers.
    """
    x, y, values, lows = folded(q, k, v, scale, keys)
    rows = directions.to(x) * scale**0.5  # takes the scale, so that q and k need no copy
    if is_plain():
        out = formula(x, y, values, rows, lows)
    elif rows.requires_grad or not writes_own_backward() or not holds_features((x.shape[1] + y.shape[1]) * len(x) * len(rows)):
        out = two_hops(x, y, values, rows, lows)
    else:
        out = FusedFavor.apply(x, y, values, rows, lows.detach(), scale)
    return out.view(*q.shape[:3], v.shape[-1]).to(v.dtype)  # type: ignore[union-attr]


def folded(q: Tensor, k: Tensor, v: Tensor, scale: float, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch and key heads as one dimension, heads that share keys as more queries; with each key's log-weight -|y|^2/2.

    Padding has log-weight -inf and nothing else left of it, so that not even a NaN gets through.
    """
    if scale < 0:
        raise ValueError(f"scale is {scale}; random features need one of at least 0 (1/sqrt(dim) is usual).")
    high = torch.promote_types(q.dtype, torch.float32)
    x, y, values = (t.to(high) for t in (q, k, v))
    if keys is not None:
        hidden = ~keys[:, None, :, None]
        y, values = y.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    many = k.shape[0] * k.shape[1]
    x, y, values = (t.reshape(many, t.shape[1] // k.shape[1] * t.shape[2], t.shape[3]) for t in (x, y, values))
    hidden = None if keys is None else ~keys.expand(len(k), -1).repeat_interleave(k.shape[1], 0)
    return x, y, values, log_weights(y, scale, hidden)


def log_weights(k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    lows = torch.linalg.vecdot(k, k) * (-0.5 * scale)
    return lows if hidden is None else lows.masked_fill(hidden, -torch.inf)


def formula(q: Tensor, k: Tensor, v: Tensor, directions: Tensor, lows: Tensor) -> Tensor:
    """The plain formula: features of keys and queries, then two products."""
    logits = k @ directions.mT + lows[..., None]  # (batch, keys, features)
    highest = logits.detach().amax(-2, keepdim=True).clamp_min(NOWHERE)
    key_features = torch.exp(logits - highest)
    logits = q @ directions.mT + highest
    query_features = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    total = query_features @ key_features.sum(-2)[..., None]
    return query_features @ (key_features.mT @ v) / total.masked_fill(total == 0, 1)


def two_hops(q: Tensor, k: Tensor, v: Tensor, directions: Tensor, lows: Tensor) -> Tensor:
    """The same as exact attention of directions over keys, then of queries over directions: no feature is stored."""
    q, k, v, rows = (t[:, None] for t in (q, k, v, directions.expand(len(q), -1, -1)))
    values, weights = hop(rows, k, v, bias=lows[:, None], scale=1.0)
    return hop(q, rows, values, bias=weights.clamp_min(NOWHERE), scale=1.0)[0][:, 0]


class FusedFavor(torch.autograd.Function):
    """Ten matrix products with everything between them in place; the features are kept for the backward pass.

    Both sides are softmaxes, of keys per feature and of features per query, so a query's gradient needs no derivative of the maxima.
    The backward pass includes the way through lows = -scale |k|^2/2.
    """

    @staticmethod
    def forward(ctx, q, k, v, directions, lows, scale):
        (many, tokens, _), features = k.shape, len(directions)
        kept = aligned(k, features, tokens)  # tokens last: the softmax then runs along memory
        torch.baddbmm(lows.clamp_min(NOWHERE)[:, None], directions.expand(many, -1, -1), k.mT, out=kept[..., :tokens])
        weights = kept.amax(-1)
        torch.softmax(kept, -1, out=kept)
        weights.sub_(kept.amax(-1).log_())  # the log of what the softmax divided by, (batch, features)
        means = torch.bmm(kept[..., :tokens], v)  # (batch, features, width)
        asked = aligned(q, q.shape[1], features)
        torch.baddbmm(weights[:, None], q, directions.mT.expand(many, -1, -1), out=asked[..., :features])
        torch.softmax(asked, -1, out=asked)
        out = torch.bmm(asked[..., :features], means)
        ctx.save_for_backward(q, k, v, directions, lows, out, asked, kept, means)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, directions, lows, out, asked, kept, means = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():
            return differentiable(formula, (q, k, v, directions, lows), ctx.scale, grad)
        along, tokens, features = directions.expand(len(k), -1, -1), k.shape[1], len(directions)
        delta = (grad * out).sum(-1, keepdim=True).neg_()
        slopes = torch.empty_like(asked)  # of the queries' logits
        torch.baddbmm(delta, grad, means.mT, out=slopes[..., :features])
        slopes.mul_(asked)
        grad_q = torch.bmm(slopes[..., :features], along)
        grad_means = torch.bmm(asked[..., :features].mT, grad)
        offset = torch.bmm(asked[..., :features].mT, delta)
        slopes = torch.empty_like(kept)  # of the keys' logits
        torch.baddbmm(offset, grad_means, v.mT, out=slopes[..., :tokens])
        slopes.mul_(kept)
        grad_v = torch.bmm(kept[..., :tokens].mT, grad_means)
        slopes = slopes[..., :tokens].mT
        grad_k = torch.bmm(slopes, along).addcmul_(k, slopes.sum(-1, keepdim=True), value=-ctx.scale)
        return grad_q, grad_k, grad_v, None, None, None


def aligned(like: Tensor, rows: int, columns: int) -> Tensor:
    """Memory for rows of logits, lengthened by logits that no softmax sees.

    Whole cache lines take half the time in a softmax, and rows that are no power of two apart do not share cache sets.
    """
    width = columns + -columns % 16
    whole = like.new_empty(len(like), rows, width + 16 * (width % 512 == 0))
    whole[..., columns:] = NOWHERE
    return whole


def differentiable(formula: Callable[..., Tensor], inputs: tuple[Tensor, ...], scale: float, grad: Tensor) -> tuple:
    """The gradients by a plain formula, with the graph that a second derivative needs."""
    q, k, v, directions, lows = inputs
    hidden = lows == -torch.inf

    def out(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (formula(q, k, v, directions, log_weights(k, scale, hidden)),)

    return *differentiated(out, (q, k, v), (grad,)), None, None, None
