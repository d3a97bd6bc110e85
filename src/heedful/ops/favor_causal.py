"""Causal FAVOR+: chunks of tokens, a state between them, and per feature a running maximum instead of an epsilon."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import is_plain, writes_own_backward
from .favor import NOWHERE, differentiable, folded
from .reading import past

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

CHUNK = 64  # tokens whose pairs are spelled out
SPAN = 16  # chunks taken in one step
EVEN = 4  # columns of values come in fours: products with an odd number of columns take a fifth longer
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
    """What the backward pass needs of some chunks taken together; (many, count) are flat where it says pieces."""

    asked: Tensor  # query features (pieces, chunk * group, features)
    kept: Tensor  # key features (pieces, chunk, features), relative to the maxima at their chunk's end
    weights: Tensor  # within the chunk (pieces, chunk * group, chunk)
    states: Tensor  # before each chunk (pieces, features, width)
    carries: Tensor  # what chunk i finds left of what came in and of each chunk (many, features, count, 1 + count)


class CausalFavor(torch.autograd.Function):
    """All chunks of a span at once as batched products; the state walks from span to span, its gradient back."""

    @staticmethod
    def forward(ctx, q, k, v, directions, lows, scale):
        width = v.shape[-1]
        values = widened(v, v.new_ones(1, 1, 1).expand(*v.shape[:2], 1))  # the ones sum the weights
        state = values.new_zeros(len(v), len(directions), values.shape[-1])
        highest = values.new_full((len(v), len(directions)), NOWHERE)
        sums = values.new_empty(*q.shape[:3], values.shape[-1])
        blind = (lows == -torch.inf).cummin(-1).values[..., None]  # (many, tokens, 1): no key so far
        todo, pieces, spans = cut(0, q.shape[1], CHUNK)[::-1], [], []
        while todo:
            here, chunk = todo.pop()
            span, found, after = walk(q[:, here], k[:, here], values[:, here], lows[:, here], directions, (state, highest), chunk)
            if chunk > 1 and bool(((found[..., width] < FAINT) & ~blind[:, here]).any()):
                todo += cut(here.start, here.stop, max(1, chunk // 8))[::-1]
                continue
            sums[:, here], (state, highest) = found, after
            pieces.append(here)
            spans.append(span)
        total = sums[..., width, None]
        total = total.masked_fill(total == 0, 1)
        out = sums[..., :width] / total
        ctx.save_for_backward(q, k, v, directions, lows, values, total, out, *(t for span in spans for t in span))
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        q, k, v, directions, lows, values, total, out, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable(formula, (q, k, v, directions, lows), ctx.scale, grad)
        width, size, along = out.shape[-1], len(Span._fields), directions.expand(len(k), -1, -1)
        delta = (grad * out).sum(-1, keepdim=True).neg_()
        grad = widened(grad, delta).div_(total)  # of the sums
        grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        grad_state = grad.new_zeros(len(k), len(directions), values.shape[-1])
        for number, here in reversed(list(enumerate(ctx.pieces))):
            span = Span(*saved[number * size : (number + 1) * size])
            to_q, to_k, to_v, grad_state = walk_back(span, grad[:, here], values[:, here], grad_state)
            torch.bmm(to_q, along, out=grad_q[:, here].flatten(1, 2))
            torch.bmm(to_k, along, out=grad_k[:, here])
            grad_k[:, here].addcmul_(k[:, here], to_k.sum(-1, keepdim=True), value=-ctx.scale)
            grad_v[:, here] = to_v[..., :width]
        return grad_q, grad_k, grad_v, None, None, None


def widened(rows: Tensor, last: Tensor) -> Tensor:
    """One more column, and zeros up to a multiple of EVEN."""
    rest = last.new_zeros(*last.shape[:-1], -(rows.shape[-1] + 1) % EVEN)
    return torch.cat([rows, last, rest], -1)


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
    kept = logits.sub_(levels[:, 1:, None]).exp_().flatten(0, 1)
    values = values.reshape(many * count, chunk, -1)
    own = torch.bmm(kept.mT, values).unflatten(0, (many, count))
    steps = levels.mT.contiguous()  # (many, features, 1 + count)
    carries = (steps[..., None, :] - steps[..., 1:, None]).exp_().tril_()
    states = (carries @ torch.cat([state[:, None], own], 1).transpose(1, 2)).transpose(1, 2)  # (many, count, features, width)
    after = states[:, -1] + own[:, -1], levels[:, -1]
    states, base = states.flatten(0, 1), levels[:, 1:].reshape(many * count, 1, -1)
    asked = torch.baddbmm(base, q.reshape(many * count, chunk * group, dim), across.expand(many * count, -1, -1)).softmax(-1)
    weights = torch.bmm(asked, kept.mT).mul_(past(chunk, group, asked))
    sums = torch.bmm(asked, states).baddbmm_(weights, values).view(many, tokens, group, -1)
    return Span(asked, kept, weights, states, carries), sums, after


def walk_back(span: Span, grad: Tensor, values: Tensor, grad_state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the queries' logits, the keys' logits, the values and the state before the span."""
    asked, kept, weights, states, carries = span
    (pieces, rows, _), chunk, many = asked.shape, kept.shape[1], len(grad)
    grad, values = grad.reshape(pieces, rows, -1), values.reshape(pieces, chunk, -1)
    found = torch.bmm(asked.mT, grad).unflatten(0, (many, -1))  # of the states (many, count, features, width)
    found[:, -1] += grad_state
    behind = (carries.mT @ found.transpose(1, 2)).transpose(1, 2)  # of the state before the span, then of each chunk's own
    behind[:, -1] += grad_state
    own = behind[:, 1:].flatten(0, 1)
    pairs = torch.bmm(grad, values.mT).mul_(past(chunk, rows // chunk, asked))
    to_q = torch.bmm(grad, states.mT).baddbmm_(pairs, kept).mul_(asked)
    to_k = torch.bmm(values, own.mT).baddbmm_(pairs.mT, asked).mul_(kept)
    to_v = torch.bmm(weights.mT, grad).baddbmm_(kept, own)
    to_q, to_k, to_v = (t.view(many, -1, t.shape[-1]) for t in (to_q, to_k, to_v))
    return to_q, to_k, to_v, behind[:, 0]
