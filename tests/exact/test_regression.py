"""Low-rank regression is the optimum, whatever the shape, rank and condition of X; the plain recipe is not."""

import pytest
import torch

from heedful.exact.metric import Metric
from heedful.exact.regression import gradmax, lowrank_regression, lowrank_solution, plain_regression, truncate


def conditioned(rows, dim, condition, seed=0):
    """Rows whose singular values fall evenly, in logarithm, from 1 to 1 / condition."""
    g = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, dim, generator=g, dtype=torch.float64))[0] for n in (rows, dim))
    return u * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), dim, dtype=torch.float64) @ v.mT


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alternating(b, x, y, rank, rounds=300):
    """The optimum by alternating least squares from the best of a few starts."""
    best = None
    for seed in range(4):
        right = drawn(y.shape[1], rank, seed=seed)
        left = right
        for _ in range(rounds):
            left = torch.linalg.pinv(x) @ b @ torch.linalg.pinv((y @ right).mT)
            right = (torch.linalg.pinv(x @ left) @ b @ torch.linalg.pinv(y).mT).mT
        z = left @ right.mT
        best = z if best is None or fit(b, x, y, z) < fit(b, x, y, best) else best
    return best


def fit(b, x, y, z):
    return float((b - x @ z @ y.mT).square().sum())


@pytest.mark.parametrize("rows,dim", [(12, 5), (4, 7), (6, 6)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_it_is_where_alternating_least_squares_end(rows, dim, rank):
    x, b = drawn(rows, dim), drawn(rows, rows, seed=2)
    found = lowrank_regression(b, x, rank).matrix
    assert fit(b, x, x, found) == pytest.approx(fit(b, x, x, alternating(b, x, x, rank)), rel=1e-8)


def test_two_sets_of_rows_have_a_metric_each():
    x, y, b = drawn(9, 4), drawn(7, 3, seed=5), drawn(9, 7, seed=2)
    found = lowrank_regression(b, x, 2, y).matrix
    assert fit(b, x, y, found) == pytest.approx(fit(b, x, y, alternating(b, x, y, 2)), rel=1e-8)


def test_at_condition_1000_the_metric_keeps_what_the_plain_cut_loses():
    found = []
    for seed in range(10):
        x, b = conditioned(40, 16, 1000.0, seed), drawn(40, 40, seed=seed)
        u = torch.linalg.qr(x)[0]
        reachable = float(torch.linalg.svdvals(u.mT @ b @ u)[:4].square().sum())  # of rank 4
        share = [
            (float(b.square().sum()) - fit(b, x, x, f(b, x, 4).matrix)) / reachable for f in (lowrank_regression, plain_regression)
        ]
        found.append(share)
    metric, plain = torch.tensor(found).T
    assert metric.min() >= 0.99
    assert plain.mean() < 0.3


def test_dependent_columns_give_the_shortest_z():
    x, b = drawn(10, 3) @ drawn(3, 6, seed=4), drawn(10, 10, seed=2)
    found = lowrank_regression(b, x, 3).matrix
    pseudo = torch.linalg.pinv(x)
    torch.testing.assert_close(found, pseudo @ b @ pseudo.mT)
    metric = Metric.of(x.mT @ x)
    torch.testing.assert_close(lowrank_solution(x.mT @ b @ x, metric, metric, 2).matrix, lowrank_regression(b, x, 2).matrix)


def test_a_gram_of_condition_above_1e8_is_no_trouble():
    x, b = conditioned(30, 8, 1e6), drawn(30, 30)
    truth = lowrank_regression(b, x, 3)
    metric = Metric.of(x.mT @ x)
    found = lowrank_solution(x.mT @ b @ x, metric, metric, 3)
    assert torch.linalg.cond(x.mT @ x) > 1e8
    assert fit(b, x, x, found.matrix) == pytest.approx(fit(b, x, x, truth.matrix), rel=1e-4)


def test_one_row_is_enough():
    x, b = drawn(1, 5), torch.ones(1, 1, dtype=torch.float64)
    assert lowrank_regression(b, x, 1).captured == pytest.approx(1)
    assert fit(b, x, x, lowrank_regression(b, x, 1).matrix) < 1e-25


def test_more_columns_than_the_rank_allows_are_not_made_up():
    x = drawn(10, 6)
    b = x @ drawn(6, 2, seed=3) @ drawn(2, 6, seed=4) @ x.mT
    assert lowrank_regression(b, x, 5).rank == 2
    assert gradmax(torch.zeros(3, 3), 2).rank == 0


def test_the_metric_of_an_infinite_damping_is_euclidean():
    n, gram = drawn(2, 4, 4), drawn(2, 4, 4).square()
    flat = Metric.of(gram @ gram.mT, float("inf"))
    torch.testing.assert_close(lowrank_solution(n, flat, flat, 2).matrix, gradmax(n, 2).matrix)


def test_truncation_in_a_metric_loses_least_there():
    z, left, right = drawn(5, 5), (Metric.of(drawn(5, 9, seed=s) @ drawn(5, 9, seed=s).mT) for s in (7,)), None
    left = next(left)
    kept = truncate(z, left, right, 2)
    lost = (left.root @ (z - kept.matrix)).square().sum()
    assert float(lost) == pytest.approx(float(kept.strengths[2:].square().sum()))
    assert lost <= (left.root @ (z - truncate(z, None, None, 2).matrix)).square().sum()


@pytest.mark.parametrize(
    "b,x,rank,words",
    [
        (torch.eye(3), torch.ones(4, 2), 1, "b has shape"),
        (torch.eye(4), torch.ones(4, 2), 0, "rank is 0"),
        (torch.full((4, 4), torch.nan), torch.ones(4, 2), 1, "NaN"),
    ],
)
def test_bad_input_is_named(b, x, rank, words):
    with pytest.raises(ValueError, match=words):
        lowrank_regression(b, x, rank)
