"""Shortening: one attention layer with fewer dims, from its matrices and the moments of what passed through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .exact.truncation import Factors, Pairs, frequency_pairs, logit_factors, mixing_again, value_factors
from .huggingface.adopt import Matrices
from .huggingface.layer import Sizes
from .rules import Ladder
from .statistics import Moments


@dataclass(frozen=True, eq=False)
class Seen:
    """Second moments, means over tokens in float64: of queries, of keys about their mean, of outputs, and the mean output."""

    queries: Tensor  # (heads, dim, dim)
    keys: Tensor  # (key heads, dim, dim)
    outputs: Tensor  # (heads, width, width)
    mean: Tensor  # (heads, width)

    @classmethod
    def of(cls, moments: Moments) -> Seen:
        """From sums over texts."""
        per = moments.count
        return cls(
            moments.queries.cpu() / per.cpu(),
            moments.keys.cpu() / moments.sources.cpu(),
            moments.outputs.cpu() / per.cpu(),
            moments.output_sums.cpu() / per.cpu(),
        )

    @classmethod
    def of_weights(cls, found: Matrices, sizes: Sizes) -> Seen:
        """As if inputs were white: what plain truncation of the weights minimises; the queries' bias is one more input."""
        q = found.q if found.b_q is None else torch.cat([found.q, found.b_q[:, None]], 1)
        parts = ((q, sizes.queries), (found.k, sizes.qk), (found.v, sizes.v))
        q, k, v = (_grams(weight, dims) for weight, dims in parts)
        v = v.repeat_interleave(sizes.heads // len(v), 0)
        return cls(q, k, v, v.new_zeros(v.shape[:2]))


def _grams(weight: Tensor, dims: Sequence[int]) -> Tensor:
    found = torch.zeros(len(dims), max(dims), max(dims), dtype=torch.float64)
    for one, rows in zip(found, weight.detach().cpu().double().split(list(dims)), strict=True):
        one[: len(rows), : len(rows)] = rows @ rows.mT
    return found


@dataclass(frozen=True, eq=False)
class Lost:
    """Mean squares of what a change adds to the logits and to the layer's output, beside those of the whole."""

    qk: float = 0.0
    qk_of: float = 0.0
    v: float = 0.0
    v_of: float = 0.0

    @property
    def logits(self) -> float:
        """Relative root mean square error of the logits."""
        return (self.qk / self.qk_of) ** 0.5 if self.qk_of > 0 else 0.0

    @property
    def output(self) -> float:
        """Relative root mean square error of the output, by head."""
        return (self.v / self.v_of) ** 0.5 if self.v_of > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Shortener:
    """Everything that can be asked of one layer: what its dims are worth, and its matrices with fewer of them."""

    name: str
    found: Matrices
    sizes: Sizes
    seen: Seen
    scale: float = 1.0

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.sizes.heads // len(self.sizes.qk)

    def _queries(self, head: int) -> Tensor:
        dim = self.sizes.qk[head]
        return self.seen.queries[head * self.group : (head + 1) * self.group, :dim, :dim]

    def _keys(self, head: int) -> Tensor:
        dim = self.sizes.qk[head]
        return self.seen.keys[head, :dim, :dim]

    def _outputs(self, head: int, about: Tensor | None) -> Tensor:
        """Second moments of the outputs of a group's heads about `about` (heads, width)."""
        own, dim = slice(head * self.group, (head + 1) * self.group), self.sizes.v[head]
        raw, mean = self.seen.outputs[own, :dim, :dim], self.seen.mean[own, :dim]
        if about is None:
            return raw
        off = about[own, :dim]
        return raw - mean[:, :, None] * off[:, None] - off[:, :, None] * mean[:, None] + off[:, :, None] * off[:, None]

    def _mixing(self, head: int) -> Tensor:
        """(group, dims, width)."""
        parts = self.found.o.detach().cpu().double().split(list(self.sizes.values), 1)
        return torch.stack([part.mT for part in parts[head * self.group : (head + 1) * self.group]])

    @property
    def centre(self) -> Tensor | None:
        """The mean output, where the layer's last bias can stand in for it."""
        return None if self.found.b_o is None else self.seen.mean

    @cached_property
    def free(self) -> list[Factors]:
        """The dims of q.k that do not turn, by key head."""
        found = []
        for head in range(len(self.sizes.qk)):
            start = 0 if self.sizes.pairs is None else 2 * len(self.sizes.pairs[head])
            found.append(logit_factors(self._queries(head)[:, start:, start:], self._keys(head)[start:, start:]))
        return found

    @cached_property
    def pairs(self) -> list[Pairs]:
        """Those that turn."""
        found = []
        for head, kept in enumerate(self.sizes.pairs or ()):
            turned = 2 * len(kept)
            found.append(frequency_pairs(self._queries(head)[:, :turned, :turned], self._keys(head)[:turned, :turned], len(kept)))
        return found

    @cached_property
    def values(self) -> list[Factors]:
        return [value_factors(self._outputs(head, self.centre), self._mixing(head)) for head in range(len(self.sizes.v))]

    def qk_ladders(self) -> list[Ladder]:
        """What the dims of q.k are worth: the variance of the scaled logits that each brings, over heads.

        Beside other heads it counts less where a head's logits are large, by their standard deviation: between the absolute error, which
        spends too much on sharp heads, and the relative one (measured on MiniLM: cosine .9835 absolute, .9875 so, .9877 nearly relative).
        """
        found = []
        for head, factors in enumerate(self.free):
            parts = [(self.pairs[head].loss, 2)] if self.sizes.pairs is not None else []
            parts += [(factors.loss, 1)] if len(factors.loss) else []
            deviation = max(float(sum(loss.sum() for loss, _ in parts)), 1e-30) ** 0.5
            found += [Ladder(self.name, head, tuple((self.scale * loss / deviation).tolist()), cost) for loss, cost in parts]
        return found

    def v_ladders(self) -> list[Ladder]:
        """What the dims of v are worth: the share of the layer's output that each brings."""
        whole = sum(float(f.loss.sum()) for f in self.values) or 1.0
        return [Ladder(self.name, h, tuple((f.loss / whole).tolist())) for h, f in enumerate(self.values)]

    def keeping(self, pairs: Sequence[Sequence[int]]) -> Shortener:
        """The same, with these frequency pairs the best of each key head."""
        named = replace(self)
        order = []
        for own, kept, found in zip(self.sizes.pairs or (), pairs, self.pairs, strict=True):
            places = [own.index(p) for p in kept]
            order.append(replace(found, order=torch.tensor([*places, *(i for i in found.order.tolist() if i not in places)])))
        named.__dict__["pairs"] = order
        return named

    def qk(self, pairs: Sequence[int], free: Sequence[int]) -> Cut:
        """With so many frequency pairs and so many other dims kept in each key head."""
        found, kept = self.found, [self._qk_head(h, n, m) for h, (n, m) in enumerate(zip(pairs, free, strict=True))]
        q, b_q = _mapped(found.q, found.b_q, self.sizes.queries, [one for left, _, _ in kept for one in left])
        k, b_k = _mapped(found.k, found.b_k, self.sizes.qk, [right for _, right, _ in kept])
        turned = None if self.sizes.pairs is None else tuple(tuple(own) for _, _, own in kept)
        sizes = replace(self.sizes, qk=tuple(right.shape[1] for _, right, _ in kept), pairs=turned)
        changed = replace(found, q=q, k=k, b_q=b_q, b_k=b_k if turned is not None else None)
        return Cut(changed, sizes, logits=[left @ right.mT for left, right, _ in kept])

    def _qk_head(self, head: int, pairs: int, free: int) -> tuple[Tensor, Tensor, list[int]]:
        """Maps of the queries (group, dim, rank) and keys (dim, rank) of a key head, and its frequency pairs."""
        dim, turned = self.sizes.qk[head], 0
        factors, own = self.free[head], []
        left, right = torch.zeros(self.group, dim, 0, dtype=torch.float64), torch.zeros(dim, 0, dtype=torch.float64)
        if self.sizes.pairs is not None:
            turned, found = 2 * len(self.sizes.pairs[head]), self.pairs[head]
            places = found.order[:pairs].sort().values
            chosen = torch.eye(dim, dtype=torch.float64)[:, torch.cat([places, places + turned // 2])]
            left, right = chosen * found.gains(pairs).repeat(1, 2)[:, None], chosen
            own = [self.sizes.pairs[head][i] for i in places.tolist()]
        if free == dim - turned:  # as they are
            rest = torch.eye(dim, dtype=torch.float64)[:, turned:]
            return torch.cat([left, rest.expand(self.group, -1, -1)], -1), torch.cat([right, rest], -1), own
        above = (0, 0, turned, 0)
        left = torch.cat([left, torch.nn.functional.pad(factors.left[..., :free], above)], -1)
        return left, torch.cat([right, torch.nn.functional.pad(factors.right[:, :free], above)], -1), own

    def v(self, ranks: Sequence[int]) -> Cut:
        """With so many dims of v kept in each key head; the last bias takes up the values' bias and the mean of what is lost."""
        found, kept = self.found, [self._v_head(h, rank) for h, rank in enumerate(ranks)]
        folds = self.centre is not None
        v, b_v = _mapped(found.v, None if folds else found.b_v, self.sizes.v, [left for left, _ in kept])
        mixing = [one for _, again in kept for one in again]
        o = torch.cat([one.mT for one in mixing], 1)
        lost = [left @ one for left, again in kept for one in again]
        whole = [one for head in range(len(ranks)) for one in self._mixing(head)]
        off = [before - after for before, after in zip(whole, lost, strict=True)]
        b_o = None if found.b_o is None else found.b_o.detach().cpu().double() + self._folded(whole, off)
        sizes = replace(self.sizes, v=tuple(left.shape[1] for left, _ in kept))
        return Cut(replace(found, v=v, o=o, b_v=b_v, b_o=b_o), sizes, outputs=off)

    def _v_head(self, head: int, rank: int) -> tuple[Tensor, Tensor]:
        """The map of the values (dim, rank) and the mixing matrices (group, rank, width)."""
        mixing, dim = self._mixing(head), self.sizes.v[head]
        if rank == dim:
            return torch.eye(dim, dtype=torch.float64), mixing
        left = self.values[head].left[0, :, :rank]
        return left, mixing_again(self._outputs(head, self.centre), left, mixing)[0]

    def _folded(self, whole: list[Tensor], off: list[Tensor]) -> Tensor:
        """What the last bias takes up: the values' bias through the matrices that were, and what is lost of the mean beyond it."""
        total = torch.zeros(whole[0].shape[1], dtype=torch.float64)
        bias = None if self.found.b_v is None else self.found.b_v.detach().cpu().double().split(list(self.sizes.v))
        for head, (before, lost) in enumerate(zip(whole, off, strict=True)):
            own = torch.zeros(len(before), dtype=torch.float64) if bias is None else bias[head // self.group]
            total += own @ before + (self.seen.mean[head, : len(before)] - own) @ lost
        return total

    def lost(self, cut: Cut, about: Tensor | None = None) -> Lost:
        """What a cut loses on the data of these moments; `about` is the mean output that its bias stands in for."""
        qk = qk_of = v = v_of = 0.0
        about = self.centre if about is None else about
        for head in range(len(self.sizes.qk)):
            q, k, o = self._queries(head), self._keys(head), self._outputs(head, about)
            qk_of += float((q * k).sum()) * self.scale**2
            whole = self._mixing(head)
            v_of += float((whole * (o @ whole)).sum())
            if cut.logits is not None:
                off = torch.eye(len(k), dtype=torch.float64) - cut.logits[head]
                qk += float(((off.mT @ q @ off) * k).sum()) * self.scale**2
            if cut.outputs is not None:
                gone = torch.stack(cut.outputs[head * self.group : (head + 1) * self.group])
                v += float((gone * (o @ gone)).sum())
        return Lost(max(qk, 0.0), qk_of, max(v, 0.0), v_of)


@dataclass(frozen=True, eq=False)
class Cut:
    """A layer's matrices with fewer dims, their sizes, and what became of q.k (by key head: group, dim, dim) and of the mixing."""

    matrices: Matrices
    sizes: Sizes
    logits: list[Tensor] | None = None
    outputs: list[Tensor] | None = None


def _mapped(weight: Tensor, bias: Tensor | None, dims: Sequence[int], maps: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Rows and bias of heads of `dims` after each head's map (dim, rank)."""
    rows = weight.detach().cpu().double().split(list(dims))
    made = torch.cat([one.mT @ own for one, own in zip(maps, rows, strict=True)])
    if bias is None:
        return made, None
    entries = bias.detach().cpu().double().split(list(dims))
    return made, torch.cat([one.mT @ own for one, own in zip(maps, entries, strict=True)])
