"""Attribution: how much of a network's output comes by paths of each length and through each head, from half a pass forward and one back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .block import gathered
from .frozen import FrozenLayer, Network
from .paths import through

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Attribution:
    """<direction, sum of some paths> in each text; `lengths` and `bias` add up to <direction, output>.

    `heads` is of all paths through a head, what leaving it out takes away: a path through many heads counts for each of them.
    """

    lengths: Float[Tensor, "batch lengths"]
    bias: Float[Tensor, " batch"]
    heads: Float[Tensor, "layers batch heads"]


@torch.no_grad()
def attribute(network: Network, direction: Float[Tensor, "batch tokens dim"] | None = None) -> Attribution:
    """The effect along a direction of all paths of each length, and of all paths through each head (they pass MLPs by their gates).

    `direction` is output / |output|^2 of each text unless given: then effects are shares of the output. The output is linear in what
    each head gives while the rest is frozen, so <direction, .> carried back through the network meets every head's output once. Carried
    back by length only half the way it meets streams that came forward the other half: sum over i + j = k of <S_i, G_j>. That is
    about L^2/4 streams where `path_streams` needs L^2/2.

    >>> from heedful.exact import path_streams
    >>> from heedful.exact.frozen import attention_network, random_heads
    >>> x = torch.randn(1, 5, 8, dtype=torch.float64)
    >>> network = attention_network(x, [random_heads(2, 8, seed) for seed in range(3)])
    >>> found, streams = attribute(network), path_streams(network)
    >>> torch.allclose(torch.cat([found.lengths, found.bias[:, None]], -1), streams.shares()[:, [0, 1, 2, 3, 5]])
    True
    >>> found.heads.shape
    torch.Size([3, 1, 2])
    """
    g = _direction(network, direction)[None]
    bias = torch.zeros_like(g[0, :, 0, 0])
    if network.final is not None:
        bias += (g[0] * network.final.norm.bias).sum((-2, -1))
        g = network.final.back(g)
    middle, heads = (len(network.layers) - 1) // 2, []
    for layer in reversed(network.layers[middle:]):
        g, own, add = _back(layer, g, split=True)
        heads.append(own)
        bias += add
    lengths = _met(_forward(network, middle), g)
    g = g.sum(0, keepdim=True)
    for layer in reversed(network.layers[:middle]):
        g, own, add = _back(layer, g, split=False)
        heads.append(own)
        bias += add
    return Attribution(lengths, bias, torch.stack(heads[::-1]))


def _direction(network: Network, direction: Tensor | None) -> Tensor:
    if direction is None:
        size = network.output.square().sum((-2, -1), keepdim=True)
        if not bool((size > 0).all()):
            raise ValueError("the output of a text is zero, so nothing has a share of it; give a direction.")
        return network.output / size
    if direction.shape != network.output.shape:
        raise ValueError(
            f"the direction is {tuple(direction.shape)} but the output {tuple(network.output.shape)}; give one of that shape."
        )
    return direction


def _forward(network: Network, layers: int) -> Tensor:
    """The paths from the input through the first layers, by length."""
    streams = network.x[None]
    for layer in network.layers[:layers]:
        streams = through(layer.unbiased, streams, layers, tail=0)
    return streams


def _met(streams: Tensor, g: Tensor) -> Float[Tensor, "batch lengths"]:
    """By length, what comes forward against what is carried back."""
    products = torch.einsum("ibtd,jbtd->ijb", streams, g)
    found = products.new_zeros(len(streams) + len(g) - 1, products.shape[-1])
    for i, row in enumerate(products):
        found[i : i + len(g)] += row
    return found.mT


def _back(layer: FrozenLayer, g: Float[Tensor, "streams batch tokens dim"], split: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients before a layer by the number of heads passed since (together unless `split`), its heads' effects and its biases'."""
    g, bias = _back_mlp(layer, g)
    if layer.norms is not None and not layer.pre:
        bias = bias + _along(g, layer.norms[0].norm.bias)
        g = layer.norms[0].back(g)
    bias = bias + _along(g, layer.heads.b_o)
    pulled, values = layer.pull(g)
    heads = (pulled.sum(0) * layer.outs).sum((-2, -1))
    bias = bias + (values.sum(0) * layer.heads.b_v[:, None]).sum((-3, -2, -1))
    read = gathered(values, layer.heads.w_v.mT)
    if layer.norms is not None and layer.pre:
        bias = bias + _along(read, layer.norms[0].norm.bias)
        read = layer.norms[0].back(read)
    kept = g if layer.skip else torch.zeros_like(g)
    if not split:
        return kept + read, heads, bias
    nothing = torch.zeros_like(g[:1])
    return torch.cat([kept, nothing]) + torch.cat([nothing, read]), heads, bias


def _back_mlp(layer: FrozenLayer, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients before the MLP and its skip, and the effect of the biases on the way."""
    bias = g.new_zeros(g.shape[1])
    if layer.mlp is None or layer.slope is None or layer.norms is None:
        return g, bias
    norm = layer.norms[1]
    if not layer.pre:
        bias = bias + _along(g, norm.norm.bias)
        g = norm.back(g)
    raised = (g @ layer.mlp.down.mT).mul_(layer.slope)
    read = raised @ layer.mlp.up.mT
    bias = bias + _along(g, layer.mlp.b_down) + _along(raised, layer.mlp.b_up)
    if not layer.pre:
        return g + read, bias
    return g + norm.back(read), bias + _along(read, norm.norm.bias)


def _along(g: Float[Tensor, "streams batch tokens dim"], bias: Float[Tensor, " dim"]) -> Float[Tensor, " batch"]:
    """<g, 1 bias^T>, streams together."""
    return g.sum((0, 2)) @ bias
