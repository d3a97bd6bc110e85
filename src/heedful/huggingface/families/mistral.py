"""Mistral: Llama's attention with a sliding window."""

from dataclasses import replace

from .llama import ATTENTIONS as LLAMA

ATTENTIONS = (replace(LLAMA[0], kinds=("MistralAttention",), window=True),)
