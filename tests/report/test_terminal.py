"""Findings in the terminal."""

import dataclasses
import io

import pytest
from models import bert, words
from rich.console import Console

from heedful import doctor, scan
from heedful.report import terminal


@pytest.fixture(scope="module")
def found():
    return scan(bert(), [words(9), words(12)])


def printed(part, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_a_line_for_each_head(found):
    lines = printed(terminal.heads(found)).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("L")] == [
        f"L{layer}.H{head}" for layer in range(2) for head in range(4)
    ]
    entropy = found.column("entropy")["encoder.layer.0.attention.self"][0].item()
    assert f"{entropy:.2f}" in lines[2]


def test_a_narrow_terminal_shows_whole_cells_and_names_what_it_leaves_out():
    sampled = scan(bert(), [words(40), words(30)], rows=8)
    assert "±" in printed(terminal.heads(sampled))
    said = printed(terminal.heads(sampled), width=80)
    lines = said.splitlines()
    assert "…" not in said
    assert len([line for line in lines if line.startswith("L")]) == len([line for line in lines if line and line[0] in "L "]) == 8
    assert "left out" in said
    assert all(name in said.split("left out")[1] for name in ("±", "value_dims", "--csv"))


def test_a_grid_has_layers_by_heads(found):
    lines = printed(terminal.grid(found, "entropy")).splitlines()
    assert len(lines[2].split()) == 5


def test_an_unknown_column_is_refused_with_the_known_ones(found):
    with pytest.raises(ValueError, match="known are entropy"):
        terminal.grid(found, "nope")


def test_a_column_of_the_hidden_states_is_told_by_depth(found):
    with pytest.raises(ValueError, match="'residual' is told by depth"):
        terminal.grid(found, "residual")


def test_the_overview_carries_every_verdict(found):
    said = printed(terminal.overview(found)).replace("\n", " ")
    assert all(verdict.split(":")[0][:100] in said for verdict in found.verdicts())


def test_depths_are_listed(found):
    assert printed(terminal.depths(found)).count("encoder.layer") == 3


def shown(capsys, part) -> str:
    terminal.show(part)
    return capsys.readouterr().out


@pytest.mark.parametrize("text", ["pip install heedful[plots].", "saved in out/[/x]", "[red]"])
def test_brackets_are_shown_as_they_are(capsys, text):
    assert shown(capsys, text) == f"{text}\n"


def test_brackets_in_the_names_of_layers_are_shown_as_they_are(found, capsys):
    renamed = {f"[/{i}]": layer for i, layer in enumerate(found.layers.values())}
    about = dataclasses.replace(found.about, model="[bold]", layers=dict(zip(renamed, found.about.layers.values(), strict=True)))
    odd = dataclasses.replace(found, about=about, layers=renamed, depths={f"[x] {name}": s for name, s in found.depths.items()})
    assert "[/0].H1" in shown(capsys, terminal.heads(odd))
    assert "[/1]" in shown(capsys, terminal.grid(odd, "entropy"))
    assert "[x] encoder.layer 0" in shown(capsys, terminal.depths(odd))
    assert "[bold]: 2 texts" in shown(capsys, terminal.overview(odd))


def test_the_doctor_shows_brackets_as_they_are(capsys):
    found = doctor(bert())
    odd = dataclasses.replace(found, layers={"[/x]": next(iter(found.layers.values()))}, missed={"[y]": "no"})
    assert all(name in shown(capsys, terminal.diagnosis(odd)) for name in ("[/x]", "[y]"))
