"""Plots: a bench as a picture of two panels, error against time and time against length."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from ..benching.result import FAR, Bench, Row
from ..benching.verdict import NAMES
from ..files import write

SIZE = (14.0, 5.8)  # inches
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#332288", "#999933", "#aa4499", "#117733")
MARKERS = "o^Dv*Ph"
EXACT, GREY = "black", "0.45"
SMALL = {"fontsize": 8.5}
GAP = 0.042  # of the errors' axis, between two names
TOP = 1.2  # errors above it are drawn at the edge

Looks = dict[str, dict[str, Any]]


def bench(found: Bench, path: str | Path, which: str = "forward") -> Path:
    """Draw a bench as a PNG: error against time at the longest length that most were judged at, and time against length with the crossovers."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install heedful[plots].") from error
    figure = Figure(figsize=SIZE, layout="constrained")  # never on a screen: savefig draws it by Agg
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.05))
    looks = {row.name: _look(row, place) for place, row in enumerate(found.rows)}
    _errors(left, found, which, looks)
    _times(right, found, which, looks)
    figure.suptitle(f"{found.about.model}: what may replace attention, and what is lost", fontsize=13)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130)
    return write(path, content.getvalue())


def _look(row: Row, place: int) -> dict[str, Any]:
    if place == 0:
        return {"color": EXACT, "marker": "s", "linewidth": 2.2}
    if row.kind == "Recurrent":
        return {"color": GREY, "marker": "x", "linestyle": "--", "linewidth": 1.2}
    turn, colour = divmod(place - 1, len(COLOURS))
    return {"color": COLOURS[colour], "marker": MARKERS[place % len(MARKERS)], "linestyle": ("-", ":")[turn % 2], "linewidth": 1.6}


def shared(found: Bench, which: str) -> int | None:
    """The longest length at which most of those that were ever judged were judged and timed, exact attention among them."""
    rivals = [row for row in found.rows[1:] if row.judged is not None]
    counts = {n: sum(n in row.figures(which) and row.error(n) is not None for row in rivals) for n in found.exact.figures(which)}
    return max((n for n, count in counts.items() if count and 2 * count > max(counts.values())), default=None)


def _errors(axes: Any, found: Bench, which: str, looks: Looks) -> None:
    """Each mechanism as a point with its quartiles: faster to the left, closer to exact attention below."""
    length = shared(found, which)
    points = []
    for row in found.rows[1:]:
        error, seconds = row.error(length or 0), row.figures(which).get(length or 0)
        if error is None or seconds is None:
            continue
        low, median, high = (min(x, TOP) for x in (error.low, error.median, error.high))
        look = {**looks[row.name], "linestyle": "none"}
        axes.errorbar(seconds * 1e3, median, [[median - low], [high - median]], capsize=3, markersize=8, elinewidth=1.1, **look)
        points.append((median, seconds * 1e3, row.name))
    if length is not None:
        axes.axvline(found.exact.figures(which)[length] * 1e3, color=EXACT, linewidth=2.2)
        at = (found.exact.figures(which)[length] * 1e3, 0.985)
        axes.annotate("exact attention", at, (5, 0), ("data", "axes fraction"), "offset points", rotation=90, va="top", **SMALL)
    axes.axhspan(FAR, TOP, color="0.94", zorder=0)
    axes.annotate("computes something else", (0.015, 0.97), xycoords="axes fraction", color=GREY, **SMALL)
    where = "" if length is None else f" at {length:,} tokens"
    axes.set(xscale="log", ylim=(0, TOP), xlabel=f"milliseconds of one call ({NAMES[which]}){where}")
    axes.set_ylabel("relative output error: median and quartiles of the heads")
    axes.margins(x=0.28)
    _plain(axes.xaxis)
    _named(axes, sorted(points), looks)
    axes.set_title("no error is known" if length is None else f"lost and taken at {length:,} tokens", fontsize=10.5)


def _named(axes: Any, points: list[tuple[float, float, str]], looks: Looks) -> None:
    """Names beside their points, from below to above, none on another."""
    spread = math.log(max(x for _, x, _ in points) / min(x for _, x, _ in points)) if points else 0.0
    placed: list[tuple[float, float]] = []
    for y, x, name in points:
        near = [place for place, other in placed if abs(math.log(x / other)) <= 0.4 * spread]
        place = max([y, *(place + GAP * TOP for place in near)])
        placed.append((place, x))
        text = {"xytext": (9, (place - y) / TOP * SIZE[1] * 0.8 * 72), "textcoords": "offset points", "va": "center"}
        axes.annotate(name, (x, y), color=looks[name]["color"], **text, **SMALL)


def _times(axes: Any, found: Bench, which: str, looks: Looks) -> None:
    """Time against length on logarithms; a ring where a mechanism becomes faster than exact attention."""
    for row in found.rows:
        figures = row.figures(which)
        if figures:
            label = _label(found, row, which)
            axes.plot(list(figures), [x * 1e3 for x in figures.values()], markersize=5, label=label, **looks[row.name])
    _rings(axes, found, which, looks)
    if found.extended and max(found.extended) > found.about.tokens:
        axes.axvspan(found.about.tokens, max(found.lengths), color="0.96", zorder=0)
        axes.annotate("texts drawn out", (0.985, 0.015), xycoords="axes fraction", color=GREY, ha="right", **SMALL)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=f"milliseconds of one call ({NAMES[which]})")
    axes.set_xticks(list(found.lengths), [f"{n:,}" for n in found.lengths])
    axes.minorticks_off()
    _plain(axes.yaxis)
    axes.grid(True, which="major", color="0.9", linewidth=0.6)
    axes.set_title("time; a ring where it becomes faster than exact attention", fontsize=10.5)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)


def _label(found: Bench, row: Row, which: str) -> str:
    """A name, how its time grows, and from where on it is faster."""
    power, where = row.exponent(which), found.crossover(row.name, which)
    grows = "" if power is None else f"   n^{power:.2f}"
    if row is found.exact or where is None:
        return ("exact attention" if row is found.exact else row.name) + grows
    return f"{row.name}{grows}   {where if where.length is None or where.always else f'from {where}'}"


def _rings(axes: Any, found: Bench, which: str, looks: Looks) -> None:
    exact = found.exact.figures(which)
    for row in found.rows[1:]:
        where = found.crossover(row.name, which)
        if where is not None and where.length is not None and not where.always:
            at = (where.length, _between(exact, where.length) * 1e3)
            axes.scatter(*at, s=130, facecolors="none", edgecolors=looks[row.name]["color"], linewidths=1.6, zorder=5)


def _between(figures: dict[int, float], length: float) -> float:
    """A figure between two measured lengths, on logarithms.

    >>> round(_between({100: 1.0, 400: 16.0}, 200), 9)
    4.0
    """
    low = max((n for n in figures if n <= length), default=min(figures))
    high = min((n for n in figures if n >= length), default=max(figures))
    part = 0.0 if low == high else math.log(length / low) / math.log(high / low)
    return figures[low] ** (1 - part) * figures[high] ** part


def _plain(axis: Any) -> None:
    """Ticks as numbers, not as powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())
