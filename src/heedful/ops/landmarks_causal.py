"""Landmarks read from left to right: a state of constant size, whether token by token or many tokens at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..state import State
from .landmarks import Learned, Sinks, Tokens, far, gather_sinks, near, no_sinks, padded, shared_out
from .merge import merge

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

SPAN = 1024  # tokens read in one step, so that what lies between stays small


@dataclass(frozen=True, eq=False)
class Held(State):
    """The sums of all chunks but the present one and the one before it, whose keys are kept, and the sinks."""

    sums: Float[Tensor, "batch heads landmarks sums"]
    k: Float[Tensor, "batch heads recent dim"]
    v: Float[Tensor, "batch heads recent width"]
    counted: Bool[Tensor, "batch recent"]  # neither padding nor sinks
    sink_k: Float[Tensor, "batch heads sinks dim"]
    sink_v: Float[Tensor, "batch heads sinks width"]
    count: Float[Tensor, " batch"]  # real keys so far


def nothing(t: Tokens, learned: Learned, sinks: int) -> Held:
    """The state before any token."""
    sums = t.k.new_zeros(*t.k.shape[:2], learned.levels.shape[1], t.v.shape[-1] + 1 + t.k.shape[-1])
    return Held(sums, t.k[:, :, :0], t.v[:, :, :0], t.real[:, :0], *no_sinks(t, sinks))


def read(t: Tokens, learned: Learned, chunk: int, state: Held) -> tuple[Float[Tensor, "batch heads queries width"], Held]:
    """Read many tokens on from a state: what each sees, and the state behind them."""
    step, parts = max(1, SPAN // chunk) * chunk, []
    pieces = (x.split(step, -2) for x in t[:3])  # split, not sliced: the backward pass of many slices is quadratic
    for q, k, v, real in zip(*pieces, t.real.split(step, -1), strict=True):
        out, state = _step(Tokens(q, k, v, real), learned, chunk, state)
        parts.append(out)
    return torch.cat(parts, 2), state


def _step(new: Tokens, learned: Learned, chunk: int, state: Held) -> tuple[Tensor, Held]:
    """Chunks are numbered from the first one whose keys the state keeps; a query of chunk c sees the sums of chunks below c - 1."""
    sinks, own, counts = gather_sinks(new, Sinks(state.sink_k, state.sink_v, state.count))
    old, width = state.k.shape[2], new.v.shape[-1]
    k, v = torch.cat([state.k, new.k], 2), torch.cat([state.v, new.v], 2)
    t = Tokens(new.q, k, v, torch.cat([state.counted, new.real & ~own], 1))
    total = t.k.shape[2]
    chunks, first, whole = -(-total // chunk), old // chunk, total // chunk
    t = padded(t._replace(q=F.pad(new.q, (0, 0, old - first * chunk, 0))), chunks * chunk)
    t = t._replace(q=t.q[:, :, : (chunks - first) * chunk])
    gone = max(chunks - 2, whole - 1, 0) * chunk  # tokens whose sums someone asks for
    sums = shared_out(t.k[:, :, :gone], t.v[:, :, :gone], t.real[:, :gone], learned, chunk)
    start = state.sums[:, :, None]
    held = torch.cat([start, start, start + sums.cumsum(2)], 2)  # for each chunk
    q = t.q.unflatten(2, (-1, chunk))
    counts = F.pad(counts, (old - first * chunk, chunks * chunk - total))
    out = merge(near(q, t, sinks, counts, True), far(q, held[:, :, first:chunks], learned, width))[0]
    out = out.flatten(2, 3)[:, :, old - first * chunk :][:, :, : new.q.shape[2]]
    kept = slice(max(whole - 1, 0) * chunk, total)
    views = held[:, :, whole], t.k[:, :, kept], t.v[:, :, kept], t.real[:, kept], *sinks
    return out, Held(*(view.clone() for view in views))  # a view would hold the memory of all chunks
