"""The bound on rank collapse holds wherever its conditions do, and says when it says nothing."""

import math

import pytest
import torch

from heedful.exact import SelfAttention, collapse_bound, composite_norm, residual, residual_recursion
from heedful.exact.bound import LARGEST


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trial(seed, heads=2, tokens=6, dim=8, count=2, size=0.3):
    weights = size * drawn(count, 4, dim, dim, seed=seed) / dim**0.5
    return size * drawn(tokens, dim, seed=seed + 1000), [SelfAttention.of(*w, heads=heads) for w in weights]


def test_the_largest_spread_is_the_root_of_its_equation():
    assert math.isclose(math.exp(LARGEST), 1 + 2 * LARGEST, rel_tol=1e-15)


@pytest.mark.parametrize("seed", range(60))
def test_it_holds_where_its_conditions_do(seed):
    size, heads = (0.2, 0.5, 1.0)[seed % 3], (1, 2, 4)[seed // 3 % 3]
    x, layers = trial(seed, heads=heads, size=size)
    report = collapse_bound(x, layers)
    reached = residual_recursion(x, layers, "image")[1:]
    found = torch.stack([composite_norm(a.unit).log10() + a.log10 for a in reached])
    if report.valid:
        assert (found <= report.log10_bound).all()
        plain = residual(layers[0](x))  # and so for the residual itself, but for the factor of the mean
        assert composite_norm(plain).log10() <= report.log10_bound[0] + torch.tensor(2.0).log10()


def test_most_small_networks_meet_the_conditions_and_large_ones_do_not():
    assert sum(collapse_bound(*trial(seed)).valid for seed in range(20)) > 15
    assert not collapse_bound(*trial(0, size=6.0)).valid
    assert collapse_bound(*trial(0, size=6.0)).vacuous


def test_below_its_threshold_a_layer_contracts_and_the_bound_is_not_vacuous():
    x, layers = trial(0, size=0.1)
    report = collapse_bound(x, layers)
    assert (report.log10_residual < report.log10_threshold).all()
    assert not report.vacuous
    x = x * 10 ** float(report.log10_threshold[0] - report.log10_residual[0]) * 1.5  # above it
    assert collapse_bound(x, layers).log10_bound[0] > collapse_bound(x, layers).log10_residual[0]


def test_its_parts_are_what_they_are_called():
    x, layers = trial(3, count=1)
    report, (one,) = collapse_bound(x, layers), layers
    rest = residual(x)
    e = one.scale * rest @ one.query @ one.key.mT @ rest.mT
    gaps = (e[..., :, None] - e[..., None, :]).abs()  # (heads, i, j, j')
    torch.testing.assert_close(report.D[0], gaps.amax((-2, -1)))
    gamma = (gaps.amax((-2, -1)).sum(-1) / gaps.sum(1).amax((-2, -1))).sqrt().amax()
    torch.testing.assert_close(report.gamma[0], gamma)
    scores = torch.linalg.matrix_norm(one.query @ one.key.mT, 1)
    assert (report.beta[0] >= scores * composite_norm(one.map) - 1e-12).all()
    factor = 4 * report.gamma[0] * report.beta[0] * 2 * one.scale
    torch.testing.assert_close(10 ** report.log10_bound[0], factor * composite_norm(rest) ** 3)
    torch.testing.assert_close(10 ** report.log10_threshold[0], factor**-0.5)


def test_a_bound_on_head_matrices_in_the_composite_norm_alone_would_not_add_up():
    """Two heads, one with a large row and one with a large column: beta must exceed both their products."""
    n = 16
    column = torch.zeros(n, n, dtype=torch.float64)
    column[:, 0] = 1
    maps = torch.stack([column, column.mT.contiguous()])
    zeros = torch.zeros(2, n, dtype=torch.float64)
    one = SelfAttention(torch.eye(n).double().expand(2, n, n), torch.eye(n).double().expand(2, n, n), maps, 1.0, zeros, zeros[0])
    assert collapse_bound(drawn(4, n), [one]).beta[0] == 16 > composite_norm(maps).amax() == 4


def test_the_states_of_another_model_may_be_given():
    x, layers = trial(5)
    states = [x, layers[0](x)]
    report = collapse_bound(states, layers)
    torch.testing.assert_close(10**report.log10_residual, torch.stack([composite_norm(residual(s)) for s in states]))
    with pytest.raises(ValueError, match="1 states were given for 2 layers"):
        collapse_bound(states[:1], layers)
    with pytest.raises(ValueError, match="nan or infinite"):
        collapse_bound([x, x / 0], layers)


def test_tokens_that_are_one_are_bounded_by_nothing():
    report = collapse_bound(torch.ones(3, 8, dtype=torch.float64), trial(0)[1])
    assert report.valid
    assert (report.log10_bound == -torch.inf).all()
    assert (report.gamma == 1).all()


def test_the_entrywise_inequality_holds_with_absolute_values_only():
    signed = absolute = 0
    for seed in range(40):
        rest, logits, shared = drawn(6, 4, seed=seed), 0.3 * drawn(6, 6, seed=seed + 50), drawn(6, seed=seed + 90)
        u, p = shared.softmax(-1), (shared + logits).softmax(-1)
        spread = (logits.amax(-1) - logits.amin(-1))[:, None]
        signed += bool((p @ rest > u @ rest + 2 * spread * (u @ rest)).any())
        absolute += bool((((p - u) @ rest).abs() > torch.expm1(spread) * (u @ rest.abs()) * (1 + 1e-12)).any())
    assert signed > 30
    assert absolute == 0
