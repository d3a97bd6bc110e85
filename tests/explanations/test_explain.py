"""Explaining one text: four answers that agree with plain ways to reach them, saved whole; bad input is told before work starts."""

import json
import math

import pytest
import torch
from models import bert, llama, tokenizer, words

import heedful as hd
from heedful.explain import explain
from heedful.explanations import WAYS, given
from heedful.explanations.explanation import Explanation, Lines, Table
from heedful.report import explained

TEXT = words(10)
MODELS = {"bert": bert, "llama": llama}
everywhere = pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)


@pytest.fixture(scope="module")
def found():
    model = bert()
    return {what: explain(model, TEXT, what) for what in WAYS}


@everywhere
@pytest.mark.parametrize("what", WAYS)
def test_every_answer_is_given_on_every_kind_of_block(made, what, tmp_path):
    model = made()
    answer = explain(model, TEXT, what)
    assert answer.what == what
    assert len(answer.tokens) == 12  # [CLS] and [SEP] around ten words
    assert answer.tables[0].rows
    assert answer.sentences
    saved = json.loads(answer.save(tmp_path / "a.json").read_text())
    assert saved["tokens"] == answer.tokens
    assert explained.picture(answer, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not model.model.training


def test_the_token_whose_removal_matters_most_is_found_by_removing_each():
    model = llama()
    answer = explain(model, TEXT, "tokens")
    for layer, row in zip(hd.capture(model, [TEXT]).values(), answer.picture.values, strict=True):
        call = layer[0]
        logits = call.logits.of(call.q, torch.arange(12), 0, 12).double()
        v = call.v.double().repeat_interleave(2, 1)
        whole = logits.softmax(-1) @ v
        for token in range(1, 12):  # without the first its own query sees nothing
            masked = logits.clone()
            masked[..., token] = -torch.inf
            moved = (masked.softmax(-1) @ v - whole).norm() / whole.norm()
            assert math.isclose(row[token], moved, rel_tol=1e-4)


@everywhere
def test_the_stretch_of_a_layer_is_the_norm_of_its_jacobian(made):
    model = made()
    model.model.double()
    answer = explain(model, TEXT, "lipschitz")
    states, attention = _attention_of_layer(model.model, given(model, TEXT).inputs, 1)
    jacobian = torch.autograd.functional.jacobian(attention, states)
    assert isinstance(jacobian, torch.Tensor)
    truth = torch.linalg.matrix_norm(jacobian.reshape(states.numel(), states.numel()), 2).item()
    assert answer.tables[0].rows[1][1] == pytest.approx(truth, rel=1e-4)


def _attention_of_layer(model, inputs, number):
    """What that layer's attention reads, and the attention as a function of it."""
    body = getattr(model, "model", model)
    layer = (body.layers if hasattr(body, "layers") else body.encoder.layer)[number]
    module = layer.self_attn if hasattr(layer, "self_attn") else layer.attention
    seen = {}

    def keep(module, args, kwargs):
        seen["args"], seen["kwargs"] = args, kwargs

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    model(**inputs)
    handle.remove()
    kwargs = {name: x for name, x in seen["kwargs"].items() if name not in ("past_key_values", "past_key_value")}
    states = kwargs.pop("hidden_states") if "hidden_states" in kwargs else seen["args"][0]
    rest = seen["args"][1:]
    if hasattr(layer, "self_attn"):
        return states.detach(), lambda x: module(hidden_states=x, **kwargs)[0]
    dense = module.output.dense  # without the skip and the norm behind it
    return states.detach(), lambda x: dense(module.self(x, *rest, **kwargs)[0])


def test_the_paths_shares_add_up_to_the_output(found):
    assert sum(row[1] for row in found["paths"].tables[0].rows) == pytest.approx(1, abs=1e-5)


def test_the_collapse_of_the_whole_model_is_the_residual_of_its_states(found):
    model = bert()
    with torch.no_grad():
        states = model.model(**given(model, TEXT).inputs, output_hidden_states=True).hidden_states
    rows = found["collapse"].tables[0]
    whole = [row[rows.columns.index("full")] for row in rows.rows]
    for x, ratio in zip(states, whole, strict=True):
        rest = x[0] - x[0].mean(0)
        norm = [(t.abs().sum(0).max() * t.abs().sum(1).max()).sqrt() for t in (rest, x[0])]
        assert ratio == pytest.approx((norm[0] / norm[1]).item(), rel=1e-4)


@pytest.mark.parametrize("what", ["tokens", "collapse"])
def test_a_model_that_reads_and_writes_is_explained_where_it_reads(what):
    from transformers import BartConfig, BartModel

    sides = {
        f"{side}_{name}": n
        for side in ("encoder", "decoder")
        for name, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 16))
    }
    model = hd.Checkpoint(BartModel(BartConfig(d_model=16, vocab_size=64, max_position_embeddings=48, **sides)).eval(), tokenizer())
    answer = explain(model, TEXT, what)
    assert any("encoder" in str(cell) for cell in (*answer.tables[0].columns, *(row[0] for row in answer.tables[0].rows)))


