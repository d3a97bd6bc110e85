"""heedful: see, speed up and resize the attention of any transformer.

import heedful as hd
model = hd.load("org/name")                  # a hub id, a folder, a .gguf file
findings = hd.scan(model, texts)             # what its attention does, never an L x L matrix
print(*findings.verdicts(), sep="\\n")
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import exact, mechanisms, ops, rules, statistics, training
    from .attention import Capture, Mask, Mechanism, Unsupported
    from .bench import bench
    from .benching.result import Bench
    from .capturing import capture
    from .checkpoint import Checkpoint, load
    from .compare import compare
    from .doctor import doctor
    from .enlarging import grow
    from .explain import explain
    from .explanations.explanation import Explanation
    from .findings import Findings
    from .huggingface import Unreachable, cache, swap, unswap, watching, watching_sdpa
    from .ops import hop, merge, plain
    from .plan import Plan, Resize
    from .resize import apply, shrink
    from .scan import scan
    from .statistic import Statistic

_PLACES = {  # the public names by verb, and where each lives; imported when first used, so that mechanisms need torch alone
    "attend": {"attention": ("Capture", "Mask", "Mechanism", "Unsupported"), "ops": ("hop", "merge", "plain")},
    "load": {"checkpoint": ("Checkpoint", "load")},
    "scan": {
        "scan": ("scan",),
        "capturing": ("capture",),
        "findings": ("Findings",),
        "statistic": ("Statistic",),
        "doctor": ("doctor",),
    },
    "explain": {"explain": ("explain",), "explanations.explanation": ("Explanation",)},
    "bench": {"bench": ("bench",), "benching.result": ("Bench",)},
    "resize": {"resize": ("apply", "shrink"), "enlarging": ("grow",), "plan": ("Plan", "Resize"), "compare": ("compare",)},
    "look and change": {"huggingface": ("Unreachable", "cache", "swap", "unswap", "watching", "watching_sdpa")},
}
_MODULES = ("exact", "mechanisms", "ops", "rules", "statistics", "training")
_HOME = {name: module for places in _PLACES.values() for module, names in places.items() for name in names}

__all__ = [
    "Bench",
    "Capture",
    "Checkpoint",
    "Explanation",
    "Findings",
    "Mask",
    "Mechanism",
    "Plan",
    "Resize",
    "Statistic",
    "Unreachable",
    "Unsupported",
    "apply",
    "bench",
    "cache",
    "capture",
    "compare",
    "doctor",
    "exact",
    "explain",
    "grow",
    "hop",
    "load",
    "mechanisms",
    "merge",
    "ops",
    "plain",
    "rules",
    "scan",
    "shrink",
    "statistics",
    "swap",
    "training",
    "unswap",
    "watching",
    "watching_sdpa",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"heedful has no {name!r}; it has {', '.join(__all__)}.")
    found = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Python binds an imported submodule to its name in the package; where a verb has that name, the verb is bound."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, getattr(value, name) if name in _HOME and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package
