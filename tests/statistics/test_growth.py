"""Growth statistics, streamed: equal to the dense ones under every mask, additive, and true of real models' gradients."""

import dataclasses

import dense
import pytest
import torch
from lessons import OUT, forces, lesson_of, statistics

from heedful.exact.probe import logit_gradient
from heedful.lesson import Lesson
from heedful.mask import Mask
from heedful.statistics.growth import Growth

CALLS = [c for c in dense.calls() if c[2] in (17, 9)]
every_call = pytest.mark.parametrize("name,mask,queries,keys", CALLS, ids=[c[0] for c in CALLS])


def close(found, wanted, tolerance):
    assert float((found.double() - wanted).norm()) <= tolerance * max(float(wanted.norm()), 1e-6)


@every_call
def test_streamed_is_dense(name, mask, queries, keys):
    lesson = lesson_of(mask, queries, keys)
    wanted, found = statistics(lesson), Growth.of_lesson(lesson, 1)
    assert not found.logit_gradient[0].any()
    close(found.logit_gradient[1], wanted["logit_gradient"], 1e-12)
    close(found.query_gram, wanted["query_gram"], 1e-12)
    close(found.key_gram, wanted["key_gram"], 1e-12)
    close(found.mixed_gram[:4], wanted["mixed_gram"], 1e-12)
    close(found.value_gradient[1, :4], wanted["value_gradient"], 1e-12)


@every_call
def test_the_probe_is_dense_too(name, mask, queries, keys):
    lesson = lesson_of(mask, queries, keys)
    for columns in (2, 64):
        close(logit_gradient(lesson, columns), statistics(lesson)["logit_gradient"], 1e-12)


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(keys=dense.padding(300)), Mask(causal=True, window=40)])
def test_single_precision_keeps_six_digits_both_ways(mask):
    lesson = lesson_of(mask, 300, 300, dtype=torch.float32)
    wanted = statistics(lesson)["logit_gradient"]
    close(Growth.of_lesson(lesson, 0).logit_gradient[0], wanted, 1e-6)
    close(logit_gradient(lesson), wanted, 1e-6)


def test_half_precision_is_added_up_in_single():
    lesson = lesson_of(Mask(causal=True), 200, 200, dtype=torch.bfloat16)
    close(Growth.of_lesson(lesson, 0).logit_gradient[0], statistics(lesson)["logit_gradient"], 1e-5)  # of the same rounded inputs
    close(logit_gradient(lesson), statistics(lesson)["logit_gradient"], 1e-5)


@pytest.mark.parametrize("extra", [{"cap": 2.0}, {"null": torch.tensor([0.0, 1.0, -1.0, 3.0])}])
def test_soft_caps_and_null_logits_are_honoured(extra):
    lesson = lesson_of(Mask(causal=True), 17, 17, **extra)
    close(Growth.of_lesson(lesson, 0).logit_gradient[0], statistics(lesson)["logit_gradient"], 1e-12)
    if "cap" in extra:
        close(logit_gradient(lesson), statistics(lesson)["logit_gradient"], 1e-12)
    else:
        with pytest.raises(ValueError, match="gives mass to no key"):
            logit_gradient(lesson)


def test_saturated_attention_gives_nothing_and_no_nan():
    lesson = lesson_of(Mask(), 17, 17)
    sharp = dataclasses.replace(lesson, scale=1e4)
    found = Growth.of_lesson(sharp, 0)
    assert all(bool(torch.isfinite(x).all()) for x in found.tensors.values())
    close(found.logit_gradient[0], statistics(sharp)["logit_gradient"], 1e-10)
    assert float(found.keys().descent(found.keys().whole, 0.1).abs().max()) < float("inf")


def test_rows_that_see_nothing_add_nothing():
    keys = torch.zeros(dense.BATCH, 9, dtype=torch.bool)
    keys[1] = True
    whole = lesson_of(Mask(keys=keys), 9, 9)
    alone = Growth.of_lesson(_entries(whole, slice(1, 2), Mask()), 0)
    found = Growth.of_lesson(whole, 0)
    for name in ("logit_gradient", "query_gram", "key_gram"):
        torch.testing.assert_close(getattr(found, name), getattr(alone, name))
    assert found.tokens.sum() == 9


