"""Heads: a different mechanism for each head of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..attention import DEMANDS, Mask, Mechanism, State, Unsupported
from .softmax import EXACT, Softmax

Part = tuple[tuple[int, ...], Mechanism]


@dataclass(frozen=True, eq=False)
class States(State):
    """What each part remembers."""

    states: tuple[State, ...]

    def _each(self, change: Any) -> States:
        return replace(self, states=tuple(state._each(change) for state in self.states))

    @property
    def bytes(self) -> int:
        return sum(state.bytes for state in self.states)


@dataclass(eq=False)
class Heads(Mechanism):
    """Some heads attend by one mechanism, some by another, and all that are not named by `rest`.

    It supports what all of them support, and a refusal names the part that cannot. Heads that share a key head may differ.

    >>> from heedful.mechanisms import Hard
    >>> q, k, v = torch.randn(3, 1, 4, 5, 8)
    >>> mixed = Heads((((0, 2), Hard()),), rest=Softmax(beta=2.0))
    >>> out = mixed(q, k, v)
    >>> torch.equal(out[:, 2], Hard()(q, k, v)[:, 2]), torch.equal(out[:, 3], Softmax(beta=2.0)(q, k, v)[:, 3])
    (True, True)
    >>> mixed.settings["parts"]
    [[[0, 2], {'name': 'Hard', 'settings': {}}]]
    """

    parts: Sequence[Any] = ()  # (heads, mechanism) pairs; a mechanism may be given as its {"name": ..., "settings": ...}
    rest: Any = field(default_factory=Softmax)  # counts in what is supported even where no head is left to it

    supports: ClassVar[frozenset[str]] = EXACT  # of Heads(); each one has its own
    rival: ClassVar[bool] = False  # its parts are

    def __post_init__(self):
        self.parts = tuple((_heads(heads), _mechanism(given)) for heads, given in self.parts)
        self.rest = _mechanism(self.rest)
        named = [head for heads, _ in self.parts for head in heads]
        if len(set(named)) < len(named):
            raise ValueError(f"heads {sorted(h for h in set(named) if named.count(h) > 1)} are in two parts; give each to one.")
        if len({id(m) for m in (*(m for _, m in self.parts), self.rest)}) <= len(self.parts):
            raise ValueError("one mechanism stands in two parts; make one for each, as each may learn for its own heads.")
        self.own = nn.ModuleList(mechanism for _, mechanism in self.parts)  # trains, moves and saves them
        every = [mechanism.supports for mechanism in (*self.own, self.rest)]
        vars(self)["supports"] = frozenset.intersection(*every) | {"shared"}  # type: ignore[arg-type]

    @property
    def settings(self) -> dict[str, Any]:
        return {"parts": [[list(heads), _data(part)] for heads, part in self.parts], "rest": _data(self.rest)}

    def refuse(self, demands: frozenset[str] | set[str]) -> None:
        for heads, mechanism in (*self.parts, ("all other heads", self.rest)):
            beyond = sorted(demands - mechanism.supports)
            if beyond:
                where = heads if isinstance(heads, str) else f"heads {', '.join(map(str, heads))}"
                what = ", ".join(DEMANDS[b] for b in beyond)
                raise Unsupported(
                    f"{type(mechanism).__name__} ({where}) cannot honour {what}; use {mechanism.instead} for these heads."
                )

    def prepare(self, heads: int, head_dim: int) -> None:
        for own, mechanism in self._among(heads):
            mechanism.prepare(len(own), head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, **extra: Any) -> Tensor:
        found = []
        for heads, mechanism in self._among(q.shape[1]):
            here = {
                name: value[list(heads)] if isinstance(value, Tensor) else value for name, value in extra.items()
            }  # null logits
            found.append(mechanism(*_taken(q, k, v, heads), _masked(mask, heads), scale, **here))
        return self._ordered(found)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, keys: Tensor | None, scale: float
    ) -> tuple[Tensor, State]:
        parts = list(self._among(q.shape[1]))
        before = state.states if isinstance(state, States) else (None,) * len(parts)
        found = [m.decode(*_taken(q, k, v, heads), s, keys, scale) for (heads, m), s in zip(parts, before, strict=True)]
        return self._ordered([out for out, _ in found]), States(tuple(after for _, after in found))

    def _among(self, heads: int) -> Iterator[Part]:
        """The parts of a call with that many heads, the rest last."""
        named = [head for own, _ in self.parts for head in own]
        if named and max(named) >= heads:
            raise ValueError(f"Heads names head {max(named)} but the layer has {heads}, 0 to {heads - 1}; give it others.")
        yield from self.parts
        others = tuple(head for head in range(heads) if head not in named)
        if others:
            yield others, self.rest

    def _ordered(self, found: list[Tensor]) -> Tensor:
        """The parts' outputs as one, head by head."""
        out = found[0] if len(found) == 1 else torch.cat(found, 1)
        order = [head for heads, _ in self._among(out.shape[1]) for head in heads]
        return out if order == sorted(order) else out[:, torch.tensor(order, device=out.device).argsort()]


def _taken(q: Tensor, k: Tensor, v: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """q of some heads with k and v of the key heads that they share; where a key head has only some of its queries here, spread."""
    shared = q.shape[1] // k.shape[1]
    own = [head // shared for head in heads]
    if list(heads) == [group * shared + i for group in own[::shared] for i in range(shared)]:
        own = own[::shared]
    return _picked(q, heads), _picked(k, own), _picked(v, own)


def _picked(t: Tensor, heads: Sequence[int]) -> Tensor:
    first, count = heads[0], len(heads)
    return t[:, first : first + count] if list(heads) == list(range(first, first + count)) else t[:, list(heads)]


def _masked(mask: Mask, heads: tuple[int, ...]) -> Mask:
    """The mask as these heads have it."""
    if mask.bias is None or mask.bias.shape[1] == 1:
        return mask
    return replace(mask, bias=mask.bias[:, list(heads)])


def _heads(given: Sequence[int]) -> tuple[int, ...]:
    heads = tuple(given) if isinstance(given, (Sequence, range)) and not isinstance(given, str) else ()
    if not heads or not all(isinstance(head, int) and head >= 0 for head in heads):
        raise ValueError(f"a part was given the heads {given!r}; name one or more by number from 0, such as (0, 3).")
    return heads


def _mechanism(given: Any) -> Mechanism:
    if isinstance(given, Mechanism):
        return given
    if isinstance(given, dict) and "name" in given:
        from . import from_settings

        return from_settings(given["name"], given.get("settings"))
    raise TypeError(f"a part was given {given!r}; give a Mechanism such as Softmax(beta=2.0), or its name and settings.")


def _data(mechanism: Mechanism) -> dict[str, Any]:
    return {"name": type(mechanism).__name__, "settings": mechanism.settings}
