"""Landmarks fitted to two pretrained models, against a window (with sinks, and alone) of the same work for each query.

Output error of every head on text of another domain than the fit's, and SmolLM2's perplexity with every layer replaced.
Work counts the keys that a query meets: near keys, sinks and landmarks. Run as `python -m benchmarks.landmarks` (about an hour).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import heedful as hd
from heedful.attention import Capture, Mask, Mechanism
from heedful.mechanisms import Landmarks, Softmax
from heedful.mechanisms.fitting import fit_model
from heedful.ops import hop

from .real import data, minilm, smollm2
from .timing import table, threads, write

THREADS = 1
WORKS = (128, 64, 256)
SINKS, STEPS = 4, 80
FIT, OTHER, READ = "wikitext2/valid.txt", "tinyshakespeare/input.txt", "wikitext2/test.txt"
WINDOWS = 4  # texts that perplexity is taken over


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, the length of its texts, and how many of them are fitted to and judged on."""

    name: str
    load: Callable[[], hd.Checkpoint]
    length: int
    fitted: int
    judged: int
    causal: bool


SUBJECTS = (Subject("MiniLM", minilm, 512, 36, 4, False), Subject("SmolLM2-135M", smollm2, 2048, 12, 1, True))


class Near(Mechanism):
    """A window of `work` keys, the first `sinks` tokens among them: the control."""

    supports = frozenset({"causal", "shared"})

    def __init__(self, work: int, sinks: int):
        self.work, self.sinks = work, sinks

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        keys = self.work - self.sinks
        window = keys if mask.causal else (keys + 1) // 2
        return hop(q, k, v, mask=dataclasses.replace(mask, window=window, sinks=self.sinks), scale=scale)[0]


def main() -> None:
    figures: dict[str, Any] = {"setting": setting(), "errors": {}, "perplexity": {}}
    with threads(THREADS):
        for subject in SUBJECTS:
            measure(subject, figures)
    print(shown(figures))


def setting() -> dict[str, Any]:
    texts = {s.name: {"length": s.length, "fitted": s.fitted, "judged": s.judged} for s in SUBJECTS}
    return {"steps": STEPS, "fitted on": FIT, "errors on": OTHER, "perplexity on": READ, "windows": WINDOWS, "texts": texts}


def measure(subject: Subject, figures: dict[str, Any]) -> None:
    """Fit each work to one model; figures are written as they come."""
    reader = subject.load()
    start = time.perf_counter()
    teaching = captured(reader, FIT, subject.length, subject.fitted)
    reading = time.perf_counter() - start
    judging = captured(reader, OTHER, subject.length, subject.judged)
    errors = figures["errors"][subject.name] = {}
    perplexities = figures["perplexity"].setdefault(subject.name, {}) if subject.causal else None
    if perplexities is not None:
        perplexities["exact"] = perplexity(reader, {})
    for work in WORKS:
        start = time.perf_counter()
        fitted = fit_model(
            teaching,
            plan(work, subject.causal),
            STEPS,
            done=lambda layer, one: print(f"{layer}: {one.errors.median():.3f}", flush=True),
        )
        minutes = (reading + time.perf_counter() - start) / 60
        window = {name: {layer: Near(work, sinks) for layer in fitted} for name, sinks in (("window, sinks", SINKS), ("window", 0))}
        ways: dict[str, dict[str, Mechanism]] = {"landmarks": {**fitted}, **window}
        errors[work] = {"minutes of fitting": minutes, **{name: spread(error(judging, way)) for name, way in ways.items()}}
        write("landmarks", figures)
        if perplexities is not None:
            perplexities[work] = {}
            for name, way in ways.items():
                perplexities[work][name] = perplexity(reader, way)
                write("landmarks", figures)
        print(shown(figures), flush=True)


def plan(work: int, causal: bool) -> Landmarks:
    """Landmarks that meet so many keys a query: about half of them near."""
    chunk, sides = (work // 4, 2) if causal else (work // 8, 3)
    return Landmarks(work - sides * chunk - SINKS, chunk, SINKS)


def rows(reader: hd.Checkpoint, name: str, length: int, count: int) -> Tensor:
    """The first texts of that many tokens (count, length)."""
    text = data(name).read_text()[: 8 * length * count]
    assert reader.processor is not None
    ids = reader.processor(text, return_tensors="pt", truncation=False, verbose=False)["input_ids"][0]
    return ids[: length * count].view(count, length)


def captured(reader: hd.Checkpoint, name: str, length: int, count: int) -> dict[str, list[Capture]]:
    """Every layer's calls, kept in half precision."""
    found: dict[str, list[Capture]] = {}
    for row in rows(reader, name, length, count):
        for layer, (call,) in hd.capture(reader, [{"input_ids": row[None]}]).items():
            found.setdefault(layer, []).append(
                dataclasses.replace(call, q=call.q.half(), k=call.k.half(), v=call.v.half(), out=None)
            )
    return found


@torch.no_grad()
def error(captures: dict[str, list[Capture]], way: dict[str, Mechanism]) -> Tensor:
    """The relative output error of each head of each layer, the mean over texts."""
    exact, found = Softmax(), []
    for layer, calls in captures.items():
        errors = []
        for call in calls:
            q, k, v = call.q.float(), call.k.float(), call.v.float()
            wanted = exact(q, k, v, call.mask, call.scale)
            off = way[layer](q, k, v, call.mask, call.scale) - wanted
            errors.append(off.square().sum((0, 2, 3)).sqrt() / wanted.square().sum((0, 2, 3)).sqrt())
        found.append(torch.stack(errors).mean(0))
    return torch.cat(found)


def spread(errors: Tensor) -> dict[str, float]:
    low, median, high = (round(float(errors.quantile(x)), 4) for x in (0.25, 0.5, 0.75))
    return {"median": median, "low": low, "high": high, "mean": round(float(errors.mean()), 4)}


@torch.no_grad()
def perplexity(reader: hd.Checkpoint, way: dict[str, Mechanism]) -> float:
    """Of the texts that nothing was fitted to, with these mechanisms in place."""
    if way:
        hd.swap(reader.model, way)
    losses = []
    for row in rows(reader, READ, 2048, WINDOWS):
        logits = reader.model(row[None], use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), row[1:]))
    if way:
        hd.unswap(reader.model)
    return round(float(torch.stack(losses).mean().exp()), 3)


def shown(figures: dict[str, Any]) -> str:
    """The tables, from the figures as measured or as read back from results/landmarks.json."""
    parts = []
    for name, works in figures["errors"].items():
        lines = [
            [str(work), *(f"{row[way]['median']:.3f}" for way in WAYS), f"{row['minutes of fitting']:.1f}"]
            for work, row in sorted(works.items(), key=lambda item: int(item[0]))
        ]
        parts.append(table(f"{name}: relative output error on {OTHER}, median over heads", ["work", *WAYS, "minutes"], lines))
    for name, works in figures["perplexity"].items():
        measured = sorted(((work, row) for work, row in works.items() if work != "exact"), key=lambda item: int(item[0]))
        lines = [[str(work), *(f"{row.get(way, float('nan')):.2f}" for way in WAYS)] for work, row in measured]
        parts.append(table(f"{name}: perplexity on {READ} (exact: {works['exact']:.2f})", ["work", *WAYS], lines))
    return "\n\n".join(parts)


WAYS = ("landmarks", "window, sinks", "window")

if __name__ == "__main__":
    main()
