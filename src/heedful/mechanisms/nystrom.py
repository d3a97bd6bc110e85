"""Nystrom: the attention matrix rebuilt from a few landmark queries and keys, each the mean of a stretch of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..attention import Mask, Mechanism
from ..ops.hop import hop

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(eq=False)
class Nystrom(Mechanism):
    """Three hops: queries over landmark keys, the inverse of landmarks over landmarks, landmark queries over keys.

    Landmarks are means over the real tokens of each text alone. With as many landmarks as keys or queries attention is exact.

    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> exact = ((q @ k.mT) / 4).softmax(-1) @ v
    >>> torch.allclose(Nystrom(landmarks=64)(q, k, v), exact, atol=1e-5)
    True

    Xiong et al. 2021, Nystromformer.
    """

    landmarks: int = 64
    ridge: float = 0.01  # singular values below it are damped rather than inverted

    supports: ClassVar[frozenset[str]] = frozenset({"keys", "cross"})
    instead: ClassVar[str] = "Softmax(), or Reformer() where all it needs is causality,"

    def __post_init__(self):
        if not isinstance(self.landmarks, int) or self.landmarks < 1:
            raise ValueError(f"landmarks is {self.landmarks!r}; it must be a whole number of at least 1 (64 is usual).")
        if not self.ridge > 0:
            raise ValueError(f"ridge is {self.ridge!r}; it must be above 0 (0.01 is usual, less inverts more but amplifies noise).")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        high = torch.promote_types(v.dtype, torch.float32)
        x, y, values = (t.to(high) for t in (q, k, v))
        if mask.keys is not None:
            y, values = (t.masked_fill(~mask.keys[:, None, :, None], 0) for t in (y, values))
        if min(q.shape[-2], k.shape[-2]) <= self.landmarks:
            return hop(x, y, values, mask=mask, scale=scale)[0].to(v.dtype)
        same = mask.keys is not None and mask.same(q.shape[-2], k.shape[-2])  # tokens that attend to themselves
        asked = segment_means(x, mask.keys if same else None, self.landmarks)
        kept = segment_means(y, mask.keys, self.landmarks)
        out = self._three_hops((x, y, values), (asked, kept), mask, scale)
        few = None if mask.keys is None else mask.keys.sum(-1) <= self.landmarks
        if few is not None and few.any():  # there each real key is a landmark
            filled = torch.arange(self.landmarks, device=q.device) < mask.keys.sum(-1, keepdim=True)  # type: ignore[union-attr]
            exact, _ = hop(x, kept, segment_means(values, mask.keys, self.landmarks), mask=Mask(keys=filled), scale=scale)
            out = torch.where(few[:, None, None, None], exact, out)
        return out.to(v.dtype)

    def _three_hops(self, inputs: tuple[Tensor, ...], marks: tuple[Tensor, Tensor], mask: Mask, scale: float) -> Tensor:
        """Values are taken about their mean, so that damping cannot shrink what all of them share."""
        (x, y, values), (asked, kept) = inputs, marks
        real = y.new_ones(1, y.shape[-2]) if mask.keys is None else mask.keys.to(y.dtype)
        centre = (real / real.sum(-1, keepdim=True).clamp_min(1))[:, None, None] @ values  # (batch, heads, 1, width)
        seen = hop(asked, y, values, mask=mask, scale=scale)[0] - centre  # (batch, heads, landmarks, width)
        between = (asked.double() @ kept.double().mT * scale).softmax(-1)
        undone = damped_inverse(between, self.ridge) @ seen.double()
        return hop(x, kept, undone.to(x.dtype), scale=scale)[0] + centre


def segment_means(
    x: Float[Tensor, "batch heads tokens dim"], real: Bool[Tensor, "batch tokens"] | None, segments: int
) -> Float[Tensor, "batch heads segments dim"]:
    """The mean of each of so many stretches of the real tokens, near equal in length; fewer tokens leave the last ones 0.

    >>> x = torch.arange(6.0).view(1, 1, 6, 1)
    >>> segment_means(x, torch.tensor([[True] * 5 + [False]]), 2).flatten().tolist()
    [1.0, 3.5]
    """
    if real is None and x.shape[-2] % segments == 0:
        return x.unflatten(-2, (segments, -1)).mean(-2)
    real = torch.ones(1, x.shape[-2], dtype=torch.bool, device=x.device) if real is None else real
    count = real.sum(-1, keepdim=True)
    number = (real.cumsum(-1) - 1) * count.clamp_max(segments) // count.clamp_min(1)  # (batch, tokens)
    member = (number[:, None] == torch.arange(segments, device=x.device)[:, None]) & real[:, None]  # (batch, segments, tokens)
    weights = member / member.sum(-1, keepdim=True).clamp_min(1)
    return weights.to(x.dtype)[:, None] @ x


def damped_inverse(a: Float[Tensor, "*batch n n"], ridge: float) -> Float[Tensor, "*batch n n"]:
    """(A^T A + ridge^2)^-1 A^T: the pseudo-inverse, where a singular value s below `ridge` counts as s / ridge^2 instead of 1/s.

    >>> a = torch.eye(5).double() + 0.1 * torch.randn(5, 5).double()
    >>> torch.allclose(damped_inverse(a, 1e-6), torch.linalg.pinv(a), atol=1e-9)
    True
    """
    square = a.mT @ a + ridge**2 * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.cholesky_solve(a.mT, torch.linalg.cholesky(square))
