"""Findings in the terminal: a table of heads, a grid of one column, depths and verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..doctor import Diagnosis
from ..findings import Findings
from ..statistics import MEANING, Estimate
from ..verdicts import head_name, short_names

HEADS = ("entropy", "evenness", "peak", "sink", "distance", "window99", "busiest", "largest_logit", "key_dims", "value_dims")
TITLES = {"largest_logit": "logit", "window99": "99 % in", "key_dims": "key dims", "value_dims": "value dims"}
WIDEST = 10_000  # columns, where a width is asked for whatever there is room for
SHADES = ("", "grey50", "white", "cyan", "bold cyan")


def overview(findings: Findings) -> Group:
    """What was read, and what it says."""
    about = findings.about
    rows = "every row" if about.rows is None else f"{about.rows} rows of each longer text"
    head = Text(
        f"{about.model}: {about.texts:,} texts, {about.tokens:,} tokens, {len(findings.layers)} attention layers, {rows}", "bold"
    )
    return Group(head, *(Text(f"- {sentence}") for sentence in findings.verdicts()))


def heads(findings: Findings, columns: tuple[str, ...] = HEADS) -> RenderableType:
    """One line for each head; +- is a standard error, where rows were sampled. What is too wide is left out, and named below."""
    return _Heads(findings, columns)


@dataclass(frozen=True, eq=False)
class _Heads:
    """The table of heads as wide as there is room: first the errors go, then the last columns."""

    findings: Findings
    columns: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        results = self.findings.results()
        present = [name for name in self.columns if any(name in found for found in results.values())]
        errors = any((found[n].error > 0).any() for found in results.values() for n in present if n in found)
        tries = [(len(present), errors), *((count, False) for count in range(len(present), 0, -1))]
        for count, told in tries:
            table = _heads(results, present[:count], told)
            if Measurement.get(console, options.update(max_width=WIDEST), table).maximum <= options.max_width:
                break
        yield table
        left = (["the standard errors (±)"] if errors and not told else []) + present[count:]
        if left:
            yield Text(
                f"left out, as they are too wide: {', '.join(left)}. A wider terminal or heedful show FOLDER --csv has them."
            )


def _heads(results: dict[str, dict[str, Estimate]], present: list[str], errors: bool) -> Table:
    table = Table(title="heads", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("head")
    for name in present:
        table.add_column(TITLES.get(name, name), justify="right", no_wrap=True)
    for short, found in zip(short_names(list(results)), results.values(), strict=True):
        for head in range(len(next(iter(found.values())).value)):
            cells = (
                _cell(found[n].value[head].item(), errors * found[n].error[head].item()) if n in found else "" for n in present
            )
            table.add_row(Text(head_name(short, head)), *cells)
        table.add_section()
    return table


def grid(findings: Findings, column: str) -> Group:
    """Layers by heads of one column, the larger the brighter."""
    values = findings.column(column)
    if not values and any(column in row for row in findings.by_depth()):
        raise ValueError(f"{column!r} is told by depth, not by head: heedful show FOLDER lists it under hidden states by depth.")
    if not values:
        raise ValueError(f"these findings hold no {column!r}; scan with the statistic that gives it.")
    known = [x for layer in values.values() for x in layer.tolist() if math.isfinite(x)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer")
    for head in range(max(len(layer) for layer in values.values())):
        table.add_column(str(head), justify="right")
    for short, layer in zip(short_names(list(values)), values.values(), strict=True):
        table.add_row(Text(short), *(Text(_number(x), _shade(x, low, high)) for x in layer.tolist()))
    return Group(Text(f"{column}: {MEANING[column]}", "italic"), table)


def depths(findings: Findings) -> Table:
    """One line for each depth of the hidden states."""
    table = Table(title="hidden states by depth", title_justify="left", box=None, pad_edge=False, header_style="bold")
    rows = list(findings.by_depth())
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if name == "depth" else "right")
    for row in rows:
        table.add_row(*(Text(value if isinstance(value, str) else _number(value)) for value in row.values()))
    return table


def show(*parts: RenderableType) -> None:
    """Print to the terminal, wide enough for a file where there is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part, highlight=False)  # [plots] is no markup


def _cell(value: float, error: float) -> str:
    return _number(value) + (f" ±{_number(error)}" if math.isfinite(error) and error > 0 else "")


def _number(value: Any) -> str:
    """Three digits, enough to compare.

    >>> _number(0.12345), _number(12.345), _number(1234.5), _number(float("inf"))
    ('0.123', '12.3', '1234', 'wide')
    """
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "wide"  # no window of the list is wide enough
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"


def _shade(value: float, low: float, high: float) -> str:
    if not math.isfinite(value) or high <= low:
        return ""
    return SHADES[min(len(SHADES) - 1, int((value - low) / (high - low) * len(SHADES)))]


def diagnosis(found: Diagnosis) -> Group:
    """What the doctor says."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (
        ("layer", "left"),
        ("heads", "right"),
        ("key heads", "right"),
        ("dim", "right"),
        ("width", "right"),
        ("mask", "left"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for name, layer in found.layers.items():
        rules = ", ".join((*layer.rules, *(["other tokens' keys"] if layer.cross else []))) or "none"
        table.add_row(Text(name), str(layer.heads), str(layer.key_heads), str(layer.dim), str(layer.width), rules)
    lines = [
        f"{found.model}: {len(found.layers)} attention layers are seen, {len(found.missed)} are not; {found.verdict}.",
        *(f"- not seen: {name}: {why}" for name, why in found.missed.items()),
        f"- the model's own attention and what is seen differ by {found.difference:.1e} (relative, on real tokens)",
        f"- a scan reads {found.length} tokens of a text unless told otherwise; attention is computed by {found.kernel}",
        "- " + ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    ]
    return Group(table, "", *(Text(line) for line in lines))
