"""Double: let a model compute in float64 throughout, where its own code would step down to float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def in_double(model: nn.Module) -> Iterator[nn.Module]:
    """A float64 copy of the model, whose norms and softmaxes stay in float64 inside the block.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> size = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
    >>> model = LlamaModel(LlamaConfig(**size))
    >>> with in_double(model) as exact, torch.no_grad():
    ...     x = torch.randn(1, 3, 8, dtype=torch.float64)
    ...     error = exact.norm(x) - x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    >>> bool(error.abs().max() < 1e-14), model.dtype
    (True, torch.float32)
    """
    exact = copy.deepcopy(model).double()
    if getattr(getattr(exact, "config", None), "_experts_implementation", None) is not None:
        exact.set_experts_implementation("eager")  # type: ignore[operator]  # torch's grouped product has no float64
    with _StayingDouble():
        yield exact


class _StayingDouble(TorchFunctionMode):
    """Where a float64 tensor would be cast to float32, it stays."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {name: torch.float64 if a is torch.float32 else a for name, a in kwargs.items()}
        return func(*args, **kwargs)
