"""Capturing: the attention calls of a model while it reads, kept for what needs q, k and v themselves (fitting, benchmarks)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .attention import Capture
from .checkpoint import Checkpoint, load
from .inputs import Sample, collate, read
from .scan import evaluating, prepare, run, watching_calls
from .texts import items


def capture(
    model: str | Path | nn.Module | Checkpoint,
    texts: Any,
    limit: int | None = None,
    batch: int = 1,
    length: int | None = None,
    layers: Iterable[str] | None = None,
) -> dict[str, list[Capture]]:
    """Every attention call by layer, longest text first, while the model reads; all layers unless some are named.

    A call keeps its q, k, v and out: 4 x batch x heads x tokens x dim numbers.
    """
    checkpoint = load(model)
    reading = read(checkpoint, items(texts, limit), batch, length, limit)
    wanted = None if layers is None else set(layers)
    found: dict[str, list[Capture]] = {}
    for group in reading.batches:
        for layer, made in calls(checkpoint, group, wanted).items():
            found.setdefault(layer, []).extend(made)
    unknown = sorted(wanted - found.keys()) if wanted is not None else []
    if unknown:
        raise ValueError(f"no attention call of {', '.join(unknown)} was seen; the model's layers are named as in its findings.")
    return found


def calls(checkpoint: Checkpoint, group: list[Sample], wanted: set[str] | None = None) -> dict[str, list[Capture]]:
    """The attention calls of one batch by layer."""
    found: dict[str, list[Capture]] = {}

    def keep(call: Capture) -> None:
        if wanted is None or call.layer in wanted:
            kept = {name: None if x is None else x.detach() for name in ("q", "k", "v", "out") for x in [getattr(call, name)]}
            found.setdefault(call.layer, []).append(dataclasses.replace(call, **kept))

    model = checkpoint.model
    with evaluating(model):
        inputs = prepare(model, collate(checkpoint, group))
        with watching_calls(model, keep), torch.no_grad():
            run(model, inputs)
    return found