def _entries(lesson, some, mask):
    parts = {
        f.name: x[some]
        for f in dataclasses.fields(Lesson)
        if isinstance(x := getattr(lesson, f.name), torch.Tensor) and f.name != "null"
    }
    return dataclasses.replace(lesson, **{**parts, "mask": mask, "real": None})


def test_shards_add_up_to_one_pass():
    lesson = lesson_of(Mask(causal=True), 40, 40)
    whole = Growth.of_lesson(lesson, 0, 3.0, 10.0)
    first, second = (Growth.of_lesson(_entries(lesson, slice(b, b + 1), lesson.mask), 0, 1.5, 5.0) for b in (0, 1))
    for name, found in (first + second).tensors.items():
        torch.testing.assert_close(found, whole.tensors[name], rtol=1e-12, atol=1e-12)


def test_long_texts_are_streamed_in_spans(monkeypatch):
    from heedful.statistics import gathering

    lesson = lesson_of(Mask(causal=True, keys=dense.padding(700)), 700, 700)
    whole = Growth.of_lesson(lesson, 0)
    monkeypatch.setattr(gathering, "SPAN", 256)
    for name, found in Growth.of_lesson(lesson, 0).tensors.items():
        torch.testing.assert_close(found, whole.tensors[name], rtol=1e-10, atol=1e-10)


def test_patterns_mix_what_they_say():
    lesson = lesson_of(Mask(causal=True), 17, 17)
    found = Growth.of_lesson(lesson, 0)
    x = lesson.augmented
    uniform = x.cumsum(1) / torch.arange(1, 18)[:, None]
    before = torch.cat([x[:, :1], x[:, :-1]], 1)
    for i, u in enumerate((uniform, x, before), 4):
        close(found.mixed_gram[i], (u.mT @ u).sum(0), 1e-12)
        close(found.value_gradient[0, i], (u.mT @ lesson.returned).sum(0), 1e-12)
    close(found.lags[2], (x.mT @ (before - uniform)[..., :-1]).sum(0), 1e-12)


def test_dropout_on_changes_the_gradient_given_and_not_the_attention():
    """The sums are those of the attention without dropout, at the gradient that came back; rows of dL/dS still sum to zero."""
    lesson = lesson_of(Mask(), 17, 17)
    dropped = dataclasses.replace(lesson, out=torch.randn_like(lesson.gradient))  # what dropout made of the output plays no part
    torch.testing.assert_close(Growth.of_lesson(dropped, 0).logit_gradient, Growth.of_lesson(lesson, 0).logit_gradient)
    assert float(forces(lesson)[1].sum(-1).abs().max()) < 1e-12


def test_missing_or_broken_gradients_are_named():
    lesson = lesson_of(Mask(), 9, 9)
    with pytest.raises(ValueError, match="needs the gradient"):
        Growth.of_lesson(dataclasses.replace(lesson, gradient=None), 0)
    with pytest.raises(ValueError, match="gradient holds NaN"):
        Growth.of_lesson(dataclasses.replace(lesson, gradient=lesson.gradient * torch.nan), 0)
    with pytest.raises(ValueError, match="fold is 2"):
        Growth.of_lesson(lesson, 2)
    with pytest.raises(ValueError, match="the gradient has shape"):
        dataclasses.replace(lesson, gradient=lesson.gradient[..., :2])
    with pytest.raises(ValueError, match="states has shape"):
        dataclasses.replace(lesson, states=lesson.states[:, :2])


def test_without_the_layers_gradient_there_is_no_value_signal():
    lesson = dataclasses.replace(lesson_of(Mask(), 9, 9), returned=None)
    found = Growth.of_lesson(lesson, 0)
    assert found.value_gradient.shape[-1] == 0 != OUT
    assert set(found.result()) == {"key_gain"}


def test_gains_are_one_number_per_head():
    found = Growth.of_lesson(lesson_of(Mask(), 9, 9), 0).result()
    assert {name: e.value.shape for name, e in found.items()} == {"key_gain": (4,), "value_gain": (4,)}
