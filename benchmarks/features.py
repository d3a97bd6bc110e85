"""Random features on real heads: how far each way of drawing them takes Performer's output from exact attention.

The 72 heads of MiniLM, 512 tokens; fitted on wikitext2's valid texts, judged on its test texts and on tinyshakespeare. Run as `python -m benchmarks.features`.
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch
from torch import Tensor

import heedful as hd
from heedful import Capture
from heedful.mechanisms import FittedPerformer, Performer

from .real import data, minilm
from .timing import table, threads, write

NUMBERS, SEEDS = (64, 128, 256), 3
LENGTH, FITTED, JUDGED = 512, 8, 4  # tokens, and texts
LETTERS = 4000  # of one text; more than 512 tokens
METHODS: dict[str, Any] = {
    "FAVOR+ iid": lambda features, seed: Performer(features, "iid", seed),
    "FAVOR+ orthogonal": lambda features, seed: Performer(features, seed=seed),
    "centred and balanced": lambda features, seed: FittedPerformer(features, seed=seed, proposal="normal"),
    "... and drawn by attention": lambda features, seed: FittedPerformer(features, seed=seed, proposal="attention"),
    "... and drawn dense-exponential": lambda features, seed: FittedPerformer(features, seed=seed, proposal="gaussian"),
}

TEXTS = {"wikitext2": "wikitext2/test.txt", "tinyshakespeare": "tinyshakespeare/input.txt"}  # judged on

Layers = dict[str, list[Capture]]


def main() -> None:
    warnings.filterwarnings("ignore", message="Performer's")
    with threads(1):
        fitted, judged = captures("wikitext2/valid.txt", FITTED), {name: captures(file, JUDGED) for name, file in TEXTS.items()}
        found: dict[str, Any] = {text: {name: {} for name in METHODS} for text in TEXTS}
        for name in METHODS:
            for number in NUMBERS:
                for text, heads in measure(name, number, fitted, judged).items():
                    found[text][name][number] = spread(heads)
        uniform = {text: spread(from_mean(layers)) for text, layers in judged.items()}
        print("\n\n".join(shown(text, rows, uniform[text]) for text, rows in found.items()))
        setting = {"model": "MiniLM", "heads": 72, "tokens": LENGTH, "texts": {"fitted": FITTED, "judged": JUDGED}, "seeds": SEEDS}
        figures = {"setting": setting, "relative_output_error_over_heads": found, "mean_of_v": uniform}
        print(f"\nwritten: results/{write('features', figures).name}")


def captures(name: str, count: int) -> Layers:
    """The calls of the first texts of that file, each LENGTH tokens long."""
    text = data(name).read_text()
    found = hd.capture(minilm(), [text[start : start + LETTERS] for start in range(0, count * LETTERS, LETTERS)], length=LENGTH)
    assert all(c.q.shape[2] == LENGTH for calls in found.values() for c in calls), "a text is too short"
    return found


def measure(name: str, number: int, fitted: Layers, judged: dict[str, Layers]) -> dict[str, Tensor]:
    """For each text the error of each head of each layer, the mean over its pieces and seeds."""
    heads: dict[str, list[Tensor]] = {text: [] for text in judged}
    for layer in fitted:
        made = [METHODS[name](number, seed) for seed in range(SEEDS)]
        for mechanism in made:
            if isinstance(mechanism, FittedPerformer):
                mechanism.fit(fitted[layer])
        for text, layers in judged.items():
            calls = layers[layer]
            heads[text].append(torch.stack([off(m(c.q, c.k, c.v, c.mask, c.scale), c) for m in made for c in calls]).mean(0))
    return {text: torch.cat(parts) for text, parts in heads.items()}


def from_mean(judged: Layers) -> Tensor:
    """The error of each head if its output were the mean of v."""
    mean = [off(c.v.mean(-2, keepdim=True).expand_as(c.v), c) for calls in judged.values() for c in calls]
    return torch.stack(mean).view(len(judged), -1, mean[0].shape[-1]).mean(1).flatten()


def off(out: Tensor, call: Capture) -> Tensor:
    """The relative distance from exact attention, for each head."""
    exact = hd.hop(call.q, call.k, call.v, mask=call.mask, scale=call.scale)[0]
    return torch.linalg.vector_norm(out - exact, dim=(0, 2, 3)) / torch.linalg.vector_norm(exact, dim=(0, 2, 3))


def spread(heads: Tensor) -> dict[str, float]:
    low, median, high = statistics.quantiles(heads.tolist(), n=4)
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}


def shown(text: str, found: dict[str, dict[int, dict[str, float]]], uniform: dict[str, float]) -> str:
    head = ["directions", *(f"R={number}" for number in NUMBERS)]
    rows = [[name, *(f"{x['median']:.3f} ({x['low']:.2f}..{x['high']:.2f})" for x in row.values())] for name, row in found.items()]
    title = f"{text}: relative output error on MiniLM's 72 heads, {LENGTH} tokens: median (quartiles) over heads"
    return table(title, head, [*rows, ["mean of v", *[f"{uniform['median']:.3f}"] * len(NUMBERS)]])


if __name__ == "__main__":
    main()
