"""Growth: what new key dims, value dims and heads could do about the loss, as sums that merge (source 000, made right)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from ..exact.signal import Signal
from ..lesson import Lesson
from ..statistic import Estimate, Statistic
from .gathering import PATTERNS, gather

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Growth(Statistic):
    """Sums over the texts of two folds; heads are followed by the patterns a new head could have: uniform, self, previous.

    With S = X' M X^T, G = dL/dS, u = P X', g the gradient by the layer's output, and L the sum of the loss over its tokens:

    >>> x = torch.randn(1, 6, 3)
    >>> part = Lesson("layer", x[:, None], x[:, None], x[:, None], states=x, gradient=torch.randn(1, 1, 6, 3))
    >>> one, other = Growth.of_lesson(part, fold=0), Growth.of_lesson(part, fold=1)
    >>> (one + other).tokens.tolist(), torch.equal((one + other).logit_gradient[1], one.logit_gradient[0])
    ([6.0, 6.0], True)
    """

    columns: ClassVar[dict[str, str]] = {
        "key_gain": "what the best new key dim gains to first order, in loss per token at one nat of change per query",
        "value_gain": "what the best new value dim gains to first order, in loss per token at a mean square output of one",
    }

    texts: Float[Tensor, " folds"]
    tokens: Float[Tensor, " folds"]  # queries that are tokens
    loss: Float[Tensor, " folds"]  # its sum over `graded` tokens
    graded: Float[Tensor, " folds"]
    logit_gradient: Float[Tensor, "folds heads left right"]  # N = X'^T G X
    query_gram: Float[Tensor, "left left"]  # Cq: X'^T X'
    key_gram: Float[Tensor, "heads right right"]  # Ck: sum_j a_j x_j x_j^T - sum_i mu_i mu_i^T, a = 1^T P, mu = P X
    mixed_gram: Float[Tensor, "patterns mixed mixed"]  # Cu: u^T u, of heads and then of patterns
    value_gradient: Float[Tensor, "folds patterns mixed out"]  # Nv: u^T g
    lags: Float[Tensor, "patterns left right"]  # X'^T (X of each pattern - X of the uniform one)

    @classmethod
    def of_lesson(cls, lesson: Lesson, fold: int, loss: float = 0.0, graded: float = 0.0) -> Self:
        """The sums of one call, whose texts are all of that fold (0 or 1); `loss` is their summed loss over `graded` tokens."""
        if fold not in (0, 1):
            raise ValueError(f"fold is {fold}; there are two, 0 and 1.")
        lesson.check()
        sums = gather(lesson)

        def folded(x: Tensor | float) -> Tensor:
            x = torch.as_tensor(x, dtype=torch.float64, device=lesson.q.device)
            return torch.stack([x if f == fold else torch.zeros_like(x) for f in (0, 1)])

        return cls(
            folded(float(lesson.q.shape[0])),
            folded(lesson.counted.sum()),
            folded(loss),
            folded(graded),
            folded(sums.logit_gradient),
            sums.query_gram,
            sums.key_gram,
            sums.mixed_gram,
            folded(sums.value_gradient),
            sums.lags,
        )

    @property
    def heads(self) -> int:
        return self.logit_gradient.shape[1]

    @property
    def mean_loss(self) -> float:
        return float(self.loss.sum() / self.graded.sum().clamp_min(1))

    def keys(self, shared: int = 1) -> Signal:
        """What new key dims see: the gradient by M in each fold, the metrics of both sides; `shared` query heads read one key head."""
        every = self.tokens.sum().clamp_min(1)
        n = self._per_graded(self.logit_gradient)
        return Signal(n, self.query_gram / every, self.key_gram / every, self._graded, left_shared=shared)

    def values(self, shared: int = 1) -> Signal:
        """What new value dims see: the gradient by W_V' W_O in each fold, in the metric of what the heads mix."""
        every = self.tokens.sum().clamp_min(1)
        n = self._per_graded(self.value_gradient[:, : self.heads])
        return Signal(n, self.mixed_gram[: self.heads] / every, None, self._graded, right_shared=shared)

    def patterns(self) -> dict[str, Signal]:
        """What a new head of each pattern sees; copies of the present heads are in `values`."""
        every, found = self.tokens.sum().clamp_min(1), {}
        for i, name in enumerate(PATTERNS, self.heads):
            some = slice(i, i + 1)
            n = self._per_graded(self.value_gradient[:, some])
            found[name] = Signal(n, self.mixed_gram[some] / every, None, self._graded)
        return found

    def _per_graded(self, gradient: Tensor) -> Tensor:
        """The gradient of the mean loss of each fold; zeros in a fold without texts."""
        return gradient / self._graded.clamp_min(1).view(-1, *[1] * (gradient.ndim - 1))

    @property
    def _graded(self) -> Tensor:
        """How many tokens the loss of each fold is a sum over; all, where nobody said."""
        return self.graded if bool((self.graded > 0).any()) else self.tokens

    def result(self) -> dict[str, Estimate]:
        found = {"key_gain": self.keys().strengths()[..., 0]}
        if self.value_gradient.shape[-1]:
            found["value_gain"] = self.values().strengths()[..., 0]
        return {name: Estimate(gain, torch.full_like(gain, torch.nan)) for name, gain in found.items()}

    def __add__(self, other: Any) -> Self:
        return super().__add__(other)
