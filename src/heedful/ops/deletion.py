"""How far the outputs move when a key is taken away, exactly, for every key at once: from tiles of probabilities, never L x L."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .sensitivity import SHARP, KeySums, _folded
from .sweep import BLOCK, HIDDEN, Logits, Sweep, Tile

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def deletion_sums(
    q: Float[Tensor, "batch heads queries dim"],
    v: Float[Tensor, "batch key_heads keys width"],
    logits: Logits,
    real: Bool[Tensor, "batch queries"] | None = None,
) -> Float[Tensor, "batch heads keys"]:
    """Per key the sum over queries, those that are `real`, of |o_i without key j - o_i|^2 = (P_ij / (1 - P_ij))^2 |v_j - o_i|^2.

    A query that saw no other key is left with the output 0.

    >>> from heedful.mask import Mask
    >>> q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
    >>> without = lambda j: (q @ k.mT).index_fill(-1, torch.tensor(j), -torch.inf).softmax(-1) @ v
    >>> truth = torch.stack([(without(j) - (q @ k.mT).softmax(-1) @ v).square().sum() for j in range(6)])
    >>> torch.allclose(deletion_sums(q, v, Logits(k, Mask(), 1.0, None, None))[0, 0], truth)
    True
    """
    sweep = Sweep(q, logits)
    sums = _DeletionSums(sweep, v)
    for tile in sweep:
        seen = tile.largest > HIDDEN / 2
        if real is not None:
            seen = seen & real[tile.entries if len(real) > 1 else slice(None), None, tile.rows]
        odds = torch.div(tile.mass, 1 - tile.mass, out=sweep.buffer("scratch", tile.mass.shape))
        sums.add(replace(tile, slope=None), odds.square_(), seen)  # the keys that are nearly all are taken apart
    return sums.total()


class _DeletionSums(KeySums):
    """The same sums as of moved keys, with odds in the place of probabilities."""

    def _force(self, tile: Tile) -> Tensor:
        return torch.ones_like(tile.lse)

    def _apart(self, tile: Tile, squared: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each query its best key and, where that is sharp, P^2 and |v - the output of all others|^2 in the place of the odds."""
        block = tile.blocks.argmax(-1, keepdim=True)
        inside = tile.mass.unflatten(-1, (-1, BLOCK)).take_along_dim(block[..., None], -2)[..., 0, :]
        best, where = inside.max(-1, keepdim=True)
        where = where + block * BLOCK
        sharp = best > SHARP
        squared.scatter_(-1, where, squared.gather(-1, where).masked_fill(sharp, 0))
        others = tile.mass.scatter(-1, where, 0)
        lost = 0 if tile.share is None else (1 - tile.share)[..., None]  # the null's
        rest = (others.sum(-1, keepdim=True) + lost).clamp_min(torch.finfo(others.dtype).tiny)
        shared = slice(tile.heads.start // self.sweep.shared, tile.heads.stop // self.sweep.shared)
        centre = self.centre[tile.entries, shared].repeat_interleave(self.sweep.shared, 1)
        value = v.take_along_dim(_folded(where, v), -2).view_as(out)
        alone = others.sum(-1, keepdim=True) + lost == 0
        left = (_folded(others, v) @ v).view_as(out) / rest - centre * (lost / rest)  # less the centre, as v is
        gap = value - torch.where(alone, -centre, left)
        return where[..., 0], (best.square() * sharp)[..., 0], gap.square().sum(-1)
