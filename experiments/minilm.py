"""MiniLM as a pure self-attention network: its attention layers as matrices, and what enters them while it reads a real text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

import heedful as hd
from heedful.exact import SelfAttention
from heedful.huggingface.ablate import ablated
from heedful.huggingface.blocks import blocks
from heedful.huggingface.double import in_double

from .real import minilm, text


@dataclass(frozen=True)
class Read:
    """A model's attention layers and the states (tokens, dim) that enter each in its own forward pass, in float64."""

    layers: list[SelfAttention]
    states: list[Tensor]
    checkpoint: hd.Checkpoint

    @property
    def attention(self) -> list[Tensor]:
        """P of each layer, (heads, tokens, tokens)."""
        return [layer.attention(x) for layer, x in zip(self.layers, self.states, strict=True)]


@cache
def reading(tokens: int, ablation: str = "full") -> Read:
    """MiniLM, having read that many tokens of wikitext2's test text, without what the ablation names."""
    checkpoint = minilm()
    ids = torch.tensor([checkpoint.tokenizer(text()[: 20 * tokens], truncation=True, max_length=tokens)["input_ids"]])
    with in_double(checkpoint.model) as exact, torch.no_grad(), ablated(exact, ablation):
        layers = [SelfAttention.of_heads(block.heads) for block in blocks(exact)]
        states: list[Tensor] = []
        hooks = [b.register_forward_pre_hook(lambda _, args: states.append(args[0][0])) for b in exact.encoder.layer]  # type: ignore[union-attr]
        exact(ids)
        for hook in hooks:
            hook.remove()
    return Read(layers, states, checkpoint)
