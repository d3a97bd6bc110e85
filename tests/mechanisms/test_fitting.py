"""Fitting landmarks brings their outputs near the exact ones, on text that was held out, the same way each time."""

import pytest
import torch
from models import bert, llama, words

import heedful as hd
from heedful.attention import Capture, Mask, Unsupported
from heedful.mechanisms import Landmarks, Softmax
from heedful.mechanisms.fitting import fit_model, lesson, losses

SETTINGS = {"landmarks": 16, "chunk": 8, "sinks": 1}


def calls(count=4, mask=None, key_heads=2, length=96, seed=0):
    """Texts of one layer, whose keys and values come in a few kinds."""
    source = torch.Generator().manual_seed(7)
    kinds, worth = torch.randn(key_heads, 6, 8, generator=source) * 2, torch.randn(key_heads, 6, 5, generator=source)
    source.manual_seed(seed)
    found = []
    for _ in range(count):
        kind = torch.randint(6, (length,), generator=source)
        k = kinds[:, kind] + 0.1 * torch.randn(key_heads, length, 8, generator=source)
        q = torch.randn(1, 4, length, 8, generator=source) * 2
        found.append(Capture("a layer", q, k[None], worth[None, :, kind], mask or Mask(causal=True), 8**-0.5))
    return found


def off(mechanism, call):
    wanted = Softmax()(call.q, call.k, call.v, call.mask, call.scale)
    return float((mechanism(call.q, call.k, call.v, call.mask, call.scale).detach() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, keys=torch.arange(96)[None] >= 20)], ids=str)
def test_a_fit_brings_other_texts_nearer(mask, key_heads):
    mechanism, other = Landmarks(**SETTINGS), calls(1, mask, key_heads, seed=5)[0]
    before, texts = off(mechanism, other), calls(8, mask, key_heads)
    first = off(Landmarks(**SETTINGS).fit(texts, steps=0), other)
    after = off(mechanism.fit(texts, steps=60), other)
    assert after < first < before
    assert after < 0.1


def test_the_error_that_is_told_is_the_error_of_what_is_held_out():
    texts = calls(4)
    mechanism = Landmarks(**SETTINGS).fit(texts, steps=10)
    last = texts[-1]
    wanted = Softmax()(last.q, last.k, last.v, last.mask, last.scale)
    found = mechanism(last.q, last.k, last.v, last.mask, last.scale) - wanted
    relative = found.square().sum((0, 2, 3)).sqrt() / wanted.square().sum((0, 2, 3)).sqrt()
    assert torch.allclose(mechanism.errors, relative, atol=1e-5)


def test_one_capture_of_many_texts_holds_one_of_them_out():
    four, mask = calls(4), Mask(causal=True, keys=torch.arange(96) < torch.tensor([96, 96, 70, 0])[:, None])
    batch = Capture("a layer", *(torch.cat([getattr(c, n) for c in four]) for n in "qkv"), mask, 8**-0.5)
    mechanism = Landmarks(**SETTINGS).fit([batch], steps=10)
    last = four[2]  # the fourth is padding alone
    alone = Capture("a layer", *(t[:, :, :70] for t in (last.q, last.k, last.v)), Mask(causal=True), 8**-0.5)
    assert torch.allclose(mechanism.errors, losses(mechanism, lesson(alone, mechanism)).detach().sqrt(), atol=1e-5)


def test_one_text_alone_leaves_no_error_to_tell_and_is_learned_to_the_end():
    told = []
    mechanism = Landmarks(**SETTINGS).fit(calls(1), steps=40, rate=10.0, progress=lambda *now: told.append(now))
    assert [step for step, _ in told] == [0, 10, 20, 30, 40]
    assert all(error != error for _, error in told)  # NaN
    assert mechanism.errors.numel() == 0
    (text,), taught = calls(1), Landmarks(**SETTINGS)
    first = off(Landmarks(**SETTINGS).fit([text], steps=0), text)
    assert off(taught.fit([text], steps=60), text) < first


