"""What growth statistics cost: against a forward and backward pass of the layer, in time and memory, by width and length.

One BERT layer (attention and MLP), 512 tokens, float32, and for the memory longer texts too. Run as `python -m benchmarks.growth`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from heedful.lesson import Lesson
from heedful.mask import Mask
from heedful.statistics.growth import Growth

from .timing import peak_memory, table, threads, timings, write

WIDTHS, TOKENS, THREADS = (384, 576, 768), 512, 2
LONGER = (512, 1024, 2048, 4096)
HEAD = 64


def main() -> None:
    with threads(THREADS):
        cost = {str(width): measure(width) for width in WIDTHS}
        memory = {str(tokens): memory_of(384, tokens) for tokens in LONGER}
    path = write("growth", {"tokens": TOKENS, "threads": THREADS, "cost": cost, "memory": memory})
    rows = [[w, *(f"{c[name]:.2f}" for name in ("layer", "causal", "attention"))] for w, c in cost.items()]
    print(table(f"statistics / forward and backward, {TOKENS} tokens", ["D", "of the layer", "causal", "of attention alone"], rows))
    rows = [[t, *(f"{m[name] / 2**20:.0f}" for name in ("statistics", "dense"))] for t, m in memory.items()]
    print(table("MiB at the peak, D = 384", ["tokens", "statistics", "one T x T matrix a head"], rows))
    print(f"written: results/{path.name}")


def measure(width: int) -> dict[str, Any]:
    """Ratios of medians, and the timings."""
    layer, x = layer_of(width), torch.randn(1, TOKENS, width)
    full, causal = (lesson_of(width, TOKENS, Mask(causal=c)) for c in (False, True))
    found = timings(
        {
            "layer": lambda: _both(layer, x),
            "attention": lambda: _both(layer.attention, x),
            "statistics": lambda: Growth.of_lesson(full, 0),
            "statistics, causal": lambda: Growth.of_lesson(causal, 0),
        },
        rounds=9,
        budget=20.0,
    )
    own = found["statistics"].median
    return {
        "layer": own / found["layer"].median,
        "causal": found["statistics, causal"].median / found["layer"].median,
        "attention": own / found["attention"].median,
        "timings": found,
    }


def layer_of(width: int) -> BertLayer:
    config = BertConfig(hidden_size=width, num_attention_heads=width // HEAD, intermediate_size=4 * width)
    config._attn_implementation = "sdpa"
    return BertLayer(config).eval()


def lesson_of(width: int, tokens: int, mask: Mask) -> Lesson:
    heads = width // HEAD
    q, k, v, gradient = torch.randn(4, 1, heads, tokens, HEAD)
    x, returned = torch.randn(2, 1, tokens, width)
    return Lesson("layer", q, k, v, mask, HEAD**-0.5, states=x, gradient=gradient, returned=returned)


def _both(layer: Any, x: Tensor) -> None:
    given = x.clone().requires_grad_()
    out = layer(given)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def memory_of(width: int, tokens: int) -> dict[str, Any]:
    """Bytes at the peak beyond the lesson itself."""
    lesson = lesson_of(width, tokens, Mask())
    return {"statistics": peak_memory(lambda: Growth.of_lesson(lesson, 0)), "dense": 4 * width // HEAD * tokens**2}


if __name__ == "__main__":
    main()
