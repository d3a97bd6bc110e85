"""Causal FAVOR+: chunks of tokens, a state between them, and per feature a running maximum instead of an epsilon."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import is_plain, writes_own_backward
from .favor import NOWHERE, differentiable, folded

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

CHUNK = 64  # tokens whose pairs are spelled out
SPAN = 16  # chunks taken in one step
FAINT = 1e-18  # a denominator below this may have lost terms: its span is taken again in smaller chunks


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
    if offset or total % CHUNK or total > k.shape[2]:  # as many queries as keys, in whole chunks
        x = F.pad(x, (0, 0, 0, 0, offset, -total % CHUNK))
        y, values = (F.pad(t, (0, 0, 0, x.shape[1] - t.shape[1])) for t in (y, values))
        lows = F.pad(lows, (0, x.shape[1] - lows.shape[1]), value=-torch.inf)
    rows = directions.to(x) * scale**0.5
    if is_plain() or rows.requires_grad or not writes_own_backward():
        out = formula(x, y, values, rows, lows)
    else:
        out = CausalFavor.apply(x, y, values, rows, lows.detach(), scale)
    out = out[:, offset:total].transpose(1, 2)  # type: ignore[index]
    return out.reshape(batch, heads, queries, v.shape[-1]).to(v.dtype)


def formula(q: Tensor, k: Tensor, v: Tensor, directions: Tensor, lows: Tensor) -> Tensor:
    """The plain formula, token by token: each key raises the maxima and joins the state, then its query reads the state."""
    v = F.pad(v, (0, 1), value=1.0)  # the last column sums the weights
    state = v.new_zeros(len(v), len(directions), v.shape[-1])
    highest = v.new_full((len(v), len(directions)), NOWHERE)
    out = []
    for t in range(q.shape[1]):
        logits = k[:, t] @ directions.mT + lows[:, t, None]  # (many, features)
        before, highest = highest, torch.maximum(highest, logits.detach())
        joined = torch.exp(logits - highest)[..., None] * v[:, t, None]
        state = state * torch.exp(before - highest)[..., None] + joined
        asked = q[:, t] @ directions.mT + highest[:, None]  # (many, group, features)
        sums = torch.exp(asked - asked.detach().amax(-1, keepdim=True)) @ state
        out.append(sums[..., :-1] / sums[..., -1:].masked_fill(sums[..., -1:] == 0, 1))
    return torch.stack(out, 1)


class Span(NamedTuple):
    """What the backward pass needs of some chunks taken together."""

    asked: Tensor  # query features (many, chunks, chunk * group, features)
    kept: Tensor  # key features (many, chunks, chunk, features), relative to the maxima at their chunk's end
    weights: Tensor  # within the chunk (many, chunks, chunk * group, chunk)
    states: Tensor  # before each chunk (many, chunks, features, width + 1)
    carries: Tensor  # what chunk i finds left of what came in and of each chunk (many, features, chunks, 1 + chunks)


class CausalFavor(torch.autograd.Function):
    """All chunks of a span at once as batched products; the state walks from span to span, its gradient back."""

    @staticmethod
    def forward(ctx, q, k, v, directions, lows, scale):
        values = F.pad(v, (0, 1), value=1.0)
        state = values.new_zeros(len(v), len(directions), values.shape[-1])
        highest = values.new_full((len(v), len(directions)), NOWHERE)
        sums = values.new_empty(*q.shape[:3], values.shape[-1])
        blind = (lows == -torch.inf).cummin(-1).values[..., None]  # (many, tokens, 1): no key so far
        todo, pieces, spans = cut(0, q.shape[1], CHUNK)[::-1], [], []
        while todo:
            here, chunk = todo.pop()
            span, found, after = walk(q[:, here], k[:, here], values[:, here], lows[:, here], directions, (state, highest), chunk)
            if chunk > 1 and bool(((found[..., -1] < FAINT) & ~blind[:, here]).any()):
                todo += cut(here.start, here.stop, max(1, chunk // 8))[::-1]
                continue
            sums[:, here], (state, highest) = found, after
            pieces.append(here)
            spans.append(span)
        total = sums[..., -1:]
        total = total.masked_fill(total == 0, 1)
        out = sums[..., :-1] / total
        ctx.save_for_backward(q, k, v, directions, lows, values, total, out, *(t for span in spans for t in span))
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        q, k, v, directions, lows, values, total, out, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable(formula, (q, k, v, directions, lows), ctx.scale, grad)
        width, size = out.shape[-1], len(Span._fields)
        grad = torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], -1) / total  # of the sums
        grad_q, grad_k, grad_v = (
            grad.new_empty(*out.shape[:3], k.shape[-1]),
            torch.empty_like(k),
            torch.empty_like(values[..., :width]),
        )
        grad_state = grad.new_zeros(len(k), len(directions), width + 1)
        for number, here in reversed(list(enumerate(ctx.pieces))):
            span = Span(*saved[number * size : (number + 1) * size])
            to_q, to_k, to_v, grad_state = walk_back(span, grad[:, here], values[:, here], grad_state)
            grad_q[:, here] = (to_q @ directions).view_as(grad_q[:, here])
            grad_k[:, here] = to_k @ directions - ctx.scale * k[:, here] * to_k.sum(-1, keepdim=True)
            grad_v[:, here] = to_v
        return grad_q, grad_k, grad_v, None, None, None


def cut(start: int, stop: int, chunk: int) -> list[tuple[slice, int]]:
    """Spans of at most SPAN chunks."""
    step = SPAN * chunk
    return [(slice(low, min(low + step, stop)), chunk) for low in range(start, stop, step)]


def walk(
    q: Tensor, k: Tensor, values: Tensor, lows: Tensor, directions: Tensor, before: tuple[Tensor, Tensor], chunk: int
) -> tuple[Span, Tensor, tuple[Tensor, Tensor]]:
    """One span from the (state, maxima) before it: what backward needs, the weighted sums, the (state, maxima) after it."""
    state, highest = before
    many, tokens, group, dim = q.shape
    count, across = tokens // chunk, directions.mT
    logits = torch.baddbmm(lows[..., None], k, across.expand(many, -1, -1)).view(many, count, chunk, -1)
    levels = torch.cat([highest[:, None], logits.amax(2)], 1).cummax(1).values  # (many, 1 + count, features)
    kept = logits.sub_(levels[:, 1:, None]).exp_()
    values = values.unflatten(1, (count, chunk))
    own = kept.mT @ values  # (many, count, features, width + 1)
    steps = levels.mT.contiguous()  # (many, features, 1 + count)
    ladder = steps[..., None, :] - steps[..., 1:, None]
    later = torch.ones(count, count + 1, dtype=torch.bool, device=q.device).triu_(1)
    carries = ladder.masked_fill_(later, -torch.inf).exp_()
    states = (carries @ torch.cat([state[:, None], own], 1).transpose(1, 2)).transpose(1, 2)  # (many, count, features, width + 1)
    base = levels[:, 1:].reshape(many * count, 1, -1)
    asked = torch.baddbmm(base, q.reshape(many * count, chunk * group, dim), across.expand(many * count, -1, -1))
    asked = asked.sub_(asked.amax(-1, keepdim=True)).exp_().view(many, count, chunk * group, -1)
    weights = (asked @ kept.mT).mul_(_past(chunk, group, asked))
    sums = (asked @ states).add_(weights @ values).view(many, tokens, group, -1)
    return Span(asked, kept, weights, states, carries), sums, (states[:, -1] + own[:, -1], levels[:, -1])


def walk_back(span: Span, grad: Tensor, values: Tensor, grad_state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the queries' logits, the keys' logits, the values and the state before the span."""
    asked, kept, weights, states, carries = span
    many, count, rows, _ = asked.shape
    chunk = kept.shape[2]
    grad, values = grad.reshape(many, count, rows, -1), values.unflatten(1, (count, chunk))
    found = asked.mT @ grad  # of the states (many, count, features, width + 1)
    found[:, -1] += grad_state
    behind = (carries.mT @ found.transpose(1, 2)).transpose(1, 2)  # of the state before the span, then of each chunk's own
    own = behind[:, 1:]
    own[:, -1] += grad_state
    pairs = (grad @ values.mT).mul_(_past(chunk, rows // chunk, asked))
    to_q = (grad @ states.mT).add_(pairs @ kept).mul_(asked)
    to_k = (values @ own.mT).add_(pairs.mT @ asked).mul_(kept)
    to_v = (weights.mT @ grad).add_(kept @ own)[..., :-1]
    return to_q.flatten(1, 2), to_k.flatten(1, 2), to_v.flatten(1, 2), behind[:, 0]


def _past(chunk: int, group: int, like: Tensor) -> Tensor:
    """1 where a query's own position in the chunk is not before the key's; the `group` heads of a token follow each other."""
    return torch.ones(chunk, chunk, dtype=like.dtype, device=like.device).tril_().repeat_interleave(group, 0)
