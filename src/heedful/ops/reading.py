"""Reading: causal attention by features, token after token from a state of constant size, many tokens in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..state import State
from .again import differentiated
from .dispatch import is_plain, writes_own_backward
from .favor import NOWHERE
from .features import divided, hidden, of_sums, peaked

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

CHUNK = 64  # tokens whose pairs are spelled out
SPAN = 16  # chunks taken in one step
PIECE = 1024  # tokens whose features are held at once while decoding
FAINT = 1e-18  # a sum of weights below this may have lost terms: its tokens are read again in smaller steps


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
    out, memory = [v.new_empty(*q.shape[:2], 0, v.shape[-1])], None
    for start in range(0, max(1, q.shape[2]), PIECE):
        new = slice(start, start + PIECE)
        asked, kept = features(q[:, :, new], k[:, :, new])
        here = None if keys is None else keys[:, new]
        rows, kept, values, unseen = folded(asked, kept, v[:, :, new], here)
        if memory is None:
            memory = nothing(kept, values) if state is None else (state.highest.flatten(0, 1), state.sums.flatten(0, 1))
        if kept.shape[1] == 1:
            sums, memory = read_one(rows[:, 0], kept[:, 0], F.pad(values[:, 0], (0, 1), value=1.0), memory)
            sums = sums[:, None]
        else:
            sums, memory, _ = read(rows, kept, values, unseen, memory)
            memory = memory[0].clone(), memory[1].clone()  # views of all chunks' sums, which nobody needs any more
        out.append(unfolded(divided(sums)[0], asked).to(v.dtype))
    highest, kept_sums = (t.unflatten(0, k.shape[:2]) for t in memory)  # type: ignore[union-attr]
    return torch.cat(out, 2), FeatureState(highest, kept_sums)


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
        out = divided(read(rows, kept, values, unseen, nothing(kept, values))[0])[0]
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


def nothing(kept: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The (maxima, sums) before the first token."""
    many, features = kept.shape[0], kept.shape[-1]
    return kept.new_full((many, features), NOWHERE), kept.new_zeros(many, features, values.shape[-1] + 1)


def formula(asked: Tensor, kept: Tensor, v: Tensor) -> Tensor:
    """The plain formula, token by token."""
    values, memory, out = F.pad(v, (0, 1), value=1.0), nothing(kept, v), []
    for t in range(kept.shape[1]):
        sums, memory = read_one(asked[:, t], kept[:, t], values[:, t], memory)
        out.append(divided(sums)[0])
    return torch.stack(out, 1) if out else v.new_empty(*asked.shape[:3], v.shape[-1])


