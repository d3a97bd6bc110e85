"""Attention by features: the truth is the dense matrix of summed products, and autograd in float64."""

import pytest
import torch

from heedful.attention import Mask
from heedful.ops import plain, reading, spans
from heedful.ops.features import by_features
from heedful.ops.reading import by_features_causal, read_on

both = pytest.mark.parametrize("op", [by_features, by_features_causal])


def dense(asked, kept, v, keys=None, causal=False, offset=0):
    """In log space, so at any scale."""
    group = asked.shape[1] // kept.shape[1]
    kept, v = (t.double().repeat_interleave(group, 1) for t in (kept, v))
    logits = torch.logsumexp(asked.double()[..., :, None, :] + kept[..., None, :, :], -1)
    logits = logits + Mask(causal=causal, keys=keys, offset=offset).dense(asked.shape[2], kept.shape[2])
    return logits.softmax(-1).nan_to_num(0) @ v


def tensors(std=1.0, queries=150, keys=150, dtype=torch.float32):
    shapes = ((2, 4, queries, 6), (2, 2, keys, 6), (2, 2, keys, 5))
    asked, kept, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return asked * std, kept * std, v


def off(found, wanted):
    return float((found.double() - wanted.double()).norm().detach() / wanted.double().norm().detach())


@both
@pytest.mark.parametrize("std", [0.3, 3, 30, 300])
@pytest.mark.parametrize("padded", [False, True])
def test_it_equals_the_dense_matrix_at_any_scale(op, std, padded):
    keys = (torch.arange(150) >= torch.tensor([[0], [70]])) if padded else None
    asked, kept, v = tensors(std)
    assert off(op(asked, kept, v, keys), dense(asked, kept, v, keys, op is by_features_causal)) < 2e-5


@pytest.mark.parametrize("queries, keys, offset", [(10, 40, 30), (10, 40, 12), (10, 40, 0), (30, 10, 0), (30, 10, 5), (1, 70, 69)])
def test_queries_may_start_anywhere_among_the_keys(queries, keys, offset):
    asked, kept, v = tensors(queries=queries, keys=keys)
    assert off(by_features_causal(asked, kept, v, None, offset), dense(asked, kept, v, None, True, offset)) < 1e-5


def test_a_negative_offset_is_refused():
    with pytest.raises(ValueError, match="offset"):
        by_features_causal(*tensors(), None, -1)


@both
def test_gradients_pass_gradcheck(op, monkeypatch):
    monkeypatch.setattr(spans, "CHUNK", 4)
    monkeypatch.setattr(spans, "SPAN", 2)
    inputs = [t.requires_grad_() for t in tensors(2, 19, 19, torch.float64)]
    keys = torch.arange(19) >= torch.tensor([[0], [6]])
    assert torch.autograd.gradcheck(lambda *qkv: op(*qkv, keys), inputs)


@both
def test_a_second_derivative_is_right(op):
    inputs = [t[:1, :2, :5].requires_grad_() for t in tensors(1, 5, 5, torch.float64)]
    assert torch.autograd.gradgradcheck(op, inputs)


@pytest.mark.parametrize("chunk, span", [(8, 1), (8, 3), (16, 2), (256, 1)])
def test_chunks_of_any_size_give_one_answer(chunk, span, monkeypatch):
    def run():
        inputs = [t.clone().requires_grad_() for t in given]
        out = by_features_causal(*inputs)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    given = tensors(30)  # some sums get lost, so that chunks are cut
    wanted = run()
    monkeypatch.setattr(spans, "CHUNK", chunk)
    monkeypatch.setattr(spans, "SPAN", span)
    for one, other in zip(run(), wanted, strict=True):
        assert off(one, other) < 1e-5


@both
def test_the_plain_formula_agrees(op):
    asked, kept, v = tensors(3)
    with plain():
        wanted = op(asked, kept, v)
    assert off(op(asked, kept, v), wanted) < 1e-5


@both
def test_no_key_at_all_gives_zero(op):
    asked, kept, v = tensors(queries=3, keys=0)
    assert (op(asked, kept, v) == 0).all()


def test_reading_in_pieces_carries_the_maxima(monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 7)
    asked, kept, v = tensors(30)
    keys = torch.arange(150) >= torch.tensor([[0], [70]])
    out, state = read_on(lambda q, k: (q, k), (asked, kept, v), keys, None)
    assert off(out, dense(asked, kept, v, keys, True)) < 1e-5
    assert state.highest.shape == (2, 2, 6)
    assert state.sums.shape == (2, 2, 6, 6)
    torch.testing.assert_close(state.highest[0], kept[0].amax(-2))


def test_a_state_that_has_seen_keys_is_not_blind_to_padding_after_them():
    asked, kept, v = tensors(30, 80, 80)
    real = (torch.arange(80) < 40).expand(2, -1)
    _, state = read_on(lambda q, k: (q, k), (asked[:, :, :40], kept[:, :, :40], v[:, :, :40]), None, None)
    out, _ = read_on(lambda q, k: (q, k), (asked[:, :, 40:], kept[:, :, 40:], v[:, :, 40:]), real[:, 40:], state)
    assert off(out, dense(asked, kept, v, real, True)[:, :, 40:]) < 1e-5
