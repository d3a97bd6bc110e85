"""Coverage: which attention was seen, and why the rest was not."""

import pytest
import torch
import transformers
from torch import nn

from heedful.huggingface import Unreachable, attach, attention_modules, coverage, swap, watching
from heedful.mechanisms import Hard

from .zoo import BY_NAME, TEXT, VISION

GPT = {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}
OUTSIDE = {
    "gptj": ({"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4}, "GPTJAttention"),
    "bloom": (GPT, "BloomAttention"),
    "mpt": ({"vocab_size": 60, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}, "MptAttention"),
    "falcon": (TEXT, "FalconAttention"),
    "deberta-v2": (TEXT, "DisentangledSelfAttention"),
    "mpnet": (TEXT, "MPNetSelfAttention"),
}


def outside(name):
    settings, _ = OUTSIDE[name]
    return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name, **settings)).eval()


@pytest.mark.parametrize("name", OUTSIDE)
def test_models_outside_the_interface_are_refused_by_name(name):
    model, kind = outside(name), OUTSIDE[name][1]
    before = model.config._attn_implementation
    for use in (lambda: attach(model), lambda: watching(model, print).__enter__()):
        with pytest.raises(Unreachable, match=rf"{type(model).__name__}.*{kind}.*does not reach"):
            use()
    report = coverage(model, lambda: model(torch.arange(5)[None]))
    assert report.reached == ()
    assert len(report.missed) == 2, f"{name}: {list(report.missed)}"
    with pytest.raises(Unreachable, match=rf"2 of 2(.|\n)*{next(iter(report.missed))}: {kind} attends with its own code"):
        report.check()
    with pytest.raises(Unreachable, match=kind):
        swap(model, {next(iter(report.missed)): Hard()})
    assert model.config._attn_implementation == before


def test_a_module_that_these_inputs_do_not_use_is_missed():
    model = BY_NAME["bart"].build().get_encoder()
    assert coverage(model, lambda: model(torch.arange(5)[None])).missed == {}
    model = BY_NAME["bart"].build()
    report = coverage(model, lambda: model.get_encoder()(torch.arange(5)[None]))
    assert len(report.reached) == 2
    assert "not called" in report.missed["model.decoder.layers.0.encoder_attn"]
    with pytest.raises(Unreachable, match="4 of 6"):
        report.check()


def test_a_pooling_head_of_another_kind_is_named():
    config = transformers.SiglipVisionConfig(**VISION)
    model = transformers.SiglipVisionModel(config).eval()
    report = coverage(model, lambda: model(torch.randn(1, 3, 16, 16)))
    assert len(report.reached) == 2
    (missed,) = report.missed.values()
    assert "MultiheadAttention attends with its own code" in missed


def test_an_attention_module_that_skips_its_call_is_named():
    model = BY_NAME["bert"].build()
    model.encoder.layer[0].attention.self.forward = lambda hidden, *args, **kwargs: (hidden, None)
    report = coverage(model, lambda: model(torch.arange(5)[None]))
    assert "ran without calling" in report.missed["encoder.layer.0.attention.self"]


def test_a_model_without_attention_fails_the_check():
    report = coverage(nn.Linear(2, 2), lambda: None)
    with pytest.raises(Unreachable, match="no attention module"):
        report.check()
    assert attention_modules(nn.Linear(2, 2)) == {}


def test_coverage_leaves_no_hook_behind_when_the_run_fails():
    model = BY_NAME["bert"].build()

    def run():
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        coverage(model, run)
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_pre_hooks for module in model.modules())
