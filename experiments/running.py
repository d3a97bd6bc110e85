"""One experiment from its numbers to its verdict: measured, judged, drawn and written down."""

from __future__ import annotations

import importlib
import inspect
import time
from pathlib import Path
from types import ModuleType

from benchmarks.timing import write

SIZES = ("tiny", "small", "full")


def names() -> list[str]:
    """The experiments that there are."""
    return sorted(path.stem for path in Path(__file__).parent.glob("s[0-9][0-9][0-9]_*.py"))


def load(name: str) -> ModuleType:
    return importlib.import_module(f"experiments.{name}")


def claim(experiment: ModuleType) -> str:
    """What it says, in one line."""
    return (inspect.getdoc(experiment) or "").split("\n")[0]


def run(name: str, size: str, folder: Path) -> bool:
    """Measure one experiment, write NAME.json and NAME.png there, and say whether the numbers confirm its verdict."""
    experiment, start = load(name), time.perf_counter()
    print(f"# {name} ({size}): {claim(experiment)}", flush=True)
    numbers = experiment.measure(size)
    holds = bool(experiment.holds(numbers))
    write(name, {"claim": claim(experiment), "size": size, "holds": holds, "numbers": numbers}, folder)
    experiment.draw(numbers, folder / f"{name}.png")
    print(
        f"{experiment.VERDICT if holds else 'NOT CONFIRMED: ' + experiment.VERDICT}\n{experiment.figure_of(numbers)}\n"
        f"after {time.perf_counter() - start:.0f} s: {name}.json, {name}.png\n",
        flush=True,
    )
    return holds
