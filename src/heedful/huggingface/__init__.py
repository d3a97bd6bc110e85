"""The Hugging Face seam: look at every attention call of a model (`watching`) and change how a layer attends (`swap`)."""

from __future__ import annotations

from .apart import Apart, take_apart
from .blocks import Undecomposable
from .cache import cache
from .coverage import Coverage, coverage
from .modules import Unreachable, attention_modules
from .sdpa import watching_sdpa
from .seam import attach, detach, watching
from .swap import swap, swapped, unswap

__all__ = [
    "Apart",
    "Coverage",
    "Undecomposable",
    "Unreachable",
    "attach",
    "attention_modules",
    "cache",
    "coverage",
    "detach",
    "swap",
    "swapped",
    "take_apart",
    "unswap",
    "watching",
    "watching_sdpa",
]
