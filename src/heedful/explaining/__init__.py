"""Explaining: the exact theory on real models and texts."""

from .curves import Curves, collapse_curves
from .paths import Paths, path_streams

__all__ = ["Curves", "Paths", "collapse_curves", "path_streams"]
