"""Curves of collapse: each point is the plain ratio at that depth, and what cannot be ablated is left out with the reason."""

import json

import pytest
import torch
from huggingface.zoo import BY_NAME
from models import bert, llama, whisper, words

from heedful.exact import composite_norm, residual
from heedful.explaining import Curves, collapse_curves
from heedful.huggingface.ablate import ABLATIONS, Unablatable, ablated
from heedful.huggingface.double import in_double


def ratio(x):
    return float(composite_norm(residual(x)) / composite_norm(x))


def test_a_curve_is_the_ratio_of_what_enters_and_leaves_each_block():
    checkpoint = bert()
    ids = torch.tensor([checkpoint.tokenizer(words(12))["input_ids"]])
    found = collapse_curves(checkpoint, [words(12)])
    with in_double(checkpoint.model) as exact, torch.no_grad():
        states = exact(ids, output_hidden_states=True).hidden_states
        assert found.only("full") == pytest.approx([ratio(x[0]) for x in states], rel=1e-12)
        with ablated(exact, "pure SAN"):
            alone = exact(ids, output_hidden_states=True).hidden_states
    assert found.only("pure SAN") == pytest.approx([ratio(x[0]) for x in alone], rel=1e-6)
    assert found.tokens == [14]
    assert list(found.curves) == list(ABLATIONS)


def test_the_means_are_over_texts_read_one_by_one():
    parts = [collapse_curves(llama(), [words(9, seed)], ["SAN + LN"]).only("SAN + LN") for seed in (1, 2)]
    whole = collapse_curves(llama(), [words(9, 1), words(9, 2)], ["SAN + LN"]).only("SAN + LN")
    assert whole == pytest.approx([(a + b) / 2 for a, b in zip(*parts, strict=True)])


def test_images_are_read_too():
    found = collapse_curves(BY_NAME["vit"].build(), [{"pixel_values": torch.randn(1, 3, 16, 16)}])
    assert found.only("full")[0] == found.only("pure SAN")[0]
    assert found.only("pure SAN")[-1] < found.only("full")[-1]


def test_what_the_blocks_do_not_allow_is_left_out_with_the_reason():
    found = collapse_curves(BY_NAME["gpt_neox"].build(), [{"input_ids": torch.arange(5)}])
    assert set(found.curves) == set(ABLATIONS) - {"no attention skip"}
    assert "share one skip" in found.refused["no attention skip"]
    with pytest.raises(Unablatable, match="attends more than once"):
        collapse_curves(whisper(), [{"input_features": torch.randn(1, 8, 40)}], ["pure SAN"])


def test_the_model_stays_as_it_was_and_the_curves_are_saved(tmp_path):
    checkpoint = bert()
    before = checkpoint.fingerprint
    found = collapse_curves(checkpoint.model, [{"input_ids": torch.arange(3, 9)}], ["no MLP"])
    assert checkpoint.fingerprint == before
    assert Curves(**json.loads(found.save(tmp_path / "curves.json").read_text())) == found


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"no ablation \['no heads'\]; give some of full, no MLP"):
        collapse_curves(bert(), [words(3)], ["full", "no heads"])
    with pytest.raises(ValueError, match="a batch of 2 was read"):
        collapse_curves(bert(), [{"input_ids": torch.ones(2, 5, dtype=torch.long)}], ["full"])
    broken = bert()
    broken.model.encoder.layer[0].output.dense.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="nan or infinite"):
        collapse_curves(broken, [words(3)], ["full"])
    two = Curves("model", [3], {"full": {"a": [1.0], "b": [1.0]}}, {})
    with pytest.raises(ValueError, match="2 stacks of blocks"):
        two.only("full")
