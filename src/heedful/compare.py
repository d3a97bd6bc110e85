"""Compare: two models read the same texts; how far their embeddings, neighbours or predictions are from each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import Checkpoint, load
from .inputs import collate, read
from .scan import evaluating, prepare
from .texts import items


@dataclass(frozen=True)
class Comparison:
    """What a changed model keeps: of an encoder the embeddings, of a language model the predictions. None where it is the other kind."""

    texts: int
    cosine: float | None = None  # mean cosine of a text's embedding before and after
    least: float | None = None  # the smallest
    neighbours: float | None = None  # share of texts whose nearest other text stays the same
    before: float | None = None  # perplexity
    after: float | None = None

    def sentences(self) -> tuple[str, ...]:
        """What it says."""
        told = []
        if self.cosine is not None:
            told.append(f"embeddings: mean cosine {self.cosine:.4f} over {self.texts} texts, smallest {self.least:.4f}")
        if self.neighbours is not None:
            told.append(f"the nearest other text stays the same for {self.neighbours:.0%}")
        if self.before is not None and self.after is not None:
            told.append(
                f"perplexity {self.before:.2f} before, {self.after:.2f} after ({self.after / self.before - 1:+.1%}) on {self.texts} texts"
            )
        return tuple(told)


def compare(
    before: str | Path | nn.Module | Checkpoint,
    after: str | Path | nn.Module | Checkpoint,
    texts: Any,
    batch: int = 8,
    length: int | None = None,
) -> Comparison:
    """Let two models read the texts: mean-pooled embeddings of encoders, perplexity of language models."""
    one, two = load(before), load(after)
    reading = read(one, items(texts), batch, length)
    if _writes(one):
        losses = [_losses(side, reading.batches) for side in (one, two)]
        return Comparison(sum(map(len, reading.batches)), before=losses[0], after=losses[1])
    x, y = (_embeddings(side, reading.batches) for side in (one, two))
    cosines = (x * y).sum(-1)
    same = None
    if len(x) > 2:
        near = [(e @ e.mT).fill_diagonal_(-2).argmax(1) for e in (x, y)]
        same = float((near[0] == near[1]).double().mean())
    return Comparison(len(x), float(cosines.mean()), float(cosines.min()), same)


def _writes(checkpoint: Checkpoint) -> bool:
    """Whether it predicts the next token of what it reads."""
    name = type(checkpoint.model).__name__
    return name.endswith(("ForCausalLM", "LMHeadModel"))


@torch.no_grad()
def _losses(checkpoint: Checkpoint, batches: list) -> float:
    """Perplexity."""
    total, count = 0.0, 0
    with evaluating(checkpoint.model):
        for group in batches:
            given = collate(checkpoint, group)
            ids, real = given["input_ids"], given.get("attention_mask", torch.ones_like(given["input_ids"]))
            logits = checkpoint.model(**given, use_cache=False).logits[:, :-1].float()
            wanted = ids[:, 1:].masked_fill(real[:, 1:] == 0, -100)
            total += float(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
            count += int((wanted != -100).sum())
    return float(torch.tensor(total / max(count, 1)).exp())


@torch.no_grad()
def _embeddings(checkpoint: Checkpoint, batches: list) -> Tensor:
    """The mean of the last hidden states of each text's tokens, of length 1."""
    found = []
    model: Any = checkpoint.model
    with evaluating(model):
        for group in batches:
            given = prepare(model, collate(checkpoint, group))
            body = (
                model.get_encoder()
                if getattr(checkpoint.config, "is_encoder_decoder", False)
                else getattr(model, "base_model", model)
            )
            given = {name: x for name, x in given.items() if body is model or not name.startswith("decoder_")}
            states = body(**given).last_hidden_state.float()
            real = given.get("attention_mask")
            real = torch.ones(states.shape[:2], device=states.device) if real is None or real.shape != states.shape[:2] else real
            found.append((states * real[..., None]).sum(1) / real.sum(1, keepdim=True))
    return F.normalize(torch.cat(found), dim=-1)
