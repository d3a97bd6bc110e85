"""Growing: new key dims, value dims and heads along the steepest descent that both halves of the texts agree on (source 000, made right)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .operators import Operator
from .signal import Signal

if TYPE_CHECKING:
    from jaxtyping import Float

DAMPINGS = (0.01, 0.1, 1.0, 10.0, float("inf"))  # infinite: GradMax
AGREES = 0.25  # of its own fold's slope, that a component must have in the other


@dataclass(frozen=True, eq=False)
class NewDims:
    """A step Z = left right^T of each head, of length 1: `at(gamma)` has a root mean square of gamma, over queries and heads.

    It is measured in the metric: for key dims the change of the logits, weighted as the attention weighs them; for value dims that of
    the layer's output. The loss falls by gamma * slope to first order; `judged` is the slope of each fold's own step in the other
    fold, which new texts will see.
    """

    left: Float[Tensor, "heads left new"]
    right: Float[Tensor, "heads right new"]
    slope: float
    judged: float  # nan where there is one fold only
    damping: float
    kept: Float[Tensor, "heads new"]  # False where the folds disagree: such columns are zero
    idle: Float[Tensor, "heads left new"]  # left columns that give numbers of mean square 1

    def at(self, gamma: float) -> tuple[Float[Tensor, "heads left new"], Float[Tensor, "heads right new"]]:
        """Both factors of the step of that size, evenly split; the logits' scale is still to be divided out (`for_scale`)."""
        return self.left * gamma**0.5, self.right * gamma**0.5

    def for_scale(self, gamma: float, scale: float) -> tuple[Tensor, Tensor]:
        """W_Q' (its last row the bias) and W_K of the new dims in a model whose logits are scale * q.k."""
        return self.at(gamma / scale)

    def preserving(self, rms: float) -> tuple[Tensor, Tensor]:
        """Factors that leave the function as it is: left columns that give numbers of that root mean square, right ones zero.

        Of all such columns the gradient by the right ones is largest here. Zeros on both sides would stay zeros: a saddle.
        """
        return self.idle * rms, torch.zeros_like(self.right)


def grow_dk(signal: Signal, new: int, operator: Operator | None = None, dampings: tuple[float, ...] = DAMPINGS) -> NewDims:
    """New key dims: Z = s W_Q' W_K^T of rank `new`, by conjugate gradients in the metric of `operator` (Fisher), or Kronecker's.

    >>> x, n = torch.randn(50, 3, dtype=torch.float64), torch.randn(1, 3, 3, dtype=torch.float64)
    >>> signal = Signal(torch.stack([n, n]), x.mT @ x / 50, x.mT @ x / 50)
    >>> step = grow_dk(signal, 1)
    >>> w_q, w_k = step.for_scale(0.1, scale=0.5)
    >>> fall = -(n * (0.5 * w_q @ w_k.mT)).sum()
    >>> round(float(fall), 6) == round(0.1 * step.slope, 6), step.kept.tolist()
    (True, [[True]])
    """
    return _grown(signal, new, operator, dampings)


def grow_dv(signal: Signal, new: int, dampings: tuple[float, ...] = DAMPINGS) -> NewDims:
    """New value dims: left is W_V' (its last row the bias), right^T the rows of W_O, by TINY (Verbockhaven et al. 2024) in the metric
    of what the heads mix.
    """
    return _grown(signal, new, None, dampings)


@dataclass(frozen=True, eq=False)
class NewHead:
    """A head of the pattern that gains most, with its W_V' and W_O in `dims`; what each pattern would gain, a step of length 1."""

    pattern: str
    dims: NewDims
    gains: dict[str, float]


def add_head(patterns: Mapping[str, Signal], width: int, dampings: tuple[float, ...] = DAMPINGS) -> NewHead:
    """The best new head of that width, among patterns of attention and copies of the present heads (a signal of many heads).

    Patterns are judged in the other fold where there is one.
    """
    found: dict[str, NewDims] = {}
    for name, signal in patterns.items():
        for head in range(signal.gradient.shape[1]):
            own = f"{name} {head}" if signal.gradient.shape[1] > 1 else name
            if bool((_head(signal, head).left != 0).any()):
                found[own] = grow_dv(_head(signal, head), width, dampings)
    if not found:
        raise ValueError("no pattern has a signal; measure the statistics with the gradient by the layer's output.")
    gains = {name: dims.judged if dims.judged == dims.judged else dims.slope for name, dims in found.items()}
    best = max(gains, key=lambda name: gains[name])
    return NewHead(best, found[best], gains)


