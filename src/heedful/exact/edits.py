"""Exact finite edits of one attention call: a key moved, a query moved, a token taken away."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention import Capture
from ..mask import Mask, Rule
from ..ops import hop
from ..ops.sweep import HIDDEN

if TYPE_CHECKING:
    from jaxtyping import Float

SHARP = 0.5  # where a key holds more, its query attends again: 1 - P would lose its digits
FAR = 40.0  # a logit that rises more leaves nothing of P in expm1(lift) P
TILE = 2**20  # logits of such queries at once


@torch.no_grad()
def perturb_key(call: Capture, key: int, change: Float[Tensor, "*key_heads dim"]) -> Float[Tensor, "batch heads queries width"]:
    """The outputs once key `key` has moved by `change`, however far: o_i + g / (1 + g) (v_j - o_i), g = P_ij expm1(s q_i . change).

    O(tokens). The change may be one for all, or (key heads, dim), or (batch, key heads, dim).

    >>> q, k, v = torch.randn(3, 1, 1, 5, 8, dtype=torch.float64)
    >>> moved = k.clone()
    >>> moved[:, :, 2] += 1
    >>> found = perturb_key(Capture("layer", q, k, v), 2, torch.ones(8))
    >>> torch.allclose(found, (q @ moved.mT).softmax(-1) @ v)
    True
    """
    key = _place(call, key, "key", call.k.shape[2])
    k = call.k.clone()
    _check_change(change, k[:, :, key])
    k[:, :, key] += change.to(k)
    edited = replace(call, k=k)
    out, log = _column(call, key)
    mass = log.exp()
    lift = edited.logits.bare(call.q, key, key + 1)[..., 0] - call.logits.bare(call.q, key, key + 1)[..., 0]
    grown = torch.where(lift > FAR, (log + lift).exp(), mass * torch.expm1(lift))  # g: P may be too small for a float, g is not
    share = -torch.expm1(-torch.log1p(grown))  # g / (1 + g)
    return _edited(edited, out, share, key, mass > SHARP).to(call.v.dtype)


@torch.no_grad()
def perturb_query(call: Capture, query: int, change: Float[Tensor, "*heads dim"]) -> Float[Tensor, "batch heads queries width"]:
    """The outputs once query `query` has moved by `change`: its own is attended again, all others stay exactly what they were.

    >>> q, k, v = torch.randn(3, 1, 1, 5, 8)
    >>> call = Capture("layer", q, k, v)
    >>> (perturb_query(call, 2, torch.ones(8)) != hop(q, k, v, scale=1.0)[0]).any(-1)[0, 0].tolist()
    [False, False, True, False, False]
    """
    query = _place(call, query, "query", call.q.shape[2])
    q = call.q.clone()
    _check_change(change, q[:, :, query])
    q[:, :, query] += change.to(q)
    out, _ = answer(call)
    rows = torch.tensor([query], device=q.device)
    out[:, :, query] = _again(replace(call, q=q), rows)[:, :, 0]
    return out.to(call.v.dtype)


@torch.no_grad()
def delete_token(call: Capture, key: int) -> Float[Tensor, "batch heads queries width"]:
    """The outputs once token `key` is no longer attended to: o_i - P_ij / (1 - P_ij) (v_j - o_i); 0 for a query that saw it alone.

    O(tokens); the queries stay all there, the token's own too.

    >>> q, k, v = torch.randn(3, 1, 1, 5, 8, dtype=torch.float64)
    >>> left = torch.tensor([0, 1, 3, 4])
    >>> found = delete_token(Capture("layer", q, k, v), 2)
    >>> torch.allclose(found, (q @ k[:, :, left].mT).softmax(-1) @ v[:, :, left])
    True
    """
    key = _place(call, key, "key", call.k.shape[2])
    out, log = _column(call, key)
    mass = log.exp()
    edited = replace(call, mask=_without(call.mask, key))
    return _edited(edited, out, -mass / (1 - mass), key, mass > SHARP).to(call.v.dtype)


def answer(call: Capture) -> tuple[Float[Tensor, "batch heads queries width"], Float[Tensor, "batch heads queries"]]:
    """What the call gives, and its lse, by the exact hop."""
    high = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = (t.to(high) for t in (call.q, call.k, call.v))
    out, lse = hop(q, k, v, mask=call.mask, scale=call.scale, cap=call.cap)
    blind = lse < HIDDEN / 2  # a bias may hide by a finite number
    out, lse = out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)
    if call.null is None:
        return out, lse
    whole = torch.logaddexp(lse, call.null.to(lse.dtype)[:, None])
    return out * (lse - whole).exp()[..., None], whole.masked_fill(blind, -torch.inf)


def _column(call: Capture, key: int) -> tuple[Tensor, Tensor]:
    """The outputs, and log P_ij for one key j: (batch, heads, queries); -inf where the query or the key is hidden."""
    out, lse = answer(call)
    rows = torch.arange(call.q.shape[2], device=call.q.device)
    logits = call.logits.of(call.q, rows, key, key + 1)[..., 0]
    hidden = (lse == -torch.inf) | (logits < HIDDEN / 2)
    return out, (logits - lse).clamp_max(0).masked_fill(hidden, -torch.inf)


def _edited(call: Capture, out: Tensor, share: Tensor, key: int, sharp: Tensor) -> Tensor:
    """o + share (v_j - o), and what the edited call gives where that would lose digits."""
    shared = call.q.shape[1] // call.v.shape[1]
    value = call.v[:, :, key : key + 1].to(out).repeat_interleave(shared, 1)
    found = out + torch.where(sharp, 0, share)[..., None] * (value - out)
    rows = sharp.any(1).any(0).nonzero()[:, 0]
    if len(rows):
        found[:, :, rows] = torch.where(sharp[:, :, rows, None], _again(call, rows), found[:, :, rows])
    return found


def _again(call: Capture, rows: Tensor) -> Tensor:
    """The outputs of some queries by the plain formula, a few of them at a time."""
    keys, shared = call.k.shape[2], call.q.shape[1] // call.v.shape[1]
    v = call.v.to(call.logits.k.dtype).repeat_interleave(shared, 1)
    found = []
    for some in rows.split(max(1, TILE // max(1, call.q.shape[:2].numel() * keys))):
        logits = call.logits.of(call.q[:, :, some], some, 0, keys)
        blind = logits.amax(-1, keepdim=True) < HIDDEN / 2
        lse = logits.logsumexp(-1, keepdim=True)
        whole = lse if call.null is None else torch.logaddexp(lse, call.null.to(lse)[:, None, None])
        found.append((logits - whole).exp().masked_fill(blind, 0) @ v)
    return torch.cat(found, -2)


def _without(mask: Mask, key: int) -> Mask:
    """The mask that hides one key more."""
    own = mask.rule
    if own is None:
        return replace(mask, rule=Rule(lambda batch, head, query, place: (place != key) & (batch >= 0)))
    sees = own.sees
    return replace(mask, rule=Rule(lambda batch, head, query, place: sees(batch, head, query, place) & (place != key), own.batches))


def _place(call: Capture, place: int, name: str, count: int) -> int:
    if not -count <= place < count:
        raise ValueError(f"{name} {place} is not there; the call has {count}, give 0 to {count - 1}.")
    return place % count


def _check_change(change: Tensor, like: Tensor) -> None:
    try:
        fits = torch.broadcast_shapes(change.shape, like.shape) == like.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"the change is {tuple(change.shape)} but one token's vectors are {tuple(like.shape)} (batch, heads, dim)."
        )
    if not bool(change.isfinite().all()):
        raise ValueError("the change holds nan or an infinity; exact results need finite numbers.")
