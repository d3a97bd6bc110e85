"""State: what a mechanism remembers of the tokens it has read, so that it can go on reading (decoding)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True, eq=False)
class State:
    """A bundle of tensors, each with the batch as its first dimension, and of plain numbers. To write one, subclass and add fields."""

    def select(self, entries: Tensor) -> Self:
        """The states of these batch entries, in this order (beams)."""
        return self._each(lambda tensor: tensor.index_select(0, entries.to(tensor.device)))

    def repeat(self, times: int) -> Self:
        """Each batch entry that many times, side by side."""
        return self._each(lambda tensor: tensor.repeat_interleave(times, 0))

    @property
    def bytes(self) -> int:
        """How much memory the tensors take."""
        return sum(x.numel() * x.element_size() for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor))

    def _each(self, change: Any) -> Self:
        return replace(self, **{f.name: change(x) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)})
