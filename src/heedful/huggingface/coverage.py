"""Coverage: which attention modules of a model the seam saw in a run, and why it missed the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from .modules import Unreachable, attention_modules, passes
from .seam import watching


@dataclass(frozen=True)
class Coverage:
    """The attention modules that were seen, and for each that was not the reason."""

    reached: tuple[str, ...]
    missed: dict[str, str]

    def check(self) -> None:
        """Raise `Unreachable` naming every missed module and why."""
        if self.missed or not self.reached:
            lines = [f"  {name}: {why}" for name, why in self.missed.items()] or ["  the model has no attention module"]
            total = len(self.reached) + len(self.missed)
            raise Unreachable(f"{len(self.missed)} of {total} attention modules were not seen:\n" + "\n".join(lines))


def coverage(model: nn.Module, run: Callable[[], Any]) -> Coverage:
    """Run the model and tell which of its attention modules passed the seam.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9))
    >>> coverage(model, lambda: model(model.dummy_inputs["input_ids"] % 9))
    Coverage(reached=('encoder.layer.0.attention.self',), missed={})
    """
    modules = attention_modules(model)
    reached: set[str] = set()
    executed: set[str] = set()
    with ExitStack() as stack:
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(partial(_note, executed, name))
            stack.callback(hook.remove)
        if any(passes(module) for module in modules.values()):
            stack.enter_context(watching(model, lambda capture: reached.add(capture.layer)))
            run()
    missed = {name: _why(module, name in executed) for name, module in modules.items() if name not in reached}
    return Coverage(tuple(name for name in modules if name in reached), missed)


def _note(executed: set[str], name: str, *_: Any) -> None:
    executed.add(name)


def _why(module: nn.Module, executed: bool) -> str:
    kind = type(module).__name__
    if not passes(module):
        return f"{kind} attends with its own code, which transformers' attention interface does not reach"
    if not executed:
        return f"{kind} was not called with these inputs; run the model with inputs that use it"
    return f"{kind} ran without calling the attention interface (a fast path or a cached answer)"
