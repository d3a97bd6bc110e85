"""Figures without a screen, all in one look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STYLE: Any = {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.handlelength": 3,
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by all eyes (Okabe and Ito)


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[list[Any]]:
    """The axes of that many panels side by side; the figure is saved when the block ends.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "line.png"
    >>> with figure(path) as (axes,):
    ...     _ = axes.plot([1, 2], [3, 4])
    >>> path.exists()
    True
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        drawn = Figure(figsize=(5.2 * panels, 4), layout="constrained")
        FigureCanvasAgg(drawn)
        yield list(drawn.subplots(1, panels, squeeze=False)[0])
        drawn.savefig(path, dpi=130, metadata={"Software": None})


def mark(axes: Any, values: Sequence[float]) -> None:
    """Just these values along a logarithmic x axis, as plain numbers."""
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
