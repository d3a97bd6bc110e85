"""Training: callbacks for transformers' Trainer."""

from .grow import Grow

__all__ = ["Grow"]
