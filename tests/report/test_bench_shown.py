"""A bench in the terminal and as a plot, and what it says, on figures that are known."""

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from heedful.benching.result import About, Bench, Cell, Cost, Row
from heedful.report import bench as shown
from heedful.report import plots

LENGTHS = (512, 1024, 2048, 4096)


def row(name, kind, seconds, power, errors=None, rounds=5, lengths=LENGTHS):
    """A mechanism that takes so many seconds at 512 tokens, and has these errors by length."""
    errors = errors if isinstance(errors, dict) else {} if errors is None else {512: errors}
    cells = {}
    for length in lengths:
        took = seconds * (length / 512) ** power
        costs = {
            which: Cost(took * x, took * x, took * x, rounds, length * 50_000) for which, x in (("forward", 1), ("training", 3))
        }
        e = errors.get(length)
        lost = {} if e is None else {"layer.0.self": [e, e + 0.1 if e else e], "layer.1.self": [e, e]}
        cells[length] = Cell(costs, lost)
    return Row(name, kind, {}, "1", cells)


def made(*rivals):
    exact = row("Softmax()", "Softmax", 0.01, 2.0, 0.0)
    heads = {"layer.0.self": 2, "layer.1.self": 2}
    shape = {"heads": 2, "key_heads": 2, "dim": 32, "width": 32}
    return Bench(About("tiny", 2, 2, 512, heads, "layer.0.self", shape, (), 0, 60.0, 10**9, 5.0), LENGTHS, (exact, *rivals))


ALL = dict.fromkeys(LENGTHS, 0.1)
CLOSE, FARTHER = row("Close()", "Close", 0.02, 1.0, ALL), row("Farther()", "Farther", 0.005, 1.0, dict.fromkeys(LENGTHS, 0.7))
SLOW, LSTM = row("Slow()", "Slow", 0.1, 2.0, ALL), row("recurrent (LSTM)", "Recurrent", 0.04, 1.0)
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
    assert errors.split("Close()")[1].split()[:9] == ["4,096", ".1", ".1", "to", ".12", ".2", "L0.H1", "0", "of"]
    assert "26 MB" in said


def test_the_verdict_names_the_best_and_says_dont():
    said = made(CLOSE, FARTHER, SLOW, LSTM, GONE).verdicts()
    assert (
        said[0]
        == "Below about 1,000 tokens nothing within .3 median output error is faster than exact attention (forward); at 512: don't."
    )
    assert (
        said[1] == "At 512 tokens 1 of 4 is faster (forward), none of them known to be within .3 median output error there: don't."
    )
    assert said[2].startswith(
        "At 4,096 tokens the fastest within .3 median output error (forward) is Close(): 4.0x, .1 median output error, 0 of 4 heads above .3 at 4,096"
    )
    by_name = {line.split(":")[0]: line for line in said[3:]}
    assert by_name["Farther()"].endswith(": don't, it computes something else.")
    assert by_name["Slow()"].endswith(": don't, exact attention is not slower.")
    assert by_name["Close()"].endswith("0 of 4 heads above .3 at 4,096; faster from about 1,000 tokens on.")
    assert "Gone cannot" in by_name["Gone()"]
    assert "1.0x" not in by_name["recurrent (LSTM), for its time alone"]


def test_where_nothing_pays_the_verdict_is_dont():
    said = made(SLOW, FARTHER).verdicts()
    assert (
        said[0]
        == "Nothing here is both faster than exact attention and within .3 median output error, up to 4,096 tokens (forward): don't."
    )


def uneven(name, forward, training, error=0.1):
    """A mechanism that is so many times as fast as exact attention forward, and forward and backward."""
    cells = {}
    for n in LENGTHS:
        took = {"forward": 0.01 * (n / 512) ** 2 / forward, "training": 0.03 * (n / 512) ** 2 / training}
        cells[n] = Cell({which: Cost(x, x, x, 5, 1000) for which, x in took.items()}, {"layer.0.self": [error]})
    return Row(name, name, {}, "1", cells)


@pytest.mark.parametrize(
    "row, end",
    [
        (uneven("A()", 1 / 1.2, 1.5), ": don't for inference, exact attention is not slower; for training it is 1.5x faster."),
        (uneven("A()", 1.5, 1 / 1.2), "; don't for training, exact attention is not slower."),
        (uneven("A()", 1 / 1.2, 1.5, error=0.7), ": don't, it computes something else."),
        (uneven("A()", 1 / 1.2, 1 / 1.5), ": don't, exact attention is not slower."),
    ],
)
def test_a_dont_says_whether_it_holds_for_inference_or_training(row, end):
    (own,) = (line for line in made(row).verdicts() if line.startswith("A():"))
    assert own.endswith(end)


