"""The doctor tells whether a model's attention can be seen."""

import dataclasses
import sys

import pytest
from models import bert, llama

from heedful import Checkpoint, doctor
from heedful.scan import run


@pytest.mark.parametrize("model", [bert, llama])
def test_a_model_that_is_seen_is_healthy(model):
    found = doctor(model())
    assert found.healthy
    assert found.difference < 1e-5
    assert len(found.layers) == 2
    assert not found.missed


def test_masks_are_named():
    assert {rule for layer in doctor(llama()).layers.values() for rule in layer.rules} == {"causal", "keys"}


def test_a_model_with_attention_of_its_own_is_not_healthy():
    from transformers import BloomConfig, BloomModel

    found = doctor(Checkpoint(BloomModel(BloomConfig(hidden_size=16, n_head=2, n_layer=2, vocab_size=64))))
    assert not found.healthy
    assert list(found.missed) == ["h.0.self_attention", "h.1.self_attention"]


def test_models_that_see_and_hear_are_examined_too():
    from transformers import ViTConfig, ViTModel, WhisperConfig, WhisperModel

    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vit = ViTModel(ViTConfig(**size, image_size=8, patch_size=4))
    sides = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = WhisperModel(WhisperConfig(**sides, **special, d_model=16, vocab_size=50, max_source_positions=20, num_mel_bins=8))
    assert doctor(Checkpoint(vit)).healthy
    found = doctor(Checkpoint(whisper))
    assert found.healthy
    assert found.layers["decoder.layers.0.encoder_attn"].cross


def test_a_difference_is_noticed(monkeypatch):
    import heedful.huggingface.seam as seam
    from heedful.mechanisms import Softmax

    monkeypatch.setattr(seam, "_exact", Softmax(beta=2.0))
    found = doctor(llama())
    assert not found.healthy
    assert dataclasses.is_dataclass(found)


def test_a_model_in_training_is_examined_without_dropout():
    made = bert()
    made.model.train()
    assert doctor(made).healthy
    assert made.model.training


def test_a_model_that_gives_no_numbers_is_not_healthy():
    made = bert()
    made.model.encoder.layer[0].attention.self.value.weight.data.fill_(float("nan"))
    found = doctor(made)
    assert not found.healthy
    assert "not finite" in found.verdict


def test_a_model_of_which_nothing_can_be_compared_is_not_healthy(monkeypatch):
    monkeypatch.setattr(sys.modules["heedful.doctor"], "_states", lambda model, inputs: run(model, inputs) and {})
    found = doctor(bert())
    assert found.layers
    assert not found.healthy
    assert "no layer can be compared" in found.verdict
