"""What the effective rank of long texts costs against one fused attention forward, in time and memory; never an L x L matrix.

Four heads of 32 dims, float32, one thread. Run as `python -m benchmarks.rank`.
"""

from __future__ import annotations

import torch

from heedful import ops
from heedful.attention import Capture, Mask
from heedful.exact import effective_rank

from .timing import peak_memory, table, threads, timings, write

LENGTHS = (1024, 2048, 4096, 8192)
HEADS, DIM = 4, 32


def main() -> None:
    torch.manual_seed(0)
    rows: dict[str, dict[str, float]] = {}
    with threads(1):
        for length in LENGTHS:
            rows[str(length)] = measure(length)
    head = ["L", "seconds", "of a forward", "MB", "MB of P"]
    lines = [
        [n, f"{r['seconds']:.3f}", f"{r['over_forward']:.1f}", f"{r['bytes'] / 1e6:.0f}", f"{r['dense_bytes'] / 1e6:.0f}"]
        for n, r in rows.items()
    ]
    print(table("effective rank, both ways", head, lines))
    print(f"\nwritten: results/{write('rank', {'heads': HEADS, 'dim': DIM, 'lengths': rows}).name}")


def measure(length: int) -> dict[str, float]:
    q, k, v = torch.randn(3, 1, HEADS, length, DIM).unbind()
    mask = Mask(causal=True)

    def rank() -> torch.Tensor:
        return effective_rank(Capture("one", q, k, v, mask, DIM**-0.5))

    taken = timings({"rank": rank, "forward": lambda: ops.hop(q, k, v, mask=mask)}, rounds=5, budget=30.0)
    return {
        "seconds": float(f"{taken['rank'].median:.4g}"),
        "over_forward": round(taken["rank"].median / taken["forward"].median, 2),
        "bytes": float(peak_memory(rank) or 0),
        "dense_bytes": 4.0 * HEADS * length**2,
    }


if __name__ == "__main__":
    main()
