"""LazyMask: the mask tensor that travels through a model, holding rules instead of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..mask import Mask
from .masks import Span, translate


class LazyMask(Tensor):
    """A boolean (batch, 1, queries, keys) tensor of one stored element that knows its Mask; a model that asks for its values gets them.

    >>> lazy = LazyMask.of(Mask(causal=True), 2, 3, 3)
    >>> lazy.shape, lazy.untyped_storage().nbytes()
    (torch.Size([2, 1, 3, 3]), 1)
    >>> (lazy & True)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    mask: Mask

    @classmethod
    def of(cls, mask: Mask, batch: int, queries: int, keys: int, device: torch.device | str = "cpu") -> LazyMask:
        lazy = torch.ones((), dtype=torch.bool, device=device).expand(batch, 1, queries, keys).as_subclass(cls)
        lazy.mask = mask
        return lazy

    def values(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The whole boolean tensor, for models that compute with their mask."""
        batch, _, queries, keys = self.shape
        seen = self.mask.visible(torch.arange(queries, device=self.device), 0, keys)
        seen = torch.ones((), dtype=torch.bool, device=self.device) if seen is None else seen
        return seen.expand(batch, 1, queries, keys)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in _KEEPS:
            kept = _KEEPS[func.__name__](*args, **kwargs)
            if kept is not None:
                return kept
        if func.__name__ in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                answer = func(*args, **kwargs)
            if not isinstance(answer, Tensor):
                return answer
        return func(*_dense(args), **_dense(kwargs))


_ASKS = {"__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "is_contiguous", "untyped_storage", "__len__"}


def _dense(value: Any) -> Any:
    if isinstance(value, LazyMask):
        return value.values()
    if isinstance(value, dict):
        return {name: _dense(item) for name, item in value.items()}
    return type(value)(_dense(item) for item in value) if type(value) in (list, tuple) else value


def _moved(lazy: LazyMask, *args: Any, **kwargs: Any) -> LazyMask | None:
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.ones((), dtype=torch.bool, device=lazy.device).to(*args, **kwargs)
    batch, _, queries, keys = lazy.shape
    return LazyMask.of(lazy.mask.to(like.device), batch, queries, keys, like.device) if like.dtype == torch.bool else None


def _sliced(lazy: LazyMask, index: Any) -> LazyMask | None:
    """[:, :, :, :n] is a common way to shorten a mask; any other index asks for values."""
    index = index if isinstance(index, tuple) else (index,)
    batch, _, queries, keys = lazy.shape
    plain = [i in (slice(None), ...) for i in index]
    if all(plain):
        return lazy
    last = index[-1]
    full = len(index) == 4 or ... in index
    if not (full and all(plain[:-1]) and isinstance(last, slice) and not last.start and last.step is None):
        return None
    keys = min(keys, last.stop) if isinstance(last.stop, int) and last.stop >= 0 else 0
    if not keys or lazy.mask.segments is not None:
        return None
    real = None if lazy.mask.keys is None else lazy.mask.keys[:, :keys]
    return LazyMask.of(replace(lazy.mask, keys=real), batch, queries, keys, lazy.device)


_KEEPS: dict[str, Callable[..., LazyMask | None]] = {
    "detach": lambda lazy: lazy,
    "contiguous": lambda lazy: lazy,
    "clone": lambda lazy, **kwargs: lazy,
    "to": _moved,
    "__getitem__": _sliced,
}


@torch.compiler.disable
def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **_: Any,
) -> LazyMask:
    """What transformers' AttentionMaskInterface calls in place of `sdpa_mask`: the same arguments, no values."""
    if isinstance(attention_mask, LazyMask):
        return attention_mask
    from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function

    function = causal_mask_function if mask_function is None else mask_function
    if attention_mask is not None:
        function = and_masks(function, padding_mask_function(attention_mask))
    span = Span(batch_size, int(q_length), int(kv_length), int(q_offset), int(kv_offset))
    return LazyMask.of(translate(function, span, use_vmap), batch_size, span.queries, span.keys, device)
