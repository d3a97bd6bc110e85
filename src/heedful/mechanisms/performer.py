"""Performer: softmax attention estimated by random features, in time and memory linear in the tokens."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..attention import Mask, Mechanism, State
from ..ops.favor import favor
from ..ops.favor_causal import favor_causal
from ..ops.reading import FeatureState, read_on
from .directions import KINDS, sample

LOOK = 64  # tokens of each sequence looked at before a warning
OFTEN = 100  # calls between two such looks


@dataclass(eq=False)
class Performer(Mechanism):
    """FAVOR+: an unbiased estimate of every attention weight before the softmax divides; the more features, the closer.

    Random features are for small norms: their relative variance is (exp|x+y|^2 - 1) / features, for x, y = q, k times sqrt(scale).

    >>> q, k, v = torch.randn(3, 1, 2, 200, 16) / 3
    >>> exact = ((q @ k.mT) / 16**0.5).softmax(-1) @ v
    >>> float((Performer(features=1024)(q, k, v) - exact).norm() / exact.norm()) < 0.1
    True

    Choromanski et al. 2021, Rethinking Attention with Performers.
    """

    features: int = 256
    directions: str = "orthogonal"  # or iid, simplex, antithetic
    seed: int = 0

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "keys", "cross", "shared", "state"})

    def __post_init__(self):
        if not isinstance(self.features, int) or self.features < 1:
            raise ValueError(f"features is {self.features!r}; it must be a whole number of at least 1 (256 is usual).")
        if self.directions not in KINDS:
            raise ValueError(f"directions is {self.directions!r}; it must be one of {', '.join(KINDS)}.")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number.")
        self.register_buffer("projection", None)  # (features, dim), float32, one for all heads
        self.calls, self.warned = 0, False

    def prepare(self, heads: int, head_dim: int) -> None:
        if self.projection is None or self.projection.shape[1] != head_dim:
            self.projection = sample(self.directions, self.features, head_dim, self.seed)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        self._follow(q.device)
        self._look(q, k, mask, scale)
        if mask.causal:
            return favor_causal(q, k, v, self.projection, scale, mask.keys, mask.offset)
        return favor(q, k, v, self.projection, scale, mask.keys)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, keys: Tensor | None, scale: float
    ) -> tuple[Tensor, FeatureState]:
        self._follow(q.device)
        return read_on(lambda q, k: self.log_features(q, k, scale), (q, k, v), keys, state)  # type: ignore[arg-type]

    def log_features(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The logarithms of the features of queries, up to a constant for each of them, and of keys."""
        high = torch.promote_types(q.dtype, torch.float32)
        across, k = self.projection.to(q.device, high).mT * self.root(scale), k.to(high)
        return q.to(high) @ across, k @ across - k.square().sum(-1, keepdim=True) * (scale / 2)

    @staticmethod
    def root(scale: float) -> float:
        if scale < 0:
            raise ValueError(f"scale is {scale}; random features need one of at least 0 (1/sqrt(dim) is usual).")
        return scale**0.5

    def _follow(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            for name, tensor in self._buffers.items():
                if tensor is not None and tensor.device != device:
                    setattr(self, name, tensor.to(device))

    def _look(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> None:
        """Warn once where the features are too few for the norms; looks at few tokens of few calls."""
        self.calls += 1
        if self.warned or self.calls % OFTEN != 1 or torch.compiler.is_compiling():
            return
        distance = _mean_square(q, k, mask.keys) * abs(scale)
        if distance > math.log(self.features) + 2:
            self.warned = True
            warnings.warn(
                f"Performer's {self.features} random features tell little here: mean |x+y|^2 is {distance:.1f}, above log(features) + 2 "
                f"= {math.log(self.features) + 2:.1f}; queries and keys are too long. Use Softmax() for this layer, or shorter vectors.",
                stacklevel=5,
            )

    def _apply(self, fn, recurse=True):  # the directions stay float32 when the model becomes half
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, kept in before.items():
            if kept is not None and not kept.is_meta and not getattr(self, name).is_meta:
                setattr(self, name, kept.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):  # a fresh Performer has no directions to load into yet
        given = state_dict.get(prefix + "projection")
        if given is not None and (self.projection is None or self.projection.shape[1:] != given.shape[1:]):
            self.projection = torch.empty(self.features, given.shape[-1], device=None if given.is_meta else given.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


@torch.no_grad()
def _mean_square(q: Tensor, k: Tensor, keys: Tensor | None) -> float:
    """The mean of |q+k|^2 over all pairs, from some tokens: mean |q|^2 + mean |k|^2 + 2 mean q . mean k, for heads that share keys."""
    if q.numel() == 0 or k.numel() == 0:
        return 0.0
    x, y = (t[:, :, :: max(1, t.shape[2] // LOOK)].float() for t in (q, k))
    real = torch.ones(y.shape[0], 1, y.shape[2], 1, device=y.device)
    if keys is not None:
        real = keys[:, None, :: max(1, k.shape[2] // LOOK), None].expand(len(y), 1, -1, 1).float()
        y = y.masked_fill(real == 0, 0)
    counted = real.sum(2).clamp_min(1)  # (batch, 1, 1)
    centre = (y.sum(2) / counted).repeat_interleave(q.shape[1] // k.shape[1], 1)
    squares = x.square().sum(-1).mean() + (y.square().sum(-1).sum(-1) / counted[..., 0]).mean()
    return float(squares + 2 * (x.mean(2) * centre).sum(-1).mean())
