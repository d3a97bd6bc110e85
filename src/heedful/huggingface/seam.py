"""The seam: every attention call of a Hugging Face model passes one function, where we look and where we change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..attention import Capture, Mask, Mechanism, Unsupported
from ..mechanisms import Softmax
from .dropout import with_dropout
from .given import mask_of_call
from .lazy import lazy_mask
from .modules import Unreachable, attention_modules, passes

NAME = "heedful"
Watcher = Callable[[Capture], Any]

_exact = Softmax()
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_watchers: WeakKeyDictionary[nn.Module, list[tuple[str, Watcher]]] = WeakKeyDictionary()
_former: WeakKeyDictionary[nn.Module, list[tuple[Any, Any]]] = WeakKeyDictionary()  # configs and the implementation they asked for
_holders: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()  # who needs the model attached


def attach(model: nn.Module) -> None:
    """Send every attention call of the model through the seam; what it computes stays the same."""
    hold(model, "attach")


def detach(model: nn.Module) -> None:
    """Give the model back the attention implementations it had, once no watcher and no swapped mechanism needs the seam."""
    release(model, "attach")


def hold(model: nn.Module, holder: Any) -> None:
    """Attach the model on behalf of `holder`."""
    if chosen(model):  # what was chosen is what it goes back to
        _restore([(config, former) for config, former in _former.pop(model) if config._attn_implementation_internal == NAME])
    if model not in _former:
        _install(model)
    _holders.setdefault(model, set()).add(holder)


def chosen(model: nn.Module) -> str | None:
    """The attention implementation that someone gave to a model, or to a part of it, while it was attached."""
    now = [config._attn_implementation_internal for config, _ in _former.get(model, ())]
    return next((str(name) for name in now if name != NAME), None)


def release(model: nn.Module, holder: Any) -> None:
    """Detach the model when its last holder leaves."""
    holders = _holders.get(model, set())
    holders.discard(holder)
    if not holders and model in _former:
        _restore(_former.pop(model))


@contextmanager
def watching(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """Show the watcher a Capture of every attention call inside the block, but those answered from a state (see `cache`).

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9))
    >>> with watching(model, lambda capture: print(capture.layer, tuple(capture.q.shape))):
    ...     _ = model(torch.arange(5)[None])
    encoder.layer.0.attention.self (1, 2, 5, 4)
    """
    holder = object()
    hold(model, holder)
    watched = [(module, (name, watcher)) for name, module in attention_modules(model).items()]
    try:
        for module, entry in watched:
            _watchers.setdefault(module, []).append(entry)
        yield
    finally:
        for module, entry in watched:
            if entry in _watchers.get(module, []):
                _watchers[module].remove(entry)
        release(model, holder)


def _install(model: nn.Module) -> None:
    modules = attention_modules(model)
    through = [module for module in modules.values() if passes(module)]
    if not through or not hasattr(model, "set_attn_implementation"):
        raise Unreachable(_nothing_to_hold(model, modules))
    AttentionInterface.register(NAME, dispatch)
    AttentionMaskInterface.register(NAME, lazy_mask)
    former = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        for module in through:
            config = getattr(module, "config", None)
            if config is not None and getattr(config, "_attn_implementation", NAME) != NAME:
                config._attn_implementation_internal = NAME  # a copy that no sub-model owns
    except BaseException:
        _restore(former)
        raise
    _former[model] = [(config, was) for config, was in former if config._attn_implementation_internal == NAME]
    _names.update({module: name for name, module in modules.items()})


def _restore(former: list[tuple[Any, Any]]) -> None:
    """Give the configs back what they asked for; one that another held model reads too is left to that model to give back."""
    others = [(entries, number) for entries in _former.values() for number in range(len(entries))]
    for config, implementation in former:
        shared = [(entries, number) for entries, number in others if entries[number][0] is config]
        for entries, number in shared:
            if entries[number][1] == NAME:
                entries[number] = (config, implementation)
        if not shared:
            config._attn_implementation_internal = implementation


def _nothing_to_hold(model: nn.Module, modules: dict[str, nn.Module]) -> str:
    kinds = sorted({type(module).__name__ for module in modules.values()})
    own = f"computes attention in its own code ({', '.join(kinds)})" if kinds else "has no attention module"
    advice = "use a model whose attention calls ALL_ATTENTION_FUNCTIONS, or watching_sdpa for plain PyTorch modules"
    return f"{type(model).__name__} {own}, which transformers' attention interface does not reach; {advice}."


def _configs(model: nn.Module) -> list[Any]:
    """Every config that a module of the model may read, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            for name in getattr(config, "sub_configs", ()):
                add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


@torch.compiler.disable  # a compiled model breaks its graph here: watchers and lazy masks are plain Python
def dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One attention call: the module's mechanism answers it, its watchers see it."""
    call = read_call(module, query, key, value, attention_mask, scaling, kwargs)
    mechanism = module._modules.get(NAME) or _exact
    assert isinstance(mechanism, Mechanism)
    layer = getattr(key, NAME, None)  # of a cache that holds a state: the keys are those of the new tokens alone
    whole = layer is None or layer.state is None
    try:
        if type(kwargs.get("cache")).__name__ == "PagedAttentionCache":
            raise Unsupported("the seam does not page its cache; generate without continuous batching.")
        if layer is not None:
            out = layer.answer(module, call)
        else:
            out = with_dropout(mechanism, call, dropout) if dropout else answer(mechanism, call)
    except Unsupported as refusal:
        raise Unsupported(f"{call.layer}: {refusal}") from refusal
    if whole and torch._C._current_graph_task_id() == -1:  # gradient checkpointing repeats calls during backward
        for name, watcher in _watchers.get(module, ()):
            watcher(replace(call, layer=name, out=out))
    return out.transpose(1, 2).contiguous(), None


def answer(mechanism: Mechanism, call: Capture) -> Tensor:
    """The mechanism's answer to a call."""
    return mechanism(call.q, call.k, call.v, call.mask, call.scale, cap=call.cap, null=call.null)


def read_call(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: Any, scaling: float | None, kwargs: dict[str, Any]
) -> Capture:
    """What an attention module hands over, as a Capture without its answer."""
    name = _names.get(module, type(module).__name__)
    q, k, v = _cast(q, k, v)
    q = q.expand(k.shape[0], -1, -1, -1) if q.shape[0] == 1 else q  # learned queries
    mask = mask_of_call(module, q, k, given, *(kwargs.get(word) for word in ("is_causal", "position_bias", "sliding_window")))
    scale = float(q.shape[-1] ** -0.5 if scaling is None else scaling)
    mask = replace(mask, cross=True) if is_cross(name, module, q, k, mask) else mask
    real = None if mask.cross else mask.real(q.shape[-2])
    return Capture(name, q, k, v, mask, scale, kwargs.get("softcap"), kwargs.get("s_aux"), real=real)


CROSS = re.compile(r"cross|enc_?dec|encoder_attn|encoder_attention|enc_attn|encoder_decoder", re.IGNORECASE)


def is_cross(name: str, module: nn.Module, q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Whether the queries are other tokens than the keys, so that key padding says nothing about them."""
    if mask.causal or mask.offset:
        return False
    return q.shape[-2] != k.shape[-2] or bool(CROSS.search(name) or CROSS.search(type(module).__name__))


def _cast(*tensors: Tensor) -> list[Tensor]:
    """Autocast's dtype inside autocast, as torch's own attention would do."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors]
