"""The norms found by sweeps equal those of a singular value decomposition."""

import dense
import pytest
import torch

from heedful.attention import Capture, Mask
from heedful.ops.spectrum import of_entry, spectral_norms


def norms(p):
    """|P|_2 and the centred norm over the rows that see something, of one entry's (heads, queries, keys)."""
    p = p[:, p.sum((0, 2)) > 0]
    return tuple(torch.linalg.svdvals(x)[:, 0] for x in (p, p - p.mean(1, keepdim=True)))


def found(call, entry=0):
    valid, real = call.rows.valid[entry].nonzero()[:, 0], call.mask.keys
    keys = torch.arange(call.k.shape[2]) if real is None else real[entry].nonzero()[:, 0]
    return spectral_norms(call.q[entry : entry + 1], of_entry(call.logits, entry), valid, keys, call.columns.load[entry])


@pytest.mark.parametrize("name", list(dense.MASKS | dense.SQUARE))
def test_norms_equal_the_singular_values_under_every_mask(name):
    q, k, v = dense.tensors(70, 70)
    call = Capture("layer", q, k, v, (dense.MASKS | dense.SQUARE)[name](70, 70), 0.4)
    for entry in range(2):
        for mine, truth in zip(found(call, entry), norms(dense.probabilities(call)[0][entry]), strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("std", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("causal", [False, True])
def test_flat_spectra_of_longer_texts_are_found_to_a_thousandth(std, causal):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 400, 16, generator=g) for _ in range(3))
    call = Capture("layer", q * std, k, v, Mask(causal=causal), 0.25)
    for mine, truth in zip(found(call), norms(dense.probabilities(call)[0][0]), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-3, atol=0)
        assert (mine <= truth * (1 + 1e-5)).all()


def test_a_collapsed_head_keeps_the_digits_of_its_small_centred_norm():
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 64, 8, generator=g) for _ in range(2))
    call = Capture("layer", 5 * q[:, :, :1] + 1e-3 * q, k, k, scale=0.3)
    whole, centred = norms(dense.probabilities(call)[0][0])
    assert centred < 2e-3 * whole
    torch.testing.assert_close(found(call)[1], centred, rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_texts_of_fewer_tokens_than_vectors_are_exact(size):
    q, k, v = dense.tensors(size, size)
    call = Capture("layer", q, k, v)
    for mine, truth in zip(found(call), norms(dense.probabilities(call)[0][0]), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)
