"""Moments: means and covariances of the queries of a layer and of the keys that they attend to, and some such pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from ..attention import Capture

if TYPE_CHECKING:
    from jaxtyping import Float

ROWS = 256  # queries looked at in each capture


@dataclass(frozen=True, eq=False)
class Moments:
    """Per head, float64, of q and k times sqrt(scale); keys and pairs are weighted by attention."""

    query_mean: Float[Tensor, "heads dim"]
    key_mean: Float[Tensor, "heads dim"]
    query_cov: Float[Tensor, "heads dim dim"]
    key_cov: Float[Tensor, "heads dim dim"]
    cross_cov: Float[Tensor, "heads dim dim"]  # queries by keys
    queries: Float[Tensor, "heads pairs dim"]
    keys: Float[Tensor, "heads pairs dim"]

    @classmethod
    def of(cls, captures: Sequence[Capture], pairs: int, seed: int) -> Moments:
        """Of all captures of one layer, by about ROWS queries of each; `pairs` pairs are drawn as attention draws them."""
        check(captures)
        source = Generator("cpu").manual_seed(seed)
        found = [looked(capture, -(-pairs // len(captures)), source) for capture in captures]
        count, *totals = (torch.stack(parts).sum(0) for parts in zip(*(sums for sums, _ in found), strict=True))
        if not bool((count > 0).all()):
            raise ValueError("fit found a head whose queries see no key, as where all is padding; give captures of real tokens.")
        mean_x, mean_y, square_x, square_y, both = (t / count.view(-1, *[1] * (t.ndim - 1)) for t in totals)
        queries, keys = (torch.cat(parts, 1) for parts in zip(*(drawn for _, drawn in found), strict=True))
        kept = torch.randperm(queries.shape[1], generator=source, device="cpu")[:pairs].to(queries.device)
        return cls(
            mean_x,
            mean_y,
            square_x - outer(mean_x, mean_x),
            square_y - outer(mean_y, mean_y),
            both - outer(mean_x, mean_y),
            queries[:, kept],
            keys[:, kept],
        )


def check(captures: Sequence[Capture]) -> None:
    """Refuse captures that no one layer could have made."""
    if not captures:
        raise ValueError("fit was given no capture; give those of one layer, as hd.capture(model, texts)[layer] has them.")
    shapes = {(c.q.shape[1], c.k.shape[1], c.q.shape[-1]) for c in captures}
    lowest = min(c.scale for c in captures)
    if lowest < 0:
        raise ValueError(f"a capture has the scale {lowest}; random features need one of at least 0 (1/sqrt(dim) is usual).")
    if len(shapes) > 1:
        raise ValueError(f"the captures have (heads, key heads, dim) {sorted(shapes)}; give those of one layer.")


def looked(capture: Capture, pairs: int, source: Generator) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """The sums over the looked-at queries (their count first), and for each head the (queries, keys) of some pairs."""
    rows = torch.linspace(0, capture.q.shape[-2] - 1, min(ROWS, capture.q.shape[-2])).long().to(capture.q.device)
    x, y = capture.q[:, :, rows].double() * capture.scale**0.5, capture.k.double() * capture.scale**0.5
    y = y.repeat_interleave(x.shape[1] // y.shape[1], 1)
    if capture.mask.keys is not None:
        y = y.masked_fill(~capture.mask.keys[:, None, :, None], 0)
    mass = attention(capture, x, y, rows)  # (batch, heads, rows, keys)
    told = mass.sum(-1)  # 1, or 0 where a query is padding or sees nothing
    met, load = mass @ y, mass.sum(-2)
    sums = (
        told.sum((0, 2)),
        (told[..., None] * x).sum((0, 2)),
        met.sum((0, 2)),
        ((told[..., None] * x).mT @ x).sum(0),
        ((load[..., None] * y).mT @ y).sum(0),
        (x.mT @ met).sum(0),
    )
    return sums, drawn(mass, x, y, pairs, source)


def attention(capture: Capture, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """What those queries give each key; nothing where they are padding."""
    logits = x @ y.mT
    if capture.cap is not None:
        logits = capture.cap * torch.tanh(logits / capture.cap)
    added = capture.mask.tile(rows, 0, y.shape[-2])
    logits = logits if added is None else logits + added
    mass = logits.softmax(-1).nan_to_num(0)
    return mass if capture.real is None else mass * capture.real[:, None, rows, None]


def drawn(mass: Tensor, x: Tensor, y: Tensor, pairs: int, source: Generator) -> tuple[Tensor, Tensor]:
    """For each head, queries at random and for each of them a key as likely as it is attended to."""
    heads, rows = mass.shape[1:3]
    real = mass.sum((1, 3)).cpu() > 0  # (batch, rows)
    if not bool(real.any()):
        return x.new_zeros(heads, 0, x.shape[-1]), y.new_zeros(heads, 0, y.shape[-1])
    row = torch.multinomial(real.flatten().double(), pairs, True, generator=source).to(x.device)
    entry, row = row // rows, row % rows
    weights = mass[entry, :, row].flatten(0, 1).cpu() + 1e-300  # (pairs * heads, keys)
    key = torch.multinomial(weights, 1, generator=source).view(pairs, heads).to(x.device)
    head = torch.arange(heads, device=x.device)
    return x[entry, :, row].transpose(0, 1), y[entry[:, None], head, key].transpose(0, 1)


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]
