"""A scan reads texts once and looks at every attention call."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from models import bert, llama, whisper, words
from test_findings import same
from torch import nn

from heedful import Checkpoint, Findings, Unreachable, scan
from heedful.statistics import Entropy, Residual
from heedful.texts import Tokens

TEXTS = [words(9 + i, i) for i in range(6)]


def dense(model: Checkpoint, texts: list[str]) -> list[list[torch.Tensor]]:
    """The attention of each text by layer, as the model's own eager code gives it."""
    model.model.set_attn_implementation("eager")
    return [list(model.model(**model.tokenizer(t, return_tensors="pt"), output_attentions=True).attentions) for t in texts]


@pytest.mark.parametrize("model", [bert, llama])
def test_entropy_is_that_of_the_dense_attention(model):
    found = scan(model(), TEXTS, rows=None)
    rows = [[torch.special.entr(p.double()).sum(-1)[0] for p in layers] for layers in dense(model(), TEXTS)]
    for layer, name in enumerate(found.layers):
        truth = torch.cat([row[layer] for row in rows], -1).mean(-1)
        assert torch.allclose(found.column("entropy")[name], truth, atol=2e-6)


def test_hidden_states_are_those_of_the_model():
    model = bert()
    found = scan(model, TEXTS[:1])
    states = model.model(**model.tokenizer(TEXTS[0], return_tensors="pt"), output_hidden_states=True).hidden_states
    for depth, state in enumerate(states):
        truth = Residual.of_states(state).result()["residual"].value
        assert torch.allclose(found.depths[f"encoder.layer {depth}"].result()["residual"].value, truth, rtol=1e-5)


def test_a_block_that_is_called_again_and_again_counts_as_many():
    from transformers import AlbertConfig, AlbertModel

    torch.manual_seed(0)
    size = {"hidden_size": 16, "embedding_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64}
    model = AlbertModel(AlbertConfig(**size, num_hidden_layers=3, max_position_embeddings=48)).eval()
    ids = torch.randint(4, 60, (1, 9))
    found = scan(model, [{"input_ids": ids}])
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(found.depths) == len(states) == 4
    for depth, state in zip(found.depths.values(), states, strict=True):
        assert torch.allclose(depth.result()["residual"].value, Residual.of_states(state).result()["residual"].value, rtol=1e-5)
    assert any("over 3 blocks" in verdict for verdict in found.verdicts())


def test_batches_and_their_padding_do_not_matter():
    assert same(scan(bert(), TEXTS, batch=1), scan(bert(), TEXTS, batch=6), 1e-4)


def test_the_order_of_texts_does_not_matter_even_where_rows_are_sampled():
    forth, back = (scan(llama(), texts, rows=4, batch=1) for texts in (TEXTS, TEXTS[::-1]))
    assert same(forth, back, 1e-10)


def test_sampled_rows_come_with_an_error_that_covers_the_truth():
    exact, sampled = (scan(llama(), [words(100, 5)], rows=rows, length=128) for rows in (None, 20))
    layer = "model.layers.1.self_attn"
    truth, (value, error) = exact.results()[layer]["entropy"], sampled.results()[layer]["entropy"]
    assert (truth.error == 0).all()
    assert (error > 0).all()
    assert ((value - truth.value).abs() < 5 * error).all()


def test_another_seed_samples_other_rows():
    one, two = (scan(llama(), [words(100)], rows=10, seed=seed, length=128) for seed in (0, 1))
    assert not torch.equal(one.column("entropy")["model.layers.0.self_attn"], two.column("entropy")["model.layers.0.self_attn"])


def test_texts_that_were_cut_are_counted():
    about = scan(bert(), [words(100), words(5)]).about
    assert (about.texts, about.tokens, about.truncated, about.length) == (2, 55, 1, 48)
    assert any("1 text was longer than 48 tokens" in verdict for verdict in scan(bert(), [words(100)]).verdicts())


def test_a_model_is_left_as_it_was():
    model = bert().model.train()
    model.get_submodule("embeddings").eval()
    training = [module.training for module in model.modules()]
    before = model.config._attn_implementation
    state = {name: x.clone() for name, x in model.state_dict().items()}
    scan(Checkpoint(model, bert().processor), TEXTS[:1])
    assert [module.training for module in model.modules()] == training
    assert model.config._attn_implementation == before
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_statistics_can_be_chosen():
    found = scan(bert(), TEXTS[:1], statistics=(Entropy,))
    assert {name for layer in found.layers.values() for name in layer} == {"Entropy"}
    assert found.verdicts()


def test_ready_made_inputs_are_read_as_they_are():
    model = bert()
    batch = dict(model.tokenizer(TEXTS[:2], return_tensors="pt", padding=True))
    assert same(scan(model, [batch], rows=None), scan(model, TEXTS[:2], rows=None, batch=2), 1e-5)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
def test_tokens_are_not_counted_from_masks_of_a_row_for_each_query(hidden):
    mask = torch.zeros(2, 1, 10, 10).masked_fill(torch.arange(10) >= 8, hidden)
    found = scan(bert(), [{"input_ids": torch.randint(4, 60, (2, 10)), "attention_mask": mask}])
    assert (found.about.texts, found.about.tokens) == (2, 20)


def test_token_ids_are_read_as_they_are():
    model = bert()
    assert same(scan(model, [Tokens(model.tokenizer(TEXTS[0])["input_ids"])]), scan(model, TEXTS[:1]))


def test_plain_pytorch_models_are_scanned_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = scan(model, [{"src": torch.randn(2, 7, 16)}])
    assert list(found.layers) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_what_a_model_writes_of_sounds_is_looked_at_once():
    found = scan(whisper(), [{"input_features": torch.randn(2, 8, 40)}], rows=None)
    assert all(layer["Load"].tensors["texts"] == 2 for layer in found.layers.values())
    assert found.layers["model.encoder.layers.0.self_attn"]["Entropy"].tensors["weight"] == 40
    assert all(depth.tensors["texts"] == 2 for depth in found.depths.values())


def test_a_model_that_the_seam_does_not_reach_is_refused_and_nothing_is_written(tmp_path):
    from transformers import BloomConfig, BloomModel

    model = BloomModel(BloomConfig(hidden_size=16, n_head=2, n_layer=1, vocab_size=64))
    with pytest.raises(Unreachable, match="BloomAttention"):
        scan(Checkpoint(model, bert().processor), TEXTS[:1], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_plain_model_without_attention_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(Unreachable, match="Linear read a batch without an attention call"):
        scan(nn.Linear(4, 4), [{"input": torch.randn(2, 3, 4)}], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "setting, said",
    [({"rows": 1}, "at least 2"), ({"limit": 0}, "at least 1"), ({"batch": 0}, "at least 1"), ({"resume": True}, "give it as out"),
     ({"statistics": ()}, "no statistic"), ({"length": 100}, "positions for 48")],
)  # fmt: skip
def test_bad_settings_are_refused_before_anything_is_read(setting, said):
    with pytest.raises(ValueError, match=said):
        scan(bert(), TEXTS, **setting)


@pytest.mark.parametrize("texts", [[], ["", " "]])
def test_no_text_is_an_error_and_nothing_is_written(tmp_path, texts):
    with pytest.raises(ValueError, match="nothing to scan"):
        scan(bert(), texts, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


CHILD = """
import sys, time
import heedful.scan
from heedful import scan
from models import llama, words
sys.modules["heedful.scan"].EVERY = 0.0
run = sys.modules["heedful.scan"].run
def slowly(*given):
    time.sleep(0.05)
    run(*given)
sys.modules["heedful.scan"].run = slowly
scan(llama(), [words(20 + i, i) for i in range(30)], rows=8, batch=1, out=sys.argv[1])
"""


@pytest.mark.parametrize("moment", [0.1, 0.5, 1.1])
def test_a_scan_killed_at_any_moment_goes_on_to_the_same_findings(tmp_path, moment):
    texts = [words(20 + i, i) for i in range(30)]
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (here, here.parent / "src")))}
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], env=environment)
    while not (tmp_path / "unfinished.safetensors").exists():
        assert child.poll() is None
        time.sleep(0.01)
    time.sleep(moment)
    assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    _, header = Findings.read(tmp_path / "unfinished.safetensors")
    assert header["done"] < 30
    resumed = scan(llama(), texts, rows=8, batch=1, out=tmp_path, resume=True)
    whole = scan(llama(), texts, rows=8, batch=1)
    assert same(resumed, whole)
    assert resumed.about == whole.about
    assert not (tmp_path / "unfinished.safetensors").exists()
    assert same(scan(llama(), texts, rows=8, batch=1, out=tmp_path, resume=True), whole)  # finished: read back


