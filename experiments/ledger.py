"""The ledger: every claim with its verdict, our figure and the command that measures it, as docs/claims.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .errata import ITEMS
from .notation import SLIPS
from .running import claim, load, names

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "claims.md"
VERDICT = re.compile(r"holds|holds if .+|wrong: .+")
HEAD = """# Claims of the sources

What the sources say, whether it is so, and what we measured. `holds`: as it is said. `holds if`: under a condition that is not said there.
`wrong`: what is true instead. Written by `python -m experiments --ledger` from experiments/results; errata have the numbers of experiments/errata.py.

| claim | errata | verdict | our figure | command |
|---|---|---|---|---|
"""


def text(results: Path = RESULTS) -> str:
    """The page as the results have it now."""
    rows = [measured(name, results) for name in names() if (results / f"{name}.json").exists()]
    rows += [
        ("tests/test_claims.py", (slip.item,), (slip.claim, slip.verdict, slip.figure, "`pytest tests/test_claims.py`"))
        for slip in SLIPS
    ]
    rows.sort(key=lambda row: _place(*row[:2]))
    return HEAD + "".join(_line(items, *cells) for _, items, cells in rows)


def measured(name: str, results: Path) -> tuple[str, tuple[str, ...], tuple[str, str, str, str]]:
    """One experiment as a row: its name, its items, its cells."""
    experiment, found = load(name), json.loads((results / f"{name}.json").read_text("utf-8"))
    verdict = experiment.VERDICT if found["holds"] else f"NOT CONFIRMED by the last run: {experiment.VERDICT}"
    command = f"`python -m experiments {name} --size {found['size']}` ([plot](../experiments/results/{name}.png))"
    return name, experiment.ERRATA, (claim(experiment), verdict, experiment.figure_of(found["numbers"]), command)


def missing() -> list[str]:
    """The errata that no row settles."""
    settled = {item for name in names() for item in load(name).ERRATA} | {slip.item for slip in SLIPS}
    return [item for item in ITEMS if item not in settled]


def write(page: Path = PAGE) -> Path:
    """Write docs/claims.md, whole or not at all."""
    from heedful.files import write as whole

    return whole(page, text())


def _line(items: tuple[str, ...], said: str, verdict: str, figure: str, command: str) -> str:
    cells = (said, ", ".join(items) or "-", verdict, figure, command)
    return f"| {' | '.join(' '.join(cell.split()).replace('|', BAR) for cell in cells)} |\n"


BAR = "\\|"  # a bar inside a cell


def _place(name: str, items: tuple[str, ...]) -> tuple[str, int, str]:
    """Rows stand by source, then in the order of the errata, those without at the end."""
    order = list(ITEMS)
    first = min((order.index(item) for item in items), default=len(order))
    return (items[0][:3] if items else name[1:4]), first, name
