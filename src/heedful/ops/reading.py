"""Reading: causal attention by features, token after token from a state of constant size, many tokens in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..state import State
from .again import differentiated
from .dispatch import is_plain, writes_own_backward
from .features import hidden
from .spans import Memory, divided, nothing, read, read_all, read_back, read_only, widened

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

PIECE = 1024  # tokens whose features are held at once while decoding


@dataclass(frozen=True, eq=False)
class FeatureState(State):
    """All that attention by features remembers: per feature its largest logarithm, and the sums relative to it."""

    highest: Float[Tensor, "batch key_heads features"]
    sums: Float[Tensor, "batch key_heads features width_and_one"]  # of weighted values, then of the weights


def read_on(
    features: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    qkv: tuple[Tensor, Tensor, Tensor],
    keys: Bool[Tensor, "batch tokens"] | None,
    state: FeatureState | None,
) -> tuple[Tensor, FeatureState]:
    """The outputs for tokens that follow those in `state`, and the state that holds them too, without gradients.

    `features` gives the log features of some queries and keys, float32 at least; they are asked for in pieces.

    >>> q, k, v = torch.randn(3, 1, 2, 9, 4)
    >>> first, state = read_on(lambda q, k: (q, k), (q[:, :, :5], k[:, :, :5], v[:, :, :5]), None, None)
    >>> rest, _ = read_on(lambda q, k: (q, k), (q[:, :, 5:], k[:, :, 5:], v[:, :, 5:]), None, state)
    >>> torch.allclose(torch.cat([first, rest], 2), by_features_causal(q, k, v), atol=1e-5)
    True
    """
    q, k, v = qkv
    out, memory = [v.new_empty(*q.shape[:2], 0, v.shape[-1])], None if state is None else _opened(state)
    for start in range(0, max(1, q.shape[2]), PIECE):
        new = slice(start, start + PIECE)
        asked, kept = features(q[:, :, new], k[:, :, new])
        rows, kept, values, unseen = folded(asked, kept, v[:, :, new], None if keys is None else keys[:, new])
        values = widened(values, values.new_ones(*values.shape[:2], 1))
        memory = nothing(values, kept.shape[-1]) if memory is None else memory
        if kept.shape[1] == 1:
            sums, memory = read_one(rows[:, 0], kept[:, 0], values[:, 0], memory)
            sums = sums[:, None]
        elif kept.shape[1]:
            sums, memory, _ = read(Given(rows, kept), values, unseen, memory)
        out.append(unfolded(divided(sums, v.shape[-1])[0], asked).to(v.dtype))
    return torch.cat(out, 2), _closed(memory, k.shape[:2], v.shape[-1])  # type: ignore[arg-type]


def _opened(state: FeatureState) -> Memory:
    sums = state.sums.flatten(0, 1)
    return state.highest.flatten(0, 1), widened(sums[..., :-1], sums[..., -1:])


def _closed(memory: Memory, shape: tuple[int, ...], width: int) -> FeatureState:
    """With memory of its own: what was read are views of the sums of all chunks."""
    highest, sums = memory
    sums = torch.cat([sums[..., :width], sums[..., -1:]], -1)
    return FeatureState(highest.clone().unflatten(0, shape), sums.unflatten(0, shape))


def by_features_causal(
    asked: Float[Tensor, "batch heads queries features"],
    kept: Float[Tensor, "batch key_heads keys features"],
    v: Float[Tensor, "batch key_heads keys width"],
    keys: Bool[Tensor, "batch keys"] | None = None,
    offset: int = 0,
) -> Float[Tensor, "batch heads queries width"]:
    """`by_features` where query i sees the keys up to i + offset, in time linear in the tokens.

    >>> from heedful.ops.features import by_features
    >>> asked, kept, v = torch.randn(3, 1, 2, 6, 8)
    >>> last = by_features(asked[:, :, 3:4], kept[:, :, :4], v[:, :, :4])
    >>> torch.allclose(by_features_causal(asked, kept, v)[:, :, 3:4], last, atol=1e-5)
    True
    """
    if offset < 0:
        raise ValueError(f"a mask's offset is the position of the first query among the keys; got {offset}, give 0 or more.")
    total = offset + asked.shape[2]
    missing = max(0, total - kept.shape[2])
    asked = F.pad(asked, (0, 0, offset, 0))  # as many queries as keys
    kept = F.pad(kept[:, :, :total], (0, 0, 0, missing), value=-torch.inf)
    padded = F.pad(v[:, :, :total], (0, 0, 0, missing))
    rows, kept, values, unseen = folded(asked, kept, padded, None if keys is None else F.pad(keys[:, :total], (0, missing)))
    if is_plain() or not writes_own_backward():
        out = formula(rows, kept, values)
    elif torch.is_grad_enabled() and (rows.requires_grad or kept.requires_grad or values.requires_grad):
        out = Reading.apply(rows, kept, values, unseen)
    else:
        out = read_only(Given(rows, kept), kept.shape[-1], values, unseen)
    return unfolded(out, asked)[:, :, offset:].to(v.dtype)


def folded(asked: Tensor, kept: Tensor, v: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Batch and key heads as one dimension, the heads that share keys beside each other; and which tokens see no key at all."""
    (batch, heads, tokens, _), key_heads = asked.shape, kept.shape[1]
    kept, values = (t.flatten(0, 1) for t in hidden(kept, v.to(kept.dtype), keys))
    rows = asked.reshape(batch * key_heads, heads // key_heads, tokens, -1).transpose(1, 2)  # (many, tokens, group, features)
    unseen = None if keys is None else ~keys.cummax(-1).values.expand(batch, -1).repeat_interleave(key_heads, 0)
    return rows, kept, values, unseen


def unfolded(out: Tensor, asked: Tensor) -> Tensor:
    """(many, tokens, group, width) as (batch, heads, tokens, width)."""
    return out.transpose(1, 2).reshape(*asked.shape[:3], out.shape[-1])


def formula(asked: Tensor, kept: Tensor, v: Tensor) -> Tensor:
    """The plain formula, token by token."""
    values = F.pad(v, (0, 1), value=1.0)
    memory, out = nothing(values, kept.shape[-1]), []
    for t in range(kept.shape[1]):
        sums, memory = read_one(asked[:, t], kept[:, t], values[:, t], memory)
        out.append(divided(sums, v.shape[-1])[0])
    return torch.stack(out, 1) if out else asked[..., :1] * v[:, :, None]


def read_one(asked: Tensor, kept: Tensor, values: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    """One token: its key raises the maxima and joins the sums, then its queries (many, group, features) read them."""
    before, sums = memory
    highest = torch.maximum(before, kept.detach())
    key_features = torch.exp(kept - highest)[..., None]
    sums = torch.addcmul(sums * torch.exp(before - highest)[..., None], key_features, values[:, None])
    logits = asked + highest[:, None]
    return torch.exp(logits - logits.detach().amax(-1, keepdim=True)) @ sums, (highest, sums)


class Given(NamedTuple):
    """Log features as they are given: of queries (many, tokens, group, features), of keys (many, tokens, features)."""

    queries: Tensor
    keys: Tensor

    def kept(self, here: slice) -> Tensor:
        return self.keys[:, here].clone(memory_format=torch.contiguous_format)

    def asked(self, here: slice, base: Tensor) -> Tensor:
        rows = self.queries[:, here]
        return rows.reshape(len(base), -1, rows.shape[-1]) + base


class Reading(torch.autograd.Function):
    """All tokens read; its gradient walks the spans back."""

    @staticmethod
    def forward(ctx, asked, kept, v, unseen):
        out, ctx.places, saved = read_all(Given(asked, kept), kept.shape[-1], v, unseen)
        ctx.save_for_backward(asked, kept, v, *saved)
        return out

    @staticmethod
    def backward(ctx, *grads):
        asked, kept, v, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiated(lambda *given: (formula(*given),), (asked, kept, v), grads), None
        found = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (asked, kept, v))
        for here, *parts in read_back(ctx.places, saved, grads[0]):
            for whole, part in zip(found, parts, strict=True):
                whole[:, here] = part.view_as(whole[:, here])
        return *found, None
