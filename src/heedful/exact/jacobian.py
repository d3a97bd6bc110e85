"""The full Jacobian of an attention layer in closed form: every block d out_i / d x_j, for lengths at which that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dense import check_room
from .layer import Layer

if TYPE_CHECKING:
    from jaxtyping import Float

CHUNK = 2**20  # numbers of the Jacobian that are made at once: they stay in the cache


def attention_jacobian(x: Float[Tensor, "tokens dim"], *layer: Any, **setting: Any) -> Float[Tensor, "tokens outputs tokens dim"]:
    """d out[i, a] / d x[j, b] as [i, a, j, b], for a `Layer` or its fields (w_q, w_k, w_v, w_o, heads, scale, mask, context, biases).

    The block of tokens i, j is sum_h P_ij (W_h^T + (v~_j - o~_i) b_i^T), and on the diagonal s W_O^T Cov_i(v, k) W_Q^T more; there
    v~ = v W_O, o~ = o W_O, W_h = W_V W_O, b_i = s W_K q_i. With a context x makes the queries alone, and only the diagonal is left.

    >>> x, w = torch.randn(5, 8, dtype=torch.float64), torch.randn(4, 8, 8, dtype=torch.float64)
    >>> found = attention_jacobian(x, *w, heads=2)
    >>> torch.allclose(found, torch.func.jacrev(Layer(*w, heads=2))(x))
    True
    """
    made = Layer.of(*layer, **setting)
    return _jacobian(x, made, keys=made.context is None, queries=True)


def context_jacobian(x: Float[Tensor, "tokens dim"], *layer: Any, **setting: Any) -> Float[Tensor, "tokens outputs keys source"]:
    """The same by the tokens that are attended to, as keys and values alone: d out[i, a] / d context[j, b].

    >>> x, y = torch.randn(5, 8, dtype=torch.float64), torch.randn(7, 8, dtype=torch.float64)
    >>> w = torch.randn(4, 8, 8, dtype=torch.float64)
    >>> context_jacobian(x, *w, context=y).shape
    torch.Size([5, 8, 7, 8])
    """
    return _jacobian(x, Layer.of(*layer, **setting), keys=True, queries=False)


@torch.no_grad()
def _jacobian(x: Tensor, layer: Layer, keys: bool, queries: bool) -> Tensor:
    parts = _Parts(layer, x)
    inputs = parts.source.shape if keys else x.shape
    shape = (len(x), layer.w_o.shape[1], *inputs)
    _check_room(shape, x)
    found = x.new_empty(shape) if keys else x.new_zeros(shape)
    for rows in _cuts(len(x), max(1, CHUNK // max(1, torch.Size(shape[1:]).numel()))):
        mass = parts.mass(rows)
        if keys:
            parts.by_keys(mass, rows, found[rows])
        if queries:
            at = torch.arange(rows.start, rows.stop, device=x.device)
            found[at, :, at] += parts.by_query(mass)
    return found


@dataclass
class _Parts:
    """What the blocks are made of, by head."""

    layer: Layer
    x: Tensor

    def __post_init__(self):
        layer, self.call = self.layer, self.layer.call(self.x)
        self.source = self.x if layer.context is None else layer.context
        shared = layer.heads // layer.key_heads
        self.q = self.call.q[0]  # (heads, queries, size)
        self.k, self.v = (t[0].repeat_interleave(shared, 0) for t in (self.call.k, self.call.v))
        heads = layer.by_head
        self.w_q, self.w_k, self.w_v, self.w_o = heads.w_q, heads.w_k, heads.w_v, heads.w_o  # by query head
        self.spoken = self.v @ self.w_o  # v~, (heads, keys, outputs)
        self.pairs: Tensor | None = None

    def mass(self, rows: slice) -> Float[Tensor, "heads rows keys"]:
        at = torch.arange(rows.start, rows.stop, device=self.x.device)
        logits = self.call.logits.of(self.call.q[:, :, rows], at, 0, self.k.shape[1])[0]
        blind = logits.amax(-1, keepdim=True) < -1e29
        return logits.softmax(-1).masked_fill_(blind, 0).to(self.x.dtype)

    def by_keys(self, mass: Tensor, rows: slice, found: Float[Tensor, "rows outputs keys source"]) -> None:
        """sum_h P_ij (W_h^T + (v~_j - o~_i) b_i^T) as one GEMM for each query i and output a: (keys, 2 heads) by (2 heads, source)."""
        heads, count, _ = mass.shape
        out = mass @ self.spoken  # o~
        turned = (self.q[:, rows] @ self.w_k.mT) * self.call.scale  # b
        whole = (self.w_v @ self.w_o).permute(2, 0, 1)  # W_h by output, (outputs, heads, source)
        left = found.new_empty(count, found.shape[1], 2 * heads, found.shape[2])
        share = mass.movedim(1, 0)[:, None]  # (rows, 1, heads, keys)
        left[:, :, :heads] = share
        gap = self.spoken.permute(2, 0, 1) - out.permute(1, 2, 0)[..., None]  # (rows, outputs, heads, keys)
        torch.mul(gap, share, out=left[:, :, heads:])
        right = found.new_empty(count, found.shape[1], 2 * heads, found.shape[3])
        right[:, :, :heads], right[:, :, heads:] = whole, turned.movedim(0, 1)[:, None]
        torch.bmm(left.flatten(0, 1).mT, right.flatten(0, 1), out=found.flatten(0, 1))

    def by_query(self, mass: Tensor) -> Float[Tensor, "rows outputs dim"]:
        """s W_O^T Cov(v, k) W_Q^T under P_i, summed over heads."""
        k, v = (t - t.mean(1, keepdim=True) for t in (self.k, self.v))  # less cancels
        if self.pairs is None:
            self.pairs = (v[..., None] * k[:, :, None]).flatten(2)  # (heads, keys, width * size)
        both = (mass @ self.pairs).unflatten(-1, (v.shape[-1], -1))  # (heads, rows, width, size)
        left = mass.sum(-1)[..., None, None]  # 1, or 0 where no key is seen
        covariance = both - left * (mass @ v)[..., None] * (mass @ k)[:, :, None]
        turned = covariance @ (self.w_q.mT * self.call.scale)[:, None]  # (heads, rows, width, dim)
        return self.layer.w_o.mT @ turned.movedim(0, 1).flatten(1, 2)


def _check_room(shape: tuple[int, ...], x: Tensor) -> None:
    instead = "attention_jvp, attention_vjp and local_lipschitz go over tiles in O(tokens) memory"
    check_room(torch.Size(shape).numel() * x.element_size(), f"a Jacobian of shape {shape}", instead, x.device)


def _cuts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
