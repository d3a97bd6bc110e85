"""Local attention: exact attention over a window and the first few tokens, in time and memory linear in the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..attention import Mask, Mechanism, Rule, State
from ..ops.window import first_real
from .softmax import EXACT, exactly


@dataclass(frozen=True, eq=False)
class Recent(State):
    """The first real keys that have left the window (`sinks` places, False in `real` until filled), then the latest `window` keys."""

    k: Tensor  # (batch, key heads, sinks + recent, dim)
    v: Tensor  # (batch, key heads, sinks + recent, width)
    real: Tensor  # (batch, sinks + recent)


@dataclass(eq=False)
class Local(Mechanism):
    """Softmax over the keys nearer than `window` to the query and the first `sinks` real keys; a caller's own rules narrow it further.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 8)
    >>> from heedful.mechanisms import Softmax
    >>> torch.allclose(Local(window=32, sinks=4)(q, k, v), Softmax()(q, k, v, Mask(window=32, sinks=4)), atol=1e-5)
    True

    Beltagy et al. 2020, Longformer; Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks.
    """

    window: int = 128
    sinks: int = 0

    supports: ClassVar[frozenset[str]] = EXACT | {"state"}

    def __post_init__(self):
        for name, least in (("window", 1), ("sinks", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}.")

    @property
    def reach(self) -> int | None:
        return None if self.sinks else self.window

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, cap: float | None = None, null: Tensor | None = None
    ) -> Tensor:
        if self.window < max(mask.offset + q.shape[-2], k.shape[-2] - mask.offset):  # else all keys are near
            mask = narrowed(mask, self.window, self.sinks)
        return exactly(q, k, v, mask, scale, cap, null)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, keys: Tensor | None, scale: float
    ) -> tuple[Tensor, Recent]:
        former, new = self._empty(k, v) if state is None else state, k.shape[-2]
        assert isinstance(former, Recent)
        real = torch.ones(k.shape[0], new, dtype=torch.bool, device=k.device) if keys is None else keys
        known = Recent(torch.cat([former.k, k], 2), torch.cat([former.v, v], 2), torch.cat([former.real, real], 1))
        after = self._kept(known)
        if state is None:
            return self.attend(q, k, v, Mask(causal=True, keys=keys), scale), after
        if new == 1:  # it sees just what is kept
            return exactly(q, after.k, after.v, Mask(keys=_padding(after.real)), scale), after
        mask = Mask(True, _padding(known.real), self.window, self.sinks, offset=former.k.shape[-2])
        return exactly(q, known.k, known.v, mask, scale), after

    def _empty(self, k: Tensor, v: Tensor) -> Recent:
        return Recent(
            k.new_zeros(*k.shape[:2], self.sinks, k.shape[-1]),
            v.new_zeros(*v.shape[:2], self.sinks, v.shape[-1]),
            torch.zeros(k.shape[0], self.sinks, dtype=torch.bool, device=k.device),
        )

    def _kept(self, known: Recent) -> Recent:
        """Drop what no later query sees: of the keys that leave the window, those that are no sinks."""
        left = max(self.sinks, known.k.shape[-2] - self.window)  # where the window begins
        if left == self.sinks:
            return known
        if bool(known.real[:, : self.sinks].all()):  # as it soon is
            k, v = (torch.cat([t[:, :, : self.sinks], t[:, :, left:]], 2) for t in (known.k, known.v))
            return Recent(k, v, torch.cat([known.real[:, : self.sinks], known.real[:, left:]], 1))
        place, _ = first_real(known.real[:, :left], self.sinks, known.k)  # (batch, sinks)
        recent = torch.arange(left, known.k.shape[-2], device=place.device).expand(len(place), -1)
        place = torch.cat([place, recent], 1)
        k, v = (t.take_along_dim(place[:, None, :, None], 2) for t in (known.k, known.v))
        return Recent(k, v, known.real.take_along_dim(place, 1))


def narrowed(mask: Mask, window: int, sinks: int) -> Mask:
    """The mask with one more rule: a key is within `window` of the query or among the first `sinks` real ones.

    >>> narrowed(Mask(causal=True, window=9), 4, 0).window
    4
    """
    if mask.window is None:
        return replace(mask, window=window, sinks=sinks)
    near, far = sorted([(mask.window, mask.sinks), (window, sinks)])
    mask = replace(mask, window=near[0], sinks=near[1])
    return mask if near[1] <= far[1] else _with_rule(mask, *far)


def _with_rule(mask: Mask, window: int, sinks: int) -> Mask:
    """A second window with sinks, asked tile by tile beside the rule that may be there."""
    real, former = mask.keys, mask.rule

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        count = key + 1 if real is None else real.cumsum(-1)[batch % len(real), key]
        seen = ((query - key).abs() < window) | (count <= sinks)
        return seen if former is None else seen & former.sees(batch % former.batches, head, query, key)

    batches = max(1 if real is None else len(real), 1 if former is None else former.batches)
    return replace(mask, rule=Rule(sees, batches))


def _padding(real: Tensor) -> Tensor | None:
    return None if bool(real.all()) else real
