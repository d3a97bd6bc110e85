"""Qwen2: Llama's attention with biases and, in some layers, a sliding window."""

from dataclasses import replace

from .llama import ATTENTIONS as LLAMA

ATTENTIONS = (replace(LLAMA[0], kinds=("Qwen2Attention",), window=True),)
