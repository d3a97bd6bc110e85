"""Second moments of q, k and the head's output: how many dims a head uses, and what resizing needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..attention import Capture
from ..statistic import Estimate, Statistic

KEPT = 0.99


@dataclass(frozen=True, eq=False)
class Moments(Statistic):
    """Sums of q q^T, of k k^T about each text's mean (softmax ignores a constant) and of o o^T, over all tokens.

    `key_dims` counts the directions that hold 99 % of the logits' variance, the spectrum of Q^1/2 K Q^1/2; `value_dims` those that
    hold 99 % of the output's second moment.

    >>> q, k, v = torch.randn(3, 1, 1, 256, 8)
    >>> Moments.of(Capture("layer", q * torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]), k, v, out=v)).result()["key_dims"].value
    tensor([2.], dtype=torch.float64)
    """

    columns: ClassVar[dict[str, str]] = {
        "key_dims": "directions of q and k that hold 99 % of the logits' variance",
        "value_dims": "directions of the output that hold 99 % of its second moment",
    }

    queries: Tensor  # (heads, dim, dim)
    keys: Tensor  # (key heads, dim, dim)
    outputs: Tensor  # (heads, width, width)
    count: Tensor  # () queries
    output_sums: Tensor  # (heads, width)
    sources: Tensor  # () keys

    @classmethod
    def of(cls, capture: Capture) -> Self:
        q, k = _counted(capture.q, capture.real), _counted(capture.k, capture.mask.keys)
        tokens = capture.k.shape[-2] if capture.mask.keys is None else capture.mask.keys.sum(-1).clamp_min(1)[:, None, None, None]
        k = _counted(k - k.sum(-2, keepdim=True) / tokens, capture.mask.keys)
        out = q.new_zeros(*q.shape[:-1], 0) if capture.out is None else _counted(capture.out, capture.real)
        sums, sources = out.double().sum((0, 2)), capture.sources.sum().double()
        return cls(_gram(q), _gram(k), _gram(out), capture.tokens.sum().double(), sums, sources)

    def spectrum(self) -> Tensor:
        """Per head, what each direction contributes to the logits' variance, largest first: (heads, dim)."""
        shared = self.queries.shape[0] // self.keys.shape[0]
        left, right = _root(self.queries / self.count), _root(self.keys.repeat_interleave(shared, 0) / self.sources)
        return torch.linalg.svdvals(left @ right).square()

    def result(self) -> dict[str, Estimate]:
        outputs = torch.linalg.eigvalsh(self.outputs).flip(-1)
        found = {"key_dims": _needed(self.spectrum()), "value_dims": _needed(outputs)}
        return {name: Estimate(dims, torch.zeros_like(dims)) for name, dims in found.items()}


def _counted(x: Tensor, real: Tensor | None) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if real is None else x * real[:, None, :, None]


def _gram(x: Tensor) -> Tensor:
    return (x.mT @ x).double().sum(0)


def _root(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp_min(0).sqrt()[..., None, :] @ vectors.mT


def _needed(spectrum: Tensor) -> Tensor:
    """How many of the largest entries make up 99 % of the sum."""
    shares = spectrum.clamp_min(0).cumsum(-1) / spectrum.clamp_min(0).sum(-1, keepdim=True).clamp_min(1e-300)
    return (shares < KEPT).sum(-1).add(1).clamp_max(spectrum.shape[-1]).double()
