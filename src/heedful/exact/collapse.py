"""Rank collapse: how the rows of a pure self-attention network become all alike, told without cancellation however near they come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .block import Heads, gathered
from .layer import Layer
from .residual import check_states

if TYPE_CHECKING:
    from jaxtyping import Float

SMALL = 1.0  # logits beyond are not near cancellation


@dataclass(frozen=True, eq=False)
class SelfAttention:
    """The weights of one layer X -> sum_h P_h X W_h + 1 bias^T, P_h = softmax(scale (X query_h + 1 query_bias_h^T) (X key_h)^T).

    Every token sees every token and positions are in X: with a causal mask or rotated queries and keys the rows of P do not become
    alike when those of X do. A bias of the keys changes nothing.
    """

    query: Float[Tensor, "heads dim size"]
    key: Float[Tensor, "heads dim size"]
    map: Float[Tensor, "heads dim dim"]  # W_V W_O
    scale: float
    query_bias: Float[Tensor, "heads size"]
    bias: Float[Tensor, " dim"]

    @classmethod
    def of(cls, *layer: Any, **setting: Any) -> SelfAttention:
        """From a `Layer`, or its fields (w_q, w_k, w_v, w_o, heads, scale, biases); shared key heads too.

        >>> made = SelfAttention.of(*[torch.eye(6)] * 4, heads=2)
        >>> made.map.sum(0).equal(torch.eye(6)), round(made.scale ** -2)
        (True, 3)
        """
        made = Layer.of(*layer, **setting)
        if made.mask is not None or made.context is not None:
            raise ValueError("the layer has a mask or a context; rank collapse is told of tokens that all see each other.")
        if made.w_o.shape[1] != made.w_q.shape[0]:
            raise ValueError(
                f"the layer makes {made.w_o.shape[1]} dims of {made.w_q.shape[0]}; layers that follow each other need as many."
            )
        return cls.of_heads(made.by_head, made.scale)

    @classmethod
    def of_heads(cls, heads: Heads, scale: float | None = None) -> SelfAttention:
        """From matrices by head, such as those of a model's block."""
        factor = 1 / math.sqrt(heads.w_q.shape[-1]) if scale is None else scale
        bias = gathered(heads.b_v[:, None], heads.w_o)[0] + heads.b_o
        return cls(heads.w_q, heads.w_k, heads.w_v @ heads.w_o, factor, heads.b_q, bias)

    def attention(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "heads tokens tokens"]:
        """P_h."""
        return ((x @ self.query + self.query_bias[:, None]) @ (x @ self.key).mT * self.scale).softmax(-1)

    def __call__(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        return (self.attention(x) @ x @ self.map).sum(0) + self.bias


@dataclass(frozen=True, eq=False)
class Around:
    """Rows around one: X = 1 centre^T + exp(log) unit, where unit has Frobenius norm 1 (0 where all rows are one)."""

    centre: Float[Tensor, " dim"]
    unit: Float[Tensor, "tokens dim"]
    log: float

    @property
    def log10(self) -> float:
        """Of |X - 1 centre^T| in the Frobenius norm; -inf where all rows are one."""
        return self.log / math.log(10)

    @property
    def rest(self) -> Float[Tensor, "tokens dim"]:
        """X - 1 centre^T, where a float holds it."""
        return self.unit * math.exp(self.log)


def residual_recursion(x: Float[Tensor, "tokens dim"], layers: Sequence[SelfAttention], center: str = "mean") -> list[Around]:
    """X and what each layer of a pure self-attention network makes of it, as a centre and the exact rest around it.

    Subtracting the mean from a forward pass stalls at rounding; this goes down past 1e-300, to log-ratios that near 3: the cubic law.

    >>> w = torch.randn(4, 8, 8, dtype=torch.float64) / 8**0.5
    >>> x = torch.randn(5, 8, dtype=torch.float64) / 2
    >>> found = [around.log10 for around in residual_recursion(x, [SelfAttention.of(*w, heads=1)] * 8)]
    >>> [round(b / a, 1) for a, b in zip(found[5:], found[6:])], found[-1] < -400
    ([3.0, 3.0, 3.0], True)

    With R = X - 1 c^T, P = softmax(1 r^T + E), u = softmax(r), e = expm1(E) and z = e u: P - 1 u^T = u_j (e_ij - z_i) / (1 + z_i)
    exactly, so the rest of the output is sum_h (P_h - 1 u_h^T) R W_h. "mean" takes its mean off after each layer; "image" keeps the
    image of the former centre, as the theorem of `collapse_bound` does. Source 001, equations (6)-(10), corrected.
    """
    check_states(x)
    _check_layers(x, layers)
    if center not in ("mean", "image"):
        raise ValueError(f"there is no center {center!r}; give mean or image.")
    mean = x.mean(0)
    found = [_around(mean, x - mean, 0.0)]
    for layer in layers:
        found.append(_next(found[-1], layer, center))
    return found


def _around(centre: Tensor, rest: Tensor, log: float) -> Around:
    """exp(log) rest around a centre, brought to norm 1."""
    size = float(rest.norm())
    return Around(centre, rest / size if size else rest, log + math.log(size) if size else -math.inf)


def _next(now: Around, layer: SelfAttention, center: str) -> Around:
    spread, (r, e) = math.exp(now.log), shifts(now, layer)
    u = r.softmax(-1)
    change, log = _difference(e, r, now.log)
    centre = ((now.centre + spread * (u @ now.unit))[:, None] @ layer.map).sum(0)[0] + layer.bias
    rest = (change @ now.unit @ layer.map).sum(0)
    if center == "mean":
        mean = rest.mean(0)
        centre, rest = centre + mean * math.exp(log + now.log), rest - mean
    return _around(centre, rest, log + now.log)


def shifts(now: Around, layer: SelfAttention) -> tuple[Tensor, Tensor]:
    """r (heads, tokens), the logits that all queries share, and E / |R|^2 (heads, tokens, tokens), what is each query's own."""
    keys = now.unit @ layer.key * layer.scale
    shared = (now.centre @ layer.query + layer.query_bias)[:, None]
    return math.exp(now.log) * (shared @ keys.mT)[:, 0], now.unit @ layer.query @ keys.mT


def _difference(e: Tensor, r: Tensor, log: float) -> tuple[Tensor, float]:
    """P - 1 u^T as a matrix and the log of its factor; `e` is E without its factor exp(2 log)."""
    square, u = math.exp(2 * log), r.softmax(-1)[:, None]
    if float(e.abs().amax()) * square > SMALL:
        return _balanced((r[:, None] + square * e).softmax(-1) - u, u), 0.0
    e = e * _slope(square * e)  # expm1(E) / exp(2 log)
    z = e @ u.mT
    return _balanced(u * (e - z) / (1 + square * z), u), 2 * log


def _balanced(change: Tensor, u: Tensor) -> Tensor:
    """Rows that sum to 0, as they must: the entry at the key that holds most is what the others leave, for its own digits cancel."""
    top = u.argmax(-1, keepdim=True).expand(*change.shape[:-1], 1)
    others = change.scatter(-1, top, 0)
    return others.scatter(-1, top, -others.sum(-1, keepdim=True))


def _slope(t: Tensor) -> Tensor:
    """expm1(t) / t, 1 at 0."""
    return torch.where(t == 0, 1.0, torch.expm1(t) / t)


def _check_layers(x: Tensor, layers: Sequence[SelfAttention]) -> None:
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; give one text, (tokens, dim).")
    for number, layer in enumerate(layers):
        if layer.map.shape[-1] != x.shape[-1]:
            raise ValueError(f"layer {number} is for {layer.map.shape[-1]} dims and x has {x.shape[-1]}.")
        if layer.map.dtype != x.dtype:
            raise TypeError(f"layer {number} holds {layer.map.dtype} and x {x.dtype}; bring both to one, best float64.")
