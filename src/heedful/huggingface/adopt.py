"""Adopting: a family's attention modules become ones whose sizes are free, by its table; their matrices are read and set here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers.pytorch_utils import Conv1D

from .blocks import linear
from .families import ATTENTIONS, Place, Projections
from .layer import Resized, Sizes, kind_of
from .modules import attention_modules
from .swap import heads_of

NORMS = re.compile(r"(q|k|query|key)_?(layer)?_?norm", re.IGNORECASE)
FRESH = ("q_proj", "k_proj", "v_proj")  # of modules that had one matrix for all three


class Unresizable(ValueError):
    """An attention module whose sizes cannot be changed."""


@dataclass(frozen=True, eq=False)
class Matrices:
    """The matrices of an attention layer with a row for each dim of a head, heads side by side; no bias is None.

    q, k and v are (dims, width), o is (width, dims): a module computes o (P (v x + b_v)) + b_o.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    b_o: Tensor | None = None


def adopt(model: nn.Module, layers: Iterable[str] | None = None) -> dict[str, Resized]:
    """Turn the named attention modules of a model, or all, into ones of free sizes, which keep the sizes they have.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9, n_positions=5))
    >>> adopt(model)["h.0.attn"].sizes
    Sizes(heads=2, qk=(4, 4), v=(4, 4), pairs=None)
    """
    modules = attention_modules(model)
    names = list(modules) if layers is None else list(layers)
    ready = {name: _examined(model, name, modules[name]) for name in names}  # all are looked at before one is changed
    for name, found in ready.items():
        if not isinstance(modules[name], Resized):
            _become(modules[name], *found)
    return {name: module for name in names if isinstance(module := modules[name], Resized)}


def sizes_of(model: nn.Module, layers: Iterable[str] | None = None) -> dict[str, Sizes]:
    """The sizes of the attention layers, without changing anything; `Unresizable` where one cannot be resized."""
    modules = attention_modules(model)
    return {name: _examined(model, name, modules[name])[2] for name in (modules if layers is None else layers)}


def matrices(model: nn.Module, name: str) -> Matrices:
    """The matrices of a layer that was adopted."""
    module = model.get_submodule(name)
    assert isinstance(module, Resized)
    made = [_read(getattr(module, part)) for part in module.names]
    o, b_o = _read(_finisher(model, name, module.places.o))
    (q, b_q), (k, b_k), (v, b_v) = made
    return Matrices(q, k, v, o, b_q, b_k, b_v, b_o)


def reshape(model: nn.Module, name: str, given: Matrices, sizes: Sizes) -> None:
    """Give an adopted layer other matrices, and heads of the sizes that they are for."""
    module = model.get_submodule(name)
    assert isinstance(module, Resized)
    pairs = ((given.q, given.b_q), (given.k, given.b_k), (given.v, given.b_v))
    for part, (weight, bias) in zip(module.names, pairs, strict=True):
        _put(getattr(module, part), weight, bias)
    _put(_finisher(model, name, module.places.o), given.o, given.b_o)
    module.fit(sizes)


