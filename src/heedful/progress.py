"""Progress: a bar on stderr, or silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Bar:
    """Where work stands, and what is done now; shown to nobody."""

    def advance(self, amount: float) -> None:
        """So much more is done."""

    def reach(self, amount: float) -> None:
        """So much is done in all."""

    def say(self, what: str) -> None:
        """What is done now."""


class _Shown(Bar):
    def __init__(self, bar: Any, task: Any, written: Callable[[float], str], total: float):
        self.bar, self.task, self.written, self.total = bar, task, written, total
        self.reach(0)

    def advance(self, amount: float) -> None:
        self.reach(self.bar.tasks[0].completed + amount)

    def reach(self, amount: float) -> None:
        done = f"{self.written(amount)} of {self.written(self.total)}"
        self.bar.update(self.task, completed=min(amount, self.total), done=done)

    def say(self, what: str) -> None:
        self.bar.update(self.task, what=what)


@contextmanager
def bar(title: str, total: float | None, written: Callable[[float], str]) -> Iterator[Bar]:
    """A progress bar with the time that went by and is left; nothing where there is no total, or no rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        total = None
    if total is None:
        yield Bar()
        return
    done, what = (TextColumn(f"{{task.fields[{field}]}}", markup=False) for field in ("done", "what"))
    columns = (TextColumn(title, markup=False), BarColumn(), done, TimeElapsedColumn(), TimeRemainingColumn(), what)
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield _Shown(shown, shown.add_task("", total=total, what="", done=""), written, total)
