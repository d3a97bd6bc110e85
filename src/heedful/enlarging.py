"""Enlarging: a model with more dims in its heads, along the step that its loss asks for, or without changing what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .checkpoint import Checkpoint, load
from .exact.deciding import Search, line_search
from .exact.growing import NewDims, NewHead
from .growing import Loss, measure_growth, model_loss
from .huggingface.adopt import Matrices, adopt, matrices, of_layer, reshape, sizes_of
from .huggingface.layer import Sizes
from .huggingface.optimizers import Carrier
from .inputs import collate, read
from .learning import split
from .preserving import WIDEN, Wanted, preserve, zeros_behind
from .resize import adopted_copy as adopted
from .scan import evaluating
from .statistics.growth import Growth
from .texts import Item
from .widening import New, Widener, widen_heads

TOKENS = 2  # that growth statistics need for each dim of the model; many more give better steps
Choose = Callable[[Widener, str, int], NewDims]


@dataclass(frozen=True)
class Enlarged:
    """What became of a layer: its sizes, the damping of its step, and what it was predicted to take off the loss."""

    layer: str
    before: Sizes
    after: Sizes
    damping: float = math.nan  # where the step leaves the function as it is
    predicted: float = 0.0


@dataclass(frozen=True, eq=False)
class Grown:
    """A larger model, its changes by layer, the search along each step (of q.k, of v), and the held-out texts."""

    checkpoint: Checkpoint
    changes: tuple[Enlarged, ...]
    searches: Mapping[str, Search]
    held: list[Item]

    @property
    def predicted(self) -> float:
        """How much the loss was to fall, by the slope that one half of the texts has along the other half's step."""
        return sum(search.predicted for search in self.searches.values())

    @property
    def realised(self) -> float:
        """How much the loss on the held-out texts fell."""
        return sum(search.realised for search in self.searches.values())


def grow(
    model: str | Path | nn.Module | Checkpoint,
    texts: Any = None,
    qk: int = 0,
    v: int = 0,
    heads: int = 0,
    loss: Loss | None = None,
    held: Any = None,
    layers: Iterable[str] | None = None,
    limit: int | None = None,
    batch: int = 8,
    length: int | None = None,
) -> Grown:
    """A copy of the model with `qk` more dims of q.k and `v` more of v in every head of the layers, or with one more head (`heads=1`).

    The new dims take the step that the loss on the texts asks for, as far as texts that are held out (`held`, or every fifth) gain by
    it; where they gain less than a quarter of what was predicted, and always without texts, the model computes what it did.
    `loss(model, inputs)` is as in `measure_growth`.

    >>> import heedful as hd
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=99)).eval()
    >>> larger = hd.grow(model, qk=3).checkpoint.model
    >>> larger.encoder.layer[0].attention.self.query
    Linear(in_features=8, out_features=14, bias=True)
    >>> ids = torch.arange(9)[None]
    >>> torch.equal(larger(ids).last_hidden_state, model(ids).last_hidden_state)
    True
    """
    checkpoint, names = load(model), None if layers is None else list(layers)
    wanted = {
        what: dict.fromkeys(sizes_of(checkpoint.model, names), _count(what, n))
        for what, n in (("qk", qk), ("v", v), ("heads", heads))
        if n
    }
    if not wanted:
        raise ValueError("nothing is asked for: give qk or v, how many dims each head shall have more, or heads=1.")
    if heads > 1 or (heads and (qk or v or texts is None)):
        raise ValueError(
            "one head is added at a time, by texts, and alone: hd.grow(model, texts, heads=1); call it again for more."
        )
    if texts is None:
        ready = adopted(checkpoint)
        before = _sizes(ready.model, next(iter(wanted.values())))
        preserve(ready.model, wanted)
        return Grown(
            ready,
            tuple(
                Enlarged(n, own, now) for (n, own), now in zip(before.items(), _sizes(ready.model, before).values(), strict=True)
            ),
            {},
            [],
        )
    taught, others = split(checkpoint, texts, held, limit, length)
    ready, loss = adopted(checkpoint), loss or model_loss
    growths = measure_growth(ready, taught, loss, batch=batch, length=length, layers=names).layers
    enough(growths)
    inputs = [collate(ready, group) for group in read(ready, others, batch, length).batches]
    changes, searches = enlarge(ready.model, growths, wanted, lambda: mean_loss(ready.model, inputs, loss))
    return Grown(ready, changes, searches, others)


