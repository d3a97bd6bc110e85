"""Families: where models of one kind keep the weights of a block, by the model_type of their configuration."""

from __future__ import annotations

from . import bert, gpt2, llama, vit
from .family import Family, Place

FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "roberta": bert.FAMILY,
    "xlm-roberta": bert.FAMILY,
    "camembert": bert.FAMILY,
    "electra": bert.FAMILY,
    "gpt2": gpt2.FAMILY,
    "llama": llama.FAMILY,
    "mistral": llama.FAMILY,
    "qwen2": llama.FAMILY,
    "vit": vit.FAMILY,
}

__all__ = ["FAMILIES", "Family", "Place"]
