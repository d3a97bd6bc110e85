"""Fewer dims in the heads of two pretrained models, fitted to data, beside plain truncation of the weights at every point.

MiniLM: cosine of sentence embeddings and nearest neighbours, on other sentences of the text it was fitted to and on another text.
SmolLM2: perplexity against dims of v and frequency pairs kept, with the bytes of a cached token. No tuning after the cut.
Run as `python -m benchmarks.resize` (about four minutes); `python -m benchmarks.resize decoding` measures the time of a token.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

import heedful as hd
from heedful.cutting import change
from heedful.huggingface.adopt import sizes_of
from heedful.huggingface.layer import Resized
from heedful.resize import adopted_copy, choose, shorteners
from heedful.rules import Budget, Rule
from heedful.statistics import Moments

from .decoding import held
from .real import data, minilm, smollm2
from .timing import RESULTS, table, threads, timing_of, write

THREADS = 1
FIT, SAME, OTHER = "wikitext2/valid.txt", "wikitext2/test.txt", "tinyshakespeare/input.txt"
SENTENCES, TESTED, WORDS, CUT = 400, 200, 12, 128
PIECE, FITTED, READ = 256, 16, 4  # tokens of a piece of text, pieces fitted to, pieces read

ENCODER: dict[str, dict[str, int | Rule]] = {
    "d_k 24, every head": {"qk": 24},
    "d_k 24 on average": {"qk": Budget(0.75)},
    "d_k 24 on average, alike in a layer": {"qk": Budget(0.75, alike=True)},
    "d_k 16, every head": {"qk": 16},
    "d_k 16 on average": {"qk": Budget(0.5)},
    "d_k 16 on average, alike in a layer": {"qk": Budget(0.5, alike=True)},
    "d_v 24, every head": {"v": 24},
    "d_v 24 on average": {"v": Budget(0.75)},
    "d_v 16 on average": {"v": Budget(0.5)},
}
DECODER: dict[str, dict[str, int | Rule]] = {
    "as it is": {},
    "d_v 48 on average": {"v": Budget(0.75)},
    "d_v 32 on average": {"v": Budget(0.5)},
    "24 of 32 pairs on average": {"qk": Budget(0.75)},
    "16 of 32 pairs on average": {"qk": Budget(0.5)},
    "56 of 64 dims of both": {"qk": Budget(0.875), "v": Budget(0.875)},
}


def main() -> None:
    if sys.argv[1:] == ["decoding"]:
        decoding()
        return
    figures: dict[str, Any] = {
        "setting": {
            "fitted to": FIT,
            "sentences": SENTENCES,
            "sentences read": TESTED,
            "tokens of SmolLM2": [FITTED * PIECE, READ * PIECE],
        }
    }
    with threads(THREADS):
        figures["MiniLM"] = encoder()
        figures["SmolLM2-135M"] = decoder()
    path = RESULTS / "resize.json"
    if path.exists() and "decoding" in (former := json.loads(path.read_text())):
        figures["decoding"] = former["decoding"]
    print(f"\nwritten: results/{write('resize', figures).name}")


def sentences(name: str, words: int, count: int) -> list[str]:
    lines = [line.strip() for line in data(name).read_text().splitlines() if len(line.split()) > words]
    return lines[:count]


class Cutter:
    """A model whose layers are looked at once, and cut to many sizes."""

    def __init__(self, model: hd.Checkpoint, texts: Any, length: int | None = None):
        self.adopted = adopted_copy(model)
        layers = list(sizes_of(self.adopted.model))
        found = hd.scan(self.adopted, texts, statistics=(Moments,), length=length)
        self.ready = {
            way: shorteners(self.adopted, known, 8, length, layers) for way, known in (("fitted", found), ("plain", None))
        }

    def __call__(self, way: str, sizes: dict[str, Any]) -> hd.Checkpoint:
        model = copy.deepcopy(self.adopted.model)
        if sizes:
            change(model, choose(self.ready[way], sizes.get("qk"), sizes.get("v")), self.ready[way], {}, False)
        return hd.Checkpoint(model, self.adopted.processor, self.adopted.name)


def even(sizes: dict[str, int | Rule], dims: int) -> dict[str, Any]:
    """The same share in every head."""
    return {
        word: size if isinstance(size, int) else round(dims * size.keep)
        for word, size in sizes.items()
        if isinstance(size, int | Budget)
    }


def encoder() -> dict[str, Any]:
    """MiniLM's sentence embeddings."""
    model = minilm()
    cut = Cutter(model, sentences(FIT, WORDS, SENTENCES), CUT)
    tests = {"other sentences": sentences(SAME, WORDS, TESTED), "another text": sentences(OTHER, 7, TESTED)}
    rows: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, sizes in ENCODER.items():
        key = str(even(sizes, 32))
        plain[key] = plain.get(key) or kept(model, cut("plain", even(sizes, 32)), tests)
        rows[name] = {"fitted": kept(model, cut("fitted", sizes), tests), "plain": plain[key]}
        print(name, rows[name], flush=True)
    return rows


