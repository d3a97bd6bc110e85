"""Stock: an empty model of a family's own class, to be filled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights


def blank(make: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """A model of a class whose weights are still to be loaded."""
    with no_init_weights():
        model = make._from_config(config, dtype=dtype).eval()
    model.tie_weights()
    return model
