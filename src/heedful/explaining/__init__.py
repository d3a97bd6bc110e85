"""Explaining: the exact theory on real models and texts."""

from .paths import Paths, path_streams

__all__ = ["Paths", "path_streams"]
