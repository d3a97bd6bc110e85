"""Dense: the whole attention matrices of a call, where memory has room for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention import Capture
from ..measuring import free_memory
from ..ops.sweep import Logits, Sweep

if TYPE_CHECKING:
    from jaxtyping import Float

SHARE = 0.5  # of the free memory, that one result may take


def attention_matrix(capture: Capture) -> Float[Tensor, "batch heads queries keys"]:
    """P itself, in float64; rows that see no key are zero.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    >>> torch.allclose(attention_matrix(Capture("layer", q, k, v)), (q @ k.mT).softmax(-1))
    True
    """
    (batch, heads, queries, _), keys = capture.q.shape, capture.k.shape[-2]
    instead = "sweep over it: heedful.exact.singular_values(capture) and effective_rank(capture) never build it"
    check_room(
        8 * batch * heads * queries * keys, f"{batch * heads} attention matrices of {queries} x {keys}", instead, capture.q.device
    )
    sweep = Sweep(capture.q, Logits(capture.k.double(), capture.mask, capture.scale, capture.cap, capture.null))
    found = torch.zeros(batch, heads, queries, keys, dtype=torch.float64, device=capture.q.device)
    for tile in sweep:
        found[tile.entries, tile.heads, tile.spots, tile.keys] = tile.mass[..., : tile.high - tile.low]
    return found


def check_room(size: float, what: str, instead: str, device: torch.device | None = None) -> None:
    """Refuse a result that memory has no room for, before any work: `what` it is, and what to do `instead`.

    >>> check_room(1e19, "a Jacobian of 10000 tokens", "use attention_jvp")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: a Jacobian of 10000 tokens would take 1e+10 GB, and ... GB are free; use attention_jvp.
    """
    free = free_memory(torch.device("cpu") if device is None else device)
    if size > SHARE * free:
        raise ValueError(f"{what} would take {size / 1e9:.3g} GB, and {free / 1e9:.1f} GB are free; {instead}.")
