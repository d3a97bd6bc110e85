"""Bench: what every mechanism took and lost at each length, as data that saves, loads and tells its figures."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files import write
from .growth import LEAD, Crossover, crossover, exponent

SCHEMA = 1
FILE = "bench.json"
PASSES = ("forward", "training")  # forward alone without gradients; forward and backward
QUANTITIES = ("seconds", "bytes")
LEAST_BYTES = 2**21  # below it the system's own bookkeeping shows
FAR = 0.3  # relative output error from which on a head computes something else


@dataclass(frozen=True)
class Cost:
    """What one call on all heads of a layer takes: the median of its seconds with their quartiles, and bytes at its peak."""

    seconds: float
    low: float
    high: float
    rounds: int
    bytes: int | None = None


@dataclass(frozen=True)
class Cell:
    """One mechanism at one length: its cost by pass, its error by layer and head, and why what is missing was not measured."""

    costs: dict[str, Cost] = field(default_factory=dict)
    errors: dict[str, list[float | None]] = field(default_factory=dict)  # by layer, a value per head; None where it is not finite
    missing: dict[str, str] = field(default_factory=dict)  # by pass, or `error`


@dataclass(frozen=True)
class Error:
    """The relative output errors of many heads in a few numbers."""

    median: float
    low: float  # quartiles
    high: float
    worst: float
    head: tuple[str, int]  # the worst one's layer and number
    far: int  # heads above FAR
    heads: int


@dataclass(frozen=True)
class Row:
    """One mechanism at all lengths."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    sequential: str = "-"  # how many operations must wait for one another, in theory, for n tokens
    cells: dict[int, Cell] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # by layer, what the mechanism said
    fit_seconds: float | None = None

    def figures(self, which: str, quantity: str = "seconds") -> dict[int, float]:
        """By length, the seconds or bytes of a pass; bytes that are too few to tell are left out."""
        _known(which, PASSES)
        _known(quantity, QUANTITIES)
        found = {length: getattr(cell.costs[which], quantity) for length, cell in self.cells.items() if which in cell.costs}
        return {length: x for length, x in found.items() if x is not None and (quantity == "seconds" or x >= LEAST_BYTES)}

    def exponent(self, which: str, quantity: str = "seconds") -> float | None:
        """The power of the length that the seconds or bytes of a pass grow with, over the larger lengths."""
        return exponent(self.figures(which, quantity))

    def error(self, length: int | None = None) -> Error | None:
        """The errors over all heads at a length, the longest that was measured where none is given; None where none was."""
        at = self.judged if length is None else length
        return _summary(self.cells[at].errors) if at in self.cells else None

    @property
    def judged(self) -> int | None:
        """The longest length at which errors are known."""
        return max((at for at, cell in self.cells.items() if _summary(cell.errors) is not None), default=None)


