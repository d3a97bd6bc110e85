"""The derivative of a whole attention layer by its tokens: products with the Jacobian and its transpose, without the Jacobian."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .call_derivative import CallDerivative
from .layer import Layer, check_finite, join, split

if TYPE_CHECKING:
    from jaxtyping import Float


class Derivative:
    """A layer near the tokens x, as a linear map: `push` moves the tokens, `pull` brings a gradient back. O(tokens) memory.

    >>> x, w = torch.randn(6, 8), torch.randn(4, 8, 8)
    >>> near = Derivative(x, *w, heads=2)
    >>> dx, g = torch.randn(2, 6, 8)
    >>> torch.allclose((g * near.push(dx)).sum(), (near.pull(g) * dx).sum(), rtol=1e-3, atol=1e-3)
    True
    """

    @torch.no_grad()
    def __init__(self, x: Float[Tensor, "tokens dim"], *layer: Any, **setting: Any):
        self.layer = Layer.of(*layer, **setting)
        self.shape = (len(x), self.layer.w_o.shape[1])
        self.inputs = x.shape
        self.call = CallDerivative(self.layer.call(x))

    @torch.no_grad()
    def push(self, dx: Tensor | None = None, d_context: Tensor | None = None) -> Float[Tensor, "tokens outputs"]:
        """How the outputs move when the tokens do, and the context's."""
        layer = self.layer
        moving = dx if layer.context is None else d_context
        self._check("dx", dx, self.inputs)
        self._check("d_context", d_context, () if layer.context is None else layer.context.shape)
        dq = None if dx is None else split(dx @ layer.w_q, layer.heads)
        dk, dv = (None if moving is None else split(moving @ w, layer.key_heads) for w in (layer.w_k, layer.w_v))
        return join(self.call.push(dq, dk, dv)) @ layer.w_o

    @torch.no_grad()
    def pull(self, grad: Float[Tensor, "tokens outputs"]) -> Float[Tensor, "tokens dim"]:
        """The gradient of the tokens for a gradient of the outputs; the context is held still."""
        (dq, dk, dv), layer = self._pulled(grad), self.layer
        found = join(dq) @ layer.w_q.mT
        if layer.context is None:
            found.addmm_(join(dk), layer.w_k.mT).addmm_(join(dv), layer.w_v.mT)
        return found

    @torch.no_grad()
    def pull_context(self, grad: Float[Tensor, "tokens outputs"]) -> Float[Tensor, "keys source"]:
        """The gradient of what is attended to: of the context, of x as keys and values alone where there is none."""
        _, dk, dv = self._pulled(grad)
        return join(dk) @ self.layer.w_k.mT + join(dv) @ self.layer.w_v.mT

    def _pulled(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._check("grad", grad, self.shape)
        return self.call.pull(split(grad @ self.layer.w_o.mT, self.layer.heads))

    def _check(self, name: str, given: Tensor | None, shape: tuple[int, ...]) -> None:
        if given is not None and given.shape != torch.Size(shape):
            needed = tuple(shape) or "no such thing, for the layer has no context"
            raise ValueError(f"{name} is {tuple(given.shape)} but must be {needed}.")
        check_finite(name, given)


def attention_jvp(
    x: Float[Tensor, "tokens dim"], dx: Float[Tensor, "tokens dim"], *layer: Any, **setting: Any
) -> Float[Tensor, "tokens outputs"]:
    """How the outputs of a `Layer`, or of its fields, move when its tokens x move by dx; a context is held still.

    >>> x, dx, w = torch.randn(6, 8), torch.randn(6, 8), torch.randn(4, 8, 8)
    >>> layer = Layer(*w, heads=2)
    >>> wanted = torch.func.jvp(layer, (x,), (dx,))[1]
    >>> torch.allclose(attention_jvp(x, dx, *w, heads=2), wanted, rtol=1e-3, atol=1e-3)
    True
    """
    return Derivative(x, *layer, **setting).push(dx)


def attention_vjp(
    x: Float[Tensor, "tokens dim"], grad: Float[Tensor, "tokens outputs"], *layer: Any, **setting: Any
) -> Float[Tensor, "tokens dim"]:
    """The gradient of the tokens x of a `Layer`, or of its fields, for a gradient of its outputs; a context is held still.

    >>> x, grad, w = torch.randn(6, 8), torch.randn(6, 8), torch.randn(4, 8, 8)
    >>> wanted = torch.func.vjp(Layer(*w, heads=2), x)[1](grad)[0]
    >>> torch.allclose(attention_vjp(x, grad, *w, heads=2), wanted, rtol=1e-3, atol=1e-3)
    True
    """
    return Derivative(x, *layer, **setting).pull(grad)
