"""Landmarks: exact attention to near keys, learned points that stand for all others; linear time, and a state of constant size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..attention import Mask, Mechanism, State
from ..ops.dispatch import is_plain
from ..ops.landmarks import Learned, landmarks, padded, tokens
from ..ops.landmarks_causal import Held, nothing, read

if TYPE_CHECKING:
    from ..attention import Capture
    from .fitting import Progress


@dataclass(eq=False)
class Landmarks(Mechanism):
    """A query attends exactly to the first keys (sinks) and to the chunks around it, and to landmarks that hold all other keys.

    Each far key is shared out among the landmarks by a learned softmax and counts once; a landmark shows queries the mean value and
    the mean key of what it holds. `fit` learns from captures what `seed` draws at random. A query's work: landmarks + 2 chunks (3 where
    it may look ahead) + sinks.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 16)
    >>> exact = ((q @ k.mT) / 16**0.5).softmax(-1) @ v
    >>> errors = [(Landmarks(landmarks=r)(q, k, v) - exact).norm() / exact.norm() for r in (4, 256)]
    >>> bool(errors[1] < errors[0])
    True

    Two hops as in Performer (Choromanski et al. 2021) with learned, normalised features; near keys exact as in Longformer.
    """

    landmarks: int = 60
    chunk: int = 32
    sinks: int = 4
    seed: int = 0

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "keys", "cross", "state"})

    def __post_init__(self):
        for name, least, usual in (("landmarks", 1, 60), ("chunk", 1, 32), ("sinks", 0, 4)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least} ({usual} is usual).")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number.")
        for name in Learned._fields:
            self.register_parameter(name, None)
        self.errors = torch.empty(0)  # of each head, on what a fit held out; empty where it could hold nothing out

    def prepare(self, heads: int, head_dim: int) -> None:
        directions = self._parameters["directions"]
        if directions is not None:
            was = directions.shape[0], directions.shape[2]
            if was == (heads, head_dim):
                return
            if any(
                not torch.equal(own.cpu(), first.to(own.dtype)) for own, first in zip(self.learned, self._drawn(*was), strict=True)
            ):
                had = f"{was[0]} heads of {was[1]} dims"
                raise ValueError(f"these Landmarks have learned for {had}; fit new ones for {heads} heads of {head_dim} dims.")
        self.learn(self._drawn(heads, head_dim))

    def _drawn(self, heads: int, head_dim: int) -> Learned:
        """What the seed gives before anything is learned."""
        source = Generator("cpu").manual_seed(self.seed)
        points = torch.randn(heads, self.landmarks, head_dim, generator=source, dtype=torch.float64, device="cpu").float()
        return initial(points)

    def learn(self, learned: Learned) -> None:
        """Take these tensors as what was learned."""
        for name, tensor in learned._asdict().items():
            setattr(self, name, nn.Parameter(tensor.detach().clone()))

    @property
    def learned(self) -> Learned:
        return Learned(*(getattr(self, name) for name in Learned._fields))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        queries, total, keys = q.shape[2], mask.offset + q.shape[2], mask.keys
        if mask.causal:  # keys behind the last query are not seen
            k, v, keys = k[:, :, :total], v[:, :, :total], None if keys is None else keys[:, :total]
        t = tokens(q, k, v, keys, scale)
        t, learned = t._replace(q=F.pad(t.q, (0, 0, mask.offset, 0))), self._on(t.q)
        if mask.causal and not is_plain():
            out, _ = read(padded(t, total), learned, self.chunk, nothing(t, learned, self.sinks))
        else:
            out = landmarks(t, learned, self.chunk, self.sinks, mask.causal)
        return out[:, :, total - queries : total].to(v.dtype)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, keys: Tensor | None, scale: float
    ) -> tuple[Tensor, State]:
        t = tokens(q, k, v, keys, scale)
        learned = self._on(t.q)
        state = nothing(t, learned, self.sinks) if state is None else state
        assert isinstance(state, Held)
        out, state = read(t, learned, self.chunk, state)
        return out.to(v.dtype), state

    def _on(self, q: Tensor) -> Learned:
        return Learned(*(tensor.to(q) for tensor in self.learned))

    def fit(self, captures: Sequence[Capture], steps: int = 200, rate: float = 0.03, progress: Progress | None = None) -> Landmarks:
        """Learn from the captures of one layer, all heads at once, and return self; see `fitting.fit`."""
        from .fitting import fit

        return fit(self, captures, steps, rate, progress)

    def _load_from_state_dict(self, state_dict, prefix, *args):  # a fresh one has no tensors to load into yet
        given = state_dict.get(prefix + "directions")
        if given is not None and given.shape[1] != self.landmarks:
            asked = f"Landmarks(landmarks={self.landmarks})"
            raise ValueError(f"{given.shape[1]} landmarks were saved, not those of {asked}; load into landmarks={given.shape[1]}.")
        for name in Learned._fields:
            given, own = state_dict.get(prefix + name), self._parameters[name]
            if given is not None and (own is None or own.shape != given.shape):
                setattr(self, name, nn.Parameter(torch.empty_like(given)))
        super()._load_from_state_dict(state_dict, prefix, *args)


def initial(points: Tensor) -> Learned:
    """Landmarks at these points (heads, landmarks, dim): each key goes mostly to the nearest."""
    heads, number = points.shape[:2]
    zeros = points.new_zeros(heads, number)
    return Learned(points, -points.square().sum(-1) / 2, points / 2, zeros, points.new_full((heads,), 0.5))
