"""Our mechanisms beside other libraries' layers of the same kind and size, and beside exact attention: forward and backward on a CPU.

One layer with its projections (dim 256, 4 heads of 64), batch 1, float32; each pair and the exact layer take turns. performer-pytorch has a
benchmark of its own (`performer`). Run as `python -m benchmarks.peers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heedful.attention import Mask
from heedful.mechanisms import Linformer, Local, Nystrom, Reformer, Softmax

from .timing import Timing, peak_memory, peer, table, threads, timings, write

HEADS, DIM, THREADS = 4, 64, 2
LENGTHS = (1024, 4096, 16384)
EXACT_TO = 4096


class Layer(nn.Module):
    """Projections around any attend(q, k, v): as many matrices into it as the peer has."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], matrices: int = 3):
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(HEADS * DIM, 3 // matrices * HEADS * DIM, bias=False) for _ in range(matrices))
        self.out, self.attend = nn.Linear(HEADS * DIM, HEADS * DIM), attend

    def forward(self, x: Tensor) -> Tensor:
        parts = [part for one in self.into for part in one(x).unflatten(-1, (-1, DIM)).transpose(1, 2).split(HEADS, 1)]
        return self.out(self.attend(*parts).transpose(1, 2).flatten(2))


def linformer(module: Any, length: int) -> tuple[nn.Module, nn.Module]:
    return Layer(Linformer(128, length)), module.LinformerSelfAttention(HEADS * DIM, length, k=128, heads=HEADS)


def reformer(module: Any, length: int) -> tuple[nn.Module, nn.Module]:
    """4 rounds into the same number of buckets, 128 keys of one for each query; theirs (its chunk of 64 and the one before) shares q and k."""
    ours, mask = Reformer(rounds=4, chunk=128, window=1, buckets=length // 64), Mask(causal=True)
    return Layer(lambda q, k, v: ours(q, k, v, mask)), module.LSHSelfAttention(
        HEADS * DIM, heads=HEADS, bucket_size=64, n_hashes=4, causal=True
    )


def nystrom(module: Any, length: int) -> tuple[nn.Module, nn.Module]:
    theirs = module.NystromAttention(HEADS * DIM, dim_head=DIM, heads=HEADS, num_landmarks=64, residual=False)
    return Layer(Nystrom(64), matrices=1), theirs


def local(module: Any, length: int) -> tuple[nn.Module, nn.Module]:
    ours, mask = Local(129), Mask(causal=True)
    theirs = module.LocalAttention(128, causal=True, exact_windowsize=True, use_rotary_pos_emb=False)
    return Layer(lambda q, k, v: ours(q, k, v, mask)), Layer(theirs)


PEERS = {
    "linformer": ("linformer", linformer),
    "reformer-pytorch": ("reformer_pytorch", reformer),
    "nystrom-attention": ("nystrom_attention", nystrom),
    "local-attention": ("local_attention", local),
}
CAUSAL = ("reformer-pytorch", "local-attention")


def main() -> None:
    found, versions = {}, {}
    with threads(THREADS):
        for name, (module, build) in PEERS.items():
            loaded, versions[name] = peer(module, name)
            found[name] = {length: measure(*build(loaded, length), name in CAUSAL, length) for length in LENGTHS}
    print(shown(found))
    setting = {"dim": DIM, "heads": HEADS, "batch": 1, "dtype": "float32", "pass": "forward and backward of a layer"}
    print(f"\nwritten: results/{write('peers', {'setting': setting, 'peers': versions, 'found': found}).name}")


def measure(ours: nn.Module, theirs: nn.Module, causal: bool, length: int) -> dict[str, Any]:
    """Seconds of each in turns, and what each takes at its peak."""
    torch.manual_seed(0)
    x = torch.randn(1, length, HEADS * DIM)
    exact = Softmax()
    layers = {"ours": ours, "theirs": theirs, "exact": Layer(lambda q, k, v: exact(q, k, v, Mask(causal=causal)))}
    cases = {name: step(layer, x) for name, layer in layers.items() if name != "exact" or length <= EXACT_TO}
    seconds = timings(cases, rounds=9, budget=15.0)
    return {"seconds": seconds, "bytes": {name: peak_memory(case) for name, case in cases.items()}, "ratios": ratios(seconds)}


def step(layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    layer(x)  # makes what is made on the first call

    def run() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    return run


def ratios(seconds: dict[str, Timing]) -> dict[str, float]:
    """How many times our median fits into each other one."""
    return {name: round(t.median / seconds["ours"].median, 2) for name, t in seconds.items() if name != "ours"}


def shown(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    head = ["peer", "L", "ours ms", "theirs ms", "x theirs", "x exact", "ours MB", "theirs MB"]
    lines = []
    for name, rows in found.items():
        for length, row in rows.items():
            ms = [f"{row['seconds'][one].median * 1e3:.1f}" for one in ("ours", "theirs")]
            size = ["-" if row["bytes"][one] is None else f"{row['bytes'][one] / 1e6:.0f}" for one in ("ours", "theirs")]
            lines.append([name, str(length), *ms, *(str(row["ratios"].get(x, "-")) for x in ("theirs", "exact")), *size])
    return table("a layer forward and backward; x: times ours is faster", head, lines)


if __name__ == "__main__":
    main()
