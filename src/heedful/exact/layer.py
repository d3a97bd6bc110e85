"""Layer: one attention layer as its weights, and the call that it makes of some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention import Capture
from ..mask import Mask
from ..ops import hop
from .block import Heads

if TYPE_CHECKING:
    from jaxtyping import Float

MATRICES = ("w_q", "w_k", "w_v", "w_o")


@dataclass(frozen=True, eq=False)
class Layer:
    """An attention layer: queries x w_q + b_q, keys and values of x (of `context`, where it is given), heads side by side, out w_o + b_o.

    The sizes say the rest: w_q is (dim, heads * size), w_o (heads * width, outputs), and w_k narrower than w_q where query heads share
    key heads. `mask` is a heedful Mask, or a (queries, keys) or (heads, queries, keys) tensor: boolean (True is seen), or added.

    >>> x, w = torch.randn(6, 8), torch.randn(4, 8, 8)
    >>> layer = Layer(*w, heads=2, mask=Mask(causal=True))
    >>> layer(x).shape, layer.call(x).q.shape
    (torch.Size([6, 8]), torch.Size([1, 2, 6, 4]))
    """

    w_q: Float[Tensor, "dim queried"]
    w_k: Float[Tensor, "source keyed"]
    w_v: Float[Tensor, "source valued"]
    w_o: Float[Tensor, "joined outputs"]
    heads: int = 1
    scale: float | None = None  # 1 / sqrt(size of a query head) unless given
    mask: Mask | Tensor | None = None
    context: Float[Tensor, "keys source"] | None = None  # other tokens that are attended to (cross-attention)
    biases: Sequence[Tensor | None] | None = None  # of q, k, v and o

    @classmethod
    def of(cls, *given: Any, **setting: Any) -> Layer:
        """The layer itself where one is given, or one of these weights."""
        if len(given) == 1 and isinstance(given[0], Layer):
            if setting:
                raise TypeError(f"a Layer has its {', '.join(setting)} already; give it another by dataclasses.replace.")
            return given[0]
        return cls(*given, **setting)

    def __post_init__(self):
        shapes = ", ".join(f"{name} {tuple(getattr(self, name).shape)}" for name in MATRICES)
        if any(getattr(self, name).ndim != 2 for name in MATRICES):
            raise ValueError(f"weights are (input, output) matrices; got {shapes}.")
        size, left = divmod(self.w_q.shape[1], self.heads) if self.heads > 0 else (0, 1)
        if left or size == 0 or self.w_o.shape[0] % self.heads:
            raise ValueError(f"{self.heads} heads do not divide the columns of w_q and the rows of w_o evenly; got {shapes}.")
        shared, left = divmod(self.heads, max(1, self.w_k.shape[1] // size))
        if left or self.w_k.shape[1] * shared != self.w_q.shape[1] or self.w_v.shape[1] * shared != self.w_o.shape[0]:
            raise ValueError(
                f"keys must be as wide as queries, and values as the rows of w_o, for {self.heads} heads; got {shapes}."
            )
        if self.w_k.shape[0] != self.w_v.shape[0]:
            raise ValueError(f"keys and values are made of the same tokens; got {shapes}.")
        if self.context is not None and (self.context.ndim != 2 or self.context.shape[1] != self.w_k.shape[0]):
            raise ValueError(f"the context is {tuple(self.context.shape)}; {shapes} need (keys, {self.w_k.shape[0]}).")
        if self.context is None and self.w_k.shape[0] != self.w_q.shape[0]:
            raise ValueError(f"without a context all of w_q, w_k and w_v read the same tokens; got {shapes}.")
        self._check_biases()
        for name in ("context", *MATRICES):
            check_finite(name, getattr(self, name))

    def _check_biases(self) -> None:
        if self.biases is None:
            return
        if len(self.biases) != 4:
            raise ValueError(f"{len(self.biases)} biases were given; give those of q, k, v and o, None where there is none.")
        for name, bias in zip(MATRICES, self.biases, strict=True):
            if bias is not None and bias.shape != getattr(self, name).shape[1:]:
                raise ValueError(f"the bias of {name} is {tuple(bias.shape)} but must have {getattr(self, name).shape[1]} entries.")

    @property
    def key_heads(self) -> int:
        return self.w_k.shape[1] // (self.w_q.shape[1] // self.heads)

    @property
    def by_head(self) -> Heads:
        """Its matrices and biases for each query head; a shared key head is repeated, a bias that is not there is zero.

        >>> Layer(torch.ones(6, 8), torch.ones(6, 4), torch.ones(6, 4), torch.ones(8, 6), heads=2).by_head.w_k.shape
        torch.Size([2, 6, 4])
        """
        pairs = zip(MATRICES, self.biases or (None,) * 4, strict=True)
        b_q, b_k, b_v, b_o = (getattr(self, w).new_zeros(getattr(self, w).shape[1]) if b is None else b for w, b in pairs)
        w_q, b_q = (_by_head(t, self.heads, self.heads) for t in (self.w_q, b_q))
        w_k, b_k, w_v, b_v = (_by_head(t, self.key_heads, self.heads) for t in (self.w_k, b_k, self.w_v, b_v))
        return Heads(w_q, w_k, w_v, self.w_o.unflatten(0, (self.heads, -1)), b_q, b_k, b_v, b_o)

    def call(self, x: Float[Tensor, "tokens dim"]) -> Capture:
        """The call that the layer makes of x, as one text."""
        if x.ndim != 2 or x.shape[1] != self.w_q.shape[0] or len(x) == 0:
            raise ValueError(
                f"x is {tuple(x.shape)} but w_q reads {self.w_q.shape[0]} dims; give (tokens, {self.w_q.shape[0]}), a token or more."
            )
        check_finite("x", x)
        source = x if self.context is None else self.context
        b_q, b_k, b_v, _ = self.biases or (None,) * 4
        q, k, v = _moved(x @ self.w_q, b_q), _moved(source @ self.w_k, b_k), _moved(source @ self.w_v, b_v)
        mask = self._mask(len(x), len(source))
        mask.check(len(x), len(source), 1)
        scale = (q.shape[1] // self.heads) ** -0.5 if self.scale is None else self.scale
        return Capture("layer", split(q, self.heads), split(k, self.key_heads), split(v, self.key_heads), mask, scale)

    def __call__(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens outputs"]:
        """What the layer gives for x."""
        call = self.call(x)
        out = hop(call.q, call.k, call.v, mask=call.mask, scale=call.scale)[0]
        return _moved(join(out) @ self.w_o, None if self.biases is None else self.biases[3])

    def _mask(self, queries: int, keys: int) -> Mask:
        if self.mask is None or isinstance(self.mask, Mask):
            return self.mask or Mask()
        given = self.mask
        if (
            given.ndim not in (2, 3)
            or given.shape[-2:] != (queries, keys)
            or (given.ndim == 3 and len(given) not in (1, self.heads))
        ):
            raise ValueError(
                f"a mask of shape {tuple(given.shape)} does not fit; give ({queries}, {keys}), one for each head, or a Mask."
            )
        if given.dtype == torch.bool:
            given = torch.zeros(given.shape, device=given.device).masked_fill_(~given, -torch.inf)
        if bool(given.isnan().any()):
            raise ValueError(
                f"the mask holds nan at {given.isnan().nonzero()[0].tolist()}; add numbers to the logits, or -inf to hide."
            )
        return Mask(bias=given.view(1, -1, queries, keys))


def _by_head(x: Tensor, own: int, heads: int) -> Tensor:
    """Columns by head, heads first: `own` heads as `heads`, each repeated for those that share it."""
    return x.unflatten(-1, (own, -1)).movedim(-2, 0).repeat_interleave(heads // own, 0)


def split(x: Float[Tensor, "tokens joined"], heads: int) -> Float[Tensor, "1 heads tokens size"]:
    """Heads that lie side by side, one after the other."""
    return x.view(1, x.shape[0], heads, -1).transpose(1, 2)


def join(x: Float[Tensor, "1 heads tokens size"]) -> Float[Tensor, "tokens joined"]:
    """Heads side by side again."""
    return x[0].transpose(0, 1).flatten(1)


def check_finite(name: str, x: Tensor | None) -> None:
    """Refuse what holds nan or an infinity, and say where the first one is."""
    if x is not None and not bool(x.sum().isfinite()) and not bool(x.isfinite().all()):  # the sum is the quicker look
        place = (~x.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name} holds {x[tuple(place)].item()} at {place}; exact results need finite numbers.")


def _moved(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
