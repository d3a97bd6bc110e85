"""Padding taken out: each text of a batch attends by itself, as if its padding had never been there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def unpadded(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Float[Tensor, "batch heads tokens dim"],
    k: Float[Tensor, "batch heads tokens dim"],
    v: Float[Tensor, "batch heads tokens width"],
    keys: Bool[Tensor, "batch tokens"] | None,
) -> Float[Tensor, "batch heads tokens width"]:
    """attend(q, k, v) over the real tokens of each text alone, 0 at its padding; texts of one layout go together.

    >>> x = torch.arange(4.0).view(1, 1, 4, 1).expand(2, 1, 4, 1)
    >>> keys = torch.tensor([[True, True, True, True], [False, True, True, False]])
    >>> unpadded(lambda q, k, v: v.cumsum(-2), x, x, x, keys).flatten(1).tolist()
    [[0.0, 1.0, 3.0, 6.0], [0.0, 1.0, 3.0, 0.0]]
    """
    if keys is None or bool(keys.all()):
        return attend(q, k, v)
    keys = keys.expand(len(k), -1)
    groups = _layouts(keys)
    parts = [_group(attend, [q, k, v], entries, keys[entries[0]]) for entries in groups]
    order = [entry for entries in groups for entry in entries]
    out = torch.cat(parts)
    return out if order == sorted(order) else out[torch.tensor(order, device=out.device).argsort()]


def silent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """0 for each query, as where no key is visible: a part of the graph still, with gradients 0 whatever the tensors hold.

    >>> x = torch.full((1, 1, 2, 3), torch.nan, requires_grad=True)
    >>> silent(x, x, x).sum().backward()
    >>> float(x.grad.abs().sum())
    0.0
    """
    tie = sum(t[..., :0].sum() for t in (q, k, v))  # of no number at all
    return v.new_zeros(*q.shape[:3], v.shape[-1]) + tie


def _layouts(keys: Tensor) -> list[list[int]]:
    """The texts whose real tokens lie at the same places."""
    _, layout = keys.unique(dim=0, return_inverse=True)
    found: dict[int, list[int]] = {}
    for entry, number in enumerate(layout.tolist()):
        found.setdefault(number, []).append(entry)
    return list(found.values())


def _group(attend: Callable[..., Tensor], qkv: list[Tensor], entries: list[int], real: Tensor) -> Tensor:
    """Some texts of one layout: a slice of tokens where the real ones follow each other."""
    first, many = entries[0], len(entries)
    together = entries == list(range(first, first + many))
    picked = [t[first : first + many] if together else t[torch.tensor(entries, device=t.device)] for t in qkv]
    places = real.nonzero()[:, 0]
    if len(places) == 0:
        return silent(*picked)
    start, stop = int(places[0]), int(places[-1]) + 1
    if stop - start == len(places):
        return F.pad(attend(*(t[:, :, start:stop] for t in picked)), (0, 0, start, len(real) - stop))
    out = attend(*(t[:, :, places] for t in picked))
    return torch.zeros_like(picked[2]).index_copy(2, places, out)