def test_the_same_seed_gives_the_same_fit_whatever_the_global_generator():
    one = Landmarks(**SETTINGS).fit(calls(), steps=12)
    torch.rand(5)
    other = Landmarks(**SETTINGS).fit(calls(), steps=12)
    assert all(torch.equal(a, b) for a, b in zip(one.learned, other.learned, strict=True))


def test_texts_of_many_lengths_and_batches_are_taken_together():
    (short,), (long,) = calls(1, length=33), calls(1, length=130)
    both = Capture("a layer", *(t.repeat(2, 1, 1, 1) for t in (long.q, long.k, long.v)), Mask(causal=True), 8**-0.5)
    assert torch.isfinite(Landmarks(**SETTINGS).fit([short, both, long], steps=5).errors).all()


def test_texts_too_short_for_landmarks_leave_them_finite():
    mechanism = Landmarks(**SETTINGS).fit(calls(length=5), steps=3)
    assert mechanism.errors.max() < 1e-5
    assert all(torch.isfinite(t).all() for t in mechanism.learned)


def test_padding_teaches_nothing():
    mask = Mask(causal=True, keys=torch.arange(96)[None] < 60)
    texts = calls(mask=mask)
    for text in texts:
        text.k[:, :, 60:], text.v[:, :, 60:], text.q[:, :, 60:] = 1e4, 1e4, 1e4
    one = Landmarks(**SETTINGS).fit(texts, steps=8)
    other = Landmarks(**SETTINGS).fit(calls(mask=mask), steps=8)
    assert torch.allclose(one.directions, other.directions, atol=1e-4)


def test_progress_is_told_and_a_fit_that_gets_no_better_ends():
    told = []
    mechanism = Landmarks(**SETTINGS).fit(calls(), steps=40, rate=10.0, progress=lambda *now: told.append(now))
    assert [step for step, _ in told] == [0, 10, 20]
    assert told[-1][1] > told[0][1]
    assert float(mechanism.errors.median()) == pytest.approx(told[0][1])


@pytest.mark.parametrize("make", [bert, llama])
def test_a_whole_model_is_fitted_and_swapped(make):
    model, texts = make(), [words(40 + i, i) for i in range(3)]
    fitted = fit_model(hd.capture(model, texts), Landmarks(landmarks=4, chunk=4, sinks=1), steps=4)
    assert set(fitted) == set(hd.capture(model, texts[:1]))
    wanted = hd.capture(model, texts[:1])
    hd.swap(model.model, fitted)
    found = hd.capture(model, texts[:1])
    for layer, mechanism in fitted.items():
        assert found[layer][0].out is not None
        assert not torch.equal(found[layer][0].out, wanted[layer][0].out)
        assert mechanism.errors.shape == (found[layer][0].q.shape[1],)
    hd.unswap(model.model)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Landmarks(**SETTINGS).fit([])
    with pytest.raises(Unsupported, match="window"):
        Landmarks(**SETTINGS).fit(calls(mask=Mask(causal=True, window=8)))
    call = calls(1)[0]
    with pytest.raises(ValueError, match="whole texts"):
        lesson(Capture("a layer", call.q[:, :, :5], call.k, call.v, Mask(causal=True, offset=91)), Landmarks(**SETTINGS))


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=True, keys=torch.zeros(1, 5, dtype=torch.bool))], ids=str)
def test_texts_of_nothing_but_sinks_are_refused(mask):
    with pytest.raises(ValueError, match="no text has more than 5 real tokens, and these are sinks; give longer texts"):
        Landmarks(landmarks=4, chunk=8, sinks=5).fit(calls(2, mask, length=5))


def test_losses_are_relative_and_squared():
    mechanism, (text,) = Landmarks(**SETTINGS).fit(calls(), steps=0), calls(1, seed=9)
    one = losses(mechanism, lesson(text, mechanism)).detach()
    text.v.mul_(1000)
    assert torch.allclose(losses(mechanism, lesson(text, mechanism)).detach(), one, rtol=1e-3)
    assert float(one.mean().sqrt()) == pytest.approx(off(mechanism, text), rel=0.3)
