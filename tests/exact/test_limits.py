"""Limits: no weight of a softmax is farther from argmax, or from looking everywhere alike, than its bound says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.exact import hard_bound, soft_bound


def drawn(seed, keys, scale):
    logits = torch.randn(5, keys, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return logits.masked_fill(torch.rand(5, keys, generator=torch.Generator().manual_seed(seed + 1)) < 0.2, -torch.inf)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.floats(0.0, 200.0), st.floats(0.01, 10.0), st.integers(0, 10_000))
def test_every_softmax_lies_within_both_bounds(keys, beta, scale, seed):
    logits = drawn(seed, keys, scale)
    logits = logits[(logits > -torch.inf).any(-1)]
    found = (beta * (logits - logits.amax(-1, keepdim=True))).masked_fill(logits == -torch.inf, -torch.inf).softmax(-1)
    hard = torch.nn.functional.one_hot(logits.argmax(-1), keys).double()
    assert ((found - hard).abs().amax(-1) <= hard_bound(logits, beta) + 1e-15).all()
    seen = logits > -torch.inf
    alike = (found - 1 / seen.double().sum(-1, keepdim=True)).abs().masked_fill(~seen, 0).amax(-1)
    assert (alike <= soft_bound(logits, beta) + 1e-14).all()


def test_the_hard_bound_is_met_to_first_order_where_all_others_are_equal():
    logits = torch.zeros(11, dtype=torch.float64)
    logits[3] = 1
    off = 1 - (30 * logits).softmax(-1)[3]
    assert 0.999 < off / hard_bound(logits, 30.0) <= 1


def test_equal_largest_logits_have_no_argmax_to_come_near():
    assert hard_bound(torch.tensor([1.0, 1.0, 0.0]), 1e6) == 2


def test_an_infinite_beta_is_a_limit_and_no_nan():
    ties = torch.tensor([[1.0, 1.0, 0.0], [2.0, 1.0, -torch.inf], [1.0, 1.0, 1.0]])
    assert hard_bound(ties, torch.inf).tolist() == [2, 0, 2]
    torch.testing.assert_close(soft_bound(ties, torch.inf), torch.tensor([2 / 3, 1 / 2, 0]))


@pytest.mark.parametrize("bound", [hard_bound, soft_bound])
def test_bad_input_is_told(bound):
    with pytest.raises(ValueError, match=r"beta is -1\.0; an inverse temperature is 0 or more"):
        bound(torch.ones(3), -1.0)
    with pytest.raises(ValueError, match=r"logits are \(3, 0\)"):
        bound(torch.ones(3, 0), 1.0)
    with pytest.raises(ValueError, match="logits hold nan or inf; give numbers, and -inf for keys that are hidden"):
        bound(torch.tensor([1.0, torch.nan]), 1.0)
