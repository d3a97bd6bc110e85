"""Findings save, load and add up."""

import csv
import io
import json
import random

import pytest
import torch
from models import bert, llama, words
from safetensors.torch import save_file

from heedful import Findings, scan
from heedful.findings import SCHEMA, _digest

TEXTS = [words(9 + i, i) for i in range(4)]


@pytest.fixture(scope="module")
def found() -> Findings:
    return scan(bert(), TEXTS, batch=1)


def same(a: Findings, b: Findings, tolerance: float = 0.0) -> bool:
    pairs = [(a.layers[layer][name], b.layers[layer][name]) for layer in a.layers for name in a.layers[layer]]
    pairs += [(a.depths[depth], b.depths[depth]) for depth in a.depths]
    close = all(
        torch.allclose(x.tensors[n], y.tensors[n], rtol=tolerance, atol=0, equal_nan=True) for x, y in pairs for n in x.tensors
    )
    return close and list(a.layers) == list(b.layers) and list(a.depths) == list(b.depths)


def test_findings_of_parts_add_up_to_findings_of_the_whole(found):
    halves = scan(bert(), TEXTS[:2], batch=1) + scan(bert(), TEXTS[2:], batch=1)
    assert same(found, halves, 1e-10)
    assert halves.about == found.about


def test_findings_of_two_models_do_not_add_up(found):
    with pytest.raises(ValueError, match="two models"):
        found + scan(bert(seed=1), TEXTS[:1])


def test_what_is_saved_is_loaded(found, tmp_path):
    loaded = Findings.load(found.save(tmp_path / "out"))
    assert same(found, loaded)
    assert loaded.about == found.about
    assert loaded.verdicts() == found.verdicts()


def test_a_folder_of_findings_can_be_read_without_heedful(found, tmp_path):
    folder = found.save(tmp_path)
    rows = list(csv.DictReader(io.StringIO((folder / "heads.csv").read_text())))
    assert len(rows) == 8
    data = json.loads((folder / "findings.json").read_text())
    assert data["heads"][3]["entropy"] == pytest.approx(float(rows[3]["entropy"]))
    assert set(data["heads"][0]) <= {"layer", "head", *data["meaning"], *(f"{name}_error" for name in data["meaning"])}
    assert (folder / "verdicts.txt").read_text().splitlines() == found.verdicts()


def test_a_data_frame_has_a_row_for_each_head(found):
    frame = found.to_pandas()
    assert list(frame["head"]) == [0, 1, 2, 3] * 2
    assert list(frame["entropy"]) == [row["entropy"] for row in found.rows()]


def test_json_is_strict(found, tmp_path):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    json.loads((found.save(tmp_path) / "findings.json").read_text(), parse_constant=refuse)


def test_missing_findings_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no findings at"):
        Findings.load(tmp_path)


@pytest.mark.parametrize("where", [0, 9, 200, -1])
def test_damaged_findings_are_refused(found, tmp_path, where):
    file = found.save(tmp_path) / "findings.safetensors"
    raw = bytearray(file.read_bytes())
    raw[where] ^= 0x55
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=r"damaged|newer|without findings"):
        Findings.load(tmp_path)


def test_no_flipped_bit_of_the_header_goes_unnoticed(found, tmp_path):
    raw = (found.save(tmp_path) / "findings.safetensors").read_bytes()
    about = found.about
    for place in random.Random(0).sample(range(8, 8 + int.from_bytes(raw[:8], "little")), 300):
        bad = bytearray(raw)
        bad[place] ^= 1 << place % 7
        (tmp_path / "bad").write_bytes(bad)
        try:
            loaded = Findings.load(tmp_path / "bad")
        except ValueError:
            continue
        assert loaded.about == about, f"byte {place} changed unnoticed"
        assert same(loaded, found)


def test_a_header_that_no_scan_wrote_is_refused(found, tmp_path):
    tensors = {"layer/0/Entropy/nothing": torch.ones(2)}
    header = {"schema": SCHEMA, "layers": ["0"], "depths": [], "about": {}}
    save_file(tensors, tmp_path / "own", {"heedful": json.dumps({**header, "sum": _digest(header, tensors)})})
    with pytest.raises(ValueError, match="damaged"):
        Findings.load(tmp_path / "own")


def test_findings_of_another_age_are_told(tmp_path):
    for schema, said in ((SCHEMA - 1, "older"), (SCHEMA + 1, "newer")):
        save_file({"a": torch.ones(1)}, tmp_path / "own", {"heedful": json.dumps({"schema": schema})})
        with pytest.raises(ValueError, match=said):
            Findings.load(tmp_path / "own")


def test_findings_that_were_cut_short_are_refused(found, tmp_path):
    file = found.save(tmp_path) / "findings.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        Findings.load(file)


def test_another_safetensors_file_holds_no_findings(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="without findings"):
        Findings.load(tmp_path / "model.safetensors")


def test_a_column_is_a_value_per_head(found):
    entropy = found.column("entropy")
    assert {name: tuple(x.shape) for name, x in entropy.items()} == dict.fromkeys(found.layers, (4,))
    with pytest.raises(ValueError, match="there is no column 'entrpy'"):
        found.column("entrpy")


def test_every_head_and_depth_has_a_row(found):
    assert [(row["layer"], row["head"]) for row in found.rows()] == [(layer, head) for layer in found.layers for head in range(4)]
    assert [row["depth"] for row in found.by_depth()] == [f"encoder.layer {i}" for i in range(3)]


def test_the_shape_of_each_layer_is_told():
    layer = scan(llama(), TEXTS[:1]).about.layers["model.layers.0.self_attn"]
    assert (layer.heads, layer.key_heads, layer.dim, layer.width, layer.rules) == (4, 2, 8, 8, ("causal",))
