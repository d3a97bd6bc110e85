"""TopK: exact attention over the best visible keys, in tiles."""

import pytest
import torch

from heedful.attention import Mask
from heedful.mechanisms import Hard, Softmax, TopK
from heedful.mechanisms import topk as module

MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "window, sinks": Mask(causal=True, window=7, sinks=2),
    "padding": Mask(keys=torch.arange(40) < torch.tensor([[40], [25]])),
    "bias": Mask(bias=torch.linspace(-3, 3, 40 * 40).view(1, 1, 40, 40)),
}


def tensors():
    return [torch.randn(2, 3, 40, 8) for _ in range(3)]


def dense(q, k, v, mask, keys, cap=None, null=None):
    """All logits in float64, all but the best hidden, one softmax."""
    logits = q.double() @ k.double().mT * 8**-0.5
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = logits + mask.dense(40, 40)
    logits = logits.masked_fill(logits < logits.sort(-1, descending=True).values[..., keys - 1, None], -torch.inf)
    if null is not None:
        logits = torch.cat([logits, null.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    return logits.softmax(-1).nan_to_num(0)[..., :40] @ v.double()


@pytest.mark.parametrize("extra", [{}, {"cap": 2.0}, {"null": torch.tensor([-1.0, 0.0, 2.0])}], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_it_equals_the_dense_matrix_with_all_other_keys_hidden(mask, extra):
    q, k, v = tensors()
    torch.testing.assert_close(TopK(5)(q, k, v, mask, **extra).double(), dense(q, k, v, mask, 5, **extra), atol=3e-6, rtol=1e-5)


def test_gradients_flow_through_the_chosen_logits():
    qkv = [t.requires_grad_() for t in tensors()]
    found = torch.autograd.grad(TopK(5)(*qkv).square().sum(), qkv)
    wanted = torch.autograd.grad(dense(*qkv, Mask(), 5).square().sum(), qkv)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_one_key_is_hard_attention_and_all_keys_are_softmax():
    q, k, v = tensors()
    torch.testing.assert_close(TopK(1)(q, k, v), Hard()(q, k, v))
    torch.testing.assert_close(TopK(40)(q, k, v), Softmax()(q, k, v))
    torch.testing.assert_close(TopK(400)(q, k, v), Softmax()(q, k, v))


def test_more_keys_hold_more_of_the_mass():
    q, k, v = tensors()
    errors = [(TopK(n)(q, k, v) - Softmax()(q, k, v)).norm() for n in (1, 4, 16, 32)]
    assert errors == sorted(errors, reverse=True)


def test_many_tiles_equal_one(monkeypatch):
    qkv = [t.requires_grad_() for t in tensors()]
    whole = TopK(5)(*qkv, Mask(causal=True))
    grads = torch.autograd.grad(whole.square().sum(), qkv)
    monkeypatch.setattr(module, "TILE", 2 * 3 * 40 * 7)
    again = TopK(5)(*qkv, Mask(causal=True))
    torch.testing.assert_close(again, whole)
    for one, other in zip(torch.autograd.grad(again.square().sum(), qkv), grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("keys", [0, -3, 2.5])
def test_a_number_of_keys_below_one_is_refused(keys):
    with pytest.raises(ValueError, match="at least 1"):
        TopK(keys)
