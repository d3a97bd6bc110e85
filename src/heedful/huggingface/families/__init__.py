"""Families: where models of one kind keep their weights: blocks by model_type, attention by the class of the module."""

from __future__ import annotations

from . import bart, bert, distilbert, gpt2, gpt_neox, llama, mistral, opt, qwen2, t5, vit, whisper
from .family import Family, Place, Projections

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
RESIZABLE = (bert, distilbert, gpt2, opt, gpt_neox, llama, mistral, qwen2, vit, whisper, bart, t5)
ATTENTIONS: tuple[Projections, ...] = tuple(one for family in RESIZABLE for one in family.ATTENTIONS)

__all__ = ["ATTENTIONS", "FAMILIES", "Family", "Place", "Projections"]
