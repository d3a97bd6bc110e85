"""Loading: a model that is given the weights of a grown one takes its sizes first, as when a Trainer resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..huggingface.adopt import adopt, empty, matrices, of_layer, reshape
from ..huggingface.adopt import sizes_of as sizes_by_layer
from ..huggingface.layer import Sizes


def follow_sizes(model: nn.Module) -> None:
    """Let `load_state_dict` bring the attention layers to the sizes of the weights it is given, one size for the heads of a layer.

    >>> import heedful as hd
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9))
    >>> larger = hd.grow(model, qk=3).checkpoint.model
    >>> follow_sizes(model)
    >>> model.load_state_dict(larger.state_dict())
    <All keys matched successfully>
    """
    model.register_load_state_dict_pre_hook(_follow)


def _follow(model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, own in sizes_by_layer(model).items():
        wanted = _sizes_in(state, f"{prefix}{name}.", model, name, own)
        if wanted is not None and wanted != own:
            adopt(model, [name])
            reshape(model, name, empty(matrices(model, name), wanted), wanted)


def _sizes_in(state: Mapping[str, Any], prefix: str, model: nn.Module, name: str, own: Sizes) -> Sizes | None:
    """The sizes of a layer in a state; None where they are its own or it is not there."""
    places = of_layer(model, name)[0]
    apart = len({places.q.module, places.k.module, places.v.module}) == 3
    parts = [place.module for place in (places.k, places.v)] if apart else ["k_proj", "v_proj"]
    rows = [state.get(f"{prefix}{part}.weight") for part in parts]
    if not all(isinstance(x, Tensor) for x in rows):
        return None
    qk, v = (_each(prefix, int(x.shape[0]), len(own.qk)) for x in rows)  # type: ignore[union-attr]
    return (
        replace(own, qk=(qk,) * len(own.qk), v=(v,) * len(own.v))
        if (qk * len(own.qk), v * len(own.v)) != (sum(own.qk), sum(own.v))
        else own
    )


def _each(prefix: str, rows: int, heads: int) -> int:
    if rows % heads:
        raise ValueError(
            f"{prefix[:-1]} has {rows} rows in the checkpoint, not as many for each of {heads} heads; load it by hd.load."
        )
    return rows // heads
