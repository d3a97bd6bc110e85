"""How far an output moves when a key or a query does, from the probabilities alone, no Jacobian ever formed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .sweep import BLOCK, HIDDEN, TILE, Logits, Sweep, Tile

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SOME = 32  # of the sampled rows, enough for the key sums
SHARP = 0.5  # a key of more mass than this is nearly the output itself


def key_sums(
    q: Float[Tensor, "batch heads queries dim"],
    v: Float[Tensor, "batch key_heads keys width"],
    logits: Logits,
    sample: Int[Tensor, " rows"] | None = None,
    real: Tensor | None = None,
) -> Float[Tensor, "batch heads keys"]:
    """Per key the sum over queries of |d o_i / d k_j|^2 (Frobenius) = s^2 P_ij^2 c_ij^2 |q_i|^2 |v_j - o_i|^2, c the cap's derivative.

    >>> from heedful.mask import Mask
    >>> q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
    >>> attend = lambda k: (q @ k.mT).softmax(-1) @ v
    >>> jacobian = torch.autograd.functional.jacobian(attend, k)[0, 0, :, :, 0, 0]  # (queries, width, keys, dim)
    >>> torch.allclose(key_sums(q, v, Logits(k, Mask(), 1.0, None, None)), jacobian.square().sum((0, 1, 3)))
    True
    """
    sweep = Sweep(q, logits, sample)
    sums = KeySums(sweep, v)
    for tile in sweep:
        seen = tile.largest > HIDDEN / 2
        if real is not None:
            seen = seen & real[tile.entries, None, tile.rows]
        sums.add(tile, torch.mul(tile.mass, tile.mass, out=sweep.buffer("scratch", tile.mass.shape)), seen)
    return sums.total()


class KeySums:
    """The key sums of a sweep, added up tile by tile; where rows are sampled, of every few of them.

    |v - o|^2 = |v|^2 - 2 v.o + |o|^2 makes them matrix products; v is centred, and keys that are nearly the output are taken apart,
    so that little cancels.
    """

    def __init__(self, sweep: Sweep, v: Tensor, step: int = 1):
        v, keys = v.to(sweep.k.dtype), sweep.call.mask.keys
        if keys is None:
            self.centre = v.mean(-2, keepdim=True)
        else:
            self.centre = (v * keys[:, None, :, None]).sum(-2, keepdim=True) / keys.sum(-1).clamp_min(1)[:, None, None, None]
        self.v = F.pad(v - self.centre, (0, 0, 0, -v.shape[-2] % BLOCK))  # (batch, key heads, keys, width)
        self.sweep, self.width, self.step, (batch, heads) = sweep, v.shape[-1], step, sweep.q.shape[:2]
        self.sums = v.new_zeros(batch, heads, self.v.shape[-2], self.width + 2)  # of force * (o, 1, |o|^2)
        self.near = v.new_zeros(batch, heads, self.v.shape[-2])  # from keys that are nearly the output

    def add(self, tile: Tile, squared: Tensor, seen: Tensor) -> Tensor:
        """Take in the rows that are `seen`, given squared probabilities (overwritten); each row's own sum, nan where left out."""
        found = torch.full_like(tile.lse, torch.nan)
        some = slice(-tile.spots.start % self.step, None, self.step)
        tile, squared, seen = tile.some(some), squared[..., some, :], seen[..., some]
        if not seen.numel():
            return found
        here, end = (tile.entries, tile.heads), tile.low + squared.shape[-1]
        shared = slice(tile.heads.start // self.sweep.shared, tile.heads.stop // self.sweep.shared)
        v = self.v[tile.entries, shared, tile.low : end]
        out = self._out(tile, v, shared)
        force = seen * self._force(tile)
        if tile.slope is not None:
            squared.mul_(tile.slope).mul_(tile.slope)
        where, top, gap = self._apart(tile, squared, v, out)
        self.near[(*here, slice(tile.low, end))].scatter_add_(-1, where, force * top * gap)
        length = out.square().sum(-1)
        given = torch.cat([out, torch.ones_like(length)[..., None], length[..., None]], -1) * force[..., None]
        self.sums[(*here, slice(tile.low, end))] += squared.mT @ given
        if self.sweep.sampled:  # only then is their spread asked for
            found[..., some] = (self._rows(squared, v, out) + top * gap) * force
        return found

    def _force(self, tile: Tile) -> Tensor:
        """How much each query moves its logits, squared: (entries, heads, rows)."""
        return self.sweep.call.scale**2 * tile.q.square().sum(-1)

    def total(self) -> Tensor:
        """The sums, (batch, heads, keys)."""
        v = self.v if self.sweep.shared == 1 else self.v.repeat_interleave(self.sweep.shared, 1)
        weighted, weight, length = self.sums.split([self.width, 1, 1], -1)
        found = torch.linalg.vecdot(v, v) * weight[..., 0] - 2 * torch.linalg.vecdot(v, weighted) + length[..., 0]
        return (found.clamp_min_(0) + self.near)[..., : self.sweep.count]

    def _out(self, tile: Tile, v: Tensor, shared: slice) -> Tensor:
        """The centred output of each query, (entries, heads, rows, width)."""
        out = _folded(tile.mass, v) @ v
        if tile.share is None:
            return out.reshape(*tile.mass.shape[:3], -1)
        lost = _folded((1 - tile.share)[..., None], v)
        return (out - lost * self.centre[tile.entries, shared]).view(*tile.mass.shape[:3], -1)

    def _apart(self, tile: Tile, squared: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each query its best key, the squared probability taken from the tile if it is sharp, and |v - o|^2 there."""
        block = tile.blocks.argmax(-1, keepdim=True)  # a key of more than half of the mass lies in the fullest block
        inside = tile.mass.unflatten(-1, (-1, BLOCK)).take_along_dim(block[..., None], -2)[..., 0, :]
        best, where = inside.max(-1, keepdim=True)
        where = where + block * BLOCK
        left = squared.gather(-1, where)
        top = left * (best > SHARP)
        squared.scatter_(-1, where, left - top)
        value = v.take_along_dim(_folded(where, v), -2).view_as(out)
        return where[..., 0], top[..., 0], (value - out).square().sum(-1)

    def _rows(self, squared: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """The sum over keys of squared * |v - o|^2, (entries, heads, rows)."""
        found = _folded(squared, v) @ torch.cat([v, torch.ones_like(v[..., :1]), v.square().sum(-1, keepdim=True)], -1)
        weighted, weight, length = found.view(*squared.shape[:3], -1).split([self.width, 1, 1], -1)
        return (length[..., 0] - 2 * (weighted * out).sum(-1) + weight[..., 0] * out.square().sum(-1)).clamp_min(0)


def query_norms(
    q: Float[Tensor, "batch heads rows dim"],
    v: Float[Tensor, "batch key_heads keys width"],
    logits: Logits,
    rows: Int[Tensor, "batch rows"],
) -> Float[Tensor, "batch heads rows"]:
    """|d o_i / d q_i| (Frobenius) of the queries q at the positions `rows`: s |Cov(v, k)| under P_i; nan where it sees no key.

    >>> from heedful.mask import Mask
    >>> q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
    >>> jacobian = torch.autograd.functional.jacobian(lambda q: (q @ k.mT).softmax(-1) @ v, q[:, :, 2:3])
    >>> torch.allclose(query_norms(q[:, :, 2:3], v, Logits(k, Mask(), 1.0, None, None), torch.tensor([[2]])), jacobian.norm())
    True
    """
    batch, heads, count, _ = q.shape
    mass, weight, share = _probabilities(q, logits, rows)
    k, v = (_centred(t.to(mass.dtype), logits.mask.keys) for t in (logits.k, v))  # with what was taken off as last row
    shared, found = heads // k.shape[1], torch.zeros_like(mass[..., 0])
    size = max(1, TILE // max(1, mass.shape[-1] * v.shape[-1]))
    for b, h in itertools.product(range(batch), range(k.shape[1])):
        own = slice(h * shared, (h + 1) * shared)
        p, w, left = (t[b, own].flatten(0, 1) for t in (mass, weight, share))
        norms = [_cross(*parts, k[b, h], v[b, h]) for parts in zip(p.split(size), w.split(size), left.split(size), strict=True)]
        found[b, own] = torch.cat(norms).view(shared, count)
    return found * logits.scale


def _probabilities(q: Tensor, logits: Logits, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P, P times the derivative of the soft cap, and the mass that the null logit left."""
    found = logits.bare(q, 0, logits.k.shape[-2])
    slope = None if logits.cap is None else 1 - (found / logits.cap).square()
    added = logits.mask.tile(rows, 0, found.shape[-1])
    found = found if added is None else found.add_(added.clamp_min(HIDDEN))
    blind = found.amax(-1, keepdim=True) <= HIDDEN / 2
    mass, share = found.softmax(-1).masked_fill_(blind, torch.nan), torch.ones_like(found[..., 0])
    if logits.null is not None:
        share = torch.sigmoid(found.logsumexp(-1) - logits.null.to(found.dtype)[:, None])
        mass = mass * share[..., None]
    return mass, mass if slope is None else mass * slope, share


def _centred(x: Tensor, keys: Tensor | None) -> Tensor:
    """The tokens' x less their mean, and the mean as one more row."""
    seen = x if keys is None else x * keys[:, None, :, None]
    count = x.shape[-2] if keys is None else keys.sum(-1).clamp_min(1)[:, None, None, None]
    mean = seen.sum(-2, keepdim=True) / count
    return torch.cat([x - mean, mean], -2)


def _cross(mass: Tensor, weight: Tensor, share: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """|sum_j w_j (v_j - o) k_j^T| of each row, (rows,)."""
    k, far, v, middle = k[:-1], k[-1], v[:-1], v[-1]
    out = mass @ v - (1 - share)[:, None] * middle  # the output less `middle`
    near = mass @ k  # each row's own centre, so that little cancels
    local = torch.sub(k, near[:, None]).mul_(weight[..., None])  # (rows, keys, dim)
    rest = weight @ v - weight.sum(-1, keepdim=True) * out
    crossed = local.mT @ v - local.sum(1)[:, :, None] * out[:, None]  # (rows, dim, width)
    return (crossed + (near + far)[:, :, None] * rest[:, None]).flatten(1).norm(dim=-1)


def _folded(x: Tensor, v: Tensor) -> Tensor:
    """The queries' heads that share a key head, as more rows of it."""
    return x.reshape(*v.shape[:2], -1, x.shape[-1])
