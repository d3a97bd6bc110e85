"""Lesson: an attention call with the states that it was made from, and how the loss wants its answer changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Capture

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Lesson(Capture):
    """A Capture with the rows X that q is made from, those that k and v are made from, and gradients of the loss.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> Lesson("layer", q, k, v, states=torch.randn(1, 5, 8), gradient=torch.randn(1, 2, 5, 4)).augmented.shape
    torch.Size([1, 5, 9])
    """

    states: Float[Tensor, "batch queries dim"] | None = None
    sources: Float[Tensor, "batch keys dim"] | None = None  # the states themselves where None
    gradient: Float[Tensor, "batch heads queries width"] | None = None  # of the loss by `out`
    returned: Float[Tensor, "batch queries out"] | None = None  # of the loss by the layer's output, after its last projection

    def __post_init__(self):
        if self.states is None:
            raise ValueError(f"{self.layer}: a lesson needs the states that its queries are made from; give states.")
        expected = {
            "states": (self.q.shape[0], self.q.shape[2]),
            "sources": (self.k.shape[0], self.k.shape[2]),
            "returned": (self.q.shape[0], self.q.shape[2]),
        }
        for name, shape in expected.items():
            tensor = self.keyed if name == "sources" else getattr(self, name)
            if tensor is not None and tensor.shape[:2] != shape:
                raise ValueError(f"{self.layer}: {name} has shape {tuple(tensor.shape)} but the call needs {(*shape, 'dim')}.")
        wanted = (*self.q.shape[:3], self.v.shape[-1])
        if self.gradient is not None and self.gradient.shape != wanted:
            raise ValueError(f"{self.layer}: the gradient has shape {tuple(self.gradient.shape)} but the output {tuple(wanted)}.")

    @property
    def keyed(self) -> Tensor:
        """The rows that keys and values are made from, (batch, keys, dim)."""
        assert self.states is not None
        return self.states if self.sources is None else self.sources

    @property
    def augmented(self) -> Tensor:
        """X' = [X | 1] of the queries, (batch, queries, dim + 1), in float32 at least: its last row of weights is the bias."""
        assert self.states is not None
        return F.pad(self.states.to(torch.promote_types(self.states.dtype, torch.float32)), (0, 1), value=1.0)

    @property
    def counted(self) -> Tensor:
        """Which queries are tokens, (batch, queries)."""
        if self.real is None:
            return torch.ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool, device=self.q.device)
        return self.real.expand(self.q.shape[0], -1)

    def check(self) -> None:
        """Refuse gradients that are missing or not finite, before work starts."""
        for name in ("states", "sources", "gradient", "returned"):
            tensor = getattr(self, name)
            if name == "gradient" and tensor is None:
                raise ValueError(f"{self.layer}: a growth statistic needs the gradient of the loss by the call's output.")
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise ValueError(
                    f"{self.layer}: {name} holds NaN or infinite values; look at the loss, load a half-precision model with "
                    "dtype=torch.float32, or scale the loss down."
                )
