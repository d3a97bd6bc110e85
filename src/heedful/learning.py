"""Learning: what a model's layers do on texts, enough of it and finite; texts to learn from, and others to measure on."""

from __future__ import annotations

from typing import Any

import torch

from .checkpoint import Checkpoint
from .findings import Findings
from .inputs import read
from .scan import scan
from .statistics import Moments
from .texts import Item, items

TOKENS = 16  # that moments need for each dim of a head
HELD = 5  # every fifth text is held out


def moments(
    checkpoint: Checkpoint, texts: list[Item], batch: int, length: int | None, progress: bool = False, least: int = TOKENS
) -> dict[str, Moments]:
    """The moments of every layer on these texts; an error where they are too few, or not finite."""
    found = scan(checkpoint, texts, batch=batch, length=length, statistics=(Moments,), progress=progress)
    return known(found, least)


def known(found: Findings, least: int = TOKENS) -> dict[str, Moments]:
    """The moments that findings hold, if they are enough."""
    seen = {name: one for name, held in found.layers.items() if isinstance(one := held.get("Moments"), Moments)}
    if not seen:
        raise ValueError("these findings hold no Moments; scan with that statistic, as `heedful scan` does.")
    for name, one in seen.items():
        wanted = least * max(one.queries.shape[-1], one.outputs.shape[-1])
        if min(one.count, one.sources) < wanted:
            raise ValueError(
                f"{int(min(one.count, one.sources))} tokens were read, too few for {name}; heads of its size need {wanted} ({least} for each dim): "
                "give more texts."
            )
        if not all(bool(torch.isfinite(x).all()) for x in one.tensors.values()):
            raise ValueError(
                f"{name} gives NaN or infinite q, k or outputs; look at the weights, and load the model with dtype=torch.float32."
            )
    return seen


def split(checkpoint: Checkpoint, texts: Any, held: Any, limit: int | None, length: int | None) -> tuple[list[Item], list[Item]]:
    """Texts to fit to, and others to measure on."""
    samples: list[Item] = [s.item for group in read(checkpoint, items(texts, limit), 1, length, limit).batches for s in group]
    if held is not None:
        beyond: list[Item] = [s.item for group in read(checkpoint, items(held, limit), 1, length, limit).batches for s in group]
        return samples, beyond
    if len(samples) < 2:
        raise ValueError("there is one text (or one piece of a long one); give at least 2, or others to measure on as `held`.")
    others = samples[min(2, len(samples) - 1) :: HELD]
    kept = {id(item) for item in others}
    return [item for item in samples if id(item) not in kept], others
