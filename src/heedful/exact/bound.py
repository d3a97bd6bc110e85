"""The bound on rank collapse, with the conditions that it needs and whether it says anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .collapse import Around, SelfAttention, residual_recursion, shifts
from .residual import check_states, composite_norm, residual

if TYPE_CHECKING:
    from jaxtyping import Float

LARGEST = 1.2564312086261697  # the root of e^x = 1 + 2 x, beyond which e^D - 1 > 2 D


@dataclass(frozen=True, eq=False)
class BoundReport:
    """What `collapse_bound` found, layer by layer; `log10_bound` of the residual's composite norm after each layer."""

    beta: Float[Tensor, " layers"]  # of the weights
    gamma: Float[Tensor, " layers"]  # of E
    D: Float[Tensor, "layers heads tokens"]  # the spread of each query's own logits, max_jj' |E_ij - E_ij'|
    log10_residual: Float[Tensor, " layers"]  # of the composite norm of what enters each layer, off its centre
    log10_threshold: Float[Tensor, " layers"]  # below it a layer contracts
    log10_bound: Float[Tensor, " layers"]

    @property
    def fraction_valid(self) -> Float[Tensor, " layers"]:
        """The share of queries of all heads that meet the condition D <= 1.2564; the theorem needs all, at every layer."""
        return (self.D <= LARGEST).double().mean((-2, -1))

    @property
    def valid(self) -> bool:
        """Whether the bound is proved."""
        return bool((self.fraction_valid == 1).all())

    @property
    def vacuous(self) -> bool:
        """Whether it says nothing: it is not proved, or it promises no smaller residual than there was."""
        return not self.valid or not bool(self.log10_bound[-1] < self.log10_residual[0])


def collapse_bound(
    x: Float[Tensor, "tokens dim"] | Sequence[Float[Tensor, "tokens dim"]], layers: Sequence[SelfAttention]
) -> BoundReport:
    """The bound |rest after L layers| <= (4 gamma beta H scale)^((3^L - 1) / 2) |rest of X|^(3^L), composite norm, as it stands corrected.

    x is what enters a pure self-attention network of these layers; its rests are those of residual_recursion(x, layers, "image").
    Given a list, the states that enter each layer of some larger model, the conditions are looked at there and the bound is what the
    formula gives, no theorem: skips, MLPs and norms are not in it.

    >>> w = torch.randn(2, 4, 8, 8, dtype=torch.float64) / 60
    >>> x, layers = torch.randn(6, 8, dtype=torch.float64) / 4, [SelfAttention.of(*v, heads=2) for v in w]
    >>> found = collapse_bound(x, layers)
    >>> found.vacuous, bool(composite_norm(residual_recursion(x, layers, "image")[-1].rest).log10() < found.log10_bound[-1])
    (False, True)

    beta^2 = max_h |W_QK|_1 |W_h|_1 times max_h |W_QK|_1 |W_h|_inf: the composite norm knows no triangle inequality, so heads are added
    in the two norms it is made of. gamma^2 = sum_i D_i / max_jj' sum_i |E_ij - E_ij'|. The proof needs |(P - 1u^T) R| <= (e^D - 1) 1 u^T |R|,
    entrywise with |R|, and e^D - 1 <= 2 D: every D <= 1.2564. A layer contracts where |rest|^2 < 1 / (4 gamma beta H scale), which is
    not |rest| < 1. Source 001, Theorem 2.2; Dong et al. 2021.
    """
    entering = residual_recursion(x, layers, "image")[:-1] if isinstance(x, Tensor) else [_from_mean(s) for s in x]
    if len(entering) != len(layers) or not layers:
        raise ValueError(f"{len(entering)} states were given for {len(layers)} layers; give the one that enters each.")
    found = [_of_layer(state, layer) for state, layer in zip(entering, layers, strict=True)]
    beta, gamma, spread, size = (torch.stack(parts) for parts in zip(*found, strict=True))
    heads = torch.tensor([layer.map.shape[0] * layer.scale for layer in layers], dtype=torch.float64)
    factor = (4 * gamma * beta * heads).log10()
    powers = torch.tensor([3.0**number for number in range(1, len(layers) + 1)], dtype=torch.float64)
    bound = (powers - 1) / 2 * factor.amax() + powers * size[0]
    return BoundReport(beta, gamma, spread, size, -factor / 2, bound)


def _from_mean(x: Tensor) -> Around:
    check_states(x, "a state")
    rest, size = residual(x), float(residual(x).norm())
    return Around(x.mean(0), rest / size if size else rest, math.log(size) if size else -math.inf)


def _of_layer(now: Around, layer: SelfAttention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """beta, gamma, D and the log10 of the residual's composite norm at one layer."""
    _, e = shifts(now, layer)
    spread = e.amax(-1) - e.amin(-1)  # (heads, tokens), without its factor |R|^2
    columns = torch.stack([torch.cdist(one.mT, one.mT, p=1).amax() for one in e])
    ratio = torch.where(columns > 0, spread.sum(-1) / columns, 1.0).amax()
    size = composite_norm(now.unit).log10() + now.log10
    return _beta(layer).double(), ratio.sqrt().double(), (spread * math.exp(2 * now.log)).double(), size.double()


def _beta(layer: SelfAttention) -> Tensor:
    scores = (layer.query @ layer.key.mT).abs().sum(-2).amax(-1)  # |W_QK|_1 of each head
    maps = layer.map.abs()
    return ((scores * maps.sum(-2).amax(-1)).amax() * (scores * maps.sum(-1).amax(-1)).amax()).sqrt()
