"""Linear attention: positive features elu + 1 in place of the exponential, in time and memory linear in the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Mask, Mechanism, State
from ..ops.features import by_features
from ..ops.reading import FeatureState, by_features_causal, read_on


@dataclass(eq=False)
class Linear(Mechanism):
    """The mean of v with weights (elu(q) + 1) . (elu(k) + 1); no stand-in for softmax, so models are trained with it.

    It has no scale: weights do not grow with the size of q and k as those of softmax do.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> weights = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    >>> torch.allclose(Linear()(q, k, v), weights / weights.sum(-1, keepdim=True) @ v, atol=1e-5)
    True

    Katharopoulos et al. 2020, Transformers are RNNs.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "keys", "cross", "shared", "state"})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        asked, kept = log_features(q), log_features(k)
        if mask.causal:
            return by_features_causal(asked, kept, v, mask.keys, mask.offset)
        return by_features(asked, kept, v, mask.keys)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, keys: Tensor | None, scale: float
    ) -> tuple[Tensor, FeatureState]:
        return read_on(lambda q, k: (log_features(q), log_features(k)), (q, k, v), keys, state)  # type: ignore[arg-type]


def log_features(x: Tensor) -> Tensor:
    """log(elu(x) + 1), which no x takes out of range; float32 at least.

    >>> log_features(torch.tensor([-200.0, 0.0, torch.e - 1]))
    tensor([-200.,    0.,    1.])
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.clamp_max(0) + torch.log1p(F.relu(x))
