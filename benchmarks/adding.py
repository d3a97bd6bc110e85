"""Adding and resuming on a real model: SmolLM2-135M reads wikitext2 at 2048 tokens, every row looked at.

Two half scans added against the whole, and a scan that is killed (SIGKILL) at a random moment and resumed against one that was not.
Run as `python -m benchmarks.adding`.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import heedful as hd
from heedful.inputs import read
from heedful.scan import PARTIAL
from heedful.texts import items

from .real import data, smollm2
from .timing import table, threads, write

TEXTS, LENGTH, THREADS = 2, 2048, 2
CHILD = """
import sys
import heedful.scan
from benchmarks.adding import scanned, pieces
from benchmarks.real import smollm2
from benchmarks.timing import threads
sys.modules["heedful.scan"].EVERY = 0.0
with threads(2):
    model = smollm2()
    scanned(model, pieces(model), out=sys.argv[1])
"""


def main() -> None:
    model = smollm2()
    with threads(THREADS):
        ids = pieces(model)
        start = time.perf_counter()
        whole = scanned(model, ids)
        seconds = (time.perf_counter() - start) / TEXTS
        halves = scanned(model, ids[: TEXTS // 2]) + scanned(model, ids[TEXTS // 2 :])
        with tempfile.TemporaryDirectory() as folder:
            done = killed(Path(folder), seconds)
            resumed = scanned(model, ids, out=folder, resume=True)
    found = {
        "seconds a text": round(seconds, 2),
        "two halves added": difference(whole, halves),
        "killed after texts": done,
        "killed and resumed": difference(whole, resumed),
    }
    print(
        table(
            f"{whole.about.model}, {TEXTS} texts of {LENGTH} tokens, every row", list(found), [[f"{x:.3g}" for x in found.values()]]
        )
    )
    print(f"\nwritten: results/{write('adding', {'texts': TEXTS, 'length': LENGTH, 'found': found}).name}")


def pieces(model: hd.Checkpoint) -> list[dict[str, torch.Tensor]]:
    """The first texts of that length, as token ids."""
    reading = read(model, items(data("wikitext2/test.txt"), None), 1, LENGTH, TEXTS)
    return [{"input_ids": torch.tensor([sample.item.ids])} for batch in reading.batches for sample in batch]  # type: ignore[union-attr]


def scanned(model: hd.Checkpoint, ids: list, **more: Any) -> hd.Findings:
    return hd.scan(model, ids, rows=None, **more)


def killed(folder: Path, seconds: float) -> int:
    """Kill a scan of its own process at a random moment after its first copy; how many texts the last copy holds."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)])
    while not copied(folder):
        if child.poll() is not None:
            raise SystemExit("the scan that was to be killed ended by itself.")
        time.sleep(0.05)
    time.sleep(random.uniform(0, 0.8 * (TEXTS - 1) * seconds))
    child.send_signal(signal.SIGKILL)
    child.wait()
    return copied(folder)


def copied(folder: Path) -> int:
    path = folder / PARTIAL
    return hd.Findings.read(path)[1]["done"] if path.exists() else 0


def difference(one: hd.Findings, other: hd.Findings) -> float:
    """The largest relative difference of any sum of any statistic."""
    worst = 0.0
    for layer, statistics in one.layers.items():
        for name, statistic in statistics.items():
            for field, wanted in statistic.tensors.items():
                found = other.layers[layer][name].tensors[field]
                worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-300)))
    return worst


if __name__ == "__main__":
    main()
