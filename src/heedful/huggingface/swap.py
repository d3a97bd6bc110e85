"""Swap: give a layer another mechanism, which then trains, moves and saves with its model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from ..attention import Mechanism
from .modules import Unreachable, attention_modules, passes
from .seam import NAME, chosen, hold, release


def swap(model: nn.Module, mechanisms: Mapping[str, Mechanism]) -> None:
    """Let each named layer attend by its mechanism, which becomes its submodule `heedful`.

    >>> from heedful.mechanisms import Hard
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9))
    >>> swap(model, {"encoder.layer.0.attention.self": Hard()})
    >>> model.encoder.layer[0].attention.self.heedful
    Hard()
    """
    modules = attention_modules(model)
    for name, mechanism in mechanisms.items():
        _check(name, mechanism, modules)
    hold(model, "swap")
    for name, mechanism in mechanisms.items():
        _prepare(mechanism, modules[name])
        modules[name].add_module(NAME, mechanism)
    if _stay not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_stay)  # pyright: ignore[reportArgumentType]


@torch.compiler.disable
def _stay(model: nn.Module, inputs: Any) -> None:
    """Before each call: a swapped model answers by its mechanisms, whatever attention implementation was chosen since."""
    name = chosen(model)
    if name is None or not swapped(model):
        return
    hold(model, "swap")
    warnings.warn(
        f"set_attn_implementation({name!r}) came after a swap, and would have undone it; the swapped layers still attend by their "
        "mechanisms, the others exactly. To have it, give the layers their own attention back first: hd.unswap(model).",
        stacklevel=5,
    )


def unswap(model: nn.Module, layers: Iterable[str] | None = None) -> None:
    """Give the named layers, or all, their own attention back."""
    modules = attention_modules(model)
    names = swapped(model) if layers is None else list(layers)
    for name in names:
        if name not in modules:
            raise ValueError(_unknown(name, modules))
        modules[name]._modules.pop(NAME, None)
    if not swapped(model):
        release(model, "swap")
        for number in [number for number, hook in model._forward_pre_hooks.items() if hook is _stay]:
            del model._forward_pre_hooks[number]


def swapped(model: nn.Module) -> dict[str, Mechanism]:
    """The mechanisms that were swapped in, by layer."""
    found = {name: module._modules.get(NAME) for name, module in attention_modules(model).items()}
    return {name: mechanism for name, mechanism in found.items() if isinstance(mechanism, Mechanism)}


def _check(name: str, mechanism: Mechanism, modules: dict[str, nn.Module]) -> None:
    if name not in modules:
        raise ValueError(_unknown(name, modules))
    if not passes(modules[name]):
        kind = type(modules[name]).__name__
        raise Unreachable(f"{name} ({kind}) attends with its own code, so no mechanism can take its place; swap another layer.")
    if not isinstance(mechanism, Mechanism):
        raise TypeError(f"{name} was given a {type(mechanism).__name__}; give a Mechanism such as Softmax(beta=2.0).")


def _unknown(name: str, modules: dict[str, nn.Module]) -> str:
    near = get_close_matches(name, modules, n=3, cutoff=0.4) or list(modules)[:3]
    return f"there is no attention layer {name!r}; did you mean {', '.join(repr(n) for n in near)}? attention_modules(model) lists all."


def _prepare(mechanism: Mechanism, module: nn.Module) -> None:
    """Make the mechanism's own tensors now, before an optimiser is built, where the module tells its sizes."""
    sizes = sizes_of(module)
    if sizes is not None:
        mechanism.prepare(*sizes)
    weight = next((p for name, p in module.named_parameters() if not name.startswith(NAME)), None)
    if weight is not None:
        mechanism.to(weight.device)


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """(heads, dims of a query) as the module or its config names them; None where neither does."""
    heads = heads_of(module)
    dims = _first(("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size"), module)
    return None if heads is None or dims is None else (heads, dims)


def heads_of(module: nn.Module) -> int | None:
    """How many query heads the module or its config says there are."""
    return _first(("num_heads", "num_attention_heads", "n_heads", "num_q_heads"), module, getattr(module, "config", None))


def _first(names: tuple[str, ...], *places: object) -> int | None:
    found = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in found if isinstance(value, int)), None)
