"""Real attention: what MiniLM computes while it reads our demo text, with no data but what the packages bring."""

from __future__ import annotations

import heedful as hd
from heedful.attention import Capture
from heedful.demo import model_folder, texts


def minilm() -> hd.Checkpoint:
    """all-MiniLM-L6-v2: BERT, 6 layers of 12 heads, 32 dims each, 512 positions."""
    return hd.load(model_folder())


def minilm_calls(tokens: int) -> list[Capture]:
    """The attention calls of its layers on that many tokens, at most 512."""
    calls = hd.capture(minilm(), texts()[-1:], length=tokens)
    found = [layer[0] for layer in calls.values()]
    if found[0].q.shape[-2] != tokens:
        raise ValueError(f"the demo text gives {found[0].q.shape[-2]} tokens, {tokens} were asked for; ask for 512 at most.")
    return found
