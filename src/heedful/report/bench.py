"""A bench in the terminal: errors by mechanism, then seconds and bytes by mechanism and length."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..benching.budget import as_bytes, as_seconds
from ..benching.growth import LEAD
from ..benching.result import FAR, Bench, Row
from ..benching.verdict import NAMES, number
from ..verdicts import head_name, short_names


def bench(found: Bench) -> Group:
    """All that a bench found."""
    about = found.about
    shape = about.shape
    head = Text(
        f"{about.model}: {sum(about.layers.values())} heads of {len(about.layers)} layers on {about.texts} texts of at most {about.tokens:,} "
        f"tokens; times of {shape['heads']} heads x {shape['dim']} ({', '.join(about.rules) or 'no mask'}), {as_seconds(about.spent)} spent",
        "bold",
    )
    parts: list[RenderableType] = [head, "", errors(found), ""]
    for which, title in NAMES.items():
        parts += [costs(found, which, "seconds", f"{title}: time of one call"), ""]
    parts += [costs(found, "training", "bytes", f"{NAMES['training']}: memory at its peak"), ""]
    return Group(*parts, *(Text(f"- {line}") for line in [*found.verdicts(), *_refusals(found)]))


def errors(found: Bench) -> Table:
    """One line for each mechanism: its output errors over all heads against exact attention."""
    table = _table("relative output error against exact attention, over heads")
    table.add_column("")
    for name in ("tokens", "median", "quartiles", "worst head", "", f"above {number(FAR)}", "sequential", "learned in"):
        table.add_column(name, justify="right")
    short = dict(zip(found.about.layers, short_names(list(found.about.layers)), strict=True))
    for row in found.rows:
        table.add_row(
            Text(row.name),
            *map(Text, _errors(row, short)),
            row.sequential,
            "-" if row.fit_seconds is None else as_seconds(row.fit_seconds),
        )
    return table


def _errors(row: Row, short: dict[str, str]) -> tuple[str, ...]:
    error = row.error()
    if error is None:
        return "-", "-", "-", "-", "", "-"
    where = max(length for length, cell in row.cells.items() if cell.errors)
    layer, head = error.head
    quartiles = f"{number(error.low)} to {number(error.high)}"
    worst = (number(error.worst), head_name(short[layer], head)) if error.worst else ("0", "")
    return f"{where:,}", number(error.median), quartiles, *worst, f"{error.far} of {error.heads}"


def costs(found: Bench, which: str, quantity: str, title: str) -> Table:
    """One line for each mechanism, one column for each length: green where it takes less than exact attention."""
    table = _table(title)
    table.add_column("")
    for length in found.lengths:
        table.add_column(f"{length:,}", justify="right")
    table.add_column("grows as", justify="right")
    table.add_column("less than exact from" if quantity == "bytes" else "faster than exact from", justify="right")
    theirs = found.exact.figures(which, quantity)
    for row in found.rows:
        mine = row.figures(which, quantity)
        cells = (_cell(mine.get(length), theirs.get(length), quantity, row is found.exact) for length in found.lengths)
        power, where = row.exponent(which, quantity), found.crossover(row.name, which, quantity)
        crossing = "" if row is found.exact else "-" if where is None else str(where)
        table.add_row(Text(row.name), *cells, "-" if power is None else f"n^{power:.2f}", crossing)
    return table


def _cell(mine: float | None, theirs: float | None, quantity: str, exact: bool) -> Text:
    if mine is None:
        return Text("-", "grey50")
    shown = as_bytes(mine) if quantity == "bytes" else as_seconds(mine)
    if exact or theirs is None:
        return Text(shown)
    return Text(shown, "green" if theirs / mine > LEAD else "red" if mine / theirs > LEAD else "")


def _refusals(found: Bench) -> list[str]:
    """What was not measured, in one line for each mechanism and reason."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in (row for row in found.rows if row.figures("forward")):  # verdicts tell of the others
        for length, cell in row.cells.items():
            for which, why in cell.missing.items():
                said.setdefault((row.name, why.split(" about ")[0]), []).append(f"{length:,} {NAMES.get(which, which)}: {why}")
    return [
        f"{name} at {lines[0]}" + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "") for (name, _), lines in said.items()
    ]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
