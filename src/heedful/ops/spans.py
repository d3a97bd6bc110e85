"""Spans: causal attention by features, a state of constant size between chunks of tokens, many chunks in one step.

Each chunk has maxima of its own, per feature the largest log feature of a key so far, so that no epsilon is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from .favor import NOWHERE

if TYPE_CHECKING:
    from jaxtyping import Float

CHUNK = 64  # tokens whose pairs are spelled out
SPAN = 16  # chunks taken in one step
EVEN = 4  # columns of values come in fours: products with an odd number of columns take a fifth longer
FAINT = 1e-18  # a sum of weights below this may have lost terms: its span is read again in smaller chunks

Memory = tuple["Float[Tensor, 'many features']", "Float[Tensor, 'many features width']"]  # (maxima, sums) of the tokens so far


class Logs(Protocol):
    """Where the log features of some tokens come from; each call gives tensors that may be written on."""

    def kept(self, here: slice) -> Float[Tensor, "many tokens features"]:
        """Those of keys."""
        ...

    def asked(self, here: slice, base: Float[Tensor, "pieces 1 features"]) -> Float[Tensor, "pieces rows features"]:
        """Those of queries by chunks, each chunk with its base added; heads that share keys follow each other."""
        ...


class Span(NamedTuple):
    """What the backward pass needs of some chunks taken together; (many, count) are flat where it says pieces."""

    asked: Tensor  # query features (pieces, chunk * group, features)
    kept: Tensor  # key features (pieces, chunk, features), relative to the maxima at their chunk's end
    weights: Tensor  # within the chunk (pieces, chunk * group, chunk)
    states: Tensor  # before each chunk (pieces, features, width)
    carries: Tensor  # what chunk i finds left of what came in and of each chunk (many, features, count, 1 + count)


Read = tuple[Tensor, Memory, list[tuple[slice, Span]]]


def read_only(logs: Logs, features: int, v: Tensor, unseen: Tensor | None) -> Tensor:
    """The outputs (many, tokens, group, width) for tokens from the first on, where nothing is to be learned."""
    values = _summing(v)
    return divided(read(logs, values, unseen, nothing(values, features))[0], v.shape[-1])[0]


def read_all(logs: Logs, features: int, v: Tensor, unseen: Tensor | None) -> tuple[Tensor, list[slice], list[Tensor]]:
    """The same outputs, and what `read_back` needs."""
    values = _summing(v)
    sums, _, spans = read(logs, values, unseen, nothing(values, features), keep=True)
    out, total = divided(sums, v.shape[-1])
    return out, [here for here, _ in spans], [values, out, total, *(t for _, span in spans for t in span)]


def read_back(places: list[slice], saved: Sequence[Tensor], grad: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Span by span from the last on: (where, the gradients of the log features of queries and keys, of v)."""
    values, out, total, *tensors = saved
    grad = widened(grad, (grad * out).sum(-1, keepdim=True).neg_()).div_(total)  # of the sums
    size, grad_state = len(Span._fields), None
    for number, here in reversed(list(enumerate(places))):
        span = Span(*tensors[number * size : (number + 1) * size])
        grad_state = torch.zeros_like(span.states[: len(values)]) if grad_state is None else grad_state
        to_asked, to_kept, to_values, grad_state = walk_back(span, grad[:, here], values[:, here], grad_state)
        yield here, to_asked, to_kept, to_values[..., : out.shape[-1]]


def _summing(v: Tensor) -> Tensor:
    """With a column of ones, whose weighted sum is that of the weights."""
    return widened(v, v.new_ones(1, 1, 1).expand(*v.shape[:2], 1))


def nothing(values: Tensor, features: int) -> Memory:
    """The memory before the first token."""
    many, width = len(values), values.shape[-1]
    return values.new_full((many, features), NOWHERE), values.new_zeros(many, features, width)


def widened(rows: Tensor, last: Tensor) -> Tensor:
    """One more column, with zeros before it up to a multiple of EVEN."""
    rest = last.new_zeros(1).expand(*last.shape[:-1], -(rows.shape[-1] + 1) % EVEN)
    return torch.cat([rows, rest, last], -1)


