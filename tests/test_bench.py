"""Bench: from a model and texts to a table of what each mechanism takes and loses."""

import json
from dataclasses import replace

import pytest
import torch
from models import bert, llama, words

from heedful import Bench, bench, capture
from heedful.mechanisms import Hard, Performer, Softmax

pytestmark = pytest.mark.filterwarnings("ignore:Performer")
TEXTS = [words(30 + i, i) for i in range(4)]
QUICK = {"lengths": (16, 32, 64), "seconds": 60}


@pytest.fixture(scope="module")
def found():
    return bench(bert(), TEXTS, mechanisms=[Performer(features=16), Hard(), "Recurrent"], **QUICK)


def test_every_mechanism_has_a_row_and_exact_attention_the_first(found):
    assert [row.name for row in found.rows] == ["Softmax()", "Performer(features=16)", "Hard()", "recurrent (LSTM)"]
    assert found.exact.kind == "Softmax"
    assert found.lengths == (16, 32, 64)


def test_each_is_timed_in_both_passes_at_each_length(found):
    for row in found.rows:
        for length in found.lengths:
            costs = row.cells[length].costs
            assert costs.keys() == {"forward", "training"}
            assert all(cost.low <= cost.seconds <= cost.high and cost.rounds >= 1 for cost in costs.values())


def test_errors_are_those_of_each_head_on_the_texts_that_nothing_learned_from(found):
    texts = sorted(TEXTS, key=lambda t: -len(t.split()))[::2]
    calls = capture(bert(), texts)
    for layer, captures in calls.items():
        wanted = [torch.zeros(4).double(), torch.zeros(4).double()]
        for call in captures:
            q, k, v = (t[:, :, :32] for t in (call.q, call.k, call.v))
            exact, estimate = (m(q, k, v, scale=call.scale).double() for m in (Softmax(), Performer(features=16)))
            wanted[0] += (estimate - exact).square().sum((0, 2, 3))
            wanted[1] += exact.square().sum((0, 2, 3))
        errors = found.row("Performer").cells[32].errors[layer]
        assert errors == pytest.approx((wanted[0] / wanted[1]).sqrt().tolist(), rel=1e-4)


def test_no_error_is_told_beyond_the_texts(found):
    assert found.extended == (64,)
    assert all(not row.cells[64].errors for row in found.rows)
    assert any("Beyond 35 tokens" in line for line in found.verdicts())


def test_exact_attention_loses_nothing_and_a_recurrent_layer_is_not_judged(found):
    assert found.exact.error().worst == 0
    assert found.row("Recurrent").error() is None
    assert found.row("Recurrent").sequential == "n"


def test_causal_masks_are_kept_and_what_is_refused_is_told():
    class Blind(Performer):
        supports = frozenset({"shared"})

    found = bench(llama(), TEXTS, mechanisms=[Performer(features=16), Blind(features=16)], **QUICK)
    assert found.about.rules == ("causal",)
    assert found.about.shape["key_heads"] == 2
    assert "Blind cannot honour a causal mask; use Softmax()" in found.row("Blind").cells[64].missing["forward"]
    assert any(line.startswith("Blind(features=16): not measured (Blind cannot honour") for line in found.verdicts())
    assert 64 in found.row("Performer").figures("training")


def test_captures_do_in_place_of_a_model():
    calls = capture(bert(), TEXTS, layers=["encoder.layer.1.attention.self"])
    found = bench(calls, mechanisms=[Performer], **QUICK)
    assert list(found.about.layers) == ["encoder.layer.1.attention.self"]
    assert found.row("Performer").error(32).heads == 4


def test_padding_counts_nothing_in_errors():
    calls = capture(bert(), [TEXTS[3], TEXTS[0]], batch=2)
    garbage = {name: [replace(c, q=c.q.where(real(c), 9.0)) for c in found] for name, found in calls.items()}
    assert any((c.q == 9.0).any() for c in garbage["encoder.layer.0.attention.self"])
    one, other = (bench(c, mechanisms=[Performer], lengths=(35,), seconds=60).row("Performer") for c in (calls, garbage))
    assert one.error() is not None
    assert one.cells[35].errors == other.cells[35].errors


