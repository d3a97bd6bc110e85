"""Deciding: how much a layer would gain by growing beyond what its present dims can do, and how far to go along a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .signal import Signal

if TYPE_CHECKING:
    from jaxtyping import Float

REALISED = 0.25  # of what was predicted, that a step must bring


def growth_score(
    signal: Signal,
    w_left: Float[Tensor, "heads left dim"],
    w_right: Float[Tensor, "heads right dim"],
    new: int,
    damping: float = 0.1,
) -> Float[Tensor, " heads"]:
    """Squared first-order gain of the best `new` dims in what the present ones cannot do: they span W_Q' and W_K.

    N_perp = (1 - U U^T) C^-1/2 N D^-1/2 (1 - V V^T), U and V the present columns in the metric; the sum of its largest squared
    singular values.

    >>> n, eye = torch.diag(torch.tensor([3.0, 2, 1])).expand(2, 1, 3, 3), torch.eye(3)
    >>> present = torch.tensor([[[1.0], [0], [0]]])
    >>> growth_score(Signal(n, eye, eye), present, present, 1, 0.0)  # the largest gain is had already
    tensor([4.])
    """
    left, right = signal.metrics(damping)
    seen = left.inverse @ signal.whole
    seen = seen if right is None else seen @ right.inverse
    u, v = _span(left.root @ w_left), _span(w_right if right is None else right.root @ w_right)
    seen = seen - u @ (u.mT @ seen)
    seen = seen - (seen @ v) @ v.mT
    return torch.linalg.svdvals(seen)[:, :new].square().sum(-1)


def _span(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns, zeros where they depend on each other."""
    u, s, _ = torch.linalg.svd(columns, full_matrices=False)
    return u * (s > s[..., :1] * max(columns.shape[-2:]) * torch.finfo(s.dtype).eps)[..., None, :]


@dataclass(frozen=True)
class Search:
    """Where a line search ended: the step `gamma` (0 where none was good enough), what it was predicted and found to bring."""

    gamma: float
    predicted: float
    realised: float
    tried: tuple[tuple[float, float], ...]  # (gamma, loss), in order

    @property
    def accepted(self) -> bool:
        return self.gamma > 0


def line_search(loss_at: Callable[[float], float], slope: float, start: float, largest: float = math.inf, most: int = 6) -> Search:
    """How far to go: `loss_at(gamma)` is the loss on held-out texts, `slope` its predicted fall for each unit of gamma, `start` the loss at 0.

    The first try is .3 start / slope, none goes beyond `largest`; parabolas lead on, at most `most` losses are asked for. A step that
    brings less than a quarter of gamma * slope is refused, and a shorter one tried.

    >>> found = line_search(lambda gamma: 2 - gamma + gamma**2, slope=1.0, start=2.0)
    >>> round(found.gamma, 3), round(found.realised, 3)
    (0.5, 0.25)
    """
    if not slope > 0 or not math.isfinite(start):
        return Search(0.0, 0.0, 0.0, ())
    tried: list[tuple[float, float]] = []
    gamma = min(0.3 * start / slope, largest)
    for _ in range(most):
        loss = loss_at(gamma)
        tried.append((gamma, loss if math.isfinite(loss) else math.inf))
        best, low = min(tried, key=lambda pair: pair[1])
        gamma = min(_next(tried, best, low, slope, start), largest)
        if any(abs(gamma - g) < 0.05 * g for g, _ in tried):
            break
    good = [(g, loss) for g, loss in tried if start - loss >= REALISED * g * slope]
    if not good:
        return Search(0.0, 0.0, 0.0, tuple(tried))
    gamma, loss = min(good, key=lambda pair: pair[1])
    return Search(gamma, gamma * slope, start - loss, tuple(tried))


def _next(tried: list[tuple[float, float]], best: float, low: float, slope: float, start: float) -> float:
    """Where a parabola through the start is lowest: through two more tries, or through one with the predicted slope."""
    others = [(g, start - loss) for g, loss in tried if g != best and math.isfinite(loss)]
    if low >= start - REALISED * best * slope or not others:
        g, loss = min(tried)  # the shortest
        bend = (loss - start + slope * g) / g**2 if math.isfinite(loss) else math.inf
        bottom = slope / (2 * bend) if bend > 0 else math.inf
        shorter = low >= start - REALISED * best * slope
        return min(max(bottom, g / 32), g / 2) if shorter else min(bottom, 4 * best)
    near, fall = min(others, key=lambda pair: abs(math.log(pair[0] / best)))
    bend = ((start - low) / best - fall / near) / (near - best)  # fall = rise g - bend g^2
    rise = (start - low) / best + bend * best
    bottom = rise / (2 * bend) if bend > 0 else 4 * best
    return min(max(bottom, best / 4), 4 * best)
