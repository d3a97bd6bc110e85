"""Mask: which keys a query may look at, said in a few numbers instead of an L x L matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

BLOCK = 128  # query rows of one tile


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule of our caller's: sees(batch, head, query, key) tells from broadcast index tensors whether a pair is visible."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    batches: int = 1  # how many batch entries it tells apart


@dataclass(frozen=True, eq=False)
class Mask:
    """The rules of one attention call; a pair of tokens is visible when every rule allows it.

    >>> Mask(causal=True, window=2).dense(4, 4)[0, 0].exp().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    >>> Mask(causal=True, window=2, sinks=1).dense(4, 4)[0, 0].exp().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    """

    causal: bool = False  # a query sees no key after its own position
    keys: Bool[Tensor, "batch keys"] | None = None  # key padding: True where a key is real
    window: int | None = None  # |query - key| < window
    sinks: int = 0  # the first real keys stay visible outside the window
    segments: Int[Tensor, "batch keys"] | None = None  # packed texts: the text each token belongs to
    bias: Float[Tensor, "batch heads queries keys"] | None = None  # added to the logits
    offset: int = 0  # position of the first query among the keys (decoding with a cache)
    rule: Rule | None = None  # any other rule, asked tile by tile
    cross: bool = False  # the queries are other tokens than the keys, however many there are of both

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} tokens hides every key; use a window of at least 1.")
        if self.sinks < 0:
            raise ValueError(f"{self.sinks} sinks were given; use 0 or more.")
        if self.sinks and self.window is None:
            raise ValueError(f"{self.sinks} sinks without a window change nothing; give a window too.")
        if self.keys is not None and (self.keys.ndim != 2 or self.keys.dtype != torch.bool):
            raise ValueError(f"keys must be a boolean (batch, keys) tensor, True where a key is real; got {_shape(self.keys)}.")
        if self.segments is not None and self.segments.ndim != 2:
            raise ValueError(f"segments must be a (batch, keys) tensor of text numbers; got {_shape(self.segments)}.")
        if self.bias is not None and not self.bias.is_floating_point():
            raise ValueError(
                f"bias is added to the logits, but a {_shape(self.bias)} tensor was given; of a boolean mask make "
                "torch.zeros(mask.shape).masked_fill(~mask, -torch.inf), or give keys=."
            )
        if self.window is not None and not isinstance(self.window, int):
            raise ValueError(f"a window is a whole number of tokens; got {self.window!r}.")
        if self.bias is not None and self.bias.ndim != 4:
            raise ValueError(f"bias must be a (batch, heads, queries, keys) tensor; got {_shape(self.bias)}.")

    @property
    def demands(self) -> frozenset[str]:
        """The names of the rules in use.

        >>> sorted(Mask(causal=True, window=8).demands)
        ['causal', 'window']
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("offset", "cross")}
        return frozenset(name for name, value in values.items() if isinstance(value, Tensor) or value)

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on another device."""
        return replace(self, **{f.name: x.to(device) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)})

    def entry(self, entry: int) -> Mask:
        """The mask of one batch entry.

        >>> Mask(keys=torch.tensor([[True, True], [True, False]])).entry(1).keys
        tensor([[ True, False]])
        """
        parts = {
            name: x[entry : entry + 1]
            for name in ("keys", "segments", "bias")
            if (x := getattr(self, name)) is not None and len(x) > 1
        }
        rule = self.rule
        if rule is not None and rule.batches > 1:
            sees = rule.sees
            parts["rule"] = Rule(lambda batch, *rest: sees(batch + entry, *rest))
        return replace(self, **parts)

    def same(self, queries: int, keys: int) -> bool:
        """Whether the queries are the keys' own tokens, one for one."""
        return queries == keys and not self.offset and not self.cross

    def check(self, queries: int, keys: int, batch: int | None = None) -> None:
        """Refuse tensors of another length or batch than the call's."""
        for name in ("keys", "segments", "bias"):
            tensor = getattr(self, name)
            if tensor is not None and batch is not None and len(tensor) not in (1, batch):
                raise ValueError(
                    f"mask.{name} speaks of {len(tensor)} texts but the call has {batch}; give one entry for each, or one for all."
                )
        for name, tensor in (("keys", self.keys), ("segments", self.segments)):
            if tensor is not None and tensor.shape[-1] != keys:
                raise ValueError(f"mask.{name} speaks of {tensor.shape[-1]} keys but the call has {keys}; give one entry per key.")
        if self.segments is not None and self.offset + queries > keys:
            raise ValueError(
                f"mask.segments speaks of {keys} tokens but the queries reach to {self.offset + queries}; each needs its own."
            )
        if self.bias is not None and (self.bias.shape[-1] not in (1, keys) or self.bias.shape[-2] not in (1, queries)):
            raise ValueError(f"mask.bias has shape {_shape(self.bias)} but the call has {queries} queries and {keys} keys.")

    def reach(self, start: int, stop: int, keys: int) -> tuple[int, int]:
        """The range of keys that the queries start..stop can see at most."""
        low, high = 0, keys
        if self.causal:
            high = min(keys, stop + self.offset)
        if self.window is not None:
            end = stop + self.offset + self.window - 1
            if self.sinks:
                end = keys if self.keys is not None else max(end, self.sinks)  # behind left padding they may lie anywhere
            low = 0 if self.sinks else max(0, start + self.offset - self.window + 1)
            high = min(high, end)
        return min(low, max(high, 0)), max(high, 0)

    def visible(self, rows: Int[Tensor, "*batch rows"], low: int, high: int) -> Bool[Tensor, "batch heads rows columns"] | None:
        """Whether the queries `rows`, the same for all or (batch, rows), see the keys low..high; None where all see all."""
        parts = list(self._parts(rows, torch.arange(low, high, device=rows.device)))
        if not parts:
            return None
        seen = parts[0]
        for part in parts[1:]:
            seen = seen & part
        return seen

    def _parts(self, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        place = (rows + self.offset).view(rows.shape[0] if rows.ndim == 2 else 1, 1, rows.shape[-1], 1)  # (1 or batch, 1, rows, 1)
        if self.causal:
            yield columns <= place
        if self.window is not None:
            near = (place - columns).abs() < self.window
            yield near | self._is_sink(columns)[:, None, None] if self.sinks else near
        if self.keys is not None:
            yield self.keys[:, None, None, columns]
        if self.segments is not None:
            mine = self.segments.take_along_dim(place[:, 0, :, 0], -1)
            yield mine[:, None, :, None] == self.segments[:, None, None, columns]
        if self.rule is not None:
            yield self._ruled(place, columns)

    def _is_sink(self, columns: Tensor) -> Tensor:  # (batch, columns)
        if self.keys is None:
            return (columns < self.sinks)[None]
        return (self.keys.cumsum(-1) <= self.sinks)[:, columns]

    def _ruled(self, place: Tensor, columns: Tensor) -> Tensor:
        assert self.rule is not None
        batches = self.rule.batches
        batch = torch.arange(batches, device=place.device)[:, None, None, None]
        head = torch.zeros(1, dtype=torch.long, device=place.device)[:, None, None]
        shape = (1, place.shape[-2], len(columns))
        if len(place) == 1:
            return self.rule.sees(batch, head, place[0, 0], columns).expand(batches, *shape)
        own = [self.rule.sees(batch[i % batches :][:1], head, place[i, 0], columns).expand(1, *shape) for i in range(len(place))]
        return torch.cat(own)

    def tile(self, rows: Int[Tensor, "*batch rows"], low: int, high: int) -> Float[Tensor, "batch heads rows columns"] | None:
        """What is added to the logits of the queries `rows` and the keys low..high; None where nothing is."""
        seen = self.visible(rows, low, high)
        bias = self._bias(rows, low, high)
        if seen is None:
            return bias
        if bias is None:
            return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        return bias.masked_fill(~seen, -torch.inf)

    def _bias(self, rows: Tensor, low: int, high: int) -> Tensor | None:
        if self.bias is None:
            return None
        bias = self.bias
        if bias.shape[-2] > 1:
            bias = bias[:, :, rows] if rows.ndim == 1 else bias.take_along_dim(rows[:, None, :, None], -2)
        return bias if bias.shape[-1] == 1 else bias[..., low:high]

    def dense(self, queries: int, keys: int, device: torch.device | str = "cpu") -> Float[Tensor, "batch heads queries keys"]:
        """The whole additive matrix: for tests and short sequences."""
        added = self.tile(torch.arange(queries, device=device), 0, keys)
        return torch.zeros(1, 1, queries, keys, device=device) if added is None else added.expand(*added.shape[:2], queries, keys)

    def tiles(self, queries: int, keys: int, block: int = BLOCK) -> Iterator[tuple[slice, slice]]:
        """Blocks of at most `block` queries with the keys they can reach; together they cover every visible pair."""
        for start in range(0, queries, block):
            stop = min(start + block, queries)
            yield slice(start, stop), slice(*self.reach(start, stop, keys))

    def real(self, queries: int) -> Bool[Tensor, "batch queries"] | None:
        """Which queries are real tokens, when the keys are the same tokens; None where all are."""
        return None if self.keys is None else self.keys[:, self.offset : self.offset + queries]


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
