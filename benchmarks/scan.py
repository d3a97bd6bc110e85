"""A scan against reading alone: MiniLM-shaped models on longer texts, time and peak memory, on two CPU threads.

`forward` is the model by torch's own scaled_dot_product_attention; `scan` looks at 256 query rows of each text with every statistic;
`output_attentions` is what one does without heedful: dense attention handed out, and the same statistics from it.
Run as `python -m benchmarks.scan`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertModel

import heedful as hd
from heedful.ops.profile import WINDOWS

from .timing import peak_memory, table, threads, timings, write

THREADS, TEXTS = 2, 2
LENGTHS = (2048, 4096)


def main() -> None:
    with threads(THREADS):
        found = {length: measure(length) for length in LENGTHS}
    print(shown(found))
    setting = {
        "layers": 6,
        "heads": 12,
        "dim": 32,
        "dtype": "float32",
        "texts": TEXTS,
        "rows": 256,
        "unit": "seconds and bytes per text",
    }
    print(f"\nwritten: results/{write('scan', {'setting': setting, 'lengths': found}).name}")


def model(length: int) -> BertModel:
    """MiniLM's shape with random weights and room for that many tokens."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=length,
    )
    return BertModel(config).eval()


def measure(length: int) -> dict[str, Any]:
    """Seconds and extra bytes of each way of reading, per text."""
    reader = model(length)
    ids = torch.randint(1000, 30000, (TEXTS, 1, length))
    cases = {
        "forward": lambda: [forward(reader, text) for text in ids],
        "scan": lambda: hd.scan(reader, [{"input_ids": text} for text in ids]),
        "scan, every row": lambda: hd.scan(reader, [{"input_ids": ids[0]}], rows=None),
        "output_attentions": lambda: dense(reader, ids[0]),
    }
    counts = {"forward": TEXTS, "scan": TEXTS}
    seconds = timings(cases, rounds=5, budget=30.0)
    per_text = {name: seconds[name].median / counts.get(name, 1) for name in cases}
    memory = {name: peak_memory(case) for name, case in cases.items()}
    return {"seconds": seconds, "seconds_per_text": per_text, "bytes": memory, "ratios": ratios(per_text, memory)}


def forward(reader: BertModel, ids: Tensor) -> Tensor:
    reader.set_attn_implementation("sdpa")
    with torch.no_grad():
        return reader(ids).last_hidden_state


def dense(reader: BertModel, ids: Tensor) -> list[dict[str, Tensor]]:
    """The statistics of the row profile and the column sums, from dense attention of every layer."""
    reader.set_attn_implementation("eager")
    with torch.no_grad():
        return [statistics(p) for p in reader(ids, output_attentions=True).attentions]


def statistics(p: Tensor) -> dict[str, Tensor]:
    """Of one (batch, heads, queries, keys) matrix, the plain way."""
    place = torch.arange(p.shape[-1])
    gap = (place[:, None] - place).abs()
    squared = p.square()
    return {
        "entropy": torch.special.entr(p).sum(-1),
        "peak": p.amax(-1),
        "concentration": squared.sum(-1),
        "sink": p[..., 0],
        "distance": (p * gap).sum(-1),
        "near": torch.stack([(p * (gap < w)).sum(-1) for w in WINDOWS], -1),
        "load": p.sum(-2),
        "squares": squared.sum(-2),
    }


def ratios(seconds: dict[str, float], memory: dict[str, int | None]) -> dict[str, float | None]:
    def bytes_of(one: str, other: str) -> float | None:
        return None if memory[one] is None or not memory[other] else round(memory[one] / memory[other], 2)  # type: ignore[operator]

    return {
        "scan time over forward": round(seconds["scan"] / seconds["forward"], 3),
        "scan memory over forward": bytes_of("scan", "forward"),
        "output_attentions time over scan": round(seconds["output_attentions"] / seconds["scan"], 2),
        "output_attentions memory over scan": bytes_of("output_attentions", "scan"),
    }


def shown(found: dict[int, dict[str, Any]]) -> str:
    head = ["L", "way", "s a text", "x forward", "peak MB", "x forward"]
    lines = []
    for length, row in found.items():
        seconds, memory = row["seconds_per_text"], row["bytes"]
        for name in seconds:
            size = "-" if memory[name] is None else f"{memory[name] / 1e6:.0f}"
            times = "-" if memory[name] is None else f"{memory[name] / memory['forward']:.2f}"
            lines.append([str(length), name, f"{seconds[name]:.3f}", f"{seconds[name] / seconds['forward']:.2f}", size, times])
    return table(f"reading one text, 6 layers of 12 heads, {THREADS} threads", head, lines)


if __name__ == "__main__":
    main()
