"""The Hugging Face seam: look at every attention call of a model (`watching`) and change how a layer attends (`swap`)."""

from __future__ import annotations

from .coverage import Coverage, coverage
from .modules import Unreachable, attention_modules
from .seam import attach, detach, watching

__all__ = ["Coverage", "Unreachable", "attach", "attention_modules", "coverage", "detach", "watching"]
