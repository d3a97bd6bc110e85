"""What the benchmarks share: timings from heedful.measuring, peers that must be installed, tables and result files."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from heedful.measuring import Case, Timing, machine, peak_memory, threads, timing_of, timings

__all__ = [
    "INSTALL",
    "RESULTS",
    "Case",
    "Timing",
    "machine",
    "peak_memory",
    "peer",
    "table",
    "threads",
    "timing_of",
    "timings",
    "write",
]

RESULTS = Path(__file__).parent / "results"
INSTALL = "PIP_CONSTRAINT=constraints.txt .venv/bin/python -m pip install --no-deps -r benchmarks/requirements.txt"


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
