"""Clustered on real heads: relative output error, keys read per query, and time against Performer with that many features.

MiniLM (512 tokens) and SmolLM2 (causal, 2048 tokens), two texts; times also at 4096 and 16384 tokens, those keys and queries read on in a
circle. Run as `python -m benchmarks.clustered`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import heedful as hd
from heedful.attention import Mask
from heedful.mechanisms import Clustered, Performer, Softmax
from heedful.ops.clustered import LIKE, choose_clusters, mean_queries
from heedful.ops.clustered_causal import Reach, choose_past, means_of, remember
from heedful.ops.clusters import cluster_means, moment, nearest_means, rows, spaced

from .real import data, minilm, smollm2
from .timing import Timing, table, threads, timings, write

THREADS = 2
TEXTS = {"wikitext2": "wikitext2/test.txt", "tinyshakespeare": "tinyshakespeare/input.txt"}
SETTINGS = {
    "MiniLM": {64: Clustered(clusters=32, exact=32, group=64, rounds=0), 128: Clustered(clusters=64, exact=64, group=64, rounds=0)},
    "SmolLM2-135M": {256: Clustered(clusters=64, exact=96, group=64)},
}
LOADERS = {"MiniLM": (minilm, 512, Mask()), "SmolLM2-135M": (smollm2, 2048, Mask(causal=True))}
LONGER = (4096, 16384)

Call = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    warnings.filterwarnings("ignore", message="Performer's")
    with threads(THREADS):
        found = {name: measure(name) for name in LOADERS}
        print(summary(found))
        settings = {name: {work: repr(m) for work, m in rows.items()} for name, rows in SETTINGS.items()}
        print(f"\nwritten: results/{write('clustered', {'settings': settings, **found}).name}")


def measure(name: str) -> dict[int, dict[str, Any]]:
    """By R: the errors of each text, the keys read, the seconds at each length."""
    load, length, mask = LOADERS[name]
    model = load()
    calls = {text: read(model, path, length) for text, path in TEXTS.items()}
    first = calls["wikitext2"][0]
    result: dict[int, dict[str, Any]] = {}
    for features, ours in SETTINGS[name].items():
        errors = {text: spread(each(calls[text], ours, mask)) for text in calls}
        performer = {text: spread(each(calls[text], Performer(features), mask)) for text in calls}
        result[features] = {
            "error": errors,
            "performer_error": performer,
            "keys_per_query": keys_read(first, ours, mask),
            "seconds": {n: times(first, ours, features, mask, n) for n in (length, *LONGER)},
        }
    return result


def read(model: hd.Checkpoint, path: str, length: int) -> list[Call]:
    """q, k, v of every layer while the model reads the beginning of a text."""
    found = hd.capture(model, [data(path).read_text()[: 8 * length]], length=length)
    return [(c.q.float(), c.k.float(), c.v.float()) for calls in found.values() for c in calls]


def each(calls: list[Call], mechanism: hd.Mechanism, mask: Mask) -> Tensor:
    """The relative distance from exact attention, of every head of every layer."""
    parts = []
    for q, k, v in calls:
        exact = Softmax()(q, k, v, mask)
        parts.append(((mechanism(q, k, v, mask) - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).flatten())
    return torch.cat(parts)


def spread(errors: Tensor) -> dict[str, float]:
    low, median, high = torch.quantile(errors, torch.tensor([0.25, 0.5, 0.75])).tolist()
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4), "heads": len(errors)}


def keys_read(call: Call, ours: Clustered, mask: Mask) -> dict[str, float]:
    """How many keys and averages a query is multiplied with: over the queries, the mean and the most."""
    counts = (past_and_window if mask.causal else clusters_and_exact)(call, ours).float()
    return {"mean": round(float(counts.mean()), 1), "most": int(counts.max())}


def clusters_and_exact(call: Call, ours: Clustered) -> Tensor:
    q, k, _ = (t.flatten(0, 1) for t in call)
    number = torch.tensor([q.shape[1]])
    metric = moment(rows(q, spaced(number, LIKE).expand(len(q), -1)))
    label, sizes = nearest_means(k, ours.clusters, ours.rounds, metric=metric)
    scores = mean_queries(q, ours.group, number) @ cluster_means(k, label, sizes).mT * q.shape[-1] ** -0.5
    return ours.clusters + choose_clusters(scores, label.argsort(dim=-1, stable=True), sizes, ours.exact).real.sum(-1)


def past_and_window(call: Call, ours: Clustered) -> Tensor:
    """Its place in its window, the sinks, the clusters of its past and the exact keys; of queries in whole windows after the sinks."""
    reach = Reach(ours.window, ours.sinks, ours.clusters // 2, ours.exact, ours.rounds, ours.group)
    q, k = call[0].flatten(0, 1), call[1].repeat_interleave(call[0].shape[1] // call[1].shape[1], 1).flatten(0, 1)
    windows = (k.shape[1] - ours.sinks) // ours.window
    q, k = (t[:, ours.sinks : ours.sinks + windows * ours.window] for t in (q, k))
    table = remember(q, k, reach, 0)
    assert table is not None
    starts = q.unflatten(1, (windows, -1, ours.group))[:, :, :, 0].flatten(0, 1)
    used = choose_past(starts, means_of(k, table), table, reach, q.shape[-1] ** -0.5)[2].sum(-1).view(len(q), windows, -1)
    averages = table.there.sum(-1)[None, :, None]
    groups = torch.arange(used.shape[-1]) * ours.group
    own = groups[:, None] + torch.arange(1, ours.group + 1)
    return (used + averages)[..., None] + own + ours.sinks


def times(call: Call, ours: Clustered, features: int, mask: Mask, length: int) -> dict[str, Timing]:
    """Forward, and forward with backward, in turns with Performer."""
    q, k, v = (longer(t, length).requires_grad_() for t in call)
    other = Performer(features)

    def forward(mechanism: hd.Mechanism) -> Callable[[], Any]:
        def run() -> None:
            with torch.no_grad():
                mechanism(q, k, v, mask)

        return run

    def both(mechanism: hd.Mechanism) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(mechanism(q, k, v, mask).sum(), (q, k, v))

    cases = {
        "clustered": forward(ours),
        "performer": forward(other),
        "clustered backward": both(ours),
        "performer backward": both(other),
    }
    if length < max(LONGER):
        cases["exact"] = lambda: F.scaled_dot_product_attention(
            q.detach(), k.detach(), v.detach(), is_causal=mask.causal, enable_gqa=True
        )
    return timings(cases, rounds=7, budget=30.0)


def longer(x: Tensor, length: int) -> Tensor:
    return x.detach().repeat(1, 1, -(-length // x.shape[2]), 1)[:, :, :length].clone()


def summary(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    head = ["model", "R", "text", "error", "quartiles", "Performer", "keys mean/most", "x Performer forward", "and backward"]
    rows = []
    for name, by_work in found.items():
        for features, row in by_work.items():
            ahead, back = (
                ", ".join(
                    f"{n}: {t['clustered' + part].median / t['performer' + part].median:.2f}" for n, t in row["seconds"].items()
                )
                for part in ("", " backward")
            )
            for text, error in row["error"].items():
                quartiles = f"{error['low']:.3f}-{error['high']:.3f}"
                keys, other = row["keys_per_query"], row["performer_error"][text]
                figures = [f"{error['median']:.3f}", quartiles, f"{other['median']:.3f}", f"{keys['mean']:.0f}/{keys['most']}"]
                rows.append([name, str(features), text, *figures, ahead, back])
    return table("relative output error, median over heads; time against Performer with R features by length", head, rows)


if __name__ == "__main__":
    main()
