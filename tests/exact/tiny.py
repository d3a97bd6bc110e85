"""Tiny transformers in float64 with every matrix in sight, run the plain dense way, and all their paths one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from heedful.attention import Capture, Mask
from heedful.exact import Block, Heads, Mlp, Network, Norm, freeze
from heedful.exact.frozen import Scaling, random_heads


def random_block(heads: int, dim: int, seed: int, pre: bool = True, activation: str = "gelu", gated: bool = False) -> Block:
    torch.manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64) / shape[0] ** 0.5

    mlp = Mlp(draw(dim, 7), draw(7, dim), draw(7), draw(dim), activation)
    if gated:
        mlp = replace(mlp, gate=draw(dim, 7), b_gate=draw(7))
    norms = tuple(Norm(1 + 0.1 * draw(dim), draw(dim), 1e-5, centred=not gated) for _ in range(2))
    return Block(f"block {seed}", f"block {seed}.attention", random_heads(heads, dim, seed), mlp, norms, pre)  # type: ignore[arg-type]


def weights_of(heads: Heads, x: Tensor, mask: Mask | None = None) -> Tensor:
    """P (batch, heads, tokens, tokens), dense."""
    q, k, _ = heads.project(x)
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return (logits if mask is None else logits + mask.dense(x.shape[1], x.shape[1])).softmax(-1)


def call_of(block: Block, x: Tensor, mask: Mask | None = None) -> Capture:
    q, k, v = block.heads.project(block.attended(x))
    out = weights_of(block.heads, block.attended(x), mask) @ v
    return Capture(block.attention, q, k, v, mask or Mask(), q.shape[-1] ** -0.5, out=out)


def network_of(blocks: Sequence[Block], x: Tensor, mask: Mask | None = None, final: Norm | None = None) -> Network:
    """The blocks, run and frozen."""
    layers, state = [], x
    for block in blocks:
        call = call_of(block, state, mask)
        assert call.out is not None
        layers.append(freeze(block, call, state))
        state = block.finish(block.middle(state, call.out))
    if final is None:
        return Network(x, tuple(layers), state)
    return Network(x, tuple(layers), final(state), Scaling(final, final.inverse(state)))


def paths_of(layers: Sequence[tuple[Tensor, Tensor]], skip: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(length, P_path, W_path) of each path through layers of (P (heads, n, n), W (heads, d, d)): last P and first W leftmost."""
    choices = [[*range(len(p)), *([None] if skip else [])] for p, _ in layers]
    tokens, dim = layers[0][0].shape[-1], layers[0][1].shape[-1]
    for path in itertools.product(*choices):
        left, right = torch.eye(tokens, dtype=torch.float64), torch.eye(dim, dtype=torch.float64)
        for (p, w), head in zip(layers, path, strict=True):
            if head is not None:
                left, right = p[head] @ left, right @ w[head]
        yield sum(head is not None for head in path), left, right


def matrices_of(network: Network, entry: int = 0) -> list[tuple[Tensor, Tensor]]:
    """(P, W) of every layer, dense."""
    found = []
    for layer in network.layers:
        q, k = layer.mixing.q[entry], layer.mixing.k[entry]
        logits = q @ k.mT * layer.mixing.scale + layer.mixing.mask.dense(q.shape[-2], k.shape[-2])[0]
        found.append((logits.softmax(-1), layer.heads.w_v @ layer.heads.w_o))
    return found
