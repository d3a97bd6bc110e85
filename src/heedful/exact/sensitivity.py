"""How far a call's outputs move with each key, query or value, to first order, and when each token is taken away, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention import Capture
from ..ops.deletion import deletion_sums
from ..ops.sensitivity import key_sums, query_norms
from .edits import answer

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ROWS = 256  # queries whose norms are taken at once


@torch.no_grad()
def key_sensitivity(call: Capture) -> Float[Tensor, "batch heads keys"]:
    """|dO / dk_j| of each head's key j in the Frobenius norm: how far all outputs together move with it. Over tiles.

    >>> q, k, v = torch.ones(3, 1, 1, 16, 4)
    >>> float(key_sensitivity(Capture("layer", q, k, v)).max())  # where all values are alike no key matters
    0.0
    """
    return key_sums(call.q, call.v, call.logits, call.sample, call.real).sqrt()


@torch.no_grad()
def value_sensitivity(call: Capture) -> Float[Tensor, "batch heads keys"]:
    """|dO / dv_j|, the 2-norm of column j of the attention.

    >>> q, k, v = torch.zeros(3, 1, 1, 16, 4)
    >>> value_sensitivity(Capture("layer", q, k, v))[0, 0, 0]
    tensor(0.2500)
    """
    return call.columns.squares.sqrt()


@torch.no_grad()
def query_sensitivity(call: Capture, rows: Int[Tensor, " rows"] | None = None) -> Float[Tensor, "batch heads rows"]:
    """|do_i / dq_i| = s |Cov(v, k)| under P_i in the Frobenius norm, of all queries or of those named; nan where one sees no key.

    A query moves its own output alone. The cost is that of the attention times the width of v: name some rows of a long text.

    >>> q, k, v = torch.ones(3, 1, 1, 16, 4)
    >>> float(query_sensitivity(Capture("layer", q, k, v)).max())  # where all keys are alike no query matters
    0.0
    """
    rows = torch.arange(call.q.shape[2], device=call.q.device) if rows is None else rows
    many = len(call.q)
    parts = [query_norms(call.q[:, :, some], call.v, call.logits, some.expand(many, -1)) for some in rows.split(ROWS)]
    return torch.cat(parts, -1) if parts else call.q.new_zeros(*call.q.shape[:2], 0)


@dataclass(frozen=True, eq=False)
class Removal:
    """How far the outputs of a call move when each token is no longer attended to, over all queries that are tokens."""

    norms: Float[Tensor, "batch heads keys"]  # sqrt(sum_i |o_i without j - o_i|^2)
    size: Float[Tensor, "batch heads"]  # |O|, what they are compared with

    @classmethod
    @torch.no_grad()
    def of(cls, call: Capture) -> Removal:
        """Of every token at once, over tiles, never L x L: the cost is a few times that of the attention.

        >>> q, k, v = torch.randn(3, 1, 2, 16, 4)
        >>> k[:, :, 5], v[:, :, 5] = 0, 1000
        >>> Removal.of(Capture("layer", q, k, v)).ranked(1)[0]
        [5]
        """
        norms = deletion_sums(call.q, call.v, call.logits, call.real).sqrt()
        out = answer(call)[0]
        out = out if call.real is None else out * call.real[:, None, :, None]
        return cls(norms, torch.linalg.vector_norm(out, dim=(2, 3)))

    @property
    def layer(self) -> Float[Tensor, "batch keys"]:
        """The same over all heads together, side by side as they go into W_O, relative to the size of their outputs."""
        whole = torch.linalg.vector_norm(self.size, dim=1, keepdim=True)
        return torch.linalg.vector_norm(self.norms, dim=1) / whole.clamp_min(torch.finfo(whole.dtype).tiny)

    def ranked(self, count: int | None = None) -> list[list[int]]:
        """For each text its tokens by what their removal changes in the whole layer, most first."""
        return self.layer.argsort(dim=-1, descending=True, stable=True)[:, :count].tolist()