def kept(model: hd.Checkpoint, small: hd.Checkpoint, tests: dict[str, list[str]]) -> dict[str, Any]:
    """What stays of the embeddings of each text."""
    found = {text: hd.compare(model, small, lines, batch=32, length=CUT) for text, lines in tests.items()}
    return {text: {"cosine": round(one.cosine or 0, 4), "neighbours": round(one.neighbours or 0, 3)} for text, one in found.items()}


def decoder() -> dict[str, Any]:
    """SmolLM2's perplexity."""
    model = smollm2()
    cut, read = Cutter(model, pieces(model, FIT, FITTED)), pieces(model, SAME, READ)
    rows: dict[str, Any] = {}
    for name, sizes in DECODER.items():
        ways = {"fitted": sizes, "plain": even(sizes, 64)} if sizes else {"fitted": {}}
        rows[name] = {}
        for way, wanted in ways.items():
            small = cut(way, wanted)
            rows[name][way] = {"perplexity": round(perplexity(small, read), 3), "bytes of a cached token": cached(small.model)}
        print(name, rows[name], flush=True)
    return rows


def pieces(model: hd.Checkpoint, name: str, count: int) -> list[list[int]]:
    text = data(name).read_text()[: 12 * PIECE * count]
    ids = model.processor(text, verbose=False)["input_ids"]
    return [ids[i * PIECE : (i + 1) * PIECE] for i in range(count)]


@torch.no_grad()
def perplexity(model: hd.Checkpoint, read: list[list[int]]) -> float:
    losses = []
    for piece in read:
        ids = torch.tensor([piece])
        losses.append(torch.nn.functional.cross_entropy(model.model(ids, use_cache=False).logits[0, :-1].float(), ids[0, 1:]))
    return float(torch.stack(losses).mean().exp())


@torch.no_grad()
def cached(model: nn.Module) -> int:
    """Bytes that one more token takes in the cache."""
    cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
    model(torch.tensor([[5, 6, 7, 8]]), past_key_values=cache)
    return held(cache) // 4


PROMPT, WRITTEN = 1024, 24


@torch.no_grad()
def decoding() -> None:
    """The time of a token of SmolLM2 after a prompt, with half of its dims, all heads alike or each its own."""
    model = smollm2()
    cut = Cutter(model, pieces(model, FIT, 8))
    half: dict[str, dict[str, Any]] = {
        "as it is": {},
        "half of the dims, every head": {"qk": 32, "v": 32},
        "half of the dims on average": {"qk": Budget(0.5), "v": Budget(0.5)},
    }
    rows: dict[str, Any] = {}
    with threads(THREADS):
        ways = {name: cut("fitted", sizes).model for name, sizes in half.items()}
        ids = torch.tensor(pieces(model, SAME, PROMPT // PIECE)).view(1, -1)
        caches = {name: DynamicCache(config=one.config) for name, one in ways.items()}  # type: ignore[arg-type]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(WRITTEN + 1):
            for name, one in list(ways.items())[:: 1 if number % 2 == 0 else -1]:
                start = time.perf_counter()
                one(ids if number == 0 else ids[:, :1], past_key_values=caches[name], logits_to_keep=1)  # type: ignore[operator]
                seconds[name].append(time.perf_counter() - start)
    for name, one in ways.items():
        heads = sum(len(m.sizes.qk) for m in one.modules() if isinstance(m, Resized))
        row = {
            "seconds of the prompt": seconds[name][0],
            "seconds of a token": timing_of(seconds[name][1:]),
            "resized heads": heads,
        }
        rows[name] = {**row, "cache, bytes": held(caches[name])}
    path = RESULTS / "resize.json"
    figures = {k: x for k, x in (json.loads(path.read_text()) if path.exists() else {}).items() if k != "machine"}
    write("resize", {**figures, "decoding": rows})
    lines = [[name, f"{r['seconds of a token'].median * 1e3:.1f}", f"{r['cache, bytes'] / 1e6:.1f}"] for name, r in rows.items()]
    print(table(f"SmolLM2, a token after {PROMPT}", ["", "ms", "cache, MB"], lines))


if __name__ == "__main__":
    main()
