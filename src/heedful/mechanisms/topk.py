"""Top-k attention: exact attention over each query's best keys, the oracle that cheaper choices of keys are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..attention import Mask, Mechanism
from ..ops.again import again
from .softmax import EXACT

TILE = 2**22  # logits looked at in one step


@dataclass(eq=False)
class TopK(Mechanism):
    """Attention over the `keys` visible keys of largest logit; gradients flow through the chosen logits only.

    No choice of as many keys for a query holds more of the attention's mass; what also sums up the rest may still come closer. For
    comparison only: choosing takes all logits, in tiles, so the time is that of exact attention or more; the memory is linear.

    >>> q, k, v = torch.randn(3, 1, 2, 9, 8)
    >>> logits = q @ k.mT / 8**0.5
    >>> chosen = logits >= logits.topk(3).values[..., -1:]
    >>> torch.allclose(TopK(keys=3)(q, k, v), logits.masked_fill(~chosen, -torch.inf).softmax(-1) @ v, atol=1e-5)
    True

    Gupta et al. 2021, Memory-efficient Transformers via Top-k Attention.
    """

    keys: int = 64

    supports: ClassVar[frozenset[str]] = EXACT - {"shared"}
    rival: ClassVar[bool] = False  # it looks at every pair

    def __post_init__(self):
        if not isinstance(self.keys, int) or self.keys < 1:
            raise ValueError(f"keys is {self.keys!r}; it must be a whole number of at least 1 (Hard() is the limit of 1).")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, cap: float | None = None, null: Tensor | None = None
    ) -> Tensor:
        batch, heads, queries, _ = q.shape
        out = [v.new_empty(batch, heads, 0, v.shape[-1])]
        for rows, columns in mask.tiles(queries, k.shape[-2], max(1, TILE // max(1, batch * heads * k.shape[-2]))):

            def one(q: Tensor, k: Tensor, v: Tensor, rows: slice = rows, columns: slice = columns) -> Tensor:
                added = mask.tile(torch.arange(rows.start, rows.stop, device=q.device), columns.start, columns.stop)
                return best(_logits(q, k, added, scale, cap), v, self.keys, null)

            call = q[:, :, rows], k[:, :, columns], v[:, :, columns]
            out.append(again(one, *call))
        return torch.cat(out, -2)


def best(logits: Tensor, v: Tensor, count: int, null: Tensor | None) -> Tensor:
    """The softmax over the `count` largest logits of each row, and of the null logit, times their values."""
    chosen = logits.detach().topk(min(count, logits.shape[-1])).indices
    kept = logits.gather(-1, chosen)
    if null is not None:
        kept = torch.cat([kept, null.to(logits.dtype)[:, None, None].expand(*kept.shape[:3], 1)], -1)
    blind = (kept.detach() == -torch.inf).all(-1, keepdim=True)
    mass = kept.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)[..., : chosen.shape[-1]]
    return (torch.zeros_like(logits).scatter(-1, chosen, mass) @ v.to(logits.dtype)).to(v.dtype)


def _logits(q: Tensor, k: Tensor, added: Tensor | None, scale: float, cap: float | None) -> Tensor:
    q, k = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k))
    logits = q @ k.mT * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits if added is None else logits + added
