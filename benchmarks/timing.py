"""Timing: cases take turns on fixed threads, medians are kept, and the result says on what machine."""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
LEAST = 0.02  # seconds that one measurement lasts at least: short cases are repeated within it
INSTALL = "PIP_CONSTRAINT=constraints.txt .venv/bin/python -m pip install --no-deps -r benchmarks/requirements.txt"
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Case = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """The seconds of one case: its median and quartiles over the rounds."""

    median: float
    low: float
    high: float
    rounds: int


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside this block torch computes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timings(cases: dict[str, Case], rounds: int = 15, budget: float = 60.0) -> dict[str, Timing]:
    """Time the cases in turns, forwards and backwards, so that a slow moment of the machine falls on all of them.

    Each case runs first, a short one twice; then there are at most `rounds` rounds, and after 3 no more once `budget` seconds are spent.
    """
    repeats = {name: _repeats(case) for name, case in cases.items()}
    taken: dict[str, list[float]] = {name: [] for name in cases}
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - start > budget:
            break
        for name in list(cases)[:: 1 if number % 2 == 0 else -1]:
            taken[name].append(_seconds(cases[name], repeats[name]))
    return {name: _timing(seconds) for name, seconds in taken.items()}


def _repeats(case: Case) -> int:
    first = _seconds(case, 1)
    return 1 if first > 1 else max(1, round(LEAST / max(_seconds(case, 1), 1e-6)))


def _seconds(case: Case, repeats: int) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(repeats):
        case()
    _wait()
    return (time.perf_counter() - start) / repeats


def _timing(seconds: list[float]) -> Timing:
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return Timing(median, low, high, len(seconds))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(case: Case) -> int | None:
    """The bytes that a case takes at its peak beyond what was held before; None where the system does not tell."""
    if torch.cuda.is_available():
        _wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case()
        return torch.cuda.max_memory_allocated() - before
    if not os.access(RESET, os.W_OK):
        return None
    RESET.write_text("5")  # the peak of this process starts again from what it holds now
    before = _status("VmRSS")
    case()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def machine() -> dict[str, Any]:
    """What the figures were measured on: processor, threads and versions, no name of a host."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def peer(module: str, package: str) -> tuple[ModuleType, str]:
    """Another library and its version; where it is missing the error says how to install it."""
    try:
        return importlib.import_module(module), metadata.version(package)
    except ImportError as missing:
        raise SystemExit(f"{package} is not installed ({missing}); run\n    {INSTALL}") from None


def write(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write NAME.json there whole or not at all, with the machine beside the figures."""
    folder.mkdir(exist_ok=True)
    path, part = folder / f"{name}.json", folder / f".{name}.json.part"
    part.write_text(json.dumps({"machine": machine(), **figures}, indent=2, default=_plain) + "\n")
    part.replace(path)
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Timing):
        return {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in asdict(value).items()}
    return value.item() if isinstance(value, torch.Tensor) else str(value)


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    """Columns flush right under their heads.

    >>> print(table("times", ["L", "ms"], [["1024", "2.5"]]))
    times
       L   ms
    1024  2.5
    """
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join([title, *("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in [head, *rows])])
