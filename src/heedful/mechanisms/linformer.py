"""Linformer: keys and values projected along the tokens onto a fixed number of them, by learned weights for each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Capture, Mask, Mechanism, Unsupported
from ..ops.hop import hop

if TYPE_CHECKING:
    from jaxtyping import Float

RIDGE = 1e-3  # of the fit, relative to the mean square of the weights
NAMES = ("on_keys", "on_values")


@dataclass(eq=False)
class Linformer(Mechanism):
    """A hop over `keys` projected keys with projected values; each head has its projections, which start as means of equal stretches.

    Column i of a projection is for the i-th real token of a text. Each row is divided by the share of it that lies on real tokens, and
    what its sum then lacks of one is spread over them evenly: a padded or shorter text is projected as if alone, and what all keys or all
    values share stays as it is. A text of no more than `keys` tokens is attended exactly. `fit` learns the projections from captures of one layer; a fixed position decides, so they suit
    attention that goes by position (first and last tokens, neighbourhoods) and not what goes by content.

    >>> q, k, v = torch.randn(3, 1, 2, 48, 16)
    >>> torch.allclose(Linformer(keys=8, length=64)(q, k, torch.ones_like(v)), torch.ones_like(v))
    True
    >>> exact = ((q @ k.mT) / 4).softmax(-1) @ v
    >>> torch.allclose(Linformer(keys=64, length=64)(q, k, v), exact, atol=1e-5)
    True

    Wang et al. 2020, Linformer: Self-Attention with Linear Complexity.
    """

    keys: int = 64
    length: int = 512  # the most tokens that a text may have

    supports: ClassVar[frozenset[str]] = frozenset({"keys", "cross"})
    instead: ClassVar[str] = "Softmax(), or Reformer() where all it needs is causality,"

    def __post_init__(self):
        for name in ("keys", "length"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        if self.keys > self.length:
            raise ValueError(f"{self.keys} projected keys of at most {self.length} save nothing; use keys={self.length} or fewer.")
        for name in NAMES:
            self.register_parameter(name, None)  # (heads, keys, length)

    def prepare(self, heads: int, head_dim: int) -> None:
        if self.on_keys is not None:
            was = len(self.on_keys)
            if was == heads:
                return
            if any(not torch.equal(rows.cpu(), self._means(was).to(rows.dtype)) for rows in (self.on_keys, self.on_values)):
                raise ValueError(f"this Linformer has learned for {was} heads; fit a new one for {heads} heads.")
        with torch.inference_mode(False):  # so that what a first look at a model makes can still learn
            rows = self._means(heads)
            self.on_keys, self.on_values = nn.Parameter(rows.clone()), nn.Parameter(rows)

    def _means(self, heads: int) -> Tensor:
        """The projections before anything is learned: each row the mean of a stretch."""
        stretch = torch.arange(self.length, device="cpu") * self.keys // self.length
        rows = (stretch == torch.arange(self.keys, device="cpu")[:, None]).float()
        return (rows / rows.sum(-1, keepdim=True)).repeat(heads, 1, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        if self.on_keys.device != q.device:
            self.to(q.device)
        high = torch.promote_types(v.dtype, torch.float32)
        k, values, real = self._packed(k.to(high), v.to(high), mask.keys)
        kept, weight = project(self.on_keys.to(high), k, real)
        means, _ = project(self.on_values.to(high), values, real)
        few = real.sum(-1) <= self.keys
        if few.any():  # there the keys themselves are no more work
            kept, means = (torch.where(few[:, None, None, None], self._first(t), p) for t, p in ((k, kept), (values, means)))
            own = kept.new_zeros(kept.shape[:-1]).masked_fill(~self._first(real[:, None, :, None])[..., 0], -torch.inf)
            weight = own if weight is None else torch.where(few[:, None, None], own, weight)
        return hop(q.to(high), kept, means, bias=weight, scale=scale)[0].to(v.dtype)

    def _first(self, t: Tensor) -> Tensor:
        """As many tokens as there are projected keys; nothing where there are fewer."""
        return F.pad(t[:, :, : self.keys], (0, 0, 0, max(0, self.keys - t.shape[2])))

    def _packed(self, k: Tensor, v: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values with each text's real tokens first and nothing in the padding, and which are real."""
        if real is None:
            real = torch.ones(1, k.shape[-2], dtype=torch.bool, device=k.device)
        else:
            k, v = (t.masked_fill(~real[:, None, :, None], 0) for t in (k, v))
            order = (~real).long().argsort(dim=-1, stable=True)
            if not torch.equal(order, torch.arange(order.shape[-1], device=order.device).expand_as(order)):
                k, v = (t.take_along_dim(order[:, None, :, None], -2) for t in (k, v))
                real = real.take_along_dim(order, -1)
        longest = int(real.sum(-1).max())
        if longest > self.length:
            raise Unsupported(
                f"Linformer(length={self.length}) has no projection for {longest} tokens; make it with length={longest} or more."
            )
        return k[:, :, : self.length], v[:, :, : self.length], real[:, : self.length]

    @torch.no_grad()
    def fit(self, captures: Sequence[Capture]) -> Self:
        """Learn both projections from captures of one layer, head by head and in closed form; some twenty long texts will do.

        The attention P of all texts stacked is nearly a combination of some of its columns: on_keys picks these positions, one pivot
        of P^T P after another. With A the attention over them alone, on_values is the least-squares solution of A on_values = P.
        """
        calls = [call for capture in captures for call in self._calls(capture)]
        calls = [call for call in calls if call[1].shape[1] > self.keys]  # shorter texts need no projection
        if not calls:
            raise ValueError(
                f"fit was given no capture of more than {self.keys} tokens; give those of one layer, hd.capture(model, texts)[layer]."
            )
        heads = calls[0][0].shape[0]
        if any(q.shape != (heads, q.shape[1], calls[0][0].shape[2]) for q, _, _ in calls):
            raise ValueError("fit was given captures of several head counts or dims; give those of one layer.")
        self.prepare(heads, calls[0][0].shape[2])
        for head in range(heads):
            own = [(q[head].float(), k[head].float(), scale) for q, k, scale in calls]
            self.on_keys[head], self.on_values[head] = fit_head(own, self.keys, self.length)
        return self

    def _calls(self, capture: Capture) -> Iterator[tuple[Tensor, Tensor, float]]:
        """(q, k, scale) of each text of a capture, real tokens only, one key head for each query head."""
        self.refuse(capture.mask.demands | {name for name in ("cap", "null") if getattr(capture, name) is not None})
        k = capture.k.repeat_interleave(capture.q.shape[1] // capture.k.shape[1], 1)
        asking = capture.mask.real(capture.q.shape[-2]) if capture.real is None else capture.real
        for i in range(len(k)):
            rows, columns = (slice(None) if t is None else t.expand(len(k), -1)[i] for t in (asking, capture.mask.keys))
            q, own = capture.q[i][:, rows], k[i][:, columns]
            if own.shape[1] > self.length:
                raise Unsupported(f"a capture has {own.shape[1]} tokens; make Linformer with length={own.shape[1]} or more.")
            yield q, own, capture.scale

    def _load_from_state_dict(self, state_dict, prefix, *args):  # a fresh Linformer has no projections to load into yet
        for name in NAMES:
            given = state_dict.get(prefix + name)
            if given is not None and (getattr(self, name) is None or len(getattr(self, name)) != len(given)):
                shape = (len(given), self.keys, self.length)
                setattr(self, name, nn.Parameter(torch.empty(shape, device=given.device, dtype=given.dtype)))
        super()._load_from_state_dict(state_dict, prefix, *args)


def project(
    rows: Float[Tensor, "heads keys length"], x: Float[Tensor, "batch heads tokens dim"], real: Tensor
) -> tuple[Float[Tensor, "batch heads keys dim"], Float[Tensor, "batch heads keys"] | None]:
    """Combine tokens by each row, completed to a sum of one over the real ones, with the log of the share of the row on these.

    None stands for a share of one in all rows.

    >>> rows = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]])
    >>> x, real = torch.tensor([[[[1.0], [2.0], [4.0]]]]), torch.ones(1, 3, dtype=torch.bool)
    >>> found, log_share = project(rows, x, real)
    >>> found.flatten().tolist(), log_share.exp().flatten().tolist()
    ([1.5, 4.0], [1.0, 0.5])
    """
    if x.shape[-2] == rows.shape[-1] and bool(real.all()):
        centre = x.mean(-2, keepdim=True)  # (batch, heads, 1, dim): what a row lacks of one goes there
        return rows @ (x - centre) + centre, None
    counted = real.to(x.dtype)[:, None, :, None]  # (batch, 1, tokens, 1)
    centre = (counted / counted.sum(-2, keepdim=True).clamp_min(1)).mT @ x
    found, sizes = rows[..., : x.shape[-2]] @ ((x - centre) * counted), rows.abs()
    share = (sizes[..., : x.shape[-2]] @ counted)[..., 0] / sizes.sum(-1).clamp_min(torch.finfo(x.dtype).tiny)
    divisor = share.masked_fill(share == 0, 1)
    return found / divisor[..., None] + centre, divisor.log().masked_fill(share == 0, -torch.inf)


def fit_head(calls: list[tuple[Tensor, Tensor, float]], keys: int, length: int) -> tuple[Tensor, Tensor]:
    """(on_keys, on_values) of one head from (q, k, scale) of each text."""
    gram = calls[0][0].new_zeros(length, length, dtype=torch.float64)
    for q, k, scale in calls:
        p = (q @ k.mT * scale).softmax(-1)
        gram[: len(k), : len(k)] += p.mT @ p
    picked = pivots(gram, keys)
    on_keys = gram.new_zeros(keys, length).scatter_(1, picked[:, None], 1)
    square, product = gram.new_zeros(keys, keys), gram.new_zeros(keys, length)
    for q, k, scale in calls:
        p, there = (q @ k.mT * scale).softmax(-1), picked < len(k)
        a = q.new_zeros(len(q), keys)
        a[:, there] = (q @ k[picked[there]].mT * scale).softmax(-1)
        square += a.mT @ a
        product[:, : len(k)] += a.mT @ (p - a @ on_keys[:, : len(k)].to(p))
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    return on_keys, on_keys + torch.linalg.solve(square, product)  # damped towards each position's own value; rows sum to one


def pivots(gram: Float[Tensor, "n n"], count: int) -> Tensor:
    """Columns of a matrix X, told by gram = X^T X, that in turn leave least of what those before them left: pivoted Cholesky.

    >>> x = torch.tensor([[3.0, 3.0, 0.0, 1.0], [0.0, 0.1, 2.0, 1.0]])
    >>> pivots(x.mT @ x, 2).tolist()
    [1, 2]
    """
    left, found = gram.diagonal().clone(), []
    factor = gram.new_zeros(count, len(gram))
    for i in range(count):
        best = int(left.argmax())
        found.append(best)
        column = gram[best] - factor[:i, best] @ factor[:i]
        factor[i] = column / left[best].sqrt() if left[best] > 1e-12 * gram.diagonal().max() else 0
        left = (left - factor[i].square()).clamp_min(0)
        left[found] = -1
    return torch.tensor(found, device=gram.device)
