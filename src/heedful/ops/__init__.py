"""The hot inner formulas, in plain torch, and the one choice of what runs them."""

from .dispatch import plain
from .hop import hop
from .merge import merge

__all__ = ["hop", "merge", "plain"]
