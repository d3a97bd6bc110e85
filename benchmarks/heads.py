"""Every mechanism on the heads of trained models: relative output error against exact attention, two models, two texts.

MiniLM (both ways, 512 tokens, all 72 heads) and SmolLM2 (causal, 2048 tokens, every seventh layer), at the same number of keys for each query as
far as a mechanism counts in keys. What learns is fitted on wikitext2 valid; what is random has three seeds. Run as `python -m benchmarks.heads`.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import heedful as hd
from heedful.attention import Capture, Mechanism
from heedful.mechanisms import (
    Clustered,
    FittedPerformer,
    Landmarks,
    Linear,
    Linformer,
    Local,
    Nystrom,
    Performer,
    Reformer,
    Sparse,
    TopK,
)

from .real import data, minilm, smollm2
from .timing import table, threads, write

TEXTS = {"wikitext2": "wikitext2/test.txt", "tinyshakespeare": "tinyshakespeare/input.txt"}
LEARNED, SEEDS, STEPS, THREADS = "wikitext2/valid.txt", 3, 40, 2
Calls = dict[str, list[Capture]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, the length of its texts, how many of them are read and learned from, which layers, the keys for each query."""

    load: Callable[[], hd.Checkpoint]
    length: int
    read: int
    learned: int
    layers: slice
    works: tuple[int, ...]
    causal: bool


SUBJECTS = {
    "MiniLM": Subject(minilm, 512, 2, 8, slice(None), (64, 128), False),
    "SmolLM2-135M": Subject(smollm2, 2048, 1, 3, slice(2, None, 7), (128, 256), True),
}


def main() -> None:
    warnings.filterwarnings("ignore", message="Performer's")
    found: dict[str, Any] = {}
    with threads(THREADS):
        for name, subject in SUBJECTS.items():
            found[name] = measure(subject)
            print(shown(name, found[name]), end="\n\n", flush=True)
            path = write("heads", {"seeds": SEEDS, "steps": STEPS, "learned_from": LEARNED, "models": found})
    print(f"written: results/{path.name}")


def contenders(work: int, length: int, causal: bool) -> dict[str, Mechanism]:
    """Each at so many keys for each query, where it counts in keys."""
    near = causal_sizes(work) if causal else both_sizes(work)
    found = {
        "TopK (oracle)": TopK(work),
        **near,
        "Sparse": Sparse(),
        "Performer": Performer(work),
        "Performer, fitted": FittedPerformer(work),
        "Linear": Linear(),
    }
    return found if causal else found | {"Nystrom": Nystrom(work), "Linformer": Linformer(work, length)}


def causal_sizes(work: int) -> dict[str, Mechanism]:
    return {
        "Clustered": Clustered(clusters=work // 4, exact=work * 5 // 8),
        "Landmarks": Landmarks(landmarks=work // 2 - 4, chunk=work // 4),
        "Local, 4 sinks": Local(window=work - 4, sinks=4),
        "Local": Local(window=work),
        "Reformer": Reformer(rounds=2, chunk=work // 4, window=work // 2),
    }


def both_sizes(work: int) -> dict[str, Mechanism]:
    """Windows and chunks reach both ways."""
    return {
        "Clustered": Clustered(clusters=work // 2, exact=work // 2),
        "Landmarks": Landmarks(landmarks=work - work // 8 * 3 - 4, chunk=work // 8),
        "Local, 4 sinks": Local(window=work // 2 - 2, sinks=4),
        "Local": Local(window=work // 2),
        "Reformer": Reformer(rounds=2, chunk=work // 12, window=work // 6),
    }


def measure(subject: Subject) -> dict[str, dict[int, dict[str, Any]]]:
    """By mechanism and work: the spread of the errors over heads on each text, and over seeds."""
    model = subject.load()
    learned = calls(model, subject, LEARNED, subject.learned)
    texts = {name: calls(model, subject, file, subject.read) for name, file in TEXTS.items()}
    exact = {name: [c.out for some in read.values() for c in some] for name, read in texts.items()}
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for work in subject.works:
        for name, mechanism in contenders(work, subject.length, subject.causal).items():
            errors = [errors_of(one, learned, texts, exact) for one in seeded(mechanism)]
            found.setdefault(name, {})[work] = {
                "settings": repr(mechanism),
                **{text: spread(torch.stack([e[text] for e in errors])) for text in TEXTS},
            }
            print(f"  {work} {name}", flush=True)
    return found


def calls(model: hd.Checkpoint, subject: Subject, file: str, count: int) -> Calls:
    """The calls of so many texts of full length, spread over a file."""
    text = data(file).read_text("utf-8")
    step = len(text) // count
    pieces = [text[i * step : i * step + 8 * subject.length] for i in range(count)]
    names = list(hd.capture(model, pieces[:1], length=16))[subject.layers]
    return hd.capture(model, pieces, length=subject.length, layers=names)


def seeded(mechanism: Mechanism) -> list[Mechanism]:
    """One for each seed, where it has one."""
    if not hasattr(mechanism, "seed") or hasattr(mechanism, "fit"):
        return [mechanism]
    return [dataclasses.replace(mechanism, seed=seed) for seed in range(SEEDS)]  # type: ignore[type-var]


def errors_of(mechanism: Mechanism, learned: Calls, texts: dict[str, Calls], exact: dict[str, list]) -> dict[str, Tensor]:
    """By text: of every head of every layer, the mean over its texts."""
    own = {layer: fitted(mechanism, some) for layer, some in learned.items()}
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for text, read in texts.items():
            found[text] = torch.cat([torch.stack([error(own[layer], c) for c in some]).mean(0) for layer, some in read.items()])
    return found


def fitted(mechanism: Mechanism, some: list[Capture]) -> Mechanism:
    if isinstance(mechanism, Landmarks):
        return copy.deepcopy(mechanism).fit(some, STEPS)
    return copy.deepcopy(mechanism).fit(some) if hasattr(mechanism, "fit") else mechanism  # type: ignore[operator]


def error(mechanism: Mechanism, call: Capture) -> Tensor:
    """|o - exact| / |exact| of each head of one text."""
    assert call.out is not None
    out = mechanism(call.q, call.k, call.v, call.mask, call.scale)
    return ((out - call.out).norm(dim=(-2, -1)) / call.out.norm(dim=(-2, -1)))[0]


def spread(errors: Tensor) -> dict[str, float]:
    """(seeds, heads): median and quartiles over heads of the mean over seeds, and how far the medians of seeds lie apart."""
    low, median, high = torch.quantile(errors.mean(0), torch.tensor([0.25, 0.5, 0.75])).tolist()
    medians = errors.median(1).values
    apart = float(medians.max() - medians.min())
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4), "seeds_apart": round(apart, 4)}


def shown(name: str, rows: dict[str, dict[int, dict[str, Any]]]) -> str:
    works = list(next(iter(rows.values())))
    head = ["", *(f"{work} keys, {text}" for work in works for text in TEXTS)]
    lines = [[kind, *(cell(row[work][text]) for work in works for text in TEXTS)] for kind, row in rows.items()]
    return table(f"{name}: relative output error, median over heads (quartiles)", head, lines)


def cell(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['low']:.2f} .. {found['high']:.2f})"


if __name__ == "__main__":
    main()
