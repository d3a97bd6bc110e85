"""Curves of collapse: layer by layer, how alike the tokens of a text become in a model, whole and without its parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint, load
from ..exact import composite_norm, residual
from ..files import write
from ..huggingface import attention_modules
from ..huggingface.ablate import ABLATIONS, Ablation, Unablatable, ablated
from ..huggingface.double import in_double
from ..inputs import collate, read
from ..looking import watching_states
from ..scan import evaluating, prepare, run
from ..texts import items


@dataclass(frozen=True)
class Curves:
    """By ablation and stack of blocks, |X - 1 mean^T| / |X| in the composite norm of what enters the stack and leaves each block.

    The means over the texts; `refused` says why a model could not go without something.
    """

    model: str
    tokens: list[int]  # of each text
    curves: dict[str, dict[str, list[float]]]
    refused: dict[str, str]

    def only(self, ablation: str) -> list[float]:
        """The curve of a model with one stack."""
        found = self.curves[ablation]
        if len(found) != 1:
            raise ValueError(f"{self.model} has {len(found)} stacks of blocks ({', '.join(found)}); name one in .curves.")
        return next(iter(found.values()))

    def save(self, path: str | Path) -> Path:
        """As JSON."""
        path = Path(path)
        write(path, json.dumps(self.__dict__, indent=2).encode())
        return path


def collapse_curves(
    model: str | Path | nn.Module | Checkpoint,
    texts: Any,
    ablations: Sequence[str] = tuple(ABLATIONS),
    limit: int | None = None,
    length: int | None = None,
) -> Curves:
    """Let a model read each text in float64 with each ablation, and measure how far its tokens are from being one.

    0 is full collapse; float64 sees nothing below about 1e-15. `texts` may be anything that a scan reads; an ablation that the
    model's blocks do not allow is left out with the reason.

    >>> from transformers import BertConfig, BertModel
    >>> size = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, intermediate_size=8, vocab_size=9)
    >>> found = collapse_curves(BertModel(BertConfig(**size)), [{"input_ids": torch.arange(9)}], ["full", "pure SAN"])
    >>> len(found.only("full")), found.only("pure SAN")[-1] < 1e-6
    (4, True)
    """
    unknown = [name for name in ablations if name not in ABLATIONS]
    if unknown or not ablations:
        raise ValueError(f"there is no ablation {unknown or 'asked for'}; give some of {', '.join(ABLATIONS)}.")
    checkpoint = load(model)
    reading = read(checkpoint, items(texts, limit), 1, length, limit)
    curves: dict[str, dict[str, list[float]]] = {}
    refused: dict[str, str] = {}
    with in_double(checkpoint.model) as exact, evaluating(exact), torch.no_grad():
        double = Checkpoint(exact, checkpoint.processor, checkpoint.name)
        batches = [prepare(exact, collate(double, group)) for group in reading.batches]
        for name in ablations:
            try:
                curves[name] = _mean([_curve(double, inputs, ABLATIONS[name]) for inputs in batches])
            except Unablatable as error:
                refused[name] = str(error)
    if not curves:
        raise Unablatable(next(iter(refused.values())))
    return Curves(checkpoint.name, [group[0].size for group in reading.batches], curves, refused)


def _curve(checkpoint: Checkpoint, inputs: dict[str, Any], ablation: Ablation) -> dict[str, list[float]]:
    kept = _Kept()
    with ablated(checkpoint.model, ablation), watching_states(checkpoint.model, list(attention_modules(checkpoint.model)), kept):
        run(checkpoint.model, inputs)
    return kept.found


class _Kept:
    """The ratios of the states that are shown, by stack."""

    def __init__(self):
        self.found: dict[str, list[float]] = {}

    def states(self, depth: str, states: Tensor) -> None:
        if len(states) != 1:
            raise ValueError(f"a batch of {len(states)} was read; give one text, image or sound at a time.")
        rest = composite_norm(residual(states[0])) / composite_norm(states[0])
        self.found.setdefault(depth.rpartition(" ")[0], []).append(float(rest))


def _mean(found: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {stack: [sum(values) / len(values) for values in zip(*(f[stack] for f in found), strict=True)] for stack in found[0]}
