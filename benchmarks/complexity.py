"""The complexity table measured: powers of the length that time and memory grow with, and operations that wait for one another.

One head, d=50, 64 features, buckets, landmarks or clusters where a mechanism has such a number, forward and backward, float32, one thread;
lengths double from 1024 on as far as 60 seconds for each mechanism reach; a Linformer has projections for each. The power is that of
the larger half of the lengths, where lower terms still count: so theory's term is fitted beside the next lower one too. Run as `python -m benchmarks.complexity`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful import measuring
from heedful.attention import Capture, Mechanism
from heedful.benching.calls import training
from heedful.benching.contender import Contender, usual
from heedful.benching.growth import exponent, predicted
from heedful.benching.theory import THEORY
from heedful.mechanisms import Linformer

from .timing import table, threads, write

DIM, THREADS = 50, 1
LENGTHS = tuple(2**i for i in range(10, 17))
FIRST = (256, 256, 512)  # tokens of the first calls: what they load and make is not counted, and they tell what comes next
SECONDS = float(os.environ.get("SECONDS", "60"))  # for each mechanism
MEMORY = 4 * 10**9
ROUNDS = 5
COUNTED = (256, 512, 1024)  # tokens of the counts of waiting operations
SIZES = {  # settings that stand for R, by mechanism
    "Performer": {"features": 64},
    "FittedPerformer": {"features": 64},
    "Linformer": {"keys": 64},
    "Nystrom": {"landmarks": 64},
    "Local": {"window": 64},
    "Landmarks": {"landmarks": 64},
    "Clustered": {"clusters": 64, "exact": 64},
}


def main() -> None:
    torch.manual_seed(0)
    with threads(THREADS):
        contenders = [Contender(sized(m)) for m in usual()]
        found = measure(contenders)
        print(shown(found))
        setting = {"dim": DIM, "sizes": SIZES, "heads": 1, "batch": 1, "dtype": "float32", "pass": "forward and backward"}
        path = write("complexity", {"setting": setting, "seconds_for_each": SECONDS, "mechanisms": found})
    print(f"\nwritten: results/{path.name}")


def sized(mechanism: Mechanism) -> Mechanism:
    """The mechanism with R = 64 where it has such a setting."""
    return dataclasses.replace(mechanism, **SIZES.get(type(mechanism).__name__, {}))  # type: ignore[type-var]


def at(mechanism: Mechanism, length: int) -> Mechanism:
    """The mechanism for texts of that length: Linformer's projections are made for one, as in its paper."""
    mechanism = dataclasses.replace(mechanism, length=length) if isinstance(mechanism, Linformer) else mechanism
    mechanism.prepare(1, DIM)
    return mechanism


def call(length: int) -> Capture:
    q, k, v = torch.randn(3, 1, 1, length, DIM).unbind()
    q, k, v = (t.clone().requires_grad_() for t in (q / 2, k / 2, v))
    return Capture("one", q, k, v, scale=DIM**-0.5)


def measure(contenders: list[Contender]) -> dict[str, Any]:
    """Seconds and bytes by length, in turns at each length, and the counts."""
    spent = dict.fromkeys((c.name for c in contenders), 0.0)
    medians: dict[str, dict[int, float]] = {c.name: {} for c in contenders}
    for contender in contenders:
        for length in FIRST:
            looked(contender, length, training(at(contender.mechanism, length), call(length)))
    for length in LENGTHS:
        given = call(length)
        cases = {c.name: training(at(c.mechanism, length), given) for c in contenders if affordable(c, length, spent[c.name])}
        cases = {c.name: cases[c.name] for c in contenders if c.name in cases and looked(c, length, cases[c.name])}
        first = {c.name: c.seconds["training"][length] for c in contenders if c.name in cases}
        repeats = {name: measuring.often(seconds) for name, seconds in first.items()}
        rounds = max(
            1, min([ROUNDS, *(int((SECONDS - spent[name]) / 2 / max(s, measuring.LEAST)) for name, s in first.items() if s > 1)])
        )
        for name, timing in measuring.rounds_of(cases, repeats, rounds, sum(first.values()) * rounds * 2, least=1).items():
            medians[name][length] = timing.median
            spent[name] += timing.median * (repeats[name] * timing.rounds + 2)
        print(f"  {length} tokens: {', '.join(cases)}", flush=True)
    return {c.name: figures(c, medians[c.name]) for c in contenders}


def affordable(contender: Contender, length: int, spent: float) -> bool:
    """Whether two calls of that length are within the mechanism's seconds, and one within the memory."""
    if contender.failed:
        return False
    seconds, memory = contender.seconds["training"], contender.bytes["training"]
    return not seconds or (2 * predicted(seconds, length) < SECONDS - spent and predicted(memory, length) < MEMORY)


def looked(contender: Contender, length: int, case: measuring.Case) -> bool:
    """A first call, for memory; whether it went well."""
    taken: list[float] = []
    try:
        with measuring.Deadline(SECONDS):
            size = measuring.peak_memory(lambda: taken.append(measuring.seconds_of(case)))
    except Exception as error:  # the others go on
        contender.failed["training"] = f"{type(error).__name__}: {error}"
        return False
    contender.seconds["training"][length] = taken[-1]
    contender.bytes["training"][length] = max(1.0, float(size or 0))
    return True