def test_a_dont_of_forward_passes_tells_what_is_faster_in_training():
    said = made(uneven("A()", 1 / 1.2, 1.5)).verdicts()
    assert said[0].endswith("up to 4,096 tokens (forward): don't for inference.")
    assert said[1].endswith("exact attention (forward): don't for inference; for training A() is 1.5x faster.")
    assert made(uneven("A()", 1 / 1.2, 1 / 1.2)).verdicts()[0].endswith("(forward): don't.")


def test_nothing_is_recommended_where_its_error_is_not_known():
    early = row("Early()", "Early", 0.02, 1.0, {512: 0.1})
    said = made(early).verdicts()
    assert said[0].endswith("up to 512 tokens (forward): don't.")
    assert said[1] == "At 512 tokens none of 1 is faster than exact attention (forward): don't."
    assert said[2].startswith("At 4,096 tokens no error is known")
    assert "the fastest within" not in " ".join(said)
    assert "4.0x faster" in said[3]
    assert "its error at 4,096 is not known (at 512: .1 median output error, 0 of 4 heads above .3, 2.0x slower)" in said[3]


def test_the_best_is_told_at_the_longest_length_that_was_judged():
    said = made(row("Half()", "Half", 0.02, 1.0, dict.fromkeys(LENGTHS[:3], 0.1))).verdicts()
    assert said[0].startswith("Below about 1,000 tokens")
    assert said[2].startswith(
        "At 2,048 tokens the fastest within .3 median output error (forward) is Half(): 2.0x, .1 median output error"
    )


def test_an_error_too_large_at_a_length_is_not_made_up_for_by_a_smaller_one_elsewhere():
    said = made(row("Fading()", "Fading", 0.02, 1.0, {512: 0.1, 4096: 0.7})).verdicts()
    assert said[0].startswith("Nothing here is both faster")
    (own,) = (line for line in said if line.startswith("Fading()"))
    assert own.endswith("at 4,096; faster from about 1,000 tokens on: don't, it computes something else.")


def test_no_error_at_lengths_where_every_key_is_read_says_nothing_of_longer_ones():
    said = made(row("Window()", "Window", 0.02, 1.0, {512: 0.0})).verdicts()[3]
    assert "its error at 4,096 is not known (exact at 512, as it reads every key there)" in said


def test_figures_of_a_single_round_say_so():
    said = made(row("Close()", "Close", 0.02, 1.0, ALL, rounds=1)).verdicts()
    assert "Close(): 4.0x (timed once each)," in said[2]
    assert said[3].startswith("Times at 512 and 1,024 and 2,048 and 4,096 tokens are of one or two rounds")
    assert "; timed once each)" in said[4]
    assert "timed once" not in " ".join(made(CLOSE).verdicts())


def test_a_lead_within_the_scatter_of_the_rounds_is_none():
    def scattered(quartile):
        cells = {n: Cell({"forward": Cost(0.8e-5 * n, 0.7e-5 * n, quartile * n, 5)}, {"layer.0.self": [0.1]}) for n in LENGTHS}
        return Row("Close()", "Close", {}, "1", cells)

    straight = row("Softmax()", "Softmax", 512e-5, 1.0, 0.0)
    bench = replace(made(scattered(0.9e-5)), rows=(straight, scattered(0.9e-5)))
    assert bench.crossover("Close").always
    doubtful = replace(bench, rows=(straight, scattered(1.1e-5)))
    assert doubtful.crossover("Close").length is None
    assert not doubtful.faster("Close", 4096)


def test_a_plot_is_a_png(tmp_path):
    for rivals in ((CLOSE, FARTHER, SLOW, LSTM, GONE), (), (GONE,), (row("Ours()", "Ours", 0.1, 1.0, None),)):
        pytest.importorskip("matplotlib")
        path = plots.bench(made(*rivals), tmp_path / "bench.png")
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_sets_errors_against_times_of_the_same_length_only():
    pytest.importorskip("matplotlib")
    assert plots.shared(made(CLOSE, SLOW), "forward") == 4096
    early = [row(name, name, 0.02, 1.0, {512: 0.1}) for name in ("Early()", "Soon()")]
    assert plots.shared(made(*early), "forward") == 512
    assert plots.shared(made(LSTM), "forward") is None


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install heedful\[plots\]"):
        plots.bench(made(CLOSE), tmp_path / "bench.png")


def test_brackets_in_the_settings_of_a_mechanism_are_shown_as_they_are():
    assert printed(shown.bench(made(row("Own(which=[a])", "Own", 0.02, 1.0, 0.1)))).count("Own(which=[a])") >= 4