def _examined(model: nn.Module, name: str, module: nn.Module) -> tuple[Projections, Matrices, Sizes]:
    if isinstance(module, Resized):
        return module.places, matrices(model, name), module.sizes
    places = _places(model, name, module)
    heads = heads_of(module)
    if heads is None:
        raise Unresizable(f"{name} ({type(module).__name__}) does not say how many heads it has; it cannot be resized.")
    (q, b_q), (k, b_k), (v, b_v) = (_found(module, place, name, heads) for place in (places.q, places.k, places.v))
    o, b_o = _read(_finisher(model, name, places.o))
    dim = q.shape[0] // heads
    shared = k.shape[0] // dim
    turned = getattr(module, "rotary_ndims", dim) // 2
    pairs = (tuple(range(turned)),) * shared if places.rotary else None
    return places, Matrices(q, k, v, o, b_q, b_k, b_v, b_o), Sizes(heads, (dim,) * shared, (v.shape[0] // shared,) * shared, pairs)


def _places(model: nn.Module, name: str, module: nn.Module) -> Projections:
    kind = type(module).__name__
    for places in ATTENTIONS:
        if kind in places.kinds and all(hasattr(module, place.module) for place in (places.q, places.k, places.v)):
            return places
    norms = [child for child, _ in module.named_children() if NORMS.fullmatch(child)]
    if norms:
        raise Unresizable(
            f"{name} ({kind}) norms its queries and keys ({', '.join(norms)}), so that other dims or zeros behind them change every "
            "logit; only models without such norms can be resized."
        )
    family = getattr(getattr(model, "config", None), "model_type", "x").replace("-", "_")
    raise Unresizable(
        f"{name} is a {kind}, whose matrices are not known; write heedful/huggingface/families/{family}.py with its Projections (see llama.py) "
        "and list it in families/__init__.py."
    )


def _found(module: nn.Module, place: Place, name: str, heads: int) -> tuple[Tensor, Tensor | None]:
    weight, bias = linear(module, place, name, heads)
    return weight.mT, bias if getattr(module, place.module).bias is not None else None


def _finisher(model: nn.Module, name: str, place: Place) -> Any:
    """The module that mixes the heads' outputs."""
    if place.module.startswith(".."):
        return model.get_submodule(f"{name.rpartition('.')[0]}.{place.module[2:]}")
    return model.get_submodule(f"{name}.{place.module}" if name else place.module)


def _become(module: nn.Module, places: Projections, found: Matrices, sizes: Sizes) -> None:
    own = (places.q.module, places.k.module, places.v.module)
    module.__class__ = kind_of(type(module))
    assert isinstance(module, Resized)
    module.places, module.first, module.names = places, sizes, own if len(set(own)) == 3 else FRESH
    if module.names is FRESH:
        trained = any(p.requires_grad for p in getattr(module, own[2]).parameters())
        for part in set(own):
            delattr(module, part)
        for part, weight, bias in zip(FRESH, (found.q, found.k, found.v), (found.b_q, found.b_k, found.b_v), strict=True):
            fresh = skip_init(nn.Linear, *weight.T.shape, bias=bias is not None, device=weight.device, dtype=weight.dtype)
            setattr(module, part, fresh.requires_grad_(trained))
            _put(fresh, weight, bias)
    module.fit(sizes)


def _read(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(output, input), and the bias."""
    weight, _ = linear(module, Place(""), type(module).__name__)
    return weight.mT, None if module.bias is None else module.bias.detach()  # type: ignore[union-attr]


def _put(module: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Another matrix (output, input) for a linear module, which stays the module it is."""
    trained, old = module.weight.requires_grad, module.weight
    like = {"device": old.device, "dtype": old.dtype}
    if isinstance(module, Conv1D):
        module.nx, module.nf = weight.shape[1], weight.shape[0]
    else:
        module.in_features, module.out_features = weight.shape[1], weight.shape[0]
    stored = weight.mT if isinstance(module, Conv1D) else weight
    module.weight = nn.Parameter(stored.detach().to(**like).contiguous(), requires_grad=trained)
    kept = None if bias is None else nn.Parameter(bias.detach().to(**like).clone(), requires_grad=trained)
    setattr(module, "bias", kept)  # noqa: B010 - Conv1D's own says it is never None


def empty(found: Matrices, sizes: Sizes) -> Matrices:
    """Matrices of these sizes with nothing in them, to be loaded."""
    rows = {"q": sum(sizes.queries), "k": sum(sizes.qk), "v": sum(sizes.v)}
    made = {
        name: getattr(found, name).new_empty(count, found.q.shape[1] if name == "q" else found.k.shape[1])
        for name, count in rows.items()
    }
    biases = {f"b_{name}": None if (b := getattr(found, f"b_{name}")) is None else b.new_empty(rows[name]) for name in rows}
    return replace(found, **made, **biases, o=torch.empty(found.o.shape[0], sum(sizes.values), dtype=found.o.dtype))


def of_layer(model: nn.Module, name: str) -> tuple[Projections, Matrices, Sizes]:
    """Where a layer keeps its matrices, these, and its sizes, whether it was adopted or not."""
    return _examined(model, name, model.get_submodule(name))


def finisher(model: nn.Module, name: str, place: Place) -> Any:
    """The module that mixes the heads' outputs."""
    return _finisher(model, name, place)