def figures(contender: Contender, medians: dict[int, float]) -> dict[str, Any]:
    """What is written of one mechanism."""
    theory = THEORY.get(type(contender.mechanism).__name__)
    memory = {length: x for length, x in contender.bytes["training"].items() if length in medians}
    counts = {length: waiting(at(contender.mechanism, length), length) for length in COUNTED} if medians else {}
    return {
        "seconds": {length: float(f"{x:.4g}") for length, x in medians.items()},
        "bytes": memory,
        "time_exponent": exponent(medians),
        "two_terms": None if theory is None else two_terms(medians, theory.time),
        "memory_exponent": exponent({n: x for n, x in memory.items() if x > 2**21}),
        "theory": None if theory is None else dataclasses.asdict(theory),
        "waiting_operations": counts,
        "waiting_exponent": exponent(counts),
        "failed": contender.failed.get("training"),
    }


def two_terms(seconds: dict[int, float], power: float) -> dict[str, float | None] | None:
    """Least squares (of ratios) of a n^lower + b n^power, neither below 0: lower is 1 where the power is more, else 0.

    >>> two_terms({n: 3e-6 * n + 2e-8 * n**1.5 for n in (1024, 4096, 16384, 65536)}, 1.5)
    {'lower': 1, 'rules_from': 22500, 'share_at_longest': 0.63, 'off_at_most': 0.0}
    """
    if len(seconds) < 3:
        return None
    lower, lengths = int(power > 1), torch.tensor(sorted(seconds)).double()
    taken = torch.tensor([seconds[int(n)] for n in lengths]).double()
    terms = torch.stack([lengths**lower, lengths**power], 1) / taken[:, None]
    a, b = torch.linalg.lstsq(terms, torch.ones_like(taken)[:, None]).solution[:, 0].tolist()
    if min(a, b) < 0:  # one term alone is nearest
        one = int(b > a)
        only = float(terms[:, one].sum() / terms[:, one].square().sum())
        a, b = (0.0, only) if one else (only, 0.0)
    found = terms @ torch.tensor([a, b]).double()
    return {
        "lower": lower,
        "rules_from": round((a / b) ** (1 / (power - lower))) if b else None,  # from there on theory's term is the larger
        "share_at_longest": round(float(b * terms[-1, 1] / found[-1]), 2),
        "off_at_most": round(float((found - 1).abs().max()), 2),
    }


class Chain(TorchDispatchMode):
    """Counts the longest chain of operations each of which needs a result of the one before."""

    def __init__(self):
        super().__init__()
        self.depth: dict[int, int] = {}
        self.kept: list[Tensor] = []  # so that no storage is freed and its place used again

    @property
    def longest(self) -> int:
        return max(self.depth.values(), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        before = max((self.depth.get(self._place(t), 0) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), default=0)
        for tensor in (t for t in tree_leaves(made) if isinstance(t, Tensor)):
            step = 0 if self._is_view(tensor, args) else 1
            copied = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_)
            source = max((self.depth.get(self._place(t), 0) for t in args[1:] if isinstance(t, Tensor)), default=0)
            reached = source + 1 if copied else before + step  # pieces of a buffer may be written at once
            place = self._place(tensor)
            self.depth[place] = max(self.depth.get(place, 0), reached)
            self.kept.append(tensor)
        return made

    @staticmethod
    def _place(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _is_view(self, tensor: Tensor, args: tuple) -> bool:
        return tensor._is_view() and any(isinstance(t, Tensor) and self._place(t) == self._place(tensor) for t in args)


@torch.no_grad()
def waiting(mechanism: Mechanism, length: int) -> int:
    """The operations of one call, forward, that wait for one another as it is written here."""
    given = call(length)
    with torch.backends.mkldnn.flags(enabled=False), Chain() as chain:  # its LSTM is one operation that hides its steps
        mechanism(given.q.detach(), given.k.detach(), given.v.detach(), scale=given.scale)
    return chain.longest


def shown(found: dict[str, Any]) -> str:
    head = [
        "mechanism",
        "time",
        "measured",
        "off by",
        "both terms",
        "memory",
        "to L",
        "waiting",
        *(f"counted {n}" for n in COUNTED),
    ]
    lines = []
    for name, row in found.items():
        theory = row["theory"] or {"said": "-", "time": None, "sequential": "-"}
        power = row["time_exponent"]
        off = "-" if power is None or theory["time"] is None else f"{power - theory['time']:+.2f}"
        counts = [str(row["waiting_operations"].get(n, "-")) for n in COUNTED]
        lines.append(
            [
                name,
                theory["said"],
                _power(power),
                off,
                said(row["two_terms"]),
                _power(row["memory_exponent"]),
                str(max(row["seconds"], default="-")),
                theory["sequential"],
                *counts,
            ]
        )
    return table(f"powers of the length: forward and backward, one head, d={DIM}, R=64", head, lines)


def said(terms: dict[str, float | None] | None) -> str:
    """How much theory's term is at the longest length, and how near it comes with the lower one.

    >>> said({"lower": 1, "rules_from": 3900, "share_at_longest": 0.74, "off_at_most": 0.06})
    '74 %, within 6 %'
    """
    return "-" if terms is None else f"{100 * terms['share_at_longest']:.0f} %, within {100 * terms['off_at_most']:.0f} %"  # type: ignore[operator]


def _power(x: float | None) -> str:
    return "-" if x is None else f"n^{x:.2f}"


if __name__ == "__main__":
    main()