def real(call):
    return call.mask.keys[:, None, :, None]


def test_all_mechanisms_but_oracles_are_benched_by_default():
    found = bench(bert(), TEXTS[:2], lengths=(16,), seconds=60)
    names = [row.kind for row in found.rows]
    assert names[0] == "Softmax"
    assert {"Performer", "Recurrent"} <= set(names)
    assert "Hard" not in names


def test_layers_are_chosen_by_name_or_number():
    for layers in ([1], ["1"], ["encoder.layer.1.attention.self"]):
        found = bench(bert(), TEXTS[:2], mechanisms=[Softmax], layers=layers, lengths=(16,), seconds=60)
        assert list(found.about.layers) == ["encoder.layer.1.attention.self"]


def test_texts_shorter_than_every_length_are_judged_at_their_own():
    found = bench(bert(), TEXTS, mechanisms=[Softmax], lengths=(64,), seconds=60)
    assert found.lengths == (35, 64)
    assert found.exact.error(35) is not None


def test_a_bench_is_saved_and_read_back(found, tmp_path):
    folder = found.save(tmp_path / "bench")
    assert {p.name for p in folder.iterdir()} == {"bench.json", "bench.csv", "verdicts.txt"}
    assert Bench.load(folder) == found
    assert Bench.load(folder / "bench.json").verdicts() == found.verdicts()
    assert len((folder / "bench.csv").read_text().splitlines()) == 1 + 4 * 3


def test_an_output_folder_is_written(tmp_path):
    made = bench(bert(), TEXTS[:2], mechanisms=[Softmax], lengths=(16,), seconds=60, out=tmp_path / "there")
    assert Bench.load(tmp_path / "there") == made


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda text: text[: len(text) // 2], "is damaged or not a bench"),
        (lambda text: "{}", "is damaged or not a bench"),
        (lambda text: "[1]", "is damaged or not a bench"),
        (lambda text: text.replace('"rows"', '"sows"'), "is damaged or not a bench"),
        (lambda text: json.dumps({**json.loads(text), "schema": 99}), "written by a newer heedful"),
    ],
)
def test_damaged_files_are_told(found, tmp_path, damage, said):
    path = found.save(tmp_path) / "bench.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=said):
        Bench.load(path)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no bench"):
        Bench.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "given, said",
    [
        ({"mechanisms": ["Nope"]}, "there is no mechanism 'Nope'"),
        ({"mechanisms": [3]}, "3 is no mechanism"),
        ({"mechanisms": []}, "no mechanism was given"),
        ({"lengths": ()}, "no length was given"),
        ({"lengths": (4,)}, "at least 8 tokens"),
        ({"lengths": (16.5,)}, "whole number"),
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"memory": "lots"}, "no size in memory"),
        ({"memory": 0}, "memory is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"texts": []}, "nothing to scan"),
        ({"texts": ["  "]}, "nothing to scan"),
        ({"texts": None}, "a model needs texts"),
        ({"layers": ["9"]}, "there is no layer '9'"),
        ({"layers": []}, "no layer was chosen"),
        ({"memory": "1KB"}, "too much for a budget of .* give more memory"),
    ],
)
def test_bad_input_is_refused_at_the_door(given, said):
    with pytest.raises(ValueError, match=said):
        bench(bert(), **{"texts": TEXTS, "mechanisms": [Softmax], "lengths": (16,), **given})


def test_captures_need_no_texts_and_must_be_there():
    with pytest.raises(ValueError, match="captures are benched as they are"):
        bench({"0": []}, TEXTS)
    with pytest.raises(ValueError, match="there are no captures"):
        bench({"0": []})
    with pytest.raises(ValueError, match="holds no Captures"):
        bench({"0": [torch.ones(2)]})  # type: ignore[list-item]


def test_a_budget_too_small_for_the_shortest_length_is_refused():
    with pytest.raises(ValueError, match=r"give more( seconds)?\.$"):
        bench(bert(), TEXTS, mechanisms=[Softmax], lengths=(16,), seconds=1e-3)
