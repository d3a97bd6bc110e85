"""Reformer, Nystrom and Linformer on real heads, and how their time grows with the length.

Errors: MiniLM reading two domains, median over all heads, against exact attention; Linformer is fitted on a third text. Times: one head,
d=50, float32, forward and backward, one CPU thread, the same work for each query. Run as `python -m benchmarks.approximations`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import heedful as hd
from heedful.attention import Capture, Mask, Mechanism
from heedful.mechanisms import Linformer, Nystrom, Performer, Reformer, Softmax

from .real import data, minilm
from .timing import Case, Timing, table, threads, timings, write

TOKENS, TEXTS, FITTED = 512, 4, 20
READ = {"wikitext2": "wikitext2/test.txt", "tinyshakespeare": "tinyshakespeare/input.txt"}
WORK = (64, 128)  # keys' worth of work for each query
LENGTHS = (1024, 4096, 16384, 65536)
EXACT_TO = 16384
DIM = 50

Calls = dict[str, list[Capture]]


def main() -> None:
    with threads(1):
        errors = real_errors()
        print(error_table(errors), end="\n\n")
        seconds = {name: times(causal) for name, causal in (("bidirectional", False), ("causal", True))}
        slopes = {name: exponents(rows) for name, rows in seconds.items()}
        for name, rows in seconds.items():
            print(time_table(name, rows, slopes[name]), end="\n\n")
        setting = {"tokens": TOKENS, "texts": TEXTS, "texts of the fit": FITTED, "dim": DIM, "threads": 1}
        figures = {"setting": setting, "relative_error": errors, "seconds": seconds, "exponents": slopes}
        print(f"written: results/{write('approximations', figures).name}")


def kinds(work: int, length: int) -> dict[str, Mechanism]:
    """Each at so many keys' worth of work a query."""
    part = work // 12  # a bidirectional query sees three chunks of each kind
    return {
        "Reformer": Reformer(rounds=2, chunk=part, window=2 * part),
        "Reformer, no window": Reformer(rounds=4, chunk=part, window=1),
        "Nystrom": Nystrom(work),
        "Linformer": Linformer(work, length),
    }


def real_errors() -> dict[str, dict[str, dict[int, float]]]:
    """By text, mechanism and work: the median over heads of |out - exact| / |exact|."""
    model = minilm()
    learned = read(model, "wikitext2/valid.txt", FITTED)
    return {name: {**table_of(read(model, file, TEXTS), learned)} for name, file in READ.items()}


def read(model: hd.Checkpoint, file: str, count: int) -> Calls:
    """The calls of so many full-length texts spread over a file."""
    text = data(file).read_text()
    step = len(text) // count
    return hd.capture(model, [text[i * step : i * step + 8 * TOKENS] for i in range(count)], length=TOKENS)


@torch.no_grad()
def table_of(calls: Calls, learned: Calls) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for work in WORK:
        for name, mechanism in kinds(work, TOKENS).items():
            found.setdefault(name, {})[work] = median(calls, dict.fromkeys(calls, mechanism))
        fitted = {layer: Linformer(work, TOKENS).fit(learned[layer]) for layer in calls}
        found.setdefault("Linformer, fitted", {})[work] = median(calls, fitted)
    return found


def median(calls: Calls, mechanisms: Any) -> float:
    found = [error(mechanisms[layer], call) for layer, some in calls.items() for call in some]
    return round(float(torch.cat(found).median()), 3)


def error(mechanism: Mechanism, call: Capture) -> torch.Tensor:
    """Of each head."""
    exact = Softmax()(call.q, call.k, call.v, scale=call.scale)
    out = mechanism(call.q, call.k, call.v, scale=call.scale)
    return ((out - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2))).sqrt().flatten()


def times(causal: bool) -> dict[int, dict[str, Timing]]:
    return {length: times_at(length, causal) for length in LENGTHS}


def times_at(length: int, causal: bool) -> dict[str, Timing]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, DIM, requires_grad=True) for _ in range(3))
    grad, mask = torch.randn(1, 1, length, DIM), Mask(causal=causal)

    def step(mechanism: Mechanism) -> Case:
        return lambda: torch.autograd.grad(mechanism(q, k, v, mask), (q, k, v), grad)

    cases = {name: m for name, m in kinds(WORK[0], length).items() if not causal or "causal" in m.supports}
    cases |= {"Performer": Performer(WORK[0])} | ({"Softmax": Softmax()} if length <= EXACT_TO else {})
    return timings({name: step(m) for name, m in cases.items()}, rounds=7, budget=30.0)


def exponents(rows: dict[int, dict[str, Timing]]) -> dict[str, float]:
    """The slope of log seconds over log length."""
    return {name: slope([(length, row[name].median) for length, row in rows.items() if name in row]) for name in rows[LENGTHS[0]]}


def slope(points: list[tuple[int, float]]) -> float:
    x, y = ([math.log(p[i]) for p in points] for i in (0, 1))
    mean = sum(x) / len(x)
    return round(sum((a - mean) * b for a, b in zip(x, y, strict=True)) / sum((a - mean) ** 2 for a in x), 2)


def error_table(found: dict[str, dict[str, dict[int, float]]]) -> str:
    head = ["", *(f"{text} R={work}" for text in found for work in WORK)]
    names = next(iter(found.values()))
    lines = [[name, *(f"{rows[name][work]:.3f}" for rows in found.values() for work in WORK)] for name in names]
    return table(f"relative output error, median over MiniLM's heads, {TOKENS} tokens", head, lines)


def time_table(name: str, rows: dict[int, dict[str, Timing]], slopes: dict[str, float]) -> str:
    head = ["", *(f"L={length} ms" for length in rows), "exponent"]
    lines = [
        [case, *(f"{row[case].median * 1e3:.1f}" if case in row else "-" for row in rows.values()), f"{slopes[case]:.2f}"]
        for case in rows[LENGTHS[0]]
    ]
    return table(f"{name}: forward and backward, d={DIM}, R={WORK[0]}", head, lines)


if __name__ == "__main__":
    main()
