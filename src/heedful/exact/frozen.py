"""Frozen networks: attention weights, norms' scales and MLPs' gates held as they were in one forward pass, so that all the rest is linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention import Capture
from ..mask import Mask
from ..ops.hop import EVERYTHING
from ..ops.sweep import Logits, Sweep
from .block import Block, Heads, Mlp, Norm, gathered, spread

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Mixing:
    """The attention weights P of all heads, made again from q and k in tiles whenever they are needed: never L x L."""

    q: Float[Tensor, "batch heads tokens dim"]
    k: Float[Tensor, "batch key_heads tokens dim"]
    mask: Mask = EVERYTHING
    scale: float = 1.0
    cap: float | None = None

    def _tiles(self) -> Sweep:
        return Sweep(self.q, Logits(self.k, self.mask, self.scale, self.cap, None))

    def __call__(self, v: Float[Tensor, "batch heads tokens width"]) -> Float[Tensor, "batch heads tokens width"]:
        """P v."""
        out = v.new_empty(v.shape)
        for tile in self._tiles():
            mass = tile.mass[..., : tile.high - tile.low]
            out[tile.entries, tile.heads, tile.spots] = mass @ v[tile.entries, tile.heads, tile.keys]
        return out

    def back(self, u: Float[Tensor, "batch heads tokens width"]) -> Float[Tensor, "batch heads tokens width"]:
        """P^T u."""
        out = torch.zeros_like(u)
        for tile in self._tiles():
            mass = tile.mass[..., : tile.high - tile.low]
            out[tile.entries, tile.heads, tile.keys] += mass.mT @ u[tile.entries, tile.heads, tile.spots]
        return out


@dataclass(frozen=True, eq=False)
class Scaling:
    """A norm whose 1 / sigma is fixed: it centres, scales each token and weighs each dim."""

    norm: Norm
    inverse: Float[Tensor, "batch tokens 1"]

    def __call__(self, x: Tensor) -> Tensor:
        """The linear part, without the bias."""
        return (self.norm.centre(x) * self.inverse).mul_(self.norm.weight)

    @property
    def unbiased(self) -> Scaling:
        return replace(self, norm=replace(self.norm, bias=torch.zeros_like(self.norm.bias)))

    def back(self, g: Tensor) -> Tensor:
        return self.norm.centre(g * self.norm.weight * self.inverse)


@dataclass(frozen=True, eq=False)
class FrozenLayer:
    """One block with its P, 1 / sigma and gates fixed; without norms and MLP a layer of a pure attention network."""

    mixing: Mixing
    heads: Heads
    outs: Float[Tensor, "batch heads tokens dv"]  # P_h (x W_V,h + b_V,h) as they were
    skip: bool = True
    pre: bool = True
    norms: tuple[Scaling, Scaling] | None = None
    mlp: Mlp | None = None
    slope: Float[Tensor, "batch tokens hidden"] | None = None

    @property
    def unbiased(self) -> FrozenLayer:
        """The same with every bias zero."""
        norms = None if self.norms is None else (self.norms[0].unbiased, self.norms[1].unbiased)
        b_v, b_o = torch.zeros_like(self.heads.b_v), torch.zeros_like(self.heads.b_o)
        mlp = self.mlp
        if mlp is not None:
            mlp = replace(mlp, b_up=torch.zeros_like(mlp.b_up), b_down=torch.zeros_like(mlp.b_down))
        return replace(self, heads=replace(self.heads, b_v=b_v, b_o=b_o), norms=norms, mlp=mlp)

    def attend(self, read: Float[Tensor, "streams batch tokens dim"]) -> Float[Tensor, "streams batch tokens out"]:
        """The sum over heads of P_h x W_h for each stream, b_V added to the last one's values; P is made once for all."""
        values = spread(read, self.heads.w_v)
        values[-1] += self.heads.b_v[:, None]
        return gathered(_at_once(self.mixing, values), self.heads.w_o)

    def pull(self, g: Float[Tensor, "streams batch tokens out"]) -> tuple[Tensor, Tensor]:
        """Gradients of the heads' outputs and of their values, (streams, batch, heads, tokens, dv), from those of `attend`."""
        pulled = spread(g, self.heads.w_o.mT)
        return pulled, _at_once(self.mixing.back, pulled)


def _at_once(mix: Callable[[Tensor], Tensor], values: Float[Tensor, "streams batch heads tokens dv"]) -> Tensor:
    """One mixing of all streams side by side."""
    wide = values.permute(1, 2, 3, 0, 4).flatten(-2)  # (batch, heads, tokens, streams * dv)
    return mix(wide).unflatten(-1, (len(values), -1)).permute(3, 0, 1, 2, 4)