def _head(signal: Signal, head: int) -> Signal:
    some = slice(head, head + 1)
    left = signal.left if signal.left.ndim == 2 else signal.left[some]
    right = signal.right if signal.right is None or signal.right.ndim == 2 else signal.right[some]
    return replace(signal, gradient=signal.gradient[:, some], left=left, right=right, left_shared=1, right_shared=1)


def _grown(signal: Signal, new: int, operator: Operator | None, dampings: tuple[float, ...]) -> NewDims:
    if new < 1:
        raise ValueError(f"{new} new dims were asked for; add at least 1.")
    if not bool(torch.isfinite(signal.gradient).all()):
        raise ValueError("the gradient holds NaN or infinite entries; look at the loss and the model's precision.")
    if not dampings:
        raise ValueError("no damping was given; give at least one, infinity for GradMax.")
    best, judged, ratios = _judged(signal, new, operator, dampings)
    left, right = _step(signal, signal.whole, new, best, operator)
    kept = (left != 0).any(1) if ratios is None else (ratios >= AGREES) & (left != 0).any(1)
    left, right, size = *(t * kept[:, None] for t in (left, right)), 1.0
    size = _length(signal, left @ right.mT, operator)
    left, right = (t / max(size, 1e-300) ** 0.5 for t in (left, right))
    slope = -float((signal.whole * (left @ right.mT)).sum())
    return NewDims(left, right, slope, judged, best, kept, _idle(signal, new, best))


def _judged(signal: Signal, new: int, operator: Operator | None, dampings: tuple[float, ...]) -> tuple[float, float, Tensor | None]:
    """The damping whose steps fall most steeply in the other fold, that slope, and how far the folds agree on each component."""
    if not signal.folded:
        return (0.1 if 0.1 in dampings else dampings[0]), float("nan"), None
    found = {}
    for damping in dampings:
        slopes, ratios = [], []
        for mine, other in (signal.gradient, signal.gradient.flip(0)):
            left, right = _step(signal, mine, new, damping, operator)
            size = max(_length(signal, left @ right.mT, operator), 1e-300)
            inside, outside = (torch.einsum("hlr,hln,hrn->hn", n, left, right) for n in (mine, other))
            slopes.append(-float(outside.sum()) / size)
            ratios.append(_grouped(outside, signal) / _grouped(inside, signal).clamp_max(-1e-300))
        found[damping] = sum(slopes) / 2, (ratios[0] + ratios[1]) / 2
    best = max(found, key=lambda damping: found[damping][0])
    return best, *found[best]


def _grouped(slopes: Tensor, signal: Signal) -> Tensor:
    """Slopes (heads, new) summed over heads that share their columns."""
    shared = max(signal.left_shared, signal.right_shared)
    return slopes if shared == 1 else slopes.unflatten(0, (-1, shared)).sum(1).repeat_interleave(shared, 0)


def _step(signal: Signal, gradient: Tensor, new: int, damping: float, operator: Operator | None) -> tuple[Tensor, Tensor]:
    return signal.components(signal.descent(gradient, damping, operator), damping, new)


def _length(signal: Signal, z: Tensor, operator: Operator | None) -> float:
    """The root mean square of what z changes, over queries and heads."""
    moved = signal.moved(z) if operator is None else operator(z)
    return float((z * moved).sum().clamp_min(0) / len(z)) ** 0.5


def _idle(signal: Signal, new: int, damping: float) -> Tensor:
    """Left columns along the components of the gradient, or random where there are fewer, each giving numbers of mean square 1."""
    found, _ = signal.components(signal.descent(signal.whole, damping), damping, new)
    columns = torch.randn(*found.shape[:-1], new, generator=torch.Generator().manual_seed(0)).to(found)
    columns[..., : found.shape[-1]] = torch.where((found != 0).any(-2, keepdim=True), found, columns[..., : found.shape[-1]])
    return columns / (columns * (signal.left @ columns)).sum(-2, keepdim=True).clamp_min(1e-300).sqrt()
