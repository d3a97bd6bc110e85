"""Constructions: heads that are an identity, a permutation or a convolution, within the bound they promise."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.exact import Construction, convolution_heads, identity_heads, permutation_heads
from heedful.mechanisms import Hard, Softmax

sizes = given(st.integers(1, 30), st.integers(2, 12), st.floats(0.0, 300.0), st.integers(0, 10_000))


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def off(made, beta):
    return (made.attention(beta) - made.attention(math.inf)).abs()


def convolved(x, kernel, offsets):
    """The convolution as loops, the edge tokens repeated."""
    out = torch.zeros(len(x), kernel.shape[2], dtype=x.dtype)
    for i in range(len(x)):
        for tap, offset in zip(kernel, offsets, strict=True):
            out[i] += x[min(max(i + offset, 0), len(x) - 1)] @ tap
    return out


@settings(max_examples=150, deadline=None)
@sizes
def test_identity_and_permutation_stay_within_their_bound(tokens, dim, beta, seed):
    x = drawn(seed, tokens, dim)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    for made, wanted in ((identity_heads(x), torch.eye(tokens)), (permutation_heads(x, order), torch.eye(tokens)[order])):
        assert (made.attention(beta) - wanted).abs().max() <= made.bound(beta) + 1e-15
        assert torch.equal(made.attention(math.inf)[0], wanted.double())
        values = (x[:, None] - x).norm(dim=-1).max()
        assert (made(x, beta) - wanted.double() @ x).norm(dim=-1).max() <= made.bound(beta) * values + 1e-13


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.floats(0.0, 60.0), st.integers(0, 10_000))
def test_convolutions_stay_within_their_bound(tokens, taps, beta, seed):
    kernel, x = drawn(seed, taps, 3, 2), drawn(seed + 1, tokens, 3)
    made = convolution_heads(kernel, tokens)
    assert made.margin >= 1
    assert off(made, beta).max() <= made.bound(beta) + 1e-15
    torch.testing.assert_close(made(x), convolved(x, kernel, range(-((taps - 1) // 2), taps // 2 + 1)))


def test_the_bound_is_met_where_all_other_keys_are_as_far():
    made = identity_heads(torch.eye(9, dtype=torch.float64))  # all cosines 0
    error = off(made, 30.0).max()
    assert made.margin == 1
    assert 0.99 * made.bound(30.0) < error <= made.bound(30.0)


@pytest.mark.parametrize("alpha, error", [(20, 3e-8), (40, 1e-16)])
def test_a_convolution_of_five_taps_is_as_close_as_the_theory_says(alpha, error):
    kernel, x = drawn(0, 5, 8, 8), drawn(1, 64, 8)
    wanted = convolved(x, kernel, range(-2, 3))
    made = convolution_heads(kernel, 64)
    assert (made(x, alpha) - made(x)).norm() / wanted.norm() < error


def test_a_convolution_is_torchs_own_and_may_be_causal_or_dilated():
    kernel, x = drawn(0, 3, 4, 5), drawn(1, 20, 4)
    for offsets, pad, dilation in (((-2, -1, 0), (2, 0), 1), ((-4, -2, 0), (4, 0), 2), ((-1, 0, 1), (1, 1), 1)):
        padded = F.pad(x.mT[None], pad, mode="replicate")
        wanted = F.conv1d(padded, kernel.permute(2, 1, 0), dilation=dilation)[0].mT
        torch.testing.assert_close(convolution_heads(kernel, 20, offsets)(x, beta=50.0), wanted)


def test_as_many_heads_as_taps_are_needed():
    kernel = drawn(0, 5, 4, 4)
    made = convolution_heads(kernel, 12)
    # heads that look by position are the map sum_h P_h (x) W_h; as the matrix sum_h vec(P_h) vec(W_h)^T its rank is at most their number
    convolution = torch.einsum("hij,hab->ijab", made.attention(math.inf), kernel).reshape(12 * 12, 4 * 4)
    singular = torch.linalg.svdvals(convolution)
    assert torch.linalg.matrix_rank(convolution) == 5
    assert singular[1:].norm() > 0.5 * singular.norm()  # what the best single head misses (Eckart and Young)
    assert singular[4] > 0.1 * singular[0]  # and the best four


def test_the_mechanisms_of_the_library_do_what_the_construction_says():
    x = drawn(3, 10, 16)
    made = permutation_heads(x, torch.arange(9, -1, -1))
    call = made.q[None], made.k[None], x[None, None]
    torch.testing.assert_close(Softmax(beta=35.0)(*call, scale=1.0)[0, 0], made(x, 35.0))
    torch.testing.assert_close(Hard()(*call)[0, 0], made(x))


def test_a_large_beta_is_hard_and_zero_looks_everywhere():
    made = identity_heads(drawn(0, 12, 8))
    assert (made.attention(0.0) == 1 / 12).all()
    errors = [float(off(made, beta).max()) for beta in (0.0, 1.0, 10.0, 100.0, 1000.0)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("error", [1e-2, 1e-8])
def test_beta_is_the_one_whose_bound_is_the_error(error):
    made = convolution_heads(drawn(0, 3, 2, 2), 50)
    assert math.isclose(made.bound(made.beta(error)), error, rel_tol=1e-9)
    assert off(made, made.beta(error)).max() <= error


def test_keys_of_unequal_lengths_are_no_identity_however_hard():
    k = torch.tensor([[1.0, 0.0], [3.0, 0.5], [0.0, 1.0]], dtype=torch.float64)
    raw = Construction(k[None], k[None], torch.eye(2, dtype=torch.float64)[None], torch.arange(3)[None])
    assert raw.margin < 0
    assert raw.attention(200.0)[0, 0, 1] > 0.99
    assert identity_heads(k).attention(200.0)[0, 0, 0] > 0.9


def test_positions_are_exact_in_single_precision():
    made = convolution_heads(torch.randn(3, 2, 2), 2000)
    double = convolution_heads(torch.randn(3, 2, 2).double(), 2000)
    torch.testing.assert_close(made.attention(3.0).double(), double.attention(3.0), atol=1e-6, rtol=1e-6)


def test_what_cannot_be_built_is_refused():
    x = drawn(0, 4, 3)
    with pytest.raises(ValueError, match="each of the 4 tokens once"):
        permutation_heads(x, torch.tensor([0, 1, 1, 3]))
    with pytest.raises(ValueError, match="two tokens look in one direction"):
        identity_heads(torch.cat([x, 2 * x[:1]]))
    with pytest.raises(ValueError, match="token 2 is zero"):
        identity_heads(x * torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None])
    with pytest.raises(ValueError, match="one a tap"):
        convolution_heads(drawn(0, 3, 2, 2), 10, offsets=(0, 1))
    with pytest.raises(ValueError, match="give one above 0"):
        identity_heads(x).beta(0.0)
