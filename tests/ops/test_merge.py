"""Partial attentions over disjoint keys add up exactly."""

import dense
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.attention import Mask
from heedful.ops import hop, merge


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.sampled_from([0.1, 1.0, 30.0]))
def test_the_parts_of_the_keys_add_up_to_the_whole(cuts, scale):
    q, k, v = dense.tensors(7, sum(cuts), dtype=torch.float64)
    found = merge(*(hop(q, a, b, scale=scale) for a, b in zip(k.split(cuts, 2), v.split(cuts, 2), strict=True)))
    truth = dense.hop(q, k, v, None, Mask(), scale)
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_order_and_grouping_do_not_matter():
    q, k, v = dense.tensors(7, 12)
    a, b, c = (hop(q, k[:, :, i : i + 4], v[:, :, i : i + 4]) for i in (0, 4, 8))
    for other in (merge(c, a, b), merge(merge(a, b), c), merge(a, merge(b, c))):
        for x, y in zip(merge(a, b, c), other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_out_and_lse():
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, 4 if i % 2 == 0 else 1, generator=g, dtype=torch.float64).requires_grad_() for i in range(4)]

    def call(o1, l1, o2, l2):
        return merge((o1, l1[..., 0]), (o2, l2[..., 0]))

    assert torch.autograd.gradcheck(call, parts)


def test_a_part_that_saw_no_key_adds_nothing():
    q, k, v = dense.tensors(5, 6)
    seen, blind = hop(q, k, v), hop(q, k, v, mask=Mask(keys=torch.zeros(2, 6, dtype=torch.bool)))
    out, lse = merge(seen, blind)
    assert torch.equal(out, seen[0])
    assert torch.equal(lse, seen[1])
    out, lse = merge(blind, blind)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_blind_rows_send_back_zeros_and_no_nan():
    out, lse = torch.randn(2, 3, requires_grad=True), torch.tensor([0.0, -torch.inf], requires_grad=True)
    other, none = torch.randn(2, 3, requires_grad=True), torch.tensor([1.0, -torch.inf], requires_grad=True)
    merged, total = merge((out, lse), (other, none))
    (merged.sum() + total[0]).backward()
    assert all(t.grad.isfinite().all() for t in (out, lse, other, none))


def test_huge_normalisers_do_not_overflow():
    parts = [(torch.full((1, 2), x), torch.tensor([float(lse)])) for x, lse in ((1.0, 5000), (3.0, 5000), (9.0, -5000))]
    out, lse = merge(*parts)
    torch.testing.assert_close(out, torch.full((1, 2), 2.0))
    torch.testing.assert_close(lse, torch.tensor([5000 + torch.log(torch.tensor(2.0))]))


def test_half_precision_outputs_keep_their_dtype():
    q, k, v = dense.tensors(5, 6, dtype=torch.bfloat16)
    out, lse = merge(hop(q, k, v), hop(q, k, v))
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32


def test_nothing_to_merge_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        merge()