def enlarge(
    model: nn.Module,
    growths: Mapping[str, Growth],
    wanted: Mapping[str, Wanted],
    loss: Callable[[], float],
    optimizer: Optimizer | None = None,
    choose: Choose | None = None,
) -> tuple[tuple[Enlarged, ...], dict[str, Search]]:
    """Grow layers in place: `wanted` says by how much, of `qk` and of `v`; `loss` is that of the model as it then is, on held-out texts.

    `choose` gives the step of one layer; the best one unless said otherwise. An optimiser takes over the new parameters.
    """
    names, choose = list(dict.fromkeys(name for some in wanted.values() for name in some)), choose or _best
    for name in wanted.get("heads", ()):
        _takes_heads(model, name)
    with evaluating(model):
        carrier = None if optimizer is None else Carrier(model, optimizer, names)
        adopt(model, names)
        before, searches, told = _sizes(model, names), {}, dict.fromkeys(names, (math.nan, 0.0))
        for what, some in wanted.items():
            ready = {name: _widener(model, name, growths[name]) for name in some}
            ways = _ways(ready, what, some, choose)
            searches[what] = _searched(model, ways, loss)
            if searches[what].accepted:
                for name, size in _sizes_at(ways, searches[what].gamma).items():
                    told[name] = ways[name].step.damping, told[name][1] + size * _worth(ways[name].step)
    if carrier is not None:
        carrier.settle(partial(zeros_behind, wanted, before))
    after = _sizes(model, names)
    return tuple(Enlarged(name, before[name], after[name], *told[name]) for name in names), searches


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[dict[str, Any]], loss: Loss) -> float:
    """The mean loss over ready-made inputs, dropout off."""
    total = count = 0.0
    with evaluating(model):
        for inputs in batches:
            value, many = loss(model, inputs)
            total, count = total + float(value), count + many
    return total / max(count, 1)


def enough(growths: Mapping[str, Growth]) -> None:
    """Refuse statistics of too few tokens, or of texts that the loss says nothing about."""
    for name, growth in growths.items():
        needed, seen = TOKENS * growth.query_gram.shape[-1], int(growth.tokens.sum())
        if seen < needed:
            raise ValueError(
                f"{seen} tokens were read, too few for {name}: its states have {growth.query_gram.shape[-1] - 1} dims, which need {needed} "
                f"tokens at least ({TOKENS} for each); give more texts, or none, and the model grows without changing what it computes."
            )


@dataclass(frozen=True, eq=False)
class _Way:
    """A layer's step, and its matrices and sizes so far along it."""

    step: NewDims
    at: Callable[[float], tuple[Matrices, Sizes]]


def _takes_heads(model: nn.Module, name: str) -> None:
    """Refuse heads where they are not free to be more."""
    places, _, sizes = of_layer(model, name)
    if len(sizes.qk) != sizes.heads:
        raise ValueError(
            f"{sizes.heads} query heads of {name} share {len(sizes.qk)} key heads; heads are added to layers where each has its own."
        )
    if places.biased:
        raise ValueError(f"{name} adds a learned bias by head, which a new head would lack; grow qk or v.")


def _best(one: Widener, what: str, count: int) -> NewDims:
    return one.qk(count) if what == "qk" else one.v(count)


def _ways(ready: Mapping[str, Widener], what: str, some: Wanted, choose: Choose) -> dict[str, _Way]:
    """The step of each layer, and how its matrices become larger along it."""
    found = {}
    for name, one in ready.items():
        if what == "heads":
            head = one.head(one.sizes.v[-1])
            found[name] = _Way(head.dims, partial(_with_head, one, head))
        else:
            step = choose(one, what, int(some[name]))
            found[name] = _Way(step, partial(_with_dims, one, what, step))
    return found


def _with_dims(one: Widener, what: str, step: NewDims, size: float) -> tuple[Matrices, Sizes]:
    own, rms = (size / one.scale, one.query_rms) if what == "qk" else (size, one.value_rms)
    return WIDEN[what](one.found, one.sizes, New.of(step, own, rms))


def _with_head(one: Widener, head: NewHead, size: float) -> tuple[Matrices, Sizes]:
    like = None if head.pattern == "uniform" else int(head.pattern.removeprefix("copy") or 0)
    return widen_heads(one.found, one.sizes, New.of(head.dims, size, one.value_rms), like)


def _searched(model: nn.Module, ways: Mapping[str, _Way], loss: Callable[[], float]) -> Search:
    """Go along the steps of all layers together as far as the loss falls as it should, and leave the model there."""

    def go(size: float) -> None:
        for name, own in _sizes_at(ways, size).items():
            reshape(model, name, *ways[name].at(own))

    def loss_at(size: float) -> float:
        go(size)
        return loss()

    found = line_search(loss_at, math.hypot(*(_worth(way.step) for way in ways.values())), loss())
    go(found.gamma)
    return found


def _sizes_at(ways: Mapping[str, _Way], size: float) -> dict[str, float]:
    """How far each layer goes: along the joint slope, which is steepest where every layer's own step has length 1."""
    whole = math.hypot(*(_worth(way.step) for way in ways.values()))
    return {name: size * _worth(way.step) / whole if whole > 0 else 0.0 for name, way in ways.items()}


def _worth(step: NewDims) -> float:
    """The slope that texts beyond those of the step will see."""
    slope = step.slope if math.isnan(step.judged) else step.judged
    return max(slope, 0.0) if bool(step.kept.any()) else 0.0


def _widener(model: nn.Module, name: str, growth: Growth) -> Widener:
    module: Any = model.get_submodule(name)
    return Widener(name, matrices(model, name), module.sizes, growth, float(module.scaling))


def _sizes(model: nn.Module, names: Iterable[str]) -> dict[str, Sizes]:
    return {name: model.get_submodule(name).sizes for name in names}  # type: ignore[misc]


def _count(what: str, count: int) -> int:
    if count < 1:
        raise ValueError(f"{what} is {count}; give how many dims each head shall have more, at least 1, or hd.shrink the model.")
    return count
