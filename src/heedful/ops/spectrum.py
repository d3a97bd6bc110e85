"""The largest singular values of the attention matrix, from a few sweeps over its tiles, never L x L."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .sweep import HIDDEN, Logits, Sweep

if TYPE_CHECKING:
    from jaxtyping import Float, Int

VECTORS = 12  # right vectors sought at once
NOISE = 1e-4  # of a vector's length: what is left below it is rounding
SWEEPS = 4  # over all tiles; the space searched has SWEEPS * VECTORS dims


def spectral_norms(
    q: Float[Tensor, "1 heads queries dim"],
    logits: Logits,
    rows: Int[Tensor, " rows"],
    keys: Int[Tensor, " tokens"],
    load: Float[Tensor, "heads keys"],
) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """|P|_2 and the centred |(I - 11^T/n) P|_2 of one text, over its queries `rows`; `load` holds P's column sums, `keys` its tokens.

    Block Krylov: with l = P^T 1 among the first vectors, P^T P and P^T (I - 11^T/n) P = P^T P - l l^T/n span one space. What is
    found is the largest |M x| for x in that space: a lower bound that 4 sweeps bring within about 1e-3.

    >>> from heedful.mask import Mask
    >>> q, k = torch.randn(2, 1, 1, 64, 8)
    >>> mass, every = (q @ k.mT).softmax(-1)[0], torch.arange(64)
    >>> whole, centred = spectral_norms(q, Logits(k, Mask(), 1.0, None, None), every, every, mass.sum(1))
    >>> bool((whole / torch.linalg.matrix_norm(mass, 2) - 1).abs() < 1e-3)
    True
    """
    sweep, count = Sweep(q, logits, rows), len(rows)
    start = _start(load, keys)
    x = orthonormal(start, start[..., :0])
    found, images = x[..., :0], x[..., :0]
    for _ in range(SWEEPS):
        found = torch.cat([found, x], -1)
        images = torch.cat([images, _image(sweep, x, load, count)], -1)
        x = orthonormal(images[..., -x.shape[-1] :], found)
    pull = (load[:, None] @ found) / count  # (heads, 1, vectors)
    return tuple(torch.linalg.matrix_norm(m.double(), 2).sqrt() for m in (images + load[..., None] * pull, images))  # type: ignore[return-value]


def _start(load: Tensor, keys: Tensor) -> Tensor:
    """The column sums and random vectors on the text's own tokens, the same wherever these lie: (heads, keys, vectors)."""
    draws = torch.randn(len(keys), VECTORS - 1, generator=torch.Generator().manual_seed(0), device="cpu")
    first = load.new_zeros(load.shape[-1], VECTORS - 1)
    first[keys] = draws.to(load)
    return torch.cat([load[..., None], first.expand(len(load), -1, -1)], -1)


def orthonormal(x: Tensor, found: Tensor) -> Tensor:
    """An orthonormal basis of what x adds to the basis `found`; directions that add nothing become zero instead of noise."""
    x = x / x.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    for _ in range(2):  # twice is enough
        x = x - found @ (found.mT @ x)
    basis, upper = torch.linalg.qr(x)
    basis = basis * (upper.diagonal(dim1=-2, dim2=-1).abs() > NOISE)[..., None, :]
    return basis - found @ (found.mT @ basis)


def _image(sweep: Sweep, x: Tensor, load: Tensor, count: int) -> Tensor:
    """P^T (I - 11^T/n) P x, (heads, keys, vectors); the mean row is taken off P itself, so that a collapsed P keeps its digits."""
    room = sweep.k.shape[-2] - x.shape[-2]
    x, mean = torch.nn.functional.pad(x, (0, 0, 0, room)), torch.nn.functional.pad(load / count, (0, room))
    image = torch.zeros_like(x)
    for tile in sweep:
        span = slice(tile.low, tile.low + tile.mass.shape[-1])
        beyond = mean[tile.heads].clone()  # the mean's columns that these queries cannot reach
        beyond[:, span] = 0
        mass = tile.mass[0].sub_(mean[tile.heads, None, span])
        z = (mass @ x[tile.heads, span] - beyond[:, None] @ x[tile.heads]) * (tile.largest[0] > HIDDEN / 2)[..., None]
        image[tile.heads, span] += (z.mT @ mass).mT
        image[tile.heads] -= (z.sum(-2, keepdim=True).mT @ beyond[:, None]).mT
    return image[:, : load.shape[-1]]


def of_entry(logits: Logits, entry: int) -> Logits:
    """The logits of one text of a batch."""
    return replace(logits, k=logits.k[entry : entry + 1], mask=logits.mask.entry(entry))
