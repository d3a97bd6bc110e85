"""Every experiment runs at its tiny size: numbers that JSON takes, a verdict and a figure."""

import json

import pytest

from experiments.running import claim, load, names, run

every = pytest.mark.parametrize("name", names())


@every
def test_the_tiny_size_runs_and_is_written_down(name, tmp_path, capsys):
    verdict = run(name, "tiny", tmp_path)
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["holds"] is verdict
    assert written["claim"] == claim(load(name))
    assert written["machine"]["torch"]
    assert written["numbers"]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert load(name).VERDICT in printed
    assert load(name).figure_of(written["numbers"]) in printed  # the same from what was written


@every
def test_a_claim_is_one_line_with_its_source_below(name):
    experiment = load(name)
    assert claim(experiment).endswith(".")
    assert f"Source {name[1:4]}" in experiment.__doc__
    assert "Expected" in experiment.__doc__


def test_there_are_experiments():
    assert "s004_features" in names()
