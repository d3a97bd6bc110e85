"""Which modules of a model attend, and which of them pass transformers' attention interface."""

from __future__ import annotations

import inspect
import re
from functools import cache

from torch import nn

INTERFACE = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")


class Unreachable(RuntimeError):
    """Attention that the seam does not see."""


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that attend, by qualified name: those that call the interface, and the innermost others named Attention.

    >>> list(attention_modules(nn.TransformerEncoderLayer(8, 2)))
    ['self_attn']
    """
    found = {name: module for name, module in model.named_modules() if passes(module) or "Attention" in type(module).__name__}
    return {name: module for name, module in found.items() if passes(module) or not _holds_another(module)}


def passes(module: nn.Module) -> bool:
    """Whether the module's own forward calls transformers' attention interface."""
    return _calls_interface(type(module))


def _holds_another(module: nn.Module) -> bool:
    inner = (m for m in module.modules() if m is not module)
    return any(passes(m) or "Attention" in type(m).__name__ for m in inner)


@cache
def _calls_interface(kind: type) -> bool:
    """Read off the source of the methods that an object of this class has."""
    if kind.__module__.split(".")[0] == "torch":
        return False
    owners = [owner for owner in kind.__mro__ if owner.__module__.split(".")[0] not in ("torch", "builtins")]
    taken, sources = set(), []
    for owner in owners:
        for name, method in vars(owner).items():
            if inspect.isfunction(method) and name not in taken:
                sources.append((name, _source(method)))
        taken |= {name for name, source in sources if f"super().{name}(" not in source}
    return any(INTERFACE.search(source) for _, source in sources)


def _source(method: object) -> str:
    try:
        return inspect.getsource(method)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""