@dataclass(frozen=True)
class About:
    """What was measured, on what, and within which budget."""

    model: str
    texts: int  # that errors were judged on
    fitted: int  # texts that learning mechanisms were fitted on
    tokens: int  # of the longest text
    layers: dict[str, int]  # the heads of each layer
    timed: str  # the layer that stands for all in times and memory
    shape: dict[str, int]  # its heads, key heads, dim and width
    rules: tuple[str, ...]  # its mask
    seed: int
    seconds: float  # of the budget, and what was spent of it
    memory: int
    spent: float
    left_out: dict[str, str] = field(default_factory=dict)  # layers, and why
    warned: tuple[str, ...] = ()  # what mechanisms warned of
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """A measured answer to: what may I replace my attention with, at my lengths, on my heads, and what do I lose?"""

    about: About
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]  # the first is exact attention

    @property
    def exact(self) -> Row:
        """Exact attention, which all else is compared with."""
        return self.rows[0]

    @property
    def extended(self) -> tuple[int, ...]:
        """Lengths beyond the longest text: timed on its rows drawn again and again, so no error is known there."""
        return tuple(length for length in self.lengths if length > self.about.tokens)

    def row(self, name: str) -> Row:
        """The row of a mechanism, by its name or its kind."""
        found = [row for row in self.rows if name in (row.name, row.kind)]
        if not found:
            raise ValueError(f"there is no row {name!r}; there are {', '.join(row.name for row in self.rows)}.")
        return found[0]

    def crossover(self, name: str, which: str = "forward", quantity: str = "seconds") -> Crossover | None:
        """The length from which on a mechanism clearly takes less than exact attention; None where they share no length."""
        mine, theirs = self.row(name).figures(which, quantity), self.exact.figures(which, quantity)
        doubted = [n for n in mine.keys() & theirs.keys() if self._overlap(name, n, which)] if quantity == "seconds" else []
        return crossover(mine, theirs, doubted)

    def faster(self, name: str, length: int, which: str = "forward") -> bool:
        """Whether a mechanism is faster than exact attention by more than the scatter of the rounds."""
        times = self.speedup(name, length, which)
        return times is not None and times >= LEAD and not self._overlap(name, length, which)

    def _overlap(self, name: str, length: int, which: str) -> bool:
        """Whether the quartiles of a mechanism's seconds reach those of exact attention."""
        mine, theirs = (row.cells[length].costs[which] for row in (self.row(name), self.exact))
        return mine.high >= theirs.low and theirs.high >= mine.low

    def speedup(self, name: str, length: int, which: str = "forward") -> float | None:
        """How many times the seconds of a mechanism fit into those of exact attention."""
        mine, theirs = self.row(name).figures(which), self.exact.figures(which)
        return theirs[length] / mine[length] if length in mine and length in theirs else None

    def verdicts(self) -> list[str]:
        """What the numbers say, in sentences that carry them."""
        from .verdict import verdicts

        return verdicts(self)

    def records(self) -> Iterator[dict[str, Any]]:
        """One flat record for each mechanism and length."""
        for row in self.rows:
            for length, cell in row.cells.items():
                error = row.error(length)
                costs = {f"{which}_{name}": x for which, cost in cell.costs.items() for name, x in asdict(cost).items()}
                errors = (
                    {} if error is None else {f"error_{name}": getattr(error, name) for name in ("median", "low", "high", "worst")}
                )
                yield {"mechanism": row.name, "length": length, **costs, **errors, "missing": "; ".join(cell.missing.values())}

    def to_csv(self) -> str:
        """The records as CSV text."""
        records, text = list(self.records()), io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for record in records for name in record)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()

    def save(self, folder: str | Path) -> Path:
        """Write bench.json, which `load` reads, and bench.csv and verdicts.txt for people."""
        folder = Path(folder)
        write(folder / "bench.csv", self.to_csv())
        write(folder / "verdicts.txt", "\n".join(self.verdicts()) + "\n")
        return write(folder / FILE, json.dumps({"schema": SCHEMA, "bench": asdict(self)}, indent=1)).parent

    @classmethod
    def load(cls, path: str | Path) -> Bench:
        """Read a bench back from its folder or file."""
        path = Path(path) / FILE if Path(path).is_dir() else Path(path)
        if not path.exists():
            raise FileNotFoundError(f"there is no bench at {path}; give the folder that `heedful bench` wrote.")
        try:
            data = json.loads(path.read_text("utf-8"))
            schema = data["schema"]
            if schema > SCHEMA:
                raise ValueError(f"{path} was written by a newer heedful (schema {schema}, here {SCHEMA}); upgrade heedful.")
            return _rebuilt(data["bench"])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged or not a bench ({_told(error)}); run the bench again, or load another copy."
            ) from error


def _rebuilt(data: dict[str, Any]) -> Bench:
    about = About(**{**data["about"], **{name: tuple(data["about"][name]) for name in ("rules", "warned")}})
    rows = tuple(Row(**{**row, "cells": {int(n): _cell(cell) for n, cell in row["cells"].items()}}) for row in data["rows"])
    return Bench(about, tuple(data["lengths"]), rows)


def _cell(data: dict[str, Any]) -> Cell:
    return Cell({which: Cost(**cost) for which, cost in data["costs"].items()}, data["errors"], data["missing"])


def _summary(errors: dict[str, list[float | None]]) -> Error | None:
    known = sorted((x, (layer, head)) for layer, found in errors.items() for head, x in enumerate(found) if x is not None)
    if not known:
        return None
    values = [x for x, _ in known]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    worst, head = known[-1]
    return Error(median, low, high, worst, head, sum(x > FAR for x in values), len(values))


def _known(name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ValueError(f"{name!r} was not measured; give one of {', '.join(names)}.")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
