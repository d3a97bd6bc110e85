"""MiniLM's key dims cut from 32 to 8 a head, then 8 grown back: how much of the damage each way of growing undoes, without training.

The loss is the squared distance of a sentence's embedding from that of the whole model. Each way measures on some sentences, searches
its step on others, and is judged on a third set. Random steps are searched for likewise; a step that disappoints is not taken.
Then training goes on by Adam, with its state carried, with its state dropped, and without growth: is there a spike?
Run as `python -m benchmarks.regrow` (about four minutes); `python -m benchmarks.regrow spike` (or recovered) measures one part alone.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heedful as hd
from heedful.enlarging import enlarge, mean_loss
from heedful.exact.growing import NewDims
from heedful.growing import measure_growth
from heedful.huggingface.adopt import sizes_of
from heedful.inputs import collate, read
from heedful.preserving import preserve
from heedful.widening import Widener

from .real import minilm
from .resize import sentences
from .timing import RESULTS, table, threads, write

CUT, NEW, LENGTH = 8, 8, 64
TAUGHT, SEARCHED, JUDGED = 100, 32, 64  # sentences
SEEDS = 3
LAYERS = 2  # the last ones grow
BEFORE, AFTER, HELD = 10, 10, 48  # steps of training, sentences that judge them


def main() -> None:
    with threads(1):
        model = minilm()
        small = hd.shrink(model, sentences("wikitext2/valid.txt", 12, 200), qk=CUT, length=LENGTH).checkpoint.model
        for part in (recovered, spike):
            if part.__name__ in (sys.argv[1:] or ("recovered", "spike")):
                part(model, model.model, small)


def keep(part: str, found: dict[str, Any]) -> None:
    """Write one part beside what other parts wrote."""
    path = RESULTS / "regrow.json"
    former = {k: x for k, x in (json.loads(path.read_text()) if path.exists() else {}).items() if k != "machine"}
    print(f"written: results/{write('regrow', {**former, part: found}).name}")


def distance(whole: nn.Module) -> Any:
    """The loss: squared distance of normalised mean embeddings, summed over sentences."""

    def loss(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, int]:
        with torch.no_grad():
            wanted = embedded(whole, inputs)
        return (embedded(model, inputs) - wanted).square().sum(), len(wanted)

    return loss


def embedded(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    real = inputs["attention_mask"][..., None]
    return F.normalize((model(**inputs).last_hidden_state * real).sum(1) / real.sum(1), dim=-1)


def gradmax(one: Widener, what: str, count: int) -> NewDims:
    return one.qk(count, dampings=(float("inf"),))


def optimal(one: Widener, what: str, count: int) -> NewDims:
    return one.qk(count)


def random(one: Widener, what: str, count: int) -> NewDims:
    """Random directions of the size of GradMax's, their slope in the measured gradient."""
    step = gradmax(one, what, count)
    left, right = (torch.randn_like(t) * t.square().mean().sqrt() for t in (step.left, step.right))
    slope = -float((one.keys.whole * (left @ right.mT)[:, : one.keys.whole.shape[1]]).sum())
    sign = 1.0 if slope > 0 else -1.0
    return replace(step, left=left * sign, right=right, slope=abs(slope), judged=abs(slope), kept=torch.ones_like(step.kept))


WAYS = {"optimal": optimal, "GradMax": gradmax, "random": random}


def recovered(model: hd.Checkpoint, whole: nn.Module, small: nn.Module) -> None:
    """By seed (other sentences) and way, the share of the loss on sentences never seen that growing takes away."""
    lines, loss = sentences("wikitext2/test.txt", 12, 4 * (TAUGHT + SEARCHED + JUDGED)), distance(whole)
    names = list(sizes_of(small))[-LAYERS:]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for seed in range(SEEDS):
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed)).tolist()
        mine = [lines[i] for i in order]
        taught, searched, judged = mine[:TAUGHT], mine[TAUGHT : TAUGHT + SEARCHED], mine[-JUDGED:]
        growths = measure_growth(hd.Checkpoint(small, model.processor), taught, loss, length=LENGTH, layers=names).layers
        inputs, others = batches(model, searched), batches(model, judged)
        start = mean_loss(small, others, loss)
        for way, choose in WAYS.items():
            torch.manual_seed(seed)
            began, larger = time.perf_counter(), copy.deepcopy(small)
            wanted = {"qk": dict.fromkeys(names, NEW)}
            changes, searches = enlarge(larger, growths, wanted, lambda: mean_loss(larger, inputs, loss), choose=choose)  # noqa: B023
            step = searches["qk"]
            share = 1 - mean_loss(larger, others, loss) / start
            row = {"share": share, "predicted": step.predicted, "realised": step.realised, "dampings": [c.damping for c in changes]}
            runs[way].append(
                {**row, "seconds": time.perf_counter() - began, "tokens": int(next(iter(growths.values())).tokens.sum())}
            )
            print(seed, way, row, flush=True)
        setting = {"layers": LAYERS, "cut": CUT, "new": NEW, "sentences": [TAUGHT, SEARCHED, JUDGED]}
        keep("recovered", {"setting": setting, "runs": runs})
    rows = [
        [way, *(f"{r['share']:.1%}" for r in some), f"{statistics.mean(r['share'] for r in some):.1%}"]
        for way, some in runs.items()
    ]
    print(table("share of the held-out loss recovered", ["", *map(str, range(SEEDS)), "mean"], rows))


def batches(model: hd.Checkpoint, lines: list[str]) -> list[dict[str, Any]]:
    return [collate(model, group) for group in read(model, list(lines), 16, LENGTH).batches]


def spike(model: hd.Checkpoint, whole: nn.Module, small: nn.Module) -> None:
    """The loss by step of training, growing without change in between, Adam's state carried or dropped, and without growth."""
    lines, loss = sentences("wikitext2/valid.txt", 12, 400), distance(whole)
    feed, others = batches(model, lines[:160]), batches(model, lines[-HELD:])
    found: dict[str, list[float]] = {}
    for way in ("no growth", "state carried", "state dropped"):
        student = copy.deepcopy(small)
        optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)
        losses = []
        for step in range(BEFORE + AFTER):
            if step == BEFORE and way != "no growth":
                preserve(student, {"qk": dict.fromkeys(sizes_of(student), NEW)}, optimizer)
                if way == "state dropped":
                    optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)
            value, count = loss(student, feed[step % len(feed)])
            optimizer.zero_grad()
            (value / count).backward()
            optimizer.step()
            if step - BEFORE in (-1, 0, 4, AFTER - 1):
                losses.append(mean_loss(student, others, loss))
        found[way] = losses
        print(way, [round(x, 4) for x in losses], flush=True)
    keep("spike", {"steps": [BEFORE, AFTER], "held-out loss after growth, steps": [0, 1, 5, AFTER], "losses": found})


if __name__ == "__main__":
    main()
