"""Capturing keeps the calls of a model as they happened."""

import pytest
import torch
from models import bert, llama, whisper, words

from heedful import capture
from heedful.mechanisms import Softmax

TEXTS = [words(9 + i, i) for i in range(3)]


@pytest.mark.parametrize("model", [bert, llama])
def test_each_call_of_each_layer_is_kept_and_explains_its_output(model):
    found = capture(model(), TEXTS)
    assert [len(calls) for calls in found.values()] == [3, 3]
    for call in (call for calls in found.values() for call in calls):
        assert call.out is not None
        assert not call.out.requires_grad
        assert torch.allclose(Softmax()(call.q, call.k, call.v, call.mask, call.scale), call.out, atol=1e-6)


def test_layers_can_be_chosen():
    name = "encoder.layer.1.attention.self"
    assert list(capture(bert(), TEXTS, layers=[name])) == [name]
    with pytest.raises(ValueError, match="no attention call of nope"):
        capture(bert(), TEXTS, layers=["nope"])


def test_texts_may_be_limited_and_cut():
    (calls,) = capture(bert(), TEXTS, limit=1, length=5, layers=["encoder.layer.0.attention.self"]).values()
    assert [call.q.shape[-2] for call in calls] == [5]


def test_what_a_model_writes_of_a_sound_is_made_before_watching():
    """Each layer is called once, not once for each token that is written."""
    found = capture(whisper(), [{"input_features": torch.randn(2, 8, 40)}])
    assert [len(calls) for calls in found.values()] == [1, 1, 1]
    assert found["model.decoder.layers.0.self_attn"][0].q.shape[-2] > 1
