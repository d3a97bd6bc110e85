"""Signal: the gradient by a product of two projections, in two folds, with the metrics of its sides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .metric import Metric
from .operators import Operator, conjugate_gradients

if TYPE_CHECKING:
    from jaxtyping import Float

STEPS = 12  # of conjugate gradients: more change the direction by less than the statistics' noise


@dataclass(frozen=True, eq=False)
class Signal:
    """dL/dZ of each head, Z = left factor times right factor, and the second moments of what meets either side.

    For new key dims Z = s W_Q' W_K^T, in the KL metric; for new value dims Z = W_V' W_O and the right side is Euclidean (None). Where
    several query heads share a key head, the new columns of the shared side are one for all of them: `left_shared` heads stand over one
    right factor (keys), or `right_shared` over one left factor (values).
    """

    gradient: Float[Tensor, "folds heads left right"]  # of the mean loss of each fold
    left: Float[Tensor, "*heads left left"]
    right: Float[Tensor, "*heads right right"] | None = None
    weights: Float[Tensor, " folds"] | None = None  # of the folds in the whole; equal where None
    left_shared: int = 1
    right_shared: int = 1

    def __post_init__(self):
        heads, shared = self.gradient.shape[1], max(self.left_shared, self.right_shared)
        if heads % shared or min(self.left_shared, self.right_shared) != 1:
            raise ValueError(
                f"{heads} heads cannot share in groups of {self.left_shared} and {self.right_shared}; use one divisor."
            )

    @property
    def whole(self) -> Float[Tensor, "heads left right"]:
        """The gradient of the mean loss of all texts."""
        weights = self._shares.view(-1, 1, 1, 1)
        return (self.gradient * weights).sum(0)

    @property
    def _shares(self) -> Tensor:
        weights = self.gradient.new_ones(len(self.gradient)) if self.weights is None else self.weights.to(self.gradient)
        return weights / weights.sum().clamp_min(1e-300)

    @property
    def folded(self) -> bool:
        """Whether both folds have texts, so that one can judge the other."""
        return len(self.gradient) == 2 and bool((self._shares > 0).all()) and bool((self.gradient.flatten(1) != 0).any(1).all())

    def metrics(self, damping: float) -> tuple[Metric, Metric | None]:
        """Those of both sides, heads that share a side having their mean there."""
        if damping not in self._known:
            left = Metric.of(_mean(self.left, self.right_shared), damping)
            right = None if self.right is None else Metric.of(_mean(self.right, self.left_shared), damping)
            self._known[damping] = left, right
        return self._known[damping]

    @cached_property
    def _known(self) -> dict[float, tuple[Metric, Metric | None]]:
        """By damping: they are asked for many times."""
        return {}

    def moved(self, z: Tensor) -> Tensor:
        """C Z D, the Kronecker metric applied."""
        seen = _mean(self.left, self.right_shared) @ z
        return seen if self.right is None else seen @ _mean(self.right, self.left_shared)

    def descent(self, gradient: Tensor, damping: float, operator: Operator | None = None) -> Float[Tensor, "heads left right"]:
        """The full-rank step -(A + damping)^+ gradient; A is `operator`, by conjugate gradients, or the Kronecker metric where None."""
        left, right = self.metrics(damping)

        def solved(n: Tensor) -> Tensor:
            n = left.inverse @ (left.inverse @ n)
            return n if right is None else n @ right.inverse @ right.inverse

        if operator is None or damping == float("inf"):
            return -solved(gradient)

        def damped(z: Tensor) -> Tensor:  # damped as the Kronecker metric is, whose inverse preconditions
            whole = left.root @ (left.root @ z)
            whole = whole if right is None else whole @ right.root @ right.root
            return operator(z) + whole - self.moved(z)

        return -conjugate_gradients(damped, gradient, solved, STEPS, 1e-6)

    def strengths(self, damping: float = 0.1) -> Float[Tensor, "heads all"]:
        """The singular values of the gradient in the metric: what a step of length one along each component gains to first order."""
        left, right = self.metrics(damping)
        seen = left.inverse @ self.whole
        return torch.linalg.svdvals(seen if right is None else seen @ right.inverse)

    def components(
        self, z: Tensor, damping: float, count: int
    ) -> tuple[Float[Tensor, "heads left n"], Float[Tensor, "heads right n"]]:
        """The first components of z in the metric, half of each strength on either side; a shared side is repeated for its heads."""
        left, right = self.metrics(damping)
        seen = left.root @ z
        seen = seen if right is None else seen @ right.root
        u, s, v = _decomposed(seen, self.left_shared, self.right_shared, count)
        columns = left.inverse @ (u * s.sqrt()[:, None])
        rows = v * s.sqrt()[:, None]
        return columns, rows if right is None else right.inverse @ rows


def _decomposed(seen: Tensor, tall: int, wide: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """u, s and v of each head; heads in groups of `tall` stand below each other, of `wide` beside."""
    heads, rows, columns = seen.shape
    if wide > 1:
        v, s, u = _decomposed(seen.mT, wide, 1, count)
        return u, s, v
    stacked = seen.reshape(heads // tall, tall * rows, columns)
    u, s, vh = torch.linalg.svd(stacked, full_matrices=False)
    s = s * (s > s[:, :1] * max(stacked.shape[1:]) * torch.finfo(s.dtype).eps)
    u, s, v = u[..., :count], s[:, :count], vh[:, :count].mT
    return u.reshape(heads, rows, -1), s.repeat_interleave(tall, 0), v.repeat_interleave(tall, 0)


def _mean(gram: Tensor, shared: int) -> Tensor:
    """The mean over each group of heads, for each of its heads; one gram for all heads stays as it is."""
    if gram.ndim == 2 or shared == 1:
        return gram
    return gram.unflatten(0, (-1, shared)).mean(1).repeat_interleave(shared, 0)
