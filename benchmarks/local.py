"""Local against the hop's own tiles under the same mask and against exact causal attention, forward and backward, on one CPU thread.

Run as `python -m benchmarks.local`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from heedful.attention import Mask
from heedful.mechanisms import Local
from heedful.ops import hop

from .timing import Case, Timing, table, threads, timings, write

HEADS, KEY_HEADS, DIM = 6, 2, 64
CASES = {"window 128": (128, 0), "window 128, 4 sinks": (128, 4), "window 32": (32, 0)}
LENGTHS = (256, 512, 1024, 4096)


def main() -> None:
    with threads(1):
        found = {name: {length: times(length, *setting) for length in LENGTHS} for name, setting in CASES.items()}
    print(shown(found))
    setting = {"heads": HEADS, "key_heads": KEY_HEADS, "dim": DIM, "batch": 1, "dtype": "float32", "mask": "causal"}
    ratios = {name: {length: ratio(row) for length, row in rows.items()} for name, rows in found.items()}
    print(f"\nwritten: results/{write('local', {'setting': setting, 'seconds': found, 'ratios': ratios}).name}")


def times(length: int, window: int, sinks: int) -> dict[str, Timing]:
    """The seconds of each way, forward alone and with its backward pass, in turns."""
    torch.manual_seed(0)
    q = torch.randn(1, HEADS, length, DIM, requires_grad=True)
    k, v = (torch.randn(1, KEY_HEADS, length, DIM, requires_grad=True) for _ in range(2))
    grad, local, mask = torch.randn(q.shape), Local(window, sinks), Mask(causal=True, window=window, sinks=sinks)
    ways = {
        "local": lambda: local(q, k, v, Mask(causal=True)),
        "tiles": lambda: hop(q, k, v, mask=mask)[0],
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }

    def learn(attend: Any) -> Case:
        return lambda: torch.autograd.grad(attend(), (q, k, v), grad)

    cases = {name: learn(attend) for name, attend in ways.items()}
    cases |= {f"{name}, forward": torch.no_grad()(attend) for name, attend in ways.items()}
    return timings(cases, rounds=9, budget=10.0)


def ratio(row: dict[str, Timing]) -> dict[str, float]:
    """How many times Local's median fits into that of each other way of the same pass."""
    ends = {name: ", forward" if name.endswith("forward") else "" for name in row}
    return {name: round(t.median / row["local" + ends[name]].median, 2) for name, t in row.items() if not name.startswith("local")}


def shown(found: dict[str, dict[int, dict[str, Timing]]]) -> str:
    head = ["case", "L", "local ms", *(f"x {name}" for name in ratio(next(iter(found["window 32"].values()))))]
    lines = [
        [name, str(length), f"{row['local'].median * 1e3:.1f}", *(f"{x:.2f}" for x in ratio(row).values())]
        for name, rows in found.items()
        for length, row in rows.items()
    ]
    return table(f"causal, {HEADS} query and {KEY_HEADS} key heads, d={DIM}: how many times faster than each", head, lines)


if __name__ == "__main__":
    main()