def unfinished(folder: Path) -> None:
    found = scan(bert(), TEXTS[:1], out=folder)
    (folder / "unfinished.safetensors").write_bytes(found.to_bytes(mark="of another scan", done=0))


def test_an_unfinished_scan_is_not_overwritten(tmp_path):
    unfinished(tmp_path)
    with pytest.raises(ValueError, match="--resume"):
        scan(bert(), TEXTS, out=tmp_path)


def test_an_unfinished_scan_goes_on_only_as_what_it_was(tmp_path):
    unfinished(tmp_path)
    with pytest.raises(ValueError, match="another model, other texts or settings"):
        scan(bert(), TEXTS, out=tmp_path, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_cannot_be_written_is_found_before_reading(tmp_path, resume, monkeypatch):
    monkeypatch.setattr(sys.modules["heedful.scan"], "run", None)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="cannot write"):
        scan(bert(), TEXTS, out=tmp_path / "file", resume=resume)


def test_no_text_counts_for_nothing_where_padding_would():
    """A text of one token beside a long one."""
    found = scan(bert(), [Tokens([2]), words(9)], batch=2)
    assert found.about.tokens == 12
    assert all(torch.isfinite(x).all() for x in found.column("entropy").values())


@pytest.mark.parametrize("part, held", [("query", "q"), ("key", "k"), ("value", "v")])
def test_weights_that_are_not_finite_are_named_with_their_layer(part, held, tmp_path):
    model = bert()
    with torch.no_grad():
        model.model.get_parameter(f"encoder.layer.1.attention.self.{part}.weight")[0, 0] = torch.nan
    said = rf"the {held} of encoder.layer.1.attention.self .* encoder.layer.1.attention.self.{part}.weight is not finite either"
    with pytest.raises(ValueError, match=said):
        scan(model, TEXTS[:2], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "kind, said", [(torch.float32, "look at the inputs"), (torch.bfloat16, "bfloat16 may overflow: load it with")]
)
def test_numbers_that_overflow_are_told_with_what_may_help(kind, said):
    model = bert()
    model.model.to(kind)
    inputs = {"inputs_embeds": torch.full((1, 5, 32), torch.inf, dtype=kind)}
    with pytest.raises(ValueError, match=said):
        scan(model, [inputs])


def test_a_scan_is_data():
    about = scan(bert(), TEXTS[:1]).about
    assert type(about).of_data(about.data) == about
    assert dataclasses.is_dataclass(about)