def read_one(asked: Tensor, kept: Tensor, values: Tensor, memory: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One token: its key raises the maxima and joins the sums, then its queries (many, group, features) read them."""
    before, sums = memory
    highest = torch.maximum(before, kept.detach())
    key_features = torch.exp(kept - highest)[..., None]
    sums = torch.addcmul(sums * torch.exp(before - highest)[..., None], key_features, values[:, None])
    logits = asked + highest[:, None]
    return torch.exp(logits - logits.detach().amax(-1, keepdim=True)) @ sums, (highest, sums)


class Step(NamedTuple):
    """What the backward pass needs of some chunks read together."""

    asked: Tensor  # query features (many, chunks, chunk * group, features)
    kept: Tensor  # key features (many, chunks, chunk, features)
    weights: Tensor  # within the chunk (many, chunks, chunk * group, chunk)
    states: Tensor  # before each chunk (many, chunks, features, width + 1)
    faded: Tensor  # what is left of the sums before (many, features, 1)


Read = tuple[Tensor, tuple[Tensor, Tensor], list[tuple[slice, Step]]]


def read(
    asked: Tensor, kept: Tensor, values: Tensor, unseen: Tensor | None, memory: tuple[Tensor, Tensor], keep: bool = False
) -> Read:
    """The sums of every query, the (maxima, sums) after the last token, and the steps if they are to be kept."""
    values, sums, steps = F.pad(values, (0, 1), value=1.0), [], []
    blind = None if unseen is None else unseen & (memory[0][:, :1] <= NOWHERE)  # (many, tokens): nothing seen so far
    todo = list(cut(kept.shape[1]))[::-1]
    while todo:
        here = todo.pop()
        step, found, after = walk(asked[:, here], kept[:, here], values[:, here], memory)
        if here.stop - here.start > 1 and lost(found, None if blind is None else blind[:, here]):
            todo += halves(here)[::-1]
            continue
        sums.append(found)
        memory = after
        if keep:
            steps.append((here, step))
    return torch.cat(sums, 1) if sums else asked.new_empty(*asked.shape[:3], values.shape[-1]), memory, steps


def cut(tokens: int) -> Iterator[slice]:
    """Steps of at most SPAN whole chunks, then what is left of one."""
    whole = tokens // CHUNK * CHUNK
    for start in range(0, whole, SPAN * CHUNK):
        yield slice(start, min(start + SPAN * CHUNK, whole))
    if whole < tokens:
        yield slice(whole, tokens)


def halves(here: slice) -> list[slice]:
    length = here.stop - here.start
    unit = CHUNK if length > CHUNK else 1
    middle = here.start + max(unit, length // 2 // unit * unit)
    return [slice(here.start, middle), slice(middle, here.stop)]


def lost(sums: Tensor, blind: Tensor | None) -> bool:
    """Whether a query that has seen a key finds next to no weight."""
    faint = sums[..., -1] < FAINT  # (many, tokens, group)
    return bool((faint if blind is None else faint & ~blind[..., None]).any())


def walk(asked: Tensor, kept: Tensor, values: Tensor, memory: tuple[Tensor, Tensor]) -> tuple[Step, Tensor, tuple[Tensor, Tensor]]:
    """One step from the (maxima, sums) before it: what backward needs, the sums of its queries, the (maxima, sums) after it."""
    (many, tokens, group, _), (before, sums) = asked.shape, memory
    chunk = min(CHUNK, tokens)
    highest = torch.maximum(before, kept.amax(1))
    faded = (before - highest).exp_()[..., None]
    key_features = (kept - highest[:, None]).exp_().unflatten(1, (-1, chunk))
    query_features = peaked(asked + highest[:, None, None]).reshape(many, -1, chunk * group, asked.shape[-1])
    values = values.unflatten(1, (-1, chunk))
    states = torch.cat([(sums * faded)[:, None], key_features.mT @ values], 1)  # (many, 1 + chunks, features, width + 1)
    states = states.cumsum(1) if states.shape[1] > 2 else torch.stack([states[:, 0], states[:, 0] + states[:, 1]], 1)
    weights = (query_features @ key_features.mT).mul_(past(chunk, group, asked))
    found = (query_features @ states[:, :-1]).add_(weights @ values).view(many, tokens, group, -1)
    return Step(query_features, key_features, weights, states[:, :-1], faded), found, (highest, states[:, -1])


def walk_back(step: Step, grad: Tensor, values: Tensor, grad_sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the log features of queries and keys, of the values, and of the sums before the step."""
    asked, kept, weights, states, faded = step
    many, chunks, rows, _ = asked.shape
    chunk = kept.shape[2]
    grad, values = grad.reshape(many, chunks, rows, -1), values.unflatten(1, (-1, chunk))
    found = torch.cat([asked.mT @ grad, grad_sums[:, None]], 1)  # of the sums before each chunk, and after the last
    found = found.flip(1).cumsum(1).flip(1)
    own = found[:, 1:]
    pairs = (grad @ values.mT).mul_(past(chunk, rows // chunk, asked))
    to_asked = (grad @ states.mT).add_(pairs @ kept).mul_(asked)
    to_kept = (values @ own.mT).add_(pairs.mT @ asked).mul_(kept)
    to_values = (weights.mT @ grad).add_(kept @ own)[..., :-1]
    return to_asked.flatten(1, 2), to_kept.flatten(1, 2), to_values.flatten(1, 2), found[:, 0] * faded


def past(chunk: int, group: int, like: Tensor) -> Tensor:
    """1 where a query's own position in the chunk is not before the key's; the `group` heads of a token follow each other."""
    return torch.ones(chunk, chunk, dtype=like.dtype, device=like.device).tril_().repeat_interleave(group, 0)


class Reading(torch.autograd.Function):
    """All tokens read; its gradient walks the steps back."""

    @staticmethod
    def forward(ctx, asked, kept, values, unseen):
        sums, _, steps = read(asked, kept, values, unseen, nothing(kept, values), keep=True)
        out, total = divided(sums)
        ctx.save_for_backward(asked, kept, values, out, total, *(t for _, step in steps for t in step))
        ctx.places = [here for here, _ in steps]
        return out

    @staticmethod
    def backward(ctx, *grads):
        asked, kept, values, out, total, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiated(lambda *given: (formula(*given),), (asked, kept, values), grads), None
        grad, padded, size = of_sums(grads[0], out, total), F.pad(values, (0, 1), value=1.0), len(Step._fields)
        to_asked, to_kept, to_values = torch.empty_like(asked), torch.empty_like(kept), torch.empty_like(values)
        grad_sums = nothing(kept, values)[1]
        for number, here in reversed(list(enumerate(ctx.places))):
            step = Step(*saved[number * size : (number + 1) * size])
            one, two, three, grad_sums = walk_back(step, grad[:, here], padded[:, here], grad_sums)
            to_asked[:, here], to_kept[:, here], to_values[:, here] = one.view_as(to_asked[:, here]), two, three
        return to_asked, to_kept, to_values, None
