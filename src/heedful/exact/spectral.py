"""Spectral: the singular values of the attention of long texts, from sweeps over its tiles; no L x L matrix is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention import Capture
from ..ops.spectrum import of_entry, orthonormal
from ..ops.sweep import Sweep

if TYPE_CHECKING:
    from jaxtyping import Float

SWEEPS = 4  # over all tiles; the space searched has SWEEPS * block dims
SPARE = 8  # vectors beyond those that are asked for


@torch.no_grad()
def singular_values(capture: Capture, count: int, seed: int = 0) -> Float[Tensor, "batch heads count"]:
    """The `count` largest singular values of P over the tokens' rows, by a random block Krylov space; lower bounds, the first the closest.

    >>> q, k, v = torch.randn(3, 1, 1, 64, 8)
    >>> found = singular_values(Capture("layer", q, k, v), 3)
    >>> truth = torch.linalg.svdvals((q @ k.mT).softmax(-1))[..., :3]
    >>> bool((found / truth - 1).abs().max() < 1e-3)
    True

    Musco and Musco 2015, Randomized Block Krylov Methods.
    """
    if not 1 <= count <= capture.k.shape[-2]:
        raise ValueError(f"{count} singular values of {capture.k.shape[-2]} keys were asked for; give 1 to {capture.k.shape[-2]}.")
    found = [_of_entry(capture, entry, count, seed) for entry in range(len(capture.q))]
    return torch.stack([x[..., :count] for x in found])


def effective_rank(capture: Capture, seed: int = 0) -> Float[Tensor, "batch heads"]:
    """|P|_F^2 / |P|_2^2 (the stable rank): how many directions the attention keeps in effect, from 1 to its tokens.

    >>> q, k, v = torch.zeros(3, 1, 1, 16, 4)
    >>> round(effective_rank(Capture("layer", q, k, v)).item(), 4)  # every query sees the same
    1.0
    """
    return frobenius_squared(capture) / singular_values(capture, 1, seed)[..., 0].double().square()


def streamed_rank_errors(capture: Capture, count: int, seed: int = 0) -> Float[Tensor, "batch heads ranks"]:
    """What `rank_errors` of the whole matrix gives, for ranks 0 to `count` only; upper bounds, nearly tight for the small ranks.

    >>> q, k, v = torch.randn(3, 1, 1, 64, 8)
    >>> streamed_rank_errors(Capture("layer", q, k, v), 3).shape
    torch.Size([1, 1, 4])
    """
    whole = frobenius_squared(capture)[..., None]
    held = torch.nn.functional.pad(singular_values(capture, count, seed).double().square().cumsum(-1), (1, 0))
    return (1 - held / whole).clamp_min(0).sqrt()


@torch.no_grad()
def frobenius_squared(capture: Capture) -> Float[Tensor, "batch heads"]:
    """|P|_F^2 over the tokens' rows, from one sweep."""
    found = torch.zeros(capture.q.shape[:2], dtype=torch.float64, device=capture.q.device)
    for tile in Sweep(capture.q, capture.logits):
        squares = torch.linalg.vector_norm(tile.mass, dim=-1).square()  # (entries, heads, rows)
        if capture.real is not None:
            squares = squares * capture.real.expand(len(capture.q), -1)[tile.entries, None, tile.spots]
        found[tile.entries, tile.heads] += squares.sum(-1, dtype=torch.float64)
    return found


def _of_entry(capture: Capture, entry: int, count: int, seed: int) -> Tensor:
    """Of one text: (heads, at least count)."""
    every = torch.arange(capture.q.shape[-2], device=capture.q.device)
    rows = every if capture.real is None else capture.real[min(entry, len(capture.real) - 1)].nonzero()[:, 0]
    sweep = Sweep(capture.q[entry : entry + 1], of_entry(capture.logits, entry), rows)
    heads, keys = capture.q.shape[1], capture.k.shape[-2]
    block = min(keys, -(-count // SWEEPS) + SPARE)
    drawn = torch.randn(keys, block, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float64)
    x = orthonormal(drawn.to(sweep.k).expand(heads, -1, -1), sweep.k.new_empty(heads, keys, 0))
    found, seen = x[..., :0], x.new_empty(heads, len(rows), 0)
    for _ in range(SWEEPS):
        y, image = _both(sweep, x)
        found, seen = torch.cat([found, x], -1), torch.cat([seen, y], -1)
        x = orthonormal(image, found)
    values = torch.linalg.svdvals(seen)  # the space is orthonormal, so these are P's within it
    return torch.nn.functional.pad(values, (0, max(0, count - values.shape[-1])))


def _both(sweep: Sweep, x: Tensor) -> tuple[Tensor, Tensor]:
    """P x, (heads, rows, vectors), and P^T P x, (heads, keys, vectors), from one sweep."""
    keys, room = x.shape[-2], sweep.k.shape[-2] - x.shape[-2]
    x = torch.nn.functional.pad(x, (0, 0, 0, room))
    y, image = x.new_zeros(len(x), len(sweep.rows), x.shape[-1]), torch.zeros_like(x)
    for tile in sweep:
        span = slice(tile.low, tile.low + tile.mass.shape[-1])
        part = tile.mass[0] @ x[tile.heads, span]
        y[tile.heads, tile.spots] = part
        image[tile.heads, span] += (part.mT @ tile.mass[0]).mT
    return y, image[:, :keys]
