"""transformers' mask functions, read as rules: the Mask of a call is said in a few numbers and no L x L tensor is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ..mask import Mask, Rule

SHIFTABLE = {"causal", "behind", "window"}  # rules that speak of query - key only


@dataclass(frozen=True)
class Span:
    """Which queries and keys a mask speaks of."""

    batch: int
    queries: int
    keys: int
    query_start: int = 0
    key_start: int = 0

    @property
    def offset(self) -> int:
        return self.query_start - self.key_start

    def cut(self, per_token: Tensor) -> Tensor:
        """The entries of a (batch, tokens) tensor that belong to the keys, filled with 0 where it is too short."""
        missing = self.key_start + self.keys - per_token.shape[-1]
        per_token = torch.nn.functional.pad(per_token, (0, missing)) if missing > 0 else per_token
        return per_token[:, self.key_start : self.key_start + self.keys].expand(self.batch, -1)


def translate(function: Callable, span: Span, vmapped: bool = False) -> Mask:
    """The Mask that a mask function of transformers means; what is not recognised is asked tile by tile.

    >>> translate(masking_utils.sliding_window_causal_mask_function(3), Span(1, 8, 8))
    Mask(causal=True, keys=None, window=3, sinks=0, segments=None, bias=None, offset=0, rule=None, cross=False)
    """
    atoms = list(_resolved(list(_atoms(function))))
    mask, rest = Mask(causal=any(kind == "causal" for kind, _, _ in atoms), offset=span.offset), []
    for kind, value, atom in atoms:
        added = _ADD[kind](mask, value, span) if kind in _ADD else None
        mask, rest = (mask, [*rest, atom]) if added is None else (added, rest)
    if rest:
        mask = replace(mask, rule=Rule(_sees(rest, span.key_start, vmapped), span.batch))
    return _without_idle(mask, span)


Atom = tuple[str, Any, Callable]  # its kind, its setting, the function itself


def _atoms(function: Callable) -> Iterator[Atom]:
    """A mask function taken apart at its conjunctions."""
    name = getattr(function, "__qualname__", "").split(".")[0]
    if getattr(function, "__module__", "") != masking_utils.__name__:
        yield "unknown", None, function
        return
    values = inspect.getclosurevars(function).nonlocals
    if name == "and_masks":
        for part in values["mask_functions"]:
            yield from _atoms(part)
    elif name != "bidirectional_mask_function":
        kind, read = _KINDS.get(name, ("unknown", lambda values: None))
        yield kind, read(values), function


_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "causal_mask_function": ("causal", lambda values: None),
    "sliding_window_overlay": ("behind", lambda values: values["sliding_window"]),
    "sliding_window_bidirectional_overlay": ("window", lambda values: values["sliding_window"] + 1),
    "chunked_overlay": ("chunks", lambda values: (values["chunk_size"], values["left_padding"])),
    "packed_sequence_mask_function": ("segments", lambda values: values["packed_sequence_mask"]),
    "padding_mask_function": ("keys", lambda values: values["padding_mask"]),
    "remap_positions_for_packed_sequence": ("remapped", lambda values: (values["mask_function"], values["position_ids"])),
}


def _resolved(atoms: list[Atom]) -> Iterator[Atom]:
    """Rules about positions inside packed texts, said about the whole row where that means the same."""
    segments = [value for kind, value, _ in atoms if kind == "segments"]
    for kind, value, atom in atoms:
        if kind != "remapped" or not any(_counts_up(value[1], s) for s in segments):
            yield kind, value, atom
            continue
        inner = list(_atoms(value[0]))
        yield from (part for part in inner if part[0] in SHIFTABLE)
        if any(part[0] not in SHIFTABLE for part in inner):
            yield kind, value, atom


def _counts_up(positions: Tensor, segments: Tensor) -> bool:
    """Whether positions grow by one inside every segment, so that their differences are those of the row."""
    return bool(((positions.diff(dim=-1) == 1) | (segments.diff(dim=-1) != 0)).all())


def _add_behind(mask: Mask, width: int, span: Span) -> Mask | None:
    return _add_window(mask, width, span) if mask.causal else None  # alone it leaves the future visible


def _add_window(mask: Mask, width: int, span: Span) -> Mask:
    return replace(mask, window=width if mask.window is None else min(width, mask.window))


def _add_keys(mask: Mask, real: Tensor, span: Span) -> Mask:
    real = span.cut(real.bool())
    return replace(mask, keys=real if mask.keys is None else mask.keys & real)


def _add_segments(mask: Mask, segments: Tensor, span: Span) -> Mask | None:
    outside = span.offset < 0 or span.offset + span.queries > span.keys  # a query without a key of its own has no segment
    return None if outside or mask.segments is not None else replace(mask, segments=span.cut(segments))


def _add_chunks(mask: Mask, setting: tuple[int, Tensor], span: Span) -> Mask | None:
    size, padding = setting
    position = torch.arange(span.key_start + span.keys, device=padding.device) - padding[:, None]
    return _add_segments(mask, position.div(size, rounding_mode="floor").long(), span)


_ADD: dict[str, Callable[[Mask, Any, Span], Mask | None]] = {
    "causal": lambda mask, value, span: replace(mask, causal=True),
    "behind": _add_behind,
    "window": _add_window,
    "keys": _add_keys,
    "segments": _add_segments,
    "chunks": _add_chunks,
}


def _sees(rest: list[Callable], key_start: int, vmapped: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        where = (batch, head, query + key_start, key + key_start)
        found = _vmapped(rest, *where) if vmapped else [part(*where) for part in rest]
        return reduce(torch.logical_and, found)

    return sees


def _vmapped(rest: list[Callable], *where: Tensor) -> list[Tensor]:
    """A user's function may expect single indices: give it one of each at a time."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # lets vmapped indices index tensors

    found = []
    for part in rest:
        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            part = torch.vmap(part, in_dims=dims)
        with TransformGetItemToIndex():
            found.append(part(*(index.flatten() for index in where)))
    return found


def _without_idle(mask: Mask, span: Span) -> Mask:
    """The mask without rules that forbid nothing here, so that faster kernels may run."""
    end = span.offset + span.queries  # one past the last query's own key
    if mask.window is not None and mask.window >= end and (mask.causal or mask.window >= span.keys - span.offset):
        mask = replace(mask, window=None)
    if mask.keys is not None and bool((mask.keys[:, : max(end, 0)] if mask.causal else mask.keys).all()):
        mask = replace(mask, keys=None)  # a causal query does not see the empty end of a static cache anyway
    if mask.segments is not None and bool((mask.segments == mask.segments[:, :1]).all()):
        mask = replace(mask, segments=None)
    if mask.causal and span.queries == 1 and end >= span.keys:
        mask = replace(mask, causal=False)  # the newest token sees every key
    return mask