@dataclass(frozen=True, eq=False)
class Network:
    """Frozen layers in order, what the first one reads, what the last one gives, and the scaling behind it where there is one.

    >>> x = torch.randn(1, 5, 8, dtype=torch.float64)
    >>> network = attention_network(x, [random_heads(2, 8, seed) for seed in (0, 1)], skip=True)
    >>> network.layers[0].mixing(torch.eye(5, dtype=torch.float64).expand(1, 2, 5, 5)).sum(-1).round(decimals=9).unique()
    tensor([1.], dtype=torch.float64)
    """

    x: Float[Tensor, "batch tokens dim"]
    layers: tuple[FrozenLayer, ...]
    output: Float[Tensor, "batch tokens dim"]
    final: Scaling | None = None

    def __post_init__(self):
        _check_states(self.x, len(self.layers))
        if not all(bool(torch.isfinite(x).all()) for x in (self.x, self.output)):
            raise ValueError("the states hold NaN or infinite numbers; look at what made them, and use float32 or float64.")
        for number, layer in enumerate(self.layers):
            _fit(number, layer, *self.x.shape)


def _check_states(x: Tensor, layers: int) -> None:
    """Refuse states, or none to read them, of which no network is made."""
    if x.ndim != 3 or layers == 0:
        raise ValueError(
            f"a network reads states (batch, tokens, dim) by one layer or more; got {tuple(x.shape)} and {layers} layers."
        )
    if torch.finfo(x.dtype).bits < 32:
        raise ValueError(f"the states are {x.dtype}, too coarse to add paths up; load the model with dtype=torch.float32.")


def _fit(number: int, layer: FrozenLayer, batch: int, tokens: int, dim: int) -> None:
    """Refuse a layer that cannot read such states."""
    q, k, w_v, w_o = layer.mixing.q, layer.mixing.k, layer.heads.w_v, layer.heads.w_o
    if q.shape[0] != batch or q.shape[2] != tokens or k.shape[2] != tokens:
        raise ValueError(
            f"layer {number} mixes {tuple(q.shape)} queries and {tuple(k.shape)} keys, but the states are {(batch, tokens, dim)}; "
            "paths need self-attention, whose queries and keys are the same tokens."
        )
    heads = q.shape[1]
    if w_v.shape[:2] != (heads, dim) or w_o.shape != (heads, w_v.shape[-1], dim):
        raise ValueError(
            f"layer {number} has W_V {tuple(w_v.shape)} and W_O {tuple(w_o.shape)}; {heads} heads on {dim} dims need "
            f"({heads}, {dim}, dv) and ({heads}, dv, {dim})."
        )


def freeze(block: Block, call: Capture, x: Float[Tensor, "batch tokens dim"]) -> FrozenLayer:
    """A block as it was when it read x and its attention made `call`."""
    if call.out is None or call.null is not None:
        raise ValueError(f"{call.layer} has no output, or null logits; give a call of softmax attention with its output.")
    first, second = block.norms
    summed = x + block.heads.join(call.out)
    before, middle = (x, summed) if block.pre else (summed, first(summed))
    raised, slope = block.mlp.open(second(middle) if block.pre else middle)
    after = middle if block.pre else middle + (raised * slope) @ block.mlp.down + block.mlp.b_down
    norms = Scaling(first, first.inverse(before)), Scaling(second, second.inverse(after))
    mixing = Mixing(call.q, call.k, call.mask, call.scale, call.cap)
    return FrozenLayer(mixing, block.heads, call.out, True, block.pre, norms, block.mlp, slope)


def attention_network(
    x: Float[Tensor, "batch tokens dim"],
    heads: Sequence[Heads],
    skip: bool = True,
    mask: Mask = EVERYTHING,
    scale: float | None = None,
) -> Network:
    """Pure attention layers (a SAN), each with the P that it has when x is read; `scale` is 1/sqrt(dk) unless given."""
    _check_states(x, len(heads))
    layers, state = [], x
    for one in heads:
        q, k, v = one.project(state)
        mixing = Mixing(q, k, mask, q.shape[-1] ** -0.5 if scale is None else scale)
        outs = mixing(v)
        layers.append(FrozenLayer(mixing, one, outs, skip))
        out = one.join(outs)
        state = state + out if skip else out
    return Network(x, tuple(layers), state)


def random_heads(heads: int, dim: int, seed: int = 0, gain: float = 1.0) -> Heads:
    """Heads with random matrices and biases in float64, for examples and tests."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=source, device="cpu") * gain / dim**0.5

    width = dim // heads
    w_q, w_k, w_v = (draw(heads, dim, width) for _ in range(3))
    b_q, b_k, b_v = (draw(heads, width) for _ in range(3))
    return Heads(w_q, w_k, w_v, draw(heads, width, dim) * heads**0.5, b_q, b_k, b_v, draw(dim))
