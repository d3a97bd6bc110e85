"""Measuring growth on real models: their own gradients, in any shards and batches, saved and added up."""

import dataclasses

import models
import pytest
import torch
from huggingface.zoo import BY_NAME

from heedful.checkpoint import Checkpoint
from heedful.growing import Growths, growth_of_batch, measure_growth, model_loss
from heedful.huggingface.lessons import lessons
from heedful.huggingface.seam import attach
from heedful.statistics.growth import Growth

TEXTS = [models.words(n, seed=n) for n in (20, 31, 9, 12, 40)]
NAMES = ("query", "q_proj", "q", "q_lin"), ("key", "k_proj", "k", "k_lin")


def weighted(model, inputs):
    """A loss with a gradient at every output."""
    answer = model(**inputs)
    out = getattr(answer, "logits", answer[0])
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)).sum()


@pytest.mark.parametrize("name", ["bert", "vit", "distilbert", "opt", "bart", "whisper", "t5"])
def test_the_gradient_of_the_query_weights_is_n_times_the_key_weights(name):
    """dL/dW_Q' = s N W_K, s the model's own scale wherever it keeps it."""
    family = dataclasses.replace(BY_NAME[name], sharpness=min(2.0, BY_NAME[name].sharpness))  # saturated attention has no gradient
    model = family.build().double()
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in list(family.inputs())[-1][1].items()}
    attach(model)  # stock attention rounds to float32
    _, seen = lessons(model, lambda: weighted(model, inputs))
    weighted(model, inputs).backward()
    modules = dict(model.named_modules())
    for lesson in seen:
        w_q, w_k = (next(getattr(modules[lesson.layer], n) for n in names if hasattr(modules[lesson.layer], n)) for names in NAMES)
        n, heads = Growth.of_lesson(lesson, 0).logit_gradient[0], lesson.q.shape[1]
        found = n @ w_k.weight.detach().unflatten(0, (heads, -1)).mT
        wanted = w_q.weight.grad.unflatten(0, (heads, -1)).mT
        scale = float((found[:, :-1] * wanted).sum() / found[:, :-1].square().sum())
        assert scale == pytest.approx(1.0 if name == "t5" else lesson.q.shape[-1] ** -0.5, rel=1e-9), lesson.layer
        torch.testing.assert_close(scale * found[:, :-1], wanted, rtol=1e-9, atol=1e-12 * float(wanted.abs().max()))
        if w_q.bias is not None:
            torch.testing.assert_close(scale * found[:, -1], w_q.bias.grad.unflatten(0, (heads, -1)), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "gpt_oss", "t5"])
def test_the_gradient_of_the_output_weights_is_what_the_heads_mixed(name):
    """dL/dW_V' is Nv times W_O: each lesson knows its layer's last projection."""
    family = BY_NAME[name]
    model, inputs = family.build(), next(iter(family.inputs()))[1]
    _, seen = lessons(model, lambda: weighted(model, inputs))
    for lesson in seen:
        assert lesson.returned is not None
        assert float(lesson.returned.abs().sum()) > 0


def test_the_model_is_left_as_it_was():
    model = models.bert().model
    model.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    model.train()
    asked = [p.requires_grad for p in model.parameters()]
    measure_growth(Checkpoint(model, models.tokenizer()), TEXTS, loss=lambda m, i: (weighted(m, i), 1))
    assert [p.requires_grad for p in model.parameters()] == asked
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_shards_with_their_start_add_up_to_one_pass():
    loaded = models.llama()
    loaded = dataclasses.replace(loaded, model=loaded.model.double())
    whole = measure_growth(loaded, TEXTS, batch=3)
    parts = measure_growth(loaded, TEXTS[:3], batch=1) + measure_growth(loaded, TEXTS[3:], start=3)
    assert whole.layers.keys() == parts.layers.keys()
    for layer, growth in whole.layers.items():
        assert growth.texts.tolist() == [3, 2]
        for name, x in growth.tensors.items():
            torch.testing.assert_close(parts.layers[layer].tensors[name], x, rtol=1e-6, atol=1e-7)  # rotary tables are float32


def test_mean_and_sum_losses_and_accumulated_batches_are_one():
    loaded = models.llama()
    summed = measure_growth(loaded, TEXTS, batch=1)

    def own(model, inputs):
        logits, ids = model(input_ids=inputs["input_ids"]).logits[:, :-1], inputs["input_ids"][:, 1:]
        kept = inputs["attention_mask"][:, 1:].bool()
        return torch.nn.functional.cross_entropy(logits[kept], ids[kept], reduction="sum"), int(kept.sum())

    again = measure_growth(loaded, TEXTS, loss=own, batch=2)
    for layer, growth in summed.layers.items():
        torch.testing.assert_close(again.layers[layer].logit_gradient, growth.logit_gradient, rtol=1e-3, atol=1e-5)
        assert again.layers[layer].mean_loss == pytest.approx(growth.mean_loss)


def test_what_is_saved_loads_and_adds(tmp_path):
    found = measure_growth(models.llama(), TEXTS, layers=["model.layers.1.self_attn"])
    loaded = Growths.load(found.save(tmp_path / "growth.safetensors"))
    assert list(loaded.layers) == ["model.layers.1.self_attn"]
    for name, x in found.layers["model.layers.1.self_attn"].tensors.items():
        assert torch.equal(loaded.layers["model.layers.1.self_attn"].tensors[name], x)
    assert (loaded + found).layers["model.layers.1.self_attn"].texts.sum() == 10
    with pytest.raises(ValueError, match="two models"):
        loaded + Growths("another")
    (tmp_path / "bad.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="damaged"):
        Growths.load(tmp_path / "bad.safetensors")
    with pytest.raises(FileNotFoundError, match="no growth statistics"):
        Growths.load(tmp_path / "none.safetensors")


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="no loss for inputs without labels"):
        measure_growth(models.bert(), TEXTS)
    with pytest.raises(RuntimeError, match=r"without an attention call of layers\.9"):
        measure_growth(models.llama(), TEXTS, layers=["layers.9"])
    with pytest.raises(ValueError, match=r"no attention call of layers\.9 was seen"):
        measure_growth(models.llama(), TEXTS, layers=["layers.9", "model.layers.0.self_attn"])
    with pytest.raises(ValueError, match="the loss is nan"):
        measure_growth(models.llama(), TEXTS, loss=lambda m, i: (m(**i).logits.sum() * torch.nan, 1))
    with pytest.raises(ValueError, match="must be one number"):
        measure_growth(models.llama(), TEXTS, loss=lambda m, i: (m(**i).logits, 1))


def test_a_frozen_model_is_measured_too():
    loaded = models.llama()
    loaded.model.requires_grad_(False)
    inputs = {"input_ids": torch.arange(5, 15)[None]}
    found = growth_of_batch(loaded.model, inputs, model_loss, 0)
    assert found["model.layers.0.self_attn"].graded.tolist() == [9, 0]
    assert found["model.layers.0.self_attn"].logit_gradient.abs().sum() > 0
