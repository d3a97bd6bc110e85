"""Sizes: what the layers of a model were, what they are, and the plan that tells the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..plan import Native, Plan, Resize, each
from .adopt import sizes_of
from .layer import Resized, Sizes


def natives(model: nn.Module) -> dict[str, Native]:
    """What the layers of a model were before any change."""
    found = sizes_of(model)
    return {
        name: native_of(module if isinstance(module := model.get_submodule(name), Resized) else own) for name, own in found.items()
    }


def native_of(own: Resized | Sizes) -> Native:
    """What a layer was before any change."""
    first = own if isinstance(own, Sizes) else own.first
    turned = None if first.pairs is None else len(first.pairs[0])
    return Native(first.heads, len(first.qk), first.qk[0], first.v[0], turned)


def plan_of(model: Any) -> Plan | None:
    """The plan that made a model what it is; None where no layer was resized."""
    resized = {name: module for name, module in model.named_modules() if isinstance(module, Resized)}
    if not resized:
        return None
    layers = {name: Resize(_short(m.sizes.qk), _short(m.sizes.v), m.sizes.pairs, _more(m)) for name, m in resized.items()}
    return Plan(
        layers, {name: native_of(m) for name, m in resized.items()}, getattr(getattr(model, "config", None), "model_type", None)
    )


def sizes_after(sizes: Sizes, change: Resize) -> Sizes:
    """The sizes of a layer once a change with named pairs is made."""
    heads = sizes.heads if change.heads is None else change.heads
    count = len(sizes.qk) * heads // sizes.heads
    qk = sizes.qk if change.qk is None else each(change.qk, count)
    v = sizes.v if change.v is None else each(change.v, count)
    return replace(sizes, heads=heads, qk=qk, v=v, pairs=sizes.pairs if change.pairs is None else change.pairs)


def parted(plan: Plan, sizes: Mapping[str, Sizes]) -> tuple[Plan, dict[str, dict[str, tuple[int, ...]]]]:
    """A plan as what gets no larger, and how many dims more each key head gets of q.k and of v.

    >>> less, more = parted(Plan({"a": Resize(qk=6, v=2)}), {"a": Sizes(2, (4, 4), (3, 3))})
    >>> less.layers["a"], more
    (Resize(qk=(4, 4), v=2, pairs=None, heads=None), {'qk': {'a': (2, 2)}})
    """
    less, more = {}, {}
    for name, change in plan.layers.items():
        own, kept = sizes[name], {}
        if change.heads is not None and change.heads != own.heads:
            raise ValueError(
                f"{name}: the plan has {change.heads} heads, the model {own.heads}; heads are added by hd.grow(model, texts, heads=...)."
            )
        for what, most in (("qk", _kept(own, change)), ("v", own.v)):
            wanted = getattr(change, what)
            dims = None if wanted is None else each(wanted, len(most))
            if dims is not None and any(d > m for d, m in zip(dims, most, strict=True)):
                kept[what] = tuple(map(min, dims, most))
                more.setdefault(what, {})[name] = tuple(max(0, d - m) for d, m in zip(dims, most, strict=True))
        less[name] = replace(change, **kept)
    return replace(plan, layers=less), more


def _kept(own: Sizes, change: Resize) -> tuple[int, ...]:
    """The most dims of q.k that heads can keep: all, less the frequency pairs that are given up."""
    if own.pairs is None or change.pairs is None:
        return own.qk
    return tuple(d - 2 * (len(had) - len(kept)) for d, had, kept in zip(own.qk, own.pairs, change.pairs, strict=True))


def _more(module: Resized) -> int | None:
    """How many heads a layer has, where some were added."""
    return None if module.sizes.heads == module.first.heads else module.sizes.heads


def _short(dims: tuple[int, ...]) -> int | tuple[int, ...]:
    return dims[0] if len(set(dims)) == 1 else dims
