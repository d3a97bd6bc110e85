"""Hard attention: each query takes the value of its best key, the limit of Softmax(beta) for a large beta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..attention import Mask, Mechanism
from ..ops.padding import silent
from .softmax import EXACT

TILE = 2**22  # logits looked at in one step


@dataclass(eq=False)
class Hard(Mechanism):
    """v at argmax of q k^T; the first of equal keys wins, and no gradient reaches q or k.

    >>> q, k, v = torch.randn(3, 1, 1, 5, 8)
    >>> torch.equal(Hard()(q, k, v)[0, 0], v[0, 0, (q @ k.mT).argmax(-1)[0, 0]])
    True
    """

    supports: ClassVar[frozenset[str]] = EXACT - {"shared"}
    rival: ClassVar[bool] = False  # it looks at every pair

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, cap: float | None = None, null: Tensor | None = None
    ) -> Tensor:
        batch, heads, queries, _ = q.shape
        out = [silent(q[:, :, :0], k, v)]
        for rows, columns in mask.tiles(queries, k.shape[-2], max(1, TILE // max(1, batch * heads * k.shape[-2]))):
            if columns.start == columns.stop:
                out.append(silent(q[:, :, rows], k, v))
                continue
            out.append(
                self._block(
                    q[:, :, rows], k[:, :, columns], v[:, :, columns], self._added(mask, rows, columns, q), scale, cap, null
                )
            )
        return torch.cat(out, -2)

    @staticmethod
    def _added(mask: Mask, rows: slice, columns: slice, q: Tensor) -> Tensor | None:
        return mask.tile(torch.arange(rows.start, rows.stop, device=q.device), columns.start, columns.stop)

    @staticmethod
    def _block(
        q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float, cap: float | None, null: Tensor | None
    ) -> Tensor:
        logits = (
            q.detach().float() @ k.detach().float().mT * scale if q.dtype != torch.float64 else q.detach() @ k.detach().mT * scale
        )
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        best, where = (logits if added is None else logits + added).max(-1)  # (batch, heads, rows)
        taken = torch.take_along_dim(v, where[..., None], -2)
        empty = best == -torch.inf if null is None else best < null[:, None]
        return taken.masked_fill(empty[..., None], 0)
