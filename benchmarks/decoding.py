"""Writing from states: SmolLM2 with each mechanism that has one in every layer, beside exact attention with transformers' own cache.

After a prompt of 512 and of 2048 tokens each way writes 32 more, one token in turns, on one CPU thread. `equal` says whether one
causal pass over all of it, without a cache, chooses the same tokens. Run as `python -m benchmarks.decoding`.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

import heedful as hd
from heedful.huggingface import attention_modules
from heedful.mechanisms import ALL, Mechanism

from .real import data, smollm2
from .timing import Timing, table, threads, timing_of, write

THREADS, WRITTEN = 1, 32
PROMPTS = (512, 2048)
SETTINGS: dict[str, dict[str, Any]] = {"Local": {"window": 256, "sinks": 4}}  # others take their defaults
EXACT = "exact, all keys"


def main() -> None:
    warnings.filterwarnings("ignore", message="Performer's")
    loaded = smollm2()
    ids = loaded.processor(data("wikitext2/test.txt").read_text()[:40_000], return_tensors="pt")["input_ids"]
    with threads(THREADS), torch.no_grad():
        found = {length: measure(loaded.model, ids[:, :length]) for length in PROMPTS}
    print(shown(found))
    setting = {"model": loaded.name, "layers": 30, "dtype": "float32", "batch": 1, "written": WRITTEN, "settings": SETTINGS}
    print(f"\nwritten: results/{write('decoding', {'setting': setting, 'prompts': found}).name}")


@dataclass
class Way:
    """One way of attending while it writes: its mechanisms by layer (none: the model's own), its cache, its tokens and times."""

    mechanisms: dict[str, Mechanism]
    cache: Any = None
    tokens: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def step(self, model: nn.Module, ids: Tensor) -> None:
        """Read the tokens, choose the next one."""
        self.enter(model)
        self.cache = self.cache or (hd.cache(model) if self.mechanisms else DynamicCache(config=model.config))  # type: ignore[arg-type]
        start = time.perf_counter()
        logits = model(ids, past_key_values=self.cache).logits[:, -1]
        self.seconds.append(time.perf_counter() - start)
        self.logits.append(logits)
        self.tokens.append(logits.argmax(-1, keepdim=True))
        self.bytes.append(held(self.cache))

    def enter(self, model: nn.Module) -> None:
        hd.unswap(model)
        if self.mechanisms:
            hd.swap(model, self.mechanisms)


def held(cache: Any) -> int:
    if hasattr(cache, "bytes"):
        return cache.bytes
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def ways(model: nn.Module) -> dict[str, Way]:
    found = {EXACT: Way({})}
    for kind in ALL:
        if "state" in kind.supports:
            one = {name: kind(**SETTINGS.get(kind.__name__, {})) for name in attention_modules(model)}
            found[repr(next(iter(one.values())))] = Way(one)
    return found


def measure(model: nn.Module, prompt: Tensor) -> dict[str, dict[str, Any]]:
    """Each way reads the prompt, then they write in turns."""
    each = ways(model)
    for number in range(WRITTEN + 1):
        for way in list(each.values())[:: 1 if number % 2 == 0 else -1]:
            way.step(model, way.tokens[-1] if number else prompt)
    return {name: figures(model, prompt, way) for name, way in each.items()}


def figures(model: nn.Module, prompt: Tensor, way: Way) -> dict[str, Any]:
    way.enter(model)
    again = model(torch.cat([prompt, *way.tokens[:-1]], 1), use_cache=False, logits_to_keep=WRITTEN + 1).logits
    logits = torch.stack(way.logits, 1)
    hd.unswap(model)
    return {
        "seconds_prompt": way.seconds[0],
        "seconds_per_token": timing_of(way.seconds[1:]),
        "bytes_after_prompt": way.bytes[0],
        "bytes_after_writing": way.bytes[-1],
        "equal": bool((again.argmax(-1) == torch.cat(way.tokens, 1)).all()),
        "farthest_logit": float((logits - again).abs().max()),
    }


def shown(found: dict[int, dict[str, dict[str, Any]]]) -> str:
    head = ["prompt", "way", "prompt s", "ms a token", "of exact", "MB after prompt", "MB at the end", "equal", "farthest logit"]
    rows = []
    for length, each in found.items():
        exact: Timing = each[EXACT]["seconds_per_token"]
        for name, row in each.items():
            median = row["seconds_per_token"].median
            size = [f"{row[word] / 1e6:.2f}" for word in ("bytes_after_prompt", "bytes_after_writing")]
            ms = [f"{row['seconds_prompt']:.2f}", f"{median * 1e3:.1f}", f"{median / exact.median:.2f}"]
            rows.append([str(length), name, *ms, *size, str(row["equal"]), f"{row['farthest_logit']:.1e}"])
    return table(f"writing {WRITTEN} tokens, SmolLM2-135M, float32, batch 1, {THREADS} threads", head, rows)


if __name__ == "__main__":
    main()
