"""Constructions: attention heads that are an identity, a permutation or a convolution, with a bound on what they miss it by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Construction:
    """Heads whose every query has one best key. They look at it alone as beta, the inverse temperature, goes to infinity: a LARGE beta
    is hard, where softmax(beta q k^T) becomes argmax; at beta 0 every key weighs the same.

    Every other logit is lower by `margin` at least, so no weight differs from the hard one by more than (tokens - 1) exp(-beta margin).
    """

    q: Float[Tensor, "heads tokens dim"]
    k: Float[Tensor, "heads tokens dim"]
    weights: Float[Tensor, "heads input output"]  # W_V W_O of each head
    best: Int[Tensor, "heads tokens"]  # the key of each query

    @property
    def logits(self) -> Float[Tensor, "heads tokens tokens"]:
        """At beta 1, less each row's largest: what is small here is told exactly before beta multiplies it."""
        logits = self.q @ self.k.mT
        return logits - logits.amax(-1, keepdim=True)

    @property
    def margin(self) -> float:
        """By how much each query's best key beats every other; infinite where there is one token, not above 0 where one is not best."""
        logits = self.q @ self.k.mT
        top = logits.gather(-1, self.best[..., None])
        others = logits.scatter(-1, self.best[..., None], -torch.inf)
        return float((top - others).min()) if logits.numel() else math.inf

    def attention(self, beta: float) -> Float[Tensor, "heads tokens tokens"]:
        """softmax(beta q k^T); beta may be infinite."""
        if beta == math.inf:
            return torch.nn.functional.one_hot(self.best, self.k.shape[-2]).to(self.q.dtype)
        return (beta * self.logits).softmax(-1)

    def __call__(self, x: Float[Tensor, "tokens input"], beta: float = math.inf) -> Float[Tensor, "tokens output"]:
        """The sum over heads of P x W."""
        return (self.attention(beta) @ x @ self.weights).sum(0)

    def bound(self, beta: float) -> float:
        """What |P - P at infinity| cannot exceed in any entry; a head's output cannot be off by more than this times its values' diameter."""
        others = self.k.shape[-2] - 1
        return others * math.exp(-beta * self.margin) if others > 0 else 0.0

    def beta(self, error: float) -> float:
        """The smallest beta whose bound is `error`."""
        if not error > 0:
            raise ValueError(f"an error of {error} was asked for; only an infinite beta has none, give one above 0.")
        return max(0.0, math.log(max(1, self.k.shape[-2] - 1) / error) / self.margin)


def identity_heads(x: Float[Tensor, "tokens dim"]) -> Construction:
    """One head that gives every token itself: q = k = x on the unit sphere and W_V W_O = I.

    Keys of one length are needed: a longer one may win another's query. The margin is 1 less the largest cosine between two tokens.

    >>> x = torch.randn(10, 16, dtype=torch.float64)
    >>> head = identity_heads(x)
    >>> error = (head.attention(60.0) - torch.eye(10)).abs().max()
    >>> bool(error <= head.bound(60.0)), torch.equal(head(x), x)
    (True, True)
    """
    return permutation_heads(x, torch.arange(len(x), device=x.device))


def permutation_heads(x: Float[Tensor, "tokens dim"], order: Int[Tensor, " tokens"]) -> Construction:
    """One head that gives token i the token order[i]: the queries are the keys, permuted.

    >>> x = torch.randn(4, 16)
    >>> torch.equal(permutation_heads(x, torch.tensor([2, 0, 3, 1]))(x), x[[2, 0, 3, 1]])
    True
    """
    order = torch.as_tensor(order, device=x.device)
    if order.shape != (len(x),) or not torch.equal(order.sort().values, torch.arange(len(x), device=x.device)):
        raise ValueError(f"order is {order.tolist()}; it must name each of the {len(x)} tokens once.")
    lengths = x.norm(dim=-1, keepdim=True)
    if bool((lengths == 0).any()):
        raise ValueError(f"token {int(lengths.argmin())} is zero and has no direction; give every token one (its position, say).")
    k = x / lengths
    made = Construction(k[order][None], k[None], torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[None], order[None])
    if made.margin <= 0:
        raise ValueError("two tokens look in one direction, so no query tells them apart; add their positions to them.")
    return made


def convolution_heads(
    kernel: Float[Tensor, "taps input output"], tokens: int, offsets: Sequence[int] | None = None
) -> Construction:
    """One head for each tap of a convolution: out_i = sum_h x_(i + offset_h) kernel_h, the edge tokens repeated beyond the ends.

    Head h has the logits -(j - i - offset_h)^2, less what no key changes, from two position dims, so that beta is how sharp it looks
    (alpha) and the margin is 1. The offsets are centred unless given; those of a causal convolution end at 0. Fewer heads that look by
    position cannot do it where the taps are linearly independent. Positions are exact in float32 up to 2000 tokens.

    >>> x, kernel = torch.randn(12, 3, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    >>> padded = torch.nn.functional.pad(x.mT[None], (2, 2), mode="replicate")
    >>> exact = torch.nn.functional.conv1d(padded, kernel.permute(2, 1, 0))[0].mT
    >>> torch.allclose(convolution_heads(kernel, 12)(x, beta=40.0), exact, atol=1e-12)
    True

    Cordonnier et al. 2020, On the Relationship between Self-Attention and Convolutional Layers.
    """
    taps = len(kernel)
    offsets = range(-((taps - 1) // 2), taps // 2 + 1) if offsets is None else offsets
    if len(offsets) != taps or taps == 0 or kernel.ndim != 3:
        raise ValueError(
            f"the kernel is {tuple(kernel.shape)} and has {len(offsets)} offsets; give (taps, input, output) and one a tap."
        )
    place = torch.arange(tokens, dtype=kernel.dtype, device=kernel.device)
    shift = torch.tensor(list(offsets), dtype=kernel.dtype, device=kernel.device)[:, None]
    middle = (tokens - 1) / 2  # small numbers lose less
    aim, here = place + shift - middle, place - middle  # (heads, tokens), (tokens,)
    q = torch.stack([2 * aim, -torch.ones_like(aim)], -1)
    k = torch.stack([here, here.square()], -1).expand(taps, -1, -1)
    return Construction(q, k, kernel, (place + shift).clamp(0, max(0, tokens - 1)).long())
