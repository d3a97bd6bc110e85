"""Plain PyTorch models: look at every call of torch's scaled_dot_product_attention inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Capture
from ..mask import Mask
from .given import dense_mask
from .modules import Unreachable, attention_modules

Watcher = Callable[[Capture], Any]


@contextmanager
def watching_sdpa(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """Show the watcher a Capture of every call of torch's own attention that the model makes inside the block.

    A layer is named after the innermost module that is running. Attention modules that ran without such a call, as MultiheadAttention does
    when its weights are needed, raise `Unreachable` at the end.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> with watching_sdpa(layer, lambda capture: print(capture.layer, tuple(capture.q.shape))):
    ...     _ = layer(torch.randn(1, 5, 8))
    self_attn (1, 2, 5, 4)
    """
    running: list[str] = []
    executed: dict[str, None] = {}
    seen: set[str] = set()
    original = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(query, key, value, *args, **kwargs)
        if running:  # elsewhere the call is another model's
            seen.update(running)
            watcher(replace(read_sdpa(query, key, value, *args, **kwargs), layer=running[-1], out=_four(out)))
        return out

    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        for name, module in model.named_modules():
            _follow(stack, module, name or type(model).__name__, running, executed)
        stack.callback(setattr, F, "scaled_dot_product_attention", original)
        F.scaled_dot_product_attention = attention
        yield
    missed = [name for name in attention_modules(model) if name in executed and name not in seen]
    if missed:
        raise Unreachable(
            f"{', '.join(missed)} ran without calling scaled_dot_product_attention, so nothing was seen there; call "
            "MultiheadAttention with need_weights=False, and watch Hugging Face models with `watching`."
        )


def read_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Capture:
    """The arguments of scaled_dot_product_attention as a Capture, its layer unnamed.

    >>> read_sdpa(*torch.randn(3, 1, 2, 5, 4), is_causal=True).mask.demands
    frozenset({'causal'})
    """
    q, k, v = _four(query), _four(key), _four(value)
    batch = max(t.shape[0] for t in (q, k, v))
    q, k, v = (t.expand(batch, -1, -1, -1) for t in (q, k, v))
    mask = Mask(causal=is_causal) if attn_mask is None else dense_mask(_as_query(attn_mask, query))
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    same = mask.keys is not None and q.shape[-2] == k.shape[-2]
    return Capture("", q, k, v, mask, factor, real=mask.real(q.shape[-2]) if same else None)


def _four(tensor: Tensor) -> Tensor:
    """(..., tokens, dim) as (batch, heads, tokens, dim)."""
    if tensor.ndim > 4:
        return tensor.flatten(0, -4)
    return tensor if tensor.ndim == 4 else tensor[:, None] if tensor.ndim == 3 else tensor[None, None]


def _as_query(mask: Tensor, query: Tensor) -> Tensor:
    """The mask with the batch and head dimensions of the query."""
    if query.ndim > 4:
        return mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    missing = query.ndim - mask.ndim
    return _four(mask[(None,) * missing]) if missing > 0 else _four(mask)


def _follow(stack: ExitStack, module: nn.Module, name: str, running: list[str], executed: dict[str, None]) -> None:
    """Keep in `running` the names of the modules whose forward is on its way."""

    def enter(*_: Any) -> None:
        running.append(name)
        executed[name] = None

    def leave(*_: Any) -> None:
        running.pop()

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)
