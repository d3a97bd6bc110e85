"""Measuring: seconds of cases that take turns, the bytes they need at their peak, and the machine they ran on."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LEAST = 0.02  # seconds that one measurement lasts at least: short cases are repeated within it
STATUS, RESET, FREE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")

Case = Callable[[], Any]
clock = time.perf_counter


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


def timings(cases: dict[str, Case], rounds: int = 15, budget: float = 60.0, least: int = 3) -> dict[str, Timing]:
    """Time the cases in turns, forwards and backwards, so that a slow moment of the machine falls on all of them.

    Each case runs first, a short one twice; then there are at most `rounds` rounds, and after the `least` no more once `budget` seconds are spent.
    """
    return rounds_of(cases, {name: _repeats(case) for name, case in cases.items()}, rounds, budget, least)


def rounds_of(cases: dict[str, Case], repeats: dict[str, int], rounds: int, budget: float, least: int = 3) -> dict[str, Timing]:
    """Rounds of cases that ran before, each case as often in a row as `repeats` says."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    start = clock()
    for number in range(rounds):
        if number >= least and clock() - start > budget:
            break
        for name in list(cases)[:: 1 if number % 2 == 0 else -1]:
            taken[name].append(seconds_of(cases[name], repeats[name]))
    return {name: timing_of(seconds) for name, seconds in taken.items()}


def _repeats(case: Case) -> int:
    first = seconds_of(case)
    return 1 if first > 1 else often(seconds_of(case))


def often(seconds: float) -> int:
    """How often a case that takes so long runs in a row, to be measured well."""
    return max(1, round(LEAST / max(seconds, 1e-6)))


def seconds_of(case: Case, repeats: int = 1) -> float:
    """The mean seconds of a case that runs so often in a row."""
    _wait()
    start = clock()
    for _ in range(repeats):
        case()
    _wait()
    return (clock() - start) / repeats


def timing_of(seconds: list[float]) -> Timing:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Timing(median, low, high, len(seconds))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(case: Case, device: torch.device | None = None) -> int | None:
    """The bytes that a case takes at its peak beyond what was held before, on a GPU where there is one unless a device is given.

    None where the system does not tell.
    """
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        _wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case()
        return torch.cuda.max_memory_allocated() - before
    if not os.access(RESET, os.W_OK):
        case()
        return None
    _trim()
    RESET.write_text("5")  # the peak of this process starts again from what it holds now
    before = _held("VmRSS")
    case()
    return max(0, _held("VmHWM") - before)


def _trim() -> None:
    """Give freed memory back to the system, so that taking it again shows."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _held(field: str) -> int:
    return _kilobytes(STATUS, field)


def _kilobytes(file: Path, field: str) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def free_memory(device: torch.device) -> int:
    """The bytes that are free on a device; 4 GB where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _kilobytes(FREE, "MemAvailable") if FREE.exists() else 4 * 10**9


class OutOfTime(Exception):
    """A case ran past its deadline."""


class Deadline(TorchFunctionMode):
    """Inside this block torch raises `OutOfTime` at its first call after so many seconds; once, so that what must be undone still can be.

    >>> with Deadline(60.0):
    ...     torch.ones(2).sum().item()
    2.0
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.end, self.over = clock() + seconds, False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not self.over and clock() > self.end and func is not torch._C._set_grad_enabled:  # no_grad must end as it began
            self.over = True
            raise OutOfTime
        return func(*args, **(kwargs or {}))


def machine() -> dict[str, Any]:
    """What figures were measured on: processor, threads and versions, no name of a host."""
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
