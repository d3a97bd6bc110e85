"""Attention layers to compare on, and their plain dense formula in float64, which autograd can differentiate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from heedful.attention import Mask
from heedful.exact import Layer

N, M, DIM, SOURCE, OUTPUTS = 6, 8, 5, 4, 7


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(heads: int = 2, key_heads: int | None = None, size: int = 3, width: int = 4, **setting) -> Layer:
    """With biases, and a context where one is given."""
    key_heads = heads if key_heads is None else key_heads
    source = SOURCE if "context" in setting else DIM
    shapes = ((DIM, heads * size), (source, key_heads * size), (source, key_heads * width), (heads * width, OUTPUTS))
    weights = [drawn(seed, *shape) for seed, shape in enumerate(shapes)]
    biases = [drawn(10 + seed, shape[1]) for seed, shape in enumerate(shapes)]
    return Layer(*weights, heads, biases=biases, **setting)


def x(n: int = N) -> Tensor:
    return drawn(20, n, DIM)


def context(m: int = M) -> Tensor:
    return drawn(21, m, SOURCE)


def hidden_rows(n: int, m: int) -> Tensor:
    """Of which the second row sees nothing."""
    seen = drawn(22, n, m) > -0.3
    seen[1] = False
    return seen


CASES: dict[str, Callable[[], tuple[Tensor, Layer]]] = {
    "plain": lambda: (x(), replace(layer(), biases=None)),
    "one head": lambda: (x(), layer(1)),
    "biases": lambda: (x(), layer()),
    "some biases": lambda: (x(), replace(layer(), biases=(None, drawn(11, 6), None, None))),
    "scale": lambda: (x(), layer(scale=-0.7)),
    "causal": lambda: (x(), layer(mask=Mask(causal=True))),
    "window": lambda: (x(), layer(mask=Mask(causal=True, window=2, sinks=1))),
    "padding": lambda: (x(), layer(mask=Mask(keys=torch.tensor([[True] * 4 + [False] * 2])))),
    "bias of a Mask": lambda: (x(), layer(mask=Mask(bias=drawn(23, 1, 2, N, N), causal=True))),
    "added matrix": lambda: (x(), layer(mask=drawn(23, N, N))),
    "added matrix of each head": lambda: (x(), layer(mask=drawn(23, 2, N, N))),
    "rows that see nothing": lambda: (x(), layer(mask=hidden_rows(N, N))),
    "shared key heads": lambda: (x(), layer(4, 2, mask=Mask(causal=True))),
    "one token": lambda: (x(1), layer()),
    "cross": lambda: (x(), layer(context=context())),
    "cross, masked": lambda: (x(), layer(context=context(), mask=hidden_rows(N, M))),
    "cross, shared": lambda: (x(), layer(4, 1, context=context(3))),
    "cross, one key": lambda: (x(), layer(context=context(1))),
    "long": lambda: (x(150), layer(mask=Mask(causal=True))),
}


def dense(made: Layer, x: Tensor, source: Tensor | None = None) -> Tensor:
    """The layer's formula; `source` in the place of the tokens that are attended to."""
    given = x if made.context is None else made.context
    source = given if source is None else source
    b_q, b_k, b_v, b_o = (0 if b is None else b for b in made.biases or (None,) * 4)
    heads, size = made.heads, made.w_q.shape[1] // made.heads
    q = (x @ made.w_q + b_q).view(len(x), heads, size).transpose(0, 1)
    k, v = (
        (source @ w + b).view(len(source), made.key_heads, -1).transpose(0, 1).repeat_interleave(heads // made.key_heads, 0)
        for w, b in ((made.w_k, b_k), (made.w_v, b_v))
    )
    scale = size**-0.5 if made.scale is None else made.scale
    p = weights(q @ k.mT * scale + made.call(x.detach()).mask.dense(len(x), len(source))[0])
    return (p @ v).transpose(0, 1).flatten(1) @ made.w_o + b_o


def weights(logits: Tensor) -> Tensor:
    """Softmax, 0 in rows that see nothing."""
    blind = (logits.detach() == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
