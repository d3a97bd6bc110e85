"""An explanation in the terminal and as a PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as Drawn
from rich.text import Text

from ..explanations import Explanation, Grid, Lines
from ..explanations.explanation import Cell, Table
from ..files import write
from .plots import COLOURS

WORDS = 60  # tokens that a picture can name
LOWEST = 1e-17  # what a logarithmic axis shows of zero


def explanation(found: Explanation) -> Group:
    """All that was found, for the terminal."""
    head = Text(f"{found.model}, {len(found.tokens)} tokens: {found.what}", "bold")
    parts: list[RenderableType] = [head, ""]
    for table in found.tables:
        parts += [Text(table.title, "italic"), _table(table), ""]
    return Group(*parts, *(Text(f"- {line}") for line in [*found.sentences, *found.notes]))


def _table(table: Table) -> Drawn:
    drawn = Drawn(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(table.columns):
        left = any(isinstance(row[place], str) for row in table.rows)
        drawn.add_column(name, justify="left" if left else "right")
    for row in table.rows:
        drawn.add_row(*(Text(cell(value)) for value in row))
    return drawn


def cell(value: Cell) -> str:
    """Three digits, by powers of ten where they are needed.

    >>> cell(0.12345), cell(1.5e-9), cell(3), cell(None), cell(-12.34)
    ('0.123', '1.5e-09', '3', '-', '-12.3')
    """
    if value is None or value != value:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"


def picture(found: Explanation, path: str | Path) -> Path:
    """Draw it as a PNG, whole or not at all."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install heedful[plots].") from error
    figure = Figure(figsize=_size(found.picture), layout="constrained")
    axes = figure.subplots()
    if isinstance(found.picture, Grid):
        _grid(figure, axes, found.picture)
    else:
        _lines(axes, found.picture)
    axes.set_title(f"{found.model}, {len(found.tokens)} tokens", fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130)
    return write(path, content.getvalue())


def _size(drawn: Lines | Grid) -> tuple[float, float]:
    if isinstance(drawn, Lines):
        return 7.5, 4.5
    return 3 + min(14.0, 0.24 * len(drawn.columns)), 1.8 + min(8.0, 0.28 * len(drawn.rows))


def _lines(axes: Any, drawn: Lines) -> None:
    for number, (name, values) in enumerate(drawn.curves.items()):
        shown = [max(value, LOWEST) for value in values] if drawn.log else values
        axes.plot(shown, "o-", markersize=4, color=COLOURS[number % len(COLOURS)], label=_plain(name))
    axes.set(xlabel=drawn.x, ylabel=drawn.y, yscale="log" if drawn.log else "linear")
    axes.grid(True, color="0.9", linewidth=0.6)
    if len(drawn.curves) > 1:
        axes.legend(frameon=False, fontsize=9)


def _grid(figure: Any, axes: Any, drawn: Grid) -> None:
    """Colours by the square root where nothing is negative, so that one token that all look at does not hide the others."""
    from matplotlib.colors import PowerNorm

    top = max((abs(x) for row in drawn.values for x in row if x == x), default=0.0) or 1.0
    signed = any(x < 0 for row in drawn.values for x in row)
    look = {"cmap": "RdBu_r", "vmin": -top, "vmax": top} if signed else {"cmap": "Blues", "norm": PowerNorm(0.5, 0.0, top)}
    image = axes.imshow(drawn.values, aspect="auto", interpolation="nearest", **look)
    axes.set_yticks(range(len(drawn.rows)), [_plain(name) for name in drawn.rows], fontsize=8)
    if len(drawn.columns) <= WORDS:
        axes.set_xticks(range(len(drawn.columns)), [_plain(name) for name in drawn.columns], fontsize=8, rotation=90)
    axes.set_xlabel(drawn.x)
    figure.colorbar(image, ax=axes, label=drawn.what).ax.yaxis.label.set_fontsize(8)


def _plain(name: str) -> str:
    """A dollar sign would begin a formula."""
    return name.replace("$", r"\$")