def divided(sums: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The weighted values by the weights' sum, which is their last column, and that sum (1 where there is no key)."""
    total = sums[..., -1:]
    total = total.masked_fill(total == 0, 1)
    return sums[..., :width] / total, total


def read(logs: Logs, values: Tensor, unseen: Tensor | None, memory: Memory, keep: bool = False) -> Read:
    """The sums of every query (many, tokens, group, width), the memory after the last token, and the spans if they are to be kept."""
    blind = None if unseen is None else unseen & (memory[0][:, :1] <= NOWHERE)  # (many, tokens): nothing seen so far
    todo, parts, spans = cut(0, values.shape[1], CHUNK)[::-1], [], []
    while todo:
        here, chunk = todo.pop()
        span, sums, after = walk(logs, here, values[:, here], memory, chunk)
        if chunk > 1 and _lost(sums, None if blind is None else blind[:, here]):
            todo += cut(here.start, here.stop, max(1, chunk // 8))[::-1]
            continue
        parts.append(sums)
        memory = after
        if keep:
            spans.append((here, span))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1), memory, spans


def cut(start: int, stop: int, chunk: int) -> list[tuple[slice, int]]:
    """Spans of at most SPAN whole chunks, then what is left of one."""
    step, whole = SPAN * chunk, stop - (stop - start) % chunk
    spans = [(slice(low, min(low + step, whole)), chunk) for low in range(start, whole, step)]
    return spans + [(slice(whole, stop), stop - whole)] * (whole < stop)


def _lost(sums: Tensor, blind: Tensor | None) -> bool:
    """Whether a query that has seen a key finds next to no weight."""
    faint = sums[..., -1] < FAINT  # (many, tokens, group)
    return bool((faint if blind is None else faint & ~blind[..., None]).any())


def walk(logs: Logs, here: slice, values: Tensor, memory: Memory, chunk: int) -> tuple[Span, Tensor, Memory]:
    """One span from the memory before it: what backward needs, the sums of its queries, the memory after it."""
    (many, tokens, _), (highest, state) = values.shape, memory
    count = tokens // chunk
    kept = logs.kept(here).view(many, count, chunk, -1)
    levels = torch.cat([highest[:, None], kept.amax(2)], 1).cummax(1).values  # (many, 1 + count, features)
    kept = kept.sub_(levels[:, 1:, None]).exp_().flatten(0, 1)
    values = values.reshape(many * count, chunk, -1)
    own = torch.bmm(kept.mT, values).unflatten(0, (many, count))
    steps = levels.mT.contiguous()  # (many, features, 1 + count)
    carries = (steps[..., None, :] - steps[..., 1:, None]).exp_().tril_()
    states = (carries @ torch.cat([state[:, None], own], 1).transpose(1, 2)).transpose(1, 2)  # (many, count, features, width)
    after = levels[:, -1], states[:, -1] + own[:, -1]
    states, base = states.flatten(0, 1), levels[:, 1:].reshape(many * count, 1, -1)
    asked = logs.asked(here, base).softmax(-1)
    group = asked.shape[1] // chunk
    weights = torch.bmm(asked, kept.mT).mul_(past(chunk, group, asked))
    sums = torch.bmm(asked, states).baddbmm_(weights, values).view(many, tokens, group, -1)
    return Span(asked, kept, weights, states, carries), sums, after


def walk_back(span: Span, grad: Tensor, values: Tensor, grad_state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the log features of queries and keys, of the values, and of the sums before the span."""
    asked, kept, weights, states, carries = span
    (pieces, rows, _), chunk, many = asked.shape, kept.shape[1], len(grad)
    grad, values = grad.reshape(pieces, rows, -1), values.reshape(pieces, chunk, -1)
    found = torch.bmm(asked.mT, grad).unflatten(0, (many, -1))  # of the states (many, count, features, width)
    found[:, -1] += grad_state
    behind = (carries.mT @ found.transpose(1, 2)).transpose(1, 2)  # of the sums before the span, then of each chunk's own
    behind[:, -1] += grad_state
    own = behind[:, 1:].flatten(0, 1)
    pairs = torch.bmm(grad, values.mT).mul_(past(chunk, rows // chunk, asked))
    to_asked = torch.bmm(grad, states.mT).baddbmm_(pairs, kept).mul_(asked)
    to_kept = torch.bmm(values, own.mT).baddbmm_(pairs.mT, asked).mul_(kept)
    to_values = torch.bmm(weights.mT, grad).baddbmm_(kept, own)
    to_asked, to_kept, to_values = (t.view(many, -1, t.shape[-1]) for t in (to_asked, to_kept, to_values))
    return to_asked, to_kept, to_values, behind[:, 0]


def past(chunk: int, group: int, like: Tensor) -> Tensor:
    """1 where a query's own position in the chunk is not before the key's; the `group` heads of a token follow each other."""
    return torch.ones(chunk, chunk, dtype=like.dtype, device=like.device).tril_().repeat_interleave(group, 0)
