"""Residual of hidden states: how far the tokens of a layer are from being all alike (rank collapse)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..exact.residual import composite_norm
from ..statistic import Estimate, Statistic


@dataclass(frozen=True, eq=False)
class Residual(Statistic):
    """Of the hidden states X of a text, |X - 1 mean^T| / |X| in the Frobenius and the composite norm, and the tokens' mean cosine.

    The composite norm is sqrt(|X|_1 |X|_inf) (Dong et al. 2021). 0 means that all tokens have become one vector.

    >>> Residual.of_states(torch.ones(1, 5, 3)).result()["residual"].value
    tensor([0.], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {
        "residual": "|X - 1 mean^T| / |X|, Frobenius",
        "composite": "the same in the composite norm",
        "similarity": "mean cosine between two tokens",
    }

    sums: Tensor  # (3,)
    squares: Tensor  # (3,)
    texts: Tensor  # ()

    @classmethod
    def of_states(cls, states: Tensor, real: Tensor | None = None) -> Self:
        """The statistic of hidden states (batch, tokens, dim); `real` is (batch, tokens)."""
        x = states.detach().to(torch.promote_types(states.dtype, torch.float32))
        seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real
        x, count = x * seen[..., None], seen.sum(-1).clamp_min(1)[:, None, None]
        rest = (x - x.sum(1, keepdim=True) / count) * seen[..., None]
        unit = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        pairs = (count * (count - 1)).clamp_min(1)[:, 0, 0]
        alike = (unit.sum(1).square().sum(-1) - seen.sum(-1)) / pairs
        found = torch.stack([_ratio(rest, x, _frobenius), _ratio(rest, x, composite_norm), alike], -1).double()
        found = found[seen.sum(-1) > 1]  # one token alone is no text
        zeros = torch.zeros(3, dtype=torch.float64, device=x.device)
        return cls(zeros + found.sum(0), zeros + found.square().sum(0), zeros[0] + len(found))

    def result(self) -> dict[str, Estimate]:
        mean = self.sums / self.texts
        spread = (self.squares / self.texts - mean**2).clamp_min(0) / (self.texts - 1).clamp_min(1)
        return {name: Estimate(mean[i : i + 1], spread.sqrt()[i : i + 1]) for i, name in enumerate(self.columns)}


def _ratio(rest: Tensor, whole: Tensor, norm) -> Tensor:
    return norm(rest) / norm(whole).clamp_min(1e-30)


def _frobenius(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=-1)
