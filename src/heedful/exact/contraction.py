"""Contraction: by how much attention as it stands on a text brings tokens nearer to each other, or further apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention import Capture
from ..mechanisms import Softmax
from .singular import norms

if TYPE_CHECKING:
    from jaxtyping import Float

DENSE = 4096  # tokens of a matrix that `dobrushin` compares row by row


def frozen_contraction(
    p: Float[Tensor, "heads tokens tokens"], maps: Float[Tensor, "heads dim out"], steps: int = 50
) -> Float[Tensor, ""]:
    """The norm of R -> C sum_h P_h R W_h with C = I - 11^T/n: the most that one layer, P frozen, stretches differences between tokens.

    >>> p, w = torch.randn(2, 5, 5).double().softmax(-1), torch.randn(2, 4, 3).double()
    >>> dense = sum(torch.kron(a - a.mean(0), b.mT.contiguous()) for a, b in zip(p, w))
    >>> torch.allclose(frozen_contraction(p, w), torch.linalg.matrix_norm(dense, 2))
    True
    """
    _check(p, "p")
    if maps.ndim != 3 or len(maps) != len(p):
        raise ValueError(f"p is of {len(p)} heads and the maps have shape {tuple(maps.shape)}; give (heads, dim, out).")
    dtype, p, maps = p.dtype, _wide(p), _wide(maps)
    centred = _centred(p)
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(1, p.shape[-1], maps.shape[-2], generator=draws, device="cpu", dtype=torch.float64).to(p)
    return norms(
        lambda r: (centred @ r[:, None] @ maps).sum(1), lambda y: (centred.mT @ y[:, None] @ maps.mT).sum(1), start, steps
    )[0].to(dtype)


def dobrushin(p: Float[Tensor, "... tokens tokens"] | Sequence[Tensor]) -> Float[Tensor, "*batch"]:
    """The largest total variation between two rows, 1/2 max |P_i - P_j|_1: what it leaves of any column's range, at most 1.

    A sequence of matrices, first layer first, is a path: its product's is meant, which the product of theirs may exceed by far.

    >>> dobrushin(torch.eye(3)).item(), dobrushin(torch.full((3, 3), 1 / 3)).item()
    (1.0, 0.0)

    Its cost is tokens^3; `centred_norm` needs no whole matrix.
    """
    p = p if isinstance(p, Tensor) else _product(p)
    _check(p, "p")
    if p.shape[-1] > DENSE:
        raise ValueError(f"p has {p.shape[-1]} tokens, and all pairs of its rows are too many; use centred_norm, which streams.")
    wide = _wide(p)
    return (torch.cdist(wide, wide, p=1).amax((-2, -1)) / 2).to(p.dtype)


def centred_norm(path: Tensor | Capture | Sequence[Tensor | Capture], steps: int = 60) -> Float[Tensor, "*batch"]:
    """|(I - 11^T/n) P|_2, the most that P stretches differences between tokens; of a path of layers, that of P = P_L ... P_1.

    A path is given first layer first. It may be above 1: P is a contraction between rows' ranges, not between their lengths, and
    columns that all queries look at lengthen. Captures (one text, by head) are read as products with a vector, never L x L.

    >>> q, k = torch.randn(2, 1, 3, 7, 4, dtype=torch.float64)
    >>> call, p = Capture("layer", q, k, k, scale=0.5), (q @ k.mT / 2).softmax(-1)[0]
    >>> torch.allclose(centred_norm([call, call]), centred_norm([p, p]))
    True
    """
    steps_of = [path] if isinstance(path, Tensor | Capture) else list(path)
    if all(isinstance(p, Tensor) for p in steps_of):
        whole = _product(steps_of)  # type: ignore[arg-type]
        return torch.linalg.matrix_norm(_centred(_wide(whole)), 2).to(whole.dtype)
    maps = [_Applied(p) for p in steps_of]
    shown = [m.size for m in maps]
    if len({n for _, n in shown}) != 1 or len({h for h, _ in shown} - {1}) > 1:
        raise ValueError(f"the path's layers have (heads, tokens) {shown}; give as many tokens in each, and as many heads or 1.")
    heads, dtype = max(h for h, _ in shown), torch.float64
    start = torch.randn(1, shown[0][1], 1, generator=torch.Generator().manual_seed(0), device="cpu", dtype=dtype).expand(
        heads, -1, -1
    )
    return norms(
        lambda x: _centred(reduce(lambda y, m: m.forward(y), maps, x)),
        lambda y: reduce(lambda x, m: m.backward(x), reversed(maps), _centred(y)),
        start.to(maps[0].device),
        steps,
    )


def one_head(call: Capture, head: int) -> Capture:
    """One head of an attention call, as a call.

    >>> q = torch.randn(1, 4, 5, 8)
    >>> one_head(Capture("layer", q, q[:, :2], q[:, :2]), 3).k.equal(q[:, 1:2])
    True
    """
    heads, shared = call.q.shape[1], call.q.shape[1] // call.k.shape[1]
    if not 0 <= head < heads:
        raise ValueError(f"there is no head {head} in {call.layer}; it has {heads}.")
    bias = call.mask.bias
    if call.mask.rule is not None:
        raise ValueError(f"{call.layer}'s mask is a rule of the model's own over all heads; take all heads.")
    if bias is not None and bias.shape[1] > 1:
        bias = bias[:, head : head + 1]
    own, keys = slice(head, head + 1), slice(head // shared, head // shared + 1)
    null = None if call.null is None else call.null[own]
    out = None if call.out is None else call.out[:, own]
    mask = replace(call.mask, bias=bias)
    return replace(call, q=call.q[:, own], k=call.k[:, keys], v=call.v[:, keys], mask=mask, null=null, out=out)


class _Applied:
    """One layer of a path as products with (heads, tokens, 1), in float64."""

    def __init__(self, layer: Tensor | Capture):
        self.layer = layer
        if isinstance(layer, Tensor):
            _check(layer, "a layer of the path")
            self.size = (len(layer) if layer.ndim == 3 else 1, layer.shape[-1])
            return
        if layer.q.shape[0] != 1 or layer.q.shape[-2] != layer.k.shape[-2]:
            raise ValueError(
                f"{layer.layer} is of {layer.q.shape[0]} texts with {layer.q.shape[-2]} queries and {layer.k.shape[-2]} keys; give one text's self-attention."
            )
        self.size = (layer.q.shape[1], layer.q.shape[-2])

    @property
    def device(self) -> torch.device:
        return self.layer.device if isinstance(self.layer, Tensor) else self.layer.q.device

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.double() @ x if isinstance(self.layer, Tensor) else self._attend(x)

    def backward(self, y: Tensor) -> Tensor:
        """P^T y, as the gradient of the products with respect to the values."""
        if isinstance(self.layer, Tensor):
            return self.layer.double().mT @ y
        with torch.enable_grad():
            x = torch.zeros_like(y, requires_grad=True)
            return torch.autograd.grad(self._attend(x), x, y)[0]

    def _attend(self, x: Tensor) -> Tensor:
        call = self.layer
        assert isinstance(call, Capture)
        q, k = (t.detach().double() for t in (call.q, call.k))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        values = x.expand(q.shape[1], -1, -1)[None]
        return Softmax()(q, k, values, call.mask, call.scale, cap=call.cap, null=call.null)[0]


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-2, keepdim=True)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: norms and distances are not there in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _product(path: Sequence[Tensor]) -> Tensor:
    for p in path:
        _check(p, "a layer of the path")
    if len({p.shape[-1] for p in path}) != 1:
        raise ValueError(
            f"the path's layers have shapes {[tuple(p.shape) for p in path]}; give as many tokens in each, at least one layer."
        )
    return reduce(lambda whole, p: p @ whole, path)


def _check(p: Tensor, name: str) -> None:
    if p.ndim < 2 or p.shape[-1] != p.shape[-2] or p.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(p.shape)}; give square attention matrices (..., tokens, tokens).")
    if not bool(torch.isfinite(p).all()):
        raise ValueError(f"{name} holds nan or infinite weights; find what made them.")
