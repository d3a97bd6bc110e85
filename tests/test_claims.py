"""The ledger of claims tells what is so: every erratum has a row, every row its verdict and figure, and the page is that of the results."""

import json
import re

import pytest

from experiments import ledger
from experiments.errata import ITEMS, source
from experiments.notation import SLIPS
from experiments.running import load, names

every = pytest.mark.parametrize("name", names())


def test_the_page_is_the_one_of_the_results():
    assert ledger.PAGE.read_text("utf-8") == ledger.text(), "docs/claims.md is stale: run `python -m experiments --ledger`"


@pytest.mark.parametrize("item", ITEMS)
def test_every_erratum_has_a_row(item):
    assert item not in ledger.missing()
    assert re.search(rf"\|[^|]*\b{re.escape(item)}\b[^|]*\|", ledger.PAGE.read_text("utf-8"))


@every
def test_an_experiment_gives_a_verdict_and_names_errata_that_exist(name):
    experiment = load(name)
    assert ledger.VERDICT.fullmatch(experiment.VERDICT), experiment.VERDICT
    assert set(experiment.ERRATA) <= set(ITEMS)
    assert {source(item) for item in experiment.ERRATA} <= {name[1:4]}


@every
def test_an_experiment_was_run_and_its_verdict_confirmed(name):
    found = json.loads((ledger.RESULTS / f"{name}.json").read_text("utf-8"))
    assert found["holds"] is True
    assert found["size"] in ("small", "full")
    figure = load(name).figure_of(found["numbers"])
    assert 10 < len(figure) < 400
    assert "\n" not in figure
    assert (ledger.RESULTS / f"{name}.png").exists()


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.item)
def test_a_slip_is_shown_by_shapes(slip):
    assert slip.shown()
    assert slip.item in ITEMS


def test_a_verdict_that_a_run_did_not_confirm_says_so(tmp_path):
    name = names()[0]
    found = json.loads((ledger.RESULTS / f"{name}.json").read_text("utf-8")) | {"holds": False}
    (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert "NOT CONFIRMED" in ledger.text(tmp_path)
    assert "NOT CONFIRMED" not in ledger.PAGE.read_text("utf-8")
