"""Sparse against exact attention over the lengths: seconds forward and backward, exponents, crossover; on one CPU thread.

One text, 4 heads of 64 dims, float32. Run as `python -m benchmarks.sparse`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from heedful.attention import Mask
from heedful.mechanisms import Sparse

from .timing import Case, Timing, table, threads, timings, write

HEADS, DIM, THREADS = 4, 64, 1
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
SLOPE = 1024  # the exponents are those from here on: below, the calls' own cost weighs
MODES = {"bidirectional": False, "causal": True}


def main() -> None:
    with threads(THREADS):
        found: dict[str, Any] = {}
        for name, causal in MODES.items():
            rows = {length: measure(length, causal) for length in LENGTHS}
            found[name] = {"seconds": rows, "exponents": exponents(rows), "crossover": crossovers(rows)}
            print(timing_table(name, rows))
            print(f"exponents from L={SLOPE}: {found[name]['exponents']}\nfaster than sdpa from L =: {found[name]['crossover']}\n")
        setting = {"heads": HEADS, "dim": DIM, "batch": 1, "dtype": "float32", "stride": "nearest to sqrt(L)", "summary": 8}
        print(f"written: results/{write('sparse', {'setting': setting, **found}).name}")


def cases(length: int, causal: bool) -> dict[str, Case]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3))
    grad, mask = torch.randn(1, HEADS, length, DIM), Mask(causal=causal)
    strided, fixed = Sparse(), Sparse(pattern="fixed")
    attends = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "strided": lambda: strided(q, k, v, mask),
        "fixed": lambda: fixed(q, k, v, mask),
    }

    def forward(attend: Case) -> Case:
        return lambda: _without_gradients(attend)

    def both(attend: Case) -> Case:
        return lambda: torch.autograd.grad(attend(), (q, k, v), grad)

    return {f"{n} forward": forward(a) for n, a in attends.items()} | {f"{n} both": both(a) for n, a in attends.items()}


@torch.no_grad()
def _without_gradients(attend: Case) -> Any:
    return attend()


def measure(length: int, causal: bool) -> dict[str, Timing]:
    return timings(cases(length, causal), rounds=9, budget=10.0)


def exponents(rows: dict[int, dict[str, Timing]]) -> dict[str, float]:
    """The least-squares slope of log seconds over log L."""
    lengths = [length for length in rows if length >= SLOPE]
    x = torch.tensor(lengths).double().log()
    names = next(iter(rows.values()))
    y = {name: torch.tensor([math.log(rows[length][name].median) for length in lengths]).double() for name in names}
    return {name: round(float(((x - x.mean()) * t).sum() / (x - x.mean()).square().sum()), 2) for name, t in y.items()}


def crossovers(rows: dict[int, dict[str, Timing]]) -> dict[str, int | None]:
    """The shortest measured length from which on a pattern is faster than exact attention."""
    found: dict[str, int | None] = {}
    for name in ("strided forward", "fixed forward", "strided both", "fixed both"):
        slower = [n for n, row in rows.items() if row[name].median >= row[f"sdpa {name.split()[1]}"].median]
        found[name] = next((n for n in rows if n > max(slower, default=0)), None)
    return found


def timing_table(name: str, rows: dict[int, dict[str, Timing]]) -> str:
    head = ["L", *(f"{case} ms" for case in next(iter(rows.values()))), "x sdpa: strided", "fixed"]
    lines = []
    for length, row in rows.items():
        factors = [row["sdpa both"].median / row[f"{n} both"].median for n in ("strided", "fixed")]
        lines.append([str(length), *(f"{t.median * 1e3:.2f}" for t in row.values()), *(f"{x:.2f}" for x in factors)])
    return table(f"{name}: {HEADS} heads, d={DIM}", head, lines)


if __name__ == "__main__":
    main()
