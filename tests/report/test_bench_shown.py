"""A bench in the terminal and as a plot, and what it says, on figures that are known."""

import io
import sys

import pytest
from rich.console import Console

from heedful.benching.result import About, Bench, Cell, Cost, Row
from heedful.report import bench as shown
from heedful.report import plots

LENGTHS = (512, 1024, 2048, 4096)


def row(name, kind, seconds, power, error=None, lengths=LENGTHS):
    """A mechanism that takes so many seconds at 512 tokens."""
    cells = {}
    for length in lengths:
        took = seconds * (length / 512) ** power
        costs = {which: Cost(took * x, took * x, took * x, 5, length * 50_000) for which, x in (("forward", 1), ("training", 3))}
        errors = (
            {"layer.0.self": [error, error + 0.1], "layer.1.self": [error, error]} if error is not None and length == 512 else {}
        )
        cells[length] = Cell(costs, errors)
    return Row(name, kind, {}, "1", cells)


def made(*rivals):
    exact = row("Softmax()", "Softmax", 0.01, 2.0, 0.0)
    heads = {"layer.0.self": 2, "layer.1.self": 2}
    shape = {"heads": 2, "key_heads": 2, "dim": 32, "width": 32}
    return Bench(About("tiny", 2, 2, 512, heads, "layer.0.self", shape, (), 0, 60.0, 10**9, 5.0), LENGTHS, (exact, *rivals))


CLOSE, FARTHER = row("Close()", "Close", 0.02, 1.0, 0.1), row("Farther()", "Farther", 0.005, 1.0, 0.7)
SLOW, LSTM = row("Slow()", "Slow", 0.1, 2.0, 0.1), row("recurrent (LSTM)", "Recurrent", 0.04, 1.0)
GONE = Row(
    "Gone()", "Gone", {}, "-", {512: Cell({}, {}, {"forward": "not measured: Gone cannot"})}, {"layer.0.self": "Gone cannot"}
)


def printed(part) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_tables_carry_errors_times_exponents_and_crossovers():
    said = printed(shown.bench(made(CLOSE, FARTHER, SLOW, LSTM, GONE)))
    lines = {
        line.split()[0]: line
        for line in said.split("forward: time of one call")[1].split("forward and backward")[0].splitlines()
        if line.strip()
    }
    assert "20 ms" in lines["Close()"]
    assert lines["Close()"].split()[-2:] == ["n^1.00", "1,000"]
    assert lines["Farther()"].rstrip().endswith("always (from 512)")
    assert lines["Slow()"].rstrip().endswith("never up to 4,096")
    assert "n^2.00" in lines["Softmax()"]
    errors = said.split("over heads")[1]
    assert errors.split("Close()")[1].split()[:9] == ["512", ".1", ".1", "to", ".12", ".2", "L0.H1", "0", "of"]
    assert "26 MB" in said


def test_the_verdict_names_the_best_and_says_dont():
    said = made(CLOSE, FARTHER, SLOW, LSTM, GONE).verdicts()
    assert (
        said[0]
        == "Below about 1,000 tokens nothing within .3 median output error is faster than exact attention (forward); at 512: don't."
    )
    assert said[1] == "At 512 tokens 1 of 4 is faster, none of them known to be within .3 median output error: don't."
    assert said[2].startswith(
        "At 4,096 tokens the fastest within .3 median output error is Close(): 4.0x, .1 median output error at 512"
    )
    by_name = {line.split(":")[0]: line for line in said[3:]}
    assert by_name["Farther()"].endswith(": don't, it computes something else.")
    assert by_name["Slow()"].endswith(": don't, exact attention is not slower.")
    assert by_name["Close()"].endswith("0 of 4 heads above .3; faster from about 1,000 tokens on.")
    assert "Gone cannot" in by_name["Gone()"]
    assert "1.0x" not in by_name["recurrent (LSTM), for its time alone"]


def test_where_nothing_pays_the_verdict_is_dont():
    said = made(SLOW, FARTHER).verdicts()
    assert (
        said[0]
        == "Nothing here is both faster than exact attention and within .3 median output error, up to 4,096 tokens (forward): don't."
    )


def test_a_plot_is_a_png(tmp_path):
    for rivals in ((CLOSE, FARTHER, SLOW, LSTM, GONE), (), (GONE,), (row("Ours()", "Ours", 0.1, 1.0, None),)):
        pytest.importorskip("matplotlib")
        path = plots.bench(made(*rivals), tmp_path / "bench.png")
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install heedful\[plots\]"):
        plots.bench(made(CLOSE), tmp_path / "bench.png")


def test_brackets_in_the_settings_of_a_mechanism_are_shown_as_they_are():
    assert printed(shown.bench(made(row("Own(which=[a])", "Own", 0.02, 1.0, 0.1)))).count("Own(which=[a])") >= 4