def test_a_layer_that_is_passed_again_is_told_pass_by_pass():
    from transformers import AlbertConfig, AlbertModel

    size = {"hidden_size": 16, "embedding_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 3}
    model = hd.Checkpoint(AlbertModel(AlbertConfig(vocab_size=64, max_position_embeddings=48, **size)).eval(), tokenizer())
    names = [row[0] for row in explain(model, TEXT, "tokens").tables[0].rows]
    assert [name.rpartition(", ")[2] for name in names] == ["pass 1", "pass 2", "pass 3"]


def test_a_long_text_is_cut_with_a_note():
    answer = explain(bert(), words(60), "tokens", length=20)
    assert len(answer.tokens) == 20
    assert answer.notes == ["the text is longer than 20 tokens and was cut there; --length reads more."]
    assert explain(bert(), words(5), "tokens").notes == []


def test_a_text_may_lie_in_a_file_or_be_token_ids(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    plain = explain(bert(), TEXT)
    for text in (tmp_path / "a.txt", str(tmp_path / "a.txt"), given(bert(), TEXT).ids):
        assert explain(bert(), text).picture.values == plain.picture.values


def test_a_token_is_named_by_its_text(found):
    assert found["tokens"].tokens[:2] == ["[CLS]", TEXT.split()[0]]


@pytest.mark.parametrize(
    "text, setting, said",
    [
        (TEXT, {"what": "love"}, "there is no explanation 'love'; ask for one of tokens, lipschitz, paths, collapse"),
        ("  ", {}, "the text is empty"),
        ("no/notes.txt", {}, "notes.txt is named like a file but is not there"),
        (TEXT, {"length": 4000}, "the model has positions for 48 tokens"),
        ([5], {}, "the text is one token"),
        (torch.zeros(100), {}, "an explanation is of a text"),
    ],
)
def test_bad_input_is_told_before_work_starts(text, setting, said):
    with pytest.raises(ValueError, match=said):
        explain(bert(), text, **setting)


@pytest.mark.parametrize(("text", "what", "said"), [("", "tokens", "the text is empty"), (TEXT, "love", "no explanation 'love'")])
def test_words_are_looked_at_before_the_model(text, what, said):
    with pytest.raises(ValueError, match=said):
        explain("no/such/model", text, what)


def test_a_model_without_a_tokenizer_is_told_what_it_needs():
    with pytest.raises(ValueError, match=r"it cannot read text; give hd.Checkpoint\(model, tokenizer\), or token ids"):
        explain(bert().model, TEXT)


@pytest.mark.parametrize("what", WAYS)
def test_weights_that_are_not_finite_are_told(what):
    model = bert()
    with torch.no_grad():
        model.model.encoder.layer[0].attention.self.value.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN|nan|finite"):
        explain(model, TEXT, what)


@pytest.mark.parametrize("what", ["lipschitz", "paths"])
def test_a_model_that_cannot_be_taken_apart_is_named_with_the_reason(what):
    from transformers import OPTConfig, OPTModel

    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "vocab_size": 64}
    model = hd.Checkpoint(OPTModel(OPTConfig(**size, max_position_embeddings=64, word_embed_proj_dim=16)).eval(), tokenizer())
    with pytest.raises(ValueError, match=r"OPTModel .* is of no family whose blocks are known"):
        explain(model, TEXT, what)


def test_json_knows_no_nan(tmp_path):
    table = Table("t", ("a", "b"), [(float("nan"), float("inf"))])
    saved = Explanation("tokens", "m", [], [table], [], Lines({}, "", "")).save(tmp_path / "a.json")
    assert json.loads(saved.read_text())["tables"]["t"] == [{"a": None, "b": None}]


def test_a_dollar_in_a_text_is_no_formula(tmp_path):
    picture = Lines({"$x": [1.0, 2.0], "y_$": [2.0, 1.0]}, "x", "y", log=True)
    explained.picture(Explanation("tokens", "m", [], [], [], picture), tmp_path / "a.png")
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
