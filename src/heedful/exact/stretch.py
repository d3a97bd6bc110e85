"""Stretch: the local Lipschitz constant of the attention in a real model's block, its rotary embedding included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention import Capture
from .block import Block, gathered, spread
from .call_derivative import CallDerivative
from .singular import Stretch, largest_singular

if TYPE_CHECKING:
    from jaxtyping import Float

SAME = 1e-4  # relative, of queries turned by us and by the model


@torch.no_grad()
def block_lipschitz(block: Block, call: Capture, x: Float[Tensor, "1 tokens dim"], tolerance: float = 1e-3) -> Stretch:
    """|d attention(x) / d x|_2 of a block that made `call` of what it read, x: all tokens may move together, over tiles.

    `x` is what the attention itself reads, `block.attended` of the block's input: a norm before it is not counted in.
    """
    heads, near, turn = block.heads, CallDerivative(call), Rotation(block, call, x)
    shared = call.q.shape[1] // call.k.shape[1]
    w_k, w_v = heads.w_k[::shared], heads.w_v[::shared]

    def push(dx: Tensor) -> Tensor:
        return gathered(near.push(turn(spread(dx, heads.w_q)), turn(spread(dx, w_k)), spread(dx, w_v)), heads.w_o)

    def pull(grad: Tensor) -> Tensor:
        dq, dk, dv = near.pull(spread(grad.view(*x.shape[:2], -1), heads.w_o.mT))
        return gathered(turn.back(dq), heads.w_q.mT) + gathered(turn.back(dk), w_k.mT) + gathered(dv, w_v.mT)

    start = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(x)
    return largest_singular(push, pull, start, tolerance)


class Rotation:
    """What a rotary embedding does to queries and keys: dims i and i + half as one complex number, turned by each position's angle.

    The angles are read off the queries before and after, all heads together, so that no family's formula is needed. A block without
    one turns nothing.
    """

    def __init__(self, block: Block, call: Capture, x: Tensor):
        self.by: Tensor | None = None
        if not block.rotary:
            return
        before, after = block.heads.project(x)[0], call.q
        found = (_pairs(after) * _pairs(before).conj()).sum(1, keepdim=True)  # (1, 1, tokens, half)
        self.by = found / found.abs().clamp_min(torch.finfo(found.real.dtype).tiny)
        off = float((self(before) - after).norm() / after.norm())
        if not off < SAME:
            raise ValueError(
                f"{block.attention} does not turn its queries in halves (relative error {off:.1e}), so its Jacobian is not known; "
                "use a model with the rotary embedding of llama, or without one."
            )

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.by is None else _turned(x, self.by)

    def back(self, x: Tensor) -> Tensor:
        """The transpose, which turns the other way."""
        return x if self.by is None else _turned(x, self.by.conj())


def _turned(x: Tensor, by: Tensor) -> Tensor:
    found = _pairs(x) * by
    return torch.cat([found.real, found.imag], -1)


def _pairs(x: Tensor) -> Tensor:
    """Dims i and i + half as one complex number."""
    first, second = x.chunk(2, -1)
    return torch.complex(first.contiguous(), second.contiguous())
