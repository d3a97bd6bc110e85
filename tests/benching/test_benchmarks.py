"""All benchmarks run in one go, without those that lack what they need."""

import doctest
import importlib
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def run(monkeypatch):
    from benchmarks.__main__ import main

    def run(**benchmarks):
        for name, made in benchmarks.items():
            monkeypatch.setitem(sys.modules, f"benchmarks.{name}", SimpleNamespace(main=made))
        return main(list(benchmarks))

    return run


def lacking():
    raise SystemExit("texts.txt was not found")


def test_one_that_lacks_its_data_does_not_stop_the_others(run, capsys):
    ran = []
    assert run(first=lacking, second=lambda: ran.append("second")) == 1
    assert ran == ["second"]
    assert "skipped first: texts.txt was not found" in capsys.readouterr().err


def test_where_all_ran_nothing_is_skipped(run, capsys):
    assert run(first=lambda: None) == 0
    assert "skipped" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["complexity", "tables", "timing"])
def test_the_examples_in_benchmarks_are_so(name):
    assert doctest.testmod(importlib.import_module(f"benchmarks.{name}")).failed == 0
