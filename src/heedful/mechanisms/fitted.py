"""FittedPerformer: random features drawn where the queries and keys of each head of a trained layer meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..attention import Capture, Mask
from ..ops.features import by_features
from ..ops.reading import by_features_causal
from .directions import sample
from .moments import Moments
from .performer import Performer
from .proposals import PROPOSALS, balance, power

if TYPE_CHECKING:
    from jaxtyping import Float

PAIRS = 1024  # pairs of a query and a key kept for each head
RIDGE = 1e-2  # of the mean variance, added to every axis before a matrix is inverted


@dataclass(eq=False)
class FittedPerformer(Performer):
    """Performer on queries and keys that are shifted and stretched first, by what `fit` saw of a layer; Performer itself before that.

    Three changes leave each estimate unbiased and lower its variance (exp|x+y|^2 - 1) / features: keys are centred (softmax does not
    see a constant), x = A q and y = A^-T k are made equally long, and directions are drawn from a `proposal` instead of the normal.

    >>> mechanism = FittedPerformer(features=64, proposal="attention")
    >>> q, k, v = torch.randn(3, 1, 2, 200, 8) / 2
    >>> _ = mechanism.fit([Capture("layer", q, k, v, scale=8**-0.5)])
    >>> mechanism(q, k, v).shape
    torch.Size([1, 2, 200, 8])
    """

    proposal: str = "gaussian"  # or attention, normal

    supports: ClassVar[frozenset[str]] = Performer.supports - {"shared"}

    def __post_init__(self):
        super().__post_init__()
        if self.proposal not in PROPOSALS:
            raise ValueError(f"proposal is {self.proposal!r}; it must be one of {', '.join(PROPOSALS)}.")
        for name in ("centre", "stretch", "shrink", "weights"):
            self.register_buffer(name, None)

    def prepare(self, heads: int, head_dim: int) -> None:
        if self.centre is None or self.centre.shape != (heads, head_dim):
            if self.centre is not None and bool(self.centre.any()):
                was = f"{self.centre.shape[0]} heads of {self.centre.shape[1]} dims"
                raise ValueError(f"this FittedPerformer was fitted to {was}; fit a new one to {heads} heads of {head_dim} dims.")
            one = torch.eye(head_dim, device="cpu").repeat(heads, 1, 1)
            self.centre = torch.zeros(heads, head_dim, device="cpu")  # of the keys
            self.stretch, self.shrink = one, one.clone()  # A, with x = A q, and its inverse
            noise = sample(self.directions, self.features, head_dim, self.seed)
            self.projection = noise.repeat(heads, 1, 1)  # (heads, features, dim)
            self.weights = torch.zeros(heads, self.features, device="cpu")  # log importance of each direction

    @torch.no_grad()
    def fit(self, captures: Sequence[Capture]) -> FittedPerformer:
        """Shift, stretch and draw by what the heads of one layer attend to; the same for the same captures and seed."""
        seen = Moments.of(captures, PAIRS, self.seed)
        heads, dim = seen.query_mean.shape
        self.prepare(heads, dim)
        metric = balance(_ridged(seen.query_cov), _ridged(seen.key_cov))
        stretch = power(metric, 0.5)
        shrink = torch.linalg.inv(stretch)
        both = stretch @ seen.cross_cov @ shrink
        spread = stretch @ seen.query_cov @ stretch.mT + shrink.mT @ seen.key_cov @ shrink + both + both.mT
        axes, turned = torch.linalg.eigh(spread)
        stretch, shrink = turned.mT @ stretch, shrink @ turned
        centre = seen.key_mean + (metric @ seen.query_mean[..., None])[..., 0]
        sums = seen.queries @ stretch.mT + (seen.keys - centre[:, None]) @ shrink
        noise = sample(self.directions, self.features, dim, self.seed).double()
        directions, weights = PROPOSALS[self.proposal](noise, sums, axes)
        found = {"centre": centre, "stretch": stretch, "shrink": shrink, "projection": directions, "weights": weights}
        for name, tensor in found.items():
            setattr(self, name, tensor.float().contiguous().to(getattr(self, name).device))
        return self

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        self._follow(q.device)
        if mask.keys is not None:
            k = k.masked_fill(~mask.keys[:, None, :, None], 0)
        x, y = self.stretched(q, k, scale)
        self._look(x, y, mask, 1.0)
        asked, kept = self._features(x, y)
        if mask.causal:
            return by_features_causal(asked, kept, v, mask.keys, mask.offset)
        return by_features(asked, kept, v, mask.keys)

    def log_features(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return self._features(*self.stretched(q, k, scale))

    def stretched(
        self, q: Float[Tensor, "batch heads queries dim"], k: Float[Tensor, "batch heads keys dim"], scale: float
    ) -> tuple[Tensor, Tensor]:
        """The x and y whose products are the logits, up to a constant for each query."""
        root, high = self.root(scale), torch.promote_types(q.dtype, torch.float32)
        centre, stretch, shrink = (t.to(q.device, high) for t in (self.centre, self.stretch, self.shrink))
        return q.to(high) * root @ stretch.mT, (k.to(high) * root - centre[:, None]) @ shrink

    def _features(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        across, weights = self.projection.to(x).mT, self.weights.to(x)[:, None]
        return x @ across + weights, y @ across - y.square().sum(-1, keepdim=True) / 2

    def _load_from_state_dict(self, state_dict, prefix, *args):  # a fresh one has nothing to load into yet
        given = state_dict.get(prefix + "centre")
        if given is not None:
            self.prepare(*given.shape)
            if given.is_meta:
                self.to("meta")
        super()._load_from_state_dict(state_dict, prefix, *args)


def _ridged(covariance: Tensor) -> Tensor:
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)
    return covariance + torch.diag_embed((RIDGE * mean)[:, None].expand(covariance.shape[:2]))
