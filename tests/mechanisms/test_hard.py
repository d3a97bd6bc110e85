"""Hard: the value of the best visible key."""

import torch

from heedful.attention import Mask
from heedful.mechanisms import Hard
from heedful.mechanisms import hard as module


def test_each_query_takes_the_value_of_its_best_key():
    q, k, v = torch.randn(3, 2, 3, 40, 8)
    best = (q @ k.mT).argmax(-1, keepdim=True).expand(-1, -1, -1, 8)
    assert torch.equal(Hard()(q, k, v), v.gather(-2, best))


def test_only_visible_keys_can_win():
    q, k, v = torch.randn(3, 2, 3, 40, 8)
    mask = Mask(causal=True, window=5)
    best = (q @ k.mT + mask.dense(40, 40)).argmax(-1, keepdim=True).expand(-1, -1, -1, 8)
    assert torch.equal(Hard()(q, k, v, mask), v.gather(-2, best))


def test_the_first_of_equal_keys_wins():
    q, v = torch.randn(2, 1, 1, 6, 8)
    assert torch.equal(Hard()(q, torch.zeros(1, 1, 6, 8), v), v[:, :, :1].expand_as(v))


def test_only_the_winning_values_get_a_gradient():
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 2, 20, 8).unbind())
    Hard()(q, k, v).sum().backward()
    assert q.grad is None or not q.grad.any()
    assert k.grad is None or not k.grad.any()
    assert torch.equal(torch.autograd.grad(Hard()(q, k, v).sum(), v)[0].sum((-2, -1)), torch.full((1, 2), 20.0 * 8))


def test_null_logits_take_a_query_that_no_key_beats():
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    assert (Hard()(q, k, v, null=torch.full((2,), 1e4)) == 0).all()
    assert torch.equal(Hard()(q, k, v, null=torch.full((2,), -1e4)), Hard()(q, k, v))


def test_many_tiles_equal_one(monkeypatch):
    q, k, v = torch.randn(3, 2, 3, 40, 8)
    whole = Hard()(q, k, v, Mask(causal=True))
    monkeypatch.setattr(module, "TILE", 2 * 3 * 40 * 7)
    assert torch.equal(Hard()(q, k, v, Mask(causal=True)), whole)
