"""Finite edits and removals of tokens equal the edited call, attended again densely."""

from dataclasses import replace

import dense
import pytest
import torch

from heedful import Capture, Mask
from heedful.exact import Removal, delete_token, key_sensitivity, perturb_key, perturb_query, query_sensitivity, value_sensitivity

MASKS = dense.MASKS | dense.SQUARE
EXTRA = {"": {}, "cap": {"cap": 1.5}, "null": {"null": torch.tensor([0.5, -3.0, 3.0, 1.0])}, "sharp": {"scale": 8.0}}
N = 9
by_mask = pytest.mark.parametrize("name", list(MASKS))
by_extra = pytest.mark.parametrize("extra", list(EXTRA))


def call(name, extra, dtype=torch.float64):
    mask = MASKS[name](N, N)
    return Capture("layer", *dense.tensors(N, N, dtype=dtype), mask, **{"scale": 0.4, **EXTRA[extra]}, real=mask.real(N))


def out(c):
    return dense.probabilities(c)[0] @ dense.spread(c.v, c.q.shape[1])


def without(c, key):
    hidden = torch.zeros(N, dtype=torch.float64)
    hidden[key] = -torch.inf
    added = c.mask.dense(N, N) + hidden
    return replace(c, mask=Mask(bias=added.clamp_min(torch.finfo(torch.float64).min)))


@by_mask
@by_extra
def test_a_moved_key(name, extra):
    c = call(name, extra)
    for key, size in ((2, 0.1), (0, 5.0), (8, -5.0)):
        change = size * torch.randn(2, 8, dtype=torch.float64)
        k = c.k.clone()
        k[:, :, key] += change
        torch.testing.assert_close(perturb_key(c, key, change), out(replace(c, k=k)), rtol=1e-12, atol=2e-13)


@by_mask
@by_extra
def test_a_moved_query_moves_its_own_output_alone(name, extra):
    c, change = call(name, extra), torch.randn(4, 8, dtype=torch.float64)
    q = c.q.clone()
    q[:, :, 3] += change
    found = perturb_query(c, 3, change)
    torch.testing.assert_close(found, out(replace(c, q=q)), rtol=1e-12, atol=2e-13)
    still = torch.arange(N) != 3
    assert torch.equal(found[:, :, still], perturb_query(c, 3, 0 * change)[:, :, still])


@by_mask
@by_extra
def test_a_deleted_token(name, extra):
    c = call(name, extra)
    for key in (0, 4, 8):
        torch.testing.assert_close(delete_token(c, key), out(without(c, key)), rtol=1e-12, atol=2e-13)


@by_mask
@by_extra
def test_removals_are_the_norms_of_deletions(name, extra):
    c = call(name, extra)
    gap = torch.stack([delete_token(c, key) - out(c) for key in range(N)], 2)  # (batch, heads, keys, queries, width)
    gap = gap if c.real is None else gap * c.real[:, None, None, :, None]
    truth = torch.linalg.vector_norm(gap, dim=(3, 4))
    found = Removal.of(c)
    torch.testing.assert_close(found.norms, truth, rtol=1e-10, atol=1e-9 * float(truth.max()))
    real = 1 if c.real is None else c.real[:, None, :, None]
    whole = torch.linalg.vector_norm(out(c) * real, dim=(1, 2, 3))
    torch.testing.assert_close(found.layer, torch.linalg.vector_norm(truth, dim=1) / whole[:, None], rtol=1e-9, atol=1e-10)
    single = Removal.of(call(name, extra, torch.float32))
    torch.testing.assert_close(single.norms.double(), truth, rtol=1e-3, atol=2e-5 * float(truth.max()))


def test_a_nearly_hard_head_keeps_the_digits_of_its_deletions():
    q, k, v = dense.tensors(32, 32, seed=4)
    c = Capture("layer", q * 20, k, v + 10, scale=0.5)
    assert c.rows.peak.median() > 0.99
    high = replace(c, q=c.q.double(), k=c.k.double(), v=c.v.double())
    torch.testing.assert_close(Removal.of(c).norms.double(), Removal.of(high).norms, rtol=1e-3, atol=1e-3)


def test_the_only_token_leaves_nothing_behind():
    q, k, v = dense.tensors(1, 1, dtype=torch.float64)
    c = Capture("layer", q, k, v)
    assert delete_token(c, 0).abs().max() == 0
    torch.testing.assert_close(Removal.of(c).norms, dense.spread(v, 4).norm(dim=-1))
    assert Removal.of(c).ranked() == [[0], [0]]


def test_tokens_are_ranked_by_what_their_removal_changes_over_all_heads():
    q, k, v = dense.tensors(12, 12, dtype=torch.float64)
    v[0, :, 7], v[1, :, 3] = v[0, :, 7] * 50, v[1, :, 3] * 50
    found = Removal.of(Capture("layer", q, k, v))
    assert [order[0] for order in found.ranked(3)] == [7, 3]
    assert [len(order) for order in found.ranked(3)] == [3, 3]
    assert sorted(found.ranked()[0]) == list(range(12))


@by_mask
def test_first_order_norms_are_those_of_the_dense_jacobian(name):
    c = call(name, "")
    real = 1 if c.real is None else c.real[:, None, :, None]
    p = dense.probabilities(c)[0]
    torch.testing.assert_close(key_sensitivity(c), (dense.moved(c) * real).sum(2).sqrt(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(value_sensitivity(c), (p * real).square().sum(2).sqrt())
    k, v = dense.spread(c.k, 4), dense.spread(c.v, 4)
    gap = v[:, :, None] - (p @ v)[:, :, :, None]
    truth = c.scale * torch.einsum("bhij,bhijw,bhjd->bhiwd", p, gap, k).flatten(-2).norm(dim=-1)
    torch.testing.assert_close(query_sensitivity(c).nan_to_num(0), truth, rtol=1e-9, atol=1e-9)
    some = query_sensitivity(c, torch.tensor([2, 5]))
    torch.testing.assert_close(some, query_sensitivity(c)[..., [2, 5]], equal_nan=True)


def test_edits_of_what_is_not_there_are_refused():
    c = call("everything", "")
    with pytest.raises(ValueError, match="key 9 is not there; the call has 9"):
        delete_token(c, 9)
    with pytest.raises(ValueError, match="query -10 is not there"):
        perturb_query(c, -10, torch.zeros(8))
    with pytest.raises(ValueError, match="the change is"):
        perturb_key(c, 0, torch.zeros(4, 8))
    with pytest.raises(ValueError, match="the change holds nan"):
        perturb_key(c, 0, torch.full((8,), torch.nan))


@pytest.mark.parametrize(("dtype", "depth"), [(torch.float32, 200.0), (torch.float64, 900.0)])
def test_a_key_that_no_float_saw_may_be_moved_to_where_it_holds_most(dtype, depth):
    q, k, v = (
        torch.ones(1, 1, 2, 1, dtype=dtype),
        torch.tensor([0.0, -depth, 0.5], dtype=dtype).view(1, 1, 3, 1),
        torch.eye(3, dtype=dtype),
    )
    moved = torch.tensor([0.0, 1.0, 0.5], dtype=dtype).softmax(-1).expand(2, 3)
    found = perturb_key(Capture("layer", q, k, v[None, None]), 1, torch.tensor([depth + 1], dtype=dtype))
    torch.testing.assert_close(found[0, 0], moved)
