"""Block: one layer of a transformer as plain matrices, its norms and its gate; rows are tokens, x @ w."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

SLOPES: dict[str, Callable[[Tensor], Tensor]] = {  # activation(z) = z * slope(z)
    "relu": lambda z: (z > 0).to(z.dtype),
    "gelu": lambda z: 0.5 * (1 + torch.erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "silu": torch.sigmoid,
    "quick_gelu": lambda z: torch.sigmoid(1.702 * z),
}


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm where `centred`, else RMSNorm.

    >>> x, norm = torch.randn(4, 8), Norm(torch.ones(8), torch.zeros(8), 1e-5, centred=True)
    >>> torch.allclose(norm(x), torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
    True
    """

    weight: Float[Tensor, " dim"]
    bias: Float[Tensor, " dim"]
    eps: float
    centred: bool

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def inverse(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... 1"]:
        """1 / sigma of each token."""
        return torch.rsqrt(self.centre(x).square().mean(-1, keepdim=True) + self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self.centre(x) * self.inverse(x) * self.weight + self.bias


@dataclass(frozen=True, eq=False)
class Heads:
    """The matrices of an attention layer by query head; a shared key head is repeated for each query head that reads it."""

    w_q: Float[Tensor, "heads dim dk"]
    w_k: Float[Tensor, "heads dim dk"]
    w_v: Float[Tensor, "heads dim dv"]
    w_o: Float[Tensor, "heads dv out"]
    b_q: Float[Tensor, "heads dk"]
    b_k: Float[Tensor, "heads dk"]
    b_v: Float[Tensor, "heads dv"]
    b_o: Float[Tensor, " out"]

    def project(self, x: Float[Tensor, "batch tokens dim"]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (batch, heads, tokens, dim of a head), before any rotary embedding."""
        pairs = ((self.w_q, self.b_q), (self.w_k, self.b_k), (self.w_v, self.b_v))
        q, k, v = (spread(x, w) + b[:, None] for w, b in pairs)
        return q, k, v

    def join(self, out: Float[Tensor, "batch heads tokens dv"]) -> Float[Tensor, "batch tokens out"]:
        """What the layer makes of its heads' outputs."""
        return gathered(out, self.w_o) + self.b_o


def spread(x: Float[Tensor, "... tokens dim"], w: Float[Tensor, "heads dim width"]) -> Float[Tensor, "... heads tokens width"]:
    """x @ w of every head, in one product."""
    heads, dim, width = w.shape
    return (x @ w.transpose(0, 1).reshape(dim, heads * width)).unflatten(-1, (heads, width)).transpose(-3, -2)


def gathered(x: Float[Tensor, "... heads tokens width"], w: Float[Tensor, "heads width out"]) -> Float[Tensor, "... tokens out"]:
    """The sum over heads of x @ w, in one product."""
    return x.transpose(-3, -2).flatten(-2) @ w.flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Mlp:
    """activation(x up) down, or with a `gate` activation(x gate) * (x up), down: GELU, ReLU and gated layers such as Llama's."""

    up: Float[Tensor, "dim hidden"]
    down: Float[Tensor, "hidden out"]
    b_up: Float[Tensor, " hidden"]
    b_down: Float[Tensor, " out"]
    activation: str = "gelu"
    gate: Float[Tensor, "dim hidden"] | None = None
    b_gate: Float[Tensor, " hidden"] | None = None

    def __post_init__(self):
        if self.activation not in SLOPES:
            raise ValueError(f"the activation {self.activation!r} is none of {', '.join(SLOPES)}; name one of them.")

    def open(self, x: Float[Tensor, "... dim"]) -> tuple[Float[Tensor, "... hidden"], Float[Tensor, "... hidden"]]:
        """x up + b_up, and the slope that multiplies it: once that is held fixed, the layer is linear."""
        raised = x @ self.up + self.b_up
        if self.gate is None:
            return raised, SLOPES[self.activation](raised)
        z = x @ self.gate if self.b_gate is None else x @ self.gate + self.b_gate
        return raised, z * SLOPES[self.activation](z)

    def __call__(self, x: Tensor) -> Tensor:
        raised, slope = self.open(x)
        return (raised * slope) @ self.down + self.b_down


@dataclass(frozen=True, eq=False)
class Block:
    """Attention and MLP, each with its norm and its skip: before (`pre`, gpt2, llama, vit) or after the sum (bert)."""

    name: str
    attention: str  # the layer's name among Captures
    heads: Heads
    mlp: Mlp
    norms: tuple[Norm, Norm]  # of attention and of the MLP
    pre: bool
    rotary: bool = False  # whether q and k are turned by their positions after `project`

    def attended(self, x: Tensor) -> Tensor:
        """What the attention layer reads, of what the block reads."""
        return self.norms[0](x) if self.pre else x

    def middle(self, x: Tensor, out: Float[Tensor, "batch heads tokens dv"]) -> Tensor:
        """The states between attention and MLP, from what the block reads and its heads' outputs."""
        y = x + self.heads.join(out)
        return y if self.pre else self.norms[0](y)

    def finish(self, middle: Tensor) -> Tensor:
        """What the block gives."""
        if self.pre:
            return middle + self.mlp(self.norms[1](middle))
        return self.norms[1](middle + self.mlp(middle))
