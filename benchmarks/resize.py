"""Fewer dims in the heads of two pretrained models, fitted to data, beside plain truncation of the weights at every point.

MiniLM: cosine of sentence embeddings and nearest neighbours, on other sentences of the text it was fitted to and on another text.
SmolLM2: perplexity against dims of v and frequency pairs kept, with the bytes of a cached token. No tuning after the cut.
Run as `python -m benchmarks.resize` (about four minutes); `python -m benchmarks.resize decoding` measures the time of a token.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

import heedful as hd
from heedful.huggingface.layer import Resized
from heedful.resize import sizes_by
from heedful.rules import Budget, Rule
from heedful.statistics import Moments

from .decoding import held
from .real import data, minilm, smollm2
from .timing import RESULTS, table, threads, timing_of, write

THREADS = 1
FIT, SAME, OTHER = "wikitext2/valid.txt", "wikitext2/test.txt", "tinyshakespeare/input.txt"
SENTENCES, WORDS, CUT = 400, 12, 128
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
    "d_v 56 on average": {"v": Budget(0.875)},
    "d_v 48 on average": {"v": Budget(0.75)},
    "d_v 32 on average": {"v": Budget(0.5)},
    "28 of 32 pairs on average": {"qk": Budget(0.875)},
    "24 of 32 pairs on average": {"qk": Budget(0.75)},
    "16 of 32 pairs on average": {"qk": Budget(0.5)},
    "56 of 64 dims of both": {"qk": Budget(0.875), "v": Budget(0.875)},
}


def main() -> None:
    if sys.argv[1:] == ["decoding"]:
        decoding()
        return
    figures: dict[str, Any] = {
        "setting": {"fitted to": FIT, "sentences": SENTENCES, "tokens of SmolLM2": [FITTED * PIECE, READ * PIECE]}
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


def cut(model: hd.Checkpoint, findings: Any, sizes: dict[str, Any]) -> hd.Checkpoint:
    """The model with these sizes, by findings or (None) by its weights alone."""
    return hd.apply(model, sizes_by(model, findings, **sizes), findings) if sizes else model


def encoder() -> dict[str, Any]:
    """MiniLM's sentence embeddings."""
    model = minilm()
    found = hd.scan(model, sentences(FIT, WORDS, SENTENCES), statistics=(Moments,), length=CUT)
    tests = {"other sentences": sentences(SAME, WORDS, SENTENCES), "another text": sentences(OTHER, 7, 200)}
    rows: dict[str, Any] = {}
    for name, sizes in ENCODER.items():
        rows[name] = {}
        plain = {
            word: (size if isinstance(size, int) else round(32 * size.keep))
            for word, size in sizes.items()
            if isinstance(size, int | Budget)
        }
        for way, small in (("fitted", cut(model, found, sizes)), ("plain", cut(model, None, plain))):
            for text, lines in tests.items():
                one = hd.compare(model, small, lines, batch=32, length=CUT)
                rows[name][f"{way}, {text}"] = {"cosine": round(one.cosine or 0, 4), "neighbours": round(one.neighbours or 0, 3)}
        print(name, {k: tuple(x.values()) for k, x in rows[name].items()}, flush=True)
    return rows


def decoder() -> dict[str, Any]:
    """SmolLM2's perplexity."""
    model = smollm2()
    fit, read = (pieces(model, name, count) for name, count in ((FIT, FITTED), (SAME, READ)))
    found = hd.scan(model, fit, statistics=(Moments,), batch=2)
    rows: dict[str, Any] = {}
    for name, sizes in DECODER.items():
        rows[name] = {}
        for way, known in (("fitted", found), ("plain", None)) if sizes else (("fitted", None),):
            small = cut(model, known, sizes)
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
    found = hd.scan(model, pieces(model, FIT, 8), statistics=(Moments,), batch=2)
    half: dict[str, dict[str, Any]] = {
        "as it is": {},
        "half of the dims, every head": {"qk": 32, "v": 32},
        "half of the dims on average": {"qk": Budget(0.5), "v": Budget(0.5)},
    }
    rows: dict[str, Any] = {}
    with threads(THREADS):
        ways = {name: cut(model, found, sizes).model for name, sizes in half.items()}
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
