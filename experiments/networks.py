"""Attention networks for the experiments on source 001: random ones, and MiniLM's layers reading a text without norms and MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.real import data, minilm
from heedful.exact import Heads, Network, attention_network
from heedful.exact.frozen import random_heads
from heedful.explaining.paths import networks
from heedful.huggingface.apart import Apart


def random_network(seed: int, layers: int, heads: int, dim: int, tokens: int, skip: bool = True) -> Network:
    """Float64 layers with biases that read normal states."""
    x = torch.randn(1, tokens, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return attention_network(x, [random_heads(heads, dim, 100 * seed + layer) for layer in range(layers)], skip)


def minilm_frozen(tokens: int) -> tuple[Apart, Network]:
    """All of MiniLM in float64, as it reads the first tokens of wikitext2."""
    checkpoint = minilm()
    checkpoint.model.double()
    text = data("wikitext2/test.txt").read_text("utf-8")[: 12 * tokens]
    return next(iter(networks(checkpoint, [text], length=tokens)))


def minilm_network(tokens: int, layers: int, skip: bool = True) -> Network:
    """Its first attention layers alone, reading what its first block reads."""
    apart, _ = minilm_frozen(tokens)
    return attention_network(apart.states[0], [block.heads for block in apart.blocks[:layers]], skip)


def matrices(network: Network) -> list[tuple[Tensor, Heads]]:
    """P (heads, tokens, tokens) of each layer, dense, with its heads."""
    found = []
    for layer in network.layers:
        eye = torch.eye(network.x.shape[1], dtype=network.x.dtype).expand(1, layer.mixing.q.shape[1], -1, -1)
        found.append((layer.mixing(eye)[0], layer.heads))
    return found


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())
