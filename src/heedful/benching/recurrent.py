"""A recurrent layer in the place of attention: it computes something else, and shows what reading in order costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..attention import Mask, Mechanism


@dataclass(eq=False)
class Recurrent(Mechanism):
    """An LSTM over the queries of all heads together, as wide as they are: for its time and memory, not for its output.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> Recurrent()(q, k, v).shape
    torch.Size([1, 2, 5, 8])
    """

    seed: int = 0

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "window", "sinks", "shared", "cap", "null"})  # it looks at none

    def __post_init__(self):
        self.layer = None

    def prepare(self, heads: int, head_dim: int) -> None:
        if self.layer is None:
            with torch.random.fork_rng():
                torch.manual_seed(self.seed)
                self.layer = nn.LSTM(heads * head_dim, heads * head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, **extra: object) -> Tensor:
        assert self.layer is not None
        out, _ = self.layer.to(q.device, q.dtype)(q.permute(2, 0, 1, 3).flatten(2))  # (tokens, batch, heads x dim)
        return out.unflatten(-1, (q.shape[1], q.shape[-1])).permute(1, 2, 0, 3)
