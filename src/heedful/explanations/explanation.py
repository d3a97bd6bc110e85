"""Explanation: what one text did in a model, as a table, sentences and a picture; it saves as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..about import versions
from ..files import write

Cell = str | float | int | None


@dataclass(frozen=True)
class Lines:
    """A picture of curves over 0, 1, 2 ...; `log` where their sizes differ much."""

    curves: dict[str, list[float]]
    x: str
    y: str
    log: bool = False


@dataclass(frozen=True)
class Grid:
    """A picture of a matrix; the more, the darker."""

    values: list[list[float]]
    rows: Sequence[str]
    columns: Sequence[str]
    x: str  # what the columns are
    what: str


@dataclass(frozen=True)
class Table:
    """Rows under their columns."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


@dataclass(frozen=True)
class Explanation:
    """One answer about one text: tables, what they say, and what must be known to read them."""

    what: str
    model: str
    tokens: list[str]  # that were read
    tables: list[Table]
    sentences: list[str]
    picture: Lines | Grid
    notes: list[str] = field(default_factory=list)

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, whole or not at all.

        >>> import tempfile
        >>> found = Explanation("tokens", "m", ["a"], [Table("which", ("token", "moved"), [("a", 0.5)])], [], Lines({}, "", ""))
        >>> path = found.save(Path(tempfile.mkdtemp()) / "tokens.json")
        >>> json.loads(path.read_text())["tables"]
        {'which': [{'token': 'a', 'moved': 0.5}]}
        """
        whole: dict[str, Any] = {**asdict(self), "versions": versions()}
        whole["tables"] = {t.title: [dict(zip(t.columns, row, strict=True)) for row in t.rows] for t in self.tables}
        return write(path, json.dumps(_plain(whole), indent=2, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON knows no nan and no infinity: they become null."""
    if isinstance(value, dict):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
