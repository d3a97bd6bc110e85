"""Real attention: MiniLM, a text for it, and what it computes while it reads our demo text."""

from __future__ import annotations

import heedful as hd
from benchmarks.real import data
from heedful.attention import Capture
from heedful.demo import model_folder, texts


def minilm() -> hd.Checkpoint:
    """all-MiniLM-L6-v2: BERT, 6 layers of 12 heads, 32 dims each, 512 positions."""
    return hd.load(model_folder())


def text() -> str:
    """wikitext2's test text; where it is not there, the demo's, of some 500 tokens."""
    try:
        return data("wikitext2/test.txt").read_text("utf-8")
    except SystemExit:
        return texts()[-1]


def minilm_calls(tokens: int) -> list[Capture]:
    """The attention calls of its layers on that many tokens, at most 512."""
    calls = hd.capture(minilm(), texts()[-1:], length=tokens)
    found = [layer[0] for layer in calls.values()]
    if found[0].q.shape[-2] != tokens:
        raise ValueError(f"the demo text gives {found[0].q.shape[-2]} tokens, {tokens} were asked for; ask for 512 at most.")
    return found
