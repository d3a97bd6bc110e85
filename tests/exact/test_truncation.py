"""Truncation by moments: losses are errors, no other dims do better, and what was not seen in the data does no harm."""

import pytest
import torch

from heedful.exact import frequency_pairs, logit_factors, mixing_again, value_factors


def data(count=300, dim=6, group=2):
    torch.manual_seed(0)
    shape = torch.tensor([5.0, 3, 1, 0.5, 0.2, 0.1], dtype=torch.float64)
    q = torch.randn(group, count, dim, dtype=torch.float64) * shape @ torch.randn(group, dim, dim, dtype=torch.float64)
    return q, torch.randn(count, dim, dtype=torch.float64) @ torch.randn(dim, dim, dtype=torch.float64)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_loss_of_a_group_is_the_error_of_all_its_logits(rank):
    q, k = data()
    found = logit_factors(q.mT @ q / 300, k.T @ k / 300)
    error = (q @ k.T - (q @ found.left[..., :rank]) @ (k @ found.right[:, :rank]).T).square().mean((1, 2)).sum()
    torch.testing.assert_close(error, found.loss[rank:].sum(), atol=1e-8, rtol=1e-6)


def test_alternating_least_squares_from_there_finds_nothing_better():
    q, k = data()
    found, rank = logit_factors(q.mT @ q, k.T @ k), 2
    right = found.right[:, :rank]
    for _ in range(50):
        left = torch.linalg.lstsq(k @ right, k).solution.mT  # queries map best for these keys
        stacked = torch.cat([q[0] @ left, q[1] @ left])
        right = torch.linalg.lstsq(stacked, torch.cat([q[0], q[1]])).solution.mT
    best = sum((one @ k.T - one @ left @ (k @ right).T).square().sum() for one in q)
    assert found.loss[rank:].sum() <= best * (1 + 1e-8)


def test_full_rank_gives_back_what_was_not_in_the_data_too():
    q, k = data(group=1)
    q[..., -2:] = 0
    found = logit_factors(q.mT @ q / 300, k.T @ k / 300)
    torch.testing.assert_close(found.left[0] @ found.right.mT, torch.eye(6, dtype=torch.float64), atol=1e-5, rtol=0)


def test_shared_values_serve_each_head_of_a_group_with_its_own_mixing():
    o, _ = data()
    w = torch.randn(2, 6, 9, dtype=torch.float64)
    moments = o.mT @ o / 300
    left = value_factors(moments, w).left[0, :, :3]
    again, lost = mixing_again(moments, left, w)
    error = (o @ w - o @ left @ again).square().sum(-1).mean(-1)
    torch.testing.assert_close(error, lost)
    nudged = again + 1e-3 * torch.randn_like(again)
    assert ((o @ w - o @ left @ nudged).square().sum(-1).mean(-1) > error).all()


def test_gains_let_the_pairs_that_stay_stand_in_for_the_others():
    q, k = data(dim=6, group=2)
    queries, keys = q.mT @ q / 300, k.T @ k / 300
    found, count = frequency_pairs(queries, keys, 3), 2
    kept = found.order[:count].sort().values
    rows = torch.cat([kept, kept + 3])

    def error(gains):
        off = q @ k.T - (q[..., rows] * gains.repeat(1, 2)[:, None]) @ k[:, rows].T
        return off.square().mean((1, 2)).sum()

    assert error(found.gains(count)) <= error(torch.ones(2, count, dtype=torch.float64))
    for head in range(2):
        for one in range(count):
            nudged = found.gains(count)
            nudged[head, one] += 0.01
            assert error(nudged) > error(found.gains(count))
