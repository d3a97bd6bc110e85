"""Findings in the terminal."""

import io

import pytest
from models import bert, words
from rich.console import Console

from heedful import scan
from heedful.report import terminal


@pytest.fixture(scope="module")
def found():
    return scan(bert(), [words(9), words(12)])


def printed(part) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_a_line_for_each_head(found):
    lines = printed(terminal.heads(found)).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("L")] == [
        f"L{layer}.H{head}" for layer in range(2) for head in range(4)
    ]
    entropy = found.column("entropy")["encoder.layer.0.attention.self"][0].item()
    assert f"{entropy:.2f}" in lines[2]


def test_a_grid_has_layers_by_heads(found):
    lines = printed(terminal.grid(found, "entropy")).splitlines()
    assert len(lines[2].split()) == 5


def test_an_unknown_column_is_refused_with_the_known_ones(found):
    with pytest.raises(ValueError, match="known are entropy"):
        terminal.grid(found, "nope")


def test_the_overview_carries_every_verdict(found):
    said = printed(terminal.overview(found)).replace("\n", " ")
    assert all(verdict.split(":")[0][:100] in said for verdict in found.verdicts())


def test_depths_are_listed(found):
    assert printed(terminal.depths(found)).count("encoder.layer") == 3
