"""Sensitivities equal the Jacobians that autograd makes."""

import dense
import pytest
import torch

from heedful.attention import Capture, Mask
from heedful.ops.sensitivity import key_sums, query_norms

MASKS = dense.MASKS | dense.SQUARE
EXTRA = [{}, {"cap": 1.5}, {"null": torch.tensor([0.5, -3.0, 3.0, 1.0])}, {"cap": 1.0, "null": torch.zeros(4)}]
by_mask = pytest.mark.parametrize("name", list(MASKS))
by_extra = pytest.mark.parametrize("extra", EXTRA, ids=["", "cap", "null", "both"])
N = 9


def attend(q, k, v, mask, extra):
    """Dense, each query head with its own k and v, float64."""
    call = Capture("layer", q, k, v, mask, 0.4, **extra)
    return dense.probabilities(call)[0] @ v


def jacobian(name, extra, of):
    """The Jacobian of the outputs by q (0) or k (1), summed over entries and heads that do not touch, in float64."""
    mask = MASKS[name](N, N)
    q, k, v = dense.tensors(N, N, dtype=torch.float64)
    parts = [q, dense.spread(k, dense.HEADS), dense.spread(v, dense.HEADS)]

    def call(x):  # one output for each (entry, head): they depend on their own x only
        return attend(*parts[:of], x, *parts[of + 1 :], mask, extra).sum((0, 1))

    return torch.autograd.functional.jacobian(call, parts[of], vectorize=True)  # (queries, width, batch, heads, tokens, dim)


@by_mask
@by_extra
def test_key_sums_are_column_sums_of_the_squared_jacobian(name, extra):
    truth = jacobian(name, extra, 1).square().sum((0, 1, -1))
    q, k, v = dense.tensors(N, N)
    call = Capture("layer", q, k, v, MASKS[name](N, N), 0.4, **extra)
    found = key_sums(q, v, call.logits)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-6 * float(truth.max()))
    torch.testing.assert_close(call.columns.moved, found)


@by_mask
@by_extra
def test_query_norms_are_norms_of_the_jacobian(name, extra):
    found = jacobian(name, extra, 0)
    truth = torch.stack([found[i, :, :, :, i].square().sum((0, -1)).sqrt() for i in range(N)], -1)  # (batch, heads, queries)
    q, k, v = dense.tensors(N, N)
    call = Capture("layer", q, k, v, MASKS[name](N, N), 0.4, **extra)
    rows = torch.tensor([[0, 3, 8, 5], [2, 2, 7, 0]])
    norms = query_norms(q.take_along_dim(rows[:, None, :, None], 2), v, call.logits, rows)
    truth = truth.take_along_dim(rows[:, None].expand(-1, 4, -1), -1)
    torch.testing.assert_close(norms.double().nan_to_num(0), truth, rtol=2e-5, atol=1e-6 * float(truth.max()))


def test_a_nearly_hard_head_keeps_its_digits():
    q, k, v = dense.tensors(32, 32, seed=4)
    call = Capture("layer", q * 20, k, v + 10, scale=0.5)
    assert call.rows.peak.median() > 0.99
    truth = dense.moved(call).sum(2)
    torch.testing.assert_close(call.columns.moved.double(), truth, rtol=1e-3, atol=1e-5 * float(truth.max()))


def test_padding_rows_and_unsampled_rows_are_left_out():
    q, k, v = dense.tensors(17, 17)
    real = dense.padding(17)
    call = Capture("layer", q, k, v, Mask(keys=real), 0.4, real=real)
    sample = torch.tensor([1, 4, 5, 12])
    truth = (dense.moved(call) * real[:, None, :, None])[:, :, sample].sum(2)
    found = key_sums(q, v, call.logits, sample, real)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-6 * float(truth.max()))


def test_a_query_that_sees_no_key_has_no_norm():
    q, k, v = dense.tensors(4, 4)
    logits = Capture("layer", q, k, v, Mask(keys=torch.zeros(2, 4, dtype=torch.bool))).logits
    assert query_norms(q, v, logits, torch.arange(4).expand(2, 4)).isnan().all()
