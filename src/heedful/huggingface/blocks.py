"""Blocks: the layers of a Hugging Face model as plain matrices, found by its family's table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..exact.block import Block, Heads, Mlp, Norm
from ..exact.layer import Layer
from .families import FAMILIES, Family, Place
from .layer import Resized
from .swap import swapped

ACTIVATIONS = {  # by their names in configurations
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "quick_gelu": "quick_gelu",
}


class Undecomposable(ValueError):
    """A model whose blocks are not a product of known matrices, or whose matrices do not give what it computes."""


def blocks(model: nn.Module) -> tuple[Block, ...]:
    """The blocks of a model of a known family, in order; `take_apart` also confirms them by a run.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=3, vocab_size=9, n_positions=5))
    >>> [block.name for block in blocks(model)], blocks(model)[0].heads.w_q.shape
    (['h.0', 'h.1', 'h.2'], torch.Size([2, 8, 4]))
    """
    family = family_of(model)
    prefix, body = _body(model)
    others = swapped(model)
    if others:
        name, mechanism = next(iter(others.items()))
        raise Undecomposable(
            f"{name} of this {type(model).__name__} attends by {mechanism!r}, which is no fixed average of values; unswap(model) first."
        )
    resized = [name for name, module in model.named_modules() if isinstance(module, Resized)]
    if resized:
        raise Undecomposable(f"{resized[0]} of this {type(model).__name__} was resized; take the model apart as it was before.")
    layers = _module(body, family.blocks, type(model).__name__)
    return tuple(_block(f"{prefix}{family.blocks}.{i}", layer, family, model.config) for i, layer in enumerate(layers))  # type: ignore[arg-type]


def final_norm(model: nn.Module) -> Norm | None:
    """The norm after the last block, where there is one."""
    found = final_module(model)
    return None if found is None else norm_of(found, "the final norm")


def final_module(model: nn.Module) -> nn.Module | None:
    """The module of that norm."""
    final = family_of(model).final
    return None if final is None else _module(_body(model)[1], final, type(model).__name__)


def norm_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the blocks' norms and of the final one, by name within the model."""
    family, (prefix, body) = family_of(model), _body(model)
    count = len(_module(body, family.blocks, type(model).__name__))  # type: ignore[arg-type]
    names = [f"{family.blocks}.{i}.{norm}" for i in range(count) for norm in family.norms]
    names += [family.final] if family.final is not None else []
    return {prefix + name: _module(body, name, type(model).__name__) for name in names}


def family_of(model: nn.Module) -> Family:
    """The family of a model, by its configuration."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        raise Undecomposable(
            f"{type(model).__name__} (model_type {kind!r}) is of no family whose blocks are known; use one of {', '.join(FAMILIES)}, "
            "or add a table to heedful/huggingface/families."
        )
    return FAMILIES[kind]


def _body(model: nn.Module) -> tuple[str, nn.Module]:
    """The base model, and the name it has with a dot; none where it is the model itself."""
    prefix = getattr(model, "base_model_prefix", "")
    return (f"{prefix}.", getattr(model, prefix)) if prefix and hasattr(model, prefix) else ("", model)


def _module(owner: nn.Module, name: str, where: str) -> Any:
    try:
        return owner.get_submodule(name)
    except AttributeError as error:
        raise Undecomposable(
            f"{where} has no module {name}, where its family keeps one; its blocks are of another make: use the family's plain model."
        ) from error


def _block(name: str, layer: nn.Module, family: Family, config: Any) -> Block:
    count = config.num_attention_heads
    return Block(
        name,
        f"{name}.{family.attention}",
        _heads(name, layer, family, count),
        _mlp(name, layer, family, getattr(config, family.activation)),
        (_norm(name, layer, family.norms[0]), _norm(name, layer, family.norms[1])),
        family.pre,
        family.rotary,
    )


def _heads(name: str, layer: nn.Module, family: Family, count: int) -> Heads:
    pairs = [linear(layer, place, name) for place in (family.q, family.k, family.v, family.o)]
    try:
        return Layer(*(w for w, _ in pairs), heads=count, biases=[b for _, b in pairs]).by_head
    except ValueError as error:
        raise Undecomposable(f"the attention of {name} is none of {count} heads: {error}") from error


def _mlp(name: str, layer: nn.Module, family: Family, activation: Any) -> Mlp:
    if activation not in ACTIVATIONS:
        raise Undecomposable(
            f"{name} has the activation {activation!r}, not of the form z times a slope that is known; known are {', '.join(ACTIVATIONS)}."
        )
    (up, b_up), (down, b_down) = linear(layer, family.up, name), linear(layer, family.down, name)
    gate, b_gate = (None, None) if family.gate is None else linear(layer, family.gate, name)
    return Mlp(up, down, b_up, b_down, ACTIVATIONS[activation], gate, b_gate)


def linear(layer: nn.Module, place: Place, where: str, heads: int = 1) -> tuple[Tensor, Tensor]:
    """The matrix (input, output) and the bias at a place of a block; zeros where it has no bias."""
    module = _module(layer, place.module, where)
    if not isinstance(module, nn.Linear | Conv1D) or not module.weight.is_floating_point():
        raise Undecomposable(
            f"{where}.{place.module} is a {type(module).__name__} of {getattr(module, 'weight', torch.empty(0)).dtype}, no plain matrix; "
            "load the model unquantised, and merge adapters."
        )
    weight = module.weight.detach()
    weight = weight if isinstance(module, Conv1D) else weight.mT
    bias = weight.new_zeros(weight.shape[1]) if module.bias is None else module.bias.detach()
    if place.by_head:
        return tuple(x.unflatten(-1, (heads, place.parts, -1))[..., place.part, :].flatten(-2) for x in (weight, bias))  # type: ignore[return-value]
    return weight.chunk(place.parts, 1)[place.part], bias.chunk(place.parts)[place.part]


def _norm(name: str, layer: nn.Module, place: str) -> Norm:
    return norm_of(_module(layer, place, name), f"{name}.{place}")


def norm_of(module: nn.Module, where: str) -> Norm:
    """A LayerNorm or RMSNorm as plain tensors."""
    if isinstance(module, nn.LayerNorm) and module.weight is not None:
        weight = module.weight.detach()
        return Norm(weight, torch.zeros_like(weight) if module.bias is None else module.bias.detach(), module.eps, True)
    eps, weight = getattr(module, "variance_epsilon", getattr(module, "eps", None)), getattr(module, "weight", None)
    if eps is None or not isinstance(weight, Tensor):
        raise Undecomposable(
            f"{where} is a {type(module).__name__}, neither LayerNorm nor RMSNorm; its blocks cannot be taken apart."
        )
    return Norm(weight.detach(), torch.zeros_like(weight), float(eps), False)
