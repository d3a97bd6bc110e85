"""Explain: one text in a model: how its tokens grow alike, by which paths, by which tokens, and how sensitive each layer is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint import Checkpoint, load
from .explanations import WAYS, Explanation, given, one
from .scan import evaluating


def explain(model: str | Path | nn.Module | Checkpoint, text: Any, what: str = "tokens", length: int | None = None) -> Explanation:
    """What one text does in a model; `what` is tokens, lipschitz, paths or collapse.

    tokens: without which tokens each layer's attention would change most. lipschitz: how much each layer's attention stretches a
    small move of its input at most, near this text. paths: how much of the output comes by paths through 0, 1, 2 ... heads, and
    through each head. collapse: how alike the tokens become layer by layer, in the model and without its skips, MLPs and norms.

    The first 128 tokens are read unless `length` says more. `text` may be a path to a file.
    """
    check(text, what)
    checkpoint = load(model)
    read = given(checkpoint, text, length)
    with evaluating(checkpoint.model), torch.no_grad():
        return WAYS[what](read)


def check(text: Any, what: str) -> None:
    """Refuse an explanation that is not there, or a text that cannot be read, before anything is loaded."""
    if what not in WAYS:
        raise ValueError(f"there is no explanation {what!r}; ask for one of {', '.join(WAYS)}.")
    one(text)
