"""Linear: its truth is the dense matrix of (elu(q) + 1) . (elu(k) + 1) in float64."""

import pytest
import torch
from comparing import off, run

from heedful.attention import Mask
from heedful.mechanisms import Linear
from heedful.mechanisms.linear import log_features

REAL = torch.arange(150) < torch.tensor([[150], [90]])
MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "padding": Mask(keys=REAL),
    "causal left padding": Mask(causal=True, keys=REAL.flip(-1)),
}


def dense(q, k, v, mask):
    """Every weight spelled out; exp(x) below 0 and x + 1 above, which elu(x) + 1 is without cancellation."""
    asked, kept = (torch.where(t > 0, t + 1, t.clamp_max(0).exp()) for t in (q, k))
    weights = asked @ kept.mT * mask.dense(q.shape[-2], k.shape[-2]).exp()
    return (weights / weights.sum(-1, keepdim=True)).nan_to_num(0) @ v


@pytest.mark.parametrize("mask", [pytest.param(m, id=name) for name, m in MASKS.items()])
@pytest.mark.parametrize("std", [0.3, 1, 8, 30])
def test_it_equals_the_dense_matrix_at_any_scale(std, mask):
    q, k, v = torch.randn(3, 2, 3, 150, 10)
    assert off(Linear()(q * std, k * std, v, mask), dense(*(t.double() for t in (q * std, k * std, v)), mask)) < 2e-6


@pytest.mark.parametrize("mask", [MASKS["none"], MASKS["causal"], MASKS["padding"]], ids=["none", "causal", "padding"])
def test_its_gradients_are_those_of_the_dense_matrix(mask):
    q, k, v = torch.randn(3, 2, 3, 150, 10) * 3
    wanted = run(lambda *qkv: dense(*qkv, mask), *(t.double() for t in (q, k, v)))
    for one, other in zip(run(lambda *qkv: Linear()(*qkv, mask), q, k, v), wanted, strict=True):
        assert off(one, other) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_features_below_the_smallest_float_still_tell_keys_apart(causal):
    q, k, v = torch.randn(3, 1, 1, 40, 4)
    q, k, mask = q - 300, k - 300, Mask(causal=causal)  # exp(-300) is 0 in float32
    logits = torch.logsumexp((q[..., :, None, :] + k[..., None, :, :]).double(), -1) + mask.dense(40, 40)
    assert off(Linear()(q, k, v, mask), logits.softmax(-1) @ v.double()) < 1e-4


def test_a_first_key_far_below_the_later_ones_is_not_lost():
    """A running maximum of the whole text would leave nothing of it: those tokens are read in smaller steps."""
    q, k, v = torch.randn(3, 1, 2, 200, 6)
    k[:, :, :70] -= 150
    found = run(lambda *qkv: Linear()(*qkv, Mask(causal=True)), q, k, v)
    wanted = run(lambda *qkv: dense(*qkv, Mask(causal=True)), *(t.double() for t in (q, k, v)))
    for one, other in zip(found, wanted, strict=True):
        assert off(one, other) < 1e-5
    assert off(found[0][:, :, :70], wanted[0][:, :, :70]) < 1e-5


def test_the_gradient_at_zero_is_one():
    x = torch.zeros(3, requires_grad=True)
    log_features(x).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_the_scale_plays_no_part():
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    assert torch.equal(Linear()(q, k, v, scale=3.0), Linear()(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_not_even_a_nan_gets_out_of_the_padding(causal):
    q, k, v = torch.randn(3, 1, 2, 30, 8)
    mask = Mask(causal=causal, keys=(torch.arange(30) < 20)[None])
    wanted = Linear()(q, k, v, mask)
    k[:, :, 20:], v[:, :, 20:] = torch.nan, torch.nan
    torch.testing.assert_close(Linear()(q, k, v, mask), wanted)
